"""Time series that a run reads by its own clock, and the files they come from.

A series is a step function: a time stamp begins its interval. Nothing is read past either end of a file, nothing wraps
round, and a missing value is never zero. Instants are int64 microseconds since 1970-01-01T00Z (`*_us`), exact where float
seconds would not be; a run's own clock is float64 seconds from its start (`*_s`).
"""

import csv
import difflib
import gzip
import io
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from jaxserve.errors import InputError

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
US_PER_S = 1_000_000
WIDE_TIME_COLUMNS = ("datetime_utc", "datetime", "timestamp", "time", "datetime (utc)")
MISSING_TEXT = frozenset({"", "nan", "na", "n/a", "null", "none"})

# float() alone would also take 1_000, inf and digits of other scripts.
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# Pandas would read a bare 2021 or 20210101 as a day; such a number is more likely a counter than a time stamp.
_STAMP = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}.*)?", re.ASCII)
ZONED = r":\d\d.*(?:Z|[+-]\d\d(?::?\d\d)?)$"
"""A zone after a time of day; a bare date ends in something like an offset, hence the colon before it."""


def utc_us(instant: datetime) -> int:
    """Microseconds since 1970-01-01T00Z of an aware datetime, exactly."""
    return (instant - EPOCH) // timedelta(microseconds=1)


def instant_of(instant_us: int) -> datetime:
    """The aware datetime of microseconds since 1970-01-01T00Z."""
    return EPOCH + timedelta(microseconds=instant_us)


def stamp_text(instant: datetime) -> str:
    """`2024-03-31T01:00:00Z`, as `start_time` takes it."""
    return instant.astimezone(UTC).replace(tzinfo=None).isoformat() + "Z"


def utc_text(instant_us: int) -> str:
    """`2024-03-31T01:00Z`, with seconds only where there are any."""
    try:
        stamp = instant_of(int(instant_us))
    except OverflowError:
        return f"{instant_us / US_PER_S:g} s after 1970-01-01T00:00Z"
    whole_minute = stamp.second == 0 and stamp.microsecond == 0
    return stamp.replace(tzinfo=None).isoformat(timespec="minutes" if whole_minute else "auto") + "Z"


@dataclass(frozen=True)
class GridSeries:
    """Carbon intensity of every zone over one run, as a step function of the run's clock. T steps, Z zones."""

    zones: tuple[str, ...]
    """[Z] Electricity Maps zone names: the columns of `ci_g_per_kwh`, in the order asked for."""
    edges_s: NDArray[np.float64]
    """[T] s from the run's start, ascending, first <= 0. Value i holds on [edges_s[i], edges_s[i+1])."""
    ci_g_per_kwh: NDArray[np.float64]
    """[T, Z] gCO2eq/kWh."""
    until_s: float
    """s from the run's start: the last value holds up to here, exclusive."""
    signal: str
    """`average` or `marginal`."""
    basis: str
    """`lca` (life cycle), `direct` (operational) or `unspecified`."""
    source: str
    notes: tuple[str, ...]
    """Sentences for the run's summary."""
    counts: dict[str, int]
    """`filled_hours` (steps of the file's own resolution, summed over zones), `duplicate_rows`, `unsorted_rows`."""
    start: datetime | None = None
    """The run's start (UTC); it only lets errors name the hour."""

    def at(self, times_s: ArrayLike) -> NDArray[np.float64]:
        """gCO2eq/kWh [len(times_s), Z] at times_s, s from the run's start; never read beyond either end."""
        times = np.atleast_1d(np.asarray(times_s, dtype=np.float64))
        outside = ~((times >= self.edges_s[0]) & (times < self.until_s))  # Written so that NaN is outside.
        if outside.any():
            raise InputError(
                f"{self.source}: carbon intensity is known from {self._hour(float(self.edges_s[0]))} until {self._hour(self.until_s)}, "
                f"not at {self._hour(float(times[outside][0]))}; shorten the run or give a series that covers it"
            )
        return self.ci_g_per_kwh[np.searchsorted(self.edges_s, times, side="right") - 1]

    def over(self, duration_s: float) -> NDArray[np.float64]:
        """gCO2eq/kWh [3, Z]: the least, the mean over time and the greatest value of each zone in [0, duration_s)."""
        inside = (self.edges_s < duration_s) & (np.append(self.edges_s[1:], np.inf) > 0)
        begins = np.maximum(self.edges_s[inside], 0.0)
        values, lasts_s = self.ci_g_per_kwh[inside], np.diff(begins, append=duration_s)
        return np.stack([values.min(axis=0), lasts_s @ values / duration_s, values.max(axis=0)])

    def _hour(self, time_s: float) -> str:
        if self.start is None or not math.isfinite(time_s):
            return f"{time_s:g} s"
        return f"{utc_text(utc_us(self.start) + round(time_s * US_PER_S))} ({time_s:g} s)"


def missing_zone(where: str, zone: str, have: Sequence[str], column: str | None = None) -> InputError:
    """The error for a zone that a site names and `where` lacks (under the name `column`), with the nearest names it has."""
    near = difflib.get_close_matches(column or zone, have, n=3, cutoff=0.5) or list(have[:8])
    hint = f" (it has {', '.join(near)}{', ...' if len(near) < len(have) else ''})" if near else ""
    mapped = f" (column '{column}' by grid.zone_column)" if column not in (None, zone) else ""
    return InputError(f"{where}: has no zone {zone}{mapped}, which a site names{hint}; add it or correct the site's zone")


@dataclass(frozen=True)
class Column:
    """One zone's cells in one file, in the order of the file's rows. N rows."""

    label: str
    """The file, as errors name it."""
    line: NDArray[np.int64]
    """[N] 1-based line in the file, header counted."""
    time_us: NDArray[np.int64]
    """[N] when each row's interval begins."""
    cells: list[str]
    """[N] as written."""
    header: str
    """Of the column that the values stand in."""
    estimated: NDArray[np.bool_] | None = None
    """[N] whether the publisher estimated the value; None where the file does not say."""


@dataclass(frozen=True)
class SignalFile:
    """The wanted columns of one file."""

    label: str
    columns: dict[str, Column]
    """By column name (wide) or zone id (long export); wanted names that the file lacks are absent."""
    have: tuple[str, ...]
    """Every zone or column the file has."""
    basis: str | None
    """What the header itself says: `lca`, `direct`, or None for a wide file."""
    assumed_utc: bool
    """Whether neither the time stamps nor their header say what clock they are of, so that they were read as UTC."""


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, unpacked where its name ends in .gz; whatever stands in the way is one sentence."""
    try:
        # Asked first because opening a pipe or a device could wait for ever.
        if path.exists() and not path.is_file():
            kind = "a directory" if path.is_dir() else "not a regular file"
            raise InputError(f"{path}: is {kind}; give the path of a CSV file")
        data = path.read_bytes()
        if path.suffix.lower() == ".gz":
            data = gzip.decompress(data)
        elif data[:2] == b"\x1f\x8b":
            raise InputError(f"{path}: is gzip-compressed; give it a name that ends in .gz")
        text = data.decode("utf-8-sig")
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path}: does not exist; correct grid.path (a relative path starts at the scenario's folder)") from None
    except PermissionError:
        raise InputError(f"{path}: may not be read; give this user read permission") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise InputError(f"{path}: is not a complete gzip file; compress it again, or drop .gz from its name if it is plain text") from None
    except UnicodeDecodeError as error:
        row = error.object[: error.start].count(b"\n") + 1
        guess = "UTF-16" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "another encoding or a binary file"
        raise InputError(f"{path}: row {row} is not UTF-8 text (it looks like {guess}); save the file as UTF-8 CSV") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); check grid.path") from None
    if "\x00" in text:
        raise InputError(f"{path}: row {text[: text.index(chr(0))].count(chr(10)) + 1} holds NUL bytes; save the file as UTF-8 CSV")
    return text


def read_signal_file(path: Path, wanted: Sequence[str], basis: str | None) -> SignalFile:
    """Reads the wanted zones of a wide file or an Electricity Maps long export, told apart by the header.

    `basis` picks between the two value columns of a long export.
    """
    label, (header, lines, rows) = str(path), _read_rows(path)
    names = [_plain(name) for name in header]
    if not names[0]:
        raise InputError(f"{label}: row 1: the first column has no name; name it {', '.join(WIDE_TIME_COLUMNS[:4])}")
    zone_at = next((names.index(name) for name in ("zone id", "zone_id") if name in names), None)
    time_at = next((names.index(name) for name in WIDE_TIME_COLUMNS if name in names), None)
    if zone_at is not None and time_at is not None:
        value_at, basis = _long_value_column(label, header, names, basis)
        time_us, assumed_utc = _read_times(label, header[time_at], lines, [row[time_at] for row in rows])
        estimated_at = names.index("data estimated") if "data estimated" in names else None
        estimated = None if estimated_at is None else np.array([_plain(row[estimated_at]) in ("true", "1", "yes") for row in rows])
        ids = np.array([row[zone_at].strip() for row in rows])
        columns = {}
        for zone in wanted:
            of_zone = np.flatnonzero(ids == zone)
            if of_zone.size:
                columns[zone] = Column(
                    label,
                    lines[of_zone],
                    time_us[of_zone],
                    [rows[i][value_at] for i in of_zone],
                    header[value_at],
                    None if estimated is None else estimated[of_zone],
                )
        return SignalFile(label, columns, tuple(sorted(set(ids.tolist()) - {""})), basis, assumed_utc)
    if time_at != 0:
        raise InputError(
            f"{label}: row 1: the first column is {header[0][:40]!r}; expected {', '.join(WIDE_TIME_COLUMNS[:4])} and one column a zone, "
            "or an Electricity Maps export"
        )
    time_us, assumed_utc = _read_times(label, header[0], lines, [row[0] for row in rows])
    columns = {}
    for name in wanted:
        if header.count(name) > 1:
            raise InputError(f"{label}: row 1: column '{name}' appears {header.count(name)} times; keep one")
        if name in header[1:]:
            at = header.index(name)
            columns[name] = Column(label, lines, time_us, [row[at] for row in rows], name)
    return SignalFile(label, columns, tuple(name for name in header[1:] if name), None, assumed_utc)


def parse_cells(cells: Sequence[str]) -> tuple[NDArray[np.float64], dict[int, str]]:
    """Values [N], NaN where there is none, and what is wrong (by index) with the cells that hold anything else."""
    values, wrong = np.full(len(cells), np.nan), {}
    for i, cell in enumerate(cells):
        text = cell.strip()
        if _NUMBER.fullmatch(text):
            values[i] = float(text)
            if math.isinf(values[i]):
                wrong[i] = f"{text[:40]!r} is infinite"
        elif text.casefold() not in MISSING_TEXT:
            wrong[i] = f"{text[:40]!r} is not a plain number such as 123.4"
    return values, wrong


def unsorted_lines(column: Column) -> set[tuple[str, int]]:
    """(file, line) of the rows that stand after a later time stamp."""
    late = np.flatnonzero(column.time_us[1:] < np.maximum.accumulate(column.time_us)[:-1]) + 1
    return {(column.label, int(line)) for line in column.line[late]}


def _plain(name: str) -> str:
    return " ".join(name.replace("₂", "2").casefold().split())


def _read_rows(path: Path) -> tuple[list[str], NDArray[np.int64], list[list[str]]]:
    """Header, line of each row [N], rows [N] of exactly the header's length; blank rows are dropped."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""))
    header: list[str] | None = None
    lines, rows, before = [], [], 0
    try:
        for row in reader:
            before += 1
            if reader.line_num > before:  # A lost quotation mark would swallow the rows up to the next one.
                raise InputError(f"{path}: row {before} opens a quotation mark that its line does not close; remove or close it")
            if not any(cell.strip() for cell in row):
                continue
            if header is None:
                header = [name.strip() for name in row]
                continue
            if len(row) > len(header) and not any(cell.strip() for cell in row[len(header) :]):
                del row[len(header) :]
            if len(row) != len(header):
                raise InputError(
                    f"{path}: row {reader.line_num} has {len(row)} cells where the header has {len(header)}; complete or remove it"
                )
            lines.append(reader.line_num)
            rows.append(row)
    except csv.Error as error:
        raise InputError(f"{path}: row {reader.line_num} is not CSV ({error}); correct it") from None
    if header is None:
        raise InputError(f"{path}: is empty; give a CSV file with a header and one row an hour")
    if len(header) == 1:
        raise InputError(f"{path}: row 1 has one column ({header[0][:40]!r}); separate the columns by commas")
    if not rows:
        raise InputError(f"{path}: has a header but no rows; give one row an hour")
    return header, np.array(lines, dtype=np.int64), rows


def _read_times(label: str, column: str, lines: NDArray[np.int64], texts: Sequence[str]) -> tuple[NDArray[np.int64], bool]:
    """int64 us [N], and whether neither the header nor the stamps say that they are UTC, as which they are read without an offset."""
    stripped = [text.strip() for text in texts]
    tidy = [text.removesuffix(" UTC") for text in stripped]
    index = pd.to_datetime([text if _STAMP.fullmatch(text) else None for text in tidy], format="ISO8601", utc=True, errors="coerce")
    unread = np.flatnonzero(index.isna())
    if unread.size:
        what = f"{tidy[unread[0]][:40]!r} is not a time stamp" if tidy[unread[0]] else "the time stamp is missing"
        raise InputError(f"{label}: row {lines[unread[0]]}, column '{column}': {what}; write it like 2024-03-31T01:00Z")
    if "utc" in re.split(r"[^a-z]+", _plain(column)):
        return index.as_unit("us").asi8, False
    zoned = np.array([text.endswith(" UTC") or re.search(ZONED, text) is not None for text in stripped])
    if zoned.any() and not zoned.all():
        odd = int(np.argmax(zoned != zoned[0]))
        raise InputError(
            f"{label}: row {lines[odd]}, column '{column}': time stamps with and without an offset are mixed; give every row one or none"
        )
    return index.as_unit("us").asi8, not zoned.any()


def _long_value_column(label: str, header: list[str], names: list[str], basis: str | None) -> tuple[int, str]:
    """Index and basis of the value column of a long export."""
    found = {}
    for i, name in enumerate(names):
        if name.startswith("carbon intensity") and name.endswith(("(direct)", "(lca)", "(life cycle)")):
            kind = "direct" if name.endswith("(direct)") else "lca"
            if kind in found:
                raise InputError(f"{label}: row 1: both '{header[found[kind]]}' and '{header[i]}' hold {kind} values; keep one")
            found[kind] = i
    if not found:
        raise InputError(f"{label}: row 1: no column 'Carbon intensity gCO₂eq/kWh (direct)' or '(Life cycle)'; export the file again")
    if basis is None and len(found) > 1:
        raise InputError(f"{label}: row 1: holds direct and life-cycle values; set grid.basis to 'direct' or 'lca'")
    wanted = basis or next(iter(found))
    if wanted not in found:
        raise InputError(f"{label}: row 1: has no {wanted} column, which grid.basis asks for; set grid.basis to '{next(iter(found))}'")
    return found[wanted], wanted
