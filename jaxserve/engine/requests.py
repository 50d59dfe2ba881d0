"""The requests that are decided in one step."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.engine.model import Arrivals, Sizes


class StepRequests(eqx.Module):
    """The requests decided in one step, scheduler by scheduler, in order of arrival."""

    request: Array  # [W] int32, R where empty
    start: Array  # [G+1] int32, where each scheduler's requests begin
    batch_end: Array  # [K, G] int32, where each of its batches ends, for batch policies
    scheduler: Array  # [W] int32
    rank: Array  # [W] int32, place among its scheduler's requests
    now_s: Array  # [W] s, when the decision is out
    window: Array  # [W] int32, in which it is taken, -1 where empty
    batch_requests: int = eqx.field(static=True, default=1)  # N, the most requests of a batch
    own_only: bool = eqx.field(static=True, default=False)  # whether they may only go to their scheduler's own DCs


def step_requests(arrivals: Arrivals, sizes: Sizes, group_start: Array, batch_end: Array) -> StepRequests:
    """The requests decided in a step; `group_start` [G+1] and `batch_end` [K, G] are one row of the chunk's."""
    first = group_start[0]
    listed = jax.lax.dynamic_slice(arrivals.by_scheduler, (first,), (sizes.step_requests,))
    place = jnp.arange(sizes.step_requests, dtype=jnp.int32)
    start = group_start - first
    request = jnp.where(place < start[-1], listed, sizes.requests)
    scheduler = arrivals.scheduler[request]
    return StepRequests(
        request=request,
        start=start,
        batch_end=batch_end - first,
        scheduler=scheduler,
        rank=place - start[scheduler],
        now_s=arrivals.decision_s[request],
        window=arrivals.window[request],
        batch_requests=sizes.batch_requests,
    )
