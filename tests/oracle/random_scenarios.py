"""Seeded small worlds that reach the rare branches; the shapes come from a handful of kinds, so that a jitted engine compiles seldom."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.oracle.equations import t_dec, t_pre
from tests.oracle.model import OracleScenario


@dataclass(frozen=True)
class Kind:
    """What fixes the shapes of arrays."""

    nodes: tuple[int, ...]
    engines_per_node: tuple[int, ...]
    max_num_seqs: int
    n_schedulers: int
    horizon_windows: int
    ledger_windows: int
    poll_windows: int


KINDS = (
    Kind((1,), (1,), 4, 1, 40, 10, 10),
    Kind((1, 2), (2, 1), 1, 2, 48, 7, 5),  # one request at a time; a ledger interval that does not divide the horizon
    Kind((2, 1, 1), (1, 2, 1), 8, 2, 60, 10, 8),
    Kind((1, 1, 2, 1), (1, 1, 2, 1), 6, 4, 64, 12, 16),
    Kind((3, 1), (3, 2), 3, 1, 50, 1, 1),  # polls and intervals of one window
    Kind((1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1), 16, 3, 80, 25, 4),  # more DCs than windows between polls
    Kind((2, 3, 1, 2, 1), (2, 1, 3, 1, 1), 5, 4, 45, 45, 9),
)

POLICIES = (
    ("round_robin",),
    *[("least_loaded",)] * 2,
    *(("greedy", None, latency, signal) for latency in ("e2e", "slo", "ttft") for signal in ("ci", "pue_ci")),
)


def random_scenario(seed: int, kind: int | None = None) -> OracleScenario:
    """The world of a seed; its kind is seed % len(KINDS) unless one is given."""
    rng = random.Random(seed)
    k = KINDS[seed % len(KINDS) if kind is None else kind]
    n_dcs = len(k.nodes)
    # On the dyadic grid steps take exact fractions of a window: iterations start, and requests finish, on edges.
    dyadic = rng.random() < 0.25
    window_s = rng.choice((0.125, 0.25)) if dyadic else rng.choice((0.125, 0.25, 0.1, 0.05, 0.025))
    n = rng.choice((20, 40, 60, 80)) if dyadic else rng.choice((20, 40, 80, 150, 300))
    isl, osl = _lengths(rng, n, k)
    footprints = [a + b for a, b in zip(isl, osl)]
    kv = rng.choice((max(footprints), max(max(footprints), 2 * sum(footprints) // n), 1_000_000))
    budget = 1 + int(rng.choice((0.15, 0.5, 1.0, 4.0)) * max(isl))  # the first two split the longest prompts
    seconds = _dyadic_times(rng, window_s) if dyadic else step_times(rng, k, window_s, isl, osl)
    own = own_dcs(rng, k.n_schedulers, n_dcs)
    policy = rng.choice(POLICIES)
    if policy[0] == "greedy":
        policy = ("greedy", rng.choice((0.0, 0.3, 0.7, 1.0)), *policy[2:])
    mean_isl, mean_osl = sum(isl) / n, sum(osl) / n
    slack = rng.choice((1e-6, 1.2, 2.5, 2.5, 6.0, 6.0, 1e4))
    knee, max_w_per_gpu = boards(seed)
    return OracleScenario(
        window_s=window_s,
        poll_windows=k.poll_windows,
        poll_mode=rng.choice(("sync", "async")),
        ledger_windows=k.ledger_windows,
        horizon_windows=k.horizon_windows,
        arrival_s=_arrivals(rng, n, window_s, k, dyadic),
        isl=isl,
        osl=osl,
        scheduler=[rng.randrange(k.n_schedulers) for _ in range(n)] if rng.random() < 0.3 else [i % k.n_schedulers for i in range(n)],
        decision=_decision(rng, window_s),
        nodes=list(k.nodes),
        engines_per_node=list(k.engines_per_node),
        pue=[rng.choice((1.0, 1.1, 1.25, 1.6)) for _ in range(n_dcs)],
        ci=_ci(rng, n_dcs, k.horizon_windows),
        own=own,
        rtt_s=round_trips(rng, own, n_dcs, window_s),
        batching=rng.choice(("study", "prefill_first")),
        max_num_seqs=k.max_num_seqs,
        max_num_batched_tokens=budget,
        kv_capacity_tokens=kv,
        tp=rng.choice((1, 2, 4)),
        **seconds,
        e_pre={"e_pre0": rng.uniform(0.5, 3.0), "e_pre_tok": rng.uniform(0.01, 0.04), "e_pre_sq": rng.choice((0.0, 2e-7))},
        e_dec={"e_dec0": rng.uniform(1.0, 4.0), "e_dec_req": rng.uniform(0.02, 0.1), "e_dec_kv": rng.choice((0.0, 3e-5))} | knee,
        idle_w_per_gpu=rng.choice((0.0, 60.0, 72.5)),
        max_w_per_gpu=max_w_per_gpu,
        host_w=rng.choice((0.0, 300.0)),
        slo_ttft_s=slack * t_pre(seconds["t_pre"], mean_isl, 1, mean_isl**2),
        slo_tpot_s=slack * t_dec(seconds["t_dec"], 1, mean_isl + mean_osl),
        batch_capacity=rng.choice((k.max_num_seqs, k.max_num_seqs, max(1, k.max_num_seqs // 2))),
        ledger=rng.choice(("off", "reset", "in-flight")),
        policy=policy,
    )


def boards(seed: int) -> tuple[dict[str, float], float]:
    """Names of a knee in the decode energy, or none, and board power: some hold no step, some many, some nearly all.

    From a generator of their own, so that all else in a world is what it was without them.
    """
    rng = random.Random(f"boards of {seed}")
    knee = {"e_dec_req_below": rng.uniform(0.1, 0.5), "batch_knee": rng.choice((1.5, 3.0))} if rng.random() < 0.4 else {}
    return knee, rng.choice((80.0, 150.0, 400.0, 1e5))


def _lengths(rng: random.Random, n: int, k: Kind) -> tuple[list[int], list[int]]:
    """Prompt and output lengths; some worlds have only osl = 1, or equal lengths (so that estimates tie)."""
    style = rng.choice(("mixed", "mixed", "mixed", "prefill_only", "equal"))
    if style == "equal":
        return [rng.choice((64, 200))] * n, [rng.choice((4, 20))] * n
    isl = [max(1, min(2000, int(rng.lognormvariate(5.0, 1.0)))) for _ in range(n)]
    if style == "prefill_only":
        return isl, [1] * n
    longest = 12 if k.max_num_seqs == 1 else 60
    return isl, [1 if rng.random() < 0.15 else rng.randint(2, longest) for _ in range(n)]


def _arrivals(rng: random.Random, n: int, window_s: float, k: Kind, dyadic: bool) -> list[float]:
    """Arrivals of one style, or of several at once; all before the horizon."""
    styles = rng.choice((("uniform",), ("uniform", "edges"), ("edges", "polls"), ("bursts", "uniform"), ("bursts", "edges", "early")))
    horizon = k.horizon_windows * window_s
    bursts = [rng.randrange(k.horizon_windows) * window_s for _ in range(2)] + [rng.random() * horizon * 0.99]
    times = []
    for _ in range(n):
        style = rng.choice(styles)
        if style == "edges":
            t = rng.randrange(k.horizon_windows) * window_s
        elif style == "polls":
            t = rng.randrange(0, k.horizon_windows, k.poll_windows) * window_s
        elif style == "bursts":
            t = rng.choice(bursts)
        elif style == "early":
            t = rng.choice((0.0, rng.random() * 2 * window_s))
        else:
            t = rng.random() * horizon
        times.append(t // (window_s / 8) * (window_s / 8) if dyadic else t)
    if rng.random() < 0.5:
        times[0] = 0.0
    return sorted(times)


LOADS = (0.2, 0.7, 0.7, 1.0, 1.81, 1.81, 10.0)  # shares of what the engines can do


def step_times(
    rng: random.Random, k: Kind, window_s: float, isl: list[int], osl: list[int], loads: tuple[float, ...] = LOADS
) -> dict[str, dict]:
    """Step times of the usual form, scaled so that the engines are loaded to one of `loads`."""
    pre = {"tok_slope_below": 40e-6, "tok_slope_above": 57e-6, "tok_knee": rng.choice((50, 320)), "b0": 9e-3, "b1": 28e-6, "b2": 1.6e-9}
    dec = {"alpha0": 11.7e-3, "alpha1": 44e-6, "alpha2": 0.16e-6, "beta0": rng.choice((0.0, -3e-8)), "beta1": 1e-7, "beta2": -2e-10}
    n, b = len(isl), k.max_num_seqs
    mean_isl, mean_osl = sum(isl) / n, sum(osl) / n
    work = n * (t_pre(pre, mean_isl, 1, mean_isl**2) + (mean_osl - 1) * t_dec(dec, b, b * (mean_isl + mean_osl / 2)) / b)
    capacity = sum(x * y for x, y in zip(k.nodes, k.engines_per_node)) * k.horizon_windows * window_s
    # At 10 times the capacity steps outlast windows, polls and ledger intervals; the cap keeps the drain short.
    scale = min(rng.choice(loads) * capacity / work, 8.0 * window_s / pre["b0"])
    return {"t_pre": _scaled(pre, scale), "t_dec": _scaled(dec, scale)}


def _scaled(c: dict, factor: float) -> dict:
    return {name: value if name == "tok_knee" else value * factor for name, value in c.items()}


def _dyadic_times(rng: random.Random, window_s: float) -> dict[str, dict]:
    """Steps of whole eighths of a window, whatever they hold."""
    pre: dict[str, float] = dict.fromkeys(("tok_slope_below", "tok_slope_above", "tok_knee", "b1", "b2"), 0.0)
    dec: dict[str, float] = dict.fromkeys(("alpha1", "alpha2", "beta0", "beta1", "beta2"), 0.0)
    pre["b0"] = rng.choice((0.25, 0.5, 1.0)) * window_s
    pre["b1"] = rng.choice((0.0, 0.25)) * window_s
    dec["alpha0"] = rng.choice((0.125, 0.25, 0.5)) * window_s
    return {"t_pre": pre, "t_dec": dec}


def _decision(rng: random.Random, window_s: float) -> tuple:
    return rng.choice(
        (
            ("none",),
            ("none",),
            ("fixed", rng.choice((1, 3)) * window_s),
            ("fixed", 0.0123),
            ("affine", 0.004, 0.0015),
            ("affine", 0.25 * window_s, 0.25 * window_s),
            ("affine", 0.8 * window_s, 0.01),  # a solver that falls behind
        )
    )


def own_dcs(rng: random.Random, n_schedulers: int, n_dcs: int) -> list[list[int]]:
    """Every scheduler has a DC of its own; DCs are shared only where there are fewer of them than schedulers."""
    own: list[list[int]] = [[] for _ in range(n_schedulers)]
    dcs = list(range(n_dcs))
    rng.shuffle(dcs)
    for i in range(max(n_dcs, n_schedulers)):
        own[i % n_schedulers].append(dcs[i % n_dcs])
    return [sorted(x) for x in own]


def round_trips(rng: random.Random, own: list[list[int]], n_dcs: int, window_s: float) -> list[list[float]]:
    """Whole windows (requests that arrive on an edge also reach the DC on one), fractions of them, or nothing."""
    style = rng.choice(("windows", "uniform", "none"))

    def one() -> float:
        return {"windows": rng.randint(0, 12) * window_s, "uniform": rng.uniform(0.0, 4 * window_s), "none": 0.0}[style]

    return [[0.0 if d in mine else one() for d in range(n_dcs)] for mine in own]


def _ci(rng: random.Random, n_dcs: int, horizon_windows: int) -> Callable[[int], list[float]]:
    """Carbon intensity by window: constant or stepwise, some DCs or all of them equal or at zero."""
    style = rng.choice(("constant", "changing", "changing", "equal", "zero", "some_zero"))
    every = {"changing": rng.choice((1, 5, 17)), "some_zero": 9}.get(style, horizon_windows)
    blocks = []
    for _ in range(0, horizon_windows, every):
        if style == "equal":
            blocks.append([250.0] * n_dcs)
        elif style == "zero":
            blocks.append([0.0] * n_dcs)
        else:
            zero = 0.5 if style == "some_zero" else 0.0
            blocks.append([0.0 if rng.random() < zero else round(rng.uniform(20.0, 600.0), 1) for _ in range(n_dcs)])
    return lambda k: list(blocks[min(k // every, len(blocks) - 1)])
