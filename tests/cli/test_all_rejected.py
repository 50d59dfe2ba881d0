"""A run whose requests are all too long for any engine ends with its table, whatever the policy."""

import json
from pathlib import Path

import pytest

import jaxserve
from tests.cli.helpers import call, write_scenario

QUICK = [{"kind": "round_robin"}, {"kind": "green_llm_lp"}]
OTHERS = [{"kind": kind} for kind in ("least_loaded", "moer_cap", "freesh", "ilp")] + [{"kind": "ilp", "solver": "highs"}]
TOO_LONG = {"engine.max_model_len": 100, "engine.oversize": "reject"}


@pytest.mark.parametrize("policies", [QUICK, pytest.param(QUICK[:1] + OTHERS, marks=pytest.mark.slow)], ids=["two", "the others"])
def test_runs(policies: list[dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = write_scenario(tmp_path, TOO_LONG | {"policies": policies})
    outcome = call(capsys, monkeypatch, "run", scenario, "--hindsight", "--out", tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, "")
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())["policies"]
    assert len(rows) == len(policies)
    n = rows["round_robin"]["requests"]
    for label, row in rows.items():
        assert outcome.out.count(label) >= 2
        assert (row["requests"], row["rejected"], row["finished"], row["slo_attainment"]) == (n, n, 0, 0.0)
        assert (row["saving_vs_baseline"], row["note"]) == (None, "no saving: nothing was served")
        assert (row["idle_share"], row["drain_energy_j"]) == (1.0, 0.0)
        assert row["carbon_g"] == rows["round_robin"]["carbon_g"] > 0
    assert call(capsys, monkeypatch, "check", scenario).code == 0


def test_a_sweep_in_which_some_variants_serve_nothing(tmp_path: Path) -> None:
    scenario = write_scenario(tmp_path, {"engine.oversize": "reject", "policies": [{"kind": "greedy"}]})
    grid = jaxserve.sweep(scenario, {"engine.max_model_len": [100, 1000]})
    assert grid["rejected_share"].values.tolist() == [1.0, 0.0]
    assert grid["slo_attainment"].values.tolist()[0] == 0.0 < grid["slo_attainment"].values.tolist()[1]
