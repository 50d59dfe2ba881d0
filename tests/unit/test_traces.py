"""Trace files: what is read, and one test for each way in which a file can be wrong."""

import gzip
import os
import re
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import InputError
from jaxserve.scenario.traces import Trace, read_trace

DATA = Path(os.environ.get("JAXSERVE_SHARED_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
real_data = pytest.mark.skipif(not (DATA / "traces").is_dir(), reason=f"no real traces at {DATA} (set JAXSERVE_SHARED_DATA)")

GENERIC = "arrival_s,input_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def write(tmp_path: Path, content: str | bytes, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def rows_of(trace: Trace) -> list[tuple[float, int, int]]:
    return list(zip(trace.arrival_s.tolist(), trace.isl.tolist(), trace.osl.tolist()))


# --- what is read

THREE = [(0.0, 10, 1), (0.5, 20, 2), (2.0, 30, 3)]
READABLE = {
    "generic": (GENERIC + "0,10,1\n0.5,20,2\n2,30,3\n", "generic"),
    "generic isl osl": ("arrival_s,isl,osl\n0,10,1\n0.5,20,2\n2,30,3\n", "generic"),
    "azure 7 digits": (
        AZURE + "2023-11-16 18:15:46.6805900,10,1\n2023-11-16 18:15:47.1805900,20,2\n2023-11-16 18:15:48.6805900,30,3\n",
        "Azure",
    ),
    "azure iso Z": (AZURE + "2023-11-16T18:15:46Z,10,1\n2023-11-16T18:15:46.5Z,20,2\n2023-11-16T18:15:48Z,30,3\n", "Azure"),
    "azure offsets": (
        AZURE + "2023-11-16 18:15:46+00:00,10,1\n2023-11-16 19:15:46.5+01:00,20,2\n2023-11-16 13:15:48-05:00,30,3\n",
        "Azure",
    ),
    "azure one minute digit": (AZURE + "2023-11-16 18:15:46,10,1\n2023-11-16 18:15:46.5,20,2\n2023-11-16 18:15:48 ,30,3\n", "Azure"),
    "burstgpt": (BURSTGPT + "0,ChatGPT,10,1,11,Conversation log\n0.5,GPT-4,20,2,22,API log\n2,ChatGPT,30,3,33,API log\n", "BurstGPT"),
    "mooncake": (
        '{"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]}\n'
        '{"timestamp": 500, "input_length": 20, "output_length": 2}\n{"output_length": 3, "input_length": 30, "timestamp": 2000}\n',
        "Mooncake",
    ),
    "epoch": (GENERIC + "1700000000,10,1\n1700000000.5,20,2\n1700000002,30,3\n", "generic"),
    "mooncake epoch ms": (
        "".join(
            f'{{"timestamp": {1700000000000 + ms}, "input_length": {i}, "output_length": {o}}}\n'
            for ms, i, o in ((0, 10, 1), (500, 20, 2), (2000, 30, 3))
        ),
        "Mooncake",
    ),
    "column order, extra column": ("output_tokens,who,arrival_s,input_tokens\n1,é,0,10\n2,b,0.5,20\n3,,2,30\n", "generic"),
    "BOM": ("\ufeff" + GENERIC + "0,10,1\n0.5,20,2\n2,30,3\n", "generic"),
    "CRLF": (GENERIC.replace("\n", "\r\n") + "0,10,1\r\n0.5,20,2\r\n2,30,3\r\n", "generic"),
    "trailing blank lines": (GENERIC + "0,10,1\n0.5,20,2\n2,30,3\n\n\n", "generic"),
    "blank line inside": (GENERIC + "0,10,1\n\n0.5,20,2\n2,30,3\n", "generic"),
    "no final newline": (GENERIC + "0,10,1\n0.5,20,2\n2,30,3", "generic"),
    "blanks around cells": ("arrival_s , input_tokens,output_tokens\n0, 10,1\n0.5, 20 ,2\n2,30, 3\n", "generic"),
    "quoted cells": (GENERIC + '"0","10","1"\n"0.5","20","2"\n"2","30","3"\n', "generic"),
    "whole numbers as decimals": (GENERIC + "0,10.0,1.0\n0.5,20.0,2\n2,3e1,3\n", "generic"),
    "mooncake BOM and blank lines": (
        '\ufeff{"timestamp": 0, "input_length": 10, "output_length": 1}\r\n\r\n'
        '{"timestamp": 500, "input_length": 20, "output_length": 2}\r\n'
        '{"timestamp": 2000, "input_length": 30, "output_length": 3}\r\n\n',
        "Mooncake",
    ),
}


@pytest.mark.parametrize("case", READABLE)
@pytest.mark.parametrize("packed", [False, True])
def test_readable(tmp_path: Path, case: str, packed: bool) -> None:
    content, name = READABLE[case]
    path = write(tmp_path, gzip.compress(content.encode()) if packed else content, "t.csv.gz" if packed else "t.csv")
    trace = read_trace(path)
    assert rows_of(trace) == THREE
    assert trace.notes[0].startswith(f"{path.name}: {name}")
    assert trace.counts == {"rows_read": 3, "rows_dropped": 0, "rows_unsorted": 0}
    assert trace.arrival_s.dtype == np.float64 and trace.isl.dtype == np.int64 and trace.osl.dtype == np.int64


def test_gzip_is_known_by_its_bytes_not_its_name(tmp_path: Path) -> None:
    path = write(tmp_path, gzip.compress((GENERIC + "0,1,1\n").encode()), "trace.csv")
    assert rows_of(read_trace(path)) == [(0.0, 1, 1)]


def test_relative_times_keep_their_zero_and_absolute_ones_lose_it(tmp_path: Path) -> None:
    relative = write(tmp_path, GENERIC + "5,1,1\n6,2,2\n")
    trace = read_trace(relative)
    assert trace.arrival_s.tolist() == [5.0, 6.0] and "relative" in trace.notes[1]
    trace = read_trace(relative, time="absolute")
    assert trace.arrival_s.tolist() == [0.0, 1.0] and "absolute" in trace.notes[1]
    epoch = write(tmp_path, GENERIC + "1700000005,1,1\n1700000006,2,2\n")
    assert "2023-11-14T22:13:25Z" in read_trace(epoch).notes[1]
    assert read_trace(epoch, time="relative").arrival_s.tolist() == [1700000005.0, 1700000006.0]


def lines(times: list[str], **more: object) -> str:
    """JSON lines of Mooncake's keys with isl 10, 20, ... and osl 1, 2, ..."""
    rest = "".join(f', "{name}": {value}' for name, value in more.items())
    return "".join(f'{{"timestamp": {t}, "input_length": {10 * i}, "output_length": {i}{rest}}}\n' for i, t in enumerate(times, 1))


def table(times: list[str]) -> str:
    return GENERIC + "".join(f"{t},{10 * i},{i}\n" for i, t in enumerate(times, 1))


EPOCH = 1_700_000_000
# Id: (content, time_unit, what the note must say of the unit, the instant of zero). All are the rows of THREE.
IN_UNITS: dict[str, tuple[str, Any, str, datetime | None]] = {
    "JSON lines, whole ms": (lines(["0", "500", "2000"]), None, "relative times in ms (as Mooncake's are)", None),
    "JSON lines, fractions": (lines(["0", "0.5", "2"]), None, "relative times in s (they have fractions", None),
    "JSON lines, Alibaba": (lines(["0.0", "0.5", "2.0"], chat_id=1, turn=1), None, "relative times in s (the keys chat_id and turn", None),
    "JSON lines, ms with fractions, as declared": (lines(["0", "500.0", "2e3"]), "ms", "in ms (workload.time_unit)", None),
    "JSON lines, s, as declared": (lines(["0", "0.5", "2"]), "s", "in s (workload.time_unit)", None),
    "CSV in ms": (table(["0", "500", "2000"]), "ms", "relative times in ms (workload.time_unit)", None),
    "CSV in us": (table(["0", "5e5", "2000000"]), "us", "relative times in us (workload.time_unit)", None),
    "CSV in ns": (table(["0", "500000000", "2e9"]), "ns", "relative times in ns (workload.time_unit)", None),
    "CSV in s": (table(["0", "0.5", "2"]), None, "relative times in s, zero kept", None),
} | {
    f"{kind}, {unit} since 1970": (
        write_rows([f"{EPOCH + s}{zeros}" if not part else f"{EPOCH + s}{part}{zeros[1:]}" for s, part in ((0, ""), (0, "5"), (2, ""))]),
        None if kind == "JSON lines" else unit,
        f"absolute times in {unit}",
        datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC),
    )
    for kind, write_rows in (("JSON lines", lines), ("CSV", table))
    for unit, zeros in (("ms", "000"), ("us", "000000"), ("ns", "000000000"))
}  # fmt: skip


@pytest.mark.parametrize("case", IN_UNITS)
def test_times_in_their_units(tmp_path: Path, case: str) -> None:
    content, unit, told, zero = IN_UNITS[case]
    trace = read_trace(write(tmp_path, content), time_unit=unit)
    assert rows_of(trace) == THREE and told in trace.notes[1] and trace.zero == zero


@pytest.mark.parametrize("mode", ["auto", "absolute", "relative"])
@pytest.mark.parametrize(
    ("stamp", "unit", "advice"), [("1.7e12", None, "ms"), ("1.7e15", None, "us"), ("1.7e18", "ms", "ns"), ("1.7e30", "ns", "")]
)
def test_times_beyond_any_date_are_refused_however_taken(tmp_path: Path, mode: Any, stamp: str, unit: Any, advice: str) -> None:
    path = write(tmp_path, table([stamp]))
    expected = f'set workload.time_unit = "{advice}" (osl-train: --time-unit {advice}).' if advice else "correct the row."
    with pytest.raises(InputError, match=re.escape(f"cannot be a time in {unit or 's'}, it is beyond any date; {expected}")):
        read_trace(path, time=mode, time_unit=unit)


def test_absolute_stamps_lose_no_digit(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE + "2023-11-16 18:15:46.6805901,1,1\n2023-11-16 18:15:46.6805903,1,1\n")
    assert read_trace(path).arrival_s.tolist() == [0.0, 2e-7]


def test_absolute_zero_is_the_first_row_that_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE + "2023-11-16 18:00:00,1,0\n2023-11-16 18:00:09,1,1\n2023-11-16 18:00:03,2,2\n")
    assert rows_of(read_trace(path, invalid_rows="drop")) == [(0.0, 2, 2), (6.0, 1, 1)]


def test_unsorted_rows_are_sorted_stably_and_counted(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, GENERIC + "3,1,1\n1,2,1\n3,3,1\n1,4,1\n4,5,1\n"))
    assert rows_of(trace) == [(1.0, 2, 1), (1.0, 4, 1), (3.0, 1, 1), (3.0, 3, 1), (4.0, 5, 1)]
    assert trace.counts["rows_unsorted"] == 2 and any("2 rows were out of order" in note for note in trace.notes)


def test_failed_requests_are_dropped_only_when_declared(tmp_path: Path) -> None:
    path = write(tmp_path, BURSTGPT + "0,A,10,5,15,x\n1,A,10,0,10,x\n2,A,7,-1,6,x\n3,A,9,2,11,x\n")
    with pytest.raises(InputError, match=r'row 3, column Response tokens: 0 tokens.*"drop".*2 in this file'):
        read_trace(path)
    trace = read_trace(path, invalid_rows="drop")
    assert rows_of(trace) == [(0.0, 10, 5), (3.0, 9, 2)]
    assert trace.counts == {"rows_read": 4, "rows_dropped": 2, "rows_unsorted": 0}
    assert any("2 rows" in note and "dropped" in note for note in trace.notes)


def test_origin_column_follows_its_rows(tmp_path: Path) -> None:
    path = write(tmp_path, BURSTGPT + "2,B,1,1,2,x\n1,A,1,1,2,x\n0,C,1,0,1,x\n")
    trace = read_trace(path, invalid_rows="drop", origin_column="Model", origins={"A": 0, "B": 1})
    assert trace.origin is not None and trace.origin.tolist() == [0, 1] and trace.origin.dtype == np.int32
    lines = write(tmp_path, '{"timestamp":0,"input_length":1,"output_length":1,"who":"B"}\n', "t.jsonl")
    trace = read_trace(lines, origin_column="who", origins={"A": 0, "B": 1})
    assert trace.origin is not None and trace.origin.tolist() == [1]
    with pytest.raises(InputError, match="row 2, column Model: the origin 'B' belongs to no scheduler"):
        read_trace(path, invalid_rows="drop", origin_column="Model", origins={"A": 0})
    with pytest.raises(InputError, match="no column 'nope'"):
        read_trace(path, origin_column="nope", origins={"A": 0})
    with pytest.raises(InputError, match="holds times or tokens"):
        read_trace(path, origin_column="Request tokens", origins={"A": 0})
    with pytest.raises(InputError, match="row 1: has no key 'nope'"):
        read_trace(lines, origin_column="nope", origins={"A": 0})


# --- what is refused: (content, pattern that the sentence must match)

TOO_LARGE = "9" * 400
MALFORMED: dict[str, tuple[str | bytes, str]] = {
    "empty file": ("", "is empty"),
    "blank file": ("\n \r\n\n", "is empty"),
    "BOM only": (b"\xef\xbb\xbf", "is empty"),
    "header only": (GENERIC, "header but no rows"),
    "header only with blank lines": (GENERIC + "\n\n", "header but no rows"),
    "unknown header": ("a,b,c\n1,2,3\n", "row 1: the header 'a,b,c' is of no known.*Azure.*BurstGPT.*Mooncake.*generic"),
    "no header": ("0,10,1\n1,10,1\n", "row 1: the header '0,10,1' is of no known"),
    "semicolons": (GENERIC.replace(",", ";") + "0;1;1\n", "comma-separated"),
    "JSON array": ('[{"timestamp": 0}]\n', "no known trace format"),
    "two names for one column": ("arrival_s,isl,input_tokens,osl\n0,1,1,1\n", "more than one format"),
    "column twice": ("arrival_s,isl,osl,osl\n0,1,1,1\n", "osl appears 2 times"),
    "NaN time": (GENERIC + "0,1,1\nNaN,1,1\n", "row 3, column arrival_s: nan is not a finite time"),
    "infinite time": (GENERIC + "0,1,1\ninf,1,1\n", "row 3, column arrival_s: inf is not a finite time"),
    "minus infinite time": (GENERIC + "0,1,1\n-inf,1,1\n", "row 3, column arrival_s: -inf is not a finite time"),
    "NaN first time": (GENERIC + "nan,1,1\n", "row 2, column arrival_s: nan"),
    "negative time": (GENERIC + "0,1,1\n-0.5,1,1\n", "row 3, column arrival_s: -0.5 is negative"),
    "row number counts blank lines": (GENERIC + "0,1,1\n\n\n-0.5,1,1\n", "row 5, column arrival_s"),
    "row number counts lines of quoted cells": ('arrival_s,isl,osl,x\n0,1,1,"a\nb"\n1,1,0,c\n', "row 4, column osl: 0 tokens"),
    "zero input tokens": (GENERIC + "0,0,1\n", "row 2, column input_tokens: 0 tokens"),
    "zero output tokens": (GENERIC + "0,1,1\n0,1,0\n", "row 3, column output_tokens: 0 tokens"),
    "negative tokens": (GENERIC + "0,1,-3\n", "row 2, column output_tokens: -3 tokens"),
    "fraction of a token": (GENERIC + "0,1.5,1\n", "row 2, column input_tokens: 1.5 is not a whole number"),
    "NaN tokens": (GENERIC + "0,1,nan\n", "row 2, column output_tokens: nan is not a whole number"),
    "infinite tokens": (GENERIC + "0,inf,1\n", "row 2, column input_tokens: inf is not a whole number"),
    "too many tokens": (GENERIC + "0,1,1\n1,3000000000,1\n", "row 3, column input_tokens: 3000000000 is too large"),
    "text for tokens": (GENERIC + "0,1,1\n1,many,1\n", "row 3, column input_tokens: 'many' is not a number"),
    "text for a time": (GENERIC + "0,1,1\nsoon,1,1\n", "row 3, column arrival_s: 'soon' is not a number"),
    "text for the first time": (GENERIC + "soon,1,1\n", "row 2, column arrival_s: 'soon' is neither"),
    "thousands separator": (GENERIC + '0,"1,234",1\n', "row 2, column input_tokens: '1,234' has a thousands separator; write 1234"),
    "empty cell": (GENERIC + "0,1,1\n1,,1\n", "row 3, column input_tokens: is empty"),
    "empty time": (GENERIC + "0,1,1\n,1,1\n", "row 3, column arrival_s: is empty"),
    "NA cell": (GENERIC + "0,NA,1\n", "row 2, column input_tokens: 'NA' is not a number"),
    "hexadecimal": (GENERIC + "0,0x10,1\n", "'0x10' is not a number"),
    "underscores": (GENERIC + "0,1_000,1\n", "'1_000' is not a number"),
    "too few fields": (GENERIC + "0,1,1\n1,1\n", r"row 3: is cut short or has 2 field\(s\) where the header has 3"),
    "too many fields": (GENERIC + "0,1,1\n1,1,234,1\n", r"row 3: has 4 field\(s\)"),
    "cut short in the first row": (GENERIC + "0", r"row 2: is cut short or has 1 field\(s\)"),
    "open quote": (GENERIC + '0,1,1\n1,"1,1\n2,2,2\n', "row 3"),
    "epoch and relative mixed": (
        GENERIC + "0,1,1\n1700000000,1,1\n",
        "row 3, column arrival_s: relative times and times since 1970 are mixed",
    ),
    "epoch in milliseconds": (
        GENERIC + "1700000000000,1,1\n",
        r'row 2, column arrival_s: 1700000000000 cannot be a time in s.*workload.time_unit = "ms"',
    ),
    "bad time stamp": (
        AZURE + "2023-11-16 18:15:46,1,1\n2023-11-16 25:15:46,1,1\n",
        "row 3, column TIMESTAMP: '2023-11-16 25:15:46' is neither",
    ),
    "bad day": (AZURE + "2023-11-16 18:15:46,1,1\n2023-02-30 05:15:46,1,1\n", "row 3, column TIMESTAMP"),
    "local date": (AZURE + "16/11/2023 18:15:46,1,1\n", "row 2, column TIMESTAMP: .*ISO time stamp"),
    "number among time stamps": (AZURE + "2023-11-16 18:15:46,1,1\n17.5,1,1\n", "row 3, column TIMESTAMP: '17.5' is neither"),
    "empty time stamp": (AZURE + "2023-11-16 18:15:46,1,1\n,1,1\n", "row 3, column TIMESTAMP: '' is neither"),
    "offsets in some rows": (AZURE + "2023-11-16 18:15:46Z,1,1\n2023-11-16 18:15:46,1,1\n", "row 3, column TIMESTAMP: .*with and without"),
    "text among stamped rows": (AZURE + "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:46,x,1\n", "row 3, column ContextTokens: 'x'"),
    "truncated JSON line": (
        '{"timestamp":0,"input_length":1,"output_length":1}\n{"timestamp":1,"inp',
        "row 2: is not one whole JSON object",
    ),
    "JSON missing key": (
        '{"timestamp":0,"input_length":1,"output_length":1}\n{"timestamp":1,"input_length":1}\n',
        "row 2: has no key 'output_length'",
    ),
    "JSON unknown keys": ('{"time":0,"in":1}\n', "row 1: the keys 'time, in' are of no known"),
    "JSON text": ('{"timestamp":0,"input_length":"1","output_length":1}\n', 'row 1, column input_length: "1" is not a number'),
    "JSON null": ('{"timestamp":0,"input_length":null,"output_length":1}\n', "row 1, column input_length: null is not a number"),
    "JSON boolean": ('{"timestamp":0,"input_length":true,"output_length":1}\n', "row 1, column input_length: true is not a number"),
    "JSON NaN": ('{"timestamp":NaN,"input_length":1,"output_length":1}\n', "row 1, column timestamp: nan is not a finite"),
    "JSON fraction": ('{"timestamp":0,"input_length":1.5,"output_length":1}\n', "row 1, column input_length: 1.5 is not a whole"),
    "JSON zero": ('{"timestamp":0,"input_length":1,"output_length":0}\n', "row 1, column output_length: 0 tokens"),
    "JSON negative time": ('{"timestamp":-5,"input_length":1,"output_length":1}\n', "row 1, column timestamp: -5 is negative"),
    "JSON number": ('{"timestamp":0,"input_length":1,"output_length":1}\n17\n', "row 2: holds JSON that is not an object"),
    "JSON huge number": (
        f'{{"timestamp":0,"input_length":{TOO_LARGE},"output_length":1}}\n',
        "row 1, column input_length: the number is too large",
    ),
    "JSON deep": ('{"timestamp":' + "[" * 100_000 + "\n", "row 1: is not one whole JSON object"),
    "JSON not UTF-8": (b'{"timestamp":0,"input_length":1,"output_length":1,"x":"\xff"}\n', "not UTF-8"),
    "UTF-16": (GENERIC.encode("utf-16"), "is UTF-16"),
    "UTF-16 without mark": ((GENERIC + "0,1,1\n").encode("utf-16-le"), "binary data"),
    "Latin-1": (GENERIC.encode() + b"0,1,1\n1,\xe9,1\n", "not UTF-8"),
    "binary": (b"PAR1\x00\x01\x02" * 100, "binary data"),
    "binary without NUL": (bytes(range(128, 256)) * 20, "not UTF-8"),
    "late NUL": (GENERIC.encode() + b"0,1,1\n" * 20_000 + b"1,\x00,1\n", r"row 20002"),
    "truncated gzip": (gzip.compress((GENERIC + "".join(f"{i},1,1\n" for i in range(9999))).encode())[:-500], "truncated gzip"),
    "gzip of nothing": (gzip.compress(b""), "is empty"),
    "damaged gzip": (gzip.compress(GENERIC.encode() + b"0,1,1\n" * 99)[:-8] + b"\0" * 8, "damaged"),
    "gzip magic only": (b"\x1f\x8b", "damaged or truncated gzip"),
    "huge field": (GENERIC + "0," + "1" * 200_000 + ",1\n1,x,1\n", "row 2"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(tmp_path: Path, case: str) -> None:
    content, pattern = MALFORMED[case]
    path = write(tmp_path, content)
    with pytest.raises(InputError, match=pattern) as caught:
        read_trace(path)
    sentence = str(caught.value)
    assert str(path) in sentence and "\n" not in sentence and sentence.endswith(".") and len(sentence) < 600


def test_gz_name_without_gzip_content(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ends in .gz but is not gzip"):
        read_trace(write(tmp_path, GENERIC + "0,1,1\n", "t.csv.gz"))


def test_no_file_directory_pipe(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_trace(tmp_path / "nothing.csv")
    with pytest.raises(InputError, match="is a directory"):
        read_trace(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a regular file"):
        read_trace(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path / "loop")
    with pytest.raises(InputError, match=r"no such file|cannot be read"):
        read_trace(write(tmp_path, GENERIC) / "below")


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, GENERIC + "0,1,1\n")
    path.chmod(0)
    assert stat.S_IMODE(path.stat().st_mode) == 0
    if os.access(path, os.R_OK):  # root reads everything: let the system call fail as it would for others

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match="no permission"):
        read_trace(path)


def test_options_against_the_file(tmp_path: Path) -> None:
    stamped = write(tmp_path, AZURE + "2023-11-16 18:15:46,1,1\n")
    with pytest.raises(InputError, match=r'row 2, column TIMESTAMP.*workload.time = "relative"'):
        read_trace(stamped, time="relative")
    with pytest.raises(InputError, match=r"row 2, column TIMESTAMP.*workload.time_unit is given; remove it"):
        read_trace(stamped, time_unit="ms")
    failed = write(tmp_path, GENERIC + "0,1,0\n1,0,1\n")
    with pytest.raises(InputError, match="leaves no row"):
        read_trace(failed, invalid_rows="drop")
    with pytest.raises(InputError, match="row 2, column input_tokens: 'x'"):  # text is an error under any rule
        read_trace(write(tmp_path, GENERIC + "0,x,1\n1,1,1\n"), invalid_rows="drop")


# --- properties


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.floats(0, 1e8), st.integers(1, 2**31 - 1), st.integers(1, 2**31 - 1)),
        min_size=1,
        max_size=30,
    )
)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[float, int, int]]) -> None:
    path = write(tmp_path_factory.mktemp("t"), GENERIC + "".join(f"{t!r},{i},{o}\n" for t, i, o in rows))
    assert rows_of(read_trace(path)) == sorted(rows, key=lambda row: row[0])  # sorted is stable too


CELLS = st.one_of(
    st.integers(-5, 5000).map(str),
    st.floats(width=16).map(repr),
    st.text("0123456789.,-+eE_ x\"'\r\n\0é", max_size=8),
    st.sampled_from(["2023-11-16 18:15:46.68", "2023-11-16T18:15:46Z", "1e999", "1,234", "", "NaN", "null"]),
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.lists(st.lists(CELLS, min_size=2, max_size=4), max_size=4), st.sampled_from(["error", "drop"]), st.booleans())
def test_rubbish_gives_requests_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]], rule: str, mark: bool
) -> None:
    body = ("\ufeff" if mark else "") + GENERIC + "".join(",".join(row) + "\n" for row in rows)
    path = write(tmp_path_factory.mktemp("t"), body)
    try:
        trace = read_trace(path, invalid_rows="drop" if rule == "drop" else "error")
    except InputError as error:
        assert str(path) in str(error)
    else:
        assert len(trace.isl) and trace.isl.min() >= 1 and trace.osl.min() >= 1
        assert np.isfinite(trace.arrival_s).all() and trace.arrival_s[0] >= 0 and (np.diff(trace.arrival_s) >= 0).all()


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_sentence(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    for prefix in (b"", GENERIC.encode(), b'{"timestamp":', b"\x1f\x8b\x08"):
        path = write(tmp_path_factory.mktemp("t"), prefix + content)
        with pytest.raises(InputError):
            read_trace(path)


# --- real files


@real_data
@pytest.mark.parametrize(
    ("name", "rows", "first", "mean_isl", "mean_osl"),
    [
        ("azure2023_conv.csv.gz", 19366, 0.0, 1154.7, 211.13),
        ("azure2023_code.csv.gz", 8819, 0.0, 2047.85, 27.88),
        ("azure2024_conv_thinned_sample.csv.gz", 5880, 9.4205, 547.02, 115.71),
        ("mooncake_synthetic.csv.gz", 3993, 0.0, 15325.48, 149.12),
        ("sharegpt_llama31_8b_300req_10rps.csv", 300, None, 857.46, 652.51),
    ],
)
def test_real_traces(name: str, rows: int, first: float | None, mean_isl: float, mean_osl: float) -> None:
    trace = read_trace(DATA / "traces" / name)
    assert len(trace.arrival_s) == rows == trace.counts["rows_read"]
    assert first is None or trace.arrival_s[0] == first
    rounding = 0.006  # length_summary.csv gives two decimals
    assert trace.isl.mean() == pytest.approx(mean_isl, abs=10 * rounding) and trace.osl.mean() == pytest.approx(mean_osl, abs=rounding)


@real_data
@pytest.mark.parametrize("name", ["arxiv_summarization_llama2_lengths.csv.gz", "burstgpt_daily.csv", "README.md"])
def test_real_files_that_are_no_traces(name: str) -> None:
    with pytest.raises(InputError, match="no known trace format"):
        read_trace(DATA / "traces" / name)
