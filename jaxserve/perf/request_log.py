"""The log of a real server, a row a request: what `jaxserve validate` replays and `calibration_fit.request_log` fits to.

Times are seconds (a column whose name ends in `_ms` is taken in milliseconds), lengths tokens, energy joules. A benchmark result that holds
its requests one by one (`benchmark_result`) is such a log too. No file is opened here: the callers bring the text.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import InputError
from jaxserve.perf.benchmark_result import is_json, parse_results, select, sent_requests
from jaxserve.perf.stamps import check_seconds
from jaxserve.units import MS_PER_S

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LogColumn:
    """A quantity, its other names, its unit, and what it holds; `low` is the least value allowed."""

    names: tuple[str, ...]
    unit: str
    text: str
    low: float = 0.0
    required: bool = False
    whole: bool = False


NONE = -np.inf
COLUMNS: dict[str, LogColumn] = {
    "arrival_s": LogColumn(("arrival_s", "arrival_rel_s", "arrival_time_s"), "s", "arrival at the server, any zero", NONE, True),
    "isl": LogColumn(("isl", "input_tokens", "input_toks", "prompt_tokens", "prompt_len"), "tokens", "prompt length", NONE, True, True),
    "osl": LogColumn(
        ("osl", "output_tokens", "output_toks", "completion_tokens", "output_len"), "tokens", "tokens made", -np.inf, True, True
    ),
    "ttft_s": LogColumn(("ttft_s", "ttft_from_queued_s", "ttft_from_arrival_s"), "s", "time to first token, see `TTFT_FROM`", 0, True),
    "tpot_s": LogColumn(("tpot_s", "mean_tpot_s", "itl_mean_s"), "s", "mean time of each token after the first", 0, True),
    "queue_wait_s": LogColumn(("queue_wait_s", "queue_s", "waiting_s"), "s", "time in the engine's queue before admission"),
    "energy_j": LogColumn(("energy_j",), "J", "this request's share of the GPUs' energy; only sums by load are used"),
    "engine": LogColumn(("engine", "replica", "engine_id", "replica_id", "instance"), "", "which engine served the request"),
    "gpu": LogColumn(("gpu", "gpu_name"), "", "GPU name"),
    "model": LogColumn(("model", "model_name"), "", "model name"),
    "tp": LogColumn(("tp", "tensor_parallel_size"), "", "tensor parallel size"),
}
"""Every column that is read. The first name is ours; of a time, the same name ending in `_ms` is milliseconds."""

TEXTS = ("engine", "gpu", "model", "tp")
SETUP = ("gpu", "model", "tp")
INVALID_ROWS = ("error", "drop")
TTFT_FROM = ("arrival", "queued", "admitted")
"""Where the log's time to first token counts from: arrival at the server; entry into the engine's queue (what lies between the two is
not in a log, and a replay has nothing there: the same as arrival); or admission, so that the queue wait is still to be added."""
SLOWEST_TPOT_S = 2.0
"""A median above this is milliseconds taken for seconds: 8B to 400B models take 5 to 200 ms a token."""
LONGEST_LOG_S = 1e7
"""A log of over a hundred days is one whose times are in a finer unit than seconds."""
ROUNDING_S = 1e-3
"""By how much a wait may exceed the TTFT that holds it: logs are written with few digits."""
MISSING = ("", "nan")
"""What a cell holds that has no value: numpy and what reads JSON write nan."""
MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class RequestLog:
    """R requests in order of arrival (ties in the file's order), the earliest at time 0. Optional columns are None when absent."""

    name: str
    line: NDArray[np.int64]  # [R] line in the file, the header being 1; of a benchmark result, the request's place in it, from 1
    arrival_s: Floats
    isl: Floats
    osl: Floats
    ttft_s: Floats  # from arrival, the wait included
    tpot_s: Floats  # nan where osl = 1
    queue_wait_s: Floats | None
    energy_j: Floats | None
    engine: tuple[str, ...] | None
    setup: Mapping[str, str]  # of gpu, model, tp: those that the log names
    unused: tuple[str, ...]  # columns that were not read
    notes: tuple[str, ...] = ()  # sentences: what was left out, or worked out

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def first_token_s(self) -> Floats:
        """[R] s since the first arrival."""
        return self.arrival_s + self.ttft_s

    @property
    def finish_s(self) -> Floats:
        """[R] s since the first arrival."""
        return self.first_token_s + np.where(self.osl > 1, self.tpot_s, 0.0) * (self.osl - 1)

    @property
    def admit_s(self) -> Floats | None:
        """[R] s since the first arrival; None without a wait."""
        return None if self.queue_wait_s is None else self.arrival_s + self.queue_wait_s

    def in_system(self) -> NDArray[np.int64]:
        """Requests [R] in the server when each arrives, itself included: the load."""
        return np.arange(1, len(self) + 1) - np.searchsorted(np.sort(self.finish_s), self.arrival_s, side="right")

    def select(self, keep: NDArray[np.bool_]) -> "RequestLog":
        """The requests where `keep` [R] is true; times keep their zero."""
        arrays = {k: v[keep] for k, v in vars(self).items() if isinstance(v, np.ndarray)}
        engine = None if self.engine is None else tuple(e for e, k in zip(self.engine, keep, strict=True) if k)
        return replace(self, engine=engine, **arrays)


def parse_where(pairs: Sequence[str]) -> dict[str, str]:
    """`COLUMN=VALUE` strings of `--where`."""
    for text in pairs:
        if not text.partition("=")[0].strip() or "=" not in text:
            raise InputError(f"--where {text!r}: must be COLUMN=VALUE, for example gpu=RTX4090")
    columns = [text.partition("=")[0].strip() for text in pairs]
    if len(set(columns)) < len(columns):
        twice = next(column for i, column in enumerate(columns) if column in columns[:i])
        raise InputError(f"--where names {twice} twice; a row has one value of it")
    return {k.strip(): v.strip() for k, _, v in (text.partition("=") for text in pairs)}


def read_request_log(
    text: str, name: str, where: Mapping[str, str] | None = None, ttft_from: str = "arrival", invalid_rows: str = "error"
) -> RequestLog:
    """Read a log from a file's `text`: CSV (`parse_log`), or JSON of a benchmark of vLLM or SGLang, of which `where` selects results."""
    if not is_json(text):
        return parse_log(text.splitlines(), name, where, ttft_from, invalid_rows)
    _check_options(ttft_from, invalid_rows)
    if ttft_from == "admitted":
        raise InputError(f"--ttft-from admitted: the TTFT of {name} counts from the moment when a request was sent; leave the option out")
    results = select(parse_results(text, name), name, where or {})
    sent = sent_requests(results)
    if sent.ttft_s is None or sent.decode_s is None:
        raise InputError(f"{name}: does not hold the times of its requests (ttfts, itls); run the benchmark with the option for details")
    found = {"arrival_s": "start_times", "isl": "input_lens", "osl": "output_lens", "ttft_s": "ttfts", "tpot_s": "itls"}
    line = np.arange(1, len(sent.isl) + 1)
    keep, notes = _with_tokens(name, line, found, sent.isl, sent.osl, invalid_rows)
    tpot_s = np.divide(sent.decode_s, sent.osl - 1, out=np.full(len(line), np.nan), where=sent.osl > 1)
    columns = {"arrival_s": sent.start_s, "isl": sent.isl, "osl": sent.osl, "ttft_s": sent.ttft_s, "tpot_s": tpot_s}
    numbers = {q: values[keep] for q, values in columns.items()}
    model = next((result.model for result in results if result.model), "")
    setup = {"model": model} if model else {}
    return _checked(name, line[keep], numbers, found, None, setup, (), ttft_from, (*sent.notes, *notes))


def parse_log(
    lines: Iterable[str], name: str, where: Mapping[str, str] | None = None, ttft_from: str = "arrival", invalid_rows: str = "error"
) -> RequestLog:
    """Read a log from CSV `lines` (the header first), keeping rows whose columns equal `where`.

    `invalid_rows` = "drop" leaves out rows with fewer than one token (failed requests), as of traces, and nothing else.
    Raises `InputError` naming `name`, row and column for anything that is not a log of one setup with every number in place.
    """
    _check_options(ttft_from, invalid_rows)
    header, rows = _rows(lines, name)
    at = {text.strip(): i for i, text in enumerate(header)}
    if len(at) < len(header):
        twice = next(h.strip() for i, h in enumerate(header) if at[h.strip()] != i)
        raise InputError(f"{name}, row 1: the column {twice} appears more than once; keep one")
    for column, value in (where or {}).items():
        if column not in at:
            raise InputError(f"{name}, row 1: --where {column}={value}: there is no such column; the columns are {', '.join(at)}")
        held = sorted({fields[at[column]].strip() for _, fields in rows})
        rows = [(line, fields) for line, fields in rows if fields[at[column]].strip() == value]
        if not rows:
            raise InputError(f"{name}: no row has {column} = {value}; the column holds {', '.join(held)[:200]}")
    found = _find(name, at)
    isl, osl = (_numbers(name, q, found[q], at[found[q]], rows) for q in ("isl", "osl"))
    keep, notes = _with_tokens(name, np.array([number for number, _ in rows]), found, isl, osl, invalid_rows)
    rows = [row for row, kept in zip(rows, keep, strict=True) if kept]
    texts = {q: tuple(fields[at[found[q]]].strip() for _, fields in rows) for q in TEXTS if q in found}
    setup = {}
    for quantity in SETUP:
        values = sorted(set(texts.get(quantity, ())))
        if len(values) > 1:
            column, shown = found[quantity], ", ".join(values)[:200]
            raise InputError(f"{name}: holds several values of {column} ({shown}); choose one with --where {column}={values[0]}")
        setup |= {quantity: values[0]} if values else {}
    line = np.array([number for number, _ in rows])
    numbers = {q: _numbers(name, q, found[q], at[found[q]], rows) for q in COLUMNS if q in found and q not in TEXTS}
    unused = tuple(c for c in at if c not in found.values())
    return _checked(name, line, numbers, found, texts.get("engine"), setup, unused, ttft_from, notes)


def _check_options(ttft_from: str, invalid_rows: str) -> None:
    if ttft_from not in TTFT_FROM:
        raise InputError(f"--ttft-from {ttft_from!r}: must be one of {', '.join(TTFT_FROM)}")
    if invalid_rows not in INVALID_ROWS:
        raise InputError(f"--invalid-rows {invalid_rows!r}: must be {' or '.join(INVALID_ROWS)}")


def _with_tokens(
    name: str, line: NDArray[np.int64], found: Mapping[str, str], isl: Floats, osl: Floats, invalid_rows: str
) -> tuple[NDArray[np.bool_], tuple[str, ...]]:
    """Which rows [R] have at least one token each way, and a note of how many have not; refused unless they are to be dropped."""
    keep = (isl >= 1) & (osl >= 1)
    left = int((~keep).sum())
    if left and invalid_rows == "error":
        i = int(np.argmin(keep))
        quantity, value = ("isl", isl[i]) if isl[i] < 1 else ("osl", osl[i])
        raise InputError(
            f"{name}, row {line[i]}, column {found[quantity]}: {value:.0f} tokens, at least 1 needed; correct the row or say "
            f"--invalid-rows drop to leave such rows out ({left} in this log)"
        )
    if left == len(keep):
        raise InputError(f"{name}: --invalid-rows drop leaves no row, all {left} have too few tokens; give another log")
    return keep, (f"{left} of {len(keep)} rows have fewer than 1 token and were dropped, with the load that they were",) if left else ()


def _rows(lines: Iterable[str], name: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The header, and (line number, fields) of every row that is not blank, all of one width."""
    reader = csv.reader(lines, strict=True)
    rows: list[tuple[int, list[str]]] = []
    try:
        rows.extend((reader.line_num, fields) for fields in reader if any(field.strip() for field in fields))
    except csv.Error as error:
        raise InputError(f"{name}, row {reader.line_num}: is not CSV ({error}); export the log again") from None
    if len(rows) < 2:
        raise InputError(f"{name}: holds no request; give a CSV file with a header and a row a request")
    (_, header), body = rows[0], rows[1:]
    for line, fields in body:
        if len(fields) != len(header):
            raise InputError(f"{name}, row {line}: has {len(fields)} field(s) where the header has {len(header)}; correct the row")
    return header, body


def _find(name: str, at: Mapping[str, int]) -> dict[str, str]:
    """The file's name of each quantity that it holds."""
    found = {}
    for quantity, column in COLUMNS.items():
        names = [*column.names, *(n.removesuffix("_s") + "_ms" for n in column.names if n.endswith("_s"))]
        held = [n for n in names if n in at]
        if len(held) > 1:
            raise InputError(f"{name}, row 1: the columns {' and '.join(held)} hold the same quantity; remove all but one")
        if held:
            found[quantity] = held[0]
        elif column.required:
            raise InputError(
                f"{name}, row 1: there is no column {quantity} ({column.text}, {column.unit}; or named {', '.join(column.names[1:])}); "
                f"the columns are {', '.join(at)[:200]}"
            )
    return found


def _numbers(name: str, quantity: str, column: str, index: int, rows: list[tuple[int, list[str]]]) -> Floats:
    """A column in s, tokens or J. Only TPOT may be left empty or nan, which `_checked` allows where there is but one token."""
    spec, values = COLUMNS[quantity], np.empty(len(rows))
    for i, (line, fields) in enumerate(rows):
        text = fields[index].strip()
        where = f"{name}, row {line}, column {column}"
        if quantity == "tpot_s" and text.lower() in MISSING:
            values[i] = np.nan
            continue
        try:
            value = float(text)
        except ValueError:
            raise InputError(f"{where}: {'is empty' if not text else repr(text[:40]) + ' is not a number'}; give a number") from None
        if not np.isfinite(value):
            raise InputError(f"{where}: {text[:40]} is not a finite number; correct the row or leave it out")
        if value < spec.low:
            raise InputError(f"{where}: {text[:40]} is below {spec.low:g} {spec.unit}; correct the row or leave it out")
        if spec.whole and (value != round(value) or value > MOST_TOKENS):
            raise InputError(f"{where}: {text[:40]} is not a whole number of tokens up to {MOST_TOKENS}; correct the row")
        values[i] = value
    return values / MS_PER_S if column.endswith("_ms") else values


def _checked(
    name: str,
    line: NDArray[np.int64],
    numbers: dict[str, Floats],
    found: Mapping[str, str],
    engine: tuple[str, ...] | None,
    setup: Mapping[str, str],
    unused: tuple[str, ...],
    ttft_from: str,
    notes: tuple[str, ...],
) -> RequestLog:
    """What only shows when the columns meet: units, waits, missing TPOT; then in order of arrival."""
    osl, tpot, wait = numbers["osl"], numbers["tpot_s"], numbers.get("queue_wait_s")
    bad = np.flatnonzero((osl > 1) & ~(tpot > 0))
    if len(bad):
        value = "is missing" if np.isnan(tpot[bad[0]]) else "is 0"
        raise InputError(f"{name}, row {line[bad[0]]}, column {found['tpot_s']}: {value} though the request made {osl[bad[0]]:.0f} tokens")
    many = tpot[osl > 1]
    if len(many) and np.median(many) > SLOWEST_TPOT_S:
        raise InputError(
            f"{name}, column {found['tpot_s']}: the median is {np.median(many):.3g} s a token; "
            "if these are milliseconds, let the column's name end in _ms"
        )
    check_seconds(numbers["arrival_s"], f"{name}, column {found['arrival_s']}")
    arrival = numbers["arrival_s"] - numbers["arrival_s"].min()
    if arrival.max() > LONGEST_LOG_S:
        raise InputError(f"{name}, column {found['arrival_s']}: the log spans {arrival.max():.3g} s; give arrivals in seconds")
    ttft = numbers["ttft_s"]
    if ttft_from == "admitted":
        if wait is None:
            raise InputError(f"{name}, row 1: --ttft-from admitted needs the column queue_wait_s to add to {found['ttft_s']}")
        ttft = ttft + wait
    if wait is not None and (bad := np.flatnonzero(wait > ttft + ROUNDING_S)).size:
        i = bad[0]
        raise InputError(
            f"{name}, row {line[i]}, column {found['queue_wait_s']}: a wait of {wait[i]:g} s is longer than the TTFT of {ttft[i]:g} s "
            "that should hold it; with a TTFT that counts from admission, say --ttft-from admitted"
        )
    if (bad := np.flatnonzero(ttft <= 0)).size:
        raise InputError(f"{name}, row {line[bad[0]]}, column {found['ttft_s']}: 0 s cannot be; correct the row or leave it out")
    columns = numbers | {"arrival_s": arrival, "ttft_s": ttft, "tpot_s": np.where(osl > 1, tpot, np.nan)}
    order = np.argsort(arrival, kind="stable")
    ordered = {q: values[order] for q, values in columns.items()}
    engines = None if engine is None else tuple(engine[i] for i in order)
    optional = {q: ordered.pop(q, None) for q in ("queue_wait_s", "energy_j")}
    return RequestLog(name=name, line=line[order], engine=engines, setup=setup, unused=unused, notes=notes, **ordered, **optional)
