"""Step models and their derivatives over any number of rows, compiled once for all numbers up to the next power of two."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from calibration_fit.forms import Form

FEWEST = 256
"""Values computed at the least: fewer take no less time, and compile again."""


def values(module: Callable[..., Any], inputs: np.ndarray) -> np.ndarray:
    """`module(*inputs)` of inputs [I, ...]: [...]."""
    # Numbers as arrays: a Python number would be compiled in, and compile again for the next fit.
    arrays = jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, float) else leaf, module)
    return np.asarray(_values(arrays, _padded(inputs)))[: inputs[0].size].reshape(inputs[0].shape)


def slopes(form: Form, theta: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    """d(module) / d(coefficients) of a form at `theta` [C], of inputs [I, ...]: [..., C]."""
    found = np.asarray(_slopes(form, np.asarray(theta, float), _padded(inputs)))
    return found[: inputs[0].size].reshape(*inputs[0].shape, len(theta))


def _padded(inputs: np.ndarray) -> np.ndarray:
    """Inputs [I, N], N a power of two; what is added is 1."""
    flat = np.reshape(inputs, (len(inputs), -1)).astype(float)
    room = max(FEWEST, 1 << (flat.shape[1] - 1).bit_length())
    return np.pad(flat, ((0, 0), (0, room - flat.shape[1])), constant_values=1.0)


@eqx.filter_jit
def _values(module, inputs):
    return jnp.broadcast_to(module(*inputs), inputs.shape[1:])


@partial(jax.jit, static_argnums=0)
def _slopes(form, theta, inputs):
    return jax.jacfwd(lambda coefficients: jnp.broadcast_to(form.build(coefficients)(*inputs), inputs.shape[1:]))(theta)
