"""One step of the whole fleet: poll, decide, deliver, advance the engines, account. The only place where time moves."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from jaxserve.engine.control import AbstractPolicy
from jaxserve.engine.forward import take_handed
from jaxserve.engine.iterate import ADMITTED, BUILT, RAN_DECODE, RAN_PREFILL, Spent, run_pass, spent_before
from jaxserve.engine.lanes import across_lanes
from jaxserve.engine.model import Arrivals, Fleet, Sizes, StepInputs
from jaxserve.engine.observe import by_dc, poll
from jaxserve.engine.requests import StepRequests, step_requests
from jaxserve.engine.state import Engines, Outcomes, Schedulers, Snapshot, State
from jaxserve.engine.transit import Sent, deliver


class StepOutputs(eqx.Module):
    """What a step leaves behind."""

    prefill_j: Array  # [D]
    decode_j: Array  # [D]
    idle_s: Array  # [D] engine-seconds
    running: Array  # [D] int32, requests admitted and not finished at the step's end
    queued: Array  # [D] int32, requests in the engines' queues at the step's end
    under_way: Array  # [] int32, requests between scheduler and DC at the step's end
    seen: Array  # [4, D] the snapshots in force during the step: B, Q, K, duty
    ends: Array  # [M, E] clocks at the ends of the step's decode steps (from the top) and prefill steps (from the bottom)
    prefill_before: Array  # [E] int32, prefill steps run before this step
    decode_before: Array  # [E] int32
    passes: Array  # [] int32
    short_of: Array  # [2] bool: passes, transit
    stray: Array  # [2] int32, a request sent to a place that does not exist (R if there is none), and the place
    told: PyTree  # what the policy tells of its decisions


def advance_step(
    fleet: Fleet, policy: AbstractPolicy, sizes: Sizes, arrivals: Arrivals, state: State, step: StepInputs
) -> tuple[State, StepOutputs]:
    """Move everything from the start of step `step.index` to its end. `step` holds one row of the chunk's `StepInputs`."""
    window = step.index * sizes.step_windows
    start_s = window * fleet.window_s
    end_s = (window + sizes.step_windows) * fleet.window_s
    if policy.observes:
        state = look(fleet, arrivals, sizes, state, step)
    seen = jnp.stack([state.snapshot.batch, state.snapshot.queued_tokens, state.snapshot.cached, state.snapshot.duty])

    sent, strays, schedulers, transit = [], [], state.schedulers, state.transit
    if fleet.forward_owner and policy.batched:
        handed, transit = take_handed(fleet, arrivals, sizes, transit, window, start_s, end_s)
        placed, stray, schedulers, _ = _place(fleet, policy, arrivals, state.snapshot, schedulers, handed)
        sent.append(placed)
        strays.append(stray)
    requests = step_requests(arrivals, sizes, step.group_start, step.batch_end)
    placed, stray, schedulers, told = _place(fleet, policy, arrivals, state.snapshot, schedulers, requests)
    sent.append(placed)
    strays.append(stray)
    engines, outcomes, transit, reached, crowded = deliver(
        fleet,
        arrivals,
        state.engines,
        state.outcomes,
        transit,
        jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *sent),
        start_s,
        end_s,
        fleet.forward_window & policy.batched,
    )
    schedulers = replace(schedulers, reached=schedulers.reached + reached)

    before = engines
    engines, spent, codes, clocks, passes = _run(fleet, arrivals, outcomes, engines, sizes, start_s, end_s)
    outcomes, ends = _record(arrivals, outcomes, before, codes, clocks)
    snapshot = eqx.tree_at(lambda s: s.prefill_s, state.snapshot, state.snapshot.prefill_s + by_dc(fleet, spent.prefill_s))
    engine_s = state.engine_s + jnp.where(step.counted, jnp.stack([spent.prefill_s, spent.decode_s, spent.idle_s]), 0.0)
    state = State(engines=engines, outcomes=outcomes, transit=transit, snapshot=snapshot, schedulers=schedulers, engine_s=engine_s)
    return state, StepOutputs(
        prefill_j=by_dc(fleet, spent.prefill_j),
        decode_j=by_dc(fleet, spent.decode_j),
        idle_s=by_dc(fleet, spent.idle_s),
        running=by_dc(fleet, jnp.where(engines.clock > end_s, engines.seen_batch, engines.batch + engines.prompts)),
        queued=by_dc(fleet, engines.queued),
        under_way=jnp.sum(transit.dc < fleet.n_dc, dtype=jnp.int32),
        seen=seen,
        ends=ends,
        prefill_before=before.n_prefill,
        decode_before=before.n_decode,
        passes=passes,
        short_of=jnp.stack([jnp.any(engines.clock < end_s), crowded]),
        stray=first_stray(jnp.stack(strays), sizes.requests),
        told=told,
    )


def _place(
    fleet: Fleet, policy: AbstractPolicy, arrivals: Arrivals, snapshot: Snapshot, schedulers: Schedulers, requests: StepRequests
) -> tuple[Sent, Array, Schedulers, PyTree]:
    place, schedulers, told = policy.route(fleet, arrivals, snapshot, schedulers, requests)
    none = arrivals.isl.shape[0] - 1
    empty = requests.request == none
    # Indexing would take a place that does not exist for the last one without a word.
    astray = ~empty & ((place < 0) | (place >= fleet.n_dc))
    strays = jnp.stack([jnp.where(astray, requests.request, none), place.astype(jnp.int32)], axis=1)
    dc = jnp.where(empty, fleet.n_dc, fleet.order[requests.scheduler, place])
    sent = Sent(request=requests.request, dc=dc, scheduler=requests.scheduler, now_s=requests.now_s)
    return sent, first_stray(strays, none), schedulers, told


def first_stray(strays: Array, none: int) -> Array:
    """Of requests and places [n, 2] the first [2] whose request is not `none`."""
    return strays[jnp.argmax(strays[:, 0] < none)]


def look(fleet: Fleet, arrivals: Arrivals, sizes: Sizes, state: State, step: StepInputs) -> State:
    """The polls that fall on the start of step `step.index`."""
    window = step.index * sizes.step_windows
    # Which windows see a poll differs from lane to lane; the branch is taken when any lane has one, and `poll` masks by DC.
    any_due = across_lanes(jnp.any((window - fleet.poll_offset) % fleet.poll_windows == 0).astype(jnp.int32)) > 0
    return jax.lax.cond(any_due, lambda s: poll(fleet, arrivals, s, window, window * fleet.window_s, step.ci), lambda s: s, state)


def _run(
    fleet: Fleet, arrivals: Arrivals, outcomes: Outcomes, engines: Engines, sizes: Sizes, start_s: Array, end_s: Array
) -> tuple[Engines, Spent, Array, Array, Array]:
    """Passes until every engine has reached `end_s`. Returns engines, what they spent, events [M, E], clocks [M, E] and the passes made.

    Each pass writes one row of small buffers; nothing request-sized is written inside the loop.
    """
    shape = (sizes.passes, fleet.n_engines)
    carry = (
        engines,
        spent_before(engines, start_s, end_s),
        jnp.full(shape, -1, jnp.int32),
        jnp.zeros(shape),
        jnp.int32(0),
    )

    def unfinished(carry: tuple[Engines, Spent, Array, Array, Array]) -> Array:
        return (across_lanes(jnp.any(carry[0].clock < end_s).astype(jnp.int32)) > 0) & (carry[4] < sizes.passes)

    def body(carry: tuple[Engines, Spent, Array, Array, Array]) -> tuple[Engines, Spent, Array, Array, Array]:
        engines, spent, codes, clocks, i = carry
        engines, spent, code, clock = run_pass(fleet, arrivals, outcomes, engines, spent, end_s)
        codes = jax.lax.dynamic_update_slice(codes, code[None], (i, jnp.int32(0)))
        clocks = jax.lax.dynamic_update_slice(clocks, clock[None], (i, jnp.int32(0)))
        return engines, spent, codes, clocks, i + 1

    return jax.lax.while_loop(unfinished, body, carry)


def _record(arrivals: Arrivals, outcomes: Outcomes, before: Engines, codes: Array, clocks: Array) -> tuple[Outcomes, Array]:
    """Write a step's events into the requests, and its step ends into a table by number of the step: [M, E].

    The j-th decode step of an engine in this step stands in row j, its j-th prefill step in row M - 1 - j; both together are at most M.
    """
    none = outcomes.next.shape[0] - 1
    prefill, decode = codes == RAN_PREFILL, codes == RAN_DECODE
    prefills = jnp.cumsum(prefill, axis=0, dtype=jnp.int32) - prefill  # run in this step before this pass
    decodes = jnp.cumsum(decode, axis=0, dtype=jnp.int32) - decode
    n_passes, n_engines = codes.shape
    row = jnp.where(decode, decodes, jnp.where(prefill, n_passes - 1 - prefills, n_passes))
    ends = jnp.zeros_like(clocks).at[row, jnp.arange(n_engines)].set(clocks, mode="drop", unique_indices=False)

    event = codes >= 0
    kind = codes % 4
    admitted = jnp.where(event & (kind != BUILT), codes // 4, none + 1)
    completed = jnp.where(event & (kind != ADMITTED), codes // 4, none + 1)
    outcomes = eqx.tree_at(
        lambda o: (o.admit_s, o.admit_decode, o.prefill_step),
        outcomes,
        (
            outcomes.admit_s.at[admitted].set(clocks, mode="drop"),
            outcomes.admit_decode.at[admitted].set(before.n_decode + decodes, mode="drop"),
            outcomes.prefill_step.at[completed].set(before.n_prefill + prefills, mode="drop"),
        ),
    )
    return outcomes, ends
