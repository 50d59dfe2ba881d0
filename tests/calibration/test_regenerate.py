"""Regenerating the shipped files, and the times promised (opt-in: `pytest -m benchmark tests/calibration`; about a minute)."""

import time
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from calibration_fit.fit import fit_all
from calibration_fit.forms import DECODE_TIME, PREFILL_TIME, TWO_PIECE_DECODE_TIME
from calibration_fit.published import A100, composed
from calibration_fit.regenerate import app
from calibration_fit.rows import make_rows
from calibration_fit.uncertainty import bootstrap
from jaxserve.perf.coefficients import parse_coefficients
from tests.calibration.helpers import DATA, needs_data

pytestmark = [pytest.mark.benchmark, needs_data]
FIT_S, BOOTSTRAP_S = 10.0, 60.0
"""Promised for all five A100 setups on two cores, after compilation (issue 3)."""


def test_five_setups_are_refitted_and_bootstrapped_in_time():
    fitted = resampled = 0.0
    for form in (PREFILL_TIME, DECODE_TIME, TWO_PIECE_DECODE_TIME):
        rows = [make_rows([m], form) for m in composed(DATA, A100) if m.phase == form.table.split("_")[0]]
        fit_all(rows, form)
        begin = time.perf_counter()
        results = fit_all(rows, form)
        middle = time.perf_counter()
        bootstrap(results, 200)
        fitted, resampled = fitted + middle - begin, resampled + time.perf_counter() - middle
    assert fitted < FIT_S
    assert resampled < BOOTSTRAP_S


def test_every_shipped_file_is_regenerated(tmp_path: Path):
    result = CliRunner().invoke(app, [str(DATA), "--out", str(tmp_path), "--samples", "20"])
    assert result.exit_code == 0, result.output
    files = sorted(p.stem for p in tmp_path.iterdir())
    assert files == [
        "llama-3.1-8b_tp1_a100",
        "llama-3.1-8b_tp1_h100",
        *(
            f"{setup}{way}"
            for setup in (
                "llama-3.1-8b_tp2_a100",
                "llama-3.1-8b_tp2_h100",
                "mixtral-8x7b_tp4_a100",
                "qwen2.5-7b_tp1_a100",
                "qwen2.5-7b_tp1_h100",
                "qwen2.5-7b_tp2_a100",
                "qwen2.5-7b_tp2_h100",
            )
            for way in ("", "_same-power")
        ),
    ]
    for path in tmp_path.iterdir():
        table = tomllib.loads(path.read_text())
        parse_coefficients(table, path.name)
        assert {"prefill_time", "decode_time", "prefill_energy", "decode_energy", "power", "valid_range", "fit"} <= set(table)
        assert {s["table"] for s in table["source"]} == {"prefill_time", "decode_time", "prefill_energy", "decode_energy", "power"}
