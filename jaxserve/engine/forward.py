"""Requests handed to the scheduler that owns the DC they were sent to (SEMANTICS.md, `dispatch.forwarding = "owner"`)."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.engine.model import Arrivals, Fleet, Sizes
from jaxserve.engine.observe import is_handed, owner
from jaxserve.engine.requests import StepRequests
from jaxserve.engine.state import Transit


def take_handed(
    fleet: Fleet, arrivals: Arrivals, sizes: Sizes, transit: Transit, window: Array, start_s: Array, end_s: Array
) -> tuple[StepRequests, Transit]:
    """The requests [C] that are handed to their owners at the start of a step of one window, owner by owner, and what stays under way."""
    capacity, n_schedulers, none = transit.request.shape[0], fleet.n_schedulers, sizes.requests
    sender = arrivals.scheduler[transit.request]
    taken = is_handed(fleet, sender, transit.dc) & (transit.arrival_s < end_s)
    group = jnp.where(taken, owner(fleet, transit.dc), n_schedulers)
    reach_s = arrivals.decision_s[transit.request] + fleet.rtt_s.at[sender, transit.dc].get(mode="fill", fill_value=jnp.inf)
    group, _, request = jax.lax.sort((group, reach_s, jnp.where(taken, transit.request, none)), num_keys=3, is_stable=False)
    start = jnp.searchsorted(group, jnp.arange(n_schedulers + 1, dtype=group.dtype)).astype(jnp.int32)
    ends = start[:-1] + (jnp.arange(capacity, dtype=jnp.int32)[:, None] + 1) * fleet.window_max_requests
    scheduler = jnp.minimum(group, n_schedulers - 1)
    requests = StepRequests(
        request=request,
        start=start,
        batch_end=jnp.minimum(ends, start[1:]),
        scheduler=scheduler,
        rank=jnp.arange(capacity, dtype=jnp.int32) - start[scheduler],
        now_s=jnp.full(capacity, start_s),
        window=jnp.where(group < n_schedulers, window, -1),
        batch_requests=sizes.batch_requests,
        own_only=True,
    )
    left = Transit(
        request=jnp.where(taken, none, transit.request),
        dc=jnp.where(taken, fleet.n_dc, transit.dc),
        arrival_s=jnp.where(taken, jnp.inf, transit.arrival_s),
    )
    return requests, left
