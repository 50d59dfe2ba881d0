"""Intervals and identifiability of fits to request logs: they hold the truth, know what errs together, and are written down."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from calibration_fit.block_bootstrap import FEWEST_BLOCKS, MOST_BLOCKS, STAYS_PER_BLOCK, bootstrap_blocks, drawn_counts, time_blocks
from calibration_fit.fit import fit_all
from calibration_fit.forms import DECODE_TIME, PREFILL_TIME
from calibration_fit.log_fit import short_log
from calibration_fit.request_log import app
from calibration_fit.rows import make_rows
from calibration_fit.uncertainty import identify
from jaxserve.perf.coefficients import Coefficients, load_coefficients
from tests.calibration.helpers import PREFILL, oracle_log, synthetic
from tests.request_logs import COEFFICIENTS

LIMITS = {"max_num_seqs": 48, "max_num_batched_tokens": 2048, "kv_capacity_tokens": 200_000}
PLAIN: Coefficients = COEFFICIENTS.model_copy(
    update={"decode_time": COEFFICIENTS.decode_time.model_copy(update={"alpha2": 0.0, "beta0": 0.0})}
)
"""Coefficients that the smaller decode form holds: what it leaves out would bias the others, of which an interval does not speak."""


def test_blocks_are_equal_and_follow_time():
    at = np.array([5.0, 1.0, 3.0, 2.0, 4.0, 0.0] * 20)
    block = time_blocks(at, stay_s=0.5 / STAYS_PER_BLOCK)
    assert block.max() + 1 == 10
    assert set(np.bincount(block)) == {12}
    assert (np.diff(block[np.argsort(at, kind="stable")]) >= 0).all()
    assert time_blocks(at, stay_s=100.0).max() + 1 == FEWEST_BLOCKS
    assert time_blocks(at, stay_s=1e-3).max() + 1 == MOST_BLOCKS


def test_blocks_are_drawn_whole():
    block = np.array([0, 0, 1, 2, 2, 2])
    counts = drawn_counts(block, 50)
    assert (counts[:, 0] == counts[:, 1]).all()
    assert (counts[:, [0, 2, 3]].sum(axis=1) == 3).all()


def test_prefill_intervals_hold_the_truth_at_about_their_rate():
    rows = [make_rows([synthetic("prefill", 0.03, seed)], PREFILL_TIME) for seed in range(4)]
    block = np.random.default_rng(0).permutation(len(rows[0])) % 20
    truth = np.array([float(getattr(PREFILL, k)) for k in PREFILL_TIME.coefficients])
    found = [bootstrap_blocks(result, block, 40) for result in fit_all(rows, PREFILL_TIME)]
    # 24 intervals, correlated within a table: two standard errors are about 14 %.
    assert np.mean([(b.low <= truth) & (truth <= b.high) for b in found]) >= 0.8


def test_what_errs_together_widens_the_standard_errors():
    """Errors of 5 % shared by all rows of a block: rows taken for independent would look three times as certain as they are."""
    m = synthetic("decode")
    block = np.arange(len(m)) % 8
    m.time_s[:] *= 1 + 0.05 * np.random.default_rng(3).standard_normal(8)[block]
    (result,) = fit_all([make_rows([m], DECODE_TIME)], DECODE_TIME)
    alone, together = identify(result), identify(result, block)
    assert together.standard_error[0] > 1.3 * alone.standard_error[0]
    np.testing.assert_allclose(identify(result, np.arange(len(m))).standard_error, alone.standard_error)


@pytest.mark.slow  # logs with waits are fitted in test_request_log
def test_a_log_without_waits_is_fitted_and_its_intervals_hold_the_truth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Steps scatter by 3 %; over 14 logs with waits 98 % of the intervals of decode held the truth when this was written."""
    log = oracle_log(tmp_path / "log.csv", PLAIN, LIMITS, monkeypatch, n=128, rate=6.0, noise=0.03, waits=False)
    options = ["--setup", "m,1,G", "--energy-from", "llama-3.1-8b_tp1_a100", "--max-num-batched-tokens", "2048", "--samples", "20"]
    done = CliRunner().invoke(app, [str(log), *options, "--out", str(tmp_path / "c.toml"), "--report", str(tmp_path / "report")])
    assert done.exit_code == 0, done.output
    assert "no queue_wait_s: prefill rests on the" in done.output
    found = load_coefficients(str(tmp_path / "c.toml"))
    n, b = np.array([300.0, 600.0, 1100.0]), np.array([2.0, 8.0, 16.0])
    mine, known = (np.array([c.prefill_time_model()(n, 1.0, n * n), c.decode_time_model()(b, 700 * b)]) for c in (found, PLAIN))
    np.testing.assert_allclose(mine, known, rtol=0.08)
    fit, truth = found.fit, PLAIN.decode_time.model_dump()
    assert set(fit["decode_time"]["interval"]) == {"alpha0", "alpha1", "beta1"}
    # One of three 95 % intervals may miss.
    assert sum(low <= truth[name] <= high for name, (low, high) in fit["decode_time"]["interval"].items()) >= 2
    assert set(fit["prefill_time"]["interval"]) == set(PREFILL_TIME.coefficients)
    for table in ("prefill_time", "decode_time"):
        assert fit[table]["interval_level"] == 0.95
        assert fit[table]["mape_held_out_by"].keys() == {"time"}
        for sentence in fit[table]["identifiability"]:
            assert sentence in done.output
    page = (tmp_path / "report" / "report.md").read_text()
    assert "| alpha0 |" in page and "Valid range" in page
    assert len(list((tmp_path / "report").glob("*.png"))) == 3


def test_a_log_shorter_than_its_requests_says_that_its_intervals_are_too_narrow():
    (sentence,) = short_log("decode_time", np.array([0.0, 3.0]), stay_s=2.0)
    assert "spans only 1.5 stays of a request, which share their errors: the intervals are too narrow" in sentence
    assert short_log("decode_time", np.array([0.0, 30.0]), stay_s=2.0) == []
