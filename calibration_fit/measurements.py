"""Measurements: a CSV, checked row by row, becomes one `Measurements` per (setup, phase)."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from calibration_fit.columns import COLUMNS, INFORMATIONAL, PHASES
from calibration_fit.hardware import fits_beside_weights
from calibration_fit.layouts import find_layout, read_as, translated
from calibration_fit.plausible import check_plausible
from jaxserve.errors import InputError
from jaxserve.perf.request_log import MISSING


@dataclass(frozen=True)
class Setup:
    """What was measured."""

    model: str
    tp: int
    gpu: str

    def __str__(self) -> str:
        return f"{self.model} TP{self.tp} {self.gpu}"


@dataclass(frozen=True)
class Source:
    """A file that measurements came from, and what its kind of table has to say for itself."""

    path: str
    sha256: str
    note: str = ""


@dataclass(frozen=True)
class Measurements:
    """The rows of one setup and phase; arrays are [R], float64.

    `batch` B (prefill: pieces); `n_tokens` N and `sum_sq` S2 of a prefill step; `cached_tokens` K of a decode step; `isl`, `osl` of a
    static batch; `length` the length that hold-out groups by (prompt, mean context, or isl); `energy_j` is nan where not measured.
    """

    setup: Setup
    phase: str
    source: Source
    row: np.ndarray
    batch: np.ndarray
    length: np.ndarray
    n_tokens: np.ndarray
    sum_sq: np.ndarray
    cached_tokens: np.ndarray
    isl: np.ndarray
    osl: np.ndarray
    time_s: np.ndarray
    energy_j: np.ndarray

    def __len__(self) -> int:
        return len(self.row)

    def select(self, keep: np.ndarray) -> Measurements:
        """The rows where `keep` [R] is true."""
        arrays = {k: v[keep] for k, v in vars(self).items() if isinstance(v, np.ndarray)}
        return replace(self, **arrays)

    def has(self, quantity: str) -> np.ndarray:
        """Whether each row [R] holds `time_s` or `energy_j`."""
        return np.isfinite(getattr(self, quantity))


def read_measurements(
    path: Path | str, *, where: Mapping[str, str] | None = None, setup: Mapping[str, str] | None = None, isl: float | None = None
) -> list[Measurements]:
    """Read a CSV of measurements (columns: `calibration_fit.columns.COLUMNS`), or a published table (`LAYOUTS`) as it is.

    `where` keeps only rows whose columns have these values; `setup` (of model, tp, gpu) too, and fills in what the file lacks; `isl` is the
    prompt length of published tables that do not hold it.
    Raises `InputError`, one sentence with file and row, for anything that cannot be right.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        lines = list(csv.reader(io.StringIO(content.decode("utf-8-sig")), skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not a readable CSV file: {' '.join(str(error).split())}") from None
    return from_table(_table(lines, str(path)), Source(str(path), hashlib.sha256(content).hexdigest()), where=where, setup=setup, isl=isl)


def _table(lines: list[list[str]], name: str) -> pd.DataFrame:
    """The rows under their columns, as text; commas at the ends of lines and empty lines at the end of the file do not count."""
    while lines and not any(lines[-1]):
        lines.pop()
    if not lines:
        raise InputError(f"{name}: is empty: nothing to fit.")
    head = lines[0]
    while head and not head[-1].strip():
        head = head[:-1]
    for number, line in enumerate(lines[1:], 2):
        if len(line) < len(head) or any(line[len(head) :]):
            raise InputError(f"{name}: row {number}: holds {len(line)} fields under {len(head)} columns.")
    return pd.DataFrame([line[: len(head)] for line in lines[1:]], columns=pd.Index(head), dtype=str)


def from_table(
    table: pd.DataFrame,
    source: Source,
    *,
    where: Mapping[str, str] | None = None,
    setup: Mapping[str, str] | None = None,
    isl: float | None = None,
    row: np.ndarray | None = None,
) -> list[Measurements]:
    """`read_measurements` for a table already in memory; `row` [R] are its rows' numbers in the file, by default with the header as row 1,
    as in a spreadsheet."""
    name = source.path
    text: Any = table.astype(object).where(table.notna(), "").astype(str)
    table = text.rename(columns=lambda c: str(c).strip())
    if table.columns.has_duplicates:
        raise InputError(f"{name}: row 1: column {table.columns[table.columns.duplicated()][0]!r} is there twice; keep one.")
    layout = find_layout(table.columns)
    known = read_as(layout, table.columns) if layout else set(COLUMNS)
    unknown = [c for c in table.columns if c not in known and c not in INFORMATIONAL]
    if unknown:
        hint = _unit_hint(unknown[0])
        raise InputError(f"{name}: row 1: unknown column {unknown[0]!r}{hint}; known columns are {', '.join(sorted(known))}.")
    row = np.arange(len(table)) + 2 if row is None else row
    for column, value in (where or {}).items():
        if column not in table.columns:
            raise InputError(f"{name}: row 1: rows cannot be selected by {column!r}: there is no such column.")
        keep = (table[column] == value).to_numpy()
        table, row = table.loc[keep], row[keep]
    if not len(table):
        raise InputError(f"{name}: no row left" + (f" where {dict(where)}" if where else "") + ": nothing to fit.")
    if layout:
        table = table.assign(**{ours: table[theirs] for ours, theirs in layout.setup.items()})
        source = replace(source, note=layout.note)
    table, row = _of_setup(table, row, setup or {}, name)
    if not layout:
        for column in ("model", "tp", "gpu", "phase", "batch", "time_s"):
            if column not in table.columns:
                raise InputError(f"{name}: row 1: column {column!r} is missing ({COLUMNS[column].text}, {COLUMNS[column].unit or 'text'}).")
    found = []
    groups: Any = table.assign(_row=row).groupby(["model", "tp", "gpu", *([] if layout else ["phase"])], sort=False)
    for (model, _, gpu, *phase), rows in groups:
        first = int(rows["_row"].iloc[0])
        if not model or not gpu:
            raise InputError(f"{name}: row {first}: model and gpu must not be empty.")
        if phase and phase[0] not in PHASES:
            raise InputError(f"{name}: row {first}: phase {phase[0]!r} is none of {', '.join(PHASES)}.")
        tp = int(_numbers(rows[["tp"]], "tp", name, rows["_row"].to_numpy())[0])
        if layout:
            numbers = rows["_row"].to_numpy()
            rows = translated(rows, layout, name, numbers, isl).assign(_row=numbers)
        found.append(_build(rows, Setup(str(model), tp, str(gpu)), str(layout.phase if layout else phase[0]), source))
    return found


def _of_setup(table: Any, row: np.ndarray, setup: Mapping[str, str], name: str) -> tuple[Any, np.ndarray]:
    """Rows of the named setup; a column that the table lacks is filled in."""
    keep = np.ones(len(table), bool)
    for column, value in setup.items():
        if column not in table.columns:
            table = table.assign(**{column: value})
        # 2 and 2.0 are one size.
        number = column == "tp"
        keep &= np.array(pd.to_numeric(table[column], errors="coerce") == float(value) if number else table[column] == value)
    if not keep.any():
        parts = [("TP" if c == "tp" else "") + table[c] for c in ("model", "tp", "gpu") if c in table.columns]
        held = sorted({" ".join(texts) for texts in zip(*parts, strict=True)})
        raise InputError(f"{name}: no row of {', '.join(setup.values())}; it holds {', '.join(held)[:600]}.")
    return table.loc[keep], row[keep]


def _build(part: Any, setup: Setup, phase: str, source: Source) -> Measurements:
    """Numbers of one setup and phase, with everything the phase needs derived and checked."""
    name, row = source.path, part["_row"].to_numpy()

    def numbers(column: str) -> np.ndarray | None:
        if column not in part.columns or (part[column] == "").all():
            return None
        return _numbers(part, column, name, row)

    def needed(column: str, instead: str = "") -> np.ndarray:
        values = numbers(column)
        if values is None:
            raise InputError(f"{name}: row {row[0]}: a {phase} row needs column {column!r}{instead}.")
        return values

    batch, time_s = needed("batch"), needed("time_s")
    nothing = np.full(len(row), np.nan)
    n_tokens = sum_sq = cached = isl = osl = nothing
    if phase == "prefill":
        seq_len, n_tokens, sum_sq = numbers("seq_len"), numbers("tokens"), numbers("sum_sq")
        if "lengths" in part.columns and (part["lengths"] != "").any():
            pieces = [_lengths(text, name, r) for text, r in zip(part["lengths"], row, strict=True)]
            n_tokens, sum_sq = np.array([sum(p) for p in pieces]), np.array([sum(v * v for v in p) for p in pieces])
            wrong = np.flatnonzero(batch != [len(p) for p in pieces])
            if len(wrong):
                raise InputError(f"{name}: row {row[wrong[0]]}: batch is {batch[wrong[0]]:g} but lengths holds {len(pieces[wrong[0]])}.")
        if n_tokens is None:
            n_tokens = batch * needed("seq_len", " (or 'tokens' and 'sum_sq', or 'lengths')")
        if sum_sq is None:
            sum_sq = batch * needed("seq_len", " (or 'sum_sq', or 'lengths')") ** 2
        short = np.flatnonzero(n_tokens < batch)
        if len(short):
            i = short[0]
            raise InputError(f"{name}: row {row[i]}: tokens is {n_tokens[i]:g} for {batch[i]:g} prompts; each has one token at least.")
        length = seq_len if seq_len is not None else np.round(n_tokens / batch)
    elif phase == "decode":
        cached = numbers("cached_tokens")
        if cached is None:
            cached = batch * needed("mean_ctx", " (or 'cached_tokens')")
        length = np.round(cached / batch)
    else:
        isl, osl = needed("isl"), needed("osl")
        for column, values in (("batch", batch), ("isl", isl), ("osl", osl)):
            broken = np.flatnonzero(values != np.round(values))
            if len(broken):
                raise InputError(f"{name}: row {row[broken[0]]}: {column} of a static batch is {values[broken[0]]:g}, no whole number.")
        length = isl
    energy, power = numbers("energy_j"), numbers("avg_power_w_per_gpu")
    energy = nothing if energy is None else energy
    if power is not None:
        energy = np.where(np.isfinite(energy), energy, power * setup.tp * time_s)
    m = Measurements(setup, phase, source, row, batch, length, n_tokens, sum_sq, cached, isl, osl, time_s, energy)
    check_plausible(m)
    return m


def _numbers(part: Any, column: str, name: str, row: np.ndarray) -> np.ndarray:
    """A column as float64, each value inside its plausible range; the first that is not is named."""
    spec = COLUMNS[column]
    values = np.array(pd.to_numeric(part[column], errors="coerce"), dtype=float)
    optional = column in ("energy_j", "avg_power_w_per_gpu")
    given = ~part[column].str.strip().str.lower().isin(MISSING).to_numpy()
    bad = ~np.isfinite(values) & (given if optional else True)
    if spec.low is not None and spec.high is not None:
        bad |= (values <= spec.low) | (values >= spec.high)
    if spec.integer:
        bad |= values != np.round(values)
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        text = part[column].iloc[i]
        what = "is empty" if text == "" else f"is {text}"
        if spec.integer:
            want = "a whole number above 0"
        elif spec.low is not None and spec.low >= 0:
            want = f"a number above {spec.low:g} and below {spec.high:g} {spec.unit}"
        else:
            want = "a number not below 0"
        raise InputError(f"{name}: row {row[i]}: {column} {what}; it must be {want}.")
    return values


def _lengths(text: str, name: str, row: int) -> list[float]:
    """Prompt lengths of one step."""
    try:
        values = [float(v) for v in text.split()]
    except ValueError:
        values = []
    longest = COLUMNS["seq_len"].high or np.inf
    if not values or min(values) <= 0 or not max(values) < longest:
        raise InputError(
            f"{name}: row {row}: lengths is {text!r}; it must be prompt lengths above 0 and below {longest:g}, separated by spaces."
        )
    return values


def _unit_hint(column: str) -> str:
    """', did you mean time_s (s)?' for a column whose name with another unit is known."""
    stem = column.rsplit("_", 1)[0]
    close = [c for c in COLUMNS if c.rsplit("_", 1)[0] == stem and c != column]
    return f", did you mean {close[0]} ({COLUMNS[close[0]].unit})?" if close else ""


def in_memory(m: Measurements) -> np.ndarray:
    """Which static batches [R] fit in memory: others ran in several rounds. All rows where model or GPU is not known, and of steps."""
    fits = fits_beside_weights(m.setup.model, m.setup.gpu, m.setup.tp, m.batch * (m.isl + m.osl)) if m.phase == "end_to_end" else None
    return np.ones(len(m), bool) if fits is None else fits


def one_setup(measurements: Sequence[Measurements]) -> Setup:
    """The setup all measurements share; raises `InputError` naming the row where a second one begins."""
    first = measurements[0]
    for m in measurements:
        if m.setup != first.setup:
            part = "GPUs" if m.setup.gpu != first.setup.gpu else "setups"
            raise InputError(
                f"{m.source.path}: row {m.row[0]}: mixed {part}: {m.setup} after {first.setup} (row {first.row[0]}); "
                "one coefficients file is for one setup: choose it with --model, --tp and --gpu."
            )
    return first.setup
