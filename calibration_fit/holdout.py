"""Held-out error: whole batch sizes, or whole lengths, are left out of the fit and then predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from calibration_fit.fit import FitResult, make_problem, solve_starts
from calibration_fit.knots import choose_knots
from calibration_fit.losses import mape
from calibration_fit.rows import Rows

FOLDS = 5
RANDOM_REPEATS = 3
SMALL = 40
SCHEMES = ("batch", "length", "random", "one")
"""What is left out together: all rows of a batch size, all rows of a length, rows at random (three deals; the data's README does this, and
it is too kind, since neighbours of a held-out row on the grid stay in), or each row alone (only with at most SMALL rows). A log is
held out by `time` instead: stretches of its rows, which are in order of time."""


@dataclass(frozen=True)
class HoldOut:
    """Predictions of held-out rows, [R] or [repeats * R] for random folds.

    `outside` marks rows beyond what the fold's training rows span in the grouped quantity: predicting them is extrapolation, which the
    valid range of a coefficients file excludes, so it is reported apart.
    """

    scheme: str
    predicted: np.ndarray
    measured: np.ndarray
    batch: np.ndarray
    length: np.ndarray
    outside: np.ndarray

    @property
    def mape_all(self) -> float:
        """MAPE of every held-out row."""
        return mape(self.predicted, self.measured)

    @property
    def mape_inside(self) -> float:
        """MAPE of held-out rows inside the range of their training rows."""
        return mape(self.predicted[~self.outside], self.measured[~self.outside])

    @property
    def mape_outside(self) -> float:
        """MAPE of held-out rows outside it (extrapolation); nan without such rows."""
        return mape(self.predicted[self.outside], self.measured[self.outside])


def hold_out(results: Sequence[FitResult], schemes: Sequence[str] = SCHEMES, seed: int = 0) -> list[dict[str, HoldOut]]:
    """Held-out predictions for each fit, by scheme: all folds of all schemes and setups in one solve.

    A scheme is missing for a setup with fewer than three groups: leaving one out would leave nothing to tell its effect from.
    Knots are part of a fit: each fold chooses its own, from the rows that it keeps.
    """
    first = results[0]
    folds = [(p, s, mask) for p, r in enumerate(results) for s in schemes for mask in _folds(r.rows, s, seed)]
    out: list[dict[str, HoldOut]] = [{} for _ in results]
    if not folds:
        return out
    if first.form.knots:
        setup = np.arange(len(folds))
        fixed = [first.form.with_knots(choose_knots(results[p].rows.select(~mask), first.form)) for p, _, mask in folds]
        problem = make_problem([results[p].rows for p, _, _ in folds], first.form, fixed)
    else:
        setup = np.array([p for p, _, _ in folds])
        problem = make_problem([r.rows for r in results], first.form, [r.fixed_values for r in results])
    held = np.stack([np.pad(mask, (0, problem.weight.shape[1] - len(mask))) for _, _, mask in folds])
    theta, *_ = solve_starts(problem, setup, problem.weight[setup] * ~held, problem.measured[setup], first.delta)
    for p, r in enumerate(results):
        for scheme in schemes:
            mine = [f for f, (q, s, _) in enumerate(folds) if q == p and s == scheme]
            parts = [_held(r.rows, folds[f][2], r.form.build([float(v) for v in theta[f]]), scheme) for f in mine]
            if parts:
                out[p][scheme] = HoldOut(scheme, *(np.concatenate(x) for x in zip(*parts, strict=True)))
    return out


def grouped_mape(held: dict[str, HoldOut]) -> float:
    """The headline: MAPE over all rows held out by batch size and all held out by length, extrapolation included; nan without any."""
    used = [held[s] for s in ("batch", "length") if s in held] or list(held.values())
    if not used:
        return float("nan")
    return mape(np.concatenate([h.predicted for h in used]), np.concatenate([h.measured for h in used]))


def _held(rows: Rows, held: np.ndarray, module, scheme: str) -> tuple[np.ndarray, ...]:
    """Predicted, measured, batch, length, outside of the held-out rows of one fold."""
    outside = np.zeros(held.sum(), bool)
    if scheme in ("batch", "length"):
        value = rows.batch if scheme == "batch" else rows.length
        outside = (value[held] < value[~held].min()) | (value[held] > value[~held].max())
    return rows.predict(module)[held], rows.measured[held], rows.batch[held], rows.length[held], outside


def _folds(rows: Rows, scheme: str, seed: int) -> list[np.ndarray]:
    """Held-out masks [R], one a fold. Groups are dealt in order of size, so every fold leaves out small, middle and large ones."""
    n = len(rows)
    if scheme == "one":
        return list(np.eye(n, dtype=bool)) if n <= SMALL else []
    if scheme == "random":
        rng = np.random.default_rng(seed)
        return [np.isin(np.arange(n), deal[f::FOLDS]) for deal in (rng.permutation(n) for _ in range(RANDOM_REPEATS)) for f in range(FOLDS)]
    value = {"batch": rows.batch, "length": rows.length, "time": np.arange(n) * FOLDS // n}[scheme]
    groups = np.unique(value)
    if len(groups) < 3:
        return []
    return [np.isin(value, groups[f::FOLDS]) for f in range(min(FOLDS, len(groups)))]


def regions(held: HoldOut) -> list[tuple[str, str, int, float]]:
    """MAPE by region of the grid: (batch range, length range, rows, MAPE), cutting batch and length at their thirds."""

    def cuts(values: np.ndarray) -> list[tuple[float, float]]:
        distinct = np.unique(values)
        return [(float(part[0]), float(part[-1])) for part in np.array_split(distinct, min(3, len(distinct)))]

    out = []
    for b0, b1 in cuts(held.batch):
        for l0, l1 in cuts(held.length):
            keep = (held.batch >= b0) & (held.batch <= b1) & (held.length >= l0) & (held.length <= l1)
            if keep.any():
                error = mape(held.predicted[keep], held.measured[keep])
                out.append((f"{b0:g} to {b1:g}", f"{l0:g} to {l1:g}", int(keep.sum()), error))
    return out
