"""Polls: what the provisioner sees of a DC, and what the schedulers' ledgers keep after it (SEMANTICS.md, "Snapshots")."""

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from jaxserve.engine.model import Arrivals, Fleet
from jaxserve.engine.state import Engines, Schedulers, Snapshot, State, Transit


def by_dc(fleet: Fleet, per_engine: Array) -> Array:
    """Sum over the engines of each DC: [E] -> [D]."""
    # A gather and a row sum, not a scatter: the order of summation is the same on every device and in every run.
    return jnp.sum(per_engine.at[fleet.dc_members].get(mode="fill", fill_value=0), axis=-1)


def own_position(fleet: Fleet, scheduler: Array, dc: Array) -> Array:
    """Place of `dc` in the scheduler's own order, which starts at its first own DC and wraps round."""
    return (dc - fleet.first_dc[scheduler]) % fleet.n_dc


def poll(fleet: Fleet, arrivals: Arrivals, state: State, window: Array, now_s: Array, ci: Array) -> State:
    """Take the polls that fall on the edge `now_s` at which `window` starts; nothing of that window has happened yet."""
    due = (window - fleet.poll_offset) % fleet.poll_windows == 0
    snapshot = _look(fleet, arrivals, state.engines, state.transit, state.snapshot, now_s, ci, due)
    schedulers = _settle(fleet, arrivals, state.transit, state.schedulers, now_s, due)
    return eqx.tree_at(lambda s: (s.snapshot, s.schedulers), state, (snapshot, schedulers))


def _look(
    fleet: Fleet, arrivals: Arrivals, engines: Engines, transit: Transit, last: Snapshot, now_s: Array, ci: Array, due: Array
) -> Snapshot:
    within = engines.clock > now_s  # a step is in progress: see what stood before it
    batch = jnp.where(within, engines.seen_batch, engines.batch + engines.prompts)
    cached = jnp.where(within, engines.seen_cached, engines.cached)
    # A request that reaches its DC at this very instant is already queued there.
    arriving = jnp.where(transit.arrival_s <= now_s, arrivals.isl[transit.request], 0.0)
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


def _settle(fleet: Fleet, arrivals: Arrivals, transit: Transit, schedulers: Schedulers, now_s: Array, due: Array) -> Schedulers:
    n_schedulers, n_dc = schedulers.sent.shape
    scheduler = arrivals.scheduler[transit.request]
    flying = fleet.ledger_in_flight & (transit.dc < n_dc) & (transit.arrival_s > now_s)
    place = jnp.where(flying, own_position(fleet, scheduler, transit.dc), n_dc)
    none = jnp.zeros((n_schedulers, n_dc))
    sent = none.at[scheduler, place].add(1.0, mode="drop")
    sent_tokens = none.at[scheduler, place].add(arrivals.isl[transit.request], mode="drop")
    order = own_order(fleet)
    return eqx.tree_at(
        lambda s: (s.sent, s.sent_tokens),
        schedulers,
        (jnp.where(due[order], sent, schedulers.sent), jnp.where(due[order], sent_tokens, schedulers.sent_tokens)),
    )


def own_order(fleet: Fleet) -> Array:
    """DC at each place of each scheduler's own order: [G, D]."""
    return (fleet.first_dc[:, None] + jnp.arange(fleet.n_dc, dtype=jnp.int32)) % fleet.n_dc
