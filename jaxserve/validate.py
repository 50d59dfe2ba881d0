"""`jaxserve validate`: a real server's request log through the engine, every decision fixed, and how far the prediction is off.

One data centre; requests go to the engines in turn or, where the log says which engine served each, to that one. Arrivals and lengths
are the log's; everything after them is predicted.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from jaxserve.analysis.observed import held_while_waiting
from jaxserve.analysis.validation import Replay, Validation, evaluate
from jaxserve.analysis.validation_energy import shared_out
from jaxserve.engine.lane import Case, Requests, first_requests
from jaxserve.engine.model import Fleet, Sizes
from jaxserve.engine.simulate import Simulation
from jaxserve.errors import InputError
from jaxserve.perf.coefficients import Coefficients, load_coefficients
from jaxserve.perf.request_log import RequestLog, parse_where, read_request_log
from jaxserve.policies.simple import RoundRobin
from jaxserve.scenario.compile import FEW_IN_A_STEP, build_fleet, chunk_steps, most_stay, roomy, round_up
from jaxserve.scenario.load import parse_scenario
from jaxserve.scenario.rawfile import open_input

Batching = Literal["prefill_first", "study"]
WINDOW_S = 0.1
STEP_WINDOWS = 10
"""Nothing is decided or observed in a replay: these only cut the run into pieces and change no result."""
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 8192
"""Where neither an option nor the log says: vLLM's defaults of batch capacity, and of the token budget on a data-centre GPU."""
SAME = 0.9
"""A median of running requests above this share of the most means that their number was what was full."""
MOST_ENGINES = 10_000
MOST_SEQS = 65_536
MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class Limits:
    """An engine's limits, and where each comes from (`given`, `log` or `default`)."""

    engines: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_capacity_tokens: int
    batching: Batching
    origin: dict[str, str]


def read_log(path: Path, where: Sequence[str] = (), ttft_from: str = "arrival", invalid_rows: str = "error") -> RequestLog:
    """Read a log file; raises `InputError` naming file, row and column."""
    pairs = parse_where(where)
    with open_input(path) as stream:
        text = stream.read().decode("utf-8-sig")
    return read_request_log(text, str(path), pairs, ttft_from, invalid_rows)


def validate(
    log: str | Path | RequestLog,
    coefficients: str | Coefficients,
    *,
    engines: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    kv_capacity_tokens: int | None = None,
    batching: str = "prefill_first",
    ttft_from: str = "arrival",
    invalid_rows: str = "error",
    where: Sequence[str] = (),
    count_from_s: float = 0.0,
) -> Validation:
    """Replay a log and compare; only requests that arrive at or after `count_from_s` (seconds after the first) are counted."""
    if batching not in ("prefill_first", "study"):
        raise InputError(f"--batching {batching!r}: must be prefill_first or study")
    read = log if isinstance(log, RequestLog) else read_log(Path(log), where, ttft_from, invalid_rows)
    loaded = coefficients if isinstance(coefficients, Coefficients) else load_coefficients(coefficients)
    given = {
        "engines": (engines, MOST_ENGINES),
        "max_num_seqs": (max_num_seqs, MOST_SEQS),
        "max_num_batched_tokens": (max_num_batched_tokens, MOST_TOKENS),
        "kv_capacity_tokens": (kv_capacity_tokens, MOST_TOKENS),
    }
    for option, (value, most) in given.items():
        if value is not None and not 1 <= value <= most:
            raise InputError(f"--{option.replace('_', '-')} {value}: must be from 1 to {most}")
    if not (math.isfinite(count_from_s) and count_from_s >= 0):
        raise InputError(f"--count-from {count_from_s:g}: must be at least 0 s")
    counted = read.arrival_s >= count_from_s
    if not counted.any():
        raise InputError(f"--count-from {count_from_s:g}: the last request of {read.name} arrives at {read.arrival_s[-1]:g} s")
    limits = find_limits(read, {k: v for k, (v, _) in given.items()}, batching)
    _check(read, limits)
    label = coefficients if isinstance(coefficients, str) else "coefficients"
    return evaluate(read, replay(read, loaded, limits), loaded, label, vars(limits), counted)


def find_limits(log: RequestLog, given: Mapping[str, int | None], batching: Batching) -> Limits:
    """The limits given, else those that the log shows the server to have had, else defaults.

    A log with queue waits shows what ran while requests waited. If that was (nearly) always the same number of requests, the batch
    capacity held the others back; if not, memory did, and the engine's KV capacity, which reserves prompt and output at admission, is the
    median reserved meanwhile. Where nobody waited for longer than a token takes, the log shows no limit.
    """
    origin = {k: "given" for k, v in given.items() if v is not None}
    groups = _groups(log, given["engines"])
    engines = sum(n for _, n in groups)
    if log.engine is not None and given["engines"] is None:
        origin["engines"] = "log"
    defaults = {"engines": 1, "max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}
    defaults["kv_capacity_tokens"] = min(int((log.isl + log.osl).sum()) + 1, MOST_TOKENS)
    held = [h for part, n in groups if n == 1 and (h := held_while_waiting(log.select(_mask(log, part)))) is not None]
    if held and given["max_num_seqs"] is None and given["kv_capacity_tokens"] is None:
        running, most, reserved = (max(column) for column in zip(*held, strict=True))
        name, value = ("max_num_seqs", running) if running >= SAME * most else ("kv_capacity_tokens", reserved)
        defaults[name], origin[name] = max(int(value), int((log.isl + log.osl).max()) if name == "kv_capacity_tokens" else 1), "log"
    chosen: dict[str, int] = {}
    for k, default in defaults.items():
        option = given[k]
        chosen[k] = default if option is None else option
    return Limits(
        engines=engines,
        max_num_seqs=chosen["max_num_seqs"],
        max_num_batched_tokens=chosen["max_num_batched_tokens"],
        kv_capacity_tokens=chosen["kv_capacity_tokens"],
        batching=batching,
        origin={k: origin.get(k, "default") for k in chosen},
    )


def _mask(log: RequestLog, part: NDArray[np.int64]) -> NDArray[np.bool_]:
    mask = np.zeros(len(log), bool)
    mask[part] = True
    return mask


def _groups(log: RequestLog, engines: int | None) -> list[tuple[NDArray[np.int64], int]]:
    """(requests, number of engines that they are dealt to in turn) of each independent part of the replay."""
    if engines is not None or log.engine is None:
        return [(np.arange(len(log)), engines or 1)]
    names = np.array(log.engine)
    return [(np.flatnonzero(names == name), 1) for name in dict.fromkeys(log.engine)]


def _check(log: RequestLog, limits: Limits) -> None:
    """Refuse requests that never fit."""
    need = log.isl + log.osl
    if (bad := np.flatnonzero(need > limits.kv_capacity_tokens)).size:
        i = bad[0]
        raise InputError(
            f"{log.name}, row {log.line[i]}: needs {need[i]:.0f} tokens of KV cache, more than an engine's {limits.kv_capacity_tokens}, "
            f"and so do {len(bad) - 1} others; raise --kv-capacity-tokens"
        )


def replay(log: RequestLog, coefficients: Coefficients, limits: Limits) -> Replay:
    """Run the log's arrivals and lengths through the engines. Times are seconds since the first arrival, energies joules of all GPUs."""
    n = len(log)
    admit, first, finish, request_j = np.empty(n), np.empty(n), np.empty(n), np.empty(n)
    busy_s = 0.0
    outside: dict[str, tuple[int, int]] = {}
    sizes = _sizes(log, coefficients, limits)
    explicit = limits.engines if limits.origin["engines"] == "given" else None
    for part, engines in _groups(log, explicit):
        arrival = log.arrival_s[part]
        zero = np.zeros(len(part), np.int32)
        requests = Requests(arrival, arrival, log.isl[part].astype(np.int32), log.osl[part].astype(np.int32), zero)
        case = Case(_fleet(coefficients, limits, engines), RoundRobin(), requests, lambda times: np.zeros((len(times), 1)))
        horizon_steps = _horizon_steps(log)
        simulation = Simulation([case], window_s=WINDOW_S, horizon_steps=horizon_steps, sizes=sizes)
        spent_j: list[NDArray[np.float64]] = []
        while not simulation.done:
            (advance,) = simulation.advance()
            f = advance.finished
            at = part[f.first : f.first + len(f.finish_s)]
            admit[at], first[at], finish[at] = f.admit_s, f.first_token_s, f.finish_s
            spent_j.append(np.concatenate([advance.prefill_j, advance.decode_j], axis=1))
            # Busy time of all engines, the drain after the last arrival included.
            busy_s += float((engines * STEP_WINDOWS * WINDOW_S - advance.idle_s).sum())
        for phase, (out, steps) in simulation.steps_outside().items():
            before = outside.get(phase, (0, 0))
            outside[phase] = before[0] + out, before[1] + steps
        sizes = simulation.sizes  # what has grown need not grow again
        request_j[part] = _shares(log, part, np.concatenate(spent_j), admit, first, finish)
    power = coefficients.power.idle_w_per_gpu * coefficients.setup.tp
    idle_s = max(limits.engines * float(finish.max()) - busy_s, 0.0)
    return Replay(admit_s=admit, first_token_s=first, finish_s=finish, request_j=request_j, idle_j=idle_s * power, steps_outside=outside)


def _shares(log: RequestLog, part: NDArray[np.int64], spent_j: NDArray[np.float64], *times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each request's share [part] of what was spent on prefill and decode, [T, 2], between its admission, first token and finish."""
    admit, first, finish = (t[part] for t in times)
    edges = np.arange(len(spent_j) + 1, dtype=np.float64) * (STEP_WINDOWS * WINDOW_S)
    prefill = shared_out(edges, spent_j[:, 0], admit, first, log.isl[part] / (first - admit))
    return prefill + shared_out(edges, spent_j[:, 1], first, finish, np.ones(len(part)))


def _horizon_steps(log: RequestLog) -> int:
    return math.floor(float(log.arrival_s[-1]) / (STEP_WINDOWS * WINDOW_S)) + 2


def _sizes(log: RequestLog, coefficients: Coefficients, limits: Limits) -> Sizes:
    """First guesses of the static shapes; the simulation grows those that prove too small."""
    step_s, horizon_steps = STEP_WINDOWS * WINDOW_S, _horizon_steps(log)
    busiest = int(np.diff(first_requests(log.arrival_s, WINDOW_S, STEP_WINDOWS, horizon_steps)).max())
    shortest = coefficients.shortest_decode_s(min(limits.max_num_seqs, len(log)), min(limits.kv_capacity_tokens, int(log.isl.sum())))
    passes = min(roomy(1.2 * step_s / max(shortest, 1e-3) + 8, 2), 512)
    return Sizes(
        stay=most_stay(log.osl),
        requests=round_up(min(len(log), 4096) + 64, 512),
        step_requests=roomy(max(busiest, FEW_IN_A_STEP), 2),
        transit=roomy(busiest + 64, 2),
        passes=passes,
        steps=chunk_steps(passes, limits.engines, horizon_steps / 2),
        step_windows=STEP_WINDOWS,
    )


def _fleet(coefficients: Coefficients, limits: Limits, engines: int) -> Fleet:
    """One data centre of `engines` engines, one a node, and one scheduler at its side; nothing but the engine matters here."""
    tp = coefficients.setup.tp
    table = {
        "name": "replay",
        "start_time": "2024-01-01T00:00:00Z",
        "horizon_s": WINDOW_S * STEP_WINDOWS,
        "ledger_s": WINDOW_S * STEP_WINDOWS,
        "sites": [{"name": "server", "region": "here", "zone": "none", "pue": 1.0, "nodes": engines, "gpus_per_node": tp}],
        "engine": {
            "coefficients": coefficients.model_dump(mode="json", exclude_none=True),
            "batching": limits.batching,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "kv_capacity_tokens": limits.kv_capacity_tokens,
        },
        "dispatch": {"window_s": WINDOW_S},
        "provisioner": {"poll_s": WINDOW_S * STEP_WINDOWS},
        "grid": {"kind": "constant", "ci_g_per_kwh": {"none": 0.0}},
        "workload": {"kind": "poisson", "rate_req_per_s": 1.0, "lengths": {"isl": 1, "osl": 1}},
        "slo": {"ttft_s": 1.0, "tpot_s": 1.0},
        "schedulers": [{"name": "front", "region": "here", "sites": ["server"]}],
        "policies": [{"kind": "round_robin"}],
    }
    return build_fleet(parse_scenario(table, "replay", Path()))
