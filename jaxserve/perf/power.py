"""Energy of one prefill step and of one decode step, for all GPUs of an engine together."""

import equinox as eqx
import jax.numpy as jnp

from jaxserve.types import Real


class PrefillEnergy(eqx.Module):
    """Energy of a prefill step: E = e_pre0 + e_pre_tok*N + e_pre_sq*S2. Source: step-energy model of arXiv 2610.14571."""

    e_pre0: Real  # J
    e_pre_tok: Real  # J per token
    e_pre_sq: Real  # J per token^2

    def __call__(self, n_tokens: Real, sum_sq: Real) -> Real:
        """Joules for `n_tokens` new tokens with `sum_sq` = sum((c+n)^2 - c^2)."""
        return self.e_pre0 + self.e_pre_tok * n_tokens + self.e_pre_sq * sum_sq


class DecodeEnergy(eqx.Module):
    """Energy of a decode step: E = e_dec0 + e_dec_req*B + e_dec_kv*K. Source: step-energy model of arXiv 2610.14571.

    Up to `batch_knee` requests one costs `e_dec_req_below` instead: the energy that goes with `TwoPieceDecodeTime`, our definition.
    With a knee at 0 it is the study's form.
    """

    e_dec0: Real  # J
    e_dec_req: Real  # J per request, above the knee
    e_dec_kv: Real  # J per cached token
    e_dec_req_below: Real = 0.0  # J per request up to the knee
    batch_knee: Real = 0.0  # requests

    def __call__(self, batch: Real, cached_tokens: Real) -> Real:
        """Joules for a batch of `batch` requests with `cached_tokens` = K."""
        return self.shared(batch) + self.e_dec_req * batch + self.e_dec_kv * cached_tokens

    def shared(self, batch: Real) -> Real:
        """e_fix: joules of a step of `batch` requests that are none of its requests' own."""
        return self.e_dec0 + (self.e_dec_req_below - self.e_dec_req) * jnp.minimum(batch, self.batch_knee)


def within_board(joules: Real, step_s: Real, idle_w: Real, max_w: Real) -> Real:
    """Joules of a step of `step_s` whose form asks for `joules`: no less than an idle engine draws (W), no more than its boards can (W)."""
    return jnp.minimum(jnp.maximum(joules, idle_w * step_s), max_w * step_s)
