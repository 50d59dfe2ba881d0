"""Energy of one prefill step and of one decode step, for all GPUs of an engine together."""

import equinox as eqx

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
    """Energy of a decode step: E = e_dec0 + e_dec_req*B + e_dec_kv*K. Source: step-energy model of arXiv 2610.14571."""

    e_dec0: Real  # J
    e_dec_req: Real  # J per request
    e_dec_kv: Real  # J per cached token

    def __call__(self, batch: Real, cached_tokens: Real) -> Real:
        """Joules for a batch of `batch` requests with `cached_tokens` = K."""
        return self.e_dec0 + self.e_dec_req * batch + self.e_dec_kv * cached_tokens
