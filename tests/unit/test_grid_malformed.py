"""Grid files that are refused: each gives one sentence that names file, row or hour, zone or column, and what to do."""

import gzip
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from jaxserve.errors import InputError
from jaxserve.scenario.grid import FileGrid, load_grid

DAY = datetime(2024, 3, 31, tzinfo=UTC)


def hours(*values, step_min=60):
    """A wide file of zone DE, one row a step; None leaves the row out."""
    stamps = [DAY + timedelta(minutes=i * step_min) for i in range(len(values))]
    return "datetime_utc,DE\n" + "".join(f"{t:%Y-%m-%dT%H:%MZ},{v}\n" for t, v in zip(stamps, values, strict=True) if v is not None)


def refused(folder: Path, content: str | bytes | None, *parts: str, path="ci.csv", start=DAY, hours_long=4.0, **fields) -> str:
    """The message, after checking that it is one line, names each part and hides the library's own error."""
    if content is not None:
        (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)
    spec = FileGrid(kind="file", path=path, **fields)
    with pytest.raises(InputError) as caught:
        load_grid(spec, zones=["DE"], start=start, duration_s=hours_long * 3600, base_dir=folder)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    for part in parts:
        assert part in message
    return message


MALFORMED = {
    "empty": (b"", ["is empty"]),
    "only blank lines": (b"\n\r\n  \n", ["is empty"]),
    "header only": (b"datetime_utc,DE\n\n", ["no rows"]),
    "no header": (b"2024-03-31T00:00Z,5\n2024-03-31T01:00Z,5\n", ["row 1", "first column", "datetime_utc"]),
    "unknown first column": (b"hour,DE\n2024-03-31T00:00Z,5\n", ["row 1", "'hour'"]),
    "unnamed first column": (b",DE\n2024-03-31T00:00Z,5\n", ["row 1", "no name"]),
    "one column": (b"datetime_utc\n2024-03-31T00:00Z\n", ["row 1", "one column"]),
    "semicolons": (b"datetime_utc;DE\n2024-03-31T00:00Z;5\n", ["row 1", "commas"]),
    "zone lacking": (b"datetime_utc,DK\n2024-03-31T00:00Z,5\n", ["no zone DE", "DK"]),
    "zone twice": (b"datetime_utc,DE,DE\n2024-03-31T00:00Z,5,6\n", ["row 1", "'DE' appears 2 times"]),
    "text time": (b"datetime_utc,DE\n2024-03-31T00:00Z,5\nnoon,5\n", ["row 3", "'datetime_utc'", "'noon'"]),
    "no time": (b"datetime_utc,DE\n,5\n", ["row 2", "missing"]),
    "infinite time": (b"datetime_utc,DE\ninf,5\n", ["row 2", "'inf'"]),
    "month 13": (b"datetime_utc,DE\n2024-13-01T00:00Z,5\n", ["row 2", "2024-13-01"]),
    "day first": (b"datetime_utc,DE\n31/03/2024 00:00,5\n", ["row 2", "31/03/2024"]),
    "epoch seconds": (b"datetime_utc,DE\n1711843200,5\n", ["row 2", "1711843200"]),
    "cut line": (b"datetime_utc,DE,FR\n2024-03-31T00:00Z,5,6\n2024-03-31T01:00Z,5\n", ["row 3", "2 cells", "3"]),
    "long line": (b"datetime_utc,DE\n2024-03-31T00:00Z,5,6\n", ["row 2", "3 cells", "2"]),
    "open quote": (b'datetime_utc,DE\n2024-03-31T00:00Z,"5\n2024-03-31T01:00Z,5\n', ["row 2", "quotation mark"]),
    "huge cell": (b"datetime_utc,DE\n2024-03-31T00:00Z," + b"5" * 200_000, ["row 2", "not CSV"]),
    "utf-16": (hours(1, 2).encode("utf-16"), ["row 1", "UTF-16"]),
    "utf-16 without mark": (hours(1, 2).encode("utf-16-le"), ["row 1", "NUL"]),
    "latin-1": ("datetime_utc,DE\n2024-03-31T00:00Z,5\nä,1\n".encode("latin-1"), ["row 3", "UTF-8"]),
    "binary": (bytes(range(256)), ["row", "UTF-8"]),
    "gzip without .gz": (gzip.compress(b"datetime_utc,DE\n"), [".gz"]),
    "every 7 min": (hours(1, 2, 3, 4, step_min=7).encode(), ["zone DE", "7 min apart"]),
    "one stamp off": (hours(1, 2, 3, 4).replace("T01:00", "T01:10").encode(), ["zone DE", "2024-03-31T01:10Z", "60 min steps"]),
    "duplicate hours differ": (hours(1, 2, 3, 4).encode() + b"2024-03-31T02:00Z,9", ["zone DE", "T02:00Z", "row 4 and row 6 give 3 and 9"]),
    "marginal in an average": (b"time,Marginal DE\n2024-03-31T00:00Z,5\n", ["row 1", "marginal", "grid.signal"]),
    "long, no value column": (b"Datetime (UTC),Zone id,Carbon-free\n2024-03-31 00:00:00,DE,5\n", ["row 1", "Carbon intensity"]),
    "long, asked basis lacking": (
        "Datetime (UTC),Zone id,Carbon intensity gCO₂eq/kWh (direct)\n2024-03-31 00:00:00,DE,5\n".encode(),
        ["row 1", "no lca column", "grid.basis"],
    ),
    "long, two columns of one basis": (
        b"Datetime (UTC),Zone id,Carbon intensity g (LCA),Carbon intensity g (Life cycle)\n2024-03-31 00:00:00,DE,5,5\n",
        ["row 1", "keep one"],
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_give_one_clear_sentence(tmp_path, case):
    content, parts = MALFORMED[case]
    fields = {"zone_column": {"DE": "Marginal DE"}} if "Marginal DE" in str(content) else {"basis": "lca"} if "long, a" in case else {}
    refused(tmp_path, content, str(tmp_path / "ci.csv"), *parts, **fields)


@pytest.mark.parametrize(
    "content",
    [b"plain,text\n", gzip.compress(hours(1, 2).encode())[:-12], b"\x1f\x8b\x08" + b"\x00" * 40, b""],
    ids=["no gzip", "cut short", "zeros", "empty"],
)
def test_wrong_gzip(tmp_path, content):
    message = refused(tmp_path, content, "ci.csv.gz", path="ci.csv.gz")
    assert "gzip" in message or "is empty" in message


def test_paths_that_are_no_readable_file(tmp_path, monkeypatch):
    (tmp_path / "folder.csv").mkdir()
    refused(tmp_path, None, "is a directory", path="folder.csv")
    refused(tmp_path, None, "does not exist", path="none.csv")
    refused(tmp_path, None, "not a regular file", path="/dev/zero")
    refused(tmp_path, None, "cannot be read", path="x" * 300)
    refused(tmp_path, None, "cannot be read", path="a\x00b")
    (tmp_path / "locked.csv").write_text(hours(1))

    def no_permission(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", no_permission)  # A chmod would not stop root.
    refused(tmp_path, None, "may not be read", path="locked.csv")


@pytest.mark.parametrize("fill", ["error", "hold", "interpolate"])
@pytest.mark.parametrize("cell", ["abc", '"1,234.5"', "inf", "-inf", "1e999", "1_000", "12 g", "0x10", "-3", "١٢"])
def test_a_cell_that_is_no_number_is_refused_even_with_a_fill_rule(tmp_path, fill, cell):
    refused(tmp_path, hours(1, cell, 3, 4), "ci.csv", "row 3", "zone DE", "2024-03-31T01:00Z", fill=fill)


def test_a_fill_never_steps_over_a_wrong_cell(tmp_path):
    refused(tmp_path, hours(1, "abc", None, 4, 5), "row 3", "'abc'", fill="hold", start=DAY + timedelta(hours=2), hours_long=1)
    refused(tmp_path, hours(1, None, "abc", 4), "row 3", "'abc'", fill="interpolate", start=DAY + timedelta(hours=1), hours_long=1)
