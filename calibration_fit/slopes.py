"""How predictions follow the coefficients, for any number of rows."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from calibration_fit.forms import Form

FEWEST = 256
"""Values worked out at the least; numbers of them are rounded up to a power of two, since every number compiles."""


def slopes(form: Form, theta: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    """d(module) / d(coefficients) of a form at `theta` [C], of inputs [I, ...]: [..., C]."""
    flat = np.reshape(inputs, (len(inputs), -1))
    n = flat.shape[1]
    room = max(FEWEST, 1 << (n - 1).bit_length())
    padded = np.pad(flat, ((0, 0), (0, room - n)), constant_values=1.0)
    return np.asarray(_slopes(form, np.asarray(theta, float), padded))[:n].reshape(*inputs.shape[1:], len(theta))


@partial(jax.jit, static_argnums=0)
def _slopes(form, theta, inputs):
    return jax.jacfwd(lambda coefficients: jnp.broadcast_to(form.build(coefficients)(*inputs), inputs.shape[1:]))(theta)
