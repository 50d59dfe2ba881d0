"""Seeded small worlds for the policies that decide batches, and for `moer_soft`; shapes come from two kinds of world.

No two data centres and no two requests cost the same, so that the best assignment is one alone.
"""

import random
from collections.abc import Callable

from tests.oracle.equations import t_dec, t_pre
from tests.oracle.model import OracleScenario
from tests.oracle.random_scenarios import Kind, boards, own_dcs, round_trips, step_times

KINDS = (
    Kind((3, 1, 2), (1, 2, 1), 6, 2, 48, 12, 8),
    Kind((1, 3, 2, 1, 1, 1), (1, 1, 1, 1, 2, 1), 8, 4, 60, 10, 10),
)
T_MAX = (3, 5)  # by kind: how often the iterative ILP solves is compiled in
POLICIES = ("ilp", "iterative_ilp", "facility_milp", "green_llm", "moer_cap", "moer_soft")
LOADS = (0.1, 0.3, 0.6, 1.0)  # some policies leave most engines idle
GROUPS = len(KINDS) * len(POLICIES)
WINDOWS_S = (0.05, 0.1, 0.125, 0.25)  # by group: worlds that run side by side have windows of one length


def random_batches(seed: int) -> OracleScenario:
    """The world of a seed: seeds that differ by `GROUPS` are of one kind and one kind of policy."""
    rng = random.Random(2000 + seed)  # worlds of which none is all but decided otherwise
    k = KINDS[seed % len(KINDS)]
    policy = _policy(rng, POLICIES[seed % GROUPS // len(KINDS)], seed % len(KINDS))
    window_s = WINDOWS_S[seed % GROUPS % len(WINDOWS_S)]
    n = rng.choice((40, 70, 100))
    isl, osl = _lengths(rng, n)
    mean_isl, mean_osl = sum(isl) / n, sum(osl) / n
    longest = max(a + b for a, b in zip(isl, osl))
    seconds = step_times(rng, k, window_s, isl, osl, LOADS)
    if policy[0] == "green_llm" and rng.random() < 0.5:
        alone_s = t_pre(seconds["t_pre"], mean_isl, 1, mean_isl**2) + mean_osl * t_dec(seconds["t_dec"], 1, mean_isl)
        seconds = _slower(seconds, rng.uniform(1.5, 3.0) / alone_s)
    schedulers = rng.choice((k.n_schedulers, k.n_schedulers, rng.randint(1, k.n_schedulers)))  # that have any requests
    own = own_dcs(rng, k.n_schedulers, len(k.nodes))
    # The iterative ILP thinks again where requests crowd each other out.
    slack = rng.choice((1.4, 1.8, 2.5, 4.0, 1e4) if policy[0] == "iterative_ilp" else (2.0, 3.0, 5.0, 5.0, 10.0, 1e4, 1e4))
    knee, max_w_per_gpu = boards(seed)
    return OracleScenario(
        window_s=window_s,
        poll_windows=k.poll_windows,
        poll_mode=rng.choice(("sync", "async")),
        ledger_windows=k.ledger_windows,
        horizon_windows=k.horizon_windows,
        arrival_s=_arrivals(rng, n, window_s, k),
        isl=isl,
        osl=osl,
        scheduler=[rng.randrange(schedulers) for _ in range(n)],
        decision=_decision(rng, window_s),
        nodes=list(k.nodes),
        engines_per_node=list(k.engines_per_node),
        pue=[round(rng.uniform(1.0, 1.7), 6) for _ in k.nodes],
        ci=_ci(rng, len(k.nodes), k.horizon_windows, equal_ok=policy[0] != "moer_soft"),
        own=own,
        rtt_s=round_trips(rng, own, len(k.nodes), window_s),
        batching=rng.choice(("study", "prefill_first")),
        max_num_seqs=k.max_num_seqs,
        max_num_batched_tokens=1 + int(rng.choice((0.5, 1.0, 4.0)) * max(isl)),
        kv_capacity_tokens=rng.choice((longest, max(longest, 3 * sum(isl) // n), 1_000_000)),
        tp=rng.choice((1, 2, 4)),
        **seconds,
        e_pre={"e_pre0": rng.uniform(0.5, 3.0), "e_pre_tok": rng.uniform(0.01, 0.04), "e_pre_sq": rng.choice((0.0, 2e-7))},
        e_dec={"e_dec0": rng.uniform(1.0, 4.0), "e_dec_req": rng.uniform(0.02, 2.0), "e_dec_kv": rng.choice((0.0, 3e-5))} | knee,
        idle_w_per_gpu=rng.choice((0.0, 10.0, 72.5)),
        max_w_per_gpu=max_w_per_gpu,
        host_w=rng.choice((0.0, 300.0)),
        slo_ttft_s=slack * t_pre(seconds["t_pre"], mean_isl, 1, mean_isl**2),
        slo_tpot_s=slack * t_dec(seconds["t_dec"], 1, mean_isl + mean_osl),
        batch_capacity=rng.choice((k.max_num_seqs // 3, k.max_num_seqs // 2, k.max_num_seqs, 4 * k.max_num_seqs)),
        ledger=rng.choice(("off", "reset", "in-flight")),
        policy=policy,
        window_max_requests=rng.choice((1, 2, 3, 4, 7, 1000, 1000, 1000)),
        forwarding="window" if rng.random() < 0.5 else "direct",
        believed_osl=_believed(rng, osl),
    )


def _policy(rng: random.Random, name: str, kind: int) -> tuple:
    options = {
        "iterative_ilp": (T_MAX[kind],),
        "facility_milp": (rng.choice(("linear", "exp")), rng.choice(("standard", "standard", "f_const", "c_full"))),
        "moer_cap": (rng.choice((0.1, 0.35, 0.5, 0.75, 1.0)),),
        "moer_soft": (rng.choice((0.25, 0.5, 1.0)),),
    }
    return (name, *options.get(name, ()))


def _lengths(rng: random.Random, n: int) -> tuple[list[int], list[int]]:
    """Prompts of which no two are equally long: two requests that cost the same could change places."""
    isl: list[int] = []
    while len(isl) < n:
        length = max(1, min(2000, int(rng.lognormvariate(5.0, 1.0))))
        if length not in isl:
            isl.append(length)
    return isl, [1 if rng.random() < 0.15 else rng.randint(2, 50) for _ in range(n)]


def _believed(rng: random.Random, osl: list[int]) -> list[float] | None:
    """What schedulers take the output lengths to be: the truth, the mean, bins, or a guess."""
    style = rng.choice(("truth", "mean", "bins", "guess"))
    if style == "truth":
        return None
    mean = sum(osl) / len(osl)
    one = {
        "mean": lambda _: mean,
        "bins": lambda x: 12.5 if x < 25 else 37.5,
        "guess": lambda x: max(1.0, round(x * rng.lognormvariate(0.0, 0.5), 3)),
    }[style]
    return [one(x) for x in osl]


def _arrivals(rng: random.Random, n: int, window_s: float, k: Kind) -> list[float]:
    """Bursts within a window or at one instant, arrivals on edges and at polls, and quiet stretches between them; the last window too."""
    horizon = k.horizon_windows * window_s
    bursts = [rng.randrange(k.horizon_windows) for _ in range(5)] + [k.horizon_windows - 1]
    instants = [rng.random() * horizon * 0.99 for _ in range(4)]
    styles = rng.choice((("burst", "burst", "uniform"), ("burst", "instant", "edge"), ("edge", "poll", "burst"), ("uniform", "instant")))
    times = []
    for _ in range(n):
        style = rng.choice(styles)
        if style == "burst":
            t = (rng.choice(bursts) + rng.random() * 0.999) * window_s
        elif style == "instant":
            t = rng.choice(instants)
        elif style == "edge":
            t = rng.randrange(k.horizon_windows) * window_s
        elif style == "poll":
            t = rng.randrange(0, k.horizon_windows, k.poll_windows) * window_s
        else:
            t = rng.random() * horizon
        times.append(t)
    return sorted(times)


def _decision(rng: random.Random, window_s: float) -> tuple:
    """Sums of a solver's times may fall on edges where edges are exact; elsewhere they must not, for their rounding is free."""
    exact = window_s in (0.125, 0.25)
    solver = ("affine", 0.25 * window_s, 0.25 * window_s) if exact else ("affine", 0.3137 * window_s, 0.1713 * window_s)
    return rng.choice(
        (
            ("none",),
            ("fixed", rng.choice((1, 3)) * window_s),
            ("fixed", 0.0123),
            ("affine", 0.0041327, 0.0015173),
            solver,
            *[("affine", 1.3137 * window_s, 0.010171)] * 2,  # a solver that falls behind
        )
    )


def _ci(rng: random.Random, n_dcs: int, horizon_windows: int, *, equal_ok: bool) -> Callable[[int], list[float]]:
    """Carbon intensity by window: constant or stepwise; equal at some DCs or all; zero at one, for two such would cost the same.

    Weights of `moer_soft` that are equal lead to credits that are equal but for rounding.
    """
    style = rng.choice(("constant", "changing", "one_zero", *(("equal", "pairs") if equal_ok else ())))
    every = rng.choice((1, 5, 17)) if style in ("changing", "pairs", "one_zero") else horizon_windows + 1
    zero = rng.randrange(n_dcs)
    blocks = []
    for _ in range(0, horizon_windows + 1, every):
        values = [250.0] * n_dcs if style == "equal" else [round(rng.uniform(20.0, 600.0), 1) for _ in range(n_dcs)]
        if style == "pairs":
            values = [values[d // 2] for d in range(n_dcs)]
        if style == "one_zero":
            values[zero] = 0.0
        blocks.append(values)
    return lambda k: list(blocks[min(k // every, len(blocks) - 1)])


def _slower(seconds: dict[str, dict], factor: float) -> dict[str, dict]:
    """Step times, all multiplied."""
    return {step: {name: x if name == "tok_knee" else x * factor for name, x in c.items()} for step, c in seconds.items()}
