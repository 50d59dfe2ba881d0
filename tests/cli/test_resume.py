"""A run that is killed half way and started again with `--resume` ends with the bytes of one that was never stopped."""

import importlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import jaxserve
from tests.cli.helpers import call, write_scenario

DRIVER = """
import importlib, os, signal, sys
from pathlib import Path

run = importlib.import_module("jaxserve.running")
run.CHECKPOINT_EVERY_S = 0.0  # after every chunk
scenario, out, policy, share = sys.argv[1:]
checkpoint = Path(out + ".partial") / policy / "checkpoint.npz"

def progress(label, done):
    # Told before the checkpoint of this chunk: its rows are written already, and must be forgotten.
    if label == policy and done >= float(share) and checkpoint.exists():
        os.kill(os.getpid(), signal.SIGKILL)

run.run(scenario, out=out, progress=progress)
"""
SLOW_CLI = """
import importlib, signal, time

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs tests in the background has it ignored
importlib.import_module("jaxserve.running").CHECKPOINT_EVERY_S = 0.0
store = importlib.import_module("jaxserve.store")
honest = store.RunWriter.checkpoint

def slow(self, state):
    honest(self, state)
    time.sleep(0.3)  # long enough to be caught at it

store.RunWriter.checkpoint = slow
importlib.import_module("jaxserve.cli").main()
"""
POLICIES = ("round_robin", "greedy-0.5")
TABLES = ("requests.parquet", "ledger.parquet", "engines.parquet")


pytestmark = pytest.mark.usefixtures("no_figures")


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several chunks long, under load, with requests that are rejected and a policy that remembers what it sent."""
    changes = {
        "horizon_s": 400.0,
        "ledger_s": 0.1,
        "workload": {"kind": "poisson", "rate_req_per_s": 8.0, "lengths": {"distribution": "openorca"}},
        "engine.max_model_len": 900,
        "engine.oversize": "reject",
        "policies": [{"kind": "round_robin"}, {"kind": "greedy"}],
    }
    return write_scenario(tmp_path_factory.mktemp("scenario"), changes)


@pytest.fixture(scope="module")
def uninterrupted(scenario: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing stopped, in this process: what it compiles, the others load."""
    out = tmp_path_factory.mktemp("whole") / "out"
    jaxserve.run(scenario, out=out)
    assert pq.ParquetFile(out / POLICIES[0] / "requests.parquet").num_row_groups > 3  # several chunks
    statuses = pq.read_table(out / POLICIES[0] / "requests.parquet", columns=["status"])["status"].to_pylist()
    assert statuses.count("rejected") > 10
    return out


def assert_same_bytes(out: Path, uninterrupted: Path) -> None:
    """All tables and the resolved scenario agree, and nothing of the way there is left."""
    assert {path.relative_to(out) for path in out.rglob("*")} == {path.relative_to(uninterrupted) for path in uninterrupted.rglob("*")}
    for name in ("scenario.toml", "inputs.json", *(f"{label}/{table}" for label in POLICIES for table in TABLES)):
        assert (out / name).read_bytes() == (uninterrupted / name).read_bytes(), name
    assert not list(out.parent.glob("*.partial"))


def test_killed_half_way(
    scenario: Path, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second policy, by itself."""
    out, partial, policy = tmp_path / "out", tmp_path / "out.partial", POLICIES[1]
    process = subprocess.run([sys.executable, "-c", DRIVER, scenario, out, policy, "0.7"], timeout=180, check=False)
    assert process.returncode == -signal.SIGKILL
    assert not out.exists() and (partial / policy / "checkpoint.npz").exists() and not (partial / policy / "summary.json").exists()

    # Without --resume it is left as it is.
    outcome = call(capsys, monkeypatch, "run", scenario, "--out", out)
    assert outcome.code == 2 and "out.partial: an unfinished run is here; go on with --resume" in outcome.err
    # Nor does another scenario go on with it.
    outcome = call(capsys, monkeypatch, "run", scenario, "--out", out, "--resume", "--set", "seed=2")
    assert outcome.code == 2 and "the unfinished run is of another scenario" in outcome.err

    finished = {path: path.stat().st_mtime_ns for path in partial.rglob("*.parquet")}
    outcome = call(capsys, monkeypatch, "run", scenario, "--out", out, "--resume")
    assert outcome.code == 0, outcome.err
    assert_same_bytes(out, uninterrupted)
    # A policy that was whole is not run again.
    kept = partial / POLICIES[0] / "requests.parquet"
    assert (out / POLICIES[0] / "requests.parquet").stat().st_mtime_ns == finished[kept]


def stamp(path: Path) -> int:
    """When a file was last written; 0 for one that is not there."""
    return path.stat().st_mtime_ns if path.exists() else 0


@pytest.mark.slow  # two processes more; one that is killed is above
def test_stopped_from_outside_then_again(
    scenario: Path, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first policy, by Ctrl-C, and a second time, by force, while it goes on."""
    out = tmp_path / "out"
    checkpoint = tmp_path / "out.partial" / POLICIES[0] / "checkpoint.npz"
    for arguments, sign in (([], signal.SIGINT), (["--resume"], signal.SIGKILL)):
        before, began = stamp(checkpoint), time.monotonic()
        command = [sys.executable, "-c", SLOW_CLI, "run", scenario, "--out", out, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while process.poll() is None and time.monotonic() < began + 120 and stamp(checkpoint) == before:
            time.sleep(0.005)
        process.send_signal(sign)
        _, said = process.communicate(timeout=60)
        if sign == signal.SIGINT:
            assert (process.returncode, said) == (130, "jaxserve: interrupted; what is written so far is kept, go on with --resume\n")
        else:
            assert (process.returncode, said) == (-signal.SIGKILL, "")
    assert not out.exists()
    outcome = call(capsys, monkeypatch, "run", scenario, "--out", out, "--resume")
    assert outcome.code == 0, outcome.err
    assert_same_bytes(out, uninterrupted)


class Stopped(BaseException):
    """In place of a signal: nothing in the package can catch it."""


def test_a_trace_that_changed_in_between(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # The scenario is the same text, the requests are not: half of one trace and half of another would be no result.
    out, trace = tmp_path / "out", tmp_path / "trace.csv"
    rows = [f"{t / 2},{100 + t},20" for t in range(800)]
    trace.write_text("arrival_s,isl,osl\n" + "\n".join(rows))
    changes = {"horizon_s": 400.0, "ledger_s": 0.1, "workload": {"kind": "trace", "path": "trace.csv"}}
    scenario = write_scenario(tmp_path, changes)

    def stop(label: str, done: float) -> None:
        if (tmp_path / "out.partial" / label / "checkpoint.npz").exists():
            raise Stopped

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(importlib.import_module("jaxserve.running"), "CHECKPOINT_EVERY_S", 0.0)
        jaxserve.run(scenario, out=out, progress=stop)
    honest = trace.read_text()
    trace.write_text(honest.replace(",600,", ",601,"))
    outcome = call(capsys, monkeypatch, "run", scenario, "--out", out, "--resume")
    assert outcome.code == 2 and f"the unfinished run read {trace} when it held something else" in outcome.err
    trace.write_text(honest)
    assert call(capsys, monkeypatch, "run", scenario, "--out", out, "--resume").code == 0
