"""Decode step times from a request log: B requests make free time / t_dec(B, K) tokens each, which over a life add up to osl - 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from calibration_fit.block_bootstrap import INSIDE, block_interval, drawn_counts
from calibration_fit.fit import FitResult
from calibration_fit.forms import DECODE_TIME
from calibration_fit.holdout import HoldOut
from calibration_fit.log_timeline import Timeline
from calibration_fit.losses import ROBUST_DELTA, objective
from calibration_fit.measurements import Setup, Source
from calibration_fit.minimise import minimise
from calibration_fit.rows import Rows
from calibration_fit.transforms import Bound, constrain, unconstrain
from calibration_fit.uncertainty import Bootstrap, Identifiability, curvature, free_places

DELTA = 5 * ROBUST_DELTA
"""Relative error where the loss turns linear: single requests of a live server scatter by about 10 %."""
REDUCED = {"alpha2": 0.0, "beta0": 0.0, "beta2": 0.0}
"""Terms held at 0 in the smaller decode form, as where few batch sizes were measured (`pipeline.FEW_BATCHES`)."""
ITERATIONS, REDRAWN_ITERATIONS = 500, 50
SHORTEST_STEP_S = 1e-6
"""Least alpha0: a coefficients file must not hold a step without duration."""
WIDTH = 50
"""Refits to redrawn logs that are solved side by side."""
PIECES, REQUESTS = 1024, 64
"""Timelines and requests are padded to multiples of these, so that logs of like size share one compilation."""
# A log follows one path through (B, K); a negative term fitted there could make steps negative off it.
BOUNDS = (Bound.NONNEGATIVE,) * len(DECODE_TIME.coefficients)


@dataclass(frozen=True)
class Lives:
    """R requests over a timeline: `steps` [R] that each made (osl - 1), which to fit to [R]; `block` [kept] says what errs together."""

    timeline: Timeline
    steps: np.ndarray
    keep: np.ndarray
    block: np.ndarray

    @property
    def free_s(self) -> np.ndarray:
        """Seconds [R] free of prefill in each life."""
        total = np.concatenate([[0.0], np.cumsum(self.timeline.free_s)])
        return total[self.timeline.end] - total[self.timeline.begin]

    def step_s(self, theta: np.ndarray) -> np.ndarray:
        """Predicted mean decode step [R] in each life."""
        return self.free_s / np.maximum(self.predicted(theta), 1e-300)

    def predicted(self, theta: np.ndarray) -> np.ndarray:
        """Decode steps [R] that the coefficients give each request in its measured life."""
        return np.asarray(_predicted(theta, *_data(self.timeline)))[: len(self.steps)]


def life_rows(lives: Lives, line: np.ndarray, setup: Setup, source: Source) -> Rows:
    """The kept requests as rows of a decode step: its mean duration over the life, at the life's mean batch and context.

    The other terms, of no weight, are the moments of the life with the least and the greatest batch, context and cache, so that the rows
    span the valid range.
    """
    t, k = lives.timeline, lives.keep
    context = t.cached / np.maximum(t.batch, 1.0)
    total = [np.concatenate([[0.0], np.cumsum(t.free_s * x)]) for x in (t.batch, t.cached)]
    mean = np.stack([(x[t.end] - x[t.begin])[k] / lives.free_s[k] for x in total])
    moments = [
        [a + pick(x[a:b]) for x in (t.batch, context, t.cached) for pick in (np.argmin, np.argmax)]
        for a, b in zip(t.begin[k], t.end[k], strict=True)
    ]
    extremes = np.stack([t.batch[np.array(moments)], t.cached[np.array(moments)]])
    inputs = np.concatenate([mean[:, :, None], extremes], axis=2)
    weight = np.zeros(inputs.shape[1:])
    weight[:, 0] = 1.0
    file, nothing = np.full(len(line), source.path, dtype=object), np.zeros(len(line))
    measured, kind = lives.free_s[k] / lives.steps[k], "requests of the log"
    return Rows(setup, (source,), file, line, mean[0], mean[1] / mean[0], inputs, weight, nothing, measured, nothing > 0, kind)


def fit_decode(lives: Lives, held: Mapping[str, float], keep: np.ndarray) -> tuple[np.ndarray, float, bool, int]:
    """theta [6] from the requests where `keep` [R] is true: coefficients, loss, converged, iterations. `held` ones stay at 0."""
    start = jnp.array([0.8, 0.3, 0.1, 0.1, 0.3, 0.1])
    theta, value, converged, iterations = _solved(lives, _scale(lives, held), keep.astype(float)[None], start[None], ITERATIONS)
    return _floored(theta)[0], float(value[0]), bool(converged[0]), int(iterations[0])


def decode_result(lives: Lives, rows: Rows, held: Mapping[str, float]) -> FitResult:
    """The fit to all kept requests; `rows` are those requests."""
    theta, value, converged, iterations = fit_decode(lives, held, lives.keep)
    predicted = lives.step_s(theta)[lives.keep]
    return FitResult(DECODE_TIME, rows, theta, tuple(held), DELTA, value, converged, iterations, predicted)


def decode_bootstrap(lives: Lives, result: FitResult, samples: int) -> Bootstrap:
    """Block bootstrap: refits beside the optimum to redrawn requests, side by side."""
    held = dict.fromkeys(result.fixed, 0.0)
    scale = _scale(lives, held)
    weight = np.zeros((samples, len(lives.steps)))
    weight[:, lives.keep] = drawn_counts(lives.block, samples)
    start = unconstrain(np.maximum(result.theta, INSIDE * scale)[None], BOUNDS, np.zeros(len(scale)), scale)
    redrawn = []
    width = min(WIDTH, samples)
    for begin in range(0, samples, width):
        # The last chunk is filled up with its last lane.
        chunk = weight[np.minimum(np.arange(begin, begin + width), samples - 1)]
        starts = jnp.asarray(np.repeat(start, width, axis=0))
        theta, *_ = _solved(lives, scale, chunk, starts, REDRAWN_ITERATIONS)
        redrawn.append(_floored(theta)[: samples - begin])
    return block_interval(BOUNDS, result.theta, scale, np.concatenate(redrawn), int(lives.block.max()) + 1)


def decode_identity(lives: Lives, result: FitResult) -> Identifiability:
    """What the requests pin down, those of one block erring together."""
    k, free = lives.keep, free_places(result)
    slopes = np.asarray(_slopes(result.theta, *_data(lives.timeline)))[: len(k), free] / lives.steps[:, None]
    residual = lives.predicted(result.theta) / lives.steps - 1.0
    return curvature(result, slopes[k], residual[k], _scale(lives, {})[free], lives.block)


def decode_held(lives: Lives, rows: Rows, held: Mapping[str, float], half: np.ndarray) -> HoldOut:
    """Each half [R] (0 or 1) of the kept requests predicted from a fit to the other."""
    predicted = np.zeros(len(lives.steps))
    for h in (0, 1):
        theta, *_ = fit_decode(lives, held, lives.keep & (half != h))
        predicted[half == h] = lives.step_s(theta)[half == h]
    k = lives.keep
    return HoldOut("time", predicted[k], rows.measured, rows.batch, rows.length, np.zeros(k.sum(), bool))


def _data(t: Timeline) -> tuple[Array, ...]:
    """The timeline, padded by pieces without requests and by requests without a life."""
    pieces = (_padded(x, PIECES) for x in (t.free_s, t.batch, t.cached))
    return tuple(jnp.asarray(x) for x in (*pieces, _padded(t.begin, REQUESTS), _padded(t.end, REQUESTS)))


def _padded(x: np.ndarray, step: int, value: float = 0.0) -> np.ndarray:
    """The last axis filled up with `value` to a multiple of `step`."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % step)], constant_values=value)


def _predict(theta, free_s, batch, cached, begin, end) -> Array:
    """`Lives.predicted`, padded."""
    steps = jnp.where(batch > 0, free_s / DECODE_TIME.build(theta)(jnp.maximum(batch, 1.0), cached), 0.0)
    total = jnp.concatenate([jnp.zeros(1), jnp.cumsum(steps)])
    return total[end] - total[begin]


_predicted, _slopes = jax.jit(_predict), jax.jit(jax.jacfwd(_predict))


def _scale(lives: Lives, held: Mapping[str, float]) -> np.ndarray:
    """Size [6] at which each coefficient alone would give the measured steps; 0 where it is held."""
    t = lives.timeline
    busy_s = float(t.free_s[t.batch > 0].sum())
    batch = max(float(np.sum(t.batch * t.free_s)) / busy_s, 1.0)
    context = float(np.sum(t.cached * t.free_s) / np.sum(t.batch * t.free_s))
    typical = busy_s * batch / float(lives.steps.sum())
    scale = typical / np.array([1.0, batch, batch**2, context, context * batch, context * batch**2])
    return np.where([name in held for name in DECODE_TIME.coefficients], 0.0, scale)


def _floored(theta: Array) -> np.ndarray:
    return np.maximum(np.asarray(theta), [SHORTEST_STEP_S, 0, 0, 0, 0, 0])


def _solved(lives: Lives, scale: np.ndarray, weight: np.ndarray, start: Array, iterations: int) -> tuple[Array, ...]:
    """`_solve` for row weights [L, R] of the requests."""
    return _solve(scale, _data(lives.timeline), _padded(lives.steps, REQUESTS, 1.0), _padded(weight, REQUESTS), start, iterations)


@jax.jit
def _solve(scale, data, steps, weight, start, iterations):
    """L-BFGS over scaled coefficients, a lane a row of `weight` [L, R] and `start` [L, 6]: theta, loss, converged, iterations."""

    def one_lane(weight, start):
        def theta(raw: Array) -> Array:
            return constrain(raw, BOUNDS, jnp.zeros(len(BOUNDS)), scale)

        raw, value, converged, taken = minimise(lambda raw: objective(_predict(theta(raw), *data), steps, weight, DELTA), start, iterations)
        return theta(raw), value, converged, taken

    return jax.vmap(one_lane)(weight, start)
