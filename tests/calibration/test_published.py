"""The published tables give what their README says of them."""

import pytest

from calibration_fit import published as pub
from calibration_fit.fit import fit
from calibration_fit.forms import DECODE_ENERGY, PREFILL_TIME, TWO_PIECE_DECODE_TIME
from calibration_fit.holdout import hold_out
from calibration_fit.measurements import read_measurements
from jaxserve.perf.power import PrefillEnergy
from tests.calibration.helpers import DATA, needs_data

pytestmark = needs_data
NO_CACHE_TERM = {"e_dec_kv": 0.0}


def test_llama_decode_energy_on_a100():
    result = fit([pub.llama_decode_energy_a100(DATA)], DECODE_ENERGY, fixed=NO_CACHE_TERM)
    assert result.coefficients["e_dec0"] == pytest.approx(3.20, rel=0.03)
    assert result.coefficients["e_dec_req"] == pytest.approx(0.093, rel=0.03)


def test_llama_decode_energy_on_h100():
    result = fit([pub.mlenergy_v3(DATA)], DECODE_ENERGY, fixed=NO_CACHE_TERM)
    assert result.coefficients["e_dec0"] == pytest.approx(3.16, rel=0.03)
    assert result.coefficients["e_dec_req"] == pytest.approx(0.0665, rel=0.03)


def test_run_average_power_gives_nearly_the_same_decode_energy():
    setup = {"model": pub.ANL_NAMES["Llama-3.1-8B"], "tp": "1", "gpu": "Nvidia A100 GPU"}
    found = [
        m
        for framework in ("vLLM", "TensorRT-LLM")
        for m in read_measurements(DATA / "anl_power.csv", where={"framework": framework}, setup=setup)
    ]
    result = fit(found, DECODE_ENERGY, prefill=PrefillEnergy(0.0, 25.1e-3, 0.0), fixed=NO_CACHE_TERM)
    assert len(result.rows) == 8
    assert result.mape < 5.0
    assert result.coefficients["e_dec0"] == pytest.approx(3.2, rel=0.05)


def test_mixtral_end_to_end_with_the_composed_knee_holds_over_all_batches():
    """The study's form errs by 18 % over these rows; the two-piece form with the knee of the composed steps by about 2 %."""
    prefill_rows = [m for m in pub.composed(DATA, pub.A100) if m.phase == "prefill"][4]
    prefill = fit([prefill_rows], PREFILL_TIME).module
    fixed = {"batch_knee": 7.59, "alpha2": 0.0, "beta0": 0.0, "beta2": 0.0}
    result = fit([pub.anl_end_to_end(DATA, "Mixtral-8x7B", 4)], TWO_PIECE_DECODE_TIME, prefill=prefill, fixed=fixed)
    assert hold_out([result], ("one",))[0]["one"].mape_all < 3.4


def test_rows_keep_the_numbers_of_their_file():
    m = pub.anl_end_to_end(DATA, "Llama-3.1-8B", 1)
    line = (DATA / "anl_e2e_batch_latency.csv").read_text().splitlines()[m.row[0] - 1]
    assert "Meta-Llama-3-8B" in line
    assert f"{m.time_s[0]:.4f}"[:5] in line
