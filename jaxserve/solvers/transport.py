"""The transport problem on the device, exact: shortest augmenting paths over the graph of DCs, with their prices as the proof.

1. Prices that nearly balance demand and capacity, from the problem smoothed by entropy (Cuturi 2013; Schmitzer 2019 for the
   annealing). They only save work: whatever they are, the rest is exact.
2. Every request goes where cost + price is least. That is optimal at these prices, but over capacity in places.
3. One path at a time, units move from DCs with too many to DCs with too few, always along a shortest path of moves; the prices follow
   so that the assignment stays optimal at them (Ahuja, Magnanti, Orlin 1993, section 9.7). Spare places are units too: they cost
   nothing anywhere, so they lie where the price is least, and the assignment is complete when every DC holds its capacity exactly.

Everything has fixed shapes and runs inside jit, vmap and scan. A lane that is done changes no more while others go on.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxserve.solvers.problem import BUDGET, EXACT, FAILED, GAP, INFEASIBLE, OPTIMAL, AssignmentProblem, Solution
from jaxserve.solvers.window import Window, at_place, bound_of, finished, held, value_of, window_of

PATHS = 1 << 20
"""More than any problem needs: there are as many paths as units in the wrong place."""

SMOOTHINGS = np.geomspace(0.2, 2e-4, 6).astype(np.float32)
"""Strengths of the entropy, in mean costs. The last ones separate requests that differ by little; the first ones get there quickly."""

ROUNDS = 16
"""Rounds of balancing at each strength. Some twenty of them cost as much as one path."""

FEW = 4
"""Units too many for which better prices are not worth their time."""

GOLDEN = 0.6180339887498949


class Transport(eqx.Module):
    """Where everything lies, and the prices at which that is optimal."""

    place: Array  # [N] int32; D where the row is no request
    spare: Array  # [D] int32, spare places held
    price: Array  # [D] of a place, in units of scale
    paths: Array  # [] int32, found so far
    stuck: Array  # [] bool: a unit too many can go nowhere, so there is no assignment


def solve_transport(problem: AssignmentProblem, *, gap: ArrayLike = GAP, paths: int = PATHS) -> Solution:
    """The best assignment when openings count for nothing, proven to the relative `gap` at least: one problem, vmap for more.

    A search that ends after `paths` has an assignment only where capacities happen to be kept; what it has is told as `budget`.
    """
    w = window_of(problem)
    done = transport(w, paths)
    # Without prices it is a bound too, and an exact one where costs are 0.
    bound = jnp.maximum(bound_of(w, done.price), bound_of(w, jnp.zeros_like(done.price))) * w.scale
    objective = value_of(w, done.place) * w.scale
    placed = ~done.stuck & jnp.all(held(done.place, w.capacity.shape[0]) <= w.capacity)
    proven = objective - bound <= jnp.maximum(gap, EXACT) * jnp.abs(objective)
    status = jnp.where(placed, jnp.where(proven, OPTIMAL, BUDGET), jnp.where(done.stuck, INFEASIBLE, FAILED))
    objective = jnp.where(placed, objective, jnp.inf)
    bound = jnp.where(done.stuck, jnp.inf, jnp.minimum(bound, objective))
    return finished(problem, jnp.where(placed, done.place, -1), objective, bound, status)


def transport(w: Window, paths: int | Array = PATHS) -> Transport:
    """The transport, found with no more than `paths`; with none, nothing is done.

    Unless it is stuck or `paths` ran out, its bound is its cost. Its prices are 0 where places are left.
    """
    start = _begin(w, jnp.zeros(w.capacity.shape))
    worth = (jnp.sum(jnp.maximum(_excess(w, start), 0)) > FEW) & (paths > 0)
    start = _begin(w, _balance(w, jnp.where(worth, len(SMOOTHINGS), 0)))

    def unfinished(t: Transport) -> Array:
        return jnp.any(_excess(w, t) > 0) & ~t.stuck & (t.paths < paths)

    done = jax.lax.while_loop(unfinished, lambda t: _augment(w, t), start)
    return eqx.tree_at(lambda t: t.price, done, _from_zero(w, done.price))


def _balance(w: Window, strengths_used: Array) -> Array:
    """Prices [D] that bring the smoothed demand near to or below the capacities; 0 if no strength is used.

    A request goes to DC d with a share in proportion to capacity_d exp(-(cost + price_d)/strength), so that DCs that are alike get like
    prices. A round sets each price to where its DC is just full with the others unchanged, or 0, and goes half as far again.
    """
    ok, cost, capacity = jnp.isfinite(w.cost), w.cost.astype(jnp.float32), w.capacity.astype(jnp.float32)
    mean = jnp.sum(jnp.where(ok, jnp.abs(cost), 0.0)) / jnp.maximum(jnp.sum(ok), 1)
    strengths = jnp.asarray(SMOOTHINGS) * jnp.where(mean > 0, mean, 1.0)
    tiny = jnp.finfo(jnp.float32).tiny

    def at_strength(i: Array, price: Array) -> Array:
        paid = cost + price
        least = jnp.min(paid, axis=1, keepdims=True)
        weight = jnp.where(ok, jnp.exp((least - paid) / strengths[i]), 0.0) * capacity
        free = jnp.exp(jnp.minimum(price / strengths[i], 80.0))

        def to_full(_: Array, factor: Array) -> Array:
            total = weight @ factor
            demand = jnp.where(total > 0, 1.0 / jnp.maximum(total, tiny), 0.0) @ weight
            full = jnp.where(demand > 0, capacity / jnp.maximum(demand, tiny), 1.0)
            return jnp.minimum(full * jnp.sqrt(full / jnp.maximum(factor, tiny)), free)

        factor = jax.lax.fori_loop(0, ROUNDS, to_full, jnp.ones_like(price))
        return jnp.maximum(price - strengths[i] * jnp.log(jnp.maximum(factor, tiny)), 0.0)

    smooth = jax.lax.fori_loop(0, strengths_used, at_strength, jnp.zeros_like(capacity)).astype(float)
    # On a grid of a quarter of the last strength, DCs that are alike but for a few infeasible pairs stay so; see `_begin`.
    grid = strengths[-1].astype(float) / 4.0
    return jnp.where(jnp.isfinite(smooth), jnp.round(smooth / grid) * grid, 0.0)


def _from_zero(w: Window, price: Array) -> Array:
    """Prices [D] less the least of a DC with capacity, and 0 for the others."""
    able = w.capacity > 0
    return jnp.where(able, price - jnp.min(jnp.where(able, price, jnp.inf)), 0.0)


def _begin(w: Window, price: Array) -> Transport:
    """Every request where cost + price is least. Spare places where the price is: as far as there is room, the rest at the first one."""
    dcs, price = w.capacity.shape[0], _from_zero(w, price)
    paid = w.cost + price
    least = jnp.min(paid, axis=1)
    # Among equals in proportion to capacity, by a sequence that is even over any stretch; else DCs that are alike take many paths.
    share = jnp.where(paid <= least[:, None], w.capacity, 0).astype(jnp.float32)
    upto = share @ jnp.triu(jnp.ones((dcs, dcs), jnp.float32))
    turn = (np.arange(len(least)) * GOLDEN % 1.0).astype(np.float32)
    place = jnp.where(w.rows, jnp.sum(upto <= turn[:, None] * upto[:, -1:], axis=1), dcs)
    spare = jnp.sum(w.capacity) - jnp.sum(w.rows)
    cheap = (w.capacity > 0) & (price <= 0)
    room = jnp.where(cheap, jnp.maximum(w.capacity - held(place, dcs), 0), 0)
    taken = jnp.clip(spare - (jnp.cumsum(room) - room), 0, room)
    taken = taken.at[jnp.argmax(cheap)].add(jnp.maximum(spare - jnp.sum(taken), 0))
    stuck = (spare < 0) | jnp.any(w.rows & jnp.isinf(least))
    return Transport(place.astype(jnp.int32), taken.astype(jnp.int32), price, jnp.int32(0), stuck)


def _augment(w: Window, t: Transport) -> Transport:
    """At least one unit less where there are too many: along a shortest path of moves to a DC with too few."""
    dcs = jnp.arange(w.capacity.shape[0])
    excess = _excess(w, t)
    # Cheapest move of a request from d to d': [D, D]. One scatter of all requests costs less than keeping it up to date.
    moves = jnp.full((len(dcs), len(dcs)), jnp.inf).at[t.place].min(w.cost - at_place(w.cost, t.place)[:, None], mode="drop")
    moves = jnp.minimum(moves, jnp.where((t.spare > 0)[:, None] & (w.capacity > 0), 0.0, jnp.inf))
    # At the prices no move gains; what rounding makes negative would let paths go in circles.
    length = jnp.maximum(moves + (t.price - t.price[:, None]), 0.0)

    def relax(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        distance, before, _ = carry
        through = distance[:, None] + length
        nearer = jnp.min(through, axis=0)
        better = nearer < distance
        return jnp.where(better, nearer, distance), jnp.where(better, jnp.argmin(through, axis=0), before), jnp.any(better)

    start = (jnp.where(excess > 0, 0.0, jnp.inf), dcs, jnp.any(excess > 0))
    distance, before, _ = jax.lax.while_loop(lambda carry: carry[2], relax, start)
    reach = jnp.where(excess < 0, distance, jnp.inf)
    sink = jnp.argmin(reach)
    stuck = jnp.isinf(reach[sink])

    def step_back(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        place, spare, to = carry
        d = before[to]
        gain = jnp.where(t.place == d, w.cost[:, to] - w.cost[:, d], jnp.inf)
        least = jnp.min(gain)
        by_spare = (spare[d] > 0) & (least >= 0.0)
        # Equals go together, as far as there are too many here and too few there: spare places, requests between DCs that are alike.
        together = jnp.maximum(jnp.minimum(excess[d], -excess[to]), 1)
        equal = gain <= least
        place = jnp.where(equal & (jnp.cumsum(equal) <= together) & ~by_spare, to.astype(jnp.int32), place)
        moved = jnp.where(by_spare, jnp.minimum(together, spare[d]), 0)
        return place, spare.at[d].add(-moved).at[to].add(moved), d

    # A DC that holds too many is its own predecessor.
    walk = (t.place, t.spare, sink)
    place, spare, _ = jax.lax.while_loop(lambda carry: ~stuck & (before[carry[2]] != carry[2]), step_back, walk)
    raised = t.price + jnp.maximum(jnp.where(stuck, 0.0, reach[sink]) - distance, 0.0)
    return Transport(place, spare, raised, t.paths + 1, stuck)


def _excess(w: Window, t: Transport) -> Array:
    """Units held above capacity: [D]."""
    return held(t.place, w.capacity.shape[0]) + t.spare - w.capacity
