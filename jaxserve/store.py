"""Run folders: written beside their final name, resumed from their last checkpoint, and renamed only when whole."""

import json
import shutil
import tempfile
import weakref
import zipfile
from collections.abc import Iterator, Mapping
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
CHECKPOINT, PARTS, INPUTS = "checkpoint.npz", "parts", "inputs.sha256"


class Folder:
    """One folder of results in the making: `NAME.partial` until `finish` gives it its name."""

    def __init__(self, final: Path, scenario_toml: str, fingerprint: str, *, resume: bool) -> None:
        if final.exists() or not final.name:
            raise InputError(f"{final}: exists already and is left as it is; choose another --out")
        self.final = final
        self.work = final.with_name(final.name + PARTIAL)
        if self.work.exists() and not self.work.is_dir():
            raise InputError(f"{self.work}: a file is in the way of the unfinished run; remove it or choose another --out")
        # A folder in which not even the scenario was written whole, on a full disk say, holds nothing to keep.
        blank = self.work.is_dir() and all(path.suffix == FRESH or path.name == INPUTS for path in self.work.iterdir())
        if self.work.exists() and not blank:
            if not resume:
                raise InputError(f"{self.work}: an unfinished run is here; go on with --resume, or remove the folder to start anew")
            for name, text in ((SCENARIO, scenario_toml), (INPUTS, fingerprint)):
                begun = self.work / name
                if not begun.exists() or begun.read_bytes() != text.encode():
                    what = "is of another scenario" if name == SCENARIO else "read another trace or grid file under the same name"
                    raise InputError(f"{self.work}: the unfinished run {what}; choose another --out or remove the folder")
        elif resume and not blank:
            raise InputError(f"{self.work}: there is no unfinished run to go on with; leave out --resume")
        self.work.mkdir(parents=True, exist_ok=True)
        write_text(self.work / INPUTS, fingerprint)
        write_text(self.work / SCENARIO, scenario_toml)

    def part(self, name: str) -> Path:
        """A folder inside, made if need be."""
        path = self.work / name
        path.mkdir(exist_ok=True)
        return path

    def finish(self) -> Path:
        """Give the folder its final name: from now on it is whole."""
        self.work.rename(self.final)
        (self.final / INPUTS).unlink(missing_ok=True)
        return self.final


class Scratch:
    """A temporary folder that goes when the last object that holds on to it does, without a word."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="jaxserve-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


class RunWriter:
    """The files of one policy's run. Long tables are written part by part, so that a long run need not be held in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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
            self.parts = dict(zip(self.parts, state["parts"].tolist(), strict=True))
        except (zipfile.BadZipFile, EOFError, KeyError, ValueError):
            raise InputError(f"{path}: the checkpoint is damaged; remove it and this policy's run starts anew with --resume") from None
        return state

    def checkpoint(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Save the state of the run so that a later process can go on from here."""
        path = self.folder / CHECKPOINT
        fresh = path.with_suffix(".new.npz")
        np.savez(fresh, parts=np.array(list(self.parts.values())), **state)  # type: ignore[arg-type]
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
