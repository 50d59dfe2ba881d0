"""A scenario is data: code that it names runs only where the user has allowed it, and what ran is known from the folder."""

import hashlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import jaxserve
from jaxserve.errors import InputError
from jaxserve.policies.code import source
from tests.cli.helpers import Outcome, call, refused, write_scenario

pytestmark = pytest.mark.usefixtures("no_figures")

CAPS = """
from pathlib import Path

import cvxpy

Path(__file__).with_name("imported").touch()


def nothing_to_clean(model):
    return [cvxpy.sum(model.x[:, model.names.index("clean")]) == 0]
"""
NAMED = "caps_of_a_test:nothing_to_clean"
REFUSAL = f'policy capped: constraints = "{NAMED}" is code, and a scenario is data'


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A scenario that names code, which leaves a mark beside itself when it is imported."""
    (tmp_path / "caps_of_a_test.py").write_text(CAPS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    policies = [{"kind": "ilp", "label": "capped", "solver": "cvxpy", "constraints": NAMED, "time_limit_s": 60.0}]
    changes = {
        "horizon_s": 1.0,
        "ledger_s": 0.1,
        "workload.rate_req_per_s": 20.0,
        "slo": {"ttft_s": 3.0, "tpot_s": 0.2},
        "policies": policies,
    }
    yield write_scenario(tmp_path, changes)
    sys.modules.pop("caps_of_a_test", None)


def test_nothing_is_imported_unasked(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = call(capsys, monkeypatch, "check", scenario)
    assert outcome.code == 0, outcome.err
    assert f"{NAMED} is code that a policy names: not looked at here, and run only with --allow-code" in " ".join(outcome.out.split())
    refused(
        call(capsys, monkeypatch, "run", scenario, "--out", tmp_path / "out"), tmp_path / "out", REFUSAL, "--allow-code", "allow_code=True"
    )
    refused(call(capsys, monkeypatch, "sweep", scenario, "--axis", "seed=1,2"), None, REFUSAL)
    with pytest.raises(InputError, match=REFUSAL):
        jaxserve.run(scenario)
    with pytest.raises(InputError, match=REFUSAL):
        jaxserve.run(jaxserve.load_scenario(scenario)[0], base_dir=tmp_path)
    assert not (tmp_path / "imported").exists() and not (tmp_path / "out.partial").exists()


class Stopped(BaseException):
    """In place of a signal: nothing in the package can catch it."""


def test_what_ran_is_kept_and_nothing_else_goes_on(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def stop(*_: Any) -> None:
        raise Stopped

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(importlib.import_module("jaxserve.running"), "_run_policy", stop)
        jaxserve.run(scenario, out=out, allow_code=True)

    def resume() -> Outcome:
        sys.modules.pop("caps_of_a_test", None)  # as in a process of its own
        return call(capsys, monkeypatch, "run", scenario, "--out", out, "--resume", "--allow-code")

    caps = tmp_path / "caps_of_a_test.py"
    caps.write_text(CAPS.replace("== 0", "<= 1"))
    refused(resume(), out, f"out.partial: the unfinished run ran {NAMED} when its source was another; go on with what began it")
    caps.write_text(CAPS)
    outcome = resume()
    assert outcome.code == 0, outcome.err
    kept = out / "code" / "caps_of_a_test.nothing_to_clean.py"
    assert kept.read_text() == CAPS
    assert json.loads((out / "inputs.json").read_text())["code_sha256"] == {NAMED: hashlib.sha256(kept.read_bytes()).hexdigest()}
    assert set(pd.read_parquet(out / "capped" / "requests.parquet")["dc"]) == {"dirty"}


@pytest.mark.parametrize("path", ["os:_exit", "functools:reduce", "builtins:print"])
def test_code_without_a_source_is_refused(path: str) -> None:
    with pytest.raises(InputError, match="has no source to keep with the results; name a function"):
        source(path)
