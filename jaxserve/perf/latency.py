"""Duration of one prefill step and of one decode step, in the forms that a coefficients file may name (SEMANTICS.md)."""

from functools import partial

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from jaxserve.types import Real, maximum, minimum


def rise(x: Real, knots: Array, slopes: Array) -> Array:
    """Piecewise linear from 0 at x = 0: `slopes` [..., J+1] up to and between ascending `knots` [..., J]; a knot at infinity is none.

    The axes before the last broadcast against `x`. It never falls where no slope is negative.
    """
    x = jnp.asarray(x)
    beyond = x[..., None] - jnp.minimum(x[..., None], knots)
    return slopes[..., 0] * x + jnp.sum(jnp.diff(slopes) * beyond, axis=-1)


@partial(jnp.vectorize, signature="(i),(j),(i,j),(),()->()")
def bilinear(x_grid: Array, y_grid: Array, values: Array, x: Array, y: Array) -> Array:
    """The grid's `values` [I, J] between its ascending points [I] and [J], and outside by its outermost cells."""

    def cell(grid: Array, at: Array) -> tuple[Array, Array]:
        below = jnp.clip(jnp.sum(grid <= at) - 1, 0, grid.shape[0] - 2)
        return below, (at - grid[below]) / (grid[below + 1] - grid[below])

    (i, u), (j, v) = cell(x_grid, x), cell(y_grid, y)
    near = values[i, j] + u * (values[i + 1, j] - values[i, j])
    far = values[i, j + 1] + u * (values[i + 1, j + 1] - values[i, j + 1])
    return near + v * (far - near)


class PrefillTime(eqx.Module):
    """Duration of a prefill step, piecewise linear in tokens with one knee.

    Coefficients may be scalars or arrays that broadcast against the arguments.
    Source: step model of arXiv 2610.14571; names as in the coefficients file.
    """

    tok_slope_below: Real  # s per token up to the knee
    tok_slope_above: Real  # s per token above it
    tok_knee: Real  # tokens
    b0: Real  # s
    b1: Real  # s per prompt piece
    b2: Real  # s per token^2

    def __call__(self, n_tokens: Real, n_pieces: Real, sum_sq: Real) -> Real:
        """Seconds for `n_tokens` new tokens in `n_pieces` pieces with `sum_sq` = sum((c+n)^2 - c^2)."""
        below = self.tok_slope_below * minimum(n_tokens, self.tok_knee)
        above = self.tok_slope_above * maximum(n_tokens - self.tok_knee, 0.0)
        return below + above + self.b0 + self.b1 * n_pieces + self.b2 * sum_sq


class PiecewisePrefillTime(eqx.Module):
    """`PrefillTime` with any number of knees: t = R(N) + b0 + b1*B + b2*S2, R the `rise` with these slopes.

    GEMM times are stairs in N, which one knee does not follow. Last axis of `tok_slopes`, `tok_knots`: pieces. Our definition.
    """

    tok_slopes: Array  # [..., J+1] s per token
    tok_knots: Array  # [..., J] tokens, ascending, infinite where not used
    b0: Real  # s
    b1: Real  # s per prompt piece
    b2: Real  # s per token^2

    def __call__(self, n_tokens: Real, n_pieces: Real, sum_sq: Real) -> Real:
        """Seconds for `n_tokens` new tokens in `n_pieces` pieces with `sum_sq` = sum((c+n)^2 - c^2)."""
        return rise(n_tokens, self.tok_knots, self.tok_slopes) + self.b0 + self.b1 * n_pieces + self.b2 * sum_sq


class PrefillTimeTable(eqx.Module):
    """Duration of a prefill step interpolated in a grid over its tokens N and the length S2/N of its prompts. Our definition."""

    n_tokens: Array  # [..., I] tokens, ascending
    seq_len: Array  # [..., J] tokens, ascending
    time_s: Array  # [..., I, J] s

    def __call__(self, n_tokens: Real, n_pieces: Real, sum_sq: Real) -> Real:
        """Seconds for `n_tokens` new tokens with `sum_sq` = sum((c+n)^2 - c^2); the number of pieces enters by their length only."""
        n = jnp.asarray(n_tokens)
        return bilinear(self.n_tokens, self.seq_len, self.time_s, n, sum_sq / jnp.where(n > 0, n, 1.0))


class DecodeTime(eqx.Module):
    """Duration of a decode step: a quadratic in the batch whose coefficients are linear in the mean context.

    t = a0 + a1*B + a2*B^2 with a_j = alpha_j + beta_j * (K/B). Source: step model of arXiv 2610.14571.
    """

    alpha0: Real  # s
    alpha1: Real  # s per request
    alpha2: Real  # s per request^2
    beta0: Real  # s per token of mean context
    beta1: Real  # s per token
    beta2: Real  # s per token and request

    def __call__(self, batch: Real, cached_tokens: Real) -> Real:
        """Seconds for a batch of `batch` requests with `cached_tokens` = K; `batch` >= 1, whole or a mean."""
        context = cached_tokens / maximum(batch, 1.0)
        a0 = self.alpha0 + self.beta0 * context
        a1 = self.alpha1 + self.beta1 * context
        a2 = self.alpha2 + self.beta2 * context
        return a0 + batch * (a1 + batch * a2)


class TwoPieceDecodeTime(eqx.Module):
    """`DecodeTime` with another slope below a knee in the batch, for MoE models at small batches.

    t = alpha0 + alpha1_below*min(B, batch_knee) + alpha1*max(B - batch_knee, 0) + alpha2*B^2 + (beta0 + beta1*B + beta2*B^2) * (K/B).
    With few requests a decode step reads only the experts they are sent to, so time rises steeply with B until all experts are in use
    (B near 8 for top-2 of 8), and slowly after. With alpha1_below = alpha1 it is `DecodeTime`. Our definition: the study has no such form.
    """

    alpha0: Real  # s
    alpha1_below: Real  # s per request up to the knee
    alpha1: Real  # s per request above it
    batch_knee: Real  # requests
    alpha2: Real  # s per request^2
    beta0: Real  # s per token of mean context
    beta1: Real  # s per token
    beta2: Real  # s per token and request

    def __call__(self, batch: Real, cached_tokens: Real) -> Real:
        """Seconds for a batch of `batch` requests with `cached_tokens` = K; `batch` >= 1, whole or a mean."""
        context = cached_tokens / maximum(batch, 1.0)
        below = self.alpha1_below * minimum(batch, self.batch_knee)
        above = self.alpha1 * maximum(batch - self.batch_knee, 0.0)
        return (
            self.alpha0 + below + above + batch * batch * self.alpha2 + context * (self.beta0 + batch * (self.beta1 + batch * self.beta2))
        )


class PiecewiseDecodeTime(eqx.Module):
    """Duration of a decode step, piecewise linear in the batch.

    t = alpha0 + R(B) + (beta0 + beta1*B)*(K/B), R the `rise` with these slopes. Last axis of `batch_slopes`, `batch_knots`: pieces.
    Our definition: as for prefill, and for MoE models (see `TwoPieceDecodeTime`).
    """

    alpha0: Real  # s
    batch_slopes: Array  # [..., J+1] s per request
    batch_knots: Array  # [..., J] requests, ascending, infinite where not used
    beta0: Real  # s per token of mean context
    beta1: Real  # s per token

    def __call__(self, batch: Real, cached_tokens: Real) -> Real:
        """Seconds for a batch of `batch` requests with `cached_tokens` = K; `batch` >= 1, whole or a mean."""
        context = cached_tokens / jnp.maximum(batch, 1.0)
        return self.alpha0 + rise(batch, self.batch_knots, self.batch_slopes) + context * (self.beta0 + self.beta1 * batch)


class DecodeTimeTable(eqx.Module):
    """Duration of a decode step interpolated in a grid over its batch B and the mean context K/B. Our definition."""

    batch: Array  # [..., I] requests, ascending
    mean_ctx: Array  # [..., J] tokens, ascending
    time_s: Array  # [..., I, J] s

    def __call__(self, batch: Real, cached_tokens: Real) -> Real:
        """Seconds for a batch of `batch` requests with `cached_tokens` = K; `batch` >= 1, whole or a mean."""
        return bilinear(self.batch, self.mean_ctx, self.time_s, batch, cached_tokens / jnp.maximum(batch, 1.0))


PrefillForm = PrefillTime | PiecewisePrefillTime | PrefillTimeTable
DecodeForm = DecodeTime | TwoPieceDecodeTime | PiecewiseDecodeTime | DecodeTimeTable
