"""Policies that deal requests in proportion to weights: MOER's soft multiplier, planned shares; and MOER's capped fill of a window."""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxserve.engine.batch import AbstractBatchPolicy, Batch
from jaxserve.engine.control import AbstractRequestPolicy, View
from jaxserve.policies.estimate import queued_requests

ROUNDING = 1e-9
"""Equal credits stay equal, and a product such as 0.1 * 30 whole, however they are summed."""
LEAST_PRESSURE = 0.01
"""Weight that a DC without a free place keeps (our definition)."""


def deal(weight: Array, credit: Array) -> tuple[Array, Array]:
    """Smooth weighted round-robin: the place [] of the next DC, and the credits [D] after it. Ties go to the first place."""
    credit = credit + weight / jnp.sum(weight)
    place = jnp.argmax(credit >= jnp.max(credit) - ROUNDING)
    return place, credit.at[place].add(-1.0)


class MoerSoft(AbstractRequestPolicy):
    """Weights pressure * (1 - w*I), I the carbon intensity scaled to [0, 1] over the DCs (arXiv 2608.06188; the pressure is ours)."""

    w: ArrayLike

    def init(self, n_dc: int) -> Array:
        """Credits [D]."""
        return jnp.zeros(n_dc)

    def choose(self, view: View, isl: Array, osl: Array, memory: Array) -> tuple[Array, Array]:
        """The next DC in weighted turn."""
        spread = jnp.max(view.ci) - jnp.min(view.ci)
        intensity = jnp.where(spread > 0, (view.ci - jnp.min(view.ci)) / jnp.where(spread > 0, spread, 1.0), 0.0)
        pressure = jnp.maximum(LEAST_PRESSURE, 1.0 - (view.batch + queued_requests(view)) / view.fleet.batch_capacity)
        return deal(pressure * (1.0 - self.w * intensity), memory)


class PlannedShares(AbstractRequestPolicy):
    """Deals by the shares that a plan has fixed for each period of decision times."""

    observes: ClassVar[bool] = False
    shares: Array  # [P, G, D], in the schedulers' own order, >= 0, not all zero
    period_s: ArrayLike

    def init(self, n_dc: int) -> Array:
        """Credits [D]."""
        return jnp.zeros(n_dc)

    def choose(self, view: View, isl: Array, osl: Array, memory: Array) -> tuple[Array, Array]:
        """The next DC in weighted turn; after the last period its plan goes on."""
        period = jnp.clip((view.now_s / self.period_s).astype(jnp.int32), 0, self.shares.shape[0] - 1)
        return deal(jnp.asarray(self.shares)[period, view.scheduler], memory)


class MoerCap(AbstractBatchPolicy):
    """Fills DCs in order of carbon intensity, each with at most a share `cap` of the window; no SLO filter (arXiv 2608.06188, replay)."""

    cap: ArrayLike

    def init(self, n_dc: int) -> tuple[()]:
        """Remembers nothing."""
        return ()

    def decide(self, view: View, batch: Batch, memory: tuple[()]) -> tuple[Array, tuple[()], tuple[()]]:
        """In order of arrival; ties of carbon intensity go to the first DC in the scheduler's own order."""
        most = jnp.maximum(jnp.ceil(self.cap * jnp.sum(batch.here) - ROUNDING), 1.0).astype(jnp.int32)
        # Whole numbers: XLA multiplies by 1/most where it may, and 49 * (1/49) is less than 1.
        turn = jnp.minimum((jnp.cumsum(batch.here) - batch.here) // most, jnp.sum(batch.open) - 1)
        return jnp.argsort(jnp.where(batch.open, view.ci, jnp.inf), stable=True)[turn], (), ()
