"""Greedy: the feasible DC with the best weighted sum of latency and carbon intensity."""

from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxserve.engine.control import AbstractRequestPolicy, View
from jaxserve.policies.estimate import estimate

Latency = Literal["e2e", "slo", "ttft"]
LATENCIES: tuple[Latency, ...] = get_args(Latency)
Signal = Literal["ci", "pue_ci"]


class Greedy(AbstractRequestPolicy):
    """argmin over F_r of alpha * Lat/max_F Lat + (1 - alpha) * CI/max_F CI (arXiv 2610.14571); alpha = 0 is the cleanest feasible DC.

    The paper leaves Lat open: `e2e` is TTFT + osl*TPOT, `slo` TTFT/budget + TPOT/budget, `ttft` TTFT alone (our readings).
    `signal` chooses CI alone, as published, or PUE*CI. With no feasible DC the scheduler deals round-robin.
    """

    alpha: ArrayLike
    latency: ArrayLike  # [3] bool, which of LATENCIES
    signal: ArrayLike  # [] bool: PUE*CI instead of CI

    @classmethod
    def of(cls, alpha: float = 0.5, latency: Latency = "e2e", signal: Signal = "ci") -> "Greedy":
        """From names. The names become numbers so that scenarios that differ in them run as one compiled call."""
        chosen = np.array([name == latency for name in LATENCIES])
        return cls(alpha=np.float64(alpha), latency=chosen, signal=np.bool_(signal == "pue_ci"))

    def init(self, n_dc: int) -> Array:
        """How many requests have been dealt in turn because no DC could serve them within the SLO."""
        return jnp.int32(0)

    def choose(self, view: View, isl: Array, osl: Array, memory: Array) -> tuple[Array, Array]:
        """The best-scored feasible DC, ties to the first in the scheduler's own order; else the next in turn."""
        expected = estimate(view, isl, osl)
        feasible, fleet = expected.feasible, view.fleet
        readings = (
            expected.ttft_s + osl * expected.tpot_s,
            expected.ttft_s / fleet.slo_ttft_s + expected.tpot_s / fleet.slo_tpot_s,
            expected.ttft_s,
        )
        latency = jnp.select(list(jnp.asarray(self.latency)), readings)
        carbon = jnp.where(self.signal, view.pue * view.ci, view.ci)
        score = self.alpha * _share(latency, feasible) + (1.0 - self.alpha) * _share(carbon, feasible)
        best = jnp.argmin(jnp.where(feasible, score, jnp.inf))
        served = jnp.any(feasible)
        place = jnp.where(served, best, memory % fleet.n_dc)
        return place, jnp.where(served, memory, memory + 1)

    def fallbacks(self, memory: Array) -> Array:
        """Greedy has the second kind only."""
        return jnp.stack([0, jnp.sum(memory)])


def _share(value: Array, feasible: Array) -> Array:
    """`value` over its largest size among the feasible DCs (marginal CI may be below 0); 0 where that is 0."""
    most = jnp.max(jnp.where(feasible, jnp.abs(value), 0.0))
    return jnp.where(most > 0, value / jnp.where(most > 0, most, 1.0), 0.0)
