"""From the optimiser's free numbers to coefficients that keep their bounds, and back.

Every coefficient is scaled, so that the optimiser sees numbers of order one. A bound is met by a map whose edge is reached
at a finite number (a square, a squared sine), not only in the limit: a coefficient whose best value is exactly 0 then converges.
For a convex loss the square adds no false minima.
"""

from enum import Enum

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float


class Bound(Enum):
    """What values a coefficient may take."""

    FREE = "free"
    NONNEGATIVE = "nonnegative"
    INTERVAL = "interval"


def constrain(raw: Float[Array, " C"], bounds: tuple[Bound, ...], low: Float[Array, " C"], high: Float[Array, " C"]) -> Float[Array, " C"]:
    """Coefficients from the optimiser's numbers.

    `low`, `high` [C]: the ends of an INTERVAL; for FREE and NONNEGATIVE the offset (0) and the scale. A coefficient is held at a value by
    making `low` that value and leaving no room above it (`high` = `low` for an INTERVAL, a scale of 0 for the others): so what is held
    does not change the compiled solve.
    """
    columns = []
    for j, bound in enumerate(bounds):
        match bound:
            case Bound.FREE:
                columns.append(low[j] + high[j] * raw[j])
            case Bound.NONNEGATIVE:
                columns.append(low[j] + high[j] * raw[j] ** 2)
            case Bound.INTERVAL:
                columns.append(low[j] + (high[j] - low[j]) * jnp.sin(raw[j]) ** 2)
    return jnp.stack(columns)


def unconstrain(theta: np.ndarray, bounds: tuple[Bound, ...], low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The optimiser's numbers [..., C] for given coefficients [..., C]; `low`, `high` as in `constrain`.

    Starts a little inside every bound: on it the gradient of the square and of the squared sine is 0 and nothing would move.
    """
    inside = 1e-3
    raw = np.zeros(np.broadcast_shapes(theta.shape, low.shape))
    for j, bound in enumerate(bounds):
        # A held coefficient has no room (scale 0): its number does not matter and is 0.
        room = np.where(high[..., j] > 0, high[..., j], np.inf)
        match bound:
            case Bound.FREE:
                raw[..., j] = (theta[..., j] - low[..., j]) / room
            case Bound.NONNEGATIVE:
                raw[..., j] = np.sqrt(np.maximum((theta[..., j] - low[..., j]) / room, inside**2))
            case Bound.INTERVAL:
                share = (theta[..., j] - low[..., j]) / np.where(high[..., j] > low[..., j], high[..., j] - low[..., j], np.inf)
                raw[..., j] = np.arcsin(np.sqrt(np.clip(share, inside, 1 - inside)))
    return raw
