"""Which engine of its DC a request goes to, and the linked queues of the engines. Linking knows nothing of how requests were dealt."""

from dataclasses import replace

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from jaxserve.engine.model import Arrivals, Fleet
from jaxserve.engine.state import Engines, Outcomes


class Dealt(eqx.Module):
    """Which engine each of n requests goes to."""

    engine: Array  # [n] int32, E for none
    turn: Array  # [n] int32, how many of them the engine is dealt before this one


def in_turn(fleet: Fleet, engines: Engines, group: Array, bounds: Array) -> Dealt:
    """Deal requests, sorted by DC and arrival, in turn among the engines of their DC.

    `group` [n]: the DC of a request, D and more where it is not to be dealt; `bounds` [D+1]: where each DC's requests begin.
    """
    at = jnp.minimum(group, fleet.n_dc - 1)
    rank = jnp.arange(group.shape[0], dtype=jnp.int32) - bounds[at]
    size = fleet.dc_engines[at]
    engine = fleet.dc_first_engine[at] + (engines.dc_count[at] + rank) % size
    return Dealt(engine=jnp.where(group < fleet.n_dc, engine, fleet.n_engines), turn=rank // size)


def link(arrivals: Arrivals, engines: Engines, outcomes: Outcomes, request: Array, dealt: Dealt) -> tuple[Engines, Outcomes]:
    """Put requests [n] behind the queues of the engines that they are dealt to."""
    n_engines, none, n = engines.clock.shape[0], outcomes.next.shape[0] - 1, request.shape[0]
    due = dealt.engine < n_engines
    # Side by side as they stand in their queues, engine after engine.
    count = jnp.zeros(n_engines, jnp.int32).at[dealt.engine].add(1, mode="drop")
    end = jnp.cumsum(count)
    place = (end - count).at[dealt.engine].get(mode="fill", fill_value=0) + dealt.turn
    queue = jnp.full(n, none, jnp.int32).at[jnp.where(due, place, n)].set(request, mode="drop")
    last = due & (dealt.turn + 1 == count.at[dealt.engine].get(mode="fill", fill_value=0))
    behind = jnp.where(last, none, queue.at[place + 1].get(mode="fill", fill_value=none))

    some = count > 0
    front = jnp.where(some, queue.at[end - count].get(mode="fill", fill_value=none), none)
    back = jnp.where(some, queue.at[end - 1].get(mode="fill", fill_value=none), engines.tail)
    nexts = outcomes.next.at[jnp.where(some & (engines.tail < none), engines.tail, none + 1)].set(front, mode="drop")
    nexts = nexts.at[jnp.where(due, request, none + 1)].set(behind, mode="drop")
    outcomes = replace(outcomes, next=nexts, engine=outcomes.engine.at[jnp.where(due, request, none + 1)].set(dealt.engine, mode="drop"))
    return replace(
        engines,
        head=jnp.where(engines.head == none, front, engines.head),
        builder=jnp.where(engines.builder == none, front, engines.builder),
        tail=back,
        queued=engines.queued + count,
        queued_tokens=engines.queued_tokens.at[dealt.engine].add(arrivals.isl[request], mode="drop"),
    ), outcomes
