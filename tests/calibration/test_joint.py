"""Prefill and decode from sums of both: recovered where batches tell them apart, refused where they do not."""

import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from calibration_fit.cli import app
from calibration_fit.measurements import Measurements, Source, from_table
from calibration_fit.pipeline import fit_setups
from calibration_fit.rows import prefill_total
from jaxserve.errors import InputError
from jaxserve.perf.latency import DecodeTime, PrefillTime
from tests.calibration.helpers import DATA, needs_data

PREFILL = PrefillTime(60e-6, 60e-6, 1e9, 20e-3, 0.0, 0.0)
DECODE = DecodeTime(12e-3, 90e-6, 0.0, 0.0, 0.1e-6, 0.0)
IN_STEP = [(b, n, n) for b in (1, 4, 16, 32) for n in (64, 128, 256, 512, 1024, 2048)]
APART = [(b, n, o) for b in (1, 4, 16, 32) for n, o in ((128, 64), (512, 16), (512, 256), (1024, 8), (2048, 2), (2048, 128))]


def static_batches(grid: list[tuple[int, int, int]], noise: float = 0.01) -> Measurements:
    """Latencies of static batches (B, isl, osl) of the coefficients above, summed step by step."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(grid, columns=["batch", "isl", "osl"]).assign(model="m", tp=1, gpu="G", phase="end_to_end")
    time_s = [
        prefill_total(PREFILL, b, n, "time_s") + sum(float(DECODE(float(b), float(b * (n + k)))) for k in range(1, o)) for b, n, o in grid
    ]
    return from_table(frame.assign(time_s=time_s * (1 + noise * rng.standard_normal(len(grid)))), Source("static.csv", "0" * 64))[0]


def test_prefill_comes_back_from_sums_that_tell_it_apart():
    tables = fit_setups([[static_batches(APART)]], samples=40)[0].tables
    prefill, decode = tables["prefill_time"], tables["decode_time"]
    c = prefill.result.coefficients
    assert c["tok_slope_below"] == c["tok_slope_above"] == pytest.approx(60e-6, rel=0.03)
    assert c["b0"] == pytest.approx(20e-3, rel=0.2)
    assert decode.result.coefficients["alpha0"] == pytest.approx(12e-3, rel=0.03)
    assert decode.result.coefficients["alpha1"] == pytest.approx(90e-6, rel=0.2)
    assert prefill.result.mape < 1.5
    assert prefill.intervals.low[0] < 60e-6 < prefill.intervals.high[0]
    assert "one slope is fitted" in prefill.identifiability.sentences[-1]
    # Both tables together give the measured sums again.
    np.testing.assert_allclose(prefill.result.predicted, decode.result.predicted, rtol=1e-9)


def test_one_token_batches_are_prefill_alone_and_tell_it():
    """In step, and one row of the time to first token: enough for the slope, once the quadratic term is held."""
    tables = fit_setups([[static_batches([*IN_STEP[:-1], (16, 1024, 1)], noise=0.003)]], samples=20)[0].tables
    c = tables["prefill_time"].result.coefficients
    assert c["tok_slope_below"] == pytest.approx(60e-6, rel=0.05)
    assert "b2 held at 0" in tables["prefill_time"].identifiability.sentences[-1]


def test_prompts_and_outputs_in_step_are_refused_with_the_numbers():
    with pytest.raises(InputError) as error:
        fit_setups([[static_batches(IN_STEP)]], samples=20)
    for words in ("static.csv: rows 2 to 25", "do not tell prefill from decode", "may take anything from 0 to", "--base"):
        assert words in str(error.value)


@needs_data
def test_the_published_static_batches_need_their_time_to_first_token(tmp_path: Path):
    """LLM-Inference-Bench has in = out throughout: refused; with its one whole-batch TTFT (16 x 1024) the slope is that of the README."""
    ttft = tmp_path / "ttft.csv"
    head = "model,tp,gpu,phase,batch,isl,osl,time_s,framework"
    ttft.write_text(f"{head}\nmeta-llama/Meta-Llama-3-8B,1,Nvidia A100 GPU,end_to_end,16,1024,1,1.042048,vLLM\n")
    base = tmp_path / "energy.toml"
    base.write_text("[prefill_energy]\ne_pre_tok = 0.025\n[decode_energy]\ne_dec0 = 3.2\ne_dec_req = 0.09\n")
    out = tmp_path / "c.toml"
    setup = ["--model", "meta-llama/Meta-Llama-3-8B", "--tp", "1", "--gpu", "Nvidia A100 GPU", "--where", "framework=vLLM"]
    options = [*setup, "--base", str(base), "--out", str(out), "--samples", "20"]
    table = str(DATA / "anl_e2e_batch_latency.csv")
    alone = CliRunner().invoke(app, [table, *options])
    assert alone.exit_code == 2 and "do not tell prefill from decode" in alone.output
    assert not out.exists()
    done = CliRunner().invoke(app, [table, str(ttft), *options])
    assert done.exit_code == 0, done.output
    found = tomllib.loads(out.read_text())
    assert found["prefill_time"]["tok_slope_above"] == pytest.approx(63.6e-6, rel=0.05)
    assert found["decode_time"]["alpha0"] == pytest.approx(14.2e-3, rel=0.02)
    assert found["fit"]["prefill_time"]["mape_in_sample_percent"] < 1.6
