"""The random worlds of batch policies, run as few compiled calls: one program for each kind of world."""

from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxserve.engine.batch import AbstractBatchPolicy, Batch
from jaxserve.engine.control import AbstractPolicy, View
from jaxserve.policies.formulations import AbstractFormulation, FacilityMilp, GreenLlm, Ilp, IterativeIlp
from jaxserve.policies.optimise import Memory, OnDevice, Solved
from jaxserve.policies.weighted import MoerCap
from jaxserve.solvers.problem import AssignmentProblem
from tests.oracle.model import OracleResult, OracleScenario
from tests.oracle.random_batches import GROUPS, KINDS, POLICIES, T_MAX, random_batches
from tests.oracle.random_knowledge import BATCH_SEEDS, informed_batches
from tests.oracle.simulator import simulate
from tests.parity.batch_bridge import GAP, EngineBatches, batch_sizes, policy_of, run_batches
from tests.parity.bridge import EngineResult

LANES = 6  # of one call; their number is a shape
PER_REQUEST = POLICIES.index("moer_soft")  # a program of its own, for one kind of world
SEEDS = [seed for seed in range(BATCH_SEEDS.stop) if seed % GROUPS != PER_REQUEST * len(KINDS)]
TRANSPORT = ("ilp", "iterative_ilp", "green_llm")


class AnyTransport(AbstractFormulation):
    """One of the formulations without openings, by a number.

    The ILP and Green-LLM ask the same again where the iterative ILP asks anew, get the same answer, and that ends it.
    """

    which: ArrayLike = 0  # [] int32, place in TRANSPORT

    def problem(self, view: View, batch: Batch, placed: Array) -> AssignmentProblem:
        """That of the formulation that the number names."""
        problems = [f.problem(view, batch, placed) for f in self._all()]
        return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves])[self.which], *problems)

    def keeps_slo(self, view: View, batch: Batch, problem: AssignmentProblem) -> Array:
        """Likewise."""
        return jnp.stack([f.keeps_slo(view, batch, problem) for f in self._all()])[self.which]

    def _all(self) -> tuple[AbstractFormulation, ...]:
        return Ilp(), IterativeIlp(solves=self.solves), GreenLlm()


class AnyBatch(AbstractBatchPolicy):
    """One of the batch policies, by a number, which saves four programs in five; all are called, none is rewritten.

    Those not named get an empty window, do nothing with it, and leave the memory as it is.
    """

    transport: OnDevice
    facility: OnDevice
    cap: MoerCap
    which: ArrayLike  # [] int32, place among the three

    def init(self, n_dc: int) -> Memory:
        """That of the policies that solve."""
        return self.transport.init(n_dc)

    def decide(self, view: View, batch: Batch, memory: Memory) -> tuple[Array, Memory, Solved]:
        """The decision of the policy that the number names."""

        def mine(number: int) -> Batch:
            return eqx.tree_at(lambda b: b.here, batch, batch.here & (self.which == number))

        first, memory, of_transport = self.transport.decide(view, mine(0), memory)
        second, memory, of_facility = self.facility.decide(view, mine(1), memory)
        third, _, _ = self.cap.decide(view, mine(2), ())
        told = jax.tree.map(lambda a, b: jnp.where(self.which == 1, b, a), of_transport, of_facility)
        return jnp.stack([first, second, third.astype(first.dtype)])[self.which], memory, told

    def fallbacks(self, memory: Memory) -> Array:
        """Both kinds."""
        return self.transport.fallbacks(memory)


@cache
def world(seed: int) -> OracleScenario:
    """The world of a seed; the last ones have schedulers that know more."""
    return informed_batches(seed) if seed in BATCH_SEEDS else random_batches(seed)


@cache
def reference(seed: int) -> OracleResult:
    """What the event-driven reference says of a world."""
    return simulate(world(seed))


def lane_policy(seed: int) -> AbstractPolicy:
    """The policy of a world in a form that shares a compiled call with others."""
    name, policy = world(seed).policy[0], policy_of(world(seed))
    if name == "moer_soft":
        return policy
    formulation = AnyTransport(solves=T_MAX[seed % len(KINDS)], which=np.int32(TRANSPORT.index(name) if name in TRANSPORT else 0))
    return AnyBatch(
        transport=OnDevice(formulation, np.float64(GAP)),
        facility=policy if name == "facility_milp" else OnDevice(FacilityMilp.of(), np.float64(GAP)),
        cap=policy if name == "moer_cap" else MoerCap(np.float64(1.0)),
        which=np.int32(0 if name in TRANSPORT else 1 if name == "facility_milp" else 2),
    )


def program_of(seed: int) -> tuple[int, bool, bool]:
    """What must be compiled apart: the kind of world, whether its policy decides batches, and whether owners place some of them."""
    s = world(seed)
    return seed % len(KINDS), s.policy[0] != "moer_soft", s.forwarding == "owner"


@cache
def programs() -> dict[tuple[int, bool, bool], list[int]]:
    """Seeds by program, those that take longest to compile first."""
    found = defaultdict(list)
    for seed in SEEDS:
        found[program_of(seed)].append(seed)
    return dict(sorted(found.items(), key=lambda item: not item[0][1]))


def program_results(kind: int, batched: bool, by_owner: bool) -> dict[int, tuple[EngineResult, EngineBatches | None]]:
    """What the engine makes of the worlds of a program: those of one group, whose windows are of one length, side by side."""
    by_group = defaultdict(list)
    for seed in programs()[kind, batched, by_owner]:
        by_group[seed % GROUPS].append(seed)
    found = {}
    for seeds in (mine[i : i + LANES] for mine in by_group.values() for i in range(0, len(mine), LANES)):
        scenarios = [world(seed) for seed in seeds]
        results = run_batches(scenarios, [lane_policy(seed) for seed in seeds], batch_sizes(scenarios[0], 1))
        found |= dict(zip(seeds, results, strict=True))
    return found


_workers = ThreadPoolExecutor(2)
_started: dict[tuple[int, bool, bool], Future] = {}


def result(seed: int) -> tuple[EngineResult, EngineBatches | None]:
    """What the engine makes of a world, as one lane among others. The next program is compiled meanwhile in a second thread."""
    mine = program_of(seed)
    order = list(programs())
    for program in order[order.index(mine) :][:2]:
        if program not in _started:
            _started[program] = _workers.submit(program_results, *program)
    return _started[mine].result()[seed]
