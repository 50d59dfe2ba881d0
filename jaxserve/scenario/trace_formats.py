"""The trace formats that are known by their header, and how their columns become arrays.

CSV goes through pyarrow, in bulk. Only when something is wrong does a plain Python loop walk the file again, to find the line.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import csv as pacsv

from jaxserve.errors import InputError
from jaxserve.scenario.rawfile import HEAD_BYTES, open_input
from jaxserve.units import LATEST_EPOCH_S

NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)
THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d*)?")


TimeUnit = Literal["s", "ms", "us", "ns"]
TIME_UNITS: dict[TimeUnit, float] = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
"""How many of each are a second."""
EPOCH_S = 1e9
"""As a relative time this is 31 years, as an epoch it is September 2001."""


@dataclass(frozen=True)
class TraceFormat:
    """Names of the three columns that matter and of the two that may be there."""

    name: str
    time: str
    isl: str
    osl: str
    model: str = "model"
    application: str = "application"

    @property
    def columns(self) -> tuple[str, str, str]:
        return (self.time, self.isl, self.osl)

    @property
    def labels(self) -> tuple[str, str]:
        return (self.model, self.application)


AZURE = TraceFormat("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = TraceFormat("BurstGPT", "Timestamp", "Request tokens", "Response tokens", model="Model", application="Log Type")
MOONCAKE = TraceFormat("Mooncake JSON lines", "timestamp", "input_length", "output_length")
IN_SECONDS = ("chat_id", "turn")
"""Keys of Alibaba's traces (Qwen-Bailian), which have Mooncake's other keys but stamps in seconds."""
KNOWN = (
    "the formats known are Azure (TIMESTAMP,ContextTokens,GeneratedTokens), "
    "BurstGPT (Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type), "
    "Mooncake JSON lines (keys timestamp, input_length, output_length), "
    "benchmark results of vLLM and SGLang (JSON with their details) and "
    "generic (arrival_s, input_tokens or isl, output_tokens or osl), comma-separated"
)


@dataclass(frozen=True)
class RawTrace:
    """Columns as the file has them, in file order; R rows."""

    format: TraceFormat
    time: np.ndarray | pa.ChunkedArray  # float64[R] in `time_unit`, or R strings where the file holds time stamps
    isl: np.ndarray  # float64[R] tokens, not checked yet
    osl: np.ndarray  # float64[R] tokens, not checked yet
    line_of: Callable[[int], int]  # data row index -> 1-based line number in the file
    time_unit: TimeUnit = "s"  # of numbers, as the format has it or the numbers show it
    unit_shown_by: str = ""  # why this unit, where the format leaves it open
    origin_code: np.ndarray | None = None  # int[R] index into origin_values
    origin_values: list[str] = field(default_factory=list)
    model: pd.Categorical | None = None  # [R], "" where a row does not say; None where no row does
    application: pd.Categorical | None = None  # likewise
    notes: tuple[str, ...] = ()  # how the times came about, where the reader of the format knows better than their values tell


def read_raw(path: Path, origin_column: str | None) -> RawTrace:
    """Recognise the format of `path` by its header and read the columns that matter."""
    with open_input(path) as stream:
        head = stream.read(HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"{"):
        return _read_json_lines(path, origin_column)
    return _read_csv(path, origin_column)


def cell_problem(text: str) -> str | None:
    """Why `text` is not a plain number, with the remedy; None if it is one (NaN and infinities count as numbers here)."""
    text = text.strip()
    if NUMBER.fullmatch(text) or NOT_FINITE.fullmatch(text):
        return None
    if not text:
        return "is empty; give a number"
    if THOUSANDS.fullmatch(text):
        return f"'{text}' has a thousands separator; write {text.replace(',', '')}"
    return f"'{text[:40]}' is not a number; give a plain number"


# --- CSV


def csv_rows(path: Path) -> Generator[tuple[int, list[str]], None, None]:
    """(1-based line number, fields) of every row that is not blank, the header first. Slow: for headers and for errors."""
    with open_input(path) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text)
        line = 1
        try:
            for fields in reader:
                if fields:
                    yield line, fields
                line = reader.line_num + 1  # where the next row begins: a quoted field may span lines
        except csv.Error as error:
            raise InputError(f"{path}, row {line}: is not CSV ({error}); export the file again.") from error


def _recognise(path: Path, line: int, header: list[str]) -> TraceFormat:
    names = [name.strip() for name in header]
    known = [AZURE, BURSTGPT]
    known += [TraceFormat("generic", "arrival_s", isl, osl) for isl in ("input_tokens", "isl") for osl in ("output_tokens", "osl")]
    matches = [candidate for candidate in known if set(candidate.columns) <= set(names)]
    shown = ",".join(names)[:120]
    if not matches:
        raise InputError(f"{path}, row {line}: the header '{shown}' is of no known trace format; {KNOWN}.")
    if len(matches) > 1:
        both = " and ".join("/".join(match.columns) for match in matches)
        raise InputError(f"{path}, row {line}: the header fits more than one format ({both}); remove or rename columns until one fits.")
    for name in (*matches[0].columns, *matches[0].labels):
        if names.count(name) > 1:
            raise InputError(f"{path}, row {line}: the column {name} appears {names.count(name)} times; keep one.")
    return matches[0]


def _read_csv(path: Path, origin_column: str | None) -> RawTrace:
    rows = csv_rows(path)
    header_line, header = next(rows)
    form = _recognise(path, header_line, header)
    first = next(rows, None)
    rows.close()  # it holds the file open
    if first is None:
        raise InputError(f"{path}: has a header but no rows; give at least one request.")

    at = {name.strip(): index for index, name in enumerate(header)}
    if origin_column is not None and origin_column not in at:
        have = ", ".join(at)
        raise InputError(f"workload.origin_column: {path} has no column '{origin_column}'; its columns are {have}.")
    time_cell = first[1][at[form.time]].strip() if len(first[1]) > at[form.time] else ""
    stamped = cell_problem(time_cell) is not None  # anything but a number is tried as a time stamp

    # Names as the file has them (perhaps with blanks around) select columns; the clean names are for people.
    labels = [name for name in form.labels if name in at]
    raw_name = {name: header[at[name]] for name in (*form.columns, *labels, *([origin_column] if origin_column else []))}
    types = {raw_name[form.time]: pa.string() if stamped else pa.float64()}
    types |= {raw_name[name]: pa.float64() for name in form.columns[1:]}
    types |= {raw_name[name]: pa.string() for name in labels}
    if origin_column is not None:
        if origin_column in form.columns:
            raise InputError(f"workload.origin_column: '{origin_column}' holds times or tokens; name a column that holds origins.")
        types[raw_name[origin_column]] = pa.string()
    try:
        with open_input(path) as stream:
            table = pacsv.read_csv(
                stream,
                # No value means "missing": an empty or NA cell must be an error, never a silent null.
                convert_options=pacsv.ConvertOptions(column_types=types, include_columns=list(types), null_values=[]),
            )
    except pa.ArrowException as error:
        raise _diagnose(path, form, at, stamped, len(header), error) from error

    time = table[raw_name[form.time]]
    code, values = None, []
    if origin_column is not None:
        origin = table[raw_name[origin_column]].combine_chunks().dictionary_encode()
        code, values = origin.indices.to_numpy(zero_copy_only=False), origin.dictionary.to_pylist()
    return RawTrace(
        format=form,
        time=time if stamped else time.to_numpy(),
        isl=table[raw_name[form.isl]].to_numpy(),
        osl=table[raw_name[form.osl]].to_numpy(),
        line_of=lambda index: _csv_line(path, index),
        origin_code=code,
        origin_values=values,
        model=_labels(table[raw_name[form.model]]) if form.model in at else None,
        application=_labels(table[raw_name[form.application]]) if form.application in at else None,
    )


def _labels(column: pa.ChunkedArray | pa.Array) -> pd.Categorical | None:
    """[R] texts without blanks around them; None where all are empty."""
    encoded = column.dictionary_encode()
    encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
    codes, names = pd.factorize(np.array([value.strip() for value in encoded.dictionary.to_pylist()], object))
    return pd.Categorical.from_codes(codes[encoded.indices.to_numpy()], names) if any(names) else None


def _csv_line(path: Path, index: int) -> int:
    """Line number of data row `index` (0-based, blank lines not counted as rows)."""
    for row, (line, _) in enumerate(csv_rows(path)):
        if row == index + 1:
            return line
    raise AssertionError("a row that was read must be found again")


def _diagnose(path: Path, form: TraceFormat, at: dict[str, int], stamped: bool, width: int, error: Exception) -> InputError:
    """Find the first row that a bulk read cannot take."""
    numeric = form.columns[1:] if stamped else form.columns
    rows = csv_rows(path)
    next(rows)
    for line, fields in rows:
        if len(fields) != width:
            last = "is cut short or " if len(fields) < width else ""
            return InputError(f"{path}, row {line}: {last}has {len(fields)} field(s) where the header has {width}; correct the row.")
        for name in numeric:
            problem = cell_problem(fields[at[name]])
            if problem is not None:
                return InputError(f"{path}, row {line}, column {name}: {problem}.")
    reason = str(error).splitlines()[0][:160]
    return InputError(f"{path}: cannot be read as CSV ({reason}); export the file again as plain comma-separated UTF-8.")


# --- JSON lines


def _read_json_lines(path: Path, origin_column: str | None) -> RawTrace:
    form = MOONCAKE
    lines: list[int] = []
    alibaba = False
    columns: dict[str, list[float]] = {name: [] for name in form.columns}
    codes: list[int] = []
    values: dict[str, int] = {}
    labels: dict[str, list[str]] = {name: [] for name in form.labels}
    with open_input(path) as stream:
        for line, raw in enumerate(stream, start=1):
            text = (raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw).decode("utf-8").strip()
            if not text:
                continue
            row = _json_row(path, line, text)
            if not lines and not set(form.columns) & set(row):
                shown = ", ".join(row)[:120]
                raise InputError(f"{path}, row {line}: the keys '{shown}' are of no known trace format; {KNOWN}.")
            for name in form.columns:
                columns[name].append(_json_number(path, line, name, row))
            alibaba = alibaba or any(name in row for name in IN_SECONDS)
            if origin_column is not None:
                if origin_column not in row:
                    raise InputError(f"{path}, row {line}: has no key '{origin_column}' (workload.origin_column); add it to every line.")
                codes.append(values.setdefault(str(row[origin_column]), len(values)))
            for name in form.labels:
                text = str(row.get(name) or "")  # JSON may hold half a surrogate pair, which is no text
                labels[name].append(text.encode(errors="replace").decode())
            lines.append(line)
    time = np.array(columns[form.time], np.float64)
    unit, shown_by = _json_time_unit(time, alibaba)
    return RawTrace(
        format=form,
        time=time,
        time_unit=unit,
        unit_shown_by=shown_by,
        isl=np.array(columns[form.isl], np.float64),
        osl=np.array(columns[form.osl], np.float64),
        line_of=lines.__getitem__,
        origin_code=None if origin_column is None else np.array(codes, np.int64),
        origin_values=list(values),
        model=_labels(pa.array(labels[form.model])),
        application=_labels(pa.array(labels[form.application])),
    )


def _json_time_unit(time: np.ndarray, alibaba: bool) -> tuple[TimeUnit, str]:
    """The unit of the stamps [R], and what shows it: several writers share these keys, but not the unit."""
    known = time[np.isfinite(time)]
    for unit, per_second in TIME_UNITS.items():
        if known.size and EPOCH_S * per_second < known.min() < LATEST_EPOCH_S * per_second:
            return unit, "by their size since 1970"
    if alibaba:
        return "s", f"the keys {' and '.join(IN_SECONDS)} are of a trace in seconds"
    if (known != np.rint(known)).any():
        return "s", "they have fractions, Mooncake's are whole milliseconds"
    return "ms", "as Mooncake's are"


def _json_row(path: Path, line: int, text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}, row {line}: is not one whole JSON object (a truncated line?); write one object a line.") from error
    if not isinstance(row, dict):
        raise InputError(f"{path}, row {line}: holds JSON that is not an object; write one object a line.")
    return row


def _json_number(path: Path, line: int, name: str, row: dict[str, Any]) -> float:
    if name not in row:
        raise InputError(f"{path}, row {line}: has no key '{name}'; add it to every line.")
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{path}, row {line}, column {name}: {json.dumps(value)[:40]} is not a number; give a plain JSON number.")
    try:
        return float(value)
    except OverflowError as error:
        raise InputError(f"{path}, row {line}, column {name}: the number is too large; correct the row.") from error
