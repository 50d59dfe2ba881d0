"""End-to-end rows: prefill packing and the sum over decode steps."""

import jax
import numpy as np
import pandas as pd
import pytest

from calibration_fit.columns import COLUMNS
from calibration_fit.fit import fit
from calibration_fit.forms import DECODE_ENERGY, DECODE_TIME, TWO_PIECE_DECODE_TIME
from calibration_fit.measurements import Source, from_table
from calibration_fit.rows import make_rows, prefill_steps
from jaxserve.perf.latency import TwoPieceDecodeTime
from jaxserve.perf.power import DecodeEnergy, PrefillEnergy
from tests.calibration.helpers import DECODE, PREFILL

TWO_PIECE = TwoPieceDecodeTime(6e-3, 1e-3, 70e-6, 8.0, -3e-7, 1e-8, 2e-8, 1e-11)


def summed(batch: int, isl: int, osl: int, module, prefill, energy: bool = False) -> float:
    """Every step of a static batch, one by one."""
    total = sum(float(prefill(n, s) if energy else prefill(n, b, s)) for n, b, s in prefill_steps([isl] * batch))
    return total + sum(float(module(float(batch), float(batch * (isl + k)))) for k in range(1, osl))


def static_batches(module, prefill, energy: bool = False):
    grid = [(b, n, o) for b in (1, 4, 16, 32, 64) for n, o in ((64, 32), (128, 64), (300, 100), (512, 200))]
    value = [summed(b, n, o, module, prefill, energy) for b, n, o in grid]
    frame = pd.DataFrame(grid, columns=["batch", "isl", "osl"]).assign(model="m", tp=1, gpu="A100", phase="end_to_end")
    frame = frame.assign(energy_j=value, time_s=np.array(value) / 300.0) if energy else frame.assign(time_s=value)
    return from_table(frame, Source("static.csv", "0" * 64))[0]


@pytest.mark.parametrize(("form", "module"), [(DECODE_TIME, DECODE), (TWO_PIECE_DECODE_TIME, TWO_PIECE)])
def test_a_static_batch_is_the_sum_of_its_steps(form, module):
    m = static_batches(module, PREFILL)
    rows = make_rows([m], form, PREFILL)
    assert rows.predict(module) == pytest.approx(m.time_s, rel=1e-12)


def test_decode_coefficients_come_back_through_the_sum():
    result = fit([static_batches(DECODE, PREFILL)], DECODE_TIME, prefill=PREFILL)
    assert result.mape < 0.01
    assert result.coefficients["alpha0"] == pytest.approx(DECODE.alpha0, rel=1e-3)
    assert result.coefficients["beta1"] == pytest.approx(DECODE.beta1, rel=1e-2)


def test_energy_comes_back_through_the_sum():
    truth, prefill = DecodeEnergy(3.2, 0.09, 2e-5), PrefillEnergy(0.5, 0.025, 0.0)
    result = fit([static_batches(truth, prefill, energy=True)], DECODE_ENERGY, prefill=prefill)
    assert result.coefficients["e_dec0"] == pytest.approx(3.2, rel=1e-3)
    assert result.coefficients["e_dec_req"] == pytest.approx(0.09, rel=1e-2)
    assert result.coefficients["e_dec_kv"] == pytest.approx(2e-5, rel=1e-2)


def test_prompts_are_packed_and_split_at_the_budget():
    assert prefill_steps([100] * 2, 1000) == [(200, 2, 20000)]
    # 3 x 60 into 100: the second prompt is split 40 / 20, the third 60 follows in the second step.
    assert prefill_steps([60] * 3, 100) == [(100, 2, 3600 + 1600), (80, 2, 60**2 - 40**2 + 60**2)]
    steps = prefill_steps([777] * 5, 512)
    assert sum(n for n, _, _ in steps) == 5 * 777
    assert sum(s for _, _, s in steps) == 5 * 777**2


def test_two_piece_is_continuous_and_reduces_to_the_study_form():
    below, above = (float(TWO_PIECE(8.0 + e, (8.0 + e) * 500.0)) for e in (-1e-9, 1e-9))
    assert below == pytest.approx(above, rel=1e-9)
    same = TwoPieceDecodeTime(DECODE.alpha0, DECODE.alpha1, DECODE.alpha1, 8.0, DECODE.alpha2, DECODE.beta0, DECODE.beta1, DECODE.beta2)
    for b in (1.0, 8.0, 50.0):
        assert float(same(b, b * 700.0)) == pytest.approx(float(DECODE(b, b * 700.0)), rel=1e-12)


def test_every_column_says_what_it_is():
    assert all(c.text for c in COLUMNS.values())


@pytest.mark.parametrize("module", [PREFILL, DECODE, TWO_PIECE])
def test_numpy_gives_what_jax_gives(module):
    """On the host the forms are worked out by numpy, which compiles nothing; around the knees too."""
    first = np.array([1.0, 7.5, 8.0, 9.0, 299.0, 300.0, 301.0, 4096.0])
    inputs = (first, 2.0 * first) if module is not PREFILL else (first, np.ones(8), first**2)
    found = module(*inputs)
    assert type(found) is np.ndarray
    np.testing.assert_allclose(found, jax.jit(type(module).__call__)(module, *inputs), rtol=1e-14)
