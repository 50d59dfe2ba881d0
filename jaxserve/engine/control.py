"""What a policy sees and what it must answer. The engine owns these interfaces and knows no concrete policy.

A policy sees the snapshots and its scheduler's own ledger, never the state of an engine. Write one by subclassing
`AbstractRequestPolicy` (one request at a time, `choose`), `AbstractBatchPolicy` of `engine/batch.py` (a window at a time),
or, where decisions do not depend on one another, `AbstractPolicy` (`route`).
"""

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from jaxserve.engine.belief import Means, age, means_of
from jaxserve.engine.lanes import across_lanes
from jaxserve.engine.model import Arrivals, Fleet
from jaxserve.engine.requests import StepRequests
from jaxserve.engine.state import Schedulers, Snapshot

QUANTILE = 2.33
"""Standard deviations by which the 99th percentile of a normal distribution exceeds its mean."""


class View(eqx.Module):
    """What one scheduler knows of the DCs when it decides. Arrays [D] are in its own order of DCs (first its own, then wrapping round)."""

    scheduler: Array  # [] int32, which one
    batch: Array  # [D] B, the scheduler's own dispatches included
    queued_tokens: Array  # [D] Q, likewise
    queued_seen: Array  # [D] Q of the snapshot alone
    spread: Array  # [D] requests by which an engine may well exceed its DC's mean of B + q
    cached: Array  # [D] K
    duty: Array  # [D]
    ci: Array  # [D] g/kWh
    pue: Array  # [D]
    rtt_s: Array  # [D], 0 for own DCs
    engines: Array  # [D] engines of the DC
    isl_mean: Array  # [] of the requests decided before this one
    isl2_mean: Array  # [] mean of isl^2
    osl_mean: Array  # []
    now_s: Array  # [] when the decision (of a batch: of its first request) is out
    fleet: Fleet


class AbstractPolicy(eqx.Module):
    """Where each request goes."""

    observes: ClassVar[bool]  # whether decisions look at snapshots; a policy that does not lets the engine take longer steps
    batched: ClassVar[bool] = False  # whether requests are decided window by window, at its close, rather than at arrival

    @abstractmethod
    def init(self, n_dc: int) -> PyTree:
        """The memory of one scheduler of `n_dc` DCs at the start of a run."""

    @abstractmethod
    def route(
        self, fleet: Fleet, arrivals: Arrivals, snapshot: Snapshot, schedulers: Schedulers, requests: StepRequests
    ) -> tuple[Array, Schedulers, PyTree]:
        """The place [W] of each request's DC in its scheduler's own order, the schedulers after it, and what to tell of these decisions."""

    def fallbacks(self, memory: PyTree) -> Array:
        """From the schedulers' memories: requests [2] that the fallback sent to the lowest-carbon DC with headroom, and dealt in turn."""
        return jnp.zeros(2, jnp.int32)


class AbstractRequestPolicy(AbstractPolicy):
    """Decides one request after another; each decision sees the ledger entries of those before it."""

    observes: ClassVar[bool] = True

    @abstractmethod
    def choose(self, view: View, isl: Array, osl: Array, memory: PyTree) -> tuple[Array, PyTree]:
        """For one request of one scheduler: the place [] of the chosen DC in the scheduler's own order, and the memory after it.

        `osl` is what the scheduler believes the output length to be.
        """

    def route(
        self, fleet: Fleet, arrivals: Arrivals, snapshot: Snapshot, schedulers: Schedulers, requests: StepRequests
    ) -> tuple[Array, Schedulers, PyTree]:
        """Runs `choose` over the step's requests in order of arrival, all schedulers side by side."""
        count = requests.start[1:] - requests.start[:-1]
        blank = requests.request.shape[0]
        known = snapshot_views(fleet, snapshot)
        choose = jax.vmap(self.choose, in_axes=(view_axes(known), 0, 0, 0))

        def decide(carry: tuple[Array, Array, Schedulers]) -> tuple[Array, Array, Schedulers]:
            j, places, s = carry
            here = j < count
            at = jnp.where(here, requests.start[:-1] + j, blank)
            request = requests.request.at[at].get(mode="fill", fill_value=arrivals.isl.shape[0] - 1)
            isl, osl = arrivals.isl[request], arrivals.osl_believed[request]
            means = means_now(s, isl, isl * isl, osl, osl * osl)
            if self.observes:
                s = age(fleet, s, means, requests.window.at[at].get(mode="fill", fill_value=-1), known.engines)
            view = views_now(known, s, requests.now_s.at[at].get(mode="fill", fill_value=jnp.inf), means)
            place, memory = choose(view, isl, osl, s.memory)
            s = noted(fleet, s, place[:, None], isl[:, None], osl[:, None], here[:, None], memory)
            return j + 1, places.at[at].set(place.astype(jnp.int32), mode="drop"), s

        most = across_lanes(jnp.max(count, initial=0))
        start = (jnp.int32(0), jnp.zeros_like(requests.request), schedulers)
        _, places, schedulers = jax.lax.while_loop(lambda carry: carry[0] < most, decide, start)
        return places, schedulers, ()


def snapshot_views(fleet: Fleet, snapshot: Snapshot) -> View:
    """What does not change from one decision of a step to the next, the rest left blank: arrays [G, D]."""
    order = fleet.order
    blank, nothing = jnp.zeros(fleet.n_schedulers), jnp.zeros(order.shape)
    return View(
        scheduler=jnp.arange(fleet.n_schedulers, dtype=jnp.int32),
        batch=nothing,
        queued_tokens=nothing,
        queued_seen=nothing,
        spread=nothing,
        cached=nothing,
        duty=nothing,
        ci=snapshot.ci[order],
        pue=fleet.pue[order],
        rtt_s=jnp.take_along_axis(fleet.rtt_s, order, axis=1),
        engines=fleet.dc_engines[order].astype(float),
        isl_mean=blank,
        isl2_mean=blank,
        osl_mean=blank,
        now_s=blank,
        fleet=fleet,
    )


def view_axes(view: View) -> View:
    """`in_axes` of a `vmap` over schedulers: everything but the fleet."""
    return eqx.tree_at(lambda v: v.fleet, jax.tree.map(lambda _: 0, view), None)


def means_now(s: Schedulers, isl: Array, isl2: Array, osl: Array, osl2: Array) -> Means:
    """Mean lengths so far; `isl`, `isl2`, `osl`, `osl2` [G] stand in before a scheduler's first decision."""
    now = Means(isl=isl, isl2=isl2, osl=osl, osl2=osl2)
    return jax.tree.map(lambda own, mean: jnp.where(s.decided == 0, own, mean), now, means_of(s, jnp.maximum(s.decided, 1.0)))


def views_now(known: View, s: Schedulers, now_s: Array, means: Means) -> View:
    """`known` [G, D] with what the schedulers believe of the DCs, their ledgers added, and the means so far."""
    belief, weight = s.belief, s.weight[:, None]
    sent = weight * s.sent / known.engines
    batch, queued = belief.batch + sent, belief.queued_tokens / means.isl[:, None]
    spread = jnp.where(known.fleet.view_aged, QUANTILE * jnp.sqrt(batch + queued + belief.unseen + sent), 0.0)
    return replace(
        known,
        batch=batch,
        queued_tokens=belief.queued_tokens + weight * s.sent_tokens / known.engines,
        queued_seen=belief.queued_tokens,
        spread=spread,
        cached=belief.cached,
        duty=belief.duty,
        isl_mean=means.isl,
        isl2_mean=means.isl2,
        osl_mean=means.osl,
        now_s=now_s,
    )


def noted(fleet: Fleet, s: Schedulers, place: Array, isl: Array, osl: Array, here: Array, memory: PyTree) -> Schedulers:
    """The schedulers after each has sent requests [G, N] to `place` [G, N]; only those `here` [G, N] count, and `memory` with them."""
    lanes = jnp.arange(fleet.n_schedulers)[:, None]
    kept = jnp.where(here, 1.0, 0.0)
    noted = jnp.where(fleet.ledger_kept, kept, 0.0)
    some = jnp.any(here, axis=1)
    return replace(
        s,
        sent=s.sent.at[lanes, place].add(noted),
        sent_tokens=s.sent_tokens.at[lanes, place].add(noted * isl),
        decided=s.decided + jnp.sum(kept, axis=1),
        isl_sum=s.isl_sum + jnp.sum(kept * isl, axis=1),
        isl2_sum=s.isl2_sum + jnp.sum(kept * isl * isl, axis=1),
        osl_sum=s.osl_sum + jnp.sum(kept * osl, axis=1),
        osl2_sum=s.osl2_sum + jnp.sum(kept * osl * osl, axis=1),
        memory=jax.tree.map(lambda new, old: _where(some, new, old), memory, s.memory),
    )


def _where(mask: Array, new: Array, old: Array) -> Array:
    """`new` [G, ...] where `mask` [G], else `old`."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (new.ndim - 1)), new, old)
