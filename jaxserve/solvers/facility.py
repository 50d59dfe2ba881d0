"""The facility problem on the device, with a proof: branch and bound over which DCs are open, a transport a node.

At a node some DCs are open (their opening is paid), some closed, the others undecided. The transport over all that are not closed, with
the openings of undecided DCs spread over the most requests that they could serve, gives at once
  - an answer: its assignment, with the openings of the DCs it uses;
  - multipliers u_r, what each request pays at the margin, and so the Lagrangian bound (Geoffrion, McBride 1978)
        sum_r u_r + sum over open d (opening_d - saving_d) + sum over undecided d min(0, opening_d - saving_d),
    with saving_d the sum of the capacity_d largest (u_r - cost_rd)+: no better set of requests could be given to d;
  - undecided DCs that must be open or closed, since the bound would pass the best answer otherwise (opening_d - saving_d is what
    deciding against the bound costs), and the bound of the branch not taken.
Depth first, opening before closing; the search keeps one path of decisions and what is left to try along it.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxserve.solvers.problem import BUDGET, EXACT, FAILED, GAP, INFEASIBLE, OPTIMAL, AssignmentProblem, Solution
from jaxserve.solvers.transport import PATHS, transport
from jaxserve.solvers.window import Window, bound_of, finished, held, least_of, value_of, window_of

NODES = 1000
"""Transports for one problem. Windows like the study's need one or two, awkward ones of 16 DCs up to a hundred."""

TANGENTS = 6
"""Steps towards the level that tells which requests save most."""

UNDECIDED, CLOSED, OPEN = -1, 0, 1


class Search(eqx.Module):
    """Where the search stands: D decisions are the most that a path can have, so levels 1 to D; level 0 is the root."""

    decision: Array  # [D] int32
    decided_at: Array  # [D] int32, level of the decision
    level: Array  # [] int32, of the node to look at next
    inherited: Array  # [] a bound for that node
    branch: Array  # [D + 1] int32, DC on which each level branched
    other: Array  # [D + 1] bound of the branch not taken yet; inf if there is none
    best: Array  # [] cost of the best answer; inf without one
    place: Array  # [N] int32
    proven: Array  # [] the least bound of all nodes given up
    nodes: Array  # [] int32
    going: Array  # [] bool


def solve_facility(problem: AssignmentProblem, *, gap: ArrayLike = GAP, nodes: ArrayLike = NODES) -> Solution:
    """The best assignment and DCs to open, proven within the relative `gap` unless that takes over `nodes`: one problem, vmap for more."""
    w = window_of(problem)
    opening = jnp.asarray(problem.opening, float) / w.scale
    tolerance = jnp.maximum(gap, EXACT)
    found = jax.lax.while_loop(lambda s: s.going & (s.nodes < nodes), lambda s: _look(w, opening, tolerance, nodes, s), _root(w, opening))
    return _conclude(problem, w, tolerance, found)


def solve_facilities(problems: AssignmentProblem, lanes: int, *, gap: ArrayLike = GAP, nodes: ArrayLike = NODES) -> Solution:
    """`solve_facility` for problems [P, ...], `lanes` of them side by side: a lane that is done takes the next problem.

    Searches differ tenfold in length, so that lanes which wait for each other would idle for more than half of the time.
    """
    count = problems.opening.shape[0]
    windows = jax.vmap(window_of)(problems)
    opening = jnp.asarray(problems.opening, float) / windows.scale[:, None]
    tolerance = jnp.maximum(gap, EXACT)
    roots = jax.vmap(_root)(windows, opening)

    def at(index: Array, tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[jnp.minimum(index, count - 1)], tree)

    def step(carry: tuple[Array, Array, Search, Search]) -> tuple[Array, Array, Search, Search]:
        index, waiting, s, found = carry
        s = jax.vmap(lambda w, o, s: _look(w, o, tolerance, nodes, s))(at(index, windows), at(index, opening), s)
        ended = (index < count) & ~(s.going & (s.nodes < nodes))
        found = jax.tree.map(lambda all_, mine: all_.at[jnp.where(ended, index, count)].set(mine, mode="drop"), found, s)
        index = jnp.where(ended, waiting + jnp.cumsum(ended) - 1, index)
        s = jax.tree.map(lambda new, old: jax.vmap(jnp.where)(ended, new, old), at(index, roots), s)
        return index, waiting + jnp.sum(ended), eqx.tree_at(lambda s: s.going, s, s.going & (index < count)), found

    first = jnp.arange(lanes)
    start = (first, jnp.asarray(lanes), eqx.tree_at(lambda s: s.going, at(first, roots), first < count), roots)
    *_, found = jax.lax.while_loop(lambda carry: jnp.any(carry[0] < count), step, start)
    return jax.vmap(_conclude, in_axes=(0, 0, None, 0))(problems, windows, tolerance, found)


def _root(w: Window, opening: Array) -> Search:
    """Before the first node. opening [D] over scale."""
    dcs = w.capacity.shape[0]
    return Search(
        decision=jnp.where(w.capacity == 0, CLOSED, jnp.where(opening > 0, UNDECIDED, OPEN)).astype(jnp.int32),
        decided_at=jnp.zeros(dcs, jnp.int32),
        level=jnp.int32(0),
        inherited=bound_of(w, jnp.zeros(dcs)),
        branch=jnp.zeros(dcs + 1, jnp.int32),
        other=jnp.full(dcs + 1, jnp.inf),
        best=jnp.asarray(jnp.inf),
        place=jnp.full(w.rows.shape, -1, jnp.int32),
        proven=jnp.asarray(jnp.inf),
        nodes=jnp.int32(0),
        going=jnp.asarray(True),
    )


def _conclude(problem: AssignmentProblem, w: Window, tolerance: Array, found: Search) -> Solution:
    """What a search that is over, or was ended, has shown."""
    left = jnp.where(found.going, jnp.minimum(found.inherited, jnp.min(found.other)), jnp.inf)
    bound = jnp.minimum(found.proven, left)
    placed = jnp.isfinite(found.best)
    bound = jnp.where(placed, jnp.minimum(bound, found.best), bound)
    proven = found.best - bound <= tolerance * jnp.abs(found.best)
    status = jnp.where(placed, jnp.where(proven, OPTIMAL, BUDGET), jnp.where(found.going, FAILED, INFEASIBLE))
    return finished(problem, found.place, found.best * w.scale, bound * w.scale, status)


def _look(w: Window, opening: Array, gap: ArrayLike, nodes: ArrayLike, s: Search) -> Search:
    """Solve the transport of a node, and go down from it or give it up."""
    dcs = jnp.arange(w.capacity.shape[0])
    undecided, closed = s.decision == UNDECIDED, s.decision == CLOSED
    capacity = jnp.where(closed, 0, w.capacity)
    spread = jnp.where(undecided, opening / jnp.maximum(w.capacity, 1), 0.0)
    node = Window(jnp.where(closed, jnp.inf, w.cost + spread), w.rows, capacity, w.scale)
    # A lane that is done waits for the others without searching.
    t = transport(node, jnp.where(s.going & (s.nodes < nodes), PATHS, 0))

    many = held(t.place, len(dcs))
    cost = jnp.where(t.stuck, jnp.inf, value_of(w, t.place) + jnp.sum(jnp.where(many > 0, opening, 0.0)))
    best, place = jnp.minimum(s.best, cost), jnp.where(cost < s.best, t.place, s.place)
    # A little less than the gap, so that rounding does not spoil the proof.
    enough = jnp.where(jnp.isfinite(best), best - 0.999 * gap * jnp.abs(best), jnp.inf)

    pays = least_of(node, t.price)
    excess = opening - _saving(w, pays, capacity, t.price + spread)  # of the opening over the saving
    at_open = jnp.where(s.decision == OPEN, excess, 0.0)
    lagrangian = jnp.sum(pays) + jnp.sum(at_open + jnp.where(undecided, jnp.minimum(excess, 0.0), 0.0))
    bound = jnp.where(t.stuck, jnp.inf, jnp.maximum(lagrangian, s.inherited))
    if_open, if_closed = (jnp.maximum(bound, lagrangian + jnp.maximum(sign * excess, 0.0)) for sign in (1, -1))
    if_closed = jnp.where(jnp.sum(capacity) - capacity < jnp.sum(w.rows), jnp.inf, if_closed)

    must_open, must_close = undecided & (if_closed >= enough), undecided & (if_open >= enough)
    given_up = (bound >= enough) | ~jnp.any(undecided)
    ruled_out = jnp.min(jnp.where(must_open, if_closed, jnp.where(must_close, if_open, jnp.inf)))
    proven = jnp.minimum(s.proven, jnp.where(given_up, bound, ruled_out))
    decision = jnp.where(must_open, OPEN, jnp.where(must_close, CLOSED, s.decision))
    decided_at = jnp.where(must_open | must_close, s.level, s.decided_at)
    unsure = undecided & ~must_open & ~must_close

    # Down: the undecided DC whose opening is neither nearly paid nor hardly begun. Without any the node itself is looked at again.
    share = many / jnp.maximum(w.capacity, 1)
    d = jnp.argmax(jnp.where(unsure, jnp.minimum(share, 1.0 - share) * opening, -1.0))
    deeper = jnp.any(unsure)
    down = s.level + deeper
    branched = deeper & (dcs == d)
    levels = jnp.arange(len(dcs) + 1)
    entered = deeper & (levels == down)

    # Up: the deepest branch not taken that could still hold a better answer.
    hopeful = s.other < enough
    up = jnp.max(jnp.where(hopeful, levels, 0))
    skipped = jnp.min(jnp.where(hopeful, jnp.inf, s.other))
    undone = s.decided_at >= up
    turned = dcs == s.branch[up]

    def choose(up_value: Array, down_value: Array) -> Array:
        return jnp.where(given_up, up_value, down_value)

    return Search(
        decision=choose(jnp.where(turned, CLOSED, jnp.where(undone, UNDECIDED, s.decision)), jnp.where(branched, OPEN, decision)).astype(
            jnp.int32
        ),
        decided_at=choose(jnp.where(turned, up, jnp.where(undone, 0, s.decided_at)), jnp.where(branched, down, decided_at)).astype(
            jnp.int32
        ),
        level=choose(up, down).astype(jnp.int32),
        inherited=choose(s.other[up], jnp.where(deeper, if_open[d], bound)),
        branch=choose(s.branch, jnp.where(entered, d, s.branch)).astype(jnp.int32),
        other=choose(jnp.where(levels >= up, jnp.inf, s.other), jnp.where(entered, if_closed[d], s.other)),
        best=best,
        place=place,
        proven=jnp.where(given_up, jnp.minimum(proven, skipped), proven),
        nodes=s.nodes + 1,
        going=~given_up | jnp.any(hopeful),
    )


def _saving(w: Window, pays: Array, capacity: Array, level: Array) -> Array:
    """At most what a DC can save the requests: [D] sum of the capacity_d largest (pays_r - cost_rd)+.

    That is the least over all x >= 0 of capacity_d x + sum_r (pays_r - cost_rd - x)+, a convex function of x, and so any x will do.
    It is sought where tangents meet, between 0 and a `level` [D] that no request's saving exceeds.
    """
    gain = pays[:, None] - w.cost

    def at(level: Array) -> tuple[Array, Array]:
        over = gain - level
        return capacity * level + jnp.sum(jnp.maximum(over, 0.0), axis=0), (capacity - jnp.sum(over > 0, axis=0)).astype(float)

    def closer(_: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        low, low_value, low_slope, high, high_value, high_slope, least = carry
        falls = low_slope < 0
        meet = (high_value - low_value + low_slope * low - high_slope * high) / jnp.where(falls, low_slope - high_slope, -1.0)
        middle = jnp.where(falls, jnp.clip(meet, low, high), low)
        value, slope = at(middle)
        left = slope < 0
        new_low = (jnp.where(left, n, o) for n, o in zip((middle, value, slope), (low, low_value, low_slope)))
        new_high = (jnp.where(left, o, n) for n, o in zip((middle, value, slope), (high, high_value, high_slope)))
        return *new_low, *new_high, jnp.minimum(least, value)

    zero = jnp.zeros_like(level)
    low_value, low_slope = at(zero)
    start = (zero, low_value, low_slope, level, capacity * level, capacity.astype(float), jnp.minimum(low_value, capacity * level))
    return jax.lax.fori_loop(0, TANGENTS, closer, start)[-1]
