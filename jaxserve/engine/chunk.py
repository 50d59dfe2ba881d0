"""The compiled unit: a scan over the steps of a chunk, and the times of its requests read off the engines' step ends."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from jaxserve.engine.control import AbstractPolicy
from jaxserve.engine.lanes import LANES
from jaxserve.engine.model import Arrivals, Fleet, Sizes, StepInputs
from jaxserve.engine.state import State
from jaxserve.engine.window import StepOutputs, advance_step, first_stray


class ChunkOutputs(eqx.Module):
    """What a chunk of T steps leaves behind; see `StepOutputs` for the fields that are stacked over steps."""

    prefill_j: Array  # [T, D]
    decode_j: Array  # [T, D]
    idle_s: Array  # [T, D] engine-seconds
    running: Array  # [T, D]
    queued: Array  # [T, D]
    under_way: Array  # [T]
    seen: Array  # [T, 4, D]
    passes: Array  # [T]
    short_of: Array  # [2] bool: passes, transit
    stray: Array  # [2] the first request sent to a place that does not exist (R if there is none), and the place
    fell_back: Array  # [T, 2] requests that the policy's fallbacks have placed by the step's end, by kind
    first_token_s: Array  # [R+1], nan where not known from this chunk
    finish_s: Array  # [R+1], likewise
    told: PyTree  # of the policy, leading axis T


def _chunk(
    fleet: Fleet, policy: AbstractPolicy, arrivals: Arrivals, state: State, steps: StepInputs, sizes: Sizes
) -> tuple[State, ChunkOutputs]:
    def step(state: State, row: StepInputs) -> tuple[State, tuple[StepOutputs, Array]]:
        state, out = advance_step(fleet, policy, sizes, arrivals, state, row)
        return state, (out, policy.fallbacks(state.schedulers.memory))

    state, (out, fell_back) = jax.lax.scan(step, state, steps)
    first_token_s, finish_s = _request_times(arrivals, state, out)
    return state, ChunkOutputs(
        prefill_j=out.prefill_j,
        decode_j=out.decode_j,
        idle_s=out.idle_s,
        running=out.running,
        queued=out.queued,
        under_way=out.under_way,
        seen=out.seen,
        passes=out.passes,
        short_of=jnp.any(out.short_of, axis=0),
        stray=first_stray(out.stray, sizes.requests),
        fell_back=fell_back,
        first_token_s=first_token_s,
        finish_s=finish_s,
        told=out.told,
    )


def _request_times(arrivals: Arrivals, state: State, out: StepOutputs) -> tuple[Array, Array]:
    """First-token and finish times [R+1] of the requests whose step ran in this chunk, nan for the others.

    A request knows the number of the prefill step that completes its prompt and of the decode step that gives its last token;
    the clock at the end of that step stands in the table of its engine.
    """
    outcomes, engines = state.outcomes, state.engines
    n_passes = out.ends.shape[1]
    engine = jnp.minimum(outcomes.engine, engines.clock.shape[0] - 1)

    def clock(before: Array, total: Array, number: Array, row_of) -> Array:
        step = jnp.zeros_like(number)
        for bit in reversed(range((before.shape[0] - 1).bit_length())):  # the last step with before <= number
            further = step + (1 << bit)
            ok = (further < before.shape[0]) & (before[jnp.minimum(further, before.shape[0] - 1), engine] <= number)
            step = jnp.where(ok, further, step)
        place = number - before[step, engine]
        known = (number >= before[0, engine]) & (number < total[engine])
        return jnp.where(known, out.ends[step, jnp.clip(row_of(place), 0, n_passes - 1), engine], jnp.nan)

    built = outcomes.prefill_step >= 0
    number = jnp.where(built, outcomes.prefill_step, jnp.iinfo(jnp.int32).max)
    first_token = clock(out.prefill_before, engines.n_prefill, number, lambda place: n_passes - 1 - place)
    admitted = jnp.isfinite(outcomes.admit_s)
    number = jnp.where(admitted & (arrivals.osl > 1), outcomes.admit_decode + arrivals.osl - 2, jnp.iinfo(jnp.int32).max)
    last = clock(out.decode_before, engines.n_decode, number, lambda place: place)
    return first_token, jnp.where(arrivals.osl == 1, first_token, last)


@partial(jax.jit, static_argnames="sizes")
def run_chunk(
    fleet: Fleet, policy: AbstractPolicy, arrivals: Arrivals, state: State, steps: StepInputs, sizes: Sizes
) -> tuple[State, ChunkOutputs]:
    """Advance one scenario by the T steps of `steps`."""
    return _chunk(fleet, policy, arrivals, state, steps, sizes)


@partial(jax.jit, static_argnames="sizes")
def run_chunks(
    fleet: Fleet, policy: AbstractPolicy, arrivals: Arrivals, state: State, steps: StepInputs, sizes: Sizes
) -> tuple[State, ChunkOutputs]:
    """Advance many scenarios of the same shapes side by side; every array has a leading axis of scenarios."""
    return jax.vmap(partial(_chunk, sizes=sizes), axis_name=LANES)(fleet, policy, arrivals, state, steps)
