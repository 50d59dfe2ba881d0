"""The command, the file it writes, the report, and the physical checks."""

import re
import tomllib
from datetime import date
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from calibration_fit.checks import check_fit, check_power, rows_below_floor
from calibration_fit.cli import app
from calibration_fit.fit import fit
from calibration_fit.forms import DECODE_TIME, PREFILL_TIME
from calibration_fit.hardware import floor_s
from calibration_fit.output import Borrowed, coefficients_table
from calibration_fit.pipeline import fit_setups
from calibration_fit.published import A100, composed
from calibration_fit.rows import make_rows
from jaxserve.perf.coefficients import load_coefficients, parse_coefficients
from tests.calibration.helpers import DATA, needs_data, synthetic

BASE = """
[prefill_energy]
e_pre_tok = 0.025
[decode_energy]
e_dec0 = 3.2
e_dec_req = 0.09
"""


def steps_csv(path: Path, **changes: object) -> Path:
    """Both synthetic step tables in one CSV."""
    frames = []
    for m in (synthetic("prefill", 0.02), synthetic("decode", 0.02)):
        frame = pd.DataFrame({"model": "m", "tp": 1, "gpu": "A100", "phase": m.phase, "batch": m.batch, "time_s": m.time_s})
        frames.append(frame.assign(**({"seq_len": m.length} if m.phase == "prefill" else {"mean_ctx": m.length})))
    pd.concat(frames).assign(**changes).to_csv(path, index=False)
    return path


def run(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_command_writes_a_coefficients_file_and_a_report(tmp_path: Path):
    base = tmp_path / "base.toml"
    base.write_text(BASE + "[valid_range.decode_energy]\nbatch = [1.0, 64.0]\n")
    out, report = tmp_path / "c.toml", tmp_path / "report"
    result = run(steps_csv(tmp_path / "s.csv"), "--out", out, "--report", report, "--base", base, "--samples", 20, "--form", "study")
    assert result.exit_code == 0, result.output
    assert "prefill_time (study): 47 rows" in result.output
    table = tomllib.loads(out.read_text())
    assert table["setup"] == {"model": "m", "tp": 1, "gpu": "A100"}
    assert table["valid_range"]["decode_time"]["batch"] == [1.0, 128.0]
    assert table["valid_range"]["decode_energy"] == {"batch": [1.0, 64.0]}  # what is borrowed holds where it did
    assert table["fit"]["decode_time"]["mape_held_out_percent"] < 2.5
    low, high = table["fit"]["decode_time"]["interval"]["alpha0"]
    assert low < table["decode_time"]["alpha0"] < high
    assert len(table["fit"]["files"][0]["sha256"]) == 64
    assert [s["table"] for s in table["source"] if s.get("extrapolated")] == ["prefill_energy", "decode_energy", "power"]
    known = parse_coefficients(table, str(out))
    assert float(known.decode_time_model()(8.0, 800.0)) > 0
    page = (report / "report.md").read_text()
    for word in ("| m TP1 A100 | decode_time | study |", "Valid range", "by region"):
        assert word in page
    assert len(list(report.glob("*.png"))) == 3


def test_a_base_with_nonsense_for_ranges_is_refused(tmp_path: Path):
    base, out = tmp_path / "base.toml", tmp_path / "c.toml"
    for text, words in (
        ("valid_range = 3\n" + BASE, "valid_range must hold a table of ranges"),
        (BASE + "[valid_range.decode_energy]\nbatch = 'many'\n", "valid_range.decode_energy.batch"),
        (BASE + "[valid_range]\ndecode_energy = 3\n", "valid_range must hold a table of ranges"),
    ):
        base.write_text(text)
        result = run(steps_csv(tmp_path / "s.csv"), "--out", out, "--samples", 20, "--form", "study", "--base", base)
        assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output and not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing measured gives prefill_energy"),
        (["--gpu", "H100"], "no row of H100; it holds m TP1 A100"),
        (["--where", "gpu"], "must be COLUMN=VALUE"),
        (["--where", "colour=red"], "no such column"),
        (["--form", "cubic"], "none of auto, study, two_piece, piecewise"),
        (["--base", "/nowhere.toml"], "not a readable coefficients file"),
    ],
)
def test_a_refused_command_writes_nothing(tmp_path: Path, arguments: list[str], words: str):
    out = tmp_path / "c.toml"
    form = [] if "--form" in arguments else ["--form", "study"]
    result = run(steps_csv(tmp_path / "s.csv"), "--out", out, "--samples", 20, *form, *arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == [tmp_path / "s.csv"]


def test_measured_energy_needs_no_base(tmp_path: Path):
    data = [synthetic("prefill", 0.02), synthetic("decode", 0.02)]
    for m, watts in zip(data, (390.0, 250.0), strict=True):
        m.energy_j[:] = watts * m.time_s * (1 + 0.02 * np.cos(np.arange(len(m))))
    found = fit_setups([data], decode_form="study", samples=20)[0]
    table = coefficients_table(
        found, power=Borrowed({"idle_w_per_gpu": 60.0, "max_w_per_gpu": 400.0, "host_w": 300.0}, "x", False), today=date(2026, 1, 2)
    )
    assert table["fit"]["date"] == "2026-01-02"
    assert table["prefill_energy"]["e_pre_tok"] == pytest.approx(390 * 57e-6, rel=0.1)
    assert table["valid_range"]["prefill_energy"] == {"n_tokens": [32.0, 8192.0], "batch": [1.0, 16.0], "seq_len": [32.0, 2048.0]}
    assert not any(s.get("extrapolated") for s in table["source"])


def test_a_row_faster_than_physics_is_named():
    m = synthetic("decode", 0.01, model="Llama-3.1-8B")
    assert rows_below_floor(make_rows([m], DECODE_TIME), "decode_time") == []
    m.time_s[3] = 5e-3
    (sentence,) = rows_below_floor(make_rows([m], DECODE_TIME), "decode_time")
    assert sentence.startswith("synthetic.csv: row 5: 0.005 s is below the physical floor of 0.007")


def test_the_floor_is_weights_over_bandwidth_or_flops_over_peak():
    one = {"batch": np.array([1.0]), "sum_sq": np.array([0.0]), "cached_tokens": np.array([0.0])}
    low = floor_s("Llama-3.1-8B", "A100", 1, new_tokens=np.array([1.0]), **one)
    assert low is not None
    assert low[0] == pytest.approx(2 * 7.5e9 / 2.039e12)
    high = floor_s("Llama-3.1-8B", "A100", 1, new_tokens=np.array([8192.0]), **one)
    assert high is not None
    assert high[0] == pytest.approx(2 * 6.975e9 * 8192 / 312e12, rel=1e-3)
    assert floor_s("unknown", "A100", 1, new_tokens=np.array([1.0]), **one) is None


def test_a_falling_fit_is_named():
    m = synthetic("decode", 0.0)
    m.time_s[:] = 0.02 - 5e-5 * m.batch
    sentences = check_fit(fit([m], DECODE_TIME))
    assert any("falls along batch" in s for s in sentences)


@pytest.mark.parametrize(
    ("table", "values", "words"),
    [
        ("decode_energy", {"e_dec0": 3.0, "e_dec_req": 0.9, "e_dec_kv": 0.0}, "decode power: energy over time is"),
        ("prefill_energy", {"e_pre0": 0.0, "e_pre_tok": 0.04, "e_pre_sq": 0.0}, "prefill power: energy over time is"),
    ],
)
def test_energy_that_needs_more_than_the_board_gives_is_named_though_borrowed(table: str, values: dict[str, float], words: str):
    c = load_coefficients("llama-3.1-8b_tp1_a100")
    assert check_power(c) == []
    hot = c.model_copy(update={table: getattr(c, table).model_copy(update=values)})
    (sentence,) = check_power(hot)
    assert words in sentence and "above the 400 W of the board" in sentence
    # By hand at the corner that is named: energy over time of all GPUs.
    said, at = float(sentence.split(" W a GPU")[0].split()[-1]), [float(x) for x in re.findall(r"\d+", sentence.split(" at ")[1])]
    if table == "decode_energy":
        power = (3.0 + 0.9 * at[0]) / float(c.decode_time_model()(at[0], at[0] * at[1]))
        assert said == pytest.approx(power, rel=0.01)
    larger = hot.model_copy(update={"power": hot.power.model_copy(update={"max_w_per_gpu": 5000.0})})
    assert check_power(larger) == []


def test_the_board_is_known_or_given(tmp_path: Path):
    """Of a GPU in the table its data sheet's, else it must be said; what is said goes before both."""
    base, out = tmp_path / "base.toml", tmp_path / "c.toml"
    base.write_text(BASE)
    common = ("--out", out, "--base", base, "--samples", 20, "--form", "study")
    for gpu, options, board in (("A100", (), 400.0), ("A100", ("--max-w", 300), 300.0), ("ours", ("--max-w", 550), 550.0)):
        result = run(steps_csv(tmp_path / "s.csv", gpu=gpu), *common, *options)
        assert result.exit_code == 0, result.output
        assert tomllib.loads(out.read_text())["power"]["max_w_per_gpu"] == board
    out.unlink()
    refused = run(steps_csv(tmp_path / "s.csv", gpu="ours"), *common)
    assert refused.exit_code == 2 and not out.exists()
    assert "the board power of 'ours' is not known, which no step may exceed: give it with --max-w" in refused.output


def test_a_sound_fit_raises_no_warning():
    assert check_fit(fit([synthetic("prefill", 0.01)], PREFILL_TIME)) == []
    assert check_fit(fit([synthetic("decode", 0.01)], DECODE_TIME)) == []


@needs_data
def test_composed_rows_and_fits_respect_physics():
    for m in composed(DATA, A100):
        form = PREFILL_TIME if m.phase == "prefill" else DECODE_TIME
        assert rows_below_floor(make_rows([m], form), form.table) == []
