"""The fit reaches the global optimum: recovery of known coefficients, and scipy's solution over a scanned knee."""

import time

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from calibration_fit.fit import fit, fit_all, knee_pieces
from calibration_fit.forms import DECODE_TIME, PREFILL_TIME, TWO_PIECE_DECODE_TIME, Form
from calibration_fit.losses import ROBUST_DELTA, pseudo_huber, pseudo_huber_slopes
from calibration_fit.measurements import Measurements
from calibration_fit.published import A100, composed
from calibration_fit.rows import make_rows
from calibration_fit.transforms import Bound, constrain, unconstrain
from tests.calibration.helpers import DATA, DECODE, PREFILL, decode_design, needs_data, prefill_design, scipy_solution, synthetic

OBJECTIVE_TOLERANCE = 1e-3
"""The objective may lie 0.1 % above an independent global solution (issue 3)."""


def test_pseudo_huber_is_square_near_and_linear_far():
    assert float(pseudo_huber(np.float64(1e-9), 0.02)) == pytest.approx(0.5e-18, rel=1e-6)
    assert float(pseudo_huber(np.float64(5.0), 0.02)) == pytest.approx(0.02 * 5.0, rel=0.01)


def test_slopes_are_those_of_finite_differences():
    """Of the loss, first and second; and of predictions by the coefficients, whatever the number of rows."""
    r, h = np.array([-0.3, -0.01, 0.0, 0.004, 2.0]), 1e-5
    above, here, below = (np.asarray(pseudo_huber(r + step, 0.02)) for step in (h, 0.0, -h))
    first, second = pseudo_huber_slopes(r, 0.02)
    np.testing.assert_allclose(first, (above - below) / (2 * h), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(second, (above - 2 * here + below) / h**2, rtol=1e-4, atol=1e-6)
    theta = np.array([float(getattr(DECODE, name)) for name in DECODE_TIME.coefficients])
    for n in (7, 40):
        rows = make_rows([synthetic("decode", n=n)], DECODE_TIME)
        found = rows.sensitivity(DECODE_TIME, theta)
        assert found.shape == (n, len(theta))
        for j in range(len(theta)):
            step = np.zeros(len(theta))
            step[j] = 1e-3 * max(abs(theta[j]), 1e-9)
            up, down = (rows.predict(DECODE_TIME.build(list(theta + sign * step))) for sign in (1, -1))
            np.testing.assert_allclose(found[:, j], (up - down) / (2 * step[j]) / rows.measured, rtol=1e-6)


@pytest.mark.parametrize(("phase", "form", "truth"), [("prefill", PREFILL_TIME, PREFILL), ("decode", DECODE_TIME, DECODE)])
def test_noiseless_coefficients_come_back(phase: str, form: Form, truth):
    result = fit([synthetic(phase)], form)
    assert result.converged
    assert result.mape < 0.01
    for name, value in result.coefficients.items():
        # beta0 carries under 0.1 % of the step time, hence the wide absolute allowance.
        assert value == pytest.approx(getattr(truth, name), rel=0.01, abs=2e-9 if name == "beta0" else 0.0), name


def test_the_knee_starts_cover_the_range_without_gaps():
    pieces = knee_pieces(make_rows([synthetic("prefill")], PREFILL_TIME), PREFILL_TIME)
    assert (pieces[1:, 0] == pieces[:-1, 1]).all()


def test_setups_fitted_together_equal_setups_fitted_alone():
    a, b = synthetic("decode", 0.02, 1), synthetic("decode", 0.02, 2, n=40)
    together = fit_all([make_rows([m], DECODE_TIME) for m in (a, b)], DECODE_TIME)
    for result, m in zip(together, (a, b), strict=True):
        assert result.objective == pytest.approx(fit([m], DECODE_TIME).objective, rel=1e-8)


def test_fixed_coefficients_stay():
    result = fit([synthetic("decode", 0.01)], DECODE_TIME, fixed={"alpha2": 0.0, "beta2": 0.0})
    assert result.coefficients["alpha2"] == 0.0
    assert result.coefficients["beta2"] == 0.0


def independent_objective(m: Measurements, form: Form) -> float:
    """The least mean loss that scipy finds: a scan over the knee, refined in the best cell of the scan."""
    if form is DECODE_TIME:
        return scipy_solution(decode_design(m), m.time_s, np.array([0.0, *[-np.inf] * 5]), ROBUST_DELTA)[1]
    lower = np.zeros(5) if form is PREFILL_TIME else np.array([0.0, 0.0, *[-np.inf] * 5])
    design = prefill_design if form is PREFILL_TIME else decode_design

    def at(knee: float) -> float:
        return scipy_solution(design(m, knee), m.time_s, lower, ROBUST_DELTA)[1]

    pieces = knee_pieces(make_rows([m], form), form)
    knees = np.unique(np.linspace(pieces[:, 0], pieces[:, 1], 3))
    values = [at(k) for k in knees]
    i = int(np.argmin(values))
    cells = [(knees[j], knees[j + 1]) for j in (i - 1, i) if 0 <= j < len(knees) - 1]
    return min([values[i], *(minimize_scalar(at, bounds=c, method="bounded", options={"xatol": 1e-3}).fun for c in cells)])


@pytest.mark.parametrize("form", [PREFILL_TIME, DECODE_TIME], ids=lambda f: f"{f.table}-{f.name}")
def test_the_optimum_is_scipys_on_noisy_synthetic_rows(form: Form):
    m = synthetic("prefill" if form is PREFILL_TIME else "decode", 0.03, 7)
    result = fit([m], form)
    assert result.objective <= independent_objective(m, form) * (1 + OBJECTIVE_TOLERANCE)


@needs_data
@pytest.mark.parametrize("form", [PREFILL_TIME, DECODE_TIME, TWO_PIECE_DECODE_TIME], ids=lambda f: f"{f.table}-{f.name}")
def test_the_optimum_is_scipys_on_all_five_a100_setups(form: Form):
    phase = form.table.split("_")[0]
    measured = [m for m in composed(DATA, A100) if m.phase == phase]
    rows = [make_rows([m], form) for m in measured]
    fit_all(rows, form)
    begin = time.perf_counter()
    results = fit_all(rows, form)
    assert time.perf_counter() - begin < 10.0
    for m, result in zip(measured, results, strict=True):
        reference = independent_objective(m, form)
        assert result.converged, m.setup
        # Both ways: much below the reference would mean that one of the two computes another loss.
        assert reference * (1 - OBJECTIVE_TOLERANCE) <= result.objective <= reference * (1 + OBJECTIVE_TOLERANCE), m.setup


def test_transforms_keep_bounds_and_invert():
    bounds = (Bound.FREE, Bound.NONNEGATIVE, Bound.INTERVAL, Bound.NONNEGATIVE)
    low, high = np.array([0.0, 0.0, 100.0, 7.0]), np.array([2.0, 3.0, 300.0, 0.0])
    for raw in np.random.default_rng(0).normal(0, 3, (50, 4)):
        theta = np.asarray(constrain(raw, bounds, low, high))
        assert theta[1] >= 0
        assert 100.0 <= theta[2] <= 300.0
        assert theta[3] == 7.0
    theta = np.array([-4.0, 5.0, 180.0, 7.0])
    assert np.asarray(constrain(unconstrain(theta, bounds, low, high), bounds, low, high)) == pytest.approx(theta)
