"""The two baselines that know nothing of carbon: round-robin over DCs, and the least loaded DC."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from jaxserve.engine.control import AbstractPolicy, AbstractRequestPolicy, View
from jaxserve.engine.model import Arrivals, Fleet
from jaxserve.engine.requests import StepRequests
from jaxserve.engine.state import Schedulers, Snapshot
from jaxserve.policies.estimate import queued_requests


class RoundRobin(AbstractPolicy):
    """Each scheduler deals its requests to the DCs in turn, starting at its first own DC."""

    observes: ClassVar[bool] = False

    def init(self, n_dc: int) -> Array:
        """The place of the scheduler's next DC."""
        return jnp.int32(0)

    def route(
        self, fleet: Fleet, arrivals: Arrivals, snapshot: Snapshot, schedulers: Schedulers, requests: StepRequests
    ) -> tuple[Array, Schedulers, tuple[()]]:
        """Deals the step's requests in order of arrival."""
        place = (schedulers.memory[requests.scheduler] + requests.rank) % fleet.n_dc
        count = requests.start[1:] - requests.start[:-1]
        return place, dataclasses.replace(schedulers, memory=(schedulers.memory + count) % fleet.n_dc), ()


class LeastLoaded(AbstractRequestPolicy):
    """The DC with the fewest requests running, dispatched and queued per engine."""

    def init(self, n_dc: int) -> tuple[()]:
        """Remembers nothing."""
        return ()

    def choose(self, view: View, isl: Array, osl: Array, memory: tuple[()]) -> tuple[Array, tuple[()]]:
        """Least B + q; ties go to the first in the scheduler's own order."""
        return jnp.argmin(view.batch + queued_requests(view)), memory
