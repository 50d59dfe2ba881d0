"""Bad scenarios and overrides are one sentence that says where, exit code 2, and nothing left behind. Never a traceback, never a hang.

The files that a scenario names are for `test_bad_input_files`, the folder of results and the other commands for `test_bad_input_results`.
"""

import gzip
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.helpers import ABSENT, GRID, TRACE, Refuse, write_scenario

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
        {"decision_latency": {"kind": "psychic"}},
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
    "into a list by name": ("sites.claen.pue=1.5", ("'claen' must be a number from 0 to 1, the name of an entry, or * for every entry",)),
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
