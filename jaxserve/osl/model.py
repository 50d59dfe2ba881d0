"""The network: what a front end knows of a request -> the bucket and three quantiles of its OSL, learned together.

The study (arXiv 2610.14571): two layers of 128 hidden units; inputs log ISL, model and application; six OSL buckets learned jointly with
quantiles, of which the median is used. Our definitions: the hidden layers are shared and each head is one linear layer; the quantiles are
of log OSL, at 0.1, 0.5 and 0.9.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxserve.osl.buckets import BUCKETS

HIDDEN = 128
QUANTILES = (0.1, 0.5, 0.9)
MEDIAN = QUANTILES.index(0.5)

OTHER = 0
"""Code of a model or application that is not known to the network."""


class Network(eqx.Module):
    """float32, one request a call; ISL and OSL as logarithms, standardised."""

    layers: tuple[eqx.nn.Linear, eqx.nn.Linear]
    bucket_head: eqx.nn.Linear
    quantile_head: eqx.nn.Linear
    models: int = eqx.field(static=True)  # categories, `OTHER` among them
    applications: int = eqx.field(static=True)

    def __init__(self, models: int, applications: int, key: Array) -> None:
        keys = jax.random.split(key, 4)
        sizes = ((1 + models + applications, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, BUCKETS), (HIDDEN, len(QUANTILES)))
        linear = [eqx.nn.Linear(*size, dtype=jnp.float32, key=k) for size, k in zip(sizes, keys, strict=True)]
        self.layers, self.bucket_head, self.quantile_head = (linear[0], linear[1]), linear[2], linear[3]
        self.models, self.applications = models, applications

    def __call__(self, isl: Array, model: Array, application: Array) -> tuple[Array, Array]:
        """Logits [6] of the buckets and quantiles [3], which rise by construction: each is the one before plus a softplus."""
        kinds = (jax.nn.one_hot(model, self.models), jax.nn.one_hot(application, self.applications))
        hidden = jnp.concatenate([isl[None], *kinds]).astype(jnp.float32)
        for layer in self.layers:
            hidden = jax.nn.relu(layer(hidden))
        low, *steps = self.quantile_head(hidden)
        return self.bucket_head(hidden), jnp.cumsum(jnp.stack([low, *map(jax.nn.softplus, steps)]))


def pinball(quantiles: Array, osl: Array) -> Array:
    """Sum over q of max(q e, (q - 1) e), e = OSL - quantile (Koenker and Bassett 1978); [..., 3] and [...] -> [...]."""
    error = osl[..., None] - quantiles
    level = jnp.asarray(QUANTILES, jnp.float32)
    return jnp.maximum(level * error, (level - 1) * error).sum(axis=-1)


def loss(network: Network, isl: Array, model: Array, application: Array, osl: Array, bucket: Array) -> Array:
    """Mean over a batch [B] of the buckets' cross entropy plus the quantiles' pinball loss, in equal weight."""
    logits, quantiles = jax.vmap(network)(isl, model, application)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, bucket) + pinball(quantiles, osl))
