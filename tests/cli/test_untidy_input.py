"""What is merely untidy is read, and whatever was done to it is counted in the summary."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tomli_w

import jaxserve
from jaxserve.errors import InputError
from jaxserve.perf.coefficients import load_coefficients
from jaxserve.scenario.load import load_scenario
from tests.cli.helpers import changed, write_scenario

pytestmark = pytest.mark.usefixtures("no_figures")

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:00:00.0000000,120,5
2023-11-16 18:00:00.5000000,80,9
2023-11-16 18:00:00.5000000,81,1
2023-11-16 18:00:01.2500000,400,12
2023-11-16 18:00:02.0000000,30,20
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
0,ChatGPT,120,5,125,Conversation log
0.5,GPT-4,80,9,89,API log
0.5,ChatGPT,81,1,82,Conversation log
1.25,ChatGPT,400,12,412,Conversation log
2,ChatGPT,30,20,50,Conversation log
"""
GENERIC = """arrival_s,input_tokens,output_tokens
0,120,5
0.5,80,9
0.5,81,1
1.25,400,12
2,30,20
"""
MOONCAKE = """{"timestamp": 0, "input_length": 120, "output_length": 5, "hash_ids": [1]}
{"timestamp": 500, "input_length": 80, "output_length": 9, "hash_ids": [2]}
{"timestamp": 500, "input_length": 81, "output_length": 1, "hash_ids": [1]}
{"timestamp": 1250, "input_length": 400, "output_length": 12, "hash_ids": [3]}
{"timestamp": 2000, "input_length": 30, "output_length": 20, "hash_ids": [4]}
"""
TRACES = {"Azure": AZURE, "BurstGPT": BURSTGPT, "generic": GENERIC, "Mooncake": MOONCAKE}
BOM = b"\xef\xbb\xbf"


def run(
    folder: Path, trace: str | bytes, grid: str | bytes | None = None, **fields: Any
) -> tuple[pd.DataFrame, dict[str, Any], jaxserve.Results]:
    """Requests, summary of the policy and results of a run on a trace (and a grid file)."""
    folder.mkdir(exist_ok=True)
    (folder / "trace").write_bytes(trace if isinstance(trace, bytes) else trace.encode())
    workload = {"kind": "trace", "path": "trace"} | {name: value for name, value in fields.items() if name != "fill"}
    changes: dict[str, Any] = {"workload": workload}
    if grid is not None:
        (folder / "ci.csv").write_bytes(grid if isinstance(grid, bytes) else grid.encode())
        changes["grid"] = {"kind": "file", "path": "ci.csv", "fill": fields.get("fill", "error")}
    results = jaxserve.run(write_scenario(folder, changes))
    return results["round_robin"].requests, results["round_robin"].summary, results


@pytest.fixture(scope="module")
def tidy(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """The requests of the five rows as they should be read."""
    requests, _, _ = run(tmp_path_factory.mktemp("tidy"), GENERIC)
    return requests


UNTIDY = {
    "BOM": lambda text: BOM + text.encode(),
    "CRLF": lambda text: text.replace("\n", "\r\n").encode(),
    "blank lines at the end": lambda text: text.encode() + b"\n\n\n",
    "blank lines within": lambda text: text.replace("\n", "\n\n", 3).encode(),
    "no line break at the end": lambda text: text.rstrip().encode(),
    "all of it, and gzip": lambda text: gzip.compress(BOM + text.replace("\n", "\r\n").encode() + b"\r\n\r\n"),
}


@pytest.mark.parametrize("how", UNTIDY)
@pytest.mark.parametrize("name", TRACES)
def test_untidy_traces_read_as_tidy_ones(name: str, how: str, tidy: pd.DataFrame, tmp_path: Path) -> None:
    requests, summary, _ = run(tmp_path, UNTIDY[how](TRACES[name]))
    pd.testing.assert_frame_equal(requests, tidy, check_exact=True)
    assert summary["counts"] == {
        "rows_read": 5, "rows_dropped": 0, "rows_unsorted": 0, "rows_outside_slice": 0, "requests_thinned": 0, "requests": 5,
        "filled_hours": 0, "duplicate_rows": 0, "unsorted_rows": 0,
    }  # fmt: skip


def test_the_format_is_named_in_the_notes(tmp_path: Path) -> None:
    for name, text in TRACES.items():
        _, summary, results = run(tmp_path, text)
        assert any(f"{name}" in note and "5 rows" in note for note in summary["notes"]), summary["notes"]
        assert set(results.notes) == set(summary["notes"])


def test_blanks_around_header_names(tidy: pd.DataFrame, tmp_path: Path) -> None:
    requests, _, _ = run(tmp_path, GENERIC.replace("arrival_s,input_tokens,output_tokens", " arrival_s , input_tokens,output_tokens "))
    pd.testing.assert_frame_equal(requests, tidy, check_exact=True)


@pytest.mark.parametrize("name", TRACES)
def test_unsorted_times_are_sorted_and_counted(name: str, tidy: pd.DataFrame, tmp_path: Path) -> None:
    lines = TRACES[name].splitlines(keepends=True)
    head, rows = (lines[:1], lines[1:]) if name != "Mooncake" else ([], lines)
    requests, summary, results = run(tmp_path, "".join([*head, rows[1], rows[2], rows[0], rows[4], rows[3]]))
    pd.testing.assert_frame_equal(requests, tidy, check_exact=True)
    assert summary["counts"]["rows_unsorted"] == 2
    assert any("2 rows were out of order; sorted by time" in note for note in results.notes)


def test_equal_times_are_kept_in_the_order_of_the_file(tidy: pd.DataFrame, tmp_path: Path) -> None:
    assert tidy["arrival_s"].tolist() == [0.0, 0.5, 0.5, 1.25, 2.0]
    assert tidy["isl"].tolist() == [120, 80, 81, 400, 30]
    burst = "arrival_s,isl,osl\n" + "".join(f"1,{isl},3\n" for isl in range(40, 60))
    requests, summary, _ = run(tmp_path, burst)
    assert requests["isl"].tolist() == list(range(40, 60)) and (requests["arrival_s"] == 1.0).all()
    assert (summary["counts"]["requests"], summary["counts"]["rows_unsorted"]) == (20, 0)
    assert (requests["status"] == "finished").all()


def test_failed_rows_of_burstgpt_are_dropped_only_when_told(tidy: pd.DataFrame, tmp_path: Path) -> None:
    failed = BURSTGPT.replace("1.25,", "1,ChatGPT,900,0,900,Conversation log\n1.25,") + "2.5,GPT-4,0,0,0,API log\n"
    with pytest.raises(InputError, match=r'row 5, column Response tokens: 0 tokens, .*invalid_rows = "drop" .*\(2 in this file\)'):
        run(tmp_path, failed)
    requests, summary, results = run(tmp_path, failed, invalid_rows="drop")
    pd.testing.assert_frame_equal(requests, tidy, check_exact=True)
    assert (summary["counts"]["rows_read"], summary["counts"]["rows_dropped"], summary["counts"]["requests"]) == (7, 2, 5)
    assert any("2 rows with fewer than 1 token dropped" in note for note in results.notes)
    for cell in ("nan", "many", "-"):  # nothing else passes for a failed request
        with pytest.raises(InputError, match="row 2, column Request tokens"):
            run(tmp_path, BURSTGPT.replace(",120,", f",{cell},"), invalid_rows="drop")


def test_absolute_and_relative_times_are_told_apart(tmp_path: Path) -> None:
    requests, _, _ = run(tmp_path, "arrival_s,isl,osl\n1,10,5\n2.5,20,5\n")  # a relative zero is the run's own
    assert requests["arrival_s"].tolist() == [1.0, 2.5]
    for start in (1_700_000_000, 1_700_000_000.25):
        requests, _, results = run(tmp_path, f"arrival_s,isl,osl\n{start},10,5\n{start + 1.5},20,5\n")
        np.testing.assert_allclose(requests["arrival_s"], [0.0, 1.5], rtol=0, atol=1e-6)
        assert any("absolute times" in note for note in results.notes)
    with pytest.raises(InputError, match=r"row 3, column arrival_s: relative times and times since 1970 are mixed"):
        run(tmp_path, "arrival_s,isl,osl\n0,10,5\n1700000000,20,5\n")


HOURS = "datetime_utc,FR,PL\n" + "".join(f"2022-01-04T{hour:02}:00Z,{hour},{hour + 100}\n" for hour in range(9, 14))


@pytest.mark.parametrize("how", UNTIDY)
def test_untidy_grids_read_as_tidy_ones(how: str, tmp_path: Path) -> None:
    data = UNTIDY[how](HOURS)
    if how.endswith("gzip"):  # a packed grid file has to say so in its name; this one is a trace's privilege
        data = gzip.decompress(data)
    _, summary, results = run(tmp_path, GENERIC, data)
    ledger = results["round_robin"].ledger_frame
    assert dict(zip(ledger["dc"], ledger["ci_g_per_kwh"], strict=True)) == {"clean": 11.0, "dirty": 111.0}
    assert (summary["counts"]["filled_hours"], summary["counts"]["duplicate_rows"], summary["counts"]["unsorted_rows"]) == (0, 0, 0)


def test_untidy_rows_of_a_grid_are_counted(tmp_path: Path) -> None:
    head, *rows = HOURS.splitlines(keepends=True)
    shuffled = head + rows[1] + rows[0] + "".join(rows[2:]) + rows[4]  # one out of order, one twice
    _, summary, results = run(tmp_path, GENERIC, shuffled)
    assert (summary["counts"]["filled_hours"], summary["counts"]["duplicate_rows"], summary["counts"]["unsorted_rows"]) == (0, 1, 1)
    assert any("1 duplicate rows merged" in note for note in results.notes)
    without = head + "".join(row for row in rows if "T11:00" not in row)
    _, summary, results = run(tmp_path, GENERIC, without, fill="interpolate")
    assert summary["counts"]["filled_hours"] == 2  # of two zones
    ledger = results["round_robin"].ledger_frame
    assert dict(zip(ledger["dc"], ledger["ci_g_per_kwh"], strict=True)) == {"clean": 11.0, "dirty": 111.0}
    _, summary, results = run(tmp_path, GENERIC, without, fill="hold")
    ledger = results["round_robin"].ledger_frame
    assert dict(zip(ledger["dc"], ledger["ci_g_per_kwh"], strict=True)) == {"clean": 10.0, "dirty": 110.0}
    assert any("filled (hold)" in note for note in results.notes)


def test_untidy_scenario_and_coefficients(tmp_path: Path) -> None:
    known = load_coefficients("llama-3.1-8b_tp1_a100")
    text = tomli_w.dumps(known.model_dump(exclude_none=True)).replace("\n", "\r\n")
    (tmp_path / "mine.toml").write_bytes(BOM + text.encode() + b"\r\n\r\n")
    scenario = tomli_w.dumps(changed({"engine.coefficients": "mine.toml"})).replace("\n", "\r\n")
    (tmp_path / "small.toml").write_bytes(BOM + scenario.encode() + b"\r\n\r\n")
    assert load_scenario(tmp_path / "small.toml")[0].engine.coefficients == known
