"""What a scheduler takes a DC to be between two polls: the poll carried forward, window by window, with the step models.

(SEMANTICS.md, "What a scheduler knows between polls".)
"""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from jaxserve.engine.lanes import across_lanes
from jaxserve.engine.model import Fleet
from jaxserve.engine.state import Schedulers


class Means(eqx.Module):
    """Mean lengths of the requests that each scheduler has decided so far."""

    isl: Array  # [G] tokens
    isl2: Array  # [G] mean of isl^2
    osl: Array  # [G] tokens, as believed
    osl2: Array  # [G] mean of osl^2


def means_of(s: Schedulers, n: Array) -> Means:
    """The sums of the schedulers over `n` [G] requests."""
    return Means(isl=s.isl_sum / n, isl2=s.isl2_sum / n, osl=s.osl_sum / n, osl2=s.osl2_sum / n)


def slots(fleet: Fleet, limit: Array, isl_mean: Array, osl_mean: Array) -> Array:
    """Mean requests that an engine runs at once, of at most `limit`: m with the schedulers' batch capacity, M with the engine's own."""
    return jnp.maximum(1.0, jnp.minimum(limit, jnp.floor(fleet.kv_capacity / (isl_mean + osl_mean))))


def age(fleet: Fleet, s: Schedulers, means: Means, window: Array, engines: Array) -> Schedulers:
    """Every scheduler's beliefs carried forward to the start of `window` [G] (-1: not at all); `engines` [G, D] by its own order.

    Nothing happens unless `fleet.view_aged`.
    """
    behind = jnp.where(fleet.view_aged, window[:, None] - s.belief.window, 0)
    most = across_lanes(jnp.max(behind, initial=0))

    def carry(at: tuple[Array, Schedulers]) -> tuple[Array, Schedulers]:
        i, s = at
        return i + 1, _one_window(fleet, s, means, fleet.view_aged & (s.belief.window < window[:, None]), engines)

    return jax.lax.while_loop(lambda at: at[0] < most, carry, (jnp.int32(0), s))[1]


def _one_window(fleet: Fleet, s: Schedulers, means: Means, due: Array, engines: Array) -> Schedulers:
    """The beliefs that are `due` [G, D] after one more window: what was sent comes, is admitted, prefilled and decoded."""
    old, dt = s.belief, fleet.window_s
    isl, isl2, osl, osl2 = (mean[:, None] for mean in (means.isl, means.isl2, means.osl, means.osl2))
    others = s.others * dt / engines
    come = s.weight[:, None] * s.sent / engines + others
    tokens = old.queued_tokens + (s.weight[:, None] * s.sent_tokens / engines + others * isl)

    taken = jnp.minimum(tokens, jnp.maximum(0.0, slots(fleet, fleet.max_num_seqs, isl, osl) - old.batch) * isl)
    admitted = taken / isl
    prefills = jnp.minimum(admitted, jnp.maximum(1.0, dt / fleet.decode_time(jnp.maximum(old.batch, 1.0), old.cached)))
    each = _ratio(admitted, prefills)
    busy = old.busy_s + jnp.where(prefills > 0, prefills * fleet.prefill_time(each * isl, each, each * isl2), 0.0)
    prefill_s = jnp.minimum(busy, dt)

    batch, cached = old.batch + admitted, old.cached + taken
    steps = (dt - prefill_s) / fleet.decode_time(jnp.maximum(batch, 1.0), cached)
    generated = old.batch * old.progress + steps * batch
    finished = batch * jnp.minimum(1.0, steps / osl * (_ratio(generated, batch) / (osl2 / (2.0 * osl))))
    left = batch - finished
    new = replace(
        old,
        batch=left,
        queued_tokens=tokens - taken,
        cached=jnp.where(left > 0, jnp.maximum(0.0, cached + steps * batch - finished * (isl + osl)), 0.0),
        progress=_ratio(jnp.maximum(0.0, generated - finished * osl), left),
        duty=old.duty + (prefill_s / dt - old.duty) / fleet.poll_windows,
        busy_s=busy - prefill_s,
        unseen=old.unseen + come,
        window=old.window + 1,
    )
    belief = jax.tree.map(lambda n, o: jnp.where(due, n, o), new, old)
    return replace(s, belief=belief, sent=jnp.where(due, 0.0, s.sent), sent_tokens=jnp.where(due, 0.0, s.sent_tokens))


def _ratio(amount: Array, of: Array) -> Array:
    """`amount / of`, 0 where `of` is 0."""
    return jnp.where(of > 0, amount / jnp.where(of > 0, of, 1.0), 0.0)
