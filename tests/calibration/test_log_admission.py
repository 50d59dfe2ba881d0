"""Admissions inferred from a log that does not hold them, and the fit to such a log."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from calibration_fit.log_admission import decode_steps, filled_in, inferred_runs
from calibration_fit.log_timeline import Run
from calibration_fit.request_log import app
from jaxserve.perf.request_log import RequestLog, parse_log
from jaxserve.validate import validate
from tests.calibration.helpers import DATA, needs_data, oracle_log
from tests.request_logs import COEFFICIENTS

LIMITS = {"max_num_seqs": 48, "max_num_batched_tokens": 2048, "kv_capacity_tokens": 200_000}
LOG = DATA / "llmservingsim_vllm_requests_llama31_8b.csv"


def log_of(*rows: tuple[float, int, int, float, float]) -> RequestLog:
    """(arrival, isl, osl, ttft, tpot) a request."""
    return parse_log(["arrival_s,isl,osl,ttft_s,tpot_s", *(",".join(map(str, row)) for row in rows)], "log")


def test_an_idle_engine_admits_at_arrival():
    (run,) = inferred_runs(log_of((0.0, 100, 11, 0.2, 0.02)), np.array([0.02]))
    assert (run.start, run.end, run.slack_s) == (0.0, 0.2, 0.0)


def test_an_arrival_in_a_decode_step_waits_for_half_of_it():
    log = log_of((0.0, 100, 101, 0.2, 0.02), (1.0, 100, 11, 0.11, 0.02))
    _, run = inferred_runs(log, log.tpot_s)
    assert (run.start, run.slack_s) == pytest.approx((1.01, 0.02))


def test_an_arrival_in_a_run_of_prefill_waits_for_its_end_and_goes_on_with_it():
    log = log_of((0.0, 100, 101, 0.5, 0.02), (0.3, 100, 11, 0.4, 0.02))
    (run,) = inferred_runs(log, log.tpot_s)
    assert (run.start, run.end) == pytest.approx((0.0, 0.7))
    assert [pack.tolist() for pack in run.packs] == [[0], [1]]


def test_a_request_that_may_have_waited_for_room_is_not_told():
    """Never more than one request decoded at once, so the second may have waited for the first to leave."""
    log = log_of((0.0, 100, 101, 0.2, 0.02), (1.0, 100, 11, 1.4, 0.02))
    first, second = inferred_runs(log, log.tpot_s)
    assert first.slack_s == 0 and np.isinf(second.slack_s)
    told = filled_in(log, [first, second], np.array([9.0, 0.15]))
    assert (told[0].start, told[1].start) == pytest.approx((0.0, 2.4 - 0.15))
    late = filled_in(log, [first, second], np.array([9.0, 9.0]))
    assert late[1].start == pytest.approx(1.0)  # no earlier than its arrival


def test_decode_steps_leave_the_prefill_of_others_out():
    log = log_of((0.0, 100, 11, 0.2, 0.05))
    assert decode_steps(log, [Run((np.array([0]),), 0.0, 0.2), Run((np.array([0]),), 0.3, 0.4)])[0] == pytest.approx((0.5 - 0.1) / 10)


def test_inferred_beginnings_are_those_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = oracle_log(tmp_path / "log.csv", COEFFICIENTS, LIMITS, monkeypatch, n=300, rate=6.0)
    log = parse_log(path.read_text().splitlines(), "log")
    runs = inferred_runs(log, decode_steps(log, inferred_runs(log, log.tpot_s)))
    assert log.admit_s is not None
    told = [run for run in runs if np.isfinite(run.slack_s)]
    error = np.array([run.start - log.admit_s[run.members].min() for run in told])
    assert len(told) > 200
    assert abs(error.mean()) < 1e-3  # a decode step lasts 15 ms
    assert (np.abs(error) <= [run.slack_s / 2 + 2e-3 for run in told]).mean() > 0.98


def test_an_overloaded_log_without_waits_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    limits = LIMITS | {"max_num_seqs": 4}
    log = oracle_log(tmp_path / "log.csv", COEFFICIENTS, limits, monkeypatch, n=60, rate=40.0, waits=False)
    named = ["--setup", "m,1,G", "--energy-from", "llama-3.1-8b_tp1_a100", "--out", str(tmp_path / "c.toml")]
    done = CliRunner().invoke(app, [str(log), *named])
    assert done.exit_code == 2
    assert "there is no column queue_wait_s, and without it only" in done.output
    assert not (tmp_path / "c.toml").exists()


@pytest.mark.benchmark
@needs_data
def test_second_half_of_a_published_log_without_its_waits(tmp_path: Path):
    """vLLM mixes prefill with decoding, which no run of prefill is; the bounds are a little above what was found, untuned."""
    rows = [line.split(",") for line in LOG.read_text().splitlines()]
    bare = tmp_path / "bare.csv"
    bare.write_text("\n".join(",".join(c for name, c in zip(rows[0], row, strict=True) if name != "queue_wait_s") for row in rows))
    named = ["--setup", "l,1,RTXPRO6000", "--energy-from", "llama-3.1-8b_tp1_a100", "--out", str(tmp_path / "c.toml")]
    options = ["--where", "gpu=RTXPRO6000", "--share", "0.5", "--max-num-batched-tokens", "2048", "--samples", "20"]
    done = CliRunner().invoke(app, [str(bare), *named, *options])
    assert done.exit_code == 0, done.output
    result = validate(LOG, str(tmp_path / "c.toml"), where=["gpu=RTXPRO6000"], max_num_batched_tokens=2048, count_from_s=13.79)
    errors = result.errors["all"]
    assert errors["ttft_s"]["mape_percent"] < 3.0
    assert errors["tpot_s"]["mape_percent"] < 7.0
    assert errors["e2e_s"]["mape_percent"] < 4.0
