"""The folder that a run leaves: what the contract lists under "Output of a run", column by column, and what it promises."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import jaxlib
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jaxserve
from jaxserve.units import J_PER_KWH
from tests.cli.helpers import call, write_scenario

TEXT, FLOAT, INT = pa.dictionary(pa.int32(), pa.string()), pa.float64(), pa.int32()
REQUEST_COLUMNS = {
    "request_id": pa.int64(), "arrival_s": FLOAT, "scheduler": TEXT, "isl": INT, "osl": INT, "dc": TEXT, "node": INT, "engine": INT,
    "decision_s": FLOAT, "dc_arrival_s": FLOAT, "admit_s": FLOAT, "first_token_s": FLOAT, "finish_s": FLOAT, "ttft_s": FLOAT,
    "tpot_s": FLOAT, "slo_ok": pa.bool_(), "status": TEXT,
}  # fmt: skip
LEDGER_COLUMNS = {
    "interval_start_s": FLOAT, "interval_s": FLOAT, "dc": TEXT, "prefill_j": FLOAT, "decode_j": FLOAT, "idle_j": FLOAT, "host_j": FLOAT,
    "facility_j": FLOAT, "ci_g_per_kwh": FLOAT, "carbon_g": FLOAT,
}  # fmt: skip
TIMES = ["decision_s", "dc_arrival_s", "admit_s", "first_token_s", "finish_s"]
POLICIES = ("round_robin", "green")
LIMIT = 400  # tokens of a request
CI, PUE = {"clean": 50.0, "dirty": 700.0}, {"clean": 1.1, "dirty": 1.2}


def trace() -> str:
    """Sixty requests: the first at 0, every seventh of one token, every tenth longer than any engine takes, the last among them."""
    rows = ["arrival_s,isl,osl"]
    for r in range(60):
        isl, osl = (LIMIT, 1) if r % 10 == 9 else (20 + 5 * r, 1 if r % 7 == 0 else 2 + r)
        rows.append(f"{r * 0.065:.4f},{isl},{osl}")
    return "\n".join(rows) + "\n"


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two policies on that trace."""
    folder = tmp_path_factory.mktemp("scenario")
    (folder / "trace.csv").write_text(trace())
    changes = {
        "workload": {"kind": "trace", "path": "trace.csv"},
        "engine.max_model_len": LIMIT,
        "engine.oversize": "reject",
        "policies": [{"kind": "round_robin"}, {"kind": "greedy", "alpha": 0.0, "label": "green"}],
    }
    return write_scenario(folder, changes)


@pytest.fixture(scope="module")
def folder(scenario: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run from the command line, a process of its own."""
    out = tmp_path_factory.mktemp("runs") / "first"
    command = [sys.executable, "-m", "jaxserve.cli", "run", scenario, "--out", out, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == json.loads((out / "summary.json").read_text())  # --json is the summary and nothing else
    return out


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest, folder: Path) -> Path:
    """The folder of one policy."""
    return folder / str(request.param)


def requests_of(policy: Path) -> pd.DataFrame:
    """Its requests."""
    return pd.read_parquet(policy / "requests.parquet")


def test_the_files_are_those_of_the_contract_and_no_others(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"scenario.toml", "inputs.json", "summary.json", "figures", *POLICIES}
    for label in POLICIES:
        assert {path.name for path in (folder / label).iterdir()} == {
            "requests.parquet", "ledger.parquet", "engines.parquet", "summary.json",
        }  # fmt: skip
    assert not list(folder.parent.glob("*.partial"))


def test_columns_and_types(policy: Path) -> None:
    for name, columns in (("requests.parquet", REQUEST_COLUMNS), ("ledger.parquet", LEDGER_COLUMNS)):
        schema = pq.read_schema(policy / name)
        assert schema.names == list(columns)
        for column, kind in columns.items():
            found = schema.field(column).type
            if pa.types.is_dictionary(kind):  # the width of the code is the writer's business
                assert pa.types.is_dictionary(found) and found.value_type in (pa.string(), pa.large_string()), (column, found)
            else:
                assert found == kind, (column, found)


def test_each_request_ends_once_in_order_of_its_number(policy: Path) -> None:
    requests = requests_of(policy)
    assert requests["request_id"].tolist() == list(range(60))
    assert requests["arrival_s"].is_monotonic_increasing and requests["arrival_s"].iloc[0] == 0.0
    status = requests["status"].value_counts()
    assert (status["finished"], status["rejected"]) == (54, 6)
    metrics = json.loads((policy / "summary.json").read_text())["metrics"]
    assert (metrics["requests"], metrics["finished"], metrics["rejected"]) == (60, 54, 6)
    served = requests[requests["status"] == "finished"]
    assert metrics["output_tokens_asked"] == requests["osl"].sum() and metrics["output_tokens_served"] == served["osl"].sum()


def test_rejected_rows_have_no_times_and_miss_the_slo(policy: Path) -> None:
    requests = requests_of(policy)
    rejected = requests[requests["status"] == "rejected"]
    assert rejected["request_id"].tolist() == [9, 19, 29, 39, 49, 59]  # also the very last one
    assert (rejected["isl"] == LIMIT).all()  # not truncated
    assert rejected[[*TIMES, "ttft_s", "tpot_s", "dc", "node", "engine"]].isna().all(axis=None)
    assert not rejected["slo_ok"].any()
    assert rejected["scheduler"].notna().all()


def test_times_of_finished_rows(policy: Path) -> None:
    requests = requests_of(policy)
    finished = requests[requests["status"] == "finished"]
    assert finished[[*TIMES, "ttft_s", "dc", "node", "engine"]].notna().all(axis=None)
    steps = finished[["arrival_s", *TIMES]].to_numpy()
    assert (np.diff(steps, axis=1) >= 0).all()
    np.testing.assert_array_equal(finished["ttft_s"], finished["first_token_s"] - finished["arrival_s"])
    first = finished.iloc[0]
    assert first["arrival_s"] == 0.0 and 0 < first["ttft_s"] < 1  # an arrival at t = 0 works
    away = finished["scheduler"].map({"one": "clean", "two": "dirty"}).astype(str) != finished["dc"].astype(str)
    np.testing.assert_allclose((finished["dc_arrival_s"] - finished["decision_s"])[away], 0.08, rtol=0, atol=1e-12)
    assert (finished["dc_arrival_s"] == finished["decision_s"])[~away].all()


def test_tpot_is_undefined_for_one_token_and_leaves_the_first_token_out(policy: Path) -> None:
    requests = requests_of(policy)
    one = requests["osl"] == 1
    assert one.sum() > 6 and requests.loc[one, "tpot_s"].isna().all()
    column = pq.read_table(policy / "requests.parquet", columns=["tpot_s"])["tpot_s"]
    assert column.null_count == one.sum()  # null, not NaN: other readers tell them apart
    assert (requests.loc[one, "first_token_s"] == requests.loc[one, "finish_s"])[requests["status"] == "finished"].all()
    assert requests.loc[one & (requests["status"] == "finished"), "slo_ok"].all()  # judged by TTFT alone
    many = requests[~one]
    np.testing.assert_array_equal(many["tpot_s"], (many["finish_s"] - many["first_token_s"]) / (many["osl"] - 1))
    assert (many["tpot_s"] > 0.01).all()
    assert json.loads((policy / "summary.json").read_text())["metrics"]["tpot_undefined"] == int(
        (one & (requests["status"] == "finished")).sum()
    )


def test_the_ledger_adds_up(policy: Path) -> None:
    ledger = pd.read_parquet(policy / "ledger.parquet")
    assert ledger["interval_start_s"].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0] and (ledger["interval_s"] == 1.0).all()
    assert ledger["dc"].tolist() == ["clean", "dirty"] * 4
    parts = ledger[["prefill_j", "decode_j", "idle_j", "host_j"]]
    assert (parts >= 0).all(axis=None)
    assert ledger["ci_g_per_kwh"].tolist() == [CI[dc] for dc in ledger["dc"]]
    pue = ledger["dc"].map(PUE).astype(float)
    np.testing.assert_allclose(ledger["facility_j"], pue * parts.sum(axis=1), rtol=1e-14)
    np.testing.assert_allclose(ledger["carbon_g"], ledger["facility_j"] * ledger["ci_g_per_kwh"] / J_PER_KWH, rtol=1e-14)
    metrics = json.loads((policy / "summary.json").read_text())["metrics"]
    assert metrics["carbon_g"] == pytest.approx(ledger["carbon_g"].sum(), rel=1e-9)
    for part in ("prefill", "decode", "idle", "host"):
        assert metrics[f"{part}_energy_j"] == pytest.approx(ledger[f"{part}_j"].sum(), rel=1e-9)
    engines = pd.read_parquet(policy / "engines.parquet")
    assert len(engines) == 4
    np.testing.assert_allclose(engines[["prefill_s", "decode_s", "idle_s"]].sum(axis=1), 4.0, rtol=1e-12)  # of the horizon


def test_summaries(folder: Path) -> None:
    whole = json.loads((folder / "summary.json").read_text())
    assert list(whole["policies"]) == list(POLICIES)
    assert (whole["scenario"], whole["seed"]) == ("small", 1)
    for label in POLICIES:
        single, row = json.loads((folder / label / "summary.json").read_text()), whole["policies"][label]
        assert single["policy"]["label"] == label and single["versions"] == whole["versions"]
        assert row["baseline"] == "round_robin"  # a saving names what it is measured against and stands beside its attainment
        assert {"saving_vs_baseline", "slo_attainment"} <= set(row)
        assert row["carbon_g"] == pytest.approx(single["metrics"]["carbon_g"], rel=1e-9)
        assert single["steps_above_board"] == 0
        assert single["timing"]["wall_s"] > 0 and single["device"] in ("cpu", "gpu")
        attained = requests_of(folder / label)["slo_ok"].mean()
        assert single["metrics"]["slo_attainment"] == pytest.approx(attained, rel=1e-12)
    assert whole["policies"]["green"]["saving_vs_baseline"] > 0


def test_the_inputs_are_named_and_hashed(folder: Path, scenario: Path) -> None:
    """As `sha256sum` has them, so that a folder alone proves what was run."""
    told = json.loads((folder / "inputs.json").read_text())
    trace_csv = (scenario.parent / "trace.csv").resolve()
    assert told["files_sha256"] == {str(trace_csv): hashlib.sha256(trace_csv.read_bytes()).hexdigest()}
    assert told["scenario_sha256"] == hashlib.sha256((folder / "scenario.toml").read_bytes()).hexdigest()
    summary = json.loads((folder / "summary.json").read_text())
    assert told["versions"] == summary["versions"] and told["versions"]["jaxlib"] == jaxlib.__version__
    assert told["coefficients"]["model"] == "Llama-3.1-8B" and len(told["coefficients"]["sha256"]) == 64
    assert told["code_sha256"] == {}


def test_figures_exist(folder: Path) -> None:
    figures = {"carbon_vs_violation.png", "ttft_cdf.png", "power_and_ci_round_robin.png", "power_and_ci_green.png"}
    assert {path.name for path in (folder / "figures").iterdir()} == figures
    for name in figures:
        data = (folder / "figures" / name).read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 5000


def test_the_resolved_scenario_runs_again_to_the_same_bytes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # its paths are absolute, so it means the same from anywhere
    outcome = call(capsys, monkeypatch, "run", folder / "scenario.toml", "--out", tmp_path / "again")
    assert outcome.code == 0 and "saving vs" in outcome.out and "again" in outcome.out.replace("\n", "")
    assert (tmp_path / "again" / "scenario.toml").read_bytes() == (folder / "scenario.toml").read_bytes()
    for label in POLICIES:
        for name in ("requests.parquet", "ledger.parquet", "engines.parquet"):
            assert (tmp_path / "again" / label / name).read_bytes() == (folder / label / name).read_bytes(), (label, name)


def test_the_api_gives_the_same_tables(folder: Path, scenario: Path) -> None:
    results = jaxserve.run(scenario)
    assert list(results.frame.index) == list(POLICIES) and results.frame.attrs["units"]["carbon_g"] == "g"
    assert results.dataset["carbon_g"].attrs["units"] == "g"
    run = results["green"]
    del results  # its folder stays as long as anything needs it
    pd.testing.assert_frame_equal(run.requests, requests_of(folder / "green"), check_exact=True)
    assert run.ledger["carbon_g"].dims == ("interval", "dc") and run.ledger["facility_j"].attrs["units"] == "J"
    kept = run.folder
    assert kept.exists()
    del run
    assert not kept.exists()


def test_check_and_list(scenario: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = call(capsys, monkeypatch, "check", scenario)
    assert (outcome.code, outcome.err) == (0, "")
    assert "60 requests in 4 s (15 a second), 6 to be rejected" in outcome.out and "policies: round_robin, green" in outcome.out
    outcome = call(capsys, monkeypatch, "list")
    assert outcome.code == 0 and "two-region" in outcome.out and "greedy(alpha=0.5" in outcome.out
