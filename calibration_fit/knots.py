"""Where a piecewise form bends: knots among the measured values, added one by one by the error on rows that are held out.

With its knots given a piecewise form is linear in its coefficients, so each trial is a non-negative least-squares problem in relative
errors (Lawson & Hanson 1974): thousands of them take a second. The fit to the knots that come out is `calibration_fit.fit`'s.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

from calibration_fit.forms import MOST_KNOTS, Form
from calibration_fit.losses import mape
from calibration_fit.rows import Rows

DEALS = 3
"""Groups of batch sizes, and of lengths, are dealt into so many parts, each held out once."""
ROWS_A_COEFFICIENT = 3
"""Knots stop where there would be fewer rows to a coefficient."""
ENOUGH = 1.05
"""The fewest knots are taken whose held-out error is within this factor of the least; ..."""
ROUNDING = 1e-6
"""... per cent of error are none."""


def choose_knots(rows: Rows, form: Form) -> list[float]:
    """Ascending knots for `form` (a piecewise one), at most `MOST_KNOTS`.

    They are added one at a time, each where it lowers the held-out error most; a stair shows only once both its edges are there, so the
    search goes on to the end, takes the fewest that are enough, and then leaves out those that later ones have made needless.
    """
    design = _Design(rows, form)
    folds = held_out(rows)
    free, n = len(form.coefficients) - len(form.knots) - len(form.slopes), len(rows)
    most = min(MOST_KNOTS, len(design.values) // 2, n // ROWS_A_COEFFICIENT - free - 1) if folds else 0
    places: list[int] = []
    path = [(design.error(places, folds), places)]
    left = list(range(1, len(design.values) - 1))
    while left and len(places) < most:
        error, place = min((design.error(sorted([*places, place]), folds), place) for place in left)
        places = sorted([*places, place])
        left.remove(place)
        path.append((error, places))
    enough = ENOUGH * min(error for error, _ in path) + ROUNDING
    places = next(chosen for error, chosen in path if error <= enough)
    while places:
        error, fewer = min((design.error(fewer, folds), fewer) for fewer in ([p for p in places if p != place] for place in places))
        if error > enough:
            break
        places = fewer
    return design.values[places].tolist()


def held_out(rows: Rows) -> list[np.ndarray]:
    """Masks [R] of rows to hold out: batch sizes, then lengths, in order of size dealt into `DEALS` parts; without two of either none."""
    out = []
    for value in (rows.batch, rows.length):
        groups = np.unique(value)
        if len(groups) >= DEALS:
            out += [np.isin(value, groups[deal::DEALS]) for deal in range(DEALS)]
    return out


class _Design:
    """Columns of the linear problem, by knots: one a piece, then the other coefficients'; and its errors."""

    def __init__(self, rows: Rows, form: Form) -> None:
        self.form, self.rows = form, rows
        x = rows.inputs[form.knee_input]
        self.values = np.unique(x)
        ends = np.array([0.0, *self.values, np.inf])
        self._up_to = np.stack([(rows.term_weight * np.minimum(x, end)).sum(axis=1) for end in ends], axis=1)  # [R, V+2]
        none = form.with_knots([])
        blank = {k: none.get(k, 0.0) for k in form.coefficients}
        others = [k for k in form.coefficients if k not in (*form.knots, *form.slopes)]
        self._others = np.stack([self._column(blank | {k: 1.0}) for k in others], axis=1)
        self._target = 1.0 - rows.offset / rows.measured

    def _column(self, coefficients: dict[str, float]) -> np.ndarray:
        """What one of the coefficients, at 1, adds to each row."""
        return self.rows.predict(self.form.build([coefficients[k] for k in self.form.coefficients])) - self.rows.offset

    def error(self, places: list[int], folds: list[np.ndarray]) -> float:
        """Held-out MAPE over all folds with knots at `places` of `values`; in sample without folds."""
        edges = [0, *(place + 1 for place in places), self._up_to.shape[1] - 1]
        columns = np.concatenate([np.diff(self._up_to[:, edges], axis=1), self._others], axis=1) / self.rows.measured[:, None]
        size = np.maximum(np.abs(columns).mean(axis=0), 1e-300)
        columns = columns / size
        every = np.ones(len(self._target), bool)
        predicted, wanted = [], []
        for held in folds or [every]:
            train = ~held if folds else every
            solution, _ = nnls(columns[train], self._target[train])
            predicted.append(columns[held] @ solution + 1.0 - self._target[held])
            wanted.append(np.ones(held.sum()))
        return mape(np.concatenate(predicted), np.concatenate(wanted))
