"""The fit of step-time coefficients to a server's request log, through a surrogate of the engine.

The surrogate follows the engine contract along the *measured* times, so that it is exact for a log that the engine itself wrote:

- Prefill. Requests admitted together (or whose prefill overlaps) are packed into steps, which last from admission to the last first token.
- Decode. Between two events (a first token, a finish) the batch B is known, and the cached tokens K are those of the running requests,
  each making its tokens evenly over the time that is free of prefill. B requests then make free time / t_dec(B, K) tokens each, and over
  the life of a request these must add up to osl - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from calibration_fit.fit import FitResult, fit_all
from calibration_fit.forms import DECODE_TIME, PREFILL_TIME
from calibration_fit.log_timeline import Timeline, join, lively, prefill_groups, prefill_rows, timeline
from calibration_fit.losses import ROBUST_DELTA, mape, objective
from calibration_fit.measurements import Setup, Source
from calibration_fit.transforms import Bound, constrain
from jaxserve.errors import InputError
from jaxserve.perf.request_log import RequestLog

FEWEST_REQUESTS = 20
TOKEN_BUDGET = 8192
DELTA = 5 * ROBUST_DELTA
"""Relative error where the loss turns linear: single requests of a live server scatter by about 10 %."""
NARROW = 2.0
"""Batches that spread by less than this factor leave the terms of the decode form confounded."""
ITERATIONS = 500
SHORTEST_STEP_S = 1e-6
"""Least alpha0: a coefficients file must not hold a step without duration."""
BLOCKS = 10
"""Parts of the log, in time; every second is held out when the decode form is chosen."""
REDUCED = {"alpha2": 0.0, "beta0": 0.0, "beta2": 0.0}
"""Terms held at 0 in the smaller decode form, as where few batch sizes were measured (`pipeline.FEW_BATCHES`)."""


@dataclass(frozen=True)
class LogFit:
    """Fitted tables of a log, with what they rest on: `prefill` over groups, `decode` (theta [6]) over requests."""

    prefill: FitResult
    decode: np.ndarray
    decode_held: tuple[str, ...]
    decode_mape: float
    decode_held_out: float
    ranges: dict[str, dict[str, list[float]]]
    fitted: int
    warnings: tuple[str, ...]


def fit_log(log: RequestLog, setup: Setup, source: Source, *, fit: np.ndarray, budget: int = TOKEN_BUDGET) -> LogFit:
    """Fit both step times to the requests where `fit` [R] is true; the others are only there as company.

    Raises `InputError` when the log does not hold queue waits or too few requests. Engines of a log are treated one by one.
    """
    admit = log.admit_s
    if admit is None:
        raise InputError(f"{log.name}, row 1: there is no column queue_wait_s; without it prefill cannot be told from waiting")
    if fit.sum() < FEWEST_REQUESTS:
        raise InputError(f"{log.name}: {int(fit.sum())} requests are too few to fit coefficients to; give at least {FEWEST_REQUESTS}")
    names = np.array(log.engine if log.engine is not None else [""] * len(log))
    parts = [np.flatnonzero(names == name) for name in dict.fromkeys(names)]
    prefill, timelines, lived = [], [], []
    for part in parts:
        groups = prefill_groups(admit[part], log.first_token_s[part])
        windows = [(start, end) for _, start, end in groups]
        prefill += [(part[m], end - start) for m, start, end in groups if fit[part[m]].all() and end > start]
        use = part[log.osl[part] > 1]
        timelines.append(timeline(log.first_token_s[use], log.finish_s[use], log.isl[use], log.osl[use], windows))
        lived.append(use)
    joined, requests = join(timelines), np.concatenate(lived)
    osl = log.osl[requests] - 1.0
    keep = fit[requests] & lively(joined)
    if keep.sum() < FEWEST_REQUESTS:
        raise InputError(f"{log.name}: {int(keep.sum())} requests made more than one token, too few to fit decode steps to")
    pre = fit_all([prefill_rows(log, prefill, setup, source, budget)], PREFILL_TIME, delta=DELTA)[0]
    block = np.minimum(BLOCKS * log.arrival_s[requests] / max(log.arrival_s[fit].max(), 1e-9), BLOCKS - 1).astype(int) % 2
    tried = []
    for held in (REDUCED, {}):
        halves = [_fit_decode(joined, osl, keep & (block == h), held) for h in (0, 1)]
        errors = [
            np.abs(_tokens(joined, t)[keep & (block != h)] / osl[keep & (block != h)] - 1) for h, t in zip((0, 1), halves, strict=True)
        ]
        tried.append((float(100 * np.mean(np.concatenate(errors))), held))
    # The whole form must earn its three more terms on held-out blocks.
    error, held = tried[1] if tried[1][0] < 0.9 * tried[0][0] else tried[0]
    theta = _fit_decode(joined, osl, keep, held)
    busy = joined.batch > 0
    context = joined.cached[busy] / joined.batch[busy]
    ranges = {
        "prefill_time": {"n_tokens": _span(pre.rows.inputs[0]), "batch": _span(pre.rows.batch)},
        "decode_time": {"batch": _span(joined.batch[busy]), "mean_ctx": _span(context)},
    }
    return LogFit(
        pre, theta, tuple(held), mape(_tokens(joined, theta)[keep], osl[keep]), error, ranges, int(fit.sum()), _warnings(joined, theta, pre)
    )


def _warnings(t: Timeline, theta: np.ndarray, prefill: FitResult) -> tuple[str, ...]:
    """What the log does not pin down, in words."""
    out = []
    order = np.argsort(t.batch)
    share = np.cumsum(t.free_s[order] * (t.batch[order] > 0))
    low, high = (float(t.batch[order][np.searchsorted(share, q * share[-1])]) for q in (0.1, 0.9))
    if high < NARROW * low:
        out.append(
            f"decode_time: 80 % of the measured time had {low:.0f} to {high:.0f} requests running, so the log does not tell what a step "
            "costs at all from what each request adds: do not use it at other batch sizes"
        )
    if theta[0] < 1e-4:
        out.append("decode_time: alpha0 ended at 0, though no step is free: the log does not identify it")
    if prefill.at_bound:
        out.append(f"prefill_time: pushed to 0 by the data: {', '.join(prefill.at_bound)}")
    return tuple(out)


def _predict(theta, free_s, batch, cached, begin, end) -> Array:
    steps = jnp.where(batch > 0, free_s / DECODE_TIME.build(theta)(jnp.maximum(batch, 1.0), cached), 0.0)
    total = jnp.concatenate([jnp.zeros(1), jnp.cumsum(steps)])
    return total[end] - total[begin]


def _tokens(t: Timeline, theta: np.ndarray) -> np.ndarray:
    """Decode steps [R] that the coefficients give each request in its measured life."""
    return np.asarray(_predict(theta, t.free_s, t.batch, t.cached, t.begin, t.end))


def _fit_decode(t: Timeline, steps: np.ndarray, keep: np.ndarray, held: dict[str, float]) -> np.ndarray:
    """theta [6] by optax's L-BFGS; `held` coefficients stay where they are."""
    busy_s = float(t.free_s[t.batch > 0].sum())
    batch = max(float(np.sum(t.batch * t.free_s)) / busy_s, 1.0)
    context = float(np.sum(t.cached * t.free_s) / np.sum(t.batch * t.free_s))
    typical = busy_s * batch / float(steps.sum())
    scale = typical / np.array([1.0, batch, batch**2, context, context * batch, context * batch**2])
    scale = np.where([name in held for name in DECODE_TIME.coefficients], 0.0, scale)
    solved = _solve(scale, t.free_s, t.batch, t.cached, t.begin, t.end, steps, keep.astype(float))
    return np.maximum(np.asarray(solved), [SHORTEST_STEP_S, 0, 0, 0, 0, 0])


@jax.jit
def _solve(scale, free_s, batch, cached, begin, end, steps, weight):
    """L-BFGS over scaled coefficients; free of a scale, a coefficient stays at 0."""
    # A log follows one path through (B, K); a negative term fitted there could make steps negative off it.
    bounds = (Bound.NONNEGATIVE,) * len(DECODE_TIME.coefficients)

    def loss(raw: Array) -> Array:
        return objective(
            _predict(constrain(raw, bounds, jnp.zeros(len(bounds)), scale), free_s, batch, cached, begin, end), steps, weight, DELTA
        )

    optimiser = optax.lbfgs(memory_size=12, linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=16))
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(_, carry):
        raw, state = carry
        value, grad = value_and_grad(raw, state=state)
        update, state = optimiser.update(grad, state, raw, value=value, grad=grad, value_fn=loss)
        return optax.apply_updates(raw, update), state

    start = jnp.array([0.8, 0.3, 0.1, 0.1, 0.3, 0.1])
    raw, _ = jax.lax.fori_loop(0, ITERATIONS, step, (start, optimiser.init(start)))
    return constrain(raw, bounds, jnp.zeros(len(bounds)), scale)


def _span(x: np.ndarray) -> list[float]:
    return [float(np.min(x)), float(np.max(x))]
