"""Duration of one prefill step and of one decode step."""

import equinox as eqx

from jaxserve.types import Real, maximum, minimum


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
