"""Polls: what the provisioner sees of a DC, and what the schedulers' ledgers keep after it (SEMANTICS.md, "Snapshots")."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.engine.belief import age, means_of
from jaxserve.engine.model import OBSERVED, Arrivals, Fleet
from jaxserve.engine.state import Belief, Engines, Schedulers, Snapshot, State, Transit


def by_dc(fleet: Fleet, per_engine: Array) -> Array:
    """Sum over the engines of each DC: [E] -> [D]."""
    # A gather and a row sum, not a scatter: the order of summation is the same on every device and in every run.
    return jnp.sum(per_engine.at[fleet.dc_members].get(mode="fill", fill_value=0), axis=-1)


def is_handed(fleet: Fleet, scheduler: Array, dc: Array) -> Array:
    """Whether what `scheduler` [...] sends to `dc` [...] (D for nowhere) is placed anew there: the DC is another's."""
    if not fleet.forward_owner:
        return jnp.zeros(dc.shape, bool)
    own = fleet.own.at[scheduler, dc].get(mode="fill", fill_value=True)
    return ~own & (owner(fleet, dc) < fleet.n_schedulers)


def owner(fleet: Fleet, dc: Array) -> Array:
    """The first scheduler that has `dc` [...] among its own; G if none has."""
    first = jnp.where(jnp.any(fleet.own, axis=0), jnp.argmax(fleet.own, axis=0), fleet.n_schedulers)
    return first.astype(jnp.int32).at[dc].get(mode="fill", fill_value=fleet.n_schedulers)


def poll(fleet: Fleet, arrivals: Arrivals, state: State, window: Array, now_s: Array, ci: Array) -> State:
    """Take the polls that fall on the edge `now_s` at which `window` starts; nothing of that window has happened yet."""
    due = (window - fleet.poll_offset) % fleet.poll_windows == 0
    snapshot = _look(fleet, arrivals, state.engines, state.transit, state.snapshot, now_s, ci, due)
    schedulers = _settle(fleet, arrivals, state.transit, state.schedulers, snapshot, window, now_s, due)
    return eqx.tree_at(lambda s: (s.snapshot, s.schedulers), state, (snapshot, schedulers))


def _look(
    fleet: Fleet, arrivals: Arrivals, engines: Engines, transit: Transit, last: Snapshot, now_s: Array, ci: Array, due: Array
) -> Snapshot:
    within = engines.clock > now_s  # a step is in progress: see what stood before it
    batch = jnp.where(within, engines.seen_batch, engines.batch + engines.prompts)
    cached = jnp.where(within, engines.seen_cached, engines.cached)
    # A request that reaches its DC at this very instant is already queued there.
    there = (transit.arrival_s <= now_s) & ~is_handed(fleet, arrivals.scheduler[transit.request], transit.dc)
    arriving = jnp.where(there, arrivals.isl[transit.request], 0.0)
    queued = by_dc(fleet, engines.queued_tokens).at[transit.dc].add(arriving, mode="drop")
    size = fleet.dc_engines
    seconds = fleet.poll_windows * fleet.window_s
    return Snapshot(
        batch=jnp.where(due, by_dc(fleet, batch) / size, last.batch),
        queued_tokens=jnp.where(due, queued / size, last.queued_tokens),
        cached=jnp.where(due, by_dc(fleet, cached) / size, last.cached),
        duty=jnp.where(due, last.prefill_s / (size * seconds), last.duty),
        ci=jnp.where(due, ci, last.ci),
        prefill_s=jnp.where(due, 0.0, last.prefill_s),
    )


def _settle(
    fleet: Fleet,
    arrivals: Arrivals,
    transit: Transit,
    s: Schedulers,
    snapshot: Snapshot,
    window: Array,
    now_s: Array,
    due: Array,
) -> Schedulers:
    """What the schedulers make of the polls of the DCs that are `due` [D]."""
    n_schedulers, n_dc = s.sent.shape
    started = s.decided > 0
    s = age(fleet, s, means_of(s, jnp.maximum(s.decided, 1.0)), jnp.where(started, window, -1), fleet.dc_engines[fleet.order].astype(float))
    due = due[fleet.order]
    scheduler, isl = arrivals.scheduler[transit.request], arrivals.isl[transit.request]
    place = jnp.where(transit.dc < n_dc, fleet.place.at[scheduler, transit.dc].get(mode="clip"), n_dc)
    flying = fleet.ledger_in_flight & (transit.arrival_s > now_s)
    none = jnp.zeros((n_schedulers, n_dc))
    sent = none.at[scheduler, jnp.where(flying, place, n_dc)].add(1.0, mode="drop")
    sent_tokens = none.at[scheduler, jnp.where(flying, place, n_dc)].add(isl, mode="drop")
    # What reaches its DC at this very instant counts with the period that ends, unless it is placed anew at this instant.
    there = (transit.arrival_s <= now_s) & ~is_handed(fleet, scheduler, transit.dc)
    now = none.at[scheduler, jnp.where(there, place, n_dc)].add(1.0, mode="drop")
    reached = s.reached + now
    seen_own = jnp.where(due, reached + FADES * s.seen_own, s.seen_own)
    seen_others = jnp.where(due, _of_others(fleet, reached) + FADES * s.seen_others, s.seen_others)
    weight, others = learnt(fleet.alike, seen_own, seen_others, fleet.poll_windows * fleet.window_s)
    learns = (fleet.peers == OBSERVED) & jnp.any(due)
    new = replace(
        s,
        belief=jax.tree.map(lambda n, o: jnp.where(due, n, o), belief_at(fleet, snapshot, window, s.belief.progress), s.belief),
        sent=jnp.where(due, sent, s.sent),
        sent_tokens=jnp.where(due, sent_tokens, s.sent_tokens),
        reached=jnp.where(due, -now, s.reached),
        seen_own=seen_own,
        seen_others=seen_others,
        weight=jnp.where(learns, weight, s.weight),
        others=jnp.where(learns, others, s.others),
    )
    return new


def belief_at(fleet: Fleet, snapshot: Snapshot, window: Array, progress: Array) -> Belief:
    """What the polls at the start of `window` make all schedulers believe, who keep the `progress` [G, D]."""
    order = fleet.order
    zeros = jnp.zeros(order.shape)
    return Belief(
        batch=snapshot.batch[order],
        queued_tokens=snapshot.queued_tokens[order],
        cached=snapshot.cached[order],
        duty=snapshot.duty[order],
        progress=progress,
        busy_s=zeros,
        unseen=zeros,
        window=jnp.full(order.shape, window, jnp.int32),
    )


FADES = 0.5
"""What a poll's period counts for when the next one is over."""


def _of_others(fleet: Fleet, reached: Array) -> Array:
    """Requests of all other schedulers that have reached each DC [G, D], in each scheduler's own order."""
    by_dc = jnp.sum(jnp.take_along_axis(reached, fleet.place, axis=1), axis=0)  # [D]
    return by_dc[fleet.order] - reached


def learnt(prior: Array, own: Array, others: Array, poll_s: Array) -> tuple[Array, Array]:
    """From what `own` requests and those of `others` [G, D] the polls' periods have shown: how many requests one of
    its own stands for [G], and how many a second the others send besides [G, D].

    The others' requests that went where its own went, in proportion, are taken to follow it; the rest to come as it came. Of a
    scheduler of less than one recent request nothing is learnt: it has the `prior` [G].
    """
    total = jnp.sum(own, axis=1, keepdims=True)
    some, total = total >= 1.0, jnp.maximum(total, 1.0)
    alike = jnp.where(some, jnp.minimum(jnp.sum(others, axis=1, keepdims=True) / total * own, others), 0.0)
    weight = jnp.where(some, 1.0 + jnp.sum(alike, axis=1, keepdims=True) / total, prior[:, None])[:, 0]
    return weight, (others - alike) * ((1.0 - FADES) / poll_s)
