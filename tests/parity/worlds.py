"""The random scenarios of the parity tests, run as few compiled calls: lanes of one kind of world, whatever their policy, side by side."""

import math
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxserve.engine.control import AbstractPolicy, AbstractRequestPolicy, View
from jaxserve.engine.model import Arrivals, Fleet
from jaxserve.engine.requests import StepRequests
from jaxserve.engine.state import Schedulers, Snapshot
from jaxserve.policies.greedy import Greedy
from jaxserve.policies.simple import LeastLoaded, RoundRobin
from tests.oracle.model import OracleResult, OracleScenario
from tests.oracle.random_forms import padded, piecewise, table
from tests.oracle.random_knowledge import REQUEST_SEEDS, informed_scenario
from tests.oracle.random_scenarios import KINDS, random_scenario
from tests.oracle.simulator import simulate
from tests.parity.bridge import EngineResult, policy_of, run_lanes, sizes_of, step_windows_of

SEEDS = range(REQUEST_SEEDS.stop)
PADDED, PIECEWISE, TABLE = 1001, 2002, 3003
"""Added to the seed of a world that is changed in this way; multiples of the number of kinds."""
OTHERS = (
    *(PADDED + seed for seed in (*range(2, 62, 7), *range(79, 105, 7), *range(121, 154, 7), *range(170, 210, 7))),
    *(form + seed for form in (PIECEWISE, TABLE) for seed in (*range(2, 62, 7), *range(79, 97, 7))),
)
"""Each of these has a program of its own: so they are of one kind, and their schedulers look at snapshots."""
Group = tuple[int, str, str]
LANES = 3  # of one call; their number is a shape, so the last call of a group has no fewer


class ByRequest(AbstractRequestPolicy):
    """`Greedy` or `LeastLoaded` by a flag, which halves the programs to compile; both are called, neither is rewritten."""

    greedy: Greedy
    least_loaded: ArrayLike  # [] bool

    def init(self, n_dc: int) -> Array:
        """The memory of `Greedy`; `LeastLoaded` has none."""
        return self.greedy.init(n_dc)

    def choose(self, view: View, isl: Array, osl: Array, memory: Array) -> tuple[Array, Array]:
        """The choice of the policy that the flag names."""
        place, after = self.greedy.choose(view, isl, osl, memory)
        least, _ = LeastLoaded().choose(view, isl, osl, ())
        return jnp.where(self.least_loaded, least, place), after


class AnyPolicy(AbstractPolicy):
    """Round-robin by a flag, else `ByRequest`, which halves them once more; their memories are of one form.

    Round-robin then takes shorter steps than it could: steps of its own it takes alone, in `test_parity.SINGLES`.
    """

    observes: ClassVar[bool] = True
    by_request: ByRequest
    round_robin: ArrayLike  # [] bool

    def init(self, n_dc: int) -> Array:
        """The memory of all of them: a number of requests dealt."""
        return self.by_request.init(n_dc)

    def route(
        self, fleet: Fleet, arrivals: Arrivals, snapshot: Snapshot, schedulers: Schedulers, requests: StepRequests
    ) -> tuple[Array, Schedulers, tuple[()]]:
        """The routing of the policy that the flag names."""
        known = (fleet, arrivals, snapshot, schedulers, requests)
        found = RoundRobin().route(*known), self.by_request.route(*known)
        place, after, _ = jax.tree.map(lambda dealt, chosen: jnp.where(self.round_robin, dealt, chosen), *found)
        return place, after, ()


@cache
def world(seed: int) -> OracleScenario:
    """The world of a seed; the last before `PADDED` have schedulers that know more, the ones after are those of the seeds left, changed."""
    if seed < PADDED:
        return informed_scenario(seed) if seed in REQUEST_SEEDS else random_scenario(seed)
    base = seed % PADDED
    if seed < PIECEWISE:
        return padded(random_scenario(base))
    return (piecewise if seed < TABLE else table)(random_scenario(base), base)


@cache
def reference(seed: int) -> OracleResult:
    """What the event-driven reference says of a world."""
    return simulate(world(seed))


def lane_policy(s: OracleScenario) -> AbstractPolicy:
    """The scenario's policy in a form that shares a compiled call with others."""
    policy = policy_of(s)
    greedy = policy if isinstance(policy, Greedy) else Greedy.of()
    return AnyPolicy(ByRequest(greedy, np.bool_(isinstance(policy, LeastLoaded))), np.bool_(isinstance(policy, RoundRobin)))


def group_of(seed: int) -> Group:
    """What must be compiled apart: the kind of world, form of step times and count of tokens."""
    s = world(seed)
    return seed % len(KINDS), s.t_pre.get("form", "study"), s.token_count


@cache
def groups() -> dict[Group, list[int]]:
    """Seeds by group, group after group."""
    found = defaultdict(list)
    for seed in (*SEEDS, *OTHERS):
        found[group_of(seed)].append(seed)
    return dict(sorted(found.items()))


def batches(seeds: list[int]) -> list[list[int]]:
    """Lanes of one window length each. Those that take long to drain go together, for all lanes run until the last has finished."""
    by_window = defaultdict(list)
    for seed in sorted(seeds, key=lambda seed: max(reference(seed).finish_s)):
        by_window[world(seed).window_s].append(seed)
    return [mine[i : i + LANES] for mine in by_window.values() for i in range(0, len(mine), LANES)]


def run_batch(scenarios: list[OracleScenario], step_windows: int) -> list[EngineResult]:
    """Run up to `LANES` scenarios of one group and one window length; repeats of the last fill the lanes left over."""
    lanes = scenarios + [scenarios[-1]] * (LANES - len(scenarios))
    return run_lanes(lanes, [lane_policy(s) for s in lanes], sizes_of(lanes[0], step_windows))[: len(scenarios)]


def group_step_windows(seeds: list[int]) -> int:
    """The longest step that all worlds of a group allow."""
    return math.gcd(*(step_windows_of(world(seed), observes=True) for seed in seeds))


def group_results(group: Group) -> dict[int, EngineResult]:
    """What the engine makes of the worlds of a group, by seed."""
    seeds = groups()[group]
    step_windows = group_step_windows(seeds)
    results: dict[int, EngineResult] = {}
    for batch in batches(seeds):
        results |= zip(batch, run_batch([world(seed) for seed in batch], step_windows), strict=True)
    return results


_workers = ThreadPoolExecutor(2)
_started: dict[Group, Future[dict[int, EngineResult]]] = {}


def result(seed: int) -> EngineResult:
    """What the engine makes of a world, as one lane among others.

    The next group begins meanwhile in a second thread: compiling is most of the work, and takes one core.
    """
    mine = group_of(seed)
    order = list(groups())
    for group in order[order.index(mine) :][:2]:
        if group not in _started:
            _started[group] = _workers.submit(group_results, group)
    return _started[mine].result()[seed]
