"""Runs the vectorised engine on the oracle's worlds of batch policies."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from jaxserve.engine.control import AbstractPolicy
from jaxserve.engine.hosted import AbstractHostPolicy
from jaxserve.engine.lane import Advance, Case, Requests
from jaxserve.engine.model import Sizes
from jaxserve.engine.simulate import Simulation
from jaxserve.policies.optimise import Solved
from jaxserve.policies.plans import Outlook
from jaxserve.policies.registry import build_policy, resolve_policies
from jaxserve.scenario.decisions import batch_decision_times, close_windows, decision_times
from jaxserve.scenario.spec import AffineLatency, FixedLatency, NoLatency, Scenario
from jaxserve.solvers.problem import STATUSES
from tests.oracle.model import OracleScenario
from tests.parity.bridge import EngineResult, finish, fleet_of, sizes_of

MOST_REQUESTS = 128  # of a world, rounded up
MOST_BATCHES = 32  # of a scheduler in a step
MOST_IN_A_BATCH = 48
GAP = 0.0  # optima are compared, so that none may be taken for proven that is not


@dataclass(frozen=True)
class EngineBatches:
    """What the engine tells of the windows' batches, in order of (decided_s, scheduler, place in the scheduler's order)."""

    decided_s: np.ndarray
    scheduler: np.ndarray
    requests: np.ndarray
    status: list[str]
    objective: np.ndarray
    by_carbon: np.ndarray
    in_turn: np.ndarray
    fallbacks: tuple[int, int]  # both sums, over what owners placed anew as well


def policy_of(s: OracleScenario, solver: str = "device") -> AbstractPolicy | AbstractHostPolicy:
    """The policy that the oracle's tuple names, as a scenario would name it."""
    kind, *options = s.policy
    names = {"iterative_ilp": ("t_max",), "facility_milp": ("idle_share", "variant"), "moer_cap": ("cap",), "moer_soft": ("w",)}
    table: dict[str, Any] = {"kind": kind, **dict(zip(names.get(kind, ()), options, strict=True))}
    if table.get("variant") == "standard":
        table["variant"] = "default"
    if kind in ("ilp", "iterative_ilp", "facility_milp", "green_llm"):
        table |= {"solver": solver, "gap": GAP, "time_limit_s": 60.0}
    outlook = cast(Outlook, SimpleNamespace(measured=False, sites=()))  # all that these policies ask for
    return build_policy(resolve_policies([table])[0], outlook)


def case_of(s: OracleScenario, policy: AbstractPolicy | AbstractHostPolicy) -> Case:
    """The oracle's scenario as the engine takes it; windows and decision times by the code that compiles scenarios."""
    kind, *options = s.decision
    latency = {
        "none": lambda: NoLatency(kind="none"),
        "fixed": lambda: FixedLatency(kind="fixed", seconds=options[0]),
        "affine": lambda: AffineLatency(kind="affine", c0_s=options[0], c1_s=options[1]),
    }[kind]()
    scenario = cast(Scenario, SimpleNamespace(decision_latency=latency, schedulers=s.own))
    arrival_s, scheduler = np.array(s.arrival_s), np.array(s.scheduler)
    windows, decision_s = None, decision_times(scenario, arrival_s, scheduler)
    if policy.batched:
        windows = close_windows(arrival_s, scheduler, s.window_s, s.window_max_requests)
        decision_s = batch_decision_times(scenario, windows, scheduler)
    believed = None if s.believed_osl is None else np.array(s.believed_osl)

    def ci(times_s: np.ndarray) -> np.ndarray:
        return np.array([s.ci(round(t / s.window_s)) for t in times_s])

    return Case(fleet_of(s), policy, Requests(arrival_s, decision_s, np.array(s.isl), np.array(s.osl), scheduler, believed, windows), ci)


def batch_sizes(s: OracleScenario, step_windows: int, **changes: int) -> Sizes:
    """Shapes with room for any of the worlds, so that those of one kind compile once."""
    usual = {"requests": MOST_REQUESTS, "step_requests": 64, "transit": 64, "batches": MOST_BATCHES, "batch_requests": MOST_IN_A_BATCH}
    return sizes_of(s, step_windows, **usual | changes)


def run_batches(
    scenarios: list[OracleScenario], policies: list[AbstractPolicy | AbstractHostPolicy], sizes: Sizes
) -> list[tuple[EngineResult, EngineBatches | None]]:
    """Run scenarios, which share shapes, window and horizon, side by side."""
    s = scenarios[0]
    cases = [case_of(world, policy) for world, policy in zip(scenarios, policies, strict=True)]
    simulation = Simulation(cases, window_s=s.window_s, horizon_steps=s.horizon_windows // sizes.step_windows, sizes=sizes)
    assert simulation.sizes == sizes, "worlds that need more room compile again"
    advances: list[list[Advance]] = []
    results = finish(scenarios, simulation, advances)
    batches = [told([chunk[i] for chunk in advances], simulation.fallbacks(i)) for i in range(len(scenarios))]
    return list(zip(results, batches, strict=True))


def told(advances: list[Advance], fallbacks: tuple[int, int]) -> EngineBatches | None:
    """What a run tells of its batches, if its policy tells anything."""
    parts = [advance.told for advance in advances if advance.told is not None]
    if not parts:
        return None
    answers: list[Solved] = [part.answer for part in parts]

    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    def answer(name: str) -> np.ndarray:
        return np.concatenate([np.asarray(getattr(a, name)) for a in answers])

    decided_s, scheduler = column("decided_s"), column("scheduler")
    order = np.lexsort((scheduler, decided_s))  # a stable sort
    return EngineBatches(
        decided_s=decided_s[order],
        scheduler=scheduler[order],
        requests=column("requests")[order],
        status=[STATUSES[i] for i in answer("status")[order]],
        objective=answer("objective")[order],
        by_carbon=answer("lowest")[order],
        in_turn=answer("dealt")[order],
        fallbacks=fallbacks,
    )
