"""The fit: optax's L-BFGS from many starts, all setups and starts side by side in one jitted, vmapped solve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from calibration_fit.forms import Form
from calibration_fit.losses import ROBUST_DELTA, mape, objective
from calibration_fit.measurements import Measurements
from calibration_fit.minimise import minimise
from calibration_fit.rows import Rows, check_rows, make_rows
from calibration_fit.transforms import Bound, constrain, unconstrain

MAX_STARTS = 24
MAX_ITERATIONS = 400
SCREEN_ITERATIONS = 60
"""Every start gets this many; only the most promising of each fit go on to convergence."""
FINALISTS = 4
RESAMPLED_SCREEN, RESAMPLED_FINALISTS, RESAMPLED_ITERATIONS = 25, 1, 80
"""The same for refits to resampled data, which start beside their optimum and whose spread is far wider than what is left to gain."""
LANES = 128
"""Width of the compiled solve."""
ROW_STEP = 64
"""Rows are padded to a multiple of this, for the same reason."""


@dataclass(frozen=True)
class FitResult:
    """A fitted form of one setup.

    `objective` is the weighted mean robust loss; `predicted` [R] belongs to `rows`; `at_bound` names coefficients that ended on a bound.
    """

    form: Form
    rows: Rows
    theta: np.ndarray
    fixed: tuple[str, ...]
    delta: float
    objective: float
    converged: bool
    iterations: int
    predicted: np.ndarray

    @property
    def coefficients(self) -> dict[str, float]:
        """Coefficients by name, in the units of `form.units`."""
        return {k: float(v) for k, v in zip(self.form.coefficients, self.theta, strict=True)}

    @property
    def module(self) -> Any:
        """The fitted module of `jaxserve.perf`."""
        return self.form.build([float(v) for v in self.theta])

    @property
    def fixed_values(self) -> dict[str, float]:
        """The coefficients that were not fitted."""
        return {k: self.coefficients[k] for k in self.fixed}

    @property
    def held(self) -> np.ndarray:
        """The same as values [C], nan elsewhere."""
        return np.array([self.fixed_values.get(k, np.nan) for k in self.form.coefficients])

    @property
    def mape(self) -> float:
        """In-sample mean absolute percentage error."""
        return mape(self.predicted, self.rows.measured)

    @property
    def at_bound(self) -> tuple[str, ...]:
        """Coefficients that the data push onto 0."""
        nonnegative = [k for k, b in self.form.bounds.items() if b is Bound.NONNEGATIVE and k not in self.fixed]
        scale = coefficient_scale(self.form, self.rows, self.held)
        small = dict(zip(self.form.coefficients, self.theta / scale, strict=True))
        return tuple(k for k in nonnegative if small[k] < 1e-6)


@dataclass(frozen=True)
class Problem:
    """Fits of one form over P setups, padded to common shapes: `inputs` [P, I, R, T], `term_weight` [P, R, T], `offset`, `measured`,
    `weight` [P, R] (0 = padding), `held` [P, C] the values of coefficients that are not fitted (nan where they are), `scale` [P, C],
    `pieces` [P, S, 2] the knee intervals of each start."""

    form: Form
    rows: tuple[Rows, ...]
    bounds: tuple[Bound, ...]
    held: np.ndarray
    inputs: np.ndarray
    term_weight: np.ndarray
    offset: np.ndarray
    measured: np.ndarray
    weight: np.ndarray
    scale: np.ndarray
    pieces: np.ndarray


@dataclass(frozen=True)
class Lanes:
    """L independent fits of a `Problem`: which setup, row weights [L, R], measured values [L, R], knee interval [L, 2], start [L, C]."""

    setup: np.ndarray
    weight: np.ndarray
    measured: np.ndarray
    piece: np.ndarray
    start: np.ndarray


def fit(
    measurements: Sequence[Measurements],
    form: Form,
    *,
    prefill: Any = None,
    fixed: Mapping[str, float] | None = None,
    delta: float = ROBUST_DELTA,
) -> FitResult:
    """Fit `form` to the measurements of one setup.

    `prefill` is the module of known prefill time (energy) for end-to-end rows; `fixed` holds coefficients at given values.
    Raises `InputError` when the data cannot carry the fit.
    """
    return fit_all([make_rows(measurements, form, prefill)], form, fixed=[fixed or {}], delta=delta)[0]


def fit_all(
    rows: Sequence[Rows], form: Form, *, fixed: Sequence[Mapping[str, float]] | None = None, delta: float = ROBUST_DELTA
) -> list[FitResult]:
    """Fit `form` to several setups at once, each from its own rows, with the coefficients `fixed` for it held."""
    problem = make_problem(rows, form, fixed)
    theta, value, converged, iterations = solve_starts(problem, np.arange(len(rows)), problem.weight, problem.measured, delta)
    results = []
    for p, r in enumerate(rows):
        module = form.build([float(v) for v in theta[p]])
        results.append(
            FitResult(
                form, r, theta[p], _fixed(problem, p), delta, float(value[p]), bool(converged[p]), int(iterations[p]), r.predict(module)
            )
        )
    return results


def _fixed(problem: Problem, p: int) -> tuple[str, ...]:
    return tuple(name for name, value in zip(problem.form.coefficients, problem.held[p], strict=True) if not np.isnan(value))


def make_problem(rows: Sequence[Rows], form: Form, fixed: Sequence[Mapping[str, float]] | None = None) -> Problem:
    """Pad the rows of all setups to common shapes and lay out the starts; `fixed` names what is held, setup by setup."""
    fixed = fixed or [{}] * len(rows)
    unknown = {name for f in fixed for name in f} - set(form.coefficients)
    if unknown:
        raise ValueError(f"{form.table} ({form.name}) has no coefficient {sorted(unknown)[0]!r}")
    bounds = tuple(form.bounds.values())
    for r, f in zip(rows, fixed, strict=True):
        check_rows(r, form, len(bounds) - len(f))
    held = np.array([[f.get(name, np.nan) for name in form.coefficients] for f in fixed], float)
    n, terms = -(-max(len(r) for r in rows) // ROW_STEP) * ROW_STEP, max(r.inputs.shape[2] for r in rows)

    def pad(x: np.ndarray, value: float) -> np.ndarray:
        width = [(0, 0)] * x.ndim
        axis = 1 if x.ndim == 3 else 0
        width[axis] = (0, n - x.shape[axis])
        return np.pad(x, width, constant_values=value)

    def pad_terms(x: np.ndarray, value: float) -> np.ndarray:
        return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, terms - x.shape[-1])], constant_values=value)

    # A knee that is held needs no search.
    pieces = [np.zeros((1, 2)) if form.knee in f else knee_pieces(r, form) for r, f in zip(rows, fixed, strict=True)]
    starts = max(len(p) for p in pieces)
    return Problem(
        form,
        tuple(rows),
        bounds,
        held,
        np.stack([pad(pad_terms(r.inputs, 1.0), 1.0) for r in rows]),
        np.stack([pad(pad_terms(r.term_weight, 0.0), 0.0) for r in rows]),
        np.stack([pad(r.offset, 0.0) for r in rows]),
        np.stack([pad(r.measured, 1.0) for r in rows]),
        np.stack([pad(np.ones(len(r)), 0.0) for r in rows]),
        np.stack([coefficient_scale(form, r, h) for r, h in zip(rows, held, strict=True)]),
        np.stack([np.pad(p, [(0, starts - len(p)), (0, 0)], mode="edge") for p in pieces]),
    )


def knee_pieces(rows: Rows, form: Form) -> np.ndarray:
    """Knee intervals [S, 2], one a start: between neighbouring values of the input that the knee cuts.

    The loss has a kink where the knee passes a measured value and is smooth between: so each start searches one smooth piece, ends
    included, and the best of all is the global optimum in the knee. Two different values stay on each side, or a slope would hang on one.
    """
    if form.knee is None:
        return np.zeros((1, 2))
    values = np.unique(rows.inputs[form.knee_input])
    values = values[1:-1] if len(values) >= 4 else values
    if len(values) > MAX_STARTS + 1:
        values = np.quantile(values, np.linspace(0, 1, MAX_STARTS + 1))
    return np.stack([values[:-1], values[1:]], axis=1) if len(values) > 1 else np.array([[values[0], values[0]]])


def coefficient_scale(form: Form, rows: Rows, held: np.ndarray) -> np.ndarray:
    """Size [C] at which each coefficient alone would give the measured values (the knee: 1), from the module's own derivatives.

    `held` [C]: values of those that are not fitted, nan elsewhere.
    """
    ones = np.where(np.isnan(held), 1.0, held)
    if form.knee is not None:
        ones[form.coefficients.index(form.knee)] = np.median(rows.inputs[form.knee_input])
    size = np.abs(rows.sensitivity(form, ones)).mean(axis=0)
    scale = 1.0 / np.maximum(size, 1e-300)
    if form.knee is not None:
        scale[form.coefficients.index(form.knee)] = 1.0
    return scale


def solve_starts(
    problem: Problem, setup: np.ndarray, weight: np.ndarray, measured: np.ndarray, delta: float, near: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The best of all starts for F fits: setup [F], row weights [F, R], measured [F, R] -> theta [F, C], loss, converged, iterations [F].

    `near` [F, C] starts from given coefficients instead (for resampled data), in the knee interval that holds them and two each side.
    """
    low, high, start = _starts(problem, setup, near)
    n_fits, n_starts = start.shape[:2]

    def lanes(keep: np.ndarray, start: np.ndarray) -> Lanes:
        """Keep [F, K] indices of starts."""
        k = keep.shape[1]
        each = np.repeat(np.arange(n_fits), k)
        piece = np.stack([low, high], axis=-1)[each, keep.ravel()]
        return Lanes(setup[each], weight[each], measured[each], piece, start.reshape(n_fits * k, -1))

    screen, finalists, limit = SCREEN_ITERATIONS, FINALISTS, MAX_ITERATIONS
    if near is not None:
        screen, finalists, limit = RESAMPLED_SCREEN, RESAMPLED_FINALISTS, RESAMPLED_ITERATIONS
    every = np.tile(np.arange(n_starts), (n_fits, 1))
    if n_starts > finalists:
        raw, _, value, _, _ = solve_lanes(problem, lanes(every, start), delta, screen)
        every = np.argsort(value.reshape(n_fits, n_starts), axis=1)[:, :finalists]
        start = np.take_along_axis(raw.reshape(n_fits, n_starts, -1), every[:, :, None], axis=1)
    final = lanes(every, start)
    _, theta, value, converged, iterations = solve_lanes(problem, final, delta, limit)
    best = np.argmin(value.reshape(n_fits, -1), axis=1) + np.arange(n_fits) * every.shape[1]
    return theta[best], value[best], converged[best], iterations[best]


def _starts(problem: Problem, setup: np.ndarray, near: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Knee intervals low, high [F, S, C'] collapsed to [F, S], and raw starts [F, S, C]."""
    pieces = problem.pieces[setup]
    n_coefficients = len(problem.bounds)
    if near is not None and problem.form.knee is not None and pieces.shape[1] > 1:
        knee = near[:, problem.form.coefficients.index(problem.form.knee)]
        middle = np.argmin(np.abs(pieces.mean(axis=2) - knee[:, None]), axis=1)
        index = np.clip(middle[:, None] + np.arange(-2, 3), 0, pieces.shape[1] - 1)
        pieces = np.take_along_axis(pieces, index[:, :, None], axis=1)
    low, high = pieces[:, :, 0], pieces[:, :, 1]
    scale = problem.scale[setup]
    theta = np.repeat(scale[:, None, :] / n_coefficients, pieces.shape[1], axis=1) if near is None else None
    if near is not None:
        theta = np.repeat(near[:, None, :], pieces.shape[1], axis=1)
    assert theta is not None
    if problem.form.knee is not None:
        theta[:, :, problem.form.coefficients.index(problem.form.knee)] = (low + high) / 2
    full_low, full_high = _ends(problem, setup.repeat(pieces.shape[1]), pieces.reshape(-1, 2))
    raw = unconstrain(theta.reshape(-1, n_coefficients), problem.bounds, full_low, full_high)
    return low, high, raw.reshape(*theta.shape)


def _ends(problem: Problem, setup: np.ndarray, piece: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`low` and `high` [L, C] that `constrain` wants, from knee intervals [L, 2], scales and fixed values."""
    low = np.zeros((len(setup), len(problem.bounds)))
    high = problem.scale[setup].copy()
    interval = np.array([bound is Bound.INTERVAL for bound in problem.bounds])
    low[:, interval], high[:, interval] = piece[:, :1], piece[:, 1:]
    held = problem.held[setup]
    is_held = ~np.isnan(held)
    return np.where(is_held, held, low), np.where(is_held, np.where(interval, held, 0.0), high)


def solve_lanes(problem: Problem, lanes: Lanes, delta: float, max_iterations: int) -> tuple[np.ndarray, ...]:
    """Minimise every lane: the optimiser's numbers and the coefficients [L, C], loss, converged, iterations [L].

    Lanes go through one compiled solve of a fixed width, so that fits, hold-outs and bootstraps of every size share one compilation, and
    a chunk of easy lanes does not wait for a hard one elsewhere.
    """
    low, high = _ends(problem, lanes.setup, lanes.piece)
    out = []
    n = len(lanes.setup)
    for begin in range(0, n, LANES):
        # The last chunk is filled up with its last lane.
        chunk = np.minimum(np.arange(begin, begin + LANES), n - 1)
        p = lanes.setup[chunk]
        data = (problem.inputs[p], problem.term_weight[p], problem.offset[p], lanes.measured[chunk], lanes.weight[chunk])
        solved = _solve(problem.form, problem.bounds, max_iterations, data, low[chunk], high[chunk], lanes.start[chunk], delta)
        out.append([np.asarray(x)[: n - begin] for x in solved])
    raw, theta, value, converged, iterations = (np.concatenate(x) for x in zip(*out, strict=True))
    return raw, theta, np.where(np.isfinite(value), value, np.inf), converged, iterations


@partial(jax.jit, static_argnums=(0, 1))
def _solve(form, bounds, max_iterations, data, low, high, start, delta):
    """One vmapped minimisation over lanes; see `solve_lanes`."""

    def one_lane(data, low, high, start):
        inputs, term_weight, offset, measured, weight = data

        def loss(raw: Array) -> Array:
            module = form.build(constrain(raw, bounds, low, high))
            predicted = offset + jnp.sum(term_weight * module(*inputs), axis=1)
            return objective(predicted, measured, weight, delta)

        raw, value, converged, iterations = minimise(loss, start, max_iterations)
        return raw, constrain(raw, bounds, low, high), value, converged, iterations

    return jax.vmap(one_lane)(data, low, high, start)
