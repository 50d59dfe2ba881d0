"""Request traces: a file in, sorted and checked arrays out."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa

from jaxserve.errors import InputError
from jaxserve.scenario.benchmark_trace import holds_benchmark, read_benchmark
from jaxserve.scenario.rawfile import MAX_TOKENS
from jaxserve.scenario.signals import ZONED, instant_of, stamp_text
from jaxserve.scenario.trace_formats import EPOCH_S, TIME_UNITS, RawTrace, TimeUnit, read_raw
from jaxserve.units import LATEST_EPOCH_S, US_PER_S

TimeMode = Literal["auto", "absolute", "relative"]
Column = TypeVar("Column", np.ndarray, pd.Categorical)


@dataclass(frozen=True)
class Trace:
    """R requests in order of arrival; equal times keep the order of the file."""

    arrival_s: np.ndarray  # float64[R], seconds; >= 0
    isl: np.ndarray  # int64[R], tokens; >= 1
    osl: np.ndarray  # int64[R], tokens; >= 1
    origin: np.ndarray | None  # int32[R], scheduler index, where an origin column was asked for
    notes: tuple[str, ...]
    counts: dict[str, int]  # rows_read, rows_dropped, rows_unsorted
    model: pd.Categorical | None = None  # [R], "" where a row does not say; None where the file does not
    application: pd.Categorical | None = None  # likewise; BurstGPT's log type
    time_unit: TimeUnit | None = None  # of the file's times where they are numbers; None where they are time stamps
    zero: datetime | None = None  # the instant of arrival 0 (UTC) by the file's own clock; None for relative times


def read_trace(
    path: Path,
    *,
    time: TimeMode = "auto",
    time_unit: TimeUnit | None = None,
    invalid_rows: Literal["error", "drop"] = "error",
    origin_column: str | None = None,
    origins: Mapping[str, int] | None = None,
) -> Trace:
    """Read a trace file whose format is recognised by its header.

    Time stamps (ISO text, or numbers that can only be seconds since 1970) become seconds after the earliest row that is kept; relative
    numbers keep their own zero. Numbers are in `time_unit`, else in what the format says and the numbers show. `invalid_rows="drop"`
    drops rows with fewer than one token (failed requests in real logs) and nothing else: text or NaN in a number column stays an error.
    `origins` maps values of `origin_column` to scheduler indices.
    """
    raw = read_benchmark(path, origin_column, time_unit) if holds_benchmark(path) else read_raw(path, origin_column)
    form, rows_read = raw.format, len(raw.isl)
    for name, values in ((form.isl, raw.isl), (form.osl, raw.osl)):
        _check_whole(path, raw, name, values)
    keep = (raw.isl >= 1) & (raw.osl >= 1)
    dropped = int(rows_read - keep.sum())
    if dropped and invalid_rows == "error":
        index = int(np.argmin(keep))
        name, value = (form.isl, raw.isl[index]) if raw.isl[index] < 1 else (form.osl, raw.osl[index])
        raise InputError(
            f"{path}, row {raw.line_of(index)}, column {name}: {value:.0f} tokens, at least 1 needed; correct the row or set "
            f'workload.invalid_rows = "drop" (osl-train: --invalid-rows drop) to leave such rows out ({dropped} in this file).'
        )
    if dropped == rows_read:
        raise InputError(f'{path}: workload.invalid_rows = "drop" leaves no row, all {rows_read} have too few tokens; give another file.')

    seconds, unit, zero, time_note = _seconds(path, raw, time, time_unit, keep)
    origin = _origin(path, raw, origin_column, origins or {}, keep)
    isl, osl = raw.isl[keep].astype(np.int64), raw.osl[keep].astype(np.int64)
    model, application = at_rows(raw.model, keep), at_rows(raw.application, keep)

    unsorted = int((seconds[1:] < np.maximum.accumulate(seconds)[:-1]).sum())
    if unsorted:
        order = np.argsort(seconds, kind="stable")
        seconds, isl, osl = seconds[order], isl[order], osl[order]
        origin, model, application = at_rows(origin, order), at_rows(model, order), at_rows(application, order)
    notes = [f"{path.name}: {form.name} format ({', '.join(form.columns)}), {rows_read} rows", *(raw.notes or (time_note,))]
    if dropped:
        notes.append(f'{dropped} rows with fewer than 1 token dropped (invalid_rows = "drop")')
    if unsorted:
        notes.append(f"{unsorted} rows were out of order; sorted by time")
    counts = {"rows_read": rows_read, "rows_dropped": dropped, "rows_unsorted": unsorted}
    return Trace(seconds, isl, osl, origin, tuple(notes), counts, model, application, unit, zero)


def at_rows(column: Column | None, rows: np.ndarray) -> Column | None:
    """The chosen rows (numbers, or a mask) of a column that may be absent."""
    values: Any = column
    return None if values is None else values[rows]


def _check_whole(path: Path, raw: RawTrace, name: str, tokens: np.ndarray) -> None:
    """Token counts must be whole and fit an int32; signs are the business of `invalid_rows`."""
    with np.errstate(invalid="ignore"):
        bad = ~(np.isfinite(tokens) & (np.rint(tokens) == tokens) & (np.abs(tokens) <= MAX_TOKENS))
    if bad.any():
        index = int(np.argmax(bad))
        why = "is too large" if abs(tokens[index]) > MAX_TOKENS and np.isfinite(tokens[index]) else "is not a whole number of tokens"
        raise InputError(f"{path}, row {raw.line_of(index)}, column {name}: {tokens[index]:.15g} {why}; correct the row.")


def _seconds(
    path: Path, raw: RawTrace, mode: TimeMode, time_unit: TimeUnit | None, keep: np.ndarray
) -> tuple[np.ndarray, TimeUnit | None, datetime | None, str]:
    """Arrival times of the kept rows, float64 seconds, their unit in the file, the instant of 0, and how they were read in words."""
    form = raw.format
    if isinstance(raw.time, pa.ChunkedArray):
        if mode == "relative" or time_unit is not None:
            option, advice = (
                ('workload.time = "relative"', 'set it to "auto"') if mode == "relative" else ("workload.time_unit is given", "remove it")
            )
            raise InputError(
                f"{path}, row {raw.line_of(0)}, column {form.time}: {str(raw.time[0])[:40]!r} is no number of seconds, "
                f"but {option}; {advice} or give numbers."
            )
        stamps, zoned = _stamps_ns(path, raw, raw.time)
        stamps = stamps[keep]
        start = int(stamps.min())
        zero = instant_of(start // 1000)
        told = f"absolute time stamps, made relative to {stamp_text(zero)}" + ("" if zoned else " (no offset given, read as UTC)")
        # Whole nanoseconds are subtracted before they become a float: nothing of a 7-digit fraction is lost.
        return (stamps - start) / 1e9, None, zero, told

    unit = time_unit or raw.time_unit
    shown_by = "workload.time_unit" if time_unit else raw.unit_shown_by
    per_second = TIME_UNITS[unit]
    _check_times(path, raw, unit)
    told = f"in {unit}" + (f" ({shown_by})" if shown_by else "")
    if mode != "relative" and (mode == "absolute" or _is_epoch(path, raw, raw.time / per_second)):
        numbers = raw.time[keep]
        start = float(numbers.min())
        zero = instant_of(round(start / per_second * US_PER_S))
        note = f"absolute times {told} since 1970, made relative to {stamp_text(zero)}"
        # Where `mode` alone makes small numbers absolute, they tell no date.
        return (numbers - start) / per_second, unit, zero if start > EPOCH_S * per_second else None, note
    return raw.time[keep] / per_second, unit, None, f"relative times {told}, zero kept as in the file"


def _check_times(path: Path, raw: RawTrace, unit: TimeUnit) -> None:
    """Refuse what is no time at all, and numbers too large to be times in `unit`."""
    time, per_second = np.asarray(raw.time), TIME_UNITS[unit]
    bad = ~(np.isfinite(time) & (time >= 0) & (time <= LATEST_EPOCH_S * per_second))
    if not bad.any():
        return
    index = int(np.argmax(bad))
    value = time[index]
    if not np.isfinite(value):
        why = "is not a finite time; correct the row"
    elif value < 0:
        why = "is negative; times start at 0"
    else:
        finer = [name for name, per in TIME_UNITS.items() if value <= LATEST_EPOCH_S * per]
        advice = f'set workload.time_unit = "{finer[0]}" (osl-train: --time-unit {finer[0]})' if finer else "correct the row"
        why = f"cannot be a time in {unit}, it is beyond any date; {advice}"
    raise InputError(f"{path}, row {raw.line_of(index)}, column {raw.format.time}: {value:.15g} {why}.")


def _is_epoch(path: Path, raw: RawTrace, seconds: np.ndarray) -> bool:
    large = seconds > EPOCH_S
    if large.any() and not large.all():
        index = int(np.argmax(large != large[0]))
        raise InputError(
            f"{path}, row {raw.line_of(index)}, column {raw.format.time}: relative times and times since 1970 are mixed "
            f'({seconds[index]:.15g} s after {seconds[0]:.15g} s); correct the rows or set workload.time to "absolute" or "relative".'
        )
    return bool(large.all())


def _stamps_ns(path: Path, raw: RawTrace, text: pa.ChunkedArray) -> tuple[np.ndarray, bool]:
    """int64[R] nanoseconds since 1970 UTC, and whether the stamps carry an offset."""
    for zone in (None, "UTC"):  # arrow is fast and all or nothing: a column without offsets, or one where each row has its own
        try:
            return text.cast(pa.timestamp("ns", zone)).cast(pa.int64()).to_numpy(), zone is not None
        except pa.ArrowInvalid:
            continue
    series = pd.Series(text.to_pylist(), dtype=object).str.strip()  # slow, more lenient, and it can say which row is wrong
    stamps = pd.to_datetime(series, format="ISO8601", utc=True, errors="coerce")
    # What does not fit int64 nanoseconds is as wrong as what is no time at all.
    bad = stamps.isna() | (stamps < pd.Timestamp.min.tz_localize("UTC")) | (stamps > pd.Timestamp.max.tz_localize("UTC"))
    if bad.any():
        index = int(np.argmax(bad.to_numpy()))
        raise InputError(
            f"{path}, row {raw.line_of(index)}, column {raw.format.time}: {series[index][:40]!r} is neither a number of seconds nor an ISO "
            "time stamp from 1678 to 2261; write for example 2023-11-16 18:15:46.68 in every row."
        )
    zoned = series.str.contains(ZONED, regex=True).to_numpy(bool)
    if zoned.any() and not zoned.all():
        index = int(np.argmax(zoned != zoned[0]))
        raise InputError(
            f"{path}, row {raw.line_of(index)}, column {raw.format.time}: time stamps with and without an offset are mixed; "
            "give every row an offset or none."
        )
    return stamps.dt.as_unit("ns").astype("int64").to_numpy(), bool(zoned.all())


def _origin(path: Path, raw: RawTrace, column: str | None, origins: Mapping[str, int], keep: np.ndarray) -> np.ndarray | None:
    """int32 scheduler index of each kept row, from its origin value."""
    if column is None or raw.origin_code is None:
        return None
    to_scheduler = np.array([origins.get(value.strip(), -1) for value in raw.origin_values], np.int32)
    origin = to_scheduler[raw.origin_code]
    lost = keep & (origin < 0)
    if lost.any():
        index = int(np.argmax(lost))
        value = raw.origin_values[raw.origin_code[index]]
        raise InputError(
            f"{path}, row {raw.line_of(index)}, column {column}: the origin '{value[:40]}' belongs to no scheduler "
            f"(known: {', '.join(origins)}); rename it or map it in workload.origin_map."
        )
    return origin[keep]
