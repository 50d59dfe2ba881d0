"""Run folders: written beside their final name, resumed from their last checkpoint, and renamed only when whole."""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
import weakref
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from jaxserve.errors import InputError

SCENARIO, REQUESTS, LEDGER, SUMMARY, ENGINES = "scenario.toml", "requests.parquet", "ledger.parquet", "summary.json", "engines.parquet"
SOLVES = "solves.parquet"
PARTIAL, FRESH = ".partial", ".new"
CHECKPOINT, PARTS, INPUTS, CODE, LOCK = "checkpoint.npz", "parts", "inputs.json", "code", "lock"


class Folder:
    """One folder of results in the making: `NAME.partial` until `finish` gives it its name. Made by `opened`."""

    def __init__(self, work: Path, final: Path, stamp: str) -> None:
        self.work, self.final = work, final
        self.stamp = stamp
        """Hash of all that the results depend on: a checkpoint carries it."""

    @classmethod
    @contextmanager
    def opened(
        cls, final: Path, scenario_toml: str, inputs: Mapping[str, Any], code: Mapping[str, str], *, resume: bool
    ) -> "Iterator[Folder]":
        """Begin the folder, or go on with it, and hold it against every other process until the block ends.

        `inputs` is what the results depend on (`jaxserve.provenance`) and `code` what policies run, `module:function` -> source; both stay
        in the folder. Raises `InputError` where the name is taken, another process holds the folder, or it was begun with other inputs.
        """
        _refuse_taken(final)
        work = final.with_name(final.name + PARTIAL)
        if work.exists() and not work.is_dir():
            raise InputError(f"{work}: a file is in the way of the unfinished run; remove it or choose another --out")
        if resume and not work.exists():
            raise InputError(f"{work}: there is no unfinished run to go on with; leave out --resume")
        work.mkdir(parents=True, exist_ok=True)
        with held(work / LOCK):
            _refuse_taken(final)  # by a process that held it until now
            # Where no policy has begun, on a full disk say, there is nothing to keep.
            blank = all(path.suffix == FRESH or path.name in (LOCK, CODE, SCENARIO, INPUTS) for path in work.iterdir())
            if not blank and not resume:
                raise InputError(f"{work}: an unfinished run is here; go on with --resume, or remove the folder to start anew")
            if blank:
                write_json(work / INPUTS, inputs)
            else:
                _refuse_other_inputs(work, inputs)
            write_text(work / SCENARIO, scenario_toml)
            for path, source in code.items():
                (work / CODE).mkdir(exist_ok=True)
                write_text(work / CODE / f"{path.replace(':', '.')}.py", source)
            yield cls(work, final, hashlib.sha256((work / INPUTS).read_bytes()).hexdigest())

    def writer(self, label: str) -> "RunWriter":
        """The files of one policy, in a folder of their own, made if need be."""
        path = self.work / label
        path.mkdir(exist_ok=True)
        return RunWriter(path, f"{label} {self.stamp}")  # another policy's checkpoint is no good either

    def finish(self) -> Path:
        """Give the folder its final name: from now on it is whole."""
        self.work.rename(self.final)
        (self.final / LOCK).unlink(missing_ok=True)
        return self.final


def _refuse_taken(final: Path) -> None:
    if final.exists() or not final.name:
        raise InputError(f"{final}: exists already and is left as it is; choose another --out")


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, or say at once who does."""
    # A lock of the system's, not the mere being there of a file: it ends with the process that holds it, by kill -9 too, so nobody is
    # locked out by what is left of a dead one. Appending, so that whose it is stays readable until the lock is ours.
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise InputError(f"{path.parent}: {holder} is writing in it; wait for its end or stop it, or choose another --out") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


OTHER_INPUTS = {
    "versions": "was begun by {name} {before}, and this is {now}",
    "jaxserve_sha256": "was begun by other source code of jaxserve than this",
    "device": "was begun on a {before}, and this is a {now}",
    "scenario_sha256": "is of another scenario",
    "files_sha256": "read {name} when it held something else",
    "requests_and_grid_sha256": "read other requests or carbon intensities",
    "code_sha256": "ran {name} when its source was another",
}
"""How a difference is told, by the entry of `inputs.json`; those that explain others come first."""


def _refuse_other_inputs(work: Path, inputs: Mapping[str, Any]) -> None:
    """Raise `InputError` where the run in `work` was begun with other inputs than these: half of each would be no result."""
    try:
        begun = json.loads((work / INPUTS).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        begun = None
    if not isinstance(begun, dict):
        raise InputError(f"{work}: has no {INPUTS} that says what began the unfinished run; choose another --out or remove the folder")
    for key, told in OTHER_INPUTS.items():
        before, now = (_named(each.get(key)) for each in (begun, inputs))
        for name in (*now, *before):
            if before.get(name) != now.get(name):
                what = told.format(name=name, before=before.get(name, "none"), now=now.get(name, "none"))
                advice = "go on with what began it, choose another --out or remove the folder"
                raise InputError(f"{work}: the unfinished run {what}; {advice}")


def _named(entry: Any) -> dict[str, Any]:
    """The values of an entry of `inputs.json` by name; a single one has none."""
    return entry if isinstance(entry, dict) else {"": entry}


class Scratch:
    """A temporary folder that goes when the last object that holds on to it does, without a word."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="jaxserve-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


class RunWriter:
    """The files of one policy's run. Long tables are written part by part, so that a long run need not be held in memory."""

    def __init__(self, folder: Path, stamp: str) -> None:
        self.folder, self.stamp = folder, stamp
        self.parts: dict[str, int] = {REQUESTS: 0, SOLVES: 0}

    @property
    def whole(self) -> bool:
        """Whether the run is finished: its summary is written last."""
        return (self.folder / SUMMARY).exists()

    def restore(self) -> Mapping[str, NDArray[Any]] | None:
        """The last checkpoint, if there is one; parts written after it are forgotten and will be written again."""
        path = self.folder / CHECKPOINT
        if not path.exists():
            return None
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
                state = dict(saved)
            stamp, parts = str(state["stamp"]), state["parts"].tolist()
        except (zipfile.BadZipFile, EOFError, KeyError, ValueError):
            raise InputError(f"{path}: the checkpoint is damaged; remove it and this policy's run starts anew with --resume") from None
        if stamp != self.stamp:
            raise InputError(f"{path}: the checkpoint is of another run; remove it and this policy's run starts anew with --resume")
        self.parts = dict(zip(self.parts, parts, strict=True))
        return state

    def checkpoint(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Save the state of the run so that a later process can go on from here."""
        path = self.folder / CHECKPOINT
        fresh = path.with_suffix(".new.npz")
        np.savez(fresh, stamp=np.array(self.stamp), parts=np.array(list(self.parts.values())), **state)  # type: ignore[arg-type]
        fresh.replace(path)

    def add(self, name: str, table: pa.Table) -> None:
        """Append rows to the table `name`; they come in order."""
        if not table.num_rows:
            return
        folder = self.folder / PARTS / name
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, folder / f"{self.parts[name]:06d}.parquet")
        self.parts[name] += 1

    def join(self, name: str, schema: pa.Schema) -> None:
        """Make the parts of the table `name` one file."""
        with pq.ParquetWriter(self.folder / name, schema) as writer:
            for i in range(self.parts[name]):
                writer.write_table(pq.read_table(self.folder / PARTS / name / f"{i:06d}.parquet", schema=schema))

    def summarise(self, summary: Mapping[str, Any]) -> None:
        """Write the summary and clear away what was only needed on the way."""
        write_json(self.folder / SUMMARY, summary)
        shutil.rmtree(self.folder / PARTS, ignore_errors=True)
        (self.folder / CHECKPOINT).unlink(missing_ok=True)


def write_frame(frame: pd.DataFrame, path: Path) -> None:
    """A frame as Parquet, without the index."""
    pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), path)


def read_pieces(path: Path, columns: list[str]) -> Iterator[pd.DataFrame]:
    """A Parquet file piece by piece."""
    with pq.ParquetFile(path) as file:
        # Row group by row group: iter_batches keeps what it has read of all of them.
        for i in range(file.num_row_groups):
            yield file.read_row_group(i, columns=columns).to_pandas()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """JSON for people: indented, keys in their order, no NaN."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    fresh = path.with_name(path.name + FRESH)
    fresh.write_bytes(text.encode())
    fresh.replace(path)
