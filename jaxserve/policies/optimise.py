"""Policies that solve an assignment problem each window: on the device inside the compiled run, or on the host between its steps."""

from typing import Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpy.typing import NDArray

from jaxserve.engine.batch import AbstractBatchPolicy, Batch, batch_views, batches_in, gather
from jaxserve.engine.control import View, noted, snapshot_views, view_axes
from jaxserve.engine.hosted import AbstractHostPolicy
from jaxserve.engine.lanes import across_lanes
from jaxserve.engine.model import Arrivals, Fleet
from jaxserve.engine.requests import StepRequests
from jaxserve.engine.state import Schedulers, Snapshot
from jaxserve.policies.formulations import AbstractFormulation
from jaxserve.solvers.facility import solve_facility
from jaxserve.solvers.problem import AssignmentProblem, Solution
from jaxserve.solvers.transport import solve_transport
from jaxserve.types import on_host


class Memory(eqx.Module):
    """What a scheduler remembers: how its fallbacks have been used."""

    lowest: Array  # [] int32, requests sent to the lowest-carbon DC with headroom
    dealt: Array  # [] int32, requests dealt in turn


class Solved(eqx.Module):
    """What is told of a window."""

    status: Array  # [] int32, index into STATUSES
    objective: Array  # [] g CO2e as estimated
    bound: Array  # [] g CO2e
    solves: Array  # [] int32
    lowest: Array  # [] int32, requests that the fallback sent to the lowest-carbon DC with headroom
    dealt: Array  # [] int32, requests that it dealt in turn


class OnDevice(AbstractBatchPolicy):
    """A formulation with the device solver: a run or a sweep never leaves the device."""

    formulation: AbstractFormulation
    gap: float

    def init(self, n_dc: int) -> Memory:
        """No fallback used yet."""
        return Memory(jnp.int32(0), jnp.int32(0))

    def decide(self, view: View, batch: Batch, memory: Memory) -> tuple[Array, Memory, Solved]:
        """Solves, perhaps again and again, and lets the fallback place what the solver did not."""
        ask, solve = self.formulation.problem, self._solve
        first = ask(view, batch, _nowhere(batch))
        if self.formulation.solves == 1:
            made, solution = jnp.int32(1), solve(first)
        else:
            blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(solve, first))
            start = (jnp.int32(0), eqx.tree_at(lambda s: s.place, blank, _nowhere(batch)), jnp.asarray(True))

            def again(carry: tuple[Array, Solution, Array]) -> tuple[Array, Solution, Array]:
                made, best, _ = carry
                new = solve(ask(view, batch, best.place))
                better = jnp.any(jnp.asarray(new.place) >= 0)
                changed = better & jnp.any(new.place != best.place)
                return made + 1, jax.tree.map(lambda n, b: jnp.where(better | (made == 0), n, b), new, best), changed

            # One solve in the loop, the first included: a second one would take as long to compile.
            made, solution, _ = jax.lax.while_loop(lambda c: c[2] & (c[0] < self.formulation.solves), again, start)
        return settle(view, batch, self.formulation.keeps_slo(view, batch, first), first.capacity, solution, made, memory)

    def _solve(self, problem: AssignmentProblem) -> Solution:
        return solve_facility(problem, gap=self.gap) if self.formulation.opens else solve_transport(problem, gap=self.gap)

    def fallbacks(self, memory: Memory) -> Array:
        """Both kinds."""
        return jnp.stack([jnp.sum(memory.lowest), jnp.sum(memory.dealt)])


def _nowhere(batch: Batch) -> Array:
    """No assignment yet: [N]."""
    return jnp.full(batch.isl.shape, -1, jnp.int32)


def settle(
    view: View, batch: Batch, feasible: Array, capacity: ArrayLike, solution: Solution, solves: Array, memory: Memory
) -> tuple[Array, Memory, Solved]:
    """The places [N] of a window's requests: the solver's, and for the others the fallback's, in order of arrival.

    The fallback takes the `feasible` [N, D] DC of lowest CI with headroom left of `capacity` [D], or else the next in turn of the
    open ones (arXiv 2610.14571).
    """
    n_open, (opened,) = jnp.sum(batch.open, dtype=jnp.int32), jnp.nonzero(batch.open, size=batch.open.shape[0], fill_value=0)
    left_over = batch.here & (jnp.asarray(solution.place) < 0)
    (order,) = jnp.nonzero(left_over, size=left_over.shape[0], fill_value=left_over.shape[0])
    many = jnp.sum(left_over, dtype=jnp.int32)
    most = across_lanes(many)

    def fall_back(carry: tuple[Array, Array, Array, Memory]) -> tuple[Array, Array, Array, Memory]:
        j, place, room, m = carry
        r = order[j]
        open_ = feasible.at[r].get(mode="fill", fill_value=False) & (room > 0)
        served, here = jnp.any(open_), j < many
        d = jnp.where(served, jnp.argmin(jnp.where(open_, view.ci, jnp.inf)), opened[m.dealt % n_open]).astype(jnp.int32)
        place = place.at[jnp.where(here, r, place.shape[0])].set(d, mode="drop")
        room = room.at[d].add(jnp.where(here & served, -1.0, 0.0))
        return j + 1, place, room, Memory(m.lowest + (here & served), m.dealt + (here & ~served))

    start = (jnp.int32(0), jnp.asarray(solution.place, jnp.int32), jnp.asarray(capacity, float), memory)
    _, place, _, after = jax.lax.while_loop(lambda carry: carry[0] < most, fall_back, start)
    told = Solved(
        status=jnp.asarray(solution.status),
        objective=jnp.asarray(solution.objective),
        bound=jnp.asarray(solution.bound),
        solves=solves,
        lowest=after.lowest - memory.lowest,
        dealt=after.dealt - memory.dealt,
    )
    return jnp.where(batch.here, place, 0), after, told


class Solver(Protocol):
    """A back end on the host."""

    def solve(self, problem: AssignmentProblem) -> Solution:
        """One problem, DCs in their own order."""
        ...


class OnHost(AbstractHostPolicy):
    """A formulation with a solver on the host, one solver a scheduler."""

    def __init__(self, formulation: AbstractFormulation, solver: Solver, *, measured: bool) -> None:
        self.formulation, self.solver, self.measured = formulation, solver, measured

    def init(self, n_dc: int) -> Memory:
        """No fallback used yet."""
        return Memory(jnp.int32(0), jnp.int32(0))

    def fallbacks(self, memory: Memory) -> Array:
        """Both kinds."""
        return jnp.stack([jnp.sum(memory.lowest), jnp.sum(memory.dealt)])

    def plan(
        self, fleet: Fleet, arrivals: Arrivals, snapshot: Snapshot, schedulers: Schedulers, requests: StepRequests
    ) -> tuple[NDArray[np.int32], Schedulers, Solved, NDArray[np.float64]]:
        """Solves window after window of the step, the schedulers' side by side."""
        own = np.asarray(fleet.place)
        groups = requests.batch_end.shape
        places = np.zeros(requests.request.shape[0], np.int32)
        wall_s, told = np.zeros(groups), []
        for k in range(int(batches_in(requests))):
            batch, at, schedulers, view, first = _ask(self.formulation, fleet, arrivals, snapshot, schedulers, requests, k)
            solution = self._solve_all(first, own)
            solves, unsettled = np.ones(groups[1], np.int32), (solution.place >= 0).any(axis=1)
            seconds = np.array(solution.wall_s)
            for _ in range(1, self.formulation.solves):
                if not unsettled.any():
                    break
                new = self._solve_all(_ask_again(self.formulation, view, batch, solution.place), own, unsettled)
                better = unsettled & (new.place >= 0).any(axis=1)
                same = (new.place == solution.place).all(axis=1)
                solves, seconds = solves + unsettled, seconds + np.where(unsettled, new.wall_s, 0.0)
                solution = jax.tree.map(lambda n, b, m=better: np.where(m.reshape(-1, *[1] * (n.ndim - 1)), n, b), new, solution)
                unsettled = better & ~same
            place, schedulers, news = _settle_all(self.formulation, fleet, view, batch, first, solution, solves, schedulers)
            at = np.asarray(at).ravel()
            inside = at < len(places)
            places[at[inside]] = np.asarray(place).ravel()[inside]
            wall_s[k] = seconds
            told.append(jax.tree.map(np.asarray, news))
        blank = Solved(*[on_host(np.zeros(groups[1], dtype)) for dtype in (np.int32, float, float, np.int32, np.int32, np.int32)])
        told += [blank] * (groups[0] - len(told))
        return places, schedulers, jax.tree.map(lambda *leaves: np.stack(leaves), *told), wall_s

    def _solve_all(self, problems: AssignmentProblem, places: NDArray[np.int32], asked: NDArray[np.bool_] | None = None) -> Solution:
        """One solve a scheduler [G, ...], in the DCs' common order, so that a model may name them; those not `asked` stay blank.

        `places` [G, D]: the place of each DC in a scheduler's own order.
        """
        problems = jax.tree.map(np.asarray, problems)
        answers = []
        for g, place_of in enumerate(places):
            own = jax.tree.map(lambda leaf, g=g: leaf[g], problems)
            if asked is not None and not asked[g]:
                own = eqx.tree_at(lambda p: p.feasible, own, np.zeros_like(own.feasible))
            answer = self.solver.solve(jax.tree.map(lambda leaf, at=place_of: leaf[..., at], own))
            place = np.asarray(answer.place)
            answers.append(eqx.tree_at(lambda a: a.place, answer, np.where(place >= 0, place_of[place], -1)))
        return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *answers)


@jax.jit
def _ask(
    formulation: AbstractFormulation,
    fleet: Fleet,
    arrivals: Arrivals,
    snapshot: Snapshot,
    schedulers: Schedulers,
    requests: StepRequests,
    k: int,
) -> tuple[Batch, Array, Schedulers, View, AssignmentProblem]:
    batch, at = gather(fleet, arrivals, requests, jnp.asarray(k, jnp.int32))
    schedulers, view = batch_views(fleet, snapshot_views(fleet, snapshot), schedulers, batch)
    problem = _ask_again(formulation, view, batch, _nowhere(batch))
    return batch, at, schedulers, view, problem


@jax.jit
def _ask_again(formulation: AbstractFormulation, view: View, batch: Batch, placed: Array) -> AssignmentProblem:
    return jax.vmap(formulation.problem, in_axes=(view_axes(view), 0, 0))(view, batch, placed)


@jax.jit
def _settle_all(
    formulation: AbstractFormulation,
    fleet: Fleet,
    view: View,
    batch: Batch,
    problem: AssignmentProblem,
    solution: Solution,
    solves: Array,
    schedulers: Schedulers,
) -> tuple[Array, Schedulers, Solved]:
    def one(
        view: View, batch: Batch, problem: AssignmentProblem, solution: Solution, solves: Array, memory: Memory
    ) -> tuple[Array, Memory, Solved]:
        return settle(view, batch, formulation.keeps_slo(view, batch, problem), problem.capacity, solution, solves, memory)

    axes = (view_axes(view), 0, 0, 0, 0, 0)
    place, memory, told = jax.vmap(one, in_axes=axes)(view, batch, problem, solution, solves, schedulers.memory)
    return place, noted(fleet, schedulers, place, batch.isl, batch.osl, batch.here, memory), told
