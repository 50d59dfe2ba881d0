"""From the decision to the DC: requests under way, and those that arrive."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.engine.model import Arrivals, Fleet
from jaxserve.engine.observe import owner
from jaxserve.engine.queues import in_turn, link
from jaxserve.engine.state import Engines, Outcomes, Transit

SPAN_S = 64.0
"""Of arrivals after the start of a step, that are sorted as they are: what arrives later is not due for long."""


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
    start_s: Array,
    end_s: Array,
    held: Array,
) -> tuple[Engines, Outcomes, Transit, Array, Array]:
    """Send off what was decided and queue everything that reaches its DC before `end_s`, the end of the step that begins at `start_s`.

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

    request = jnp.concatenate([transit.request, request])
    dc = jnp.concatenate([transit.dc, dc])
    arrival = jnp.concatenate([transit.arrival_s, arrival])
    sender = jnp.concatenate([arrivals.scheduler[transit.request], sender])
    due = (dc < n_dc) & (arrival < end_s)
    place = jnp.where(due, fleet.place.at[sender, dc].get(mode="clip"), n_dc)
    reached = jnp.zeros((fleet.n_schedulers, n_dc)).at[sender, place].add(1.0, mode="drop")

    # First what is due, DC by DC in the order of its round-robin; then what stays under way; then blanks.
    group = jnp.where(due, dc, n_dc + dc)
    group, request = in_order(group, request, outcomes.dc_arrival_s, start_s, n_dc)
    bounds = jnp.searchsorted(group, jnp.arange(n_dc + 1, dtype=group.dtype)).astype(jnp.int32)  # [D+1]
    blank = jnp.searchsorted(group, 2 * n_dc).astype(jnp.int32)

    dealt = in_turn(fleet, engines, group, bounds)
    engines, outcomes = link(arrivals, engines, outcomes, request, dealt)
    engines = replace(engines, dc_count=(engines.dc_count + bounds[1:] - bounds[:-1]) % fleet.dc_engines)

    place = bounds[n_dc] + jnp.arange(capacity, dtype=jnp.int32)
    kept, place = place < blank, jnp.minimum(place, group.shape[0] - 1)
    request = jnp.where(kept, request[place], none)
    transit = Transit(
        request=request,
        dc=jnp.where(kept, group[place] - n_dc, n_dc),
        arrival_s=jnp.where(kept, outcomes.dc_arrival_s[request], jnp.inf),
    )
    return engines, outcomes, transit, reached, blank - bounds[n_dc] > capacity


def in_order(group: Array, request: Array, arrival_s: Array, start_s: Array, n_dc: int) -> tuple[Array, Array]:
    """Groups [n] and requests [n] by (group, arrival, id): DC d is the group of what is due there, D + d of what is on its way there, in
    which order does not matter, and 2 D of blanks. `arrival_s` [R+1] has the requests' arrivals.

    One sort of whole numbers, of group, time after `start_s` and id side by side, is ten times quicker than one of three columns with two
    more to carry. What is left out of order, because it arrives within one tick, changes places with its neighbour until it is right.
    """
    id_bits, group_bits = (arrival_s.shape[0] - 1).bit_length(), (2 * n_dc).bit_length()
    ticks = 1 << min(63 - id_bits - group_bits, 50)  # whole numbers that a double holds
    tick = jnp.clip((arrival_s[request] - start_s) * (ticks / SPAN_S), 0.0, ticks - 1.0)
    key = (group.astype(jnp.int64) << (63 - group_bits)) | (tick.astype(jnp.int64) << id_bits) | request
    key = jax.lax.sort(key, is_stable=False)
    group, request = (key >> (63 - group_bits)).astype(jnp.int32), (key & ((1 << id_bits) - 1)).astype(jnp.int32)

    at = jnp.arange(key.shape[0], dtype=jnp.int32)

    def late(request: Array) -> Array:
        """Whether the next one [n-1] of the same group goes first."""
        here, after, time = request[:-1], request[1:], arrival_s[request]
        later = (time[:-1] > time[1:]) | ((time[:-1] == time[1:]) & (here > after))
        return later & (group[:-1] == group[1:]) & (group[:-1] < n_dc)

    def mend(request: Array) -> Array:
        for odd in (0, 1):
            change = late(request) & (at[:-1] % 2 == odd)
            one = jnp.pad(change, (0, 1))  # changes places with the next, or the one before
            other = jnp.pad(change, (1, 0))
            request = jnp.where(one, jnp.roll(request, -1), jnp.where(other, jnp.roll(request, 1), request))
        return request

    return group, jax.lax.while_loop(lambda request: jnp.any(late(request)), mend, request)


def _window_end(time_s: Array, window_s: Array) -> Array:
    """End of the window k, the largest with k*window_s <= `time_s`; the quotient may be off by one where the product is exact."""
    guess = jnp.floor(time_s / window_s)
    window = guess + jnp.where((guess + 1.0) * window_s <= time_s, 1.0, jnp.where(guess * window_s > time_s, -1.0, 0.0))
    return (window + 1.0) * window_s


def _route(outcomes: Outcomes, request: Array, dc: Array, arrival: Array, n_dc: int) -> Outcomes:
    none = outcomes.next.shape[0] - 1
    row = jnp.where(dc < n_dc, request, none + 1)
    return replace(outcomes, dc_arrival_s=outcomes.dc_arrival_s.at[row].set(arrival, mode="drop"))
