"""Policies that decide a window at a time: the requests of a scheduler's window, together, at its close."""

from abc import abstractmethod
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from jaxserve.engine.belief import age
from jaxserve.engine.control import AbstractPolicy, View, means_now, noted, snapshot_views, view_axes, views_now
from jaxserve.engine.lanes import across_lanes
from jaxserve.engine.model import Arrivals, Fleet
from jaxserve.engine.requests import StepRequests
from jaxserve.engine.state import Schedulers, Snapshot


class Batch(eqx.Module):
    """The requests of one scheduler's window in order of arrival, the rest of the N places blank."""

    isl: Array  # [N] tokens
    osl: Array  # [N] tokens, as the scheduler believes
    here: Array  # [N] bool
    now_s: Array  # [N] s, when the decision is out
    window: Array  # [] int32, in which it is decided, -1 for an empty one
    open: Array  # [D] bool, DCs that its requests may be sent to, in the scheduler's own order


class AbstractBatchPolicy(AbstractPolicy):
    """Decides the requests of a window together."""

    observes: ClassVar[bool] = True
    batched: ClassVar[bool] = True

    @abstractmethod
    def decide(self, view: View, batch: Batch, memory: PyTree) -> tuple[Array, PyTree, PyTree]:
        """For the window of one scheduler: the place [N] of each request's DC in the scheduler's own order, the memory after it,
        and what to tell of the decision.
        """

    def route(
        self, fleet: Fleet, arrivals: Arrivals, snapshot: Snapshot, schedulers: Schedulers, requests: StepRequests
    ) -> tuple[Array, Schedulers, PyTree]:
        """Runs `decide` window after window, all schedulers side by side. What it tells comes back with axes [K, G]."""
        known = snapshot_views(fleet, snapshot)
        decide = jax.vmap(self.decide, in_axes=(view_axes(known), 0, 0))

        def one(k: Array, s: Schedulers) -> tuple[Array, Array, Schedulers, PyTree]:
            batch, at = gather(fleet, arrivals, requests, k)
            s, view = batch_views(fleet, known, s, batch)
            place, memory, told = decide(view, batch, s.memory)
            return at, place, noted(fleet, s, place, batch.isl, batch.osl, batch.here, memory), told

        def after(carry: tuple[Array, Array, Schedulers, PyTree]) -> tuple[Array, Array, Schedulers, PyTree]:
            k, places, s, told = carry
            at, place, s, news = one(k, s)
            told = jax.tree.map(lambda all_, new: all_.at[k].set(new), told, news)
            return k + 1, places.at[at].set(place.astype(jnp.int32), mode="drop"), s, told

        most = across_lanes(batches_in(requests))
        shapes = jax.eval_shape(lambda s: one(jnp.int32(0), s)[3], schedulers)
        told = jax.tree.map(lambda leaf: jnp.zeros((requests.batch_end.shape[0], *leaf.shape), leaf.dtype), shapes)
        start = (jnp.int32(0), jnp.zeros_like(requests.request), schedulers, told)
        _, places, schedulers, told = jax.lax.while_loop(lambda carry: carry[0] < most, after, start)
        return places, schedulers, told


def batches_in(requests: StepRequests) -> Array:
    """The most batches that any scheduler has in this step."""
    ends = jnp.concatenate([requests.start[None, :-1], requests.batch_end])
    return jnp.max(jnp.sum(ends[1:] > ends[:-1], axis=0, dtype=jnp.int32))


def gather(fleet: Fleet, arrivals: Arrivals, requests: StepRequests, k: Array) -> tuple[Batch, Array]:
    """The k-th batch of every scheduler [G, N], and the place [G, N] of its requests in the step's list (W where blank)."""
    begin = jnp.where(k == 0, requests.start[:-1], requests.batch_end[jnp.maximum(k - 1, 0)])
    at = begin[:, None] + jnp.arange(requests.batch_requests, dtype=jnp.int32)
    here = at < requests.batch_end[k][:, None]
    at = jnp.where(here, at, requests.request.shape[0])
    request = requests.request.at[at].get(mode="fill", fill_value=arrivals.isl.shape[0] - 1)
    return Batch(
        isl=arrivals.isl[request],
        osl=arrivals.osl_believed[request],
        here=here,
        now_s=requests.now_s.at[at].get(mode="fill", fill_value=jnp.inf),
        window=requests.window.at[at[:, 0]].get(mode="fill", fill_value=-1),
        open=jnp.take_along_axis(fleet.own, fleet.order, axis=1) if requests.own_only else jnp.ones_like(fleet.own),
    ), at


def batch_views(fleet: Fleet, known: View, s: Schedulers, batch: Batch) -> tuple[Schedulers, View]:
    """What every scheduler knows when it decides its batch [G, N], and the schedulers with their beliefs carried to that moment."""
    n = jnp.maximum(jnp.sum(batch.here, axis=1), 1)

    def mean(values: Array) -> Array:
        return jnp.sum(jnp.where(batch.here, values, 0.0), axis=1) / n

    means = means_now(s, mean(batch.isl), mean(batch.isl * batch.isl), mean(batch.osl), mean(batch.osl * batch.osl))
    s = age(fleet, s, means, batch.window, known.engines)
    return s, views_now(known, s, batch.now_s[:, 0], means)
