"""One minimisation by optax's L-BFGS, to be vmapped and jitted by whoever has many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

RELATIVE_DECREASE = 1e-11
PATIENCE = 6
"""A start has converged when its loss fell by less than RELATIVE_DECREASE of itself PATIENCE times in a row."""
LINESEARCH_STEPS = 12


def minimise(loss: Callable[[Array], Array], start: Array, max_iterations: int | Array) -> tuple[Array, Array, Array, Array]:
    """Least `loss` from `start` [C]: arguments [C], loss, converged, iterations."""
    optimiser = optax.lbfgs(memory_size=12, linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=LINESEARCH_STEPS))
    value_and_grad = optax.value_and_grad_from_state(loss)

    def going_on(carry: Any) -> Any:
        _, _, _, still, iteration = carry
        return (still < PATIENCE) & (iteration < max_iterations)

    def step(carry: Any) -> Any:
        raw, state, last, still, iteration = carry
        value, grad = value_and_grad(raw, state=state)
        update, state = optimiser.update(grad, state, raw, value=value, grad=grad, value_fn=loss)
        raw = optax.apply_updates(raw, update)
        small = last - value <= RELATIVE_DECREASE * jnp.abs(value) + 1e-18
        return raw, state, value, jnp.where(small, still + 1, 0), iteration + 1

    carry: Any = (start, optimiser.init(start), jnp.inf, 0, 0)
    raw, _, _, still, iteration = jax.lax.while_loop(going_on, step, carry)
    return raw, loss(raw), still >= PATIENCE, iteration
