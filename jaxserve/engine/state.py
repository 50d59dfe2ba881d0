"""What the engine carries from step to step."""

import equinox as eqx
import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from jaxserve.engine.model import UNKNOWN, Fleet, Sizes

ADMIT, PREFILL, DECODE = 0, 1, 2  # what an engine does next in its iteration


class Engines(eqx.Module):
    """State of all engines. A request id of R means none."""

    clock: Array  # [E] s, end of the last step
    mode: Array  # [E] int32: ADMIT, PREFILL, DECODE
    head: Array  # [E] int32, first request not admitted
    builder: Array  # [E] int32, first request whose prompt is not wholly in a prefill step
    built: Array  # [E] tokens of that prompt already in steps
    tail: Array  # [E] int32, last request ever queued
    queued: Array  # [E] int32, requests not admitted
    queued_tokens: Array  # [E] prompt tokens not admitted
    batch: Array  # [E] int32, requests with tokens still to decode
    prompts: Array  # [E] int32, requests admitted whose prompt is not complete
    cached: Array  # [E] tokens in the KV cache of unfinished requests
    reserved: Array  # [E] tokens reserved for unfinished requests
    step_tokens: Array  # [E] the open prefill step: new tokens
    step_pieces: Array  # [E] B
    step_sq: Array  # [E] S2 without padding
    step_longest: Array  # [E] most new tokens of a piece; kept, as the next, by engines that pad
    step_prefix: Array  # [E] cached tokens that its pieces go on from
    step_joins: Array  # [E] int32, prompts it completes that go on to decode
    step_ends: Array  # [E] int32, prompts it completes with osl = 1
    step_end_tokens: Array  # [E] prompt tokens of those
    n_prefill: Array  # [E] int32, prefill steps run
    n_decode: Array  # [E] int32, decode steps run
    prefill_outside: Array  # [E] int32, prefill steps outside the valid range of the step models
    decode_outside: Array  # [E] int32, decode steps outside it
    above_board: Array  # [E] int32, steps whose energy form asks for more than board power
    seen_batch: Array  # [E] int32, unfinished requests before the last step: what a poll inside it sees
    seen_cached: Array  # [E] tokens, likewise
    power: Array  # [E] W of the last step
    power_prefill: Array  # [E] bool, whether that was a prefill step
    leaving: Array  # [E, H] int32, requests that the decode step of this number, modulo H, finishes
    leaving_kv: Array  # [E, H] int32, tokens that they give back
    dc_count: Array  # [D] int32, requests that have reached the DC, modulo its engines


class Outcomes(eqx.Module):
    """What has happened to each request held on the device; the sentinel row R takes what is to be dropped."""

    dc_arrival_s: Array  # [R+1], inf until routed
    engine: Array  # [R+1] int32, E until linked
    next: Array  # [R+1] int32, the request behind it in its engine's queue
    admit_s: Array  # [R+1], inf until admitted
    admit_decode: Array  # [R+1] int32, decode steps its engine had run at admission
    prefill_step: Array  # [R+1] int32, number of the prefill step that completes the prompt, -1 until known


class Transit(eqx.Module):
    """Requests on their way to a DC; unused places hold request R and the DC D."""

    request: Array  # [C] int32
    dc: Array  # [C] int32
    arrival_s: Array  # [C]


class Snapshot(eqx.Module):
    """The last poll of each DC: means over its engines."""

    batch: Array  # [D] B
    queued_tokens: Array  # [D] Q
    cached: Array  # [D] K
    duty: Array  # [D]
    ci: Array  # [D] g/kWh
    prefill_s: Array  # [D] engine-seconds of prefill since the last poll


class Belief(eqx.Module):
    """What each scheduler takes the DCs to be, from their polls on: means over a DC's engines, DCs in the scheduler's own order."""

    batch: Array  # [G, D] B
    queued_tokens: Array  # [G, D] Q
    cached: Array  # [G, D] K
    duty: Array  # [G, D]
    progress: Array  # [G, D] tokens that a running request has generated, on average; no poll tells it
    busy_s: Array  # [G, D] seconds of prefill steps begun and not over
    unseen: Array  # [G, D] requests that have reached the DC since the poll
    window: Array  # [G, D] int32, at the start of which this is so


class Schedulers(eqx.Module):
    """What each scheduler remembers. DC axes are in the scheduler's own order."""

    belief: Belief
    weight: Array  # [G] requests that one of its own stands for: itself, and those that its peers send as it does
    others: Array  # [G, D] requests a second that its peers send there whatever it does itself
    reached: Array  # [G, D] of its requests, those that have reached the DC since the DC's last poll
    seen_own: Array  # [G, D] its requests that reached the DC in the periods between polls, recent periods counting more
    seen_others: Array  # [G, D] its peers', likewise

    sent: Array  # [G, D] requests sent that the belief does not hold yet
    sent_tokens: Array  # [G, D] their prompt tokens
    decided: Array  # [G] requests decided so far
    isl_sum: Array  # [G]
    isl2_sum: Array  # [G]
    osl_sum: Array  # [G]
    osl2_sum: Array  # [G]
    memory: PyTree  # of the policy, leading axis G


class State(eqx.Module):
    """Everything that moves."""

    engines: Engines
    outcomes: Outcomes
    transit: Transit
    snapshot: Snapshot
    schedulers: Schedulers
    engine_s: Array  # [3, E] seconds of prefill, decode and idling between the warm-up and the horizon


def initial_outcomes(n_requests: int, n_engines: int) -> Outcomes:
    """Outcomes of `n_requests` requests to which nothing has happened."""
    rows = n_requests + 1
    return Outcomes(
        dc_arrival_s=jnp.full(rows, jnp.inf),
        engine=jnp.full(rows, n_engines, jnp.int32),
        next=jnp.full(rows, n_requests, jnp.int32),
        admit_s=jnp.full(rows, jnp.inf),
        admit_decode=jnp.zeros(rows, jnp.int32),
        prefill_step=jnp.full(rows, -1, jnp.int32),
    )


def initial_state(fleet: Fleet, sizes: Sizes, memory: PyTree, ci: Array) -> State:
    """Empty engines at time 0. `ci` [D] g/kWh is what the poll before the run saw."""
    e, d, g, r = fleet.n_engines, fleet.n_dc, fleet.n_schedulers, sizes.requests
    ints, floats = jnp.zeros(e, jnp.int32), jnp.zeros(e)
    none = jnp.full(e, r, jnp.int32)
    engines = Engines(
        clock=floats,
        mode=ints,
        head=none,
        builder=none,
        built=floats,
        tail=none,
        queued=ints,
        queued_tokens=floats,
        batch=ints,
        prompts=ints,
        cached=floats,
        reserved=floats,
        step_tokens=floats,
        step_pieces=floats,
        step_sq=floats,
        step_longest=floats,
        step_prefix=floats,
        step_joins=ints,
        step_ends=ints,
        step_end_tokens=floats,
        n_prefill=ints,
        n_decode=ints,
        prefill_outside=ints,
        decode_outside=ints,
        above_board=ints,
        seen_batch=ints,
        seen_cached=floats,
        power=floats,
        power_prefill=jnp.zeros(e, bool),
        leaving=jnp.zeros((e, sizes.stay), jnp.int32),
        leaving_kv=jnp.zeros((e, sizes.stay), jnp.int32),
        dc_count=jnp.zeros(d, jnp.int32),
    )
    transit = Transit(
        request=jnp.full(sizes.transit, r, jnp.int32),
        dc=jnp.full(sizes.transit, d, jnp.int32),
        arrival_s=jnp.full(sizes.transit, jnp.inf),
    )
    zeros = jnp.zeros(d)
    snapshot = Snapshot(batch=zeros, queued_tokens=zeros, cached=zeros, duty=zeros, ci=jnp.asarray(ci, float), prefill_s=zeros)
    pairs, per_scheduler = jnp.zeros((g, d)), jnp.zeros(g)
    belief = Belief(pairs, pairs, pairs, pairs, pairs, pairs, pairs, jnp.zeros((g, d), jnp.int32))
    schedulers = Schedulers(
        belief=belief,
        weight=jnp.where(jnp.asarray(fleet.peers) == UNKNOWN, 1.0, jnp.asarray(fleet.alike)),
        others=pairs,
        reached=pairs,
        seen_own=pairs,
        seen_others=pairs,
        sent=pairs,
        sent_tokens=pairs,
        decided=per_scheduler,
        isl_sum=per_scheduler,
        isl2_sum=per_scheduler,
        osl_sum=per_scheduler,
        osl2_sum=per_scheduler,
        memory=memory,
    )
    return State(
        engines=engines,
        outcomes=initial_outcomes(r, e),
        transit=transit,
        snapshot=snapshot,
        schedulers=schedulers,
        engine_s=jnp.zeros((3, e)),
    )
