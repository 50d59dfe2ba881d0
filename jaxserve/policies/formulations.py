"""What the optimising policies ask of a solver each window (SEMANTICS.md, "Batch policies"; arXiv 2610.14571 with our definitions)."""

from abc import abstractmethod
from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxserve.engine.batch import Batch
from jaxserve.engine.control import View
from jaxserve.policies.estimate import Estimate, energy_j, estimate, headroom, marginal_energy_j
from jaxserve.solvers.problem import AssignmentProblem
from jaxserve.units import J_PER_KWH

GREEN_LLM_DEADLINE_S = 5.0
"""Latency that the study's port of Green-LLM allows."""

Variant = Literal["default", "f_const", "c_full"]
IdleShare = Literal["linear", "exp"]


class AbstractFormulation(eqx.Module):
    """From a scheduler's view of the DCs and its window to an assignment problem in grams of CO2e."""

    opens: ClassVar[bool] = False  # whether DCs have opening costs
    solves: int = eqx.field(static=True, default=1)  # at most, each from the assignment before it

    @abstractmethod
    def problem(self, view: View, batch: Batch, placed: Array) -> AssignmentProblem:
        """The problem of one scheduler; `placed` [N] is the assignment of the solve before (-1: not placed), nowhere for the first."""

    def keeps_slo(self, view: View, batch: Batch, problem: AssignmentProblem) -> Array:
        """[N, D] where the fallback may send requests: DCs that keep their SLO, for most formulations those of the first `problem`."""
        return jnp.asarray(problem.feasible)


class Ilp(AbstractFormulation):
    """Every request to a DC that keeps its SLO, none over its headroom, at the least carbon."""

    def problem(self, view: View, batch: Batch, placed: Array) -> AssignmentProblem:
        """Cost c, capacity H."""
        expected = _estimates(view, batch)
        cost = _grams(view, jax.vmap(energy_j, in_axes=(None, 0, 0))(view, batch.isl, batch.osl))
        return _assignment(view, batch, cost, expected.feasible)


class IterativeIlp(AbstractFormulation):
    """The ILP, solved again with its own assignment in the estimates until it repeats or `solves` are made."""

    def problem(self, view: View, batch: Batch, placed: Array) -> AssignmentProblem:
        """Like the ILP's, each request seeing the others of the window where they were placed before."""
        mine = placed[:, None] == jnp.arange(view.ci.shape[0])  # [N, D]
        isl = jnp.where(mine, batch.isl[:, None], 0.0)
        others = (jnp.sum(mine, axis=0) - mine) / view.engines
        tokens = (jnp.sum(isl, axis=0) - isl) / view.engines
        rows = eqx.tree_at(
            lambda v: (v.batch, v.queued_tokens, v.cached),
            view,
            (view.batch + others, view.queued_tokens + tokens, view.cached + tokens),
        )
        shared = jax.tree.map(lambda _: None, view)
        axes = eqx.tree_at(lambda v: (v.batch, v.queued_tokens, v.cached), shared, (0, 0, 0), is_leaf=lambda axis: axis is None)
        feasible = batch.open & jax.vmap(lambda v, i, o: estimate(v, i, o).feasible, in_axes=(axes, 0, 0))(rows, batch.isl, batch.osl)
        cost = _grams(view, jax.vmap(energy_j, in_axes=(axes, 0, 0))(rows, batch.isl, batch.osl))
        # A request that no DC can serve any more keeps its DC; one that was in no earlier solve is in none.
        again = jnp.where(jnp.any(feasible, axis=1, keepdims=True), feasible, mine) & (placed >= 0)[:, None]
        feasible = jnp.where(jnp.any(placed >= 0), again, feasible)
        return _assignment(view, batch, cost, feasible)


class FacilityMilp(AbstractFormulation):
    """Separates what a DC pays once, waking engines that are empty, from what each request adds."""

    opens: ClassVar[bool] = True
    f_const: ArrayLike = False  # [] bool: one engine to wake, however busy the DC
    c_full: ArrayLike = False  # [] bool: requests pay their share of fixed step energy too
    exp_idle: ArrayLike = False  # [] bool: share of empty engines exp(-B) instead of max(0, 1 - B)

    @classmethod
    def of(cls, variant: Variant = "default", idle_share: IdleShare = "linear") -> "FacilityMilp":
        """From names."""
        return cls(f_const=np.bool_(variant == "f_const"), c_full=np.bool_(variant == "c_full"), exp_idle=np.bool_(idle_share == "exp"))

    def problem(self, view: View, batch: Batch, placed: Array) -> AssignmentProblem:
        """Cost c_m (or c), capacity H, opening f."""
        fleet = view.fleet
        expected = _estimates(view, batch)
        full = jax.vmap(energy_j, in_axes=(None, 0, 0))(view, batch.isl, batch.osl)
        marginal = marginal_energy_j(fleet, batch.isl, batch.osl)[:, None]
        cost = _grams(view, jnp.where(jnp.asarray(self.c_full), full, marginal))
        problem = _assignment(view, batch, cost, expected.feasible)
        placeable = jnp.sum(jnp.any(problem.feasible, axis=1))
        usable = jnp.maximum(jnp.sum(jnp.any(problem.feasible, axis=0)), 1)
        empty = view.engines * jnp.where(jnp.asarray(self.exp_idle), jnp.exp(-view.batch), jnp.maximum(0.0, 1.0 - view.batch))
        wake = jnp.where(jnp.asarray(self.f_const), 1.0, jnp.minimum(empty, jnp.maximum(1.0, placeable / usable)))
        # One request alone on an engine: what its steps cost beyond idling.
        alone_s = fleet.decode_time(jnp.asarray(1.0), view.isl_mean + view.osl_mean / 2.0)
        waking_j = fleet.prefill_energy.e_pre0 + view.osl_mean * (fleet.decode_energy.shared(1.0) - fleet.idle_w * alone_s)
        opening = jnp.maximum(0.0, _grams(view, wake * jnp.maximum(0.0, waking_j)))  # where CI is below 0, opening is free
        return eqx.tree_at(lambda p: p.opening, problem, opening)


class GreenLlm(AbstractFormulation):
    """The study's port of Green-LLM: energies that know no load, and every DC that keeps a deadline of 5 s without one."""

    def problem(self, view: View, batch: Batch, placed: Array) -> AssignmentProblem:
        """Cost from a request alone on an engine, capacity H."""
        fleet = view.fleet
        alone = fleet.prefill_energy.e_pre0 + batch.osl * fleet.decode_energy.shared(1.0) + marginal_energy_j(fleet, batch.isl, batch.osl)
        tokens = view.isl_mean + view.osl_mean
        unloaded = fleet.prefill_time(view.isl_mean, jnp.asarray(1.0), view.isl_mean**2)
        unloaded += view.osl_mean * fleet.decode_time(jnp.asarray(1.0), view.isl_mean)
        latency = view.rtt_s + (unloaded / tokens * (batch.isl + batch.osl))[:, None]
        return _assignment(view, batch, _grams(view, alone[:, None]), latency <= GREEN_LLM_DEADLINE_S)

    def keeps_slo(self, view: View, batch: Batch, problem: AssignmentProblem) -> Array:
        """By the estimates of the others: a deadline without a state is no SLO."""
        return _estimates(view, batch).feasible & batch.here[:, None] & batch.open


def _estimates(view: View, batch: Batch) -> Estimate:
    return jax.vmap(estimate, in_axes=(None, 0, 0))(view, batch.isl, batch.osl)


def _grams(view: View, joules: Array) -> Array:
    """CO2e of joules at the engines of each DC."""
    return view.pue * view.ci * joules / J_PER_KWH


def _assignment(view: View, batch: Batch, cost: Array, feasible: Array) -> AssignmentProblem:
    return AssignmentProblem(
        cost=cost, feasible=feasible & batch.here[:, None] & batch.open, capacity=headroom(view), opening=jnp.zeros_like(view.ci)
    )
