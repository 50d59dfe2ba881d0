"""A believed OSL where nothing predicts it: the true one times lognormal noise, as wrong as a predictor with given figures would be.

A share `exact` of the requests is believed as it is, the others as OSL * exp(sigma z), z standard normal, and never below one token. One
figure (bucket accuracy or MAPE) gives sigma, with `exact` 0; both give both: plain lognormal noise has a single parameter, and for a given
MAPE some of a predictor's hits are nearer, and its misses farther, than it can make them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import InputError
from jaxserve.osl.buckets import bucket_edges, bucket_of

Floats = NDArray[np.float64]

GREENSERVE_BUCKET_ACCURACY, GREENSERVE_MAPE = 0.82, 0.273
"""Published for GreenServe's output predictor, without its buckets: plain lognormal noise of that MAPE is as often right as that in
buckets a factor of about four wide. In our sextiles, which are narrower, both figures together mean that most beliefs are exact."""

LARGEST_SIGMA = 8.0
"""exp(8) is a factor of 3000 one time in three: beyond it more noise changes no bucket any more."""
HALVINGS = 50
_erfc = np.vectorize(math.erfc, otypes=[float])


@dataclass(frozen=True)
class Noise:
    """See the module."""

    sigma: float
    exact: float

    def believed(self, osl: NDArray[Any], normal: Floats, uniform: Floats) -> Floats:
        """float64 [N] tokens; `normal` [N] and `uniform` [N] in [0, 1) are each request's own random numbers."""
        return np.where(uniform < self.exact, osl, np.maximum(osl * np.exp(self.sigma * normal), 1.0))


def calibrate(osl: NDArray[Any], bucket_accuracy: float | None, mape: float | None, what: str) -> Noise:
    """The noise whose expected bucket accuracy, or MAPE, or both, over the requests `osl` [N] are as given.

    Buckets are the six of `bucket_edges(osl)`. Raises `InputError`, beginning with `what`, where no such noise exists.
    """
    values, counts = np.unique(osl, return_counts=True)
    share = counts / counts.sum()

    def relative_error(sigma: float) -> float:
        return float(share @ _mape(values, sigma))

    if bucket_accuracy is None:
        assert mape is not None
        return Noise(sigma=_solve(relative_error, mape), exact=0.0)
    edges = bucket_edges(osl, f"{what}.bucket_accuracy", "give mape alone")
    ends = np.concatenate([[0.0], edges, [np.inf]])
    bucket = bucket_of(edges, values)
    low, high = ends[bucket], ends[bucket + 1]

    def hits(sigma: float) -> float:
        return float(share @ _within(values, low, high, sigma))

    least = hits(LARGEST_SIGMA)
    if bucket_accuracy <= least:
        raise InputError(
            f"{what}.bucket_accuracy: {bucket_accuracy:g} is less than the {least:.3g} that blind noise reaches on this workload; raise it"
        )
    if mape is None:
        return Noise(sigma=_solve(lambda sigma: -hits(sigma), -bucket_accuracy), exact=0.0)

    least_sigma = _solve(relative_error, mape)
    most = hits(least_sigma)
    if most >= bucket_accuracy:
        raise InputError(
            f"{what}: on this workload lognormal noise of MAPE {mape:g} is in the right bucket with a share of {most:.3g}, more than "
            f"bucket_accuracy = {bucket_accuracy:g}; give one of the two, raise mape or raise bucket_accuracy"
        )

    def exact(sigma: float) -> float:
        return max(0.0, 1.0 - mape / relative_error(sigma))

    sigma = _solve(lambda s: exact(s) + (1.0 - exact(s)) * hits(s), bucket_accuracy, low=least_sigma)
    return Noise(sigma=sigma, exact=exact(sigma))


def _mape(osl: Floats, sigma: float) -> Floats:
    """E|max(o X, 1) - o| / o [V] for X = exp(sigma z): E(X - 1)+ + E(1 - X)+ - E(1/o - X)+, each as in Black and Scholes (1973)."""
    if sigma == 0:
        return np.zeros(len(osl))
    mean = np.exp(sigma**2 / 2)

    def below(k: Any) -> Floats:
        d = np.log(k) / sigma
        return k * _normal_cdf(d) - mean * _normal_cdf(d - sigma)

    return (mean - 1.0) + 2.0 * below(1.0) - below(1.0 / osl)


def _within(osl: Floats, low: Floats, high: Floats, sigma: float) -> Floats:
    """P(low <= o X < high) [V] for X = exp(sigma z)."""
    if sigma == 0:
        return np.ones(len(osl))
    with np.errstate(divide="ignore"):  # the first bucket begins at 0 tokens
        return _normal_cdf(np.log(high / osl) / sigma) - _normal_cdf(np.log(low / osl) / sigma)


def _normal_cdf(x: Any) -> Any:
    return _erfc(-np.asarray(x) / math.sqrt(2.0)) / 2.0


def _solve(rising: Callable[[float], float], wanted: float, low: float = 0.0) -> float:
    """Where a rising function of [`low`, `LARGEST_SIGMA`] reaches `wanted`, by bisection."""
    high = LARGEST_SIGMA
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return high
