"""What the tests of bad input share."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.helpers import Refuse, call, refused


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Refuse:
    """Runs a scenario that must be refused before anything is compiled or written."""

    def never(*_: Any) -> None:
        raise AssertionError("the fault was not found before the run began")

    # Through importlib: the package's attribute of that name is the function.
    monkeypatch.setattr(importlib.import_module("jaxserve.running"), "_run_policy", never)
    monkeypatch.chdir(tmp_path)

    def run(scenario: str | Path, *parts: str, arguments: tuple[str, ...] = ()) -> None:
        out = tmp_path / "out"
        refused(call(capsys, monkeypatch, "run", scenario, "--out", out, *arguments), out, *parts)
        assert not (tmp_path / "out.partial").exists()

    return run
