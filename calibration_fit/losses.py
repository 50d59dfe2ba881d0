"""Relative errors and the robust loss that is minimised."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

ROBUST_DELTA = 0.02
"""Relative error at which the loss turns from squares to absolute values: the noise of a good timing run (2 %)."""


def pseudo_huber(residual: Float[Array, "..."], delta: float | Array) -> Float[Array, "..."]:
    """delta^2 * (sqrt(1 + (r/delta)^2) - 1): r^2/2 for small r, delta*|r| for large; twice differentiable everywhere.

    The same as scipy's `soft_l1` with f_scale = delta. Source: Charbonnier et al. 1997.
    """
    # z/(sqrt(1+z)+1) is sqrt(1+z)-1 without the cancellation at small z.
    z = (residual / delta) ** 2
    return delta**2 * z / (jnp.sqrt(1.0 + z) + 1.0)


def pseudo_huber_slopes(residual: np.ndarray, delta: float) -> tuple[np.ndarray, np.ndarray]:
    """First and second derivative of `pseudo_huber`: r / sqrt(1 + (r/delta)^2) and (1 + (r/delta)^2)^(-3/2)."""
    root = np.sqrt(1.0 + (residual / delta) ** 2)
    return residual / root, root**-3


def objective(
    predicted: Float[Array, " R"], measured: Float[Array, " R"], weight: Float[Array, " R"], delta: float | Array
) -> Float[Array, ""]:
    """Weighted mean robust loss of the relative errors predicted/measured - 1; rows of weight 0 do not count."""
    residual = predicted / measured - 1.0
    return jnp.sum(weight * pseudo_huber(residual, delta)) / jnp.sum(weight)


def mape(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Mean absolute percentage error; nan without rows."""
    return float(100.0 * np.mean(np.abs(predicted / measured - 1.0))) if len(measured) else float("nan")
