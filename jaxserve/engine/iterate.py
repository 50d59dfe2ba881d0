"""One pass over all engines: each admits one request, or runs one prefill or decode step, or skips to its next arrival.

Engines need no common clock: in a pass every engine whose clock is inside the step does the next thing of its own iteration
(SEMANTICS.md, "One engine, one iteration"). Admission does not move the clock, so packing the admitted prompts into prefill steps can
run along with it: `builder` follows `head` until a step is full, and catches up after admission has ended.
"""

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from jaxserve.engine.model import Arrivals, Fleet
from jaxserve.engine.state import ADMIT, DECODE, PREFILL, Engines, Outcomes
from jaxserve.perf.power import within_board

NOTHING, RAN_PREFILL, RAN_DECODE = -1, -2, -3
ADMITTED, ADMITTED_AND_BUILT, BUILT = 0, 1, 2  # kinds of event of a request, coded as 4*id + kind
ROUNDING = 1e-9
"""A step asks for more than the board only beyond this share: energies that follow from board power times step time round either way."""


class Spent(eqx.Module):
    """Energy and time of each engine inside the current step. [E]"""

    prefill_j: Array
    decode_j: Array
    prefill_s: Array
    decode_s: Array
    idle_s: Array


def spent_before(engines: Engines, start_s: Array, end_s: Array) -> Spent:
    """What falls into [start_s, end_s) of engine steps that began before it."""
    seconds = jnp.maximum(jnp.minimum(engines.clock, end_s) - start_s, 0.0)
    prefill_s = jnp.where(engines.power_prefill, seconds, 0.0)
    decode_s = jnp.where(engines.power_prefill, 0.0, seconds)
    return Spent(
        prefill_j=engines.power * prefill_s,
        decode_j=engines.power * decode_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        idle_s=jnp.zeros_like(seconds),
    )


def run_pass(
    fleet: Fleet, arrivals: Arrivals, outcomes: Outcomes, engines: Engines, spent: Spent, end_s: Array
) -> tuple[Engines, Spent, Array, Array]:
    """Advance every engine whose clock is before `end_s` by one action.

    Returns the engines, what they spent, and a row of events: code [E] (`NOTHING`, `RAN_PREFILL`, `RAN_DECODE`, or 4*id + kind)
    and the clock [E] after the action.
    """
    s = engines
    active = s.clock < end_s
    prefilling = active & (s.mode == PREFILL)
    decoding = active & (s.mode == DECODE) & (s.batch > 0)
    admitting = active & ~prefilling & ~decoding

    pointer = jnp.where(prefilling, s.builder, s.head)
    arrival, isl, osl, following = outcomes.dc_arrival_s[pointer], arrivals.isl[pointer], arrivals.osl[pointer], outcomes.next[pointer]
    need = isl + osl

    # Admission, first come first served at the clock at which the iteration began.
    fits = (arrival <= s.clock) & (s.batch + s.prompts < fleet.max_num_seqs) & (s.reserved + need <= fleet.kv_capacity)
    fits &= ~fleet.prefill_first | (s.step_tokens == 0) | (_spent_with(fleet, s, isl) <= fleet.token_budget)
    admit = admitting & fits
    before = jnp.where(prefilling, s.built, 0.0)
    rest = isl - before
    room = _room(fleet, s, rest)
    build = (admit & (s.builder == s.head)) | (prefilling & (s.builder != s.head) & (room > 0))
    take = jnp.where(build, jnp.minimum(rest, room), 0.0)
    after = before + take
    complete = build & (after == isl)
    builder = jnp.where(complete, following, s.builder)
    head = jnp.where(admit, following, s.head)
    built = jnp.where(complete, 0.0, jnp.where(build, after, s.built))

    ends = complete & (osl == 1)
    joins = complete & (osl > 1)
    step_tokens = s.step_tokens + take
    step_pieces = s.step_pieces + jnp.where(take > 0, 1.0, 0.0)
    step_sq = s.step_sq + (after * after - before * before) * jnp.where(build, 1.0, 0.0)
    step_longest, step_prefix = s.step_longest, s.step_prefix
    if fleet.padded:
        step_longest = jnp.maximum(s.step_longest, take)
        step_prefix = s.step_prefix + jnp.where(take > 0, before, 0.0)
    step_joins = s.step_joins + joins
    step_ends = s.step_ends + ends
    step_end_tokens = s.step_end_tokens + jnp.where(ends, isl, 0.0)

    # Steps. A pass that neither admits nor builds runs what is ready.
    acts = active & ~admit & ~build
    prefill = acts & ~decoding & (s.step_tokens > 0)
    decode = acts & ~prefill & (s.batch > 0)
    idle = acts & ~prefill & ~decode
    batch, cached = s.batch.astype(float), s.cached
    n_tokens, sum_sq = s.step_tokens, s.step_sq
    if fleet.padded:
        n_tokens = s.step_pieces * s.step_longest
        sum_sq = s.step_longest * (n_tokens + 2.0 * s.step_prefix)  # the sum of (c + L)^2 - c^2
    duration = jnp.where(prefill, fleet.prefill_time(n_tokens, s.step_pieces, sum_sq), fleet.decode_time(batch, cached))
    asked_j = jnp.where(prefill, fleet.prefill_energy(n_tokens, sum_sq), fleet.decode_energy(batch, cached))
    energy = within_board(asked_j, duration, fleet.idle_w, fleet.max_w)
    steps = prefill | decode
    skip_to = jnp.minimum(jnp.maximum(arrival, s.clock), end_s)  # the sentinel request arrives never
    clock = jnp.where(steps, s.clock + duration, jnp.where(idle, skip_to, s.clock))

    inside = jnp.minimum(clock, end_s) - s.clock
    inside_j = jnp.where(steps, energy * (inside / duration), 0.0)
    spent = Spent(
        prefill_j=spent.prefill_j + jnp.where(prefill, inside_j, 0.0),
        decode_j=spent.decode_j + jnp.where(decode, inside_j, 0.0),
        prefill_s=spent.prefill_s + jnp.where(prefill, inside, 0.0),
        decode_s=spent.decode_s + jnp.where(decode, inside, 0.0),
        idle_s=spent.idle_s + jnp.where(idle, inside, 0.0),
    )

    # Retirement: the whole batch gains a token a step, so the step that finishes a request is known at its admission, at most H steps on.
    # An engine either admits or decodes in a pass, so one cell of its calendar is enough: the step's that finishes the request, or its own.
    enters = admit & (osl > 1)
    cell = jnp.arange(fleet.n_engines), (s.n_decode + jnp.where(enters, osl - 2, 0)) % s.leaving.shape[1]
    leaving, leaving_kv = s.leaving[cell], s.leaving_kv[cell]
    done_count = jnp.where(decode, leaving, 0)
    done_kv = jnp.where(decode, leaving_kv, 0).astype(float)
    leaving = jnp.where(decode, 0, leaving + enters)
    leaving_kv = jnp.where(decode, 0, leaving_kv + jnp.where(enters, need.astype(jnp.int32), 0))
    ended_tokens = jnp.where(prefill, s.step_end_tokens, 0.0)
    ended = jnp.where(prefill, s.step_ends, 0)
    joined = jnp.where(prefill, s.step_joins, 0)

    caught_up = s.builder == s.head
    after_prefill = jnp.where(caught_up, jnp.where(fleet.prefill_first, ADMIT, DECODE), PREFILL)
    mode = jnp.where(prefill, after_prefill, jnp.where(decode | idle, ADMIT, s.mode))
    kept = jnp.where(prefill, 0.0, 1.0)
    kept_int = jnp.where(prefill, 0, 1)
    unfinished = s.batch + s.prompts
    new = Engines(
        clock=clock,
        mode=mode,
        head=head,
        builder=builder,
        built=built,
        tail=s.tail,
        queued=s.queued - admit,
        queued_tokens=s.queued_tokens - jnp.where(admit, isl, 0.0),
        batch=s.batch + joined - done_count,
        prompts=s.prompts + admit - joined - ended,
        cached=s.cached + jnp.where(prefill, s.step_tokens + joined - ended_tokens, 0.0) + jnp.where(decode, batch - done_kv, 0.0),
        reserved=s.reserved + jnp.where(admit, need, 0.0) - done_kv - ended_tokens - ended,
        step_tokens=step_tokens * kept,
        step_pieces=step_pieces * kept,
        step_sq=step_sq * kept,
        step_longest=step_longest * kept if fleet.padded else step_longest,
        step_prefix=step_prefix * kept if fleet.padded else step_prefix,
        step_joins=step_joins * kept_int,
        step_ends=step_ends * kept_int,
        step_end_tokens=step_end_tokens * kept,
        n_prefill=s.n_prefill + prefill,
        n_decode=s.n_decode + decode,
        prefill_outside=s.prefill_outside + (prefill & _outside(n_tokens, 1.0, fleet.valid.prefill_tokens)),
        decode_outside=s.decode_outside
        + (decode & (_outside(batch, 1.0, fleet.valid.batch) | _outside(cached, batch, fleet.valid.context))),
        above_board=s.above_board + (steps & (asked_j > fleet.max_w * duration * (1.0 + ROUNDING))),
        seen_batch=jnp.where(steps, unfinished, s.seen_batch),
        seen_cached=jnp.where(steps, s.cached, s.seen_cached),
        power=jnp.where(steps, energy / duration, s.power),
        power_prefill=jnp.where(steps, prefill, s.power_prefill),
        leaving=s.leaving.at[cell].set(leaving, unique_indices=True, indices_are_sorted=True),
        leaving_kv=s.leaving_kv.at[cell].set(leaving_kv, unique_indices=True, indices_are_sorted=True),
        dc_count=s.dc_count,
    )
    kind = jnp.where(admit, jnp.where(complete, ADMITTED_AND_BUILT, ADMITTED), BUILT)
    code = jnp.where(prefill, RAN_PREFILL, jnp.where(decode, RAN_DECODE, NOTHING))
    code = jnp.where(admit | complete, 4 * pointer + kind, code)
    return new, spent, code, clock


def _spent_with(fleet: Fleet, s: Engines, tokens: Array) -> Array:
    """What the open prefill step would spend of its budget with a piece of `tokens` more. [E]"""
    if fleet.padded:
        return (s.step_pieces + 1.0) * jnp.maximum(s.step_longest, tokens)
    return s.step_tokens + tokens


def _room(fleet: Fleet, s: Engines, rest: Array) -> Array:
    """Tokens that the open prefill step can take of a prompt of which `rest` is left. [E]"""
    if not fleet.padded:
        return fleet.token_budget - s.step_tokens
    whole = jnp.minimum(rest, fleet.token_budget)  # a prompt, or a piece as long as a step: taken whole or not at all
    return jnp.where(_spent_with(fleet, s, whole) <= fleet.token_budget, whole, 0.0)


def _outside(amount: Array, per: Array | float, limits: Array) -> Array:
    """Whether `amount / per` lies outside `limits` [2]; multiplied out, for `per` may be 0 where it does not matter."""
    return (amount < limits[0] * per) | (amount > limits[1] * per)
