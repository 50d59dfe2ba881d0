"""Intervals hold the truth at their stated rate, and what the data do not pin down is said."""

import numpy as np

from calibration_fit.fit import fit, fit_all
from calibration_fit.forms import DECODE_TIME, PREFILL_TIME
from calibration_fit.rows import make_rows
from calibration_fit.uncertainty import bootstrap, identify
from tests.calibration.helpers import DECODE, PREFILL, synthetic

SAMPLES = 100


def coverage(form, phase: str, truth, repeats: int) -> float:
    """Share of coefficients, over independent noisy tables, inside their 95 % intervals."""
    rows = [make_rows([synthetic(phase, 0.02, 1000 + seed)], form) for seed in range(repeats)]
    intervals = bootstrap(fit_all(rows, form), samples=SAMPLES)
    values = np.array([float(getattr(truth, k)) for k in form.coefficients])
    inside = [(i.low <= values) & (values <= i.high) for i in intervals]
    return float(np.mean(inside))


def test_decode_intervals_hold_the_truth_at_their_rate():
    # 240 intervals, correlated within a table: two standard errors are about 4 %.
    assert 0.90 <= coverage(DECODE_TIME, "decode", DECODE, 40) <= 0.99


def test_prefill_intervals_hold_the_truth_at_their_rate():
    assert 0.90 <= coverage(PREFILL_TIME, "prefill", PREFILL, 24) <= 0.99


def test_standard_errors_agree_with_the_bootstrap():
    result = fit([synthetic("decode", 0.02)], DECODE_TIME)
    spread = bootstrap([result], samples=200)[0].samples.std(axis=0)
    error = identify(result).standard_error
    assert ((error > 0.5 * spread) & (error < 2.0 * spread)).all()


def test_one_length_leaves_context_terms_open_and_it_is_said():
    m = synthetic("decode", 0.02)
    one = m.select(m.length == 1024)
    m = m.select((m.length == 1024) | ((m.length == 512) & (m.batch == 1)))
    assert len(one) < len(m)
    sentences = " ".join(identify(fit([m], DECODE_TIME)).sentences)
    assert "beta0" in sentences
    assert "not pinned down" in sentences


def test_an_exact_fit_is_called_pinned_down():
    sentences = identify(fit([synthetic("prefill", 0.001)], PREFILL_TIME)).sentences
    assert sentences == ("Every coefficient is pinned down by these data.",)
