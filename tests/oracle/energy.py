"""Energy and time accounts, made from the step records once the run is over."""

from bisect import bisect_right

from tests.oracle.datacenter import DataCenter
from tests.oracle.engine import Engine
from tests.oracle.model import OracleScenario
from tests.oracle.timeline import horizon_s, overlap

COLUMNS: tuple[str, ...] = ("prefill_j", "decode_j", "idle_j", "host_j", "carbon_g")


def interval_windows(s: OracleScenario) -> list[int]:
    """First window of each of the ledger's intervals, then the horizon."""
    ends = {s.horizon_windows}
    for k in range(s.horizon_windows):
        if k % s.ledger_windows == 0 or k == s.warmup_windows or s.ci(k) != s.ci(k - 1):
            ends.add(k)
    return sorted(ends)


def interval_edges(s: OracleScenario) -> list[float]:
    """The same in seconds."""
    return [k * s.window_s for k in interval_windows(s)]


def spread(start: float, end: float, edges: list[float]) -> list[tuple[int, float]]:
    """(interval, seconds) for the parts of [start, end] inside the intervals."""
    parts = []
    i = max(0, bisect_right(edges, start) - 1)
    while i + 1 < len(edges) and edges[i] < end:
        parts.append((i, overlap(start, end, edges[i], edges[i + 1])))
        i += 1
    return parts


def idle_gaps(engine: Engine, until: float) -> list[tuple[float, float]]:
    """Spans of [0, until] between steps."""
    gaps = []
    clock = 0.0
    for step in engine.steps:
        if step.start_s >= until:
            break
        if step.start_s > clock:
            gaps.append((clock, step.start_s))
        clock = step.end_s
    if clock < until:
        gaps.append((clock, until))
    return gaps


def energy_ledger(s: OracleScenario, dcs: list[DataCenter]) -> tuple[list[list[dict[str, float]]], float, float]:
    """([interval][dc] -> joules by use and grams of CO2, joules and grams of steps after the horizon)."""
    windows, edges = interval_windows(s), interval_edges(s)
    rows: list[list[dict[str, float]]] = [[dict.fromkeys(COLUMNS, 0.0) for _ in dcs] for _ in edges[:-1]]
    drain_j = drain_g = 0.0
    last_ci = s.ci(s.horizon_windows - 1)
    for dc in dcs:
        for engine in dc.engines:
            for step in engine.steps:
                duration = step.end_s - step.start_s
                for i, seconds in spread(step.start_s, step.end_s, edges):
                    rows[i][dc.index][f"{step.kind}_j"] += step.energy_j * seconds / duration
                if step.end_s > edges[-1]:
                    left_j = step.energy_j * (step.end_s - max(step.start_s, edges[-1])) / duration
                    drain_j += left_j
                    drain_g += s.pue[dc.index] * last_ci[dc.index] * left_j / 3.6e6
            for start, end in idle_gaps(engine, edges[-1]):
                for i, seconds in spread(start, end, edges):
                    rows[i][dc.index]["idle_j"] += s.idle_w_per_gpu * s.tp * seconds
    for i, per_dc in enumerate(rows):
        ci = s.ci(windows[i])
        for dc, row in zip(dcs, per_dc):
            row["host_j"] = s.host_w * dc.n_nodes * (edges[i + 1] - edges[i])
            joules = row["prefill_j"] + row["decode_j"] + row["idle_j"] + row["host_j"]
            row["carbon_g"] = s.pue[dc.index] * ci[dc.index] * joules / 3.6e6
    return rows, drain_j, drain_g


def engine_seconds(s: OracleScenario, engine: Engine) -> tuple[float, float, float]:
    """(prefill, decode, idle) seconds between the warm-up and the horizon, each counted from its own spans."""
    start, end = s.warmup_windows * s.window_s, horizon_s(s)
    prefill = sum(overlap(x.start_s, x.end_s, start, end) for x in engine.steps if x.kind == "prefill")
    decode = sum(overlap(x.start_s, x.end_s, start, end) for x in engine.steps if x.kind == "decode")
    idle = sum(overlap(a, b, start, end) for a, b in idle_gaps(engine, end))
    return prefill, decode, idle
