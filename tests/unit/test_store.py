"""Run folders: one process at a time, gone on with only by what began them, and checkpoints that are known by their run."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import InputError
from jaxserve.store import Folder

INPUTS: dict[str, Any] = {
    "versions": {"jaxserve": "1.0", "jaxlib": "0.9"},
    "jaxserve_sha256": "aa",
    "device": "cpu",
    "scenario_sha256": "bb",
    "files_sha256": {"/data/trace.csv": "cc"},
    "requests_and_grid_sha256": "dd",
    "code_sha256": {"caps:most": "ee"},
}
CODE = {"caps:most": "def most(model):\n    return []\n"}


def opened(final: Path, inputs: dict[str, Any] = INPUTS, *, resume: bool = False) -> Any:
    """The folder of a run with these inputs."""
    return Folder.opened(final, "seed = 1\n", inputs, CODE, resume=resume)


def begin(final: Path) -> Path:
    """A run that stopped in its policy `p`, after a checkpoint; returns that."""
    with opened(final) as folder:
        folder.writer("p").checkpoint({"step": np.array(3)})
    return folder.work / "p" / "checkpoint.npz"


def test_a_finished_folder_keeps_what_it_was_made_from(tmp_path: Path) -> None:
    final = tmp_path / "out"
    with opened(final) as folder:
        assert folder.finish() == final
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert {str(path.relative_to(final)) for path in final.rglob("*")} == {"code", "code/caps.most.py", "inputs.json", "scenario.toml"}
    assert json.loads((final / "inputs.json").read_text()) == INPUTS
    assert (final / "scenario.toml").read_text() == "seed = 1\n" and (final / "code" / "caps.most.py").read_text() == CODE["caps:most"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"versions": {"jaxserve": "1.1", "jaxlib": "0.9"}, "jaxserve_sha256": "x"},
            "was begun by jaxserve 1.0, and this is 1.1; go on with",
        ),
        (
            {"versions": {"jaxserve": "1.0", "jaxlib": "0.10"}, "scenario_sha256": "x"},
            "was begun by jaxlib 0.9, and this is 0.10; go on with",
        ),
        ({"versions": {"jaxserve": "1.0"}}, "was begun by jaxlib 0.9, and this is none"),
        ({"jaxserve_sha256": "x"}, "was begun by other source code of jaxserve"),
        ({"device": "gpu"}, "was begun on a cpu, and this is a gpu"),
        ({"scenario_sha256": "x", "files_sha256": {}}, "is of another scenario"),
        ({"files_sha256": {"/data/trace.csv": "x"}}, "read /data/trace.csv when it held something else"),
        ({"requests_and_grid_sha256": "x"}, "read other requests or carbon intensities"),
        ({"code_sha256": {"caps:most": "x"}}, "ran caps:most when its source was another"),
    ],
)
def test_resumed_by_another(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    final = tmp_path / "out"
    checkpoint = begin(final)
    before = {path: path.read_bytes() for path in checkpoint.parent.parent.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(InputError, match=f"^{final}.partial: the unfinished run {told}"), opened(final, INPUTS | changes, resume=True):
        pass
    assert {path: path.read_bytes() for path in before} == before
    with opened(final, resume=True) as folder:
        saved = folder.writer("p").restore()
    assert saved is not None and saved["step"] == 3


def test_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    """Put there by hand, or left by a run of another version: its arrays may have any meaning."""
    checkpoint = begin(tmp_path / "out")
    with opened(tmp_path / "other", INPUTS | {"scenario_sha256": "x"}) as folder:
        folder.writer("p").checkpoint({"step": np.array(5)})
    with opened(tmp_path / "out", resume=True) as folder:
        (folder.work / "q").mkdir()
        (folder.work / "q" / checkpoint.name).write_bytes(checkpoint.read_bytes())
        checkpoint.write_bytes((tmp_path / "other.partial" / "p" / checkpoint.name).read_bytes())
        for label in ("p", "q"):
            with pytest.raises(InputError, match=rf"{label}/checkpoint.npz: the checkpoint is of another run; remove it and this policy's"):
                folder.writer(label).restore()


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    """The second is told at once, whatever it is about to do, and nothing of the first is touched."""
    final = tmp_path / "out"
    with opened(final) as folder:
        for resume in (False, True):
            with (
                pytest.raises(InputError, match=r"out.partial: process \d+ on .* is writing in it; wait for its end"),
                opened(final, resume=resume),
            ):
                pass
        folder.writer("p").checkpoint({"step": np.array(3)})
    with pytest.raises(InputError, match="an unfinished run is here; go on with --resume"), opened(final):
        pass
    with opened(final, resume=True) as folder:
        folder.finish()
    with pytest.raises(InputError, match="exists already"), opened(final):
        pass


HOLDER = """
import sys, time
from pathlib import Path
from tests.unit.test_store import opened

with opened(Path(sys.argv[1])) as folder:
    folder.writer("p")
    print("held", flush=True)
    time.sleep(120)
"""


def test_a_process_that_is_killed_locks_nobody_out(tmp_path: Path) -> None:
    final = tmp_path / "out"
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", HOLDER, final], stdout=subprocess.PIPE, text=True, cwd=root) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=f"out.partial: process {holder.pid} on .* is writing in it"), opened(final, resume=True):
            pass
        holder.send_signal(signal.SIGKILL)
    with opened(final, resume=True) as folder:
        assert folder.work.is_dir()
