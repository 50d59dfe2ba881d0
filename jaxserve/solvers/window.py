"""A problem as the solvers on the device see it, and what proves an answer there."""

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from jaxserve.solvers.problem import EMPTY, FAILED, AssignmentProblem, Solution, usable


class Window(eqx.Module):
    """A problem in which everything counts. N requests, D data centres."""

    cost: Array  # [N, D] over `scale`; inf where not feasible or without capacity
    rows: Array  # [N] bool, requests to place
    capacity: Array  # [D] int32, at most the requests that it could serve; 0 for a DC that may not be used
    scale: Array  # [] mean |cost| of the feasible pairs, in the problem's unit; 1 if that is 0


def window_of(problem: AssignmentProblem) -> Window:
    """The problem without its openings."""
    feasible, cost = jnp.asarray(problem.feasible), jnp.asarray(problem.cost, float)
    counts = feasible & jnp.isfinite(cost)
    many = jnp.sum(counts, axis=0, dtype=jnp.int32)
    mean = jnp.sum(jnp.abs(jnp.where(counts, cost, 0.0))) / jnp.maximum(jnp.sum(many), 1)
    scale = jnp.where((mean > 0) & jnp.isfinite(mean), mean, 1.0)
    capacity = jnp.clip(jnp.nan_to_num(jnp.asarray(problem.capacity, float)), 0, many).astype(jnp.int32)
    return Window(jnp.where(counts & (capacity > 0), cost / scale, jnp.inf), jnp.any(feasible, axis=1), capacity, scale)


def at_place(cost: Array, place: Array) -> Array:
    """Each request's cost [N, D] where it is placed, whatever where it is not: [N]."""
    return jnp.take_along_axis(cost, jnp.clip(place, 0, cost.shape[1] - 1)[:, None], axis=1)[:, 0]


def held(place: Array, dcs: int) -> Array:
    """How many requests are at each DC: [D] int32. A place that is no DC is `dcs`."""
    return jnp.zeros(dcs, jnp.int32).at[place].add(1, mode="drop")


def value_of(w: Window, place: Array) -> Array:
    """Cost of place [N] over scale: []."""
    return jnp.sum(jnp.where(w.rows, at_place(w.cost, place), 0.0))


def least_of(w: Window, price: Array) -> Array:
    """What each request pays at least, with price [D] for a place: [N], 0 for rows that are no requests."""
    return jnp.where(w.rows, jnp.min(w.cost + price, axis=1), 0.0)


def bound_of(w: Window, price: Array) -> Array:
    """No assignment costs less, at any prices [D] >= 0 (weak duality): sum_r min_d (cost_rd + price_d) - sum_d price_d capacity_d."""
    return jnp.sum(least_of(w, price)) - jnp.sum(price * w.capacity)


def finished(problem: AssignmentProblem, place: Array, objective: Array, bound: Array, status: Array) -> Solution:
    """A solution from what was found, put right for problems that are empty or not usable."""
    rows, fine = jnp.any(jnp.asarray(problem.feasible), axis=1), usable(problem)
    empty = ~jnp.any(rows)
    return Solution(
        place=jnp.where(rows & fine, place, -1).astype(jnp.int32),
        objective=jnp.where(fine, jnp.where(empty, 0.0, objective), jnp.inf),
        bound=jnp.where(fine, jnp.where(empty, 0.0, bound), -jnp.inf),
        status=jnp.where(fine, jnp.where(empty, EMPTY, status), FAILED).astype(jnp.int32),
        wall_s=jnp.full((), jnp.nan),
    )
