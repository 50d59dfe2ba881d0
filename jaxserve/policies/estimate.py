"""What a scheduler expects of each DC for one request: TTFT, TPOT, whether both keep the SLO, and the energy; and a DC's headroom."""

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from jaxserve.engine.belief import slots
from jaxserve.engine.control import View
from jaxserve.engine.model import Fleet

MAX_DUTY = 0.95  # keeps 1/(1 - duty) finite
WHOLE = 1e-9  # keeps a whole headroom whole: N*(capacity - B) rounds below it where B is in thirds


class Estimate(eqx.Module):
    """Expected latencies by DC, in the scheduler's own order."""

    ttft_s: Array  # [D]
    tpot_s: Array  # [D]
    feasible: Array  # [D] bool


def queued_requests(view: View) -> Array:
    """q [D]: queued requests an engine, from the snapshot's tokens alone, so that no dispatch counts twice."""
    return view.queued_seen / view.isl_mean


def estimate(view: View, isl: Array, osl: Array) -> Estimate:
    """Estimator of arXiv 2610.14571 (TTFT, TPOT and F_r), with our definitions of W_d, T_pre and q_d.

    TTFT = rtt + W + t_pre(isl + Q, 1 + q, isl^2 + q E[isl^2]), TPOT = (t_dec(B + 1, K + isl) + t_pre(Q)/osl) / (1 - duty).
    """
    fleet = view.fleet
    queued = queued_requests(view)
    working = 1.0 - jnp.minimum(view.duty, MAX_DUTY)
    places = slots(fleet, fleet.batch_capacity, view.isl_mean, view.osl_mean)
    residence = view.osl_mean * fleet.decode_time(jnp.maximum(view.batch, 1.0), view.cached) / working
    wait = jnp.maximum(0.0, view.batch + queued + view.spread + 1.0 - places) * residence / places
    prefill = fleet.prefill_time(isl + view.queued_tokens, 1.0 + queued, isl * isl + queued * view.isl2_mean)
    backlog = fleet.prefill_time(view.queued_tokens, queued, queued * view.isl2_mean) / osl
    ttft = view.rtt_s + wait + prefill
    tpot = (fleet.decode_time(view.batch + 1.0, view.cached + isl) + jnp.where(view.queued_tokens > 0, backlog, 0.0)) / working
    return Estimate(ttft_s=ttft, tpot_s=tpot, feasible=(ttft <= fleet.slo_ttft_s) & (tpot <= fleet.slo_tpot_s))


def energy_j(view: View, isl: Array, osl: Array) -> Array:
    """E [D]: joules of one request before PUE, with its share of the steps' fixed energy. E_rd of arXiv 2610.14571; the shares are ours."""
    fleet = view.fleet
    running = view.batch + 1.0
    shared = fleet.prefill_energy.e_pre0 / (1.0 + queued_requests(view)) + osl * fleet.decode_energy.shared(running) / running
    return shared + marginal_energy_j(fleet, isl, osl)


def marginal_energy_j(fleet: Fleet, isl: Array, osl: Array) -> Array:
    """Joules that one request adds to steps that run anyway, before PUE."""
    prefill, decode = fleet.prefill_energy, fleet.decode_energy
    context = isl + osl / 2.0  # the mean over its decode steps
    return prefill.e_pre_tok * isl + prefill.e_pre_sq * isl * isl + osl * (decode.e_dec_req + decode.e_dec_kv * context)


def headroom(view: View) -> Array:
    """H [D]: requests that a DC can still take: floor(N * max(0, batch_capacity - B - q)), or the scheduler's part of it."""
    room = view.engines * jnp.maximum(0.0, view.fleet.batch_capacity - view.batch - queued_requests(view))
    return jnp.floor(room / view.fleet.headroom_parts[view.scheduler] + WHOLE)
