"""Bad files named by a scenario - traces, grids, quantiles, coefficients - are one sentence that names file, row and column.

A case or two of what a file may hold for each reader; the others are in the reader's own tests (`test_traces`, `test_grid_malformed`,
`test_grid`, `test_lengths`). Here is what only shows when the file meets its scenario.
"""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from jaxserve.perf.coefficients import load_coefficients
from tests.cli.helpers import ABSENT, GRID, TRACE, Refuse, write_scenario

HEAD, AZURE = "arrival_s,isl,osl\n", "TIMESTAMP,ContextTokens,GeneratedTokens\n"
HOURS = "datetime_utc,FR,PL\n2022-01-04T10:00Z,1,2\n2022-01-04T11:00Z,3,4\n2022-01-04T12:00Z,5,6\n"
INLINE: dict[str, Any] = load_coefficients("llama-3.1-8b_tp1_a100").model_dump(
    exclude={"source", "fit", "valid_range", "prefill_time"}, exclude_none=True
) | {"prefill_time": {"form": "study", "tok_slope_below": 4e-5, "tok_slope_above": 6e-5, "tok_knee": 320.0, "b0": 9e-3}}

# Id: (bytes of trace.csv, further workload fields, what the sentence must hold beside the file's name).
TRACES: dict[str, tuple[str | bytes, dict[str, Any], tuple[str, ...]]] = {
    "stamp beyond nanoseconds": (AZURE + "9999-01-01 00:00:00,1,1\n", {}, ("row 2, column TIMESTAMP", "9999-01-01")),
    "milliseconds since 1970": (
        HEAD + "1700000000000,1,1\n",
        {},
        ("row 2, column arrival_s", "cannot be a time in s", 'workload.time_unit = "ms"'),
    ),
    "tokens zero": (HEAD + "0,10,20\n1,10,0\n", {}, ("row 3, column osl: 0 tokens", 'invalid_rows = "drop"')),
    "tokens NaN": (HEAD + "0,nan,20\n", {"invalid_rows": "drop"}, ("row 2, column isl: nan is not a whole number",)),
    "tokens text": (HEAD + "0,1,1\n1,many,20\n", {}, ("row 3, column isl: 'many' is not a number",)),
    "all rows dropped": (HEAD + "0,10,0\n", {"invalid_rows": "drop"}, ("leaves no row",)),
    "prompt beyond the KV cache": (HEAD + "0,1,1\n1,500000,1\n", {}, ()),
    "slice beyond the trace": (HEAD + "0,1,1\n", {"slice_start_s": 9.0}, ("workload.slice_start_s: no request of",)),
    "horizon before the trace": (HEAD + "100,1,1\n", {}, ("horizon_s: the first request of", "arrives at 100 s")),
    "loop of no length": (HEAD + "0,1,1\n0,1,1\n", {"loop": True}, ("workload.loop: ",)),
    "loop compressed to no length": (
        HEAD + "0,1,1\n1e-20,1,1\n",
        {"loop": True, "rate_scale": 1e308, "rate_method": "compress"},
        ("workload: about inf requests",),
    ),
    "loop of almost no length": (HEAD + "0,1,1\n5e-324,1,1\n", {"loop": True}, ("workload",)),
    "compressed to nothing": (HEAD + "1,1,1\n", {"rate_scale": 1e-320, "rate_method": "compress"}, ("horizon_s: the first request of",)),
    "thinned to nothing": (HEAD + "1,1,1\n", {"rate_scale": 1e-9, "rate_method": "thin"}, ("workload.rate_scale: thinning",)),
    "no origin column": (HEAD + "0,1,1\n", {"split": "origin", "origin_column": "where"}, ("workload.origin_column: ", "'where'")),
    "origin of no scheduler": (
        "arrival_s,isl,osl,where\n0,1,1,one\n1,1,1,mars\n",
        {"split": "origin", "origin_column": "where"},
        ("row 3, column where: the origin 'mars' belongs to no scheduler",),
    ),
    "times beyond any date, called relative": (HEAD + "1e12,1,1\n", {"time": "relative"}, ("cannot be a time in s",)),
    "stamps with a unit": (AZURE + "2023-11-16 18:00:00,1,1\n", {"time_unit": "ms"}, ("row 2, column TIMESTAMP", "workload.time_unit")),
    "time unit unknown": (HEAD + "0,1,1\n", {"time_unit": "min"}, ("workload.time_unit: must be 's', 'ms', 'us' or 'ns'",)),
    "stamps called relative": (AZURE + "2023-11-16 18:00:00,1,1\n", {"time": "relative"}, ("row 2, column TIMESTAMP",)),
}


@pytest.mark.parametrize("case", TRACES)
def test_traces(case: str, refuse: Refuse, tmp_path: Path) -> None:
    content, fields, parts = TRACES[case]
    (tmp_path / "trace.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    named = () if any(part.startswith("workload") for part in parts) else ("trace.csv",)
    if case == "prompt beyond the KV cache":
        named = ("workload: request 1 (arrival 1 s, ISL 500000, OSL 1)",)
    refuse(write_scenario(tmp_path, {"workload": TRACE["workload"] | fields}), *named, *parts)


def test_a_name_that_promises_gzip(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "trace.csv.gz").write_text(HEAD + "0,1,1\n")
    refuse(write_scenario(tmp_path, {"workload": {"kind": "trace", "path": "trace.csv.gz"}}), "trace.csv.gz: ", "is not gzip data")
    (tmp_path / "ci.csv.gz").write_text(HOURS)
    refuse(write_scenario(tmp_path, {"grid": {"kind": "file", "path": "ci.csv.gz"}}), "ci.csv.gz: is not a complete gzip file")


# Id: (bytes of ci.csv, further grid fields, what the sentence must hold beside the file's name).
GRIDS: dict[str, tuple[str | bytes, dict[str, Any], tuple[str, ...]]] = {
    "gap": (HOURS.replace("2022-01-04T11:00Z,3,4\n", ""), {}, ("zone FR has no value at hour 2022-01-04T11:00Z (no row)", "grid.fill")),
    "empty cell": (HOURS.replace(",3,", ",,"), {}, ("zone FR has no value at hour 2022-01-04T11:00Z (row 3 is empty)",)),
    "NaN cell": (HOURS.replace(",3,", ",NaN,"), {}, ("zone FR has no value at hour 2022-01-04T11:00Z",)),
    "MOER as average": (HOURS.replace("FR", "MOER"), {"zone_column": {"FR": "MOER"}}, ("row 1: column 'MOER' is marginal",)),
    "unit against the header": (
        HOURS.replace("FR", "FR gCO2/kWh"),
        {"zone_column": {"FR": "FR gCO2/kWh"}, "unit": "lb/MWh"},
        ("row 1: the header 'FR gCO2/kWh' says g/kWh but grid.unit is 'lb/MWh'",),
    ),
    "offsets in some rows": (
        HOURS.replace("datetime_utc", "time").replace("11:00Z", "11:00"),
        {},
        ("row 3, column 'time'", "with and without an offset"),
    ),
    "fill unknown": (HOURS, {"fill": "zero"}, ("grid.fill: must be 'error', 'hold' or 'interpolate' (got 'zero')",)),
}


@pytest.mark.parametrize("case", GRIDS)
def test_grids(case: str, refuse: Refuse, tmp_path: Path) -> None:
    content, fields, parts = GRIDS[case]
    (tmp_path / "ci.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    named = () if case == "fill unknown" else ("ci.csv: ",)
    refuse(write_scenario(tmp_path, {"grid": GRID["grid"] | fields}), *named, *parts)


def test_a_run_that_leaves_the_grid_file(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "ci.csv").write_text(HOURS)
    late = GRID | {"start_time": "2022-01-04T12:59:58Z"}
    refuse(write_scenario(tmp_path, late), "ci.csv: zone FR has no value at hour 2022-01-04T13:00Z, outside the file", "shorten the run")


def test_a_quantile_file(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("probability,isl_tokens,osl_tokens\n0,5,5\n1,4,5\n")
    scenario = write_scenario(tmp_path, {"workload.lengths": {"quantiles_file": "lengths.csv"}})
    refuse(scenario, "lengths.csv", "row 3, column isl_tokens: 4 after 5")


# Id: (path and value in an inline table of coefficients, what the sentence must hold).
COEFFICIENTS: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "misspelt": ("decode_time.alpha_0", 0.01, ("decode_time.alpha_0: there is no such field; did you mean alpha0?",)),
    "missing": ("decode_time.alpha0", ABSENT, ("decode_time.alpha0: this field is missing",)),
    "missing table": ("power", ABSENT, ("power: this field is missing",)),
    "text": ("decode_time.alpha0", "14200e-6", ("decode_time.alpha0: must be a number (got '14200e-6')",)),
    "NaN": ("prefill_time.b0", float("nan"), ("prefill_time.b0: must be",)),
    "negative": ("prefill_time.tok_slope_below", -1e-4, ("prefill_time.tok_slope_below: must be at least 0",)),
    "negative power": ("power.idle_w_per_gpu", -50.0, ("power.idle_w_per_gpu: must be at least 0",)),
    "no board power": ("power.max_w_per_gpu", ABSENT, ("power.max_w_per_gpu: this field is missing",)),
    "idle above the board": (
        "power.max_w_per_gpu",
        50.0,
        ("power: idle_w_per_gpu = ", "W is above the board power, max_w_per_gpu = 50 W"),
    ),
    "half a knee": ("decode_energy.batch_knee", 8.0, ("decode_energy: e_dec_req_below and batch_knee belong together",)),
    "TP 0": ("setup.tp", 0, ("setup.tp: must be at least 1",)),
    "energy beyond use": ("decode_energy.e_dec0", 1e300, ("decode_energy.e_dec0 = 1e+300 is beyond 1e+12; check its unit",)),
    "warnings that are none": ("fit", {"warnings": 5}, ("fit.warnings must be a list of texts",)),
    "a warning that is none": ("fit", {"decode_time": {"warnings": [5]}}, ("fit.decode_time.warnings must be a list of texts",)),
    "range backwards": ("valid_range", {"decode_time": {"batch": [1.0]}}, ("valid_range.decode_time.batch",)),
    "another version": ("schema_version", 2, ("schema_version: must be 1 (got 2)",)),
    "decode step of no time": ("decode_time.alpha0", 0.0, ("decode_time.alpha0 must be above 0 s",)),
    "decode step negative for a full batch": ("decode_time.alpha1", -1e-3, (".decode_time: a step could last -", "max_num_seqs = 16")),
    "decode step negative for a long context": ("decode_time.beta0", -1e-6, (".decode_time: a step could last -",)),
    "prefill step negative for many prompts": ("prefill_time.b1", -1e-2, (".prefill_time: a step could last -",)),
    "prefill step negative for a long prompt": ("prefill_time.b2", -1e-9, (".prefill_time: a step could last -",)),
    "microseconds for seconds": ("decode_time.alpha0", 14200.0, (".decode_time: the shortest step lasts 1.42e+04 s", "check their unit")),
    "seconds for gigaseconds": ("decode_time.alpha0", 1e-11, (".decode_time: ", "check their unit")),
}


def _inline(path: str, value: Any) -> dict[str, Any]:
    table = {name: dict(part) if isinstance(part, dict) else part for name, part in INLINE.items()}
    if "alpha0" in path and value == 1e-11:
        table["decode_time"] |= {"alpha1": 0.0, "beta1": 0.0}
    *parents, last = path.split(".")
    node = table[parents[0]] if parents else table
    if value is ABSENT:
        del node[last]
    else:
        node[last] = value
    return table


@pytest.mark.parametrize("case", COEFFICIENTS)
def test_coefficients_inline_and_in_a_file(case: str, refuse: Refuse, tmp_path: Path) -> None:
    path, value, parts = COEFFICIENTS[case]
    table = _inline(path, value)
    refuse(write_scenario(tmp_path, {"engine.coefficients": table}), "engine.coefficients", *parts)
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(table))
    where = "engine.coefficients" if parts[0].startswith(".") else "mine.toml: "  # what only shows with the engine is told of the scenario
    refuse(write_scenario(tmp_path, {"engine.coefficients": "mine.toml"}), where, *parts)


def test_coefficient_files_that_cannot_be_read(refuse: Refuse, tmp_path: Path) -> None:
    scenario = write_scenario(tmp_path, {"engine.coefficients": "mine.toml"})
    for content, part in (
        (b"", "is empty"),
        (b"a = ", "not valid TOML"),
        ("a = 1".encode("utf-16"), "not UTF-8"),
        (bytes(range(256)), "not UTF-8"),
    ):
        (tmp_path / "mine.toml").write_bytes(content)
        refuse(scenario, "mine.toml: ", part)
    refuse(write_scenario(tmp_path, {"engine.coefficients": ""}), "is a directory; give the coefficients's .toml file")
    refuse(write_scenario(tmp_path, {"engine.coefficients": "/dev/zero"}), "/dev/zero: is not a regular file")


@pytest.mark.parametrize("name", ["small.toml", "trace.csv", "ci.csv", "mine.toml", "lengths.csv"])
def test_a_file_without_read_permission(name: str, refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"engine.coefficients": "mine.toml"} if name == "mine.toml" else {}
    changes |= TRACE if name == "trace.csv" else GRID if name == "ci.csv" else {}
    changes |= {"workload.lengths": {"quantiles_file": "lengths.csv"}} if name == "lengths.csv" else {}
    scenario = write_scenario(tmp_path, changes)
    (tmp_path / name).touch()
    honest = Path.open

    # A chmod would not stop root.
    def locked(self: Path, *arguments: Any, **options: Any) -> Any:
        if self.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return honest(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", locked)
    refuse(scenario, f"{name}: ", "read")
    if os.geteuid() != 0:
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        (tmp_path / name).chmod(0)
        refuse(scenario, f"{name}: ", "read")
