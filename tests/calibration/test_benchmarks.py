"""Benchmark results of vLLM and SGLang as measurements, against hand calculation and a server of known steps."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from calibration_fit.benchmark_json import from_results, read_results
from calibration_fit.cli import app
from calibration_fit.measurements import Measurements
from calibration_fit.request_log import app as log_app
from jaxserve.errors import InputError
from jaxserve.perf.coefficients import load_coefficients
from jaxserve.perf.request_log import read_request_log
from tests.benchmark_files import as_csv, served, small, written
from tests.request_logs import COEFFICIENTS

SETUP = {"model": "m", "tp": "1", "gpu": "G"}
LIMITS = {"max_num_seqs": 48, "max_num_batched_tokens": 2048, "kv_capacity_tokens": 200_000}
BASE = ["--base", "llama-3.1-8b_tp1_a100", "--tp", "1", "--gpu", "G", "--samples", "20"]


def measured(path: Path, setup: dict[str, str] | None = None) -> list[Measurements]:
    return from_results(path, read_results(path), setup or SETUP, iter([]))


def run(tmp_path: Path, *arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments), "--out", str(tmp_path / "c.toml")])


def short_and_long(c: int) -> dict[str, Any]:
    """Half the answers of two tokens, 200 ms apart, half of 200 tokens at 15 + 0.2 c ms."""
    n, step = 10 * c, 0.015 + 0.0002 * c
    itls = [[0.2]] * n + [[step] * 199] * n
    total = n * (0.2 + 199 * step)
    return {
        "model_id": "m", "duration": total / c, "completed": 2 * n, "total_input_tokens": 1000 * n, "total_output_tokens": 202 * n,
        "input_lens": [500] * 2 * n, "output_lens": [2] * n + [200] * n, "itls": itls,
        "mean_tpot_ms": 1e3 * (0.2 + step) / 2, "mean_itl_ms": 1e3 * total / (200 * n),
    }  # fmt: skip


def test_a_step_is_a_mean_over_tokens_with_or_without_detail(tmp_path: Path):
    """At c = 8 a step lasts 16.6 ms and the stalls make it (0.2 + 199 * 0.0166) / 200 = 17.517 ms; the mean TPOT is 108.3 ms."""
    result = short_and_long(8)
    means = {k: v for k, v in result.items() if not isinstance(v, list)}
    detailed, reported = (measured(written(tmp_path / "r.json", r))[0] for r in (result, means))
    for m in (detailed, reported):
        assert m.time_s == pytest.approx([0.017517])
        assert m.batch == pytest.approx([8.0])
        assert m.source.note == "mean over the run, stalls for the prefill of others inside"
    # Contexts by the steps that meet them: 1 at 501 and 199 at 501 to 699.
    assert detailed.length == pytest.approx([np.round((501 + 199 * 600) / 200)])
    (tpot,) = measured(written(tmp_path / "r.json", {k: v for k, v in means.items() if k != "mean_itl_ms"}))
    assert tpot.time_s == pytest.approx([0.1083])
    assert "weighs short answers like long ones (TPOT)" in tpot.source.note


def test_steps_by_batch_are_the_server_s_own(tmp_path: Path):
    """Every gap while nobody waited for a first token is one decode step: its mean over a range of batches is that of the equation."""
    result = served(COEFFICIENTS, n=150, rate=6.0, limits=LIMITS)
    (m,) = measured(written(tmp_path / "r.json", result, indent=1))
    assert len(m) >= 6 and m.batch.max() > 2 * m.batch.min()
    equation = COEFFICIENTS.decode_time_model()
    np.testing.assert_allclose(m.time_s, np.asarray(equation(m.batch, m.cached_tokens)), rtol=2e-3)
    assert result["mean_itl_ms"] / 1e3 > 1.3 * m.time_s.mean()  # what the stalls add to a mean over the run


def test_failed_requests_are_no_tokens_and_are_told(tmp_path: Path):
    result = small(output_lens=[2, 0, 3], ttfts=[0.2, 0.0, 0.25], itls=[[0.02], [], [0.03, 0.05]])
    (m,) = measured(written(tmp_path / "r.json", result))
    assert m.time_s == pytest.approx([0.1 / 3])  # three gaps
    assert "1 of 3 requests failed" in m.source.note


def test_tokens_that_came_together_share_their_gap(tmp_path: Path):
    """One gap for the four tokens after the first: a token takes a quarter of it."""
    (m,) = measured(written(tmp_path / "r.json", small(output_lens=[5, 1, 1], itls=[[0.08], [], []])))
    assert m.time_s == pytest.approx([0.02])


def test_two_files_and_appended_results_fit_and_what_was_borrowed_is_told(tmp_path: Path):
    results = [served(COEFFICIENTS, n=100, rate=rate, limits=LIMITS, seed=i) for i, rate in enumerate((3.0, 8.0))]
    one, two = (written(tmp_path / f"{i}.json", r) for i, r in enumerate(results))
    done = run(tmp_path, one, two, *BASE, "--model", "m", "--form", "study")
    assert done.exit_code == 0, done.output
    fitted = load_coefficients(str(tmp_path / "c.toml")).decode_time_model()
    for batch, context in ((2.0, 700.0), (8.0, 700.0), (16.0, 700.0)):
        truth = float(COEFFICIENTS.decode_time_model()(batch, batch * context))
        assert float(fitted(batch, batch * context)) == pytest.approx(truth, rel=0.03)
    assert "prefill_time: not measured here, taken from llama-3.1-8b_tp1_a100" in done.output
    assert "decode_energy: not measured here" in done.output and "decode_time: not measured" not in done.output
    assert f"{one}, {two}: gaps between tokens while no request waited" in done.output
    assert f"{one}: times to first token are not used here: python -m calibration_fit.request_log" in done.output
    alone = tomllib.loads((tmp_path / "c.toml").read_text())["decode_time"]
    appended = run(tmp_path, written(tmp_path / "both.jsonl", *results), *BASE, "--model", "m", "--form", "study")
    assert appended.exit_code == 0, appended.output
    assert tomllib.loads((tmp_path / "c.toml").read_text())["decode_time"] == alone


def test_sglang_s_lines_are_results(tmp_path: Path):
    """SGLang names no model, writes request_rate Infinity, and a line a run."""
    runs = [{"backend": "sglang", "request_rate": float("inf"), **short_and_long(c)} for c in (2, 4, 8, 16, 24, 32)]
    for one in runs:
        one.pop("model_id")
    path = written(tmp_path / "sglang.jsonl", *runs)
    assert [m.row.tolist() for m in measured(path)] == [[line] for line in range(1, 7)]
    done = run(tmp_path, path, *BASE, "--model", "m", "--form", "study")
    assert done.exit_code == 0, done.output
    fitted = load_coefficients(str(tmp_path / "c.toml")).decode_time_model()
    assert float(fitted(8.0, 8.0 * 599.5)) == pytest.approx(0.017517, rel=1e-3)
    assert "does not say its model: give --model" in run(tmp_path, path, *BASE).output


def test_latencies_of_several_batch_sizes_in_one_call(tmp_path: Path):
    """Five static batches of 512 + 128 tokens: prefill is the base's, and a decode step lasts 10 + 0.2 B ms."""
    prefill = load_coefficients("llama-3.1-8b_tp1_a100").prefill_time_model()
    sizes, paths = (1, 2, 4, 8, 16), []
    for b in sizes:
        latency = float(prefill(b * 512.0, float(b), b * 512.0**2)) + 127 * (0.010 + 0.0002 * b)
        paths.append(written(tmp_path / f"b{b}.json", {"avg_latency": latency, "latencies": [latency], "percentiles": {"50": latency}}))
    batches = [option for b in sizes for option in ("--batch", str(b))]
    done = run(tmp_path, *paths, *batches, "--isl", "512", "--osl", "128", *BASE, "--model", "m", "--form", "study")
    assert done.exit_code == 0, done.output
    found = load_coefficients(str(tmp_path / "c.toml")).decode_time_model()
    for b in (1.0, 16.0):
        assert float(found(b, b * 576)) == pytest.approx(0.010 + 0.0002 * b, rel=0.01)
    few = run(tmp_path, *paths, "--batch", "1", "--batch", "2", "--isl", "512", "--osl", "128", *BASE, "--model", "m")
    assert few.exit_code == 2 and "--batch is given 2 times for 5 results" in few.output
    none = run(tmp_path, paths[0], *BASE, "--model", "m")
    assert none.exit_code == 2 and "--batch is missing" in none.output and "give --batch, --isl and --osl" in none.output


def test_the_fit_of_request_logs_takes_a_benchmark_as_the_same_requests_in_csv(tmp_path: Path):
    """Both commands that fit to logs and replay them read with one function; here that this one does, up to its first check."""
    result = served(COEFFICIENTS, n=60, rate=4.0, limits=LIMITS)
    ours, csv = read_request_log(json.dumps(result), "r"), read_request_log(as_csv(result), "r")
    for name in ("arrival_s", "isl", "osl", "ttft_s", "tpot_s"):
        np.testing.assert_allclose(getattr(ours, name), getattr(csv, name), rtol=1e-12)
    path = written(tmp_path / "r.json", result)
    named = [str(path), "--setup", "m,1,G", "--energy-from", "llama-3.1-8b_tp1_a100", "--out", str(tmp_path / "c.toml")]
    done = CliRunner().invoke(log_app, [*named, "--share", "0.1"])
    assert done.exit_code == 2 and f"{path}: 6 requests are too few to fit coefficients to" in done.output
    assert "--invalid-rows 'x': must be error or drop" in CliRunner().invoke(log_app, [*named, "--invalid-rows", "x"]).output


BAD = {
    "cut short": ("{", "row 1: not a readable JSON file"),
    "a list": ("[1]", "row 1: holds JSON that is not one object"),
    "something else": ('{"x": 1}', "row 1: not a result of vLLM's bench latency"),
    "no duration": (json.dumps({"mean_tpot_ms": 15, "duration": 0}), "duration is 0; it must be a number above 0"),
    "a mean of nothing": (json.dumps(small(input_lens=None, mean_itl_ms=0.0)), "mean_itl_ms is 0.0; it must be a number above 0"),
    "no gap": (json.dumps(small(output_lens=[1, 1, 1], itls=[[], [], []])), "no request made a second token"),
    "milliseconds for seconds": (json.dumps(small(itls=[[20.0], [], [30.0, 50.0]])), "are the times in milliseconds"),
}


@pytest.mark.parametrize("case", BAD)
def test_other_json_is_refused(tmp_path: Path, case: str):
    text, words = BAD[case]
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InputError) as error:
        measured(tmp_path / "x.json")
    assert words in str(error.value) and "x.json" in str(error.value)


def test_at_the_command_line_a_bad_result_is_one_sentence(tmp_path: Path):
    done = run(tmp_path, written(tmp_path / "v.json", small(itls=[[0.02], [], [float("nan")]])), *BASE)
    assert done.exit_code == 2 and "itls must hold a list of times for each request" in done.output
    assert "Traceback" not in done.output and done.output.count("\n") == 1
    assert not (tmp_path / "c.toml").exists()
