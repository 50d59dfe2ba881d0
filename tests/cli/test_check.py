"""`jaxserve check` tells units, clocks and distances before a run; one case a reader, the rest is tested at the readers."""

import json
from pathlib import Path

import pytest

from tests.cli.helpers import SMALL, call, write_scenario

FAR = "".join(
    json.dumps({"chat_id": i, "timestamp": i / 100, "input_length": 100, "output_length": 5, "turn": 1}) + "\n" for i in range(401)
)


def test_what_is_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chat.jsonl").write_text(FAR)
    (tmp_path / "ci.csv").write_text("time,FR,PL\n" + "".join(f"2022-01-04 {h}:00,0.{h},0.9\n" for h in (10, 11, 12)))
    changes = {
        "start_time": "2022-01-04T11:59:59",  # a quarter of the run at 0.11, the rest at 0.12 kg/kWh
        "workload": {"kind": "trace", "path": "chat.jsonl"},
        "grid": {"kind": "file", "path": "ci.csv", "unit": "kg/kWh"},
        "schedulers": [{"name": "one", "region": "here", "sites": ["clean"]}, {"name": "two", "region": "here", "sites": ["dirty"]}],
    }
    outcome = call(capsys, monkeypatch, "check", write_scenario(tmp_path, changes))
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[1] == "400 requests in 4 s (100 a second), 0 to be rejected"
    at = lines.index("Carbon intensity by site over the run, g/kWh")
    assert [line.split() for line in lines[at + 1 : at + 4]] == [
        ["zone", "least", "mean", "greatest"],
        ["clean", "FR", "110", "117.5", "120"],
        ["dirty", "PL", "900", "900", "900"],
    ]
    assert [line.split() for line in lines[at + 5 : at + 8]] == [["one", "two"], ["clean", "own", "0"], ["dirty", "80", "own"]]
    notes = " ".join(lines[at + 8 :])
    for told in (
        "relative times in s (the keys chat_id and turn",
        "1 of 401 requests arrive at or after horizon_s = 4 s",
        "start_time has no offset, read as UTC: 2022-01-04T11:59:59Z",
        "warning: scheduler two (here) owns sites of other regions",
        "grid: values read as kg/kWh (grid.unit)",
        "grid: ci.csv: no offset at its time stamps, read as UTC",
    ):
        assert told in notes, notes


def test_tables_keep_within_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen schedulers: what does not fit beside stands below, and no round trip is lost."""
    clean, dirty = SMALL["sites"]
    sites = [clean, dirty, *(dirty | {"name": f"s{i}"} for i in range(2, 16))]
    schedulers = [{"name": f"scheduler-{i:02}", "region": site["region"], "sites": [site["name"]]} for i, site in enumerate(sites)]
    outcome = call(capsys, monkeypatch, "check", write_scenario(tmp_path, {"schedulers": schedulers, "sites": sites}))
    assert outcome.code == 0, outcome.err
    table = outcome.out.split("counts as 0)\n")[1].split("\n- ")[0]
    assert max(map(len, table.splitlines())) <= 80
    words = table.split()
    assert all(scheduler["name"] in words for scheduler in schedulers)
    # From each scheduler to its own; from the first to the others and back; among the others, in one region.
    assert (words.count("own"), words.count("80"), words.count("0")) == (16, 2 * 15, 15 * 14)
