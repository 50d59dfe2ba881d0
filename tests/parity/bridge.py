"""Runs the vectorised engine on a scenario of the oracle, so that both can be compared request by request."""

import math
from dataclasses import dataclass, replace

import numpy as np
from pydantic import TypeAdapter

from jaxserve.engine.control import AbstractPolicy
from jaxserve.engine.lane import Advance, Case, Requests
from jaxserve.engine.model import Fleet, Sizes, ValidRange
from jaxserve.engine.simulate import Simulation
from jaxserve.perf.latency import DecodeForm, DecodeTime, PrefillForm, PrefillTime
from jaxserve.perf.power import DecodeEnergy, PrefillEnergy
from jaxserve.perf.step_times import DecodeTable, PrefillTable
from jaxserve.policies.greedy import Greedy
from jaxserve.policies.simple import LeastLoaded, RoundRobin
from tests.oracle.energy import interval_windows
from tests.oracle.model import OracleResult, OracleScenario

MOST_REQUESTS = 320  # of a random scenario, rounded up
MOST_TOKENS = 64  # of a random answer, likewise
MOST_WINDOWS = 10_000  # the longest drain takes 4,200
CHUNK_WINDOWS = 64  # about a horizon: most scenarios end in the second chunk


@dataclass(frozen=True)
class EngineResult:
    """Per-request arrays by id, per-step arrays over steps of `step_windows`, per-engine arrays over (dc, node, engine)."""

    dc: np.ndarray
    node: np.ndarray
    engine: np.ndarray
    dc_arrival_s: np.ndarray
    admit_s: np.ndarray
    first_token_s: np.ndarray
    finish_s: np.ndarray
    prefill_j: np.ndarray  # [steps, D]
    decode_j: np.ndarray
    idle_s: np.ndarray
    engine_s: np.ndarray  # [3, E]
    running: np.ndarray  # [steps, D]
    queued: np.ndarray
    under_way: np.ndarray  # [steps]
    seen: np.ndarray  # [steps, 4, D]
    above_board: int
    step_windows: int


def policy_of(s: OracleScenario) -> AbstractPolicy:
    """The policy that the oracle's tuple names."""
    if s.policy[0] == "greedy":
        return Greedy.of(*s.policy[1:])
    return {"round_robin": RoundRobin, "least_loaded": LeastLoaded}[s.policy[0]]()


def _floats(coefficients: dict[str, float]) -> dict[str, float]:
    """Whole numbers as floats too: their type is part of what is compiled."""
    return {name: float(value) for name, value in coefficients.items()}


def step_times_of(s: OracleScenario) -> tuple[PrefillForm, DecodeForm]:
    """The modules of the oracle's coefficients; those that name a form are read as a coefficients file is."""
    if "form" in s.t_pre:
        return TypeAdapter(PrefillTable).validate_python(s.t_pre).model(), TypeAdapter(DecodeTable).validate_python(s.t_dec).model()
    return PrefillTime(**_floats(s.t_pre)), DecodeTime(**_floats(s.t_dec))


def fleet_of(s: OracleScenario) -> Fleet:
    """The oracle's DCs and engines as the engine's arrays."""
    engines = np.array(s.nodes) * np.array(s.engines_per_node)
    first = np.concatenate([[0], np.cumsum(engines)[:-1]])
    members = np.arange(engines.max())
    offset = [d * s.poll_windows // len(s.nodes) if s.poll_mode == "async" else 0 for d in range(len(s.nodes))]
    alike = np.full(len(s.own), float(len(s.own))) if s.alike is None else np.array(s.alike)
    prefill_time, decode_time = step_times_of(s)
    return Fleet(
        prefill_time=prefill_time,
        decode_time=decode_time,
        prefill_energy=PrefillEnergy(**_floats(s.e_pre)),
        decode_energy=DecodeEnergy(**_floats(s.e_dec)),
        valid=ValidRange(*[np.array([-np.inf, np.inf])] * 3),
        max_num_seqs=np.int32(s.max_num_seqs),
        token_budget=float(s.max_num_batched_tokens),
        kv_capacity=float(s.kv_capacity_tokens),
        dc_members=np.where(members < engines[:, None], first[:, None] + members, engines.sum()).astype(np.int32),
        dc_first_engine=first.astype(np.int32),
        dc_engines=engines.astype(np.int32),
        pue=np.array(s.pue),
        rtt_s=np.array(s.rtt_s),
        own=np.array([[d in own for d in range(len(s.nodes))] for own in s.own]),
        **orders([min(own) for own in s.own], len(s.nodes)),
        slo_ttft_s=s.slo_ttft_s,
        slo_tpot_s=s.slo_tpot_s,
        batch_capacity=float(s.batch_capacity),
        window_s=s.window_s,
        poll_windows=np.int32(s.poll_windows),
        poll_offset=np.array(offset, np.int32),
        prefill_first=np.bool_(s.batching == "prefill_first"),
        ledger_kept=np.bool_(s.ledger != "off"),
        ledger_in_flight=np.bool_(s.ledger == "in-flight"),
        alike=alike,
        peers=np.int32(("unknown", "alike", "observed").index(s.peers)),
        view_aged=np.bool_(s.view == "aged"),
        headroom_parts=alike if s.headroom == "divided" else np.ones_like(alike),
        window_max_requests=np.int32(s.window_max_requests),
        forward_window=np.bool_(s.forwarding != "direct"),
        idle_w=s.idle_w_per_gpu * s.tp,
        max_w=s.max_w_per_gpu * s.tp,
        n_engines=int(engines.sum()),
        padded=s.token_count == "padded",
        forward_owner=s.forwarding == "owner",
    )


def case_of(s: OracleScenario) -> Case:
    """The oracle's scenario as the engine takes it."""
    arrival, scheduler = np.array(s.arrival_s), np.array(s.scheduler)
    if s.decision[0] == "affine":
        decision = np.empty_like(arrival)
        free = [0.0] * len(s.own)
        for r, (t, g) in enumerate(zip(s.arrival_s, s.scheduler, strict=True)):
            decision[r] = free[g] = max(t, free[g]) + s.decision[1] + s.decision[2]
    else:
        decision = arrival + (s.decision[1] if s.decision[0] == "fixed" else 0.0)

    def ci(times_s: np.ndarray) -> np.ndarray:
        return np.array([s.ci(round(t / s.window_s)) for t in times_s])

    requests = Requests(arrival, decision, np.array(s.isl), np.array(s.osl), scheduler)
    return Case(fleet_of(s), policy_of(s), requests, ci)


def orders(first: list[int], n_dc: int) -> dict[str, np.ndarray]:
    """Schedulers' own orders, which begin at their `first` DCs and wrap round, as a `Fleet` has them."""
    order = [[(d + i) % n_dc for i in range(n_dc)] for d in first]
    place = [[mine.index(d) for d in range(n_dc)] for mine in order]
    return {"order": np.array(order, np.int32), "place": np.array(place, np.int32)}


def step_windows_of(s: OracleScenario, observes: bool) -> int:
    """Longest step between the edges that matter."""
    offsets = [int(o) for o in fleet_of(s).poll_offset] if observes else []
    return math.gcd(s.ledger_windows, s.horizon_windows, *([s.poll_windows, *offsets] if observes else []))


def sizes_of(s: OracleScenario, step_windows: int, **changes: int) -> Sizes:
    """Shapes with room for any of the random scenarios, so that those of one kind compile once: capacities that grow compile again."""
    usual = {
        "stay": MOST_TOKENS,
        "requests": MOST_REQUESTS,
        "step_requests": 160,
        "transit": 192,
        "passes": 96 if step_windows == 1 else min(128 * step_windows, 1536),
        "steps": -(-CHUNK_WINDOWS // step_windows),
        "step_windows": step_windows,
    }
    return Sizes(**usual | changes)


def simulation_of(scenarios: list[OracleScenario], policies: list[AbstractPolicy], sizes: Sizes) -> Simulation:
    """The scenarios, which share shapes, window and horizon, as the lanes of one simulation."""
    s = scenarios[0]
    cases = [replace(case_of(s), policy=policy) for s, policy in zip(scenarios, policies, strict=True)]
    return Simulation(cases, window_s=s.window_s, horizon_steps=s.horizon_windows // sizes.step_windows, sizes=sizes)


def run_lanes(scenarios: list[OracleScenario], policies: list[AbstractPolicy], sizes: Sizes) -> list[EngineResult]:
    """Run scenarios side by side until the last request of the last of them has finished."""
    return finish(scenarios, simulation_of(scenarios, policies, sizes), [])


def finish(scenarios: list[OracleScenario], simulation: Simulation, advances: list[list[Advance]]) -> list[EngineResult]:
    """Run a simulation to its end; `advances` are the chunks that it has made already."""
    while not simulation.done:
        assert simulation.next_step * simulation.sizes.step_windows < MOST_WINDOWS, "requests that never finish"
        advances.append(simulation.advance())
    step = simulation.sizes.step_windows
    return [
        collect(s, [chunk[i] for chunk in advances], simulation.engine_s(i), simulation.steps_above_board(i), step)
        for i, s in enumerate(scenarios)
    ]


def run_engine(s: OracleScenario, *, step_windows: int | None = None, **sizes: int) -> EngineResult:
    """Run one scenario by itself, in the longest steps that it allows unless others are given."""
    policy = policy_of(s)
    step = step_windows or step_windows_of(s, policy.observes)
    return run_lanes([s], [policy], sizes_of(s, step, **sizes))[0]


def by_interval(s: OracleScenario, expected: OracleResult, name: str) -> np.ndarray:
    """The oracle's ledger [intervals, D], joined to intervals of `ledger_windows`, which every length of step can be compared to."""
    rows = np.array([[dc[name] for dc in interval] for interval in expected.ledger])
    return np.add.reduceat(rows, [i for i, k in enumerate(interval_windows(s)[:-1]) if k % s.ledger_windows == 0], axis=0)


def collect(s: OracleScenario, advances: list[Advance], engine_s: np.ndarray, above_board: int, step_windows: int) -> EngineResult:
    """Put the chunks of one run together, whose requests must follow one another without gap or overlap."""
    finished = [advance.finished for advance in advances]
    sent_off = np.cumsum([0, *(len(f.finish_s) for f in finished)])
    assert [f.first for f in finished] == sent_off[:-1].tolist()
    assert sent_off[-1] == len(s.arrival_s)

    def requests(name: str) -> np.ndarray:
        return np.concatenate([getattr(f, name) for f in finished])

    def steps(name: str) -> np.ndarray:
        return np.concatenate([getattr(a, name) for a in advances])

    first = np.concatenate([[0], np.cumsum(np.array(s.nodes) * np.array(s.engines_per_node))])
    engine = requests("engine")
    dc = np.searchsorted(first, engine, side="right") - 1
    within = engine - first[dc]
    nodes = np.array(s.nodes)[dc]
    order = [first[d] + e * s.nodes[d] + n for d in range(len(s.nodes)) for n in range(s.nodes[d]) for e in range(s.engines_per_node[d])]
    return EngineResult(
        dc=dc,
        node=within % nodes,
        engine=within // nodes,
        **{name: requests(name) for name in ("dc_arrival_s", "admit_s", "first_token_s", "finish_s")},
        **{name: steps(name) for name in ("prefill_j", "decode_j", "idle_s", "running", "queued", "under_way", "seen")},
        engine_s=engine_s[:, order],
        above_board=above_board,
        step_windows=step_windows,
    )
