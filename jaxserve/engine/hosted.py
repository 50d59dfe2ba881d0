"""Policies that plan on the host between two steps of the engine: same view, same answer, any solver."""

from abc import ABC, abstractmethod
from functools import partial
from typing import ClassVar

import jax
import numpy as np
from jax import Array
from jaxtyping import PyTree
from numpy.typing import NDArray

from jaxserve.engine.control import AbstractPolicy
from jaxserve.engine.model import Arrivals, Fleet, Sizes, StepInputs
from jaxserve.engine.requests import StepRequests, step_requests
from jaxserve.engine.state import Schedulers, Snapshot, State
from jaxserve.engine.window import look


class AbstractHostPolicy(ABC):
    """A batch policy outside the compiled run. The engine stops at every step for its plan."""

    observes: ClassVar[bool] = True
    batched: ClassVar[bool] = True
    measured: bool
    """Whether the wall time of its solves delays the decisions."""

    @abstractmethod
    def init(self, n_dc: int) -> PyTree:
        """The memory of one scheduler of `n_dc` DCs at the start of a run."""

    @abstractmethod
    def plan(
        self, fleet: Fleet, arrivals: Arrivals, snapshot: Snapshot, schedulers: Schedulers, requests: StepRequests
    ) -> tuple[NDArray[np.int32], Schedulers, PyTree, NDArray[np.float64]]:
        """As `AbstractPolicy.route`, and the wall seconds [K, G] that each batch's decision took."""

    @abstractmethod
    def fallbacks(self, memory: PyTree) -> Array:
        """As `AbstractPolicy.fallbacks`."""


class Given(AbstractPolicy):
    """The decisions of one step, made elsewhere."""

    place: Array  # [W]
    told: PyTree
    fell_back: Array  # [2]
    observes: ClassVar[bool] = False  # whoever decided has looked
    batched: ClassVar[bool] = True

    def init(self, n_dc: int) -> PyTree:
        """Nothing: the schedulers keep the memory of the policy that decides."""
        return ()

    def route(
        self, fleet: Fleet, arrivals: Arrivals, snapshot: Snapshot, schedulers: Schedulers, requests: StepRequests
    ) -> tuple[Array, Schedulers, PyTree]:
        """What was given."""
        return self.place, schedulers, self.told

    def fallbacks(self, memory: PyTree) -> Array:
        """As the policy that decides counts them."""
        return self.fell_back


@partial(jax.jit, static_argnames="sizes")
def observe(fleet: Fleet, arrivals: Arrivals, state: State, step: StepInputs, sizes: Sizes) -> tuple[State, StepRequests]:
    """The state after the polls at the start of a step, and the requests to be decided in it. `step` holds one row."""
    return look(fleet, arrivals, sizes, state, step), step_requests(arrivals, sizes, step.group_start, step.batch_end)
