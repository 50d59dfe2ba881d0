"""A small scenario to spoil, the command line called in this process, and what a refusal must look like."""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from jaxserve.cli import main

ABSENT = object()
"""In place of a value: the field is taken out."""

SMALL: dict[str, Any] = {
    "name": "small",
    "seed": 1,
    "start_time": "2022-01-04T11:00:00Z",
    "horizon_s": 4.0,
    "sites": [
        {"name": "clean", "region": "here", "zone": "FR", "pue": 1.1, "nodes": 1, "gpus_per_node": 2},
        {"name": "dirty", "region": "there", "zone": "PL", "pue": 1.2, "nodes": 1, "gpus_per_node": 2},
    ],
    "engine": {
        "coefficients": "llama-3.1-8b_tp1_a100",
        "max_num_seqs": 16,
        "gpu_memory_gib": 40.0,
        "weights_gib": 14.96,
        "kv_bytes_per_token": 131072.0,
    },
    "network": {"rtt_ms": {"here": {"there": 80.0}}},
    "grid": {"kind": "constant", "ci_g_per_kwh": {"FR": 50.0, "PL": 700.0}},
    "workload": {"kind": "poisson", "rate_req_per_s": 10.0, "lengths": {"isl": 200, "osl": 20}},
    "slo": {"ttft_s": 1.0, "tpot_s": 0.05},
    "schedulers": [{"name": "one", "region": "here", "sites": ["clean"]}, {"name": "two", "region": "there", "sites": ["dirty"]}],
    "policies": [{"kind": "round_robin"}],
}
"""Two sites of two engines each; a run takes no longer than its compilation."""


TRACE = {"workload": {"kind": "trace", "path": "trace.csv"}}
GRID = {"grid": {"kind": "file", "path": "ci.csv"}}
"""Changes that name a file beside the scenario."""


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """`SMALL` with dotted paths set to values, or taken out where the value is `ABSENT`."""
    table = copy.deepcopy(SMALL)
    for path, value in changes.items():
        *parents, last = path.split(".")
        node: Any = table
        for key in parents:
            node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
        if value is ABSENT:
            del node[last]
        else:
            node[int(last) if isinstance(node, list) else last] = copy.deepcopy(value)
    return table


def write_scenario(folder: Path, changes: dict[str, Any] | None = None) -> Path:
    """`small.toml` in `folder`, changed as said."""
    path = folder / "small.toml"
    path.write_text(tomli_w.dumps(changed(changes or {})), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Outcome:
    """What a call of the command line came to."""

    code: int
    out: str
    err: str


def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> Outcome:
    """`jaxserve ARGUMENTS` in this process."""
    monkeypatch.setattr(sys, "argv", ["jaxserve", *map(str, arguments)])
    capsys.readouterr()
    try:
        main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr()
    return Outcome(code, said.out, said.err)


def refused(outcome: Outcome, out: Path | None, *parts: str) -> None:
    """Check that the call ended as bad input must."""
    assert "Traceback" not in outcome.err
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("jaxserve: ") and outcome.err.count("\n") == 1 and outcome.err.endswith("\n"), outcome.err
    assert len(outcome.err) < 900
    for leak in ("Input should", "pydantic", "Errno", "NoneType", "<class", "Value error"):
        assert leak not in outcome.err, outcome.err
    for part in parts:
        assert part in outcome.err, outcome.err
    if out is not None:
        assert not out.exists()


Refuse = Callable[..., None]
"""The fixture `refuse`: (scenario, *parts of the sentence, arguments=()) -> None."""
