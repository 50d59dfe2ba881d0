"""Faults that were found once: tables, logs, options and JSON that ended in a traceback, in a wrong fit, or in silence."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from calibration_fit.block_bootstrap import block_interval, time_blocks
from calibration_fit.cli import app
from calibration_fit.fit import fit_all
from calibration_fit.forms import DECODE_TIME
from calibration_fit.measurements import read_measurements
from calibration_fit.request_log import app as log_app
from calibration_fit.rows import make_rows
from calibration_fit.transforms import Bound
from calibration_fit.uncertainty import bootstrap, identify
from jaxserve.errors import InputError
from tests.calibration.helpers import synthetic

HEAD = "model,tp,gpu,phase,batch,isl,osl,seq_len,tokens,sum_sq,mean_ctx,lengths,time_s,energy_j,avg_power_w_per_gpu"
COLUMNS = HEAD.split(",")
STEPS = [
    {"phase": "decode", "batch": b, "mean_ctx": c, "time_s": 0.01 + 1e-4 * b + 1e-7 * b * c}
    for b in (1, 2, 4, 8, 16, 32)
    for c in (200, 900)
]


def table(path: Path, *rows: dict[str, object], head: str = HEAD) -> Path:
    """A CSV of one setup."""
    lines = [",".join(str({"model": "M", "tp": 1, "gpu": "G", **row}.get(column, "")) for column in COLUMNS) for row in rows]
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


def refused(path: Path, *words: str) -> None:
    with pytest.raises(InputError) as error:
        read_measurements(path)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"phase": "decode", "batch": 1, "mean_ctx": 0, "time_s": 0.01}, "mean_ctx is 0; it must be a number above 0"),
        ({"phase": "decode", "batch": 1, "mean_ctx": -0.5, "time_s": 0.01}, "mean_ctx is -0.5"),
        ({"phase": "prefill", "batch": 64, "tokens": 10, "sum_sq": 100, "time_s": 0.01}, "tokens is 10 for 64 prompts"),
        (
            {"phase": "prefill", "batch": 1, "lengths": "1e200", "time_s": 0.01},
            "lengths is '1e200'; it must be prompt lengths above 0 and below",
        ),
        ({"phase": "end_to_end", "batch": 0.5, "isl": 128, "osl": 16, "time_s": 0.5}, "batch of a static batch is 0.5, no whole number"),
        ({"phase": "end_to_end", "batch": 2, "isl": 128, "osl": 16.5, "time_s": 0.5}, "osl of a static batch is 16.5, no whole number"),
    ],
)
def test_impossible_numbers(tmp_path: Path, row: dict[str, object], words: str):
    refused(table(tmp_path / "t.csv", row), "t.csv: row 2: ", words)


def test_power_beside_energy_counts(tmp_path: Path):
    rows = [{**step, **({"energy_j": 3.0} if i % 2 else {"avg_power_w_per_gpu": 200.0})} for i, step in enumerate(STEPS)]
    (m,) = read_measurements(table(tmp_path / "t.csv", *rows))
    np.testing.assert_allclose(m.energy_j[1::2], 3.0)
    np.testing.assert_allclose(m.energy_j[::2], 200.0 * m.time_s[::2])


def test_lines_that_do_not_fit_their_header(tmp_path: Path):
    path = table(tmp_path / "t.csv", *({**step, "avg_power_w_per_gpu": 200.0} for step in STEPS))
    lines = path.read_text().splitlines()
    plain = read_measurements(path)[0]
    path.write_text("\n".join(line + "," for line in lines) + "\n\n")  # commas at all ends, an empty line
    np.testing.assert_array_equal(read_measurements(path)[0].time_s, plain.time_s)
    path.write_text("\n".join([lines[0], "7," + lines[1]]))
    refused(path, "row 2: holds 16 fields under 15 columns")
    path.write_text("\n".join([lines[0], lines[1].rsplit(",", 2)[0]]))
    refused(path, "row 2: holds 13 fields under 15 columns")
    path.write_text("\n".join([lines[0].replace("isl", "batch "), *lines[1:]]))
    refused(path, "row 1: column 'batch' is there twice")
    path.write_text("\n\n")
    refused(path, "is empty")


def test_prefill_alone_is_not_taken_for_milliseconds(tmp_path: Path):
    """32 prompts of 2048 tokens at 60 us a token take 4 s, and that for one output token each."""
    rows = [{"phase": "end_to_end", "batch": b, "isl": 2048, "osl": 1, "time_s": b * 2048 * 60e-6} for b in (16, 32, 64)]
    assert len(read_measurements(table(tmp_path / "t.csv", *rows))[0]) == 3
    wrong = [{**row, "time_s": 1e3 * float(str(row["time_s"]))} for row in rows]
    refused(table(tmp_path / "t.csv", *wrong), "milliseconds")


def test_replicas_are_not_one_engine(tmp_path: Path):
    head = (
        "model,task,precision,avg_batch_size,output_throughput_tokens_per_sec,energy_per_token_joules,gpu_model,num_gpus,avg_output_len,dp"
    )
    path = tmp_path / "v3.csv"
    path.write_text(f"{head}\nm,chat,bf16,8,100,0.5,H100,8,400,8\n")
    with pytest.raises(InputError, match=r"row 2: dp is 8, which is not modelled here: keep --where dp=1"):
        read_measurements(path, isl=50.0)


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("[prefill_time]\ntok_slope_below = 1e-5\n", "prefill_time."),
        ("[prefill_energy]\ne_pre_tok = 0.02\nnote = 'x'\n", "prefill_energy.note"),
        ("[power]\nidle_w_per_gpu = 'sixty'\nhost_w = 1.0\n", "power.idle_w_per_gpu"),
        ("decode_energy = 'x'\n", "decode_energy"),
    ],
)
def test_a_base_with_a_wrong_table(tmp_path: Path, base: str, words: str):
    (tmp_path / "base.toml").write_text(base)
    result = run(tmp_path, table(tmp_path / "t.csv", *STEPS), "--base", tmp_path / "base.toml")
    assert result.exit_code == 2 and words in result.output and not (tmp_path / "c.toml").exists()


def run(folder: Path, *arguments: object):
    return CliRunner().invoke(app, ["--out", str(folder / "c.toml"), "--samples", "20", *map(str, arguments)])


def test_a_base_without_what_has_defaults(tmp_path: Path):
    (tmp_path / "base.toml").write_text(
        "[prefill_time]\ntok_slope_below = 1e-5\ntok_slope_above = 2e-5\ntok_knee = 100.0\nb0 = 0.01\n"
        "[prefill_energy]\ne_pre_tok = 0.02\n[decode_energy]\ne_dec0 = 1.0\ne_dec_req = 0.1\n"
    )
    result = run(tmp_path, table(tmp_path / "t.csv", *STEPS), "--base", tmp_path / "base.toml", "--form", "study", "--max-w", 400)
    assert result.exit_code == 0, result.output


def test_nothing_that_fits_in_memory(tmp_path: Path):
    rows = [
        {"model": "Llama-3.1-8B", "gpu": "A100-SXM4-40GB", "phase": "end_to_end", "batch": b, "isl": 8192, "osl": 8192, "time_s": 160.0}
        for b in (64, 65)
    ]
    result = run(tmp_path, table(tmp_path / "t.csv", *rows), "--base", "llama-3.1-8b_tp1_a100")
    assert result.exit_code == 2
    assert "rows 2, 3: their cache does not fit beside the weights, left out: nothing is left to fit" in result.output


@pytest.mark.slow  # fits twice for one sentence
def test_static_batches_of_one_token_beside_prefill_steps_are_told_of(tmp_path: Path):
    prefill = [{"phase": "prefill", "batch": 1, "seq_len": n, "time_s": 0.005 + 5e-5 * n + 1e-9 * n * n} for n in range(64, 1400, 128)]
    alone = [{"phase": "end_to_end", "batch": b, "isl": 512, "osl": 1, "time_s": 0.03 * b} for b in (1, 2)]
    result = run(tmp_path, table(tmp_path / "t.csv", *prefill, *alone), "--base", "llama-3.1-8b_tp1_a100")
    assert result.exit_code == 0, result.output
    assert "rows 13, 14: osl = 1 holds no decode step, left out" in result.output


@pytest.mark.parametrize("where", ["folder", "missing", "report"])
def test_where_nothing_can_be_written(tmp_path: Path, where: str):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    out = {"folder": tmp_path / "folder", "missing": tmp_path / "none" / "c.toml", "report": tmp_path / "c.toml"}[where]
    report = ["--report", str(tmp_path / "file")] if where == "report" else []
    before = sorted(tmp_path.rglob("*"))
    result = CliRunner().invoke(app, [str(tmp_path / "t.csv"), "--out", str(out), *report])
    words = {"folder": "is a folder", "missing": "there is no folder", "report": "cannot be the folder of the report"}[where]
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "file").read_text() == "kept"


def log(path: Path, rows: list[tuple[float, ...]]) -> Path:
    path.write_text("arrival_s,isl,osl,ttft_s,tpot_s,queue_wait_s\n" + "\n".join(",".join(map(str, row)) for row in rows))
    return path


def run_log(path: Path, *options: str):
    named = ["--setup", "m,1,G", "--energy-from", "llama-3.1-8b_tp1_a100", "--out", str(path.with_suffix(".toml")), "--samples", "20"]
    return CliRunner().invoke(log_app, [str(path), *named, *options])


def test_a_log_whose_prefill_never_pauses(tmp_path: Path):
    rng = np.random.default_rng(0)
    rows = [(0.1 * i, int(rng.integers(200, 1200)), int(rng.integers(40, 140)), 0.6, 0.02, 0.01) for i in range(60)]
    result = run_log(log(tmp_path / "log.csv", rows), "--share", "0.5")
    assert result.exit_code == 2 and "no stretch of prefill lies wholly within the requests to fit to" in result.output


@pytest.mark.slow  # a whole fit for one line
def test_a_log_in_which_all_arrive_at_once_holds_no_nan(tmp_path: Path):
    rng, wait, rows = np.random.default_rng(0), 0.0, []
    for _ in range(60):
        isl = int(rng.integers(200, 1200))
        first = wait + 0.005 + 5e-5 * isl
        rows.append((0.0, isl, int(rng.integers(40, 140)), round(first, 6), 0.02, round(wait, 6)))
        wait = first
    result = run_log(log(tmp_path / "log.csv", rows))
    assert result.exit_code == 0, result.output
    assert "nan" not in (tmp_path / "log.toml").read_text() and "nan" not in result.output


def test_no_more_blocks_than_rows():
    assert set(time_blocks(np.linspace(0.0, 1000.0, 20), 1.0)) == set(range(20))


def test_an_interval_of_what_cannot_be_negative_is_not():
    redrawn = np.random.default_rng(0).uniform(0.0, 0.1, (200, 3))
    found = block_interval((Bound.NONNEGATIVE,) * 3, np.full(3, 0.3), np.ones(3), redrawn, 8)
    assert (found.low >= 0).all() and (found.high >= 0).all()


def test_held_coefficients_cost_no_degree_of_freedom():
    """The widening for few rows counts what is fitted: with three terms held, that of 9 rows and 3 coefficients, 1 + 4.84 / 24."""
    m = synthetic("decode", 0.02).select(np.arange(9) * 5)
    rows = make_rows([m], DECODE_TIME)
    (result,) = fit_all([rows], DECODE_TIME, fixed=[{"alpha2": 0.0, "beta0": 0.0, "beta2": 0.0}])
    spread = bootstrap([result], 200)[0]
    error = dict(zip(identify(result).names, identify(result).standard_error, strict=True))
    alpha0 = DECODE_TIME.coefficients.index("alpha0")
    half = (spread.high[alpha0] - spread.low[alpha0]) / 2
    assert half < 4.0 * error["alpha0"]  # with six counted it was over five
