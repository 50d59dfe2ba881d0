"""What a policy sees and what it must answer. The engine owns these interfaces and knows no concrete policy.

A policy sees the snapshots and its scheduler's own ledger, never the state of an engine. Write one by subclassing
`AbstractRequestPolicy` (one request at a time, `choose`) or, where decisions do not depend on one another, `AbstractPolicy` (`route`).
"""

from abc import abstractmethod
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from jaxserve.engine.model import Arrivals, Fleet
from jaxserve.engine.observe import own_order
from jaxserve.engine.state import Schedulers, Snapshot


class StepRequests(eqx.Module):
    """The requests decided in one step, scheduler by scheduler, in order of arrival."""

    request: Array  # [W] int32, R where empty
    start: Array  # [G+1] int32, where each scheduler's requests begin
    scheduler: Array  # [W] int32
    rank: Array  # [W] int32, place among its scheduler's requests


class View(eqx.Module):
    """What one scheduler knows of the DCs when it decides. Arrays [D] are in its own order of DCs (first its own, then wrapping round)."""

    batch: Array  # [D] B, the scheduler's own dispatches included
    queued_tokens: Array  # [D] Q, likewise
    queued_seen: Array  # [D] Q of the snapshot alone
    cached: Array  # [D] K
    duty: Array  # [D]
    ci: Array  # [D] g/kWh
    pue: Array  # [D]
    rtt_s: Array  # [D], 0 for own DCs
    isl_mean: Array  # [] of the requests decided before this one
    isl2_mean: Array  # [] mean of isl^2
    osl_mean: Array  # []
    fleet: Fleet


class AbstractPolicy(eqx.Module):
    """Where each request goes."""

    observes: ClassVar[bool]  # whether decisions look at snapshots; a policy that does not lets the engine take longer steps

    @abstractmethod
    def init(self) -> PyTree:
        """The memory of one scheduler at the start of a run."""

    @abstractmethod
    def route(
        self, fleet: Fleet, arrivals: Arrivals, snapshot: Snapshot, schedulers: Schedulers, requests: StepRequests
    ) -> tuple[Array, Schedulers]:
        """The place [W] of each request's DC in its scheduler's own order, and the schedulers after these decisions."""


class AbstractRequestPolicy(AbstractPolicy):
    """Decides one request after another; each decision sees the ledger entries of those before it."""

    observes: ClassVar[bool] = True

    @abstractmethod
    def choose(self, view: View, isl: Array, osl: Array, memory: PyTree) -> tuple[Array, PyTree]:
        """For one request of one scheduler: the place [] of the chosen DC in the scheduler's own order, and the memory after it."""

    def route(
        self, fleet: Fleet, arrivals: Arrivals, snapshot: Snapshot, schedulers: Schedulers, requests: StepRequests
    ) -> tuple[Array, Schedulers]:
        """Runs `choose` over the step's requests in order of arrival, all schedulers side by side."""
        order = own_order(fleet)
        size = fleet.dc_engines[order].astype(float)
        count = requests.start[1:] - requests.start[:-1]
        lanes = jnp.arange(fleet.n_schedulers)
        blank = requests.request.shape[0]
        known = View(
            batch=snapshot.batch[order],
            queued_tokens=snapshot.queued_tokens[order],
            queued_seen=snapshot.queued_tokens[order],
            cached=snapshot.cached[order],
            duty=snapshot.duty[order],
            ci=snapshot.ci[order],
            pue=fleet.pue[order],
            rtt_s=jnp.take_along_axis(fleet.rtt_s, order, axis=1),
            isl_mean=schedulers.isl_sum,
            isl2_mean=schedulers.isl2_sum,
            osl_mean=schedulers.osl_sum,
            fleet=fleet,
        )
        axes = eqx.tree_at(lambda view: view.fleet, jax.tree.map(lambda _: 0, known), None)
        choose = jax.vmap(self.choose, in_axes=(axes, 0, 0, 0))

        def decide(carry: tuple[Array, Array, Schedulers]) -> tuple[Array, Array, Schedulers]:
            j, places, s = carry
            here = j < count
            at = jnp.where(here, requests.start[:-1] + j, blank)
            request = requests.request.at[at].get(mode="fill", fill_value=arrivals.isl.shape[0] - 1)
            isl, osl = arrivals.isl[request], arrivals.osl[request].astype(float)
            earlier = jnp.maximum(s.decided, 1.0)
            new = s.decided == 0
            view = eqx.tree_at(
                lambda v: (v.batch, v.queued_tokens, v.isl_mean, v.isl2_mean, v.osl_mean),
                known,
                (
                    known.batch + s.sent / size,
                    known.queued_tokens + s.sent_tokens / size,
                    jnp.where(new, isl, s.isl_sum / earlier),
                    jnp.where(new, isl * isl, s.isl2_sum / earlier),
                    jnp.where(new, osl, s.osl_sum / earlier),
                ),
            )
            place, memory = choose(view, isl, osl, s.memory)
            kept = jnp.where(here, 1.0, 0.0)
            noted = jnp.where(fleet.ledger_kept, kept, 0.0)
            s = Schedulers(
                sent=s.sent.at[lanes, place].add(noted),
                sent_tokens=s.sent_tokens.at[lanes, place].add(noted * isl),
                decided=s.decided + kept,
                isl_sum=s.isl_sum + kept * isl,
                isl2_sum=s.isl2_sum + kept * isl * isl,
                osl_sum=s.osl_sum + kept * osl,
                memory=jax.tree.map(lambda new, old: _where(here, new, old), memory, s.memory),
            )
            return j + 1, places.at[at].set(place.astype(jnp.int32), mode="drop"), s

        most = across_lanes(jnp.max(count, initial=0))
        start = (jnp.int32(0), jnp.zeros_like(requests.request), schedulers)
        _, places, schedulers = jax.lax.while_loop(lambda carry: carry[0] < most, decide, start)
        return places, schedulers


def _where(mask: Array, new: Array, old: Array) -> Array:
    """`new` [G, ...] where `mask` [G], else `old`."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (new.ndim - 1)), new, old)


LANES = "lanes"
"""Name of the mapped axis when many scenarios run as one call."""


def across_lanes(value: Array) -> Array:
    """The largest `value` of all scenarios that run as one `vmap`ped call.

    A loop bound that differs from lane to lane would make `vmap` select over the whole carried state in every pass; a shared
    bound does not, and a lane that has nothing left to do is guarded by its own conditions.
    """
    try:
        return jax.lax.pmax(value, LANES)
    except NameError:  # not mapped: a single run
        return value
