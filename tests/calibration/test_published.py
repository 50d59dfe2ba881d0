"""The published tables give what their README says of them."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from calibration_fit import published as pub
from calibration_fit.fit import fit
from calibration_fit.forms import DECODE_ENERGY, PREFILL_TIME, TWO_PIECE_DECODE_TIME
from calibration_fit.holdout import hold_out
from calibration_fit.measurements import Measurements, Source, from_table, read_measurements
from calibration_fit.shipped_energy import A100, by_work, decode_energy, served_runs, static_runs
from jaxserve.perf.coefficients import load_coefficients
from jaxserve.perf.latency import DecodeTime
from jaxserve.perf.power import DecodeEnergy, PrefillEnergy
from tests.calibration.helpers import DATA, needs_data

pytestmark = needs_data
NO_CACHE_TERM = {"e_dec_kv": 0.0}


def llama_decode_energies() -> Measurements:
    """Decode step energies of Llama-3(.1)-8B TP1 on A100, derived from 14 run averages by the data's README; the time only stands in."""
    table: Any = pd.read_csv(DATA / "a100_8b_decode_step_energy_derived.csv")
    setup = {"model": "Llama-3.1-8B", "tp": 1, "gpu": "A100", "phase": "decode"}
    columns = {"batch": table.B, "mean_ctx": table.l, "time_s": table.e_step / 300.0, "energy_j": table.e_step}
    (m,) = from_table(pd.DataFrame(columns).assign(**setup), Source("derived", ""))
    return m


def test_llama_decode_energy_on_a100():
    result = fit([llama_decode_energies()], DECODE_ENERGY, fixed=NO_CACHE_TERM)
    assert result.coefficients["e_dec0"] == pytest.approx(3.20, rel=0.03)
    assert result.coefficients["e_dec_req"] == pytest.approx(0.093, rel=0.03)


def test_llama_decode_energy_on_h100():
    setup = {"model": "meta-llama/Llama-3.1-8B-Instruct", "tp": "1", "gpu": "H100"}
    found = read_measurements(DATA / "mlenergy_v3_llm.csv", where={"precision": "bfloat16"}, setup=setup, isl=0.0)
    result = fit(found, DECODE_ENERGY, fixed=NO_CACHE_TERM)
    assert result.coefficients["e_dec0"] == pytest.approx(3.16, rel=0.03)
    assert result.coefficients["e_dec_req"] == pytest.approx(0.0665, rel=0.03)


def test_run_average_power_gives_nearly_the_same_decode_energy():
    found = pub.anl_energies(DATA, "Llama-3.1-8B", gpu="Nvidia A100 GPU")
    result = fit(found, DECODE_ENERGY, prefill=PrefillEnergy(0.0, 25.1e-3, 0.0), fixed=NO_CACHE_TERM)
    assert len(result.rows) == 8
    assert result.mape < 5.0
    assert result.coefficients["e_dec0"] == pytest.approx(3.2, rel=0.05)


def test_the_work_of_a_step_comes_over_from_another_server():
    """Fitted to static batches alone, energies above idle tell that of a server that waited for its CPU; whole ones do not."""
    c = load_coefficients("llama-3.1-8b_tp1_a100")
    time, prefill = c.decode_time_model(), c.prefill_energy_model()
    assert isinstance(time, DecodeTime)
    measured = pub.anl_energies(DATA, "Llama-3.1-8B", gpu="Nvidia A100 GPU")
    static = static_runs(measured, c.prefill_time_model(), prefill, "static")
    served = served_runs(pub.mlenergy_v2(DATA, "Llama-3.1-8B", 1), pub.MLENERGY_ISL, prefill, "served")
    fitted = DecodeEnergy(**decode_energy(static, by_work(static, time, A100.idle_w), time, A100, 1, False).values)
    predicted = np.asarray(fitted(served.batch, served.cached))
    assert len(predicted) == 6 and len(static.batch) == 8
    assert np.abs(predicted / by_work(served, time, A100.idle_w) - 1).max() < 0.25
    assert (predicted / served.step_j).max() < 0.8


def test_prefill_takes_longer_than_its_kernels():
    for gpu, name, by_hand in ((pub.A100, "A100", 1.042048 / (2 * 0.494928)), (pub.H100, "H100", 0.425665 / (2 * 0.165859))):
        assert pub.prefill_slowdown(DATA, pub.composed(DATA, gpu), name) == pytest.approx(by_hand, rel=1e-5)


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
