"""From the decision to the engine's queue: requests under way, their round-robin inside the DC, and the linked queues."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.engine.model import Arrivals, Fleet
from jaxserve.engine.observe import own_position, owner
from jaxserve.engine.state import Engines, Outcomes, Transit


class Sent(eqx.Module):
    """Requests that have just been placed."""

    request: Array  # [W] int32
    dc: Array  # [W] int32, D where the place is empty
    scheduler: Array  # [W] int32, who has placed it
    now_s: Array  # [W] s, when that is out


def deliver(
    fleet: Fleet,
    arrivals: Arrivals,
    engines: Engines,
    outcomes: Outcomes,
    transit: Transit,
    sent: Sent,
    end_s: Array,
    held: Array,
) -> tuple[Engines, Outcomes, Transit, Array, Array]:
    """Send off what was decided and queue everything that reaches its DC before `end_s`.

    `held` []: whether what goes to a DC of another scheduler waits there for the end of its window.
    Returns engines, outcomes, what is still under way, how many requests of each scheduler were queued [G, D], DCs in its own order, and
    whether more is under way than transit has room for.
    """
    n_dc, capacity, none = fleet.n_dc, transit.request.shape[0], outcomes.next.shape[0] - 1
    request, dc, sender = sent.request, sent.dc, sent.scheduler
    rtt = fleet.rtt_s.at[sender, dc].get(mode="fill", fill_value=jnp.inf)
    arrival = sent.now_s + rtt
    own = fleet.own.at[sender, dc].get(mode="fill", fill_value=True)
    wait = held & ~own & ~((owner(fleet, dc) == fleet.n_schedulers) & fleet.forward_owner)
    arrival = jnp.where(wait, _window_end(arrival, fleet.window_s), arrival)
    outcomes = _route(outcomes, request, dc, arrival, n_dc)

    # One sort by (DC, arrival, id): first what is due, DC by DC in the order of its round-robin; then what stays under way; then blanks.
    request = jnp.concatenate([transit.request, request])
    dc = jnp.concatenate([transit.dc, dc])
    arrival = jnp.concatenate([transit.arrival_s, arrival])
    sender = jnp.concatenate([arrivals.scheduler[transit.request], sender])
    group = jnp.where(dc == n_dc, n_dc + 1, jnp.where(arrival < end_s, dc, n_dc))
    group, arrival, request, dc, sender = jax.lax.sort((group, arrival, request, dc, sender), num_keys=3, is_stable=False)
    bounds = jnp.searchsorted(group, jnp.arange(n_dc + 2, dtype=group.dtype)).astype(jnp.int32)  # [D+2]

    engines, outcomes = _queue(fleet, arrivals, engines, outcomes, group, request, bounds)
    place = jnp.where(group < n_dc, own_position(fleet, sender, dc), n_dc)
    reached = jnp.zeros((fleet.n_schedulers, n_dc)).at[sender, place].add(1.0, mode="drop")

    size = group.shape[0]
    place = bounds[n_dc] + jnp.arange(capacity, dtype=jnp.int32)
    kept = place < bounds[n_dc + 1]
    place = jnp.minimum(place, size - 1)
    transit = Transit(
        request=jnp.where(kept, request[place], none),
        dc=jnp.where(kept, dc[place], n_dc),
        arrival_s=jnp.where(kept, arrival[place], jnp.inf),
    )
    return engines, outcomes, transit, reached, bounds[n_dc + 1] - bounds[n_dc] > capacity


def _window_end(time_s: Array, window_s: Array) -> Array:
    """End of the window k, the largest with k*window_s <= `time_s`; the quotient may be off by one where the product is exact."""
    guess = jnp.floor(time_s / window_s)
    window = guess + jnp.where((guess + 1.0) * window_s <= time_s, 1.0, jnp.where(guess * window_s > time_s, -1.0, 0.0))
    return (window + 1.0) * window_s


def _route(outcomes: Outcomes, request: Array, dc: Array, arrival: Array, n_dc: int) -> Outcomes:
    none = outcomes.next.shape[0] - 1
    row = jnp.where(dc < n_dc, request, none + 1)
    return replace(outcomes, dc_arrival_s=outcomes.dc_arrival_s.at[row].set(arrival, mode="drop"))


def _queue(
    fleet: Fleet, arrivals: Arrivals, engines: Engines, outcomes: Outcomes, group: Array, request: Array, bounds: Array
) -> tuple[Engines, Outcomes]:
    """Link the due requests, sorted by DC and arrival, behind their engines' queues.

    Round-robin makes it simple: of the requests that reach a DC with N engines, an engine gets every N-th,
    so the one before it in its queue stands N places earlier in the sorted order, or at the queue's tail.
    """
    n_dc, n_engines, none = fleet.n_dc, fleet.n_engines, outcomes.next.shape[0] - 1
    due = group < n_dc
    at = jnp.minimum(group, n_dc - 1)
    place = jnp.arange(group.shape[0], dtype=jnp.int32)
    rank = place - bounds[at]
    size = fleet.dc_engines[at]
    engine = jnp.where(due, fleet.dc_first_engine[at] + (engines.dc_count[at] + rank) % size, n_engines)
    first = due & (rank < size)
    last = due & (place + size >= bounds[at + 1])

    tail = engines.tail.at[engine].get(mode="fill", fill_value=none)
    ahead = jnp.where(first, tail, request[jnp.maximum(place - size, 0)])
    nexts = outcomes.next.at[jnp.where(due & (ahead < none), ahead, none + 1)].set(request, mode="drop")
    behind = jnp.where(last, none, request[jnp.minimum(place + size, place.shape[0] - 1)])
    nexts = nexts.at[jnp.where(due, request, none + 1)].set(behind, mode="drop")
    outcomes = replace(outcomes, next=nexts, engine=outcomes.engine.at[jnp.where(due, request, none + 1)].set(engine, mode="drop"))

    front = jnp.full(n_engines, none, jnp.int32).at[jnp.where(first, engine, n_engines)].set(request, mode="drop")
    isl = arrivals.isl[request]
    new = replace(
        engines,
        head=jnp.where(engines.head == none, front, engines.head),
        builder=jnp.where(engines.builder == none, front, engines.builder),
        tail=engines.tail.at[jnp.where(last, engine, n_engines)].set(request, mode="drop"),
        queued=engines.queued.at[engine].add(1, mode="drop"),
        queued_tokens=engines.queued_tokens.at[engine].add(isl, mode="drop"),
        dc_count=(engines.dc_count + bounds[1 : n_dc + 1] - bounds[:n_dc]) % fleet.dc_engines,
    )
    return new, outcomes
