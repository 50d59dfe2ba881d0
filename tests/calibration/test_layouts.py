"""Published tables are read as their authors wrote them, and what cannot be used of them is said."""

import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from calibration_fit.cli import app
from calibration_fit.columns import LAYOUTS
from calibration_fit.layouts import find_layout, read_as
from calibration_fit.measurements import in_memory, read_measurements
from jaxserve.errors import InputError
from jaxserve.perf.coefficients import load_coefficients
from tests.calibration.helpers import DATA, needs_data

ANL = "hardware,num_gpu,framework,model,in_out_len,batch,latency_s,throughput_tok_s"
V2 = "model,gpu,tp,pp,energy_per_req_j,avg_tpot_s,out_tok_per_s,avg_output_tokens,avg_batch,max_batch,task"
V3 = "model,task,precision,avg_batch_size,avg_output_len,energy_per_token_joules,gpu_model,num_gpus,output_throughput_tokens_per_sec,tp"


def written(tmp_path: Path, head: str, *lines: str) -> Path:
    path = tmp_path / "table.csv"
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


def test_static_batches_of_in_and_out_lengths(tmp_path: Path):
    path = written(tmp_path, ANL, "Nvidia A100 GPU,2,vLLM,m/x,128,16,2.5,1638", "Nvidia A100 GPU,2,vLLM,m/x,256,16,5.1,1606")
    (m,) = read_measurements(path)
    assert (m.setup.model, m.setup.tp, m.setup.gpu, m.phase) == ("m/x", 2, "Nvidia A100 GPU", "end_to_end")
    assert m.isl.tolist() == m.osl.tolist() == [128, 256]
    assert m.time_s.tolist() == [2.5, 5.1]
    assert np.isnan(m.energy_j).all()
    assert m.row.tolist() == [2, 3]


def test_energy_of_a_batch_is_of_all_gpus(tmp_path: Path):
    head = f"{ANL},avg_power_w,energy_per_batch_j"
    (m,) = read_measurements(written(tmp_path, head, "Nvidia A100 GPU,1,vLLM,m,1024,16,20,1638,250,5000"))
    assert m.energy_j.tolist() == [5000]


def test_run_averages_become_decode_steps(tmp_path: Path):
    """By hand: 4000 J a request at 2 requests a second (200 tokens a second, 100 a request) are 8000 W, over a step of 0.1 s 800 J."""
    path = written(tmp_path, V2, "m,G,8,1,4000,0.1,200,100,20,32,chat")
    (m,) = read_measurements(path, isl=50.0)
    assert (m.setup.tp, m.phase, m.batch[0], m.time_s[0]) == (8, "decode", 20, 0.1)
    assert m.energy_j[0] == pytest.approx(800)
    assert m.cached_tokens[0] == pytest.approx(20 * (50 + 50))
    path = written(tmp_path, V3, "m,chat,bfloat16,8,100,0.5,H100,2,400,1")
    (m,) = read_measurements(path, isl=50.0)
    assert (m.setup.tp, m.setup.gpu, m.time_s[0], m.energy_j[0]) == (2, "H100", 8 / 400, 0.5 * 8)
    assert m.source.note == "run averages, prefill inside"


@pytest.mark.parametrize(
    ("head", "lines", "words"),
    [
        (
            ANL,
            ["A,1,vLLM,m,128,16,2.5,1", "A,1,TRT,m,256,16,5,1"],
            ("row 2 on", "several values of framework (vLLM, TRT)"),
        ),
        (ANL, ["A,1,vLLM,m,128,16,2.5,1", "A,1,vLLM,m,256,16,fast,1"], ("row 3", "latency_s is fast", "number above 0")),
        (ANL, ["A,1,vLLM,m,128,16,,1"], ("row 2", "latency_s is empty")),
        (ANL, ["A,1,vLLM,m,128,-16,2,1"], ("row 2", "batch is -16")),
        (ANL, ["A,1,vLLM,m,128,16,2500,1"], ("row 2 on", "milliseconds")),
        (ANL + ",colour", ["A,1,vLLM,m,128,16,2,1,red"], ("unknown column 'colour'", "in_out_len")),
        (V2, ["m,G,1,2,100,0.1,200,100,20,32,chat"], ("row 2: pp is 2", "--where pp=1")),
        (V3, ["m,chat,fp8,8,100,0.5,H100,1,400,1", "m,chat,bf16,8,100,0.5,H100,1,400,1"], ("several values of precision (fp8, bf16)",)),
    ],
)
def test_what_cannot_be_used_is_said(tmp_path: Path, head: str, lines: list[str], words: tuple[str, ...]):
    with pytest.raises(InputError) as error:
        read_measurements(written(tmp_path, head, *lines), isl=50.0)
    for word in ("table.csv", *words):
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_a_prompt_length_that_is_not_there_is_asked_for(tmp_path: Path):
    with pytest.raises(InputError, match="does not hold the prompt length: give it with --isl"):
        read_measurements(written(tmp_path, V2, "m,G,8,1,4000,0.1,200,100,20,32,chat"))


def test_other_setups_of_the_table_do_not_matter(tmp_path: Path):
    path = written(tmp_path, ANL, "A,1,vLLM,m,128,16,2.5,1", "B,1,vLLM,m,128,16,nonsense,1", "B,1,TRT,m,128,16,2,1")
    (m,) = read_measurements(path, setup={"model": "m", "tp": "1", "gpu": "A"})
    assert len(m) == 1
    with pytest.raises(InputError, match="no row of m, 2, A; it holds m TP1 A, m TP1 B"):
        read_measurements(path, setup={"model": "m", "tp": "2", "gpu": "A"})


def test_batches_that_do_not_fit_are_told_where_model_and_gpu_are_known(tmp_path: Path):
    lines = [f"Nvidia A100 GPU,1,vLLM,{{}},{n},64,9,1" for n in (1024, 2048)]
    known = written(tmp_path, ANL, *(line.format("meta-llama/Meta-Llama-3-8B") for line in lines))
    assert in_memory(read_measurements(known)[0]).tolist() == [True, False]
    other = written(tmp_path, ANL, *(line.format("m") for line in lines))
    assert in_memory(read_measurements(other)[0]).tolist() == [True, True]


@needs_data
def test_the_published_files_are_known_by_their_columns():
    for name, layout in (("anl_e2e_batch_latency", 0), ("anl_power", 0), ("mlenergy_v2_llm", 1), ("mlenergy_v3_llm", 2)):
        columns = pd.read_csv(DATA / f"{name}.csv", nrows=1).columns
        assert find_layout(columns) is LAYOUTS[layout]
        assert read_as(LAYOUTS[layout], columns) == set(columns)
    table = pd.read_csv(DATA / "mlenergy_v2_llm.csv")
    mine = table[(table.model == "google/gemma-2-9b-it") & (table.gpu == "NVIDIA H100 80GB HBM3")]
    setup = {"model": "google/gemma-2-9b-it", "gpu": "NVIDIA H100 80GB HBM3"}
    (m,) = read_measurements(DATA / "mlenergy_v2_llm.csv", setup=setup, isl=85.0)
    np.testing.assert_allclose(m.energy_j, mine.step_energy_j, rtol=1e-4)


@needs_data
def test_the_command_takes_the_published_table_to_the_shipped_decode_times(tmp_path: Path):
    """The same rows, form and prefill as the shipped file: the same coefficients, and the batch that did not fit is named."""
    setup = ["--model", "meta-llama/Meta-Llama-3-8B", "--tp", "1", "--gpu", "Nvidia A100 GPU", "--where", "framework=vLLM"]
    out = tmp_path / "c.toml"
    options = ["--base", "llama-3.1-8b_tp1_a100", "--samples", "20", "--out", str(out)]
    done = CliRunner().invoke(app, [str(DATA / "anl_e2e_batch_latency.csv"), *setup, *options])
    assert done.exit_code == 0, done.output
    assert "rows 385: their cache does not fit beside the weights, left out" in done.output
    shipped = load_coefficients("llama-3.1-8b_tp1_a100").decode_time.model_dump()
    for name, value in tomllib.loads(out.read_text())["decode_time"].items():
        assert value == shipped[name] if isinstance(value, str) else value == pytest.approx(shipped[name], rel=1e-3, abs=1e-12)
