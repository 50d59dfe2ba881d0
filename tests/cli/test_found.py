"""Faults of the command line that were found once: lost or overwritten results, tracebacks, silence."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import jaxserve
from jaxserve.analysis.validation_energy import energy_errors
from jaxserve.errors import InputError
from jaxserve.perf.coefficients import load_coefficients
from jaxserve.perf.request_log import parse_log, parse_where
from tests.cli.helpers import Refuse, call, refused, write_scenario

QUICK = ("--set", "horizon_s=1.0", "--set", "ledger_s=1.0")


@pytest.mark.parametrize("command", ["validate", "behaviour", "sweep", "osl-train"])
def test_results_never_take_the_place_of_a_file(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it told only after the work that there is no writing."""
    log = tmp_path / "requests.csv"
    log.write_text("arrival_s,isl,osl,ttft_s,tpot_s\n0,100,10,0.1,0.01\n1,100,10,0.1,0.01\n")
    before = log.read_bytes()
    given = {
        "validate": (log, "--coefficients", "llama-3.1-8b_tp1_a100"),
        "behaviour": (),
        "sweep": ("two-region", "--axis", "seed=0,1"),
        "osl-train": (log,),
    }[command]
    for out, words in (
        (tmp_path, "exists already and is left as it is"),
        (log, "exists already and is left as it is"),
        (log / "x", "requests.csv is no folder"),
        (tmp_path / ("n" * 300), "cannot be written (File name too long)"),
        (Path("/proc/none.nc"), "/proc/none.nc: cannot be written"),
    ):
        refused(call(capsys, monkeypatch, command, *given, "--out", out), None, words)
    assert log.read_bytes() == before and list(tmp_path.iterdir()) == [log]


@pytest.mark.parametrize("text", ["def f(:\n", "x = 1 / 0\n", "raise SystemError('no')\n"])
def test_constraints_of_a_module_that_fails(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refuse) -> None:
    name = f"spoilt_{abs(hash(text)) % 10**8}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    policy = f'policies=[{{kind="ilp", solver="cvxpy", constraints="{name}:f"}}]'
    refuse(write_scenario(tmp_path), f'constraints = "{name}:f"', arguments=("--set", policy, "--allow-code"))


@pytest.mark.parametrize("item", ["1", "'x'", "None"])
def test_constraints_that_are_none(item: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"returns_{item.strip(chr(39))}".lower()
    (tmp_path / f"{name}.py").write_text(f"def f(model):\n    return [{item}]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    policy = f'policies=[{{kind="ilp", solver="cvxpy", constraints="{name}:f"}}]'
    outcome = call(capsys, monkeypatch, "run", write_scenario(tmp_path), "--out", tmp_path / "out", *QUICK, "--set", policy, "--allow-code")
    assert outcome.code == 2 and f"the function returned {item} among its constraints" in outcome.err and "Traceback" not in outcome.err


def test_an_axis_holds_each_value_once_however_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = call(capsys, monkeypatch, "sweep", "two-region", "--policy", "2", "--axis", "policies.2.alpha=1,1.0")
    refused(outcome, None, "axis policies.2.alpha: a value appears twice")


def test_coefficients_of_two_forms_are_no_one_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(jaxserve.__file__).parent / "perf" / "data" / "mixtral-8x7b_tp4_a100.toml").read_text().replace("tp = 4", "tp = 1")
    (tmp_path / "two.toml").write_text(text)
    axis = f"engine.coefficients=llama-3.1-8b_tp1_a100,{tmp_path / 'two.toml'}"
    arguments = ("sweep", "two-region", *QUICK, "--set", "engine.kv_capacity_tokens=100000", "--axis", axis)
    refused(call(capsys, monkeypatch, *arguments), None, "differs from the first in the form of engine.coefficients")


def test_overrides_do_not_go_with_a_scenario_that_is_built() -> None:
    scenario, _ = jaxserve.load_scenario("two-region", ["horizon_s=1.0"])
    with pytest.raises(InputError, match="overrides are for a scenario by name or path"):
        jaxserve.run(scenario, overrides=["horizon_s=2.0"])


def test_check_refuses_what_run_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    measured = ("--set", 'decision_latency={kind="measured"}', "--set", 'policies=[{kind="ilp"}]')
    outcome = call(capsys, monkeypatch, "check", write_scenario(tmp_path), *measured)
    refused(outcome, None, "needs a solver on the host")


def test_a_label_that_is_a_file_of_the_run_folder(tmp_path: Path, refuse: Refuse) -> None:
    label = 'policies=[{kind="round_robin", label="inputs.json"}]'
    refuse(write_scenario(tmp_path), "inputs.json", arguments=("--set", label))


def test_a_column_selected_twice() -> None:
    with pytest.raises(InputError, match="--where names gpu twice"):
        parse_where(["gpu=A", "tp=1", "gpu=B"])


def test_the_summary_keeps_all_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a grid so clean that ten places after the point hold no digit of the carbon of a request."""
    path = write_scenario(tmp_path, {"grid": {"kind": "constant", "ci_g_per_kwh": 1e-8}})
    outcome = call(capsys, monkeypatch, "run", path, "--out", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    whole = json.loads((tmp_path / "out" / "summary.json").read_text())["policies"]["round_robin"]
    own = json.loads((tmp_path / "out" / "round_robin" / "summary.json").read_text())["metrics"]
    assert 0 < own["carbon_g_per_request"] < 1e-10
    assert all(whole[name] == value for name, value in own.items() if isinstance(value, int | float) and name in whole)


def test_steps_that_ask_for_more_than_the_board_are_charged_that_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With boards of 200 W every decode step asks for more, and every prefill step here: busy engines draw 200 W, idle ones 72 W."""
    inline = load_coefficients("llama-3.1-8b_tp1_a100").model_dump(exclude={"source", "fit"}, exclude_none=True)
    inline["power"]["max_w_per_gpu"] = 200.0
    path = write_scenario(tmp_path, {"engine.coefficients": inline})
    outcome = call(capsys, monkeypatch, "run", path, "--out", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "out" / "round_robin"
    own, engines = json.loads((folder / "summary.json").read_text()), pd.read_parquet(folder / "engines.parquet")
    metrics = own["metrics"]
    assert metrics["prefill_energy_j"] == pytest.approx(200.0 * engines["prefill_s"].sum(), rel=1e-9)
    assert metrics["decode_energy_j"] == pytest.approx(200.0 * engines["decode_s"].sum(), rel=1e-9)
    assert metrics["idle_energy_j"] == pytest.approx(72.0 * engines["idle_s"].sum(), rel=1e-9)
    steps = sum(total for _, total in own["steps_outside_valid_range"].values())
    assert own["steps_above_board"] == steps > 0
    assert f"{steps} steps ask by their energy coefficients for more than max_w_per_gpu" in " ".join(own["notes"])
    assert "steps ask by their energy coefficients" in " ".join(outcome.out.split())


@pytest.mark.slow  # every policy that looks at carbon
def test_clean_beyond_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where marginal carbon intensity is below 0 everywhere, the cleanest is the most negative, for every policy that looks for it."""
    (tmp_path / "grid.csv").write_text("datetime_utc,FR,PL\n" + "".join(f"2022-01-04 {h:02d}:00,-400,-100\n" for h in range(10, 15)))
    # On the host, so that one program serves both that solve; what the device makes of negative costs is for the tests of solvers.
    policies = [{"kind": "moer"}, *({"kind": kind, "solver": "highs"} for kind in ("ilp", "facility_milp")), {"kind": "green_llm_lp"}]
    grid = {"kind": "file", "path": "grid.csv", "signal": "marginal", "allow_negative": True}
    path = write_scenario(tmp_path, {"grid": grid, "policies": policies})
    outcome = call(capsys, monkeypatch, "run", path, "--out", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    whole = json.loads((tmp_path / "out" / "summary.json").read_text())["policies"]
    assert len(whole) == len(policies)
    for label, told in whole.items():
        dcs = pd.read_parquet(tmp_path / "out" / label / "requests.parquet", columns=["dc"])["dc"].astype(str)
        assert np.mean(dcs == "clean") > 0.9, label
        assert told["fallback_round_robin"] == 0


def test_without_energy_in_log_or_coefficients_nothing_is_compared() -> None:
    log = parse_log(["arrival_s,isl,osl,ttft_s,tpot_s,energy_j", "0,100,10,0.1,0.01,5", "1,100,10,0.1,0.01,5"], "log")
    everyone = np.ones(2, bool)
    assert energy_errors(log, np.zeros(2), 0.0, everyone, {}) is None
    assert energy_errors(log, np.ones(2), 0.0, ~everyone, {}) is None
    found = energy_errors(log, np.array([4.0, 8.0]), 0.0, np.array([True, False]), {})
    assert found is not None and found["all"]["error_percent"] == pytest.approx(-20.0)
