"""Bad input is one sentence that says where, exit code 2, and nothing left behind that looks finished. Never a traceback, never a hang."""

import errno
import gzip
import importlib
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w

import jaxserve.store
from jaxserve.perf.coefficients import load_coefficients
from tests.cli.helpers import ABSENT, Outcome, call, write_scenario

RUN = importlib.import_module("jaxserve.run")  # the attribute of that name is the function
TRACE = {"workload": {"kind": "trace", "path": "trace.csv"}}
GRID = {"grid": {"kind": "file", "path": "ci.csv"}}
HEAD, AZURE = "arrival_s,isl,osl\n", "TIMESTAMP,ContextTokens,GeneratedTokens\n"
HOURS = "datetime_utc,FR,PL\n2022-01-04T10:00Z,1,2\n2022-01-04T11:00Z,3,4\n2022-01-04T12:00Z,5,6\n"
INLINE: dict[str, Any] = load_coefficients("llama-3.1-8b_tp1_a100").model_dump(exclude={"source", "fit", "valid_range"}, exclude_none=True)

# Id: (changes of the scenario, what the sentence must hold).
SCENARIOS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "misspelt field": ({"horizon_s": ABSENT, "horizn_s": 4.0}, ("horizn_s: there is no such field; did you mean horizon_s?",)),
    "misspelt field inside": ({"engine.max_num_seq": 4}, ("engine.max_num_seq: ", "did you mean max_num_seqs?")),
    "misspelt field in a list": ({"sites.1.pu": 1.2}, ("sites.1.pu: there is no such field",)),
    "misspelt table": ({"slos": {}}, ("slos: there is no such field",)),
    "missing field": ({"slo": ABSENT}, ("slo: this field is missing",)),
    "missing field in a list": ({"sites.1.pue": ABSENT}, ("sites.1.pue: this field is missing",)),
    "several faults": ({"slo.ttft_s": -1.0, "slo.tpot_s": 0.0}, ("slo.ttft_s: must be above 0 (got -1.0) (and 1 more fault)",)),
    "no sites": ({"sites": []}, ("sites: must have at least 1 entry",)),
    "sites no list": ({"sites": 3}, ("sites: must be a list (got 3)",)),
    "site no table": ({"sites.0": "clean"}, ("sites.0: must be a table",)),
    "PUE below 1": ({"sites.0.pue": 0.99}, ("sites.0.pue: must be at least 1 (got 0.99)",)),
    "PUE in percent": ({"sites.0.pue": 115.0}, ("sites.0.pue: must be at most 100 (got 115.0)",)),
    "PUE NaN": ({"sites.0.pue": float("nan")}, ("sites.0.pue: must be a finite number (got nan)",)),
    "PUE text": ({"sites.0.pue": "1.1"}, ("sites.0.pue: must be a number (got '1.1')",)),
    "zero nodes": ({"sites.1.nodes": 0}, ("sites.1.nodes: must be at least 1 (got 0)",)),
    "half a node": ({"sites.1.nodes": 1.5}, ("sites.1.nodes: must be a whole number (got 1.5)",)),
    "nodes true": ({"sites.1.nodes": True}, ("sites.1.nodes: must be a whole number (got true)",)),
    "zero GPUs": ({"sites.1.gpus_per_node": 0}, ("sites.1.gpus_per_node: must be at least 1",)),
    "nodes beyond memory": ({"sites.1.nodes": 10**30}, ("sites.1.nodes: must be at most",)),
    "engines beyond memory": ({"sites.1.nodes": 10**6, "sites.1.gpus_per_node": 8}, ("sites: 8000002 engines", "lower nodes")),
    "site named twice": ({"sites.1.name": "clean"}, ("sites: the name 'clean' is used twice",)),
    "scheduler named twice": ({"schedulers.1.name": "one"}, ("schedulers: the name 'one' is used twice",)),
    "empty name": ({"sites.0.name": ""}, ("sites.0.name: must not be empty",)),
    "slash in a name": ({"sites.0.name": "a/b"}, ("sites.0.name: ", "slashes")),
    "line break in a name": ({"sites.0.name": "a\nb"}, ("sites.0.name: ", "control characters")),
    "scheduler of an unknown site": ({"schedulers.0.sites": ["moon"]}, ("schedulers.0.sites: there is no site 'moon'", "clean, dirty")),
    "site of two schedulers": ({"schedulers.1.sites": ["clean"]}, ("schedulers.1.sites: 'clean' belongs to scheduler 'one'",)),
    "scheduler without sites": ({"schedulers.1.sites": []}, ("schedulers.1.sites: must have at least 1 entry",)),
    "weight zero": ({"schedulers.1.weight": 0.0}, ("schedulers.1.weight: must be above 0",)),
    "TP does not divide": ({"engine.coefficients": "mixtral-8x7b_tp4_a100"}, ("sites.0.gpus_per_node: 2 GPUs", "4 GPUs each")),
    "weights beyond memory": ({"engine.weights_gib": 36.5}, ("engine: 1 GPU(s) of 40 GiB", "36.5 GiB of weights")),
    "KV capacity unknown": ({"engine.weights_gib": ABSENT}, ("engine: give kv_capacity_tokens, or gpu_memory_gib",)),
    "utilisation above 1": ({"engine.gpu_memory_utilization": 1.1}, ("engine.gpu_memory_utilization: must be at most 1",)),
    "a KV token of no size": ({"engine.kv_bytes_per_token": 1e-300}, ("engine.kv_bytes_per_token: 1e-300 bytes",)),
    "no batch": ({"engine.max_num_seqs": 0}, ("engine.max_num_seqs: must be at least 1",)),
    "a batch beyond memory": ({"engine.max_num_seqs": 10**9}, ("engine.max_num_seqs: must be at most 65536",)),
    "unknown batching": ({"engine.batching": "chunked"}, ("engine.batching: must be 'study' or 'prefill_first' (got 'chunked')",)),
    "unknown coefficients": ({"engine.coefficients": "gpt-5"}, ("gpt-5: there is no such coefficients file", "qwen2.5-7b_tp1_a100")),
    "coefficients no name": ({"engine.coefficients": 5}, ("engine.coefficients: must be the name of a shipped set",)),
    "window 0": ({"dispatch.window_s": 0.0}, ("dispatch.window_s: must be above 0",)),
    "window infinite": ({"dispatch.window_s": float("inf")}, ("dispatch.window_s: must be a finite number (got inf)",)),
    "window too short": ({"dispatch.window_s": 1e-12}, ("windows of dispatch.window_s = 1e-12 s; raise dispatch.window_s",)),
    "window almost nothing": ({"dispatch.window_s": 5e-324}, ("raise dispatch.window_s",)),
    "horizon 0": ({"horizon_s": 0.0}, ("horizon_s: must be above 0",)),
    "horizon negative": ({"horizon_s": -4.0}, ("horizon_s: must be above 0 (got -4.0)",)),
    "horizon text": ({"horizon_s": "1,000"}, ("horizon_s: must be a number (got '1,000')",)),
    "horizon no multiple": ({"horizon_s": 4.05}, ("horizon_s: 4.05 s is not a whole number of windows",)),
    "poll no multiple": ({"provisioner.poll_s": 0.25}, ("provisioner.poll_s: 0.25 s is not a whole number of windows",)),
    "poll shorter than a window": ({"provisioner.poll_s": 0.01}, ("provisioner.poll_s: 0.01 s is not a whole",)),
    "poll mode": ({"provisioner.mode": "often"}, ("provisioner.mode: must be 'sync' or 'async'",)),
    "ledger interval no multiple": ({"ledger_s": 0.35}, ("ledger_s: 0.35 s is not a whole number of windows",)),
    "ledger beyond memory": ({"horizon_s": 1e8, "workload.rate_req_per_s": 1e-6}, ("ledger_s: 1 s makes 2e+08 ledger rows",)),
    "ledger kind": ({"dispatch.ledger": "none"}, ("dispatch.ledger: must be 'off', 'reset' or 'in-flight'",)),
    "start nonsense": ({"start_time": "yesterday at noon"}, ("start_time: must be a date with a time", "'yesterday at noon'")),
    "start a number": ({"start_time": 5}, ("start_time: must be a date with a time, such as 2022-01-04T11:00:00Z (got '5')",)),
    "start a date alone": ({"start_time": "2022-01-04"}, ("start_time: must be a date with a time",)),
    "start before the first year": ({"start_time": "0001-01-01T00:00:00+05:00"}, ("start_time: must be a date with a time",)),
    "seed negative": ({"seed": -1}, ("seed: must be at least 0",)),
    "seed too large": ({"seed": 2**63}, ("seed: must be below",)),
    "RTT missing": ({"network.rtt_ms": {}}, ("network.rtt_ms: no round-trip time between 'here'", "site dirty")),
    "RTT asymmetric": ({"network.rtt_ms.there": {"here": 90.0}}, ("network.rtt_ms: here to there is 80 ms but there to here is 90 ms",)),
    "RTT negative": ({"network.rtt_ms.here.there": -1.0}, ("network.rtt_ms.here.there: must be at least 0",)),
    "RTT in microseconds": ({"network.rtt_ms.here.there": 80_000.0}, ("network.rtt_ms.here.there: must be at most 60000",)),
    "RTT infinite": ({"network.rtt_ms.here.there": float("inf")}, ("network.rtt_ms.here.there: must be a finite number",)),
    "RTT of a region named like a tag": ({"network.rtt_ms.table": {"file": "far"}}, ("network.rtt_ms.table.file: must be a number",)),
    "RTT of an unknown region": (
        {"network.rtt_ms.mars": {"here": 1.0}},
        ("network.rtt_ms.mars: no site or scheduler is in region 'mars'",),
    ),
    "decision latency kind": (
        {"decision_latency": {"kind": "measured"}},
        ("decision_latency.kind: must be one of 'none', 'fixed', 'affine'",),
    ),
    "decision latency no kind": ({"decision_latency": {"seconds": 1.0}}, ("decision_latency.kind: this field is missing",)),
    "decision latency incomplete": (
        {"decision_latency": {"kind": "affine", "c0_s": 0.1}},
        ("decision_latency.c1_s: this field is missing",),
    ),
    "decision latency negative": (
        {"decision_latency": {"kind": "fixed", "seconds": -0.1}},
        ("decision_latency.seconds: must be at least 0",),
    ),
    "SLO zero": ({"slo.tpot_s": 0}, ("slo.tpot_s: must be above 0 (got 0",)),
    "SLO beyond any": ({"slo.ttft_s": 1e308}, ("slo.ttft_s: must be at most 1e+09",)),
    "no policies": ({"policies": []}, ("policies: must have at least 1 entry",)),
    "policies no tables": ({"policies": ["greedy"]}, ("policies.0: must be a table",)),
    "unknown policy": ({"policies.0.kind": "magic"}, ("policies.0.kind: there is no policy 'magic'; known are round_robin",)),
    "policy kind a list": ({"policies.0.kind": ["greedy"]}, ("policies.0.kind: there is no policy ['greedy']",)),
    "policy without kind": ({"policies": [{"alpha": 1.0}]}, ("policies.0.kind: this field is missing",)),
    "unknown parameter": (
        {"policies": [{"kind": "greedy", "alfa": 1.0}]},
        ("policies.0.alfa: there is no such field; did you mean alpha?",),
    ),
    "parameter of another": ({"policies.0.alpha": 0.5}, ("policies.0.alpha: there is no such field", "round_robin takes label, kind")),
    "alpha above 1": ({"policies": [{"kind": "greedy", "alpha": 1.5}]}, ("policies.0.alpha: must be at most 1 (got 1.5)",)),
    "alpha NaN": ({"policies": [{"kind": "greedy", "alpha": float("nan")}]}, ("policies.0.alpha: must be",)),
    "latency reading": ({"policies": [{"kind": "greedy", "latency": "p99"}]}, ("policies.0.latency: must be 'e2e', 'slo' or 'ttft'",)),
    "same policy twice": ({"policies": [{"kind": "round_robin"}] * 2}, ("policies.1.label: two policies are called 'round_robin'",)),
    "labels differ in case": (
        {"policies": [{"kind": "round_robin", "label": "a"}, {"kind": "greedy", "label": "A"}]},
        ("policies.1.label: two policies are called 'A'",),
    ),
    "label figures": ({"policies.0.label": "figures"}, ("policies.0.label: 'figures' would clash",)),
    "label summary.json": ({"policies.0.label": "Summary.json"}, ("policies.0.label: 'Summary.json' would clash",)),
    "label the folder above": ({"policies.0.label": ".."}, ("policies.0.label: '..' would clash",)),
    "label a path": ({"policies.0.label": "../elsewhere"}, ("policies.0.label: ", "slashes")),
    "label too long": ({"policies.0.label": "x" * 300}, ("policies.0.label: must have at most 60 characters",)),
    # Workload.
    "no workload kind": ({"workload.kind": ABSENT}, ("workload.kind: this field is missing",)),
    "unknown workload": ({"workload.kind": "bursty"}, ("workload.kind: must be one of 'poisson', 'trace' (got 'bursty')",)),
    "rate zero": ({"workload.rate_req_per_s": 0.0}, ("workload.rate_req_per_s: must be above 0",)),
    "rate NaN": ({"workload.rate_req_per_s": float("nan")}, ("workload.rate_req_per_s: must be a finite number",)),
    "rate beyond memory": ({"workload.rate_req_per_s": 1e12}, ("workload: about 4e+12 requests", "lower workload.rate_req_per_s")),
    "no request arrives": ({"workload.rate_req_per_s": 1e-9}, ("workload.rate_req_per_s: no request arrives within",)),
    "two rates": (
        {"workload.rates": [{"start_s": 0.0, "rate_req_per_s": 1.0}]},
        ("workload: give exactly one of rate_req_per_s and rates",),
    ),
    "no rates": ({"workload.rates": [], "workload.rate_req_per_s": ABSENT}, ("workload: rates must begin with a piece at start_s = 0",)),
    "rate piece incomplete": (
        {"workload.rates": [{"start_s": 0.0}], "workload.rate_req_per_s": ABSENT},
        ("workload.rates.0.rate_req_per_s: this field is missing",),
    ),
    "trace option for Poisson": ({"workload.loop": True}, ('workload: loop: has a meaning only for kind = "trace"',)),
    "unknown lengths": ({"workload.lengths": {"distribution": "sharegpt"}}, ("workload.lengths.distribution: must be 'cnn_dailymail',",)),
    "lengths twice": ({"workload.lengths.distribution": "long"}, ("workload.lengths: give exactly one of distribution",)),
    "half the lengths": ({"workload.lengths.osl": ABSENT}, ("workload.lengths: fixed lengths need both isl and osl",)),
    "no token": ({"workload.lengths.osl": 0}, ("workload.lengths.osl: must be at least 1",)),
    "prompt beyond the KV cache": (
        {"workload.lengths.isl": 200_000},
        (
            "workload: request 0 (arrival",
            "ISL 200000, OSL 20) needs 200020 tokens, more than the 172",
            "of the KV cache",
            'oversize = "reject"',
        ),
    ),
    "prompt beyond the model": (
        {"engine.max_model_len": 219},
        ("workload: request 0", "needs 220 tokens, more than the 219 of engine.max_model_len", "nothing is truncated"),
    ),
    "no quantile file": ({"workload.lengths": {"quantiles_file": "gone.csv"}}, ("gone.csv: no such file",)),
    "no trace file": (TRACE, ("trace.csv: no such file",)),
    "trace a directory": ({"workload": {"kind": "trace", "path": "."}}, ("is a directory",)),
    "trace a device": ({"workload": {"kind": "trace", "path": "/dev/zero"}}, ("/dev/zero: is not a regular file",)),
    "trace path empty": ({"workload": {"kind": "trace", "path": ""}}, ("workload.path: must not be empty",)),
    "a rate for a trace": (
        {"workload.kind": "trace", "workload.path": "a.csv"},
        ("workload: rate_req_per_s: a trace brings its own rate",),
    ),
    "thin to more": (
        {"workload": TRACE["workload"] | {"rate_scale": 2.0, "rate_method": "thin"}},
        ('workload: rate_method = "thin" cannot raise a rate',),
    ),
    "rate scale without method": ({"workload": TRACE["workload"] | {"rate_scale": 2.0}}, ("workload: rate_scale needs rate_method",)),
    "slice backwards": (
        {"workload": TRACE["workload"] | {"slice_start_s": 9.0, "slice_end_s": 3.0}},
        ("workload: slice_end_s must be after slice_start_s",),
    ),
    # Grid.
    "unknown grid": ({"grid": {"kind": "live"}}, ("grid.kind: must be one of 'constant', 'table', 'file' (got 'live')",)),
    "grid no table": ({"grid": 300}, ("grid: must be a table",)),
    "constant CI negative": ({"grid.ci_g_per_kwh.PL": -5.0}, ("grid.ci_g_per_kwh.PL: must be at least 0 (got -5.0)",)),
    "constant CI in milligrams": ({"grid.ci_g_per_kwh.PL": 7e7}, ("grid.ci_g_per_kwh.PL: must be at most 1e+06",)),
    "constant CI text": ({"grid.ci_g_per_kwh.PL": "700"}, ("grid.ci_g_per_kwh.PL: must be a number (got '700')",)),
    "constant CI NaN": ({"grid.ci_g_per_kwh": float("nan")}, ("grid.ci_g_per_kwh: must be a finite number (got nan)",)),
    "constant CI of no zone": ({"grid.ci_g_per_kwh": {"FR": 50.0}}, ("grid.ci_g_per_kwh: has no zone PL",)),
    "unknown zone": ({"grid": {"kind": "table"}, "sites.0.zone": "ATLANTIS"}, ("no zone ATLANTIS",)),
    "no grid file": (GRID, ("ci.csv: does not exist",)),
    "grid a directory": ({"grid": {"kind": "file", "path": "."}}, ("is a directory",)),
    "no grid path": ({"grid": {"kind": "file", "path": []}}, ("grid.path: must have at least 1 entry",)),
    "negative average": (GRID | {"grid.allow_negative": True}, ("grid: allow_negative is only for signal = 'marginal'",)),
}


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


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Refuse:
    """Runs a scenario that must be refused before anything is compiled or written."""

    def never(*_: Any) -> None:
        raise AssertionError("the fault was not found before the run began")

    monkeypatch.setattr(RUN, "_run_policy", never)
    monkeypatch.chdir(tmp_path)

    def run(scenario: str | Path, *parts: str, arguments: tuple[str, ...] = ()) -> None:
        out = tmp_path / "out"
        refused(call(capsys, monkeypatch, "run", scenario, "--out", out, *arguments), out, *parts)
        assert not (tmp_path / "out.partial").exists()

    return run


@pytest.mark.parametrize("case", SCENARIOS)
def test_scenarios(case: str, refuse: Refuse, tmp_path: Path) -> None:
    changes, parts = SCENARIOS[case]
    refuse(write_scenario(tmp_path, changes), *parts)


# Id: (bytes of the scenario file, what the sentence must hold).
SCENARIO_FILES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b"", ("the file is empty",)),
    "blank": (b"\xef\xbb\xbf \r\n\n", ("the file is empty",)),
    "not TOML": (b"name: small\nseed: 1\n", ("not valid TOML", "line 1")),
    "cut short": (b'name = "small"\n[workload\n', ("not valid TOML", "line 2")),
    "a key twice": (b"seed = 1\nseed = 2\n", ("not valid TOML", "line 2")),
    "month 13": (b"start_time = 2022-13-04T11:00:00Z\n", ("not valid TOML",)),
    "UTF-16": ('name = "small"\n'.encode("utf-16"), ("is not UTF-8 text",)),
    "Latin-1": ('name = "Orléans"\n'.encode("latin-1"), ("is not UTF-8 text",)),
    "binary": (bytes(range(256)), ("is not UTF-8 text",)),
    "gzip": (gzip.compress(b"seed = 1\n"), ("is not UTF-8 text",)),
    "NUL": (b"seed = 1\0\n", ("not valid TOML",)),
    "nested beyond reason": (b"a = " + b"[" * 100_000, ("too deeply nested",)),
    "a number beyond reason": (b"seed = " + b"9" * 5000, ("not valid TOML",)),
    "a line break in a name": (b'"a\\nb\\u001b[2J" = 1\n', ("a b\\x1b[2J: there is no such field",)),
}


@pytest.mark.parametrize("case", SCENARIO_FILES)
def test_scenario_files(case: str, refuse: Refuse, tmp_path: Path) -> None:
    content, parts = SCENARIO_FILES[case]
    (tmp_path / "broken.toml").write_bytes(content)
    refuse(tmp_path / "broken.toml", *(("broken.toml: ",) if case != "a line break in a name" else ()), *parts)


def test_scenario_paths(refuse: Refuse, tmp_path: Path) -> None:
    refuse("two-regions", "two-regions: there is no such scenario file; shipped scenarios are ", "two-region")
    refuse("", "is a directory")
    refuse(tmp_path, f"{tmp_path}: is a directory; give the scenario's .toml file")
    refuse("/dev/zero", "/dev/zero: is not a regular file")
    refuse("x" * 5000, "cannot be read (File name too long)")
    refuse(write_scenario(tmp_path) / "inside.toml", "there is no such scenario file")
    os.mkfifo(tmp_path / "pipe.toml")
    refuse(tmp_path / "pipe.toml", "is not a regular file")


OVERRIDES: dict[str, tuple[str, tuple[str, ...]]] = {
    "no value": ("seed", ("--set seed: write a.b=value",)),
    "no field": ("=3", ("--set =3: write a.b=value",)),
    "an empty part": ("slo..ttft_s=3", ("--set slo..ttft_s=3: write a.b=value",)),
    "empty value": ("seed=", ("seed: must be a whole number (got '')",)),
    "unknown field": ("engine.magic=3", ("engine.magic: there is no such field",)),
    "unknown table": ("engines.max_num_seqs=3", ("engines: there is no such field; did you mean engine?",)),
    "into a number": ("seed.deeper=3", ("--set seed.deeper=3: 1 has no field 'deeper'",)),
    "into a name": ("engine.coefficients.power.host_w=3", ("has no field 'power'",)),
    "into a date": ("start_time.year=3", ("has no field 'year'",)),
    "into a list by name": ("sites.clean.pue=1.5", ("'clean' must be a number from 0 to 1, or * for every entry",)),
    "beyond a list": ("sites.2.pue=1.5", ("'2' must be a number from 0 to 1",)),
    "beyond any list": (f"sites.{'9' * 5000}.pue=1", ("must be a number from 0 to 1",)),
    "thousands separator": ("horizon_s=1,000", ("horizon_s: must be a number (got '1,000')",)),
    "two values": ('seed=1\nname="x"', ("seed: must be a whole number",)),
    "no number": ("horizon_s=long", ("horizon_s: must be a number (got 'long')",)),
    "infinite": ("horizon_s=inf", ("horizon_s: must be a finite number",)),
    "every entry": ("sites.*.pue=0.5", ("sites.0.pue: must be at least 1 (got 0.5) (and 1 more fault)",)),
    "deeper than any field": (f"{'.'.join('a' * 2000)}=1", ("write a.b=value",)),
    "policy out of range": ("policies.7.alpha=0.5", ("'7' must be a number from 0 to 0",)),
}


@pytest.mark.parametrize("case", OVERRIDES)
def test_overrides(case: str, refuse: Refuse, tmp_path: Path) -> None:
    override, parts = OVERRIDES[case]
    refuse(write_scenario(tmp_path), *parts, arguments=("--set", override))


# Id: (bytes of trace.csv, further workload fields, what the sentence must hold beside the file's name).
TRACES: dict[str, tuple[str | bytes, dict[str, Any], tuple[str, ...]]] = {
    "empty": ("", {}, ("is empty",)),
    "header only": (HEAD, {}, ("has a header but no rows",)),
    "header only, blank lines": (HEAD + "\r\n\r\n", {}, ("has a header but no rows",)),
    "no header": ("0.5,10,20\n1.0,10,20\n", {}, ("row 1", "no known trace format")),
    "semicolons": (HEAD.replace(",", ";") + "0;1;1\n", {}, ("row 1", "no known trace format")),
    "column twice": ("arrival_s,isl,osl,isl\n0,1,1,1\n", {}, ("row 1", "column isl appears 2 times")),
    "time NaN": (HEAD + "0,10,20\nnan,10,20\n", {}, ("row 3, column arrival_s: nan is not a finite time",)),
    "time infinite": (HEAD + "0,10,20\ninf,10,20\n", {}, ("row 3, column arrival_s: inf is not a finite time",)),
    "time negative": (HEAD + "-1,10,20\n", {}, ("row 2, column arrival_s: -1 is negative",)),
    "time text": (HEAD + "0,10,20\nnoon,10,20\n", {}, ("row 3, column arrival_s: 'noon' is not a number",)),
    "time empty": (HEAD + "0,10,20\n,10,20\n", {}, ("row 3, column arrival_s: is empty",)),
    "stamp text": (AZURE + "2023-11-16 18:00:00,1,1\nnoon,1,1\n", {}, ("row 3, column TIMESTAMP: 'noon'",)),
    "stamp beyond nanoseconds": (AZURE + "9999-01-01 00:00:00,1,1\n", {}, ("row 2, column TIMESTAMP", "9999-01-01")),
    "stamps mixed": (AZURE + "2023-11-16 18:00:00Z,1,1\n2023-11-16 18:00:01,1,1\n", {}, ("row 3", "with and without an offset")),
    "relative and absolute mixed": (HEAD + "1,1,1\n1700000000,1,1\n", {}, ("row 3, column arrival_s", "mixed")),
    "milliseconds since 1970": (HEAD + "1700000000000,1,1\n", {}, ("column arrival_s", "not a finer unit")),
    "tokens zero": (HEAD + "0,10,20\n1,10,0\n", {}, ("row 3, column osl: 0 tokens", 'invalid_rows = "drop"')),
    "tokens negative": (HEAD + "0,-3,20\n", {}, ("row 2, column isl: -3 tokens",)),
    "tokens NaN": (HEAD + "0,nan,20\n", {"invalid_rows": "drop"}, ("row 2, column isl: nan is not a whole number",)),
    "tokens infinite": (HEAD + "0,inf,20\n", {}, ("row 2, column isl: inf is not a whole number",)),
    "tokens a fraction": (HEAD + "0,1.5,20\n", {}, ("row 2, column isl: 1.5 is not a whole number",)),
    "tokens text": (HEAD + "0,1,1\n1,many,20\n", {}, ("row 3, column isl: 'many' is not a number",)),
    "tokens missing": (HEAD + "0,,20\n", {}, ("row 2, column isl: is empty",)),
    "tokens NA": (HEAD + "0,NA,20\n", {}, ("row 2, column isl: 'NA' is not a number",)),
    "tokens too many": (HEAD + "0,3000000000,20\n", {}, ("row 2, column isl: 3000000000 is too large",)),
    "thousands separator": (HEAD + '0,"1,234",20\n', {}, ("row 2, column isl: '1,234' has a thousands separator; write 1234",)),
    "all rows dropped": (HEAD + "0,10,0\n", {"invalid_rows": "drop"}, ("leaves no row",)),
    "cut row": (HEAD + "0,10,20\n1,10\n", {}, ("row 3: is cut short",)),
    "long row": (HEAD + "0,10,20,30\n", {}, ("row 2: has 4 field(s) where the header has 3",)),
    "open quote": (HEAD + '0,"10,20\n1,10,20\n', {}, ("row 2",)),
    "UTF-16": ((HEAD + "0,1,1\n").encode("utf-16"), {}, ("is UTF-16 text",)),
    "UTF-16 without mark": ((HEAD + "0,1,1\n").encode("utf-16-le"), {}, ("holds binary data",)),
    "Latin-1": ((HEAD + "0,1,1\n1,é,1\n").encode("latin-1"), {}, ("is not UTF-8 text",)),
    "binary": (bytes(range(256)) * 9, {}, ("holds binary data",)),
    "gzip cut short": (gzip.compress((HEAD + "0,1,1\n" * 99).encode())[:-9], {}, ("truncated gzip data",)),
    "gzip of nothing": (gzip.compress(b""), {}, ("is empty",)),
    "JSON line cut short": ('{"timestamp": 0, "input_length": 5, "output_length": 5}\n{"timestamp": 1, "inp', {}, ("row 2", "truncated")),
    "JSON without a key": ('{"timestamp": 0, "input_length": 5}\n', {}, ("row 1: has no key 'output_length'",)),
    "JSON of other keys": ('{"a": 0}\n', {}, ("row 1: the keys 'a'",)),
    "JSON text": ('{"timestamp": "0", "input_length": 5, "output_length": 5}\n', {}, ('row 1, column timestamp: "0" is not a number',)),
    "JSON true": ('{"timestamp": 0, "input_length": true, "output_length": 5}\n', {}, ("row 1, column input_length: true",)),
    "JSON NaN": ('{"timestamp": NaN, "input_length": 5, "output_length": 5}\n', {}, ("row 1, column timestamp: nan",)),
    "JSON nested beyond reason": ("{" + '"a": [' * 100_000, {}, ("row 1",)),
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
    "empty": ("", {}, ("is empty",)),
    "header only": ("datetime_utc,FR,PL\n", {}, ("no rows",)),
    "no header": (HOURS.removeprefix("datetime_utc,FR,PL\n"), {}, ("row 1", "first column")),
    "zone lacking": ("datetime_utc,FR\n2022-01-04T11:00Z,1\n", {}, ("has no zone PL",)),
    "gap": (HOURS.replace("2022-01-04T11:00Z,3,4\n", ""), {}, ("zone FR has no value at hour 2022-01-04T11:00Z (no row)", "grid.fill")),
    "empty cell": (HOURS.replace(",3,", ",,"), {}, ("zone FR has no value at hour 2022-01-04T11:00Z (row 3 is empty)",)),
    "NaN cell": (HOURS.replace(",3,", ",NaN,"), {}, ("zone FR has no value at hour 2022-01-04T11:00Z",)),
    "text cell": (HOURS.replace(",3,", ",high,"), {}, ("row 3, zone FR, hour 2022-01-04T11:00Z: 'high' is not a plain number",)),
    "thousands separator": (HOURS.replace(",3,", ',"1,234",'), {}, ("row 3, zone FR", "'1,234' is not a plain number")),
    "infinite cell": (HOURS.replace(",3,", ",inf,"), {}, ("row 3, zone FR",)),
    "negative cell": (HOURS.replace(",3,", ",-3,"), {}, ("row 3, zone FR", "-3 is negative")),
    "negative marginal, not declared": (HOURS.replace(",3,", ",-3,"), {"signal": "marginal"}, ("row 3, zone FR", "allow_negative")),
    "hour twice": (HOURS + "2022-01-04T11:00Z,9,4\n", {}, ("zone FR has two values at hour 2022-01-04T11:00Z", "row 3 and row 5")),
    "before the file": (
        HOURS.replace("2022-01-04", "2022-01-05"),
        {},
        ("zone FR has no value at hour 2022-01-04T11:00Z, outside the file",),
    ),
    "after the file": (HOURS.replace("2022-01-04", "2022-01-03"), {}, ("zone FR has no value at hour 2022-01-04T11:00Z, outside",)),
    "nothing to hold": (HOURS.replace(",1,", ",,").replace(",3,", ",,"), {"fill": "hold"}, ("zone FR", "none before it")),
    "text time": (HOURS + "noon,1,1\n", {}, ("row 5, column 'datetime_utc': 'noon'",)),
    "cut row": (HOURS + "2022-01-04T13:00Z,1\n", {}, ("row 5 has 2 cells where the header has 3",)),
    "UTF-16": (HOURS.encode("utf-16"), {}, ("UTF-16",)),
    "binary": (bytes(range(256)), {}, ("UTF-8",)),
    "gzip without its name": (gzip.compress(HOURS.encode()), {}, (".gz",)),
    "marginal as average": (HOURS.replace("FR", "FR marginal"), {"zone_column": {"FR": "FR marginal"}}, ("row 1", "'FR marginal'")),
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


QUANTILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "wrong header": ("p,isl,osl\n0,1,1\n1,2,2\n", ("row 1", "probability,isl_tokens,osl_tokens")),
    "one row": ("probability,isl_tokens,osl_tokens\n0,1,1\n", ("has 1 row(s)",)),
    "falling": ("probability,isl_tokens,osl_tokens\n0,5,5\n1,4,5\n", ("row 3, column isl_tokens: 4 after 5",)),
    "NaN": ("probability,isl_tokens,osl_tokens\n0,5,5\n1,nan,5\n", ("row 3, column isl_tokens",)),
    "half a table": ("probability,isl_tokens,osl_tokens\n0,5,5\n0.5,6,6\n", ("column probability: ends at 0.5",)),
    "a cell beyond reason": ("probability,isl_tokens,osl_tokens\n0,5,5\n1," + "6" * 200_000 + ",5\n", ("row 3",)),
}


@pytest.mark.parametrize("case", QUANTILES)
def test_quantile_files(case: str, refuse: Refuse, tmp_path: Path) -> None:
    content, parts = QUANTILES[case]
    (tmp_path / "lengths.csv").write_text(content)
    refuse(write_scenario(tmp_path, {"workload.lengths": {"quantiles_file": "lengths.csv"}}), "lengths.csv", *parts)


# Id: (path and value in an inline table of coefficients, what the sentence must hold).
COEFFICIENTS: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "misspelt": ("decode_time.alpha_0", 0.01, ("decode_time.alpha_0: there is no such field; did you mean alpha0?",)),
    "missing": ("decode_time.alpha0", ABSENT, ("decode_time.alpha0: this field is missing",)),
    "missing table": ("power", ABSENT, ("power: this field is missing",)),
    "text": ("decode_time.alpha0", "14200e-6", ("decode_time.alpha0: must be a number (got '14200e-6')",)),
    "NaN": ("prefill_time.b0", float("nan"), ("prefill_time.b0: must be",)),
    "negative": ("prefill_time.tok_slope_below", -1e-4, ("prefill_time.tok_slope_below: must be at least 0",)),
    "negative power": ("power.idle_w_per_gpu", -50.0, ("power.idle_w_per_gpu: must be at least 0",)),
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


# --- The folder of results


def test_out_folders(refuse: Refuse, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = write_scenario(tmp_path)
    taken = tmp_path / "taken"
    taken.mkdir()
    for out, part in (
        (taken, "taken: exists already and is left as it is"),
        (scenario, "small.toml: exists already"),
        ("", "exists already"),
        ("/", "exists already"),
        ("..", "exists already"),
        (scenario / "below", "cannot write results (Not a directory); make room or choose another --out"),
        (tmp_path / ("x" * 300), "cannot write results (File name too long); make room or choose another --out"),
        ("/proc/nowhere", "cannot write results"),
    ):
        refused(call(capsys, monkeypatch, "run", scenario, "--out", out), None, part)
    assert not list(taken.iterdir())
    refused(call(capsys, monkeypatch, "run", scenario, "--resume"), None, "--resume needs the --out")
    refuse(scenario, "out.partial: there is no unfinished run to go on with; leave out --resume", arguments=("--resume",))


def test_unfinished_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, out, partial = write_scenario(tmp_path), tmp_path / "out", tmp_path / "out.partial"
    partial.write_text("a file, not a folder")
    refused(call(capsys, monkeypatch, "run", scenario, "--out", out), out, "out.partial: ")
    refused(call(capsys, monkeypatch, "run", scenario, "--out", out, "--resume"), out, "out.partial: ")
    partial.unlink()
    partial.mkdir()
    (partial / "round_robin").mkdir()
    refused(
        call(capsys, monkeypatch, "run", scenario, "--out", out, "--resume"), out, "out.partial: the unfinished run is of another scenario"
    )
    (partial / "scenario.toml").write_text("seed = 2\n")
    refused(call(capsys, monkeypatch, "run", scenario, "--out", out), out, "out.partial: an unfinished run is here; go on with --resume")
    refused(call(capsys, monkeypatch, "run", scenario, "--out", out, "--resume"), out, "is of another scenario")
    (partial / "scenario.toml").write_bytes(b"\xff\xfe")
    refused(call(capsys, monkeypatch, "run", scenario, "--out", out, "--resume"), out, "is of another scenario")


def no_space(*_: Any, **__: Any) -> Any:
    """What a full disk says."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # One run after another in one folder, each stopped by the next kind of file that finds no room; the last one is whole.
    scenario, out = write_scenario(tmp_path), tmp_path / "out"
    monkeypatch.setattr(RUN, "CHECKPOINT_EVERY_S", 0.0)
    sentence = ("No space left on device", "make room, then go on with --resume")
    with monkeypatch.context() as full:
        full.setattr(Path, "mkdir", no_space)
        refused(call(capsys, full, "run", scenario, "--out", out), out, "(No space left on device); make room or choose another --out")
    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", no_space)
        refused(call(capsys, full, "run", scenario, "--out", out), out, "(No space left on device); make room or choose another --out")
    resume: tuple[str, ...] = ()  # so far there is nothing to go on with
    for place, name in (
        (pq, "write_table"),
        (jaxserve.store.np, "savez"),
        (pq, "ParquetWriter"),
        (jaxserve.store, "write_frame"),
        (jaxserve.store, "write_json"),
        (Path, "rename"),
    ):
        with monkeypatch.context() as full:
            full.setattr(place, name, no_space)
            refused(call(capsys, full, "run", scenario, "--out", out, *resume), out, *sentence)
        resume = ("--resume",)
    with monkeypatch.context() as full:
        full.setattr("matplotlib.figure.Figure.savefig", no_space)
        refused(call(capsys, full, "run", scenario, "--out", out, *resume), out, ".png", "No space left on device")
    assert call(capsys, monkeypatch, "run", scenario, "--out", out, "--resume").code == 0
    assert (out / "summary.json").exists() and not (tmp_path / "out.partial").exists()
    assert call(capsys, monkeypatch, "run", scenario, "--out", tmp_path / "roomy").code == 0
    for name in ("round_robin/requests.parquet", "round_robin/ledger.parquet"):
        assert (out / name).read_bytes() == (tmp_path / "roomy" / name).read_bytes()


def test_a_write_that_the_system_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Not every library tells a failed write as Python does: here the system itself refuses it, in the middle of a Parquet file.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    honest = jaxserve.store.RunWriter.add_requests

    def cramped(self: jaxserve.store.RunWriter, table: pa.Table) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
        try:
            honest(self, table)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(jaxserve.store.RunWriter, "add_requests", cramped)
    out = tmp_path / "out"
    refused(
        call(capsys, monkeypatch, "run", write_scenario(tmp_path), "--out", out), out, "cannot write results (File too large)", "--resume"
    )


def test_a_damaged_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, out = write_scenario(tmp_path), tmp_path / "out"
    with monkeypatch.context() as full:
        full.setattr(RUN, "_run_policy", no_space)
        refused(call(capsys, full, "run", scenario, "--out", out), out, "No space left")
    checkpoint = tmp_path / "out.partial" / "round_robin" / "checkpoint.npz"
    for content in (
        b"",
        b"PK\x03\x04 no more",
        b"text",
        b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (0,), }\n",
    ):
        checkpoint.write_bytes(content)
        refused(
            call(capsys, monkeypatch, "run", scenario, "--out", out, "--resume"),
            out,
            "checkpoint.npz: the checkpoint is damaged; remove it",
        )


# --- The other commands


def test_check_refuses_what_run_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for changes in (
        {"sites.0.pue": 0.5},
        {"policies.0.kind": "magic"},
        {"workload.lengths.isl": 200_000},
        {"grid": {"kind": "file", "path": "no.csv"}},
    ):
        refused(call(capsys, monkeypatch, "check", write_scenario(tmp_path, changes)), None)


def test_sweeps(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = write_scenario(tmp_path)
    for arguments, parts in (
        (("--axis", "seed"), ("--axis seed: write a.b=value,value",)),
        (("--axis", "seed=1,1"), ("axis seed: a value appears twice",)),
        (("--axis", "seed=1", "--axis", "seed=2"), ("--axis seed=2: seed has an axis already",)),
        (("--axis", "sed=1"), ("sed: there is no such field; did you mean seed?",)),
        (("--axis", "seed=1,two"), ("seed: must be a whole number (got 'two')",)),
        (("--axis", "seed=1,NaN"), ("seed: must be a whole number",)),
        (("--axis", "seed=1", "--policy", "1"), ("policy: there is no policy number 1; the scenario has 1",)),
        (("--axis", "seed=1", "--policy", "-1"), ("policy: there is no policy number -1",)),
        (("--axis", "policies.0.alpha=0.5"), ("policies.0.alpha: there is no such field",)),
        (("--axis", "sites.0.nodes=1,2"), ("sweep: the variant 2 differs from the first in ", "engines")),
        (("--axis", "engine.max_num_seqs=16,32"), ("differs from the first in engine.max_num_seqs",)),
        (("--axis", "horizon_s=4.0,8.0"), ("differs from the first in horizon_s",)),
        (("--axis", "seed=1", "--out", str(tmp_path)), ("exists already",)),
        (("--axis", "seed=1", "--out", str(tmp_path / "no" / "x.nc")), ("there is no folder",)),
    ):
        refused(call(capsys, monkeypatch, "sweep", scenario, *arguments), None, *parts)


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Wrong options are typer's to tell, in more than one line; never with a traceback.
    for arguments in (
        ("run",),
        ("fly",),
        ("run", "two-region", "--fast"),
        ("sweep", "two-region"),
        ("sweep", "two-region", "--axis", "seed=1", "--policy", "x"),
    ):
        outcome = call(capsys, monkeypatch, *arguments)
        assert outcome.code == 2 and "Usage: " in outcome.err and "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("run", "two-region", "--set", "sites.0.pue=0.5", "--out", "out"), "two-region: sites.0.pue: must be at least 1 (got 0.5)"),
        (("check", "nowhere.toml"), "nowhere.toml: there is no such scenario file"),
    ],
)
def test_through_a_process_of_its_own(arguments: tuple[str, ...], part: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve.cli", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    refused(Outcome(done.returncode, done.stdout, done.stderr), tmp_path / "out", part)
    assert not list(tmp_path.iterdir())
