"""Type aliases shared by the equations and the engine."""

from typing import Any, cast

from jax import Array

Real = float | Array
"""A real number or an array of them, float64."""


def on_host(value: Any) -> Array:
    """A numpy array where a device array is declared: it becomes one when the compiled call takes it."""
    return cast(Array, value)
