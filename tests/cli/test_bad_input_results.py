"""A bad folder of results, a full disk, a damaged checkpoint, and what the other commands refuse: one sentence, exit code 2."""

import errno
import importlib
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jaxserve.store
from tests.cli.helpers import Outcome, Refuse, call, refused, write_scenario

RUN = importlib.import_module("jaxserve.running")


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
        call(capsys, monkeypatch, "run", scenario, "--out", out, "--resume"), out, "out.partial: has no inputs.json that says what began"
    )
    refused(call(capsys, monkeypatch, "run", scenario, "--out", out), out, "out.partial: an unfinished run is here; go on with --resume")
    for text in (b"", b"\xff\xfe", b"[]", b'{"versions": '):
        (partial / "inputs.json").write_bytes(text)
        refused(call(capsys, monkeypatch, "run", scenario, "--out", out, "--resume"), out, "has no inputs.json that says what began")
    (partial / "inputs.json").write_text("{}")
    refused(call(capsys, monkeypatch, "run", scenario, "--out", out, "--resume"), out, "was begun by jaxserve none, and this is")


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
        (RUN, "write_frame"),
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
    honest = jaxserve.store.RunWriter.add

    def cramped(self: jaxserve.store.RunWriter, name: str, table: pa.Table) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
        try:
            honest(self, name, table)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(jaxserve.store.RunWriter, "add", cramped)
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
