"""Measurements: a CSV, checked row by row, becomes one `Measurements` per (setup, phase)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from calibration_fit.columns import (
    COLUMNS,
    FASTEST_STEP_S,
    INFORMATIONAL,
    PHASES,
    POWER_W_PER_GPU,
    SLOWEST_DECODE_S,
    SLOWEST_PREFILL_S_PER_TOKEN,
)
from jaxserve.errors import InputError
from jaxserve.units import MS_PER_S


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
    """A file that measurements came from."""

    path: str
    sha256: str


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
    path: Path | str, *, where: Mapping[str, str] | None = None, defaults: Mapping[str, str] | None = None
) -> list[Measurements]:
    """Read a CSV of measurements (columns: `calibration_fit.columns.COLUMNS`).

    `where` keeps only rows whose columns have these values; `defaults` fills in columns that the file lacks (model, tp, gpu, phase).
    Raises `InputError`, one sentence with file and row, for anything that cannot be right.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        table = pd.read_csv(path, dtype=str, keep_default_na=False, skipinitialspace=True, encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise InputError(f"{path}: not a readable CSV file: {' '.join(str(error).split())}") from None
    return from_table(table, Source(str(path), hashlib.sha256(content).hexdigest()), where=where, defaults=defaults)


def from_table(
    table: pd.DataFrame, source: Source, *, where: Mapping[str, str] | None = None, defaults: Mapping[str, str] | None = None
) -> list[Measurements]:
    """`read_measurements` for a table already in memory; row numbers count the header as row 1, as in a spreadsheet."""
    name = source.path
    text: Any = table.astype(object).where(table.notna(), "").astype(str)
    table = text.rename(columns=lambda c: str(c).strip())
    unknown = [c for c in table.columns if c not in COLUMNS and c not in INFORMATIONAL]
    if unknown:
        hint = _unit_hint(unknown[0])
        raise InputError(f"{name}: row 1: unknown column {unknown[0]!r}{hint}; known columns are {', '.join(COLUMNS)}.")
    for column, value in (defaults or {}).items():
        if column not in table.columns:
            table = table.assign(**{column: value})
    for column in ("model", "tp", "gpu", "phase", "batch", "time_s"):
        if column not in table.columns:
            raise InputError(f"{name}: row 1: column {column!r} is missing ({COLUMNS[column].text}, {COLUMNS[column].unit or 'text'}).")
    row = np.arange(len(table)) + 2
    for column, value in (where or {}).items():
        if column not in table.columns:
            raise InputError(f"{name}: row 1: rows cannot be selected by {column!r}: there is no such column.")
        keep = (table[column] == value).to_numpy()
        table, row = table.loc[keep], row[keep]
    if not len(table):
        raise InputError(f"{name}: no row left" + (f" where {dict(where)}" if where else "") + ": nothing to fit.")
    found = []
    groups: Any = table.assign(_row=row).groupby(["model", "tp", "gpu", "phase"], sort=False)
    for (model, _tp, gpu, phase), part in groups:
        first = int(part["_row"].iloc[0])
        if phase not in PHASES:
            raise InputError(f"{name}: row {first}: phase {phase!r} is none of {', '.join(PHASES)}.")
        if not model or not gpu:
            raise InputError(f"{name}: row {first}: model and gpu must not be empty.")
        tp_number = _numbers(part[["tp"]], "tp", name, part["_row"].to_numpy())
        found.append(_build(part, Setup(str(model), int(tp_number[0]), str(gpu)), str(phase), source))
    return found


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
        length = seq_len if seq_len is not None else np.round(n_tokens / batch)
    elif phase == "decode":
        cached = numbers("cached_tokens")
        if cached is None:
            cached = batch * needed("mean_ctx", " (or 'cached_tokens')")
        length = np.round(cached / batch)
    else:
        isl, osl = needed("isl"), needed("osl")
        length = isl
    energy, power = numbers("energy_j"), numbers("avg_power_w_per_gpu")
    if energy is None:
        energy = power * setup.tp * time_s if power is not None else nothing
    m = Measurements(setup, phase, source, row, batch, length, n_tokens, sum_sq, cached, isl, osl, time_s, energy)
    _check_plausible(m)
    return m


def _numbers(part: Any, column: str, name: str, row: np.ndarray) -> np.ndarray:
    """A column as float64, each value inside its plausible range; the first that is not is named."""
    spec = COLUMNS[column]
    values = np.array(pd.to_numeric(part[column], errors="coerce"), dtype=float)
    optional = column in ("energy_j", "avg_power_w_per_gpu")
    given = (part[column] != "").to_numpy()
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
    if not values or min(values) <= 0 or not np.isfinite(values).all():
        raise InputError(f"{name}: row {row}: lengths is {text!r}; it must be prompt lengths above 0, separated by spaces.")
    return values


def _check_plausible(m: Measurements) -> None:
    """Catch a wrong unit by what the values would mean; raises `InputError` that says which unit was probably meant."""
    name, first = m.source.path, m.row[0]
    middle = float(np.median(m.time_s))
    ms_hint = f"are the times in milliseconds? Divide them by {MS_PER_S:g}."
    if m.phase == "decode" and middle > SLOWEST_DECODE_S:
        raise InputError(f"{name}: row {first} on: the median decode step of {m.setup} takes {middle:g} s, which no GPU needs; {ms_hint}")
    if m.phase == "prefill":
        per_token = float(np.median(m.time_s / m.n_tokens))
        if middle > 2.0 and per_token > SLOWEST_PREFILL_S_PER_TOKEN:
            raise InputError(f"{name}: row {first} on: prefill of {m.setup} takes {per_token:g} s a token at the median; {ms_hint}")
    if m.phase == "end_to_end" and np.median(m.time_s / m.osl) > SLOWEST_DECODE_S:
        raise InputError(f"{name}: row {first} on: static batches of {m.setup} take over {SLOWEST_DECODE_S:g} s a token; {ms_hint}")
    fast = np.flatnonzero(m.time_s < FASTEST_STEP_S)
    if len(fast):
        i = fast[0]
        raise InputError(
            f"{name}: row {m.row[i]}: a step of {m.time_s[i]:g} s is shorter than launching its kernels takes ({FASTEST_STEP_S:g} s); "
            "is time_s in seconds?"
        )
    power = m.energy_j / m.time_s / m.setup.tp
    wrong = np.flatnonzero((power < POWER_W_PER_GPU[0]) | (power > POWER_W_PER_GPU[1]))
    if len(wrong):
        i = wrong[0]
        raise InputError(
            f"{name}: row {m.row[i]}: energy_j / time_s / tp is {power[i]:g} W a GPU, outside {POWER_W_PER_GPU[0]:g} to "
            f"{POWER_W_PER_GPU[1]:g} W; is the energy in J, of all GPUs together, and the time in s?"
        )


def _unit_hint(column: str) -> str:
    """', did you mean time_s (s)?' for a column whose name with another unit is known."""
    stem = column.rsplit("_", 1)[0]
    close = [c for c in COLUMNS if c.rsplit("_", 1)[0] == stem and c != column]
    return f", did you mean {close[0]} ({COLUMNS[close[0]].unit})?" if close else ""


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
