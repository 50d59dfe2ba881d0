"""Type aliases shared by the equations and the engine, and how the equations take the lesser or the greater of two numbers."""

from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax import Array

Real = float | Array
"""A real number or an array of them, float64."""


def on_host(value: Any) -> Array:
    """A numpy array where a device array is declared: it becomes one when the compiled call takes it."""
    return cast(Array, value)


def minimum(a: Real, b: Real) -> Real:
    """The lesser, by numpy where neither is JAX's: an equation of a table of numbers on the host compiles nothing for their shape."""
    return jnp.minimum(a, b) if isinstance(a, Array) or isinstance(b, Array) else on_host(np.minimum(a, b))


def maximum(a: Real, b: Real) -> Real:
    """The greater, likewise."""
    return jnp.maximum(a, b) if isinstance(a, Array) or isinstance(b, Array) else on_host(np.maximum(a, b))
