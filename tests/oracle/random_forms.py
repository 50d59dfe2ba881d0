"""The other forms of step times, and padded steps, laid over a random world: as long on the whole, with bends of their own."""

import random
from dataclasses import replace

from tests.oracle.equations import t_dec, t_pre
from tests.oracle.model import OracleScenario


def padded(s: OracleScenario) -> OracleScenario:
    """The world with engines that pad."""
    return replace(s, token_count="padded")


def piecewise(s: OracleScenario, seed: int) -> OracleScenario:
    """Several knees in place of one, in prefill and in decode, of engines that pad."""
    rng = random.Random(f"piecewise {seed}")
    pre, dec = s.t_pre, s.t_dec
    tokens, batch = _knots(rng, 2.0 * s.max_num_batched_tokens), _knots(rng, 1.5 * s.max_num_seqs)
    return replace(
        s,
        t_pre={"form": "piecewise", "tok_knots": tokens, "tok_slopes": _slopes(rng, tokens, pre["tok_slope_below"])}
        | {name: pre[name] for name in ("b0", "b1", "b2")},
        t_dec={"form": "piecewise", "alpha0": dec["alpha0"], "batch_knots": batch, "batch_slopes": _slopes(rng, batch, dec["alpha1"])}
        | {"beta0": max(dec["beta0"], 0.0), "beta1": dec["beta1"]},
        token_count="padded",
    )


def table(s: OracleScenario, seed: int) -> OracleScenario:
    """Grids of these step times, each made uneven, some over one quantity only."""
    rng = random.Random(f"table {seed}")
    # From the least step on, or times would reach 0 before it: a coefficients file like that is refused.
    tokens = [1, *sorted(rng.sample(range(2, 2000), rng.randint(1, 6)))]
    batch = [1, *sorted(rng.sample(range(2, 2 * s.max_num_seqs + 2), rng.randint(1, 2)))]
    lengths = rng.choice((None, [1.0, 150.0], [10.0, 64.0, 700.0]))
    contexts = rng.choice((None, [1.0, 300.0], [20.0, 100.0, 101.0, 900.0]))
    pre = [[t_pre(s.t_pre, n, 1, n * length) for length in lengths or [100.0]] for n in tokens]
    dec = [[t_dec(s.t_dec, b, b * context) for context in contexts or [100.0]] for b in batch]
    pre, dec = _uneven(rng, pre), _uneven(rng, dec)
    return replace(
        s,
        t_pre={"form": "table", "n_tokens": _floats(tokens), "seq_len": lengths, "time_s": pre if lengths else [row[0] for row in pre]},
        t_dec={"form": "table", "batch": _floats(batch), "mean_ctx": contexts, "time_s": dec if contexts else [row[0] for row in dec]},
    )


def _floats(values: list[int]) -> list[float]:
    return [float(value) for value in values]


def _knots(rng: random.Random, most: float) -> list[float]:
    return sorted(rng.uniform(0.01, 1.0) * most for _ in range(rng.randint(0, 5)))


def _slopes(rng: random.Random, knots: list[float], usual: float) -> list[float]:
    # Never 0: on a plateau different queues tie, and the last bit of a sum would decide where a request goes.
    return [usual * rng.choice((0.1, 0.5, 1.0, 3.0)) for _ in [*knots, None]]


def _uneven(rng: random.Random, grid: list[list[float]]) -> list[list[float]]:
    """Raised by more and more along both axes, where times change at all, so that more work never takes less time."""
    flat = {value for row in grid for value in row}
    if len(flat) == 1:
        return grid
    along = [0.0]
    for _ in range(max(len(grid), len(grid[0]))):
        along.append(along[-1] + rng.choice((0.0, 0.02, 0.2)))
    raised = [[value * (1.0 + along[i] + along[j]) for j, value in enumerate(row)] for i, row in enumerate(grid)]
    for i, row in enumerate(raised):
        for j in range(len(row)):
            row[j] = max(row[j], raised[i - 1][j] if i else 0.0, row[j - 1] if j else 0.0)
    return raised
