"""Carbon intensity: the shipped typical day, the user's files, and what is refused."""

import gzip
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from jaxserve.errors import InputError
from jaxserve.scenario.grid import DERIVED_ZONES, GridSpec, load_grid, shipped_zones
from jaxserve.scenario.signals import GridSeries

CARBON = Path(__file__).parents[2].parent / "shared" / "data" / "carbon"
needs_shared = pytest.mark.skipif(not CARBON.is_dir(), reason=f"the hourly files are not at {CARBON}")
HOUR_S = 3600.0
DAY = datetime(2024, 3, 31, tzinfo=UTC)
ASSUMED_UNIT = "grid: values read as g/kWh (the header names no unit, nor does grid.unit)"
ROUNDING = 0.05 + 1e-9  # The table ships one decimal.
LONG_OLD = "Datetime (UTC),Country,Zone Name,Zone Id,Carbon Intensity gCO₂eq/kWh (direct),Carbon Intensity gCO₂eq/kWh (LCA),Data Source"
LONG_NEW = (
    "Datetime (UTC),Country,Zone name,Zone id,Carbon intensity gCO₂eq/kWh (direct),Carbon intensity gCO₂eq/kWh (Life cycle),Data estimated"
)


def spec(**fields):
    return TypeAdapter(GridSpec).validate_python(fields)


def hours(*values, start=DAY, step_min=60, header="datetime_utc,DE"):
    """A wide file of one row a step; None leaves the row out."""
    rows = [header]
    for i, value in enumerate(values):
        if value is not None:
            rows.append(f"{start + timedelta(minutes=i * step_min):%Y-%m-%dT%H:%MZ},{value}")
    return "\n".join(rows) + "\n"


def load(folder: Path, text: str | bytes, *, zones=("DE",), start=DAY, hours_long=4.0, name="ci.csv", **fields) -> GridSeries:
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return load_grid(
        spec(kind="file", path=name, **fields), zones=list(zones), start=start, duration_s=hours_long * HOUR_S, base_dir=folder
    )


def refused(folder: Path, text: str | bytes, *parts: str, **fields) -> str:
    with pytest.raises(InputError) as caught:
        load(folder, text, **fields)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    for part in parts:
        assert part in message
    return message


# ---- what a file may say -------------------------------------------------------------------------------------------------------------


def test_ci_changes_inside_a_run_at_its_own_stamp(tmp_path):
    grid = load(tmp_path, hours(1, 2, 3), start=DAY + timedelta(minutes=30), hours_long=2)
    assert grid.edges_s.tolist() == [-1800.0, 1800.0, 5400.0] and grid.until_s == 9000.0
    assert grid.at([0, 1799.999, 1800, 5399.999, 5400, 7199]).ravel().tolist() == [1, 1, 2, 2, 3, 3]
    assert grid.signal == "average" and grid.basis == "unspecified" and grid.zones == ("DE",)
    assert grid.counts == {"filled_hours": 0, "duplicate_rows": 0, "unsorted_rows": 0}
    assert grid.notes == (ASSUMED_UNIT,)


def test_a_run_may_end_exactly_where_the_file_ends(tmp_path):
    assert load(tmp_path, hours(1, 2, 3, 4)).until_s == 4 * HOUR_S


def test_zero_is_a_value(tmp_path):
    assert load(tmp_path, hours(0, 0.0, "-0", 5), fill="hold").ci_g_per_kwh.ravel().tolist() == [0, 0, 0, 5]


def test_columns_follow_the_zones_asked_for(tmp_path):
    text = "time,FR,DE,extra\n" + "".join(f"2024-03-31T0{h}:00Z,{h},{10 + h},text\n" for h in range(4))
    grid = load(tmp_path, text, zones=("DE", "FR", "DE"))
    assert grid.zones == ("DE", "FR", "DE") and grid.ci_g_per_kwh[1].tolist() == [11, 1, 11]
    mapped = load(tmp_path, text, zones=("GERMANY",), zone_column={"GERMANY": "DE"})
    assert mapped.ci_g_per_kwh.ravel().tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize(
    "stamp", ["2024-03-31T02:{m}+02:00", "2024-03-31 00:{m}:00", "2024-03-31T00:{m}:00.000Z", "2024-03-30 19:{m}-0500"]
)
def test_offsets_and_naive_stamps(tmp_path, stamp):
    text = "Timestamp,DE\n" + "".join(f"{stamp.format(m=m)},{i}\n" for i, m in enumerate(("00", "15", "30", "45")))
    grid = load(tmp_path, text, hours_long=1)
    assert grid.edges_s.tolist() == [0, 900, 1800, 2700] and grid.ci_g_per_kwh.ravel().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("step_min", [5, 15, 30, 60])
def test_resolution_is_that_of_the_file(tmp_path, step_min):
    n = 300 // step_min
    grid = load(tmp_path, hours(*range(n), step_min=step_min))
    assert np.all(np.diff(grid.edges_s) == step_min * 60) and grid.until_s == 4 * HOUR_S
    assert grid.at(2 * HOUR_S).item() == 120 // step_min


def test_hourly_stamps_off_the_hour_and_zones_of_different_resolution(tmp_path):
    (tmp_path / "a.csv").write_text(hours(*range(7), start=DAY - timedelta(minutes=30), header="time,IN-WE"))
    (tmp_path / "b.csv").write_text(hours(*range(20), step_min=15))
    grid = load_grid(spec(kind="file", path=["a.csv", "b.csv"]), zones=["IN-WE", "DE"], start=DAY, duration_s=2 * HOUR_S, base_dir=tmp_path)
    assert grid.edges_s.tolist() == [900.0 * i for i in range(8)]
    assert grid.ci_g_per_kwh.tolist() == [[0, 0], [0, 1], [1, 2], [1, 3], [1, 4], [1, 5], [2, 6], [2, 7]]


def test_untidy_files_are_read(tmp_path):
    rows = hours(1, 2, 3, 4).splitlines()
    text = "\ufeff" + "\r\n".join([rows[0], rows[3], rows[1] + "  ", rows[1], "", rows[2], rows[4] + ",", ",", "", "", ""])
    grid = load(tmp_path, text)
    assert grid.ci_g_per_kwh.ravel().tolist() == [1, 2, 3, 4]
    assert grid.counts == {"filled_hours": 0, "duplicate_rows": 1, "unsorted_rows": 3} and len(grid.notes) == 3
    assert load(tmp_path, gzip.compress(text.encode()), name="ci.csv.gz").counts == grid.counts


@pytest.mark.parametrize("header", [LONG_OLD, LONG_NEW, LONG_OLD.upper()])
def test_electricity_maps_long_export(tmp_path, header):
    rows = [
        f"2024-03-31 0{h}:00:00,X,X,{zone},{base + h},{base + h + 50},src" for zone, base in (("DE", 100), ("FR", 10)) for h in range(4)
    ]
    text = "\n".join([header, *rows])
    lca = load(tmp_path, text, zones=("FR", "DE"), basis="lca")
    assert lca.basis == "lca" and lca.ci_g_per_kwh.tolist() == [[60 + h, 150 + h] for h in range(4)]
    assert lca.counts["unsorted_rows"] == 0  # Zone after zone is that export's own order.
    direct = load(tmp_path, text, zones=("FR",), basis="direct")
    assert direct.basis == "direct" and direct.ci_g_per_kwh.ravel().tolist() == [10, 11, 12, 13]
    refused(tmp_path, text, "row 1", "grid.basis")
    refused(tmp_path, text, "no zone NL", "DE", zones=("NL",), basis="lca")


def test_files_of_one_zone_each_and_years_of_one_zone_are_joined(tmp_path):
    end = datetime(2023, 12, 31, 22, tzinfo=UTC)
    (tmp_path / "de24.csv").write_text(hours(3, 4, start=end + timedelta(hours=2)))
    (tmp_path / "de23.csv").write_text(hours(1, 2, start=end))
    (tmp_path / "fr.csv").write_text(hours(5, 6, 7, 8, start=end, header="datetime,FR"))
    files = spec(kind="file", path=["de24.csv", "de23.csv", "fr.csv"])
    grid = load_grid(files, zones=["DE", "FR"], start=end, duration_s=4 * HOUR_S, base_dir=tmp_path)
    assert grid.ci_g_per_kwh.tolist() == [[1, 5], [2, 6], [3, 7], [4, 8]] and grid.counts["unsorted_rows"] == 0
    (tmp_path / "de23.csv").write_text(hours(1, 2, 99, start=end))
    with pytest.raises(InputError, match=r"zone DE has two values at hour 2024-01-01T00:00Z \(row 2 of .*de24.csv and row 4 of .*de23.csv"):
        load_grid(files, zones=["DE", "FR"], start=end, duration_s=4 * HOUR_S, base_dir=tmp_path)


# ---- holes, fill rules, ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "fill", "expected", "filled"),
    [
        ((1, None, 3, 4), "hold", [1, 1, 3, 4], 1),
        ((1, None, 3, 4), "interpolate", [1, 2, 3, 4], 1),
        ((1, "", "NaN", 4), "hold", [1, 1, 1, 4], 2),
        ((1, "null", None, 7), "interpolate", [1, 3, 5, 7], 2),
        ((8, None, None, ""), "hold", [8, 8, 8, 8], 3),
    ],
)
def test_fill_rules_and_their_counts(tmp_path, values, fill, expected, filled):
    grid = load(tmp_path, hours(*values), fill=fill)
    assert grid.ci_g_per_kwh.ravel().tolist() == pytest.approx(expected, rel=1e-12)
    assert grid.counts["filled_hours"] == filled and f"zone DE: {filled} steps" in grid.notes[0]
    refused(tmp_path, hours(*values), "zone DE", "2024-03-31T0", "grid.fill")


def test_fill_reads_neighbours_outside_the_run_and_counts_only_inside(tmp_path):
    text = hours(1, None, None, None, 9, None, 5)
    grid = load(tmp_path, text, fill="interpolate", start=DAY + timedelta(hours=2), hours_long=1)
    assert grid.ci_g_per_kwh.tolist() == [[5]] and grid.counts["filled_hours"] == 1


def test_a_hole_outside_the_run_is_no_matter(tmp_path):
    text = hours("-1", 1, 2, "n/a", "abc", None, "inf", 7)
    assert load(tmp_path, text, start=DAY + timedelta(hours=1), hours_long=2).ci_g_per_kwh.ravel().tolist() == [1, 2]


@pytest.mark.parametrize("fill", ["error", "hold", "interpolate"])
def test_a_run_that_leaves_the_file_is_refused_whatever_the_fill(tmp_path, fill):
    refused(tmp_path, hours(1, 2, 3), "zone DE", "2024-03-31T03:00Z", "outside the file", fill=fill)
    refused(tmp_path, hours(1, 2, 3), "2024-03-30T23:00Z", fill=fill, start=DAY - timedelta(minutes=1), hours_long=1)
    refused(tmp_path, hours(1, 2, 3), "2025-03-31T00:00Z", fill=fill, start=DAY.replace(year=2025), hours_long=1)


@pytest.mark.parametrize(("values", "fill", "side"), [(("", 2, 3, 4), "hold", "before"), ((1, 2, 3, ""), "interpolate", "after")])
def test_fill_never_extends_beyond_the_first_or_last_value(tmp_path, values, fill, side):
    refused(tmp_path, hours(*values), "zone DE", f"none {side} it", fill=fill)


def test_the_year_never_wraps_round(tmp_path):
    year = hours(*range(8784), start=datetime(2024, 1, 1, tzinfo=UTC))
    last = datetime(2024, 12, 31, 23, tzinfo=UTC)
    assert load(tmp_path, year, start=last, hours_long=1).at(0).item() == 8783
    refused(tmp_path, year, "zone DE", "2025-01-01T00:00Z", start=last, hours_long=1.001, fill="hold")


def test_the_hour_daylight_saving_skips(tmp_path):
    text = hours(1, 2, None, 4).replace("Z", "")
    refused(tmp_path, text, "zone DE", "no value", "2024-03-31T02:00Z", "no row")
    assert load(tmp_path, text, fill="hold").counts["filled_hours"] == 1


def test_the_hour_daylight_saving_repeats(tmp_path):
    start = datetime(2024, 10, 27, tzinfo=UTC)
    rows = [*hours(1, 2, 3, start=start).replace("Z", "").splitlines(), "2024-10-27T02:00,7", "2024-10-27T03:00,9"]
    told = ("zone DE", "two values", "2024-10-27T02:00Z", "row 4 and row 5 give 3 and 7", "offset")
    refused(tmp_path, "\n".join(rows), *told, start=start)
    grid = load(tmp_path, "\n".join(rows), start=start, fill="interpolate")
    assert grid.ci_g_per_kwh.ravel().tolist() == [1, 2, 5.5, 9] and grid.counts["filled_hours"] == 1
    assert "1 of them had two values" in grid.notes[0]
    offset = [f"2024-10-27T0{h}:00{o},{v}" for h, o, v in ((2, "+02:00", 3), (2, "+01:00", 7), (3, "+01:00", 9))]
    grid = load(tmp_path, "\n".join(["time,DE", *offset]), start=start, hours_long=3)
    assert grid.ci_g_per_kwh.ravel().tolist() == [3, 7, 9]


def test_an_empty_duplicate_contradicts_nothing(tmp_path):
    grid = load(tmp_path, hours("", 2, 3, 4) + "2024-03-31T00:00Z,1\n")
    assert grid.ci_g_per_kwh[0].item() == 1 and grid.counts["duplicate_rows"] == 1 and grid.counts["filled_hours"] == 0


def test_negative_only_where_declared(tmp_path):
    text = hours(-5, 2, 3, 4)
    refused(tmp_path, text, "row 2", "zone DE", "2024-03-31T00:00Z", "negative")
    refused(tmp_path, text, "negative", signal="marginal")
    grid = load(tmp_path, text, signal="marginal", allow_negative=True)
    assert grid.at(0).item() == -5 and grid.signal == "marginal"
    with pytest.raises(ValidationError, match="allow_negative is only for signal = 'marginal'"):
        spec(kind="file", path="x.csv", allow_negative=True)


def test_files_of_different_basis_are_not_mixed(tmp_path):
    for zone, kind in (("DE", "direct"), ("FR", "LCA")):
        row = f"2024-03-31 00:00:00,{zone},5"
        (tmp_path / f"{zone}.csv").write_text(f"Datetime (UTC),Zone id,Carbon intensity gCO₂eq/kWh ({kind})\n{row}\n")
    with pytest.raises(InputError, match=r"direct \(.*DE.csv\) and lca \(.*FR.csv\) values would be mixed"):
        load_grid(spec(kind="file", path=["DE.csv", "FR.csv"]), zones=["DE", "FR"], start=DAY, duration_s=60, base_dir=tmp_path)


# ---- specs ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "loc"),
    [
        ({"kind": "constant"}, "ci_g_per_kwh"),
        ({"kind": "constant", "ci_g_per_kwh": -1.0}, "ci_g_per_kwh"),
        ({"kind": "constant", "ci_g_per_kwh": float("nan")}, "ci_g_per_kwh"),
        ({"kind": "constant", "ci_g_per_kwh": {"DE": float("inf")}}, "DE"),
        ({"kind": "constant", "ci_g_per_kwh": {"DE": "12"}}, "DE"),
        ({"kind": "constant", "ci_g_per_kwh": True}, "ci_g_per_kwh"),
        ({"kind": "table", "signal": "marginal"}, "signal"),
        ({"kind": "table", "sginal": "lca"}, "sginal"),
        ({"kind": "file"}, "path"),
        ({"kind": "file", "path": []}, "path"),
        ({"kind": "file", "path": ""}, "path"),
        ({"kind": "file", "path": "x.csv", "fill": "zero"}, "fill"),
        ({"kind": "wind"}, ""),
    ],
)
def test_specs_that_are_refused(fields, loc):
    with pytest.raises(ValidationError) as caught:
        spec(**fields)
    assert caught.value.error_count() == 1
    assert loc == "" or loc in caught.value.errors()[0]["loc"]


def test_constant():
    args = {"zones": ["DE", "FR"], "start": DAY, "duration_s": 60.0, "base_dir": Path()}
    one = load_grid(spec(kind="constant", ci_g_per_kwh=0), **args)
    assert one.edges_s.tolist() == [0] and one.until_s == np.inf and one.at([0, 1e12]).tolist() == [[0, 0], [0, 0]]
    each = load_grid(spec(kind="constant", ci_g_per_kwh={"FR": 50, "DE": 400.5, "NL": 1}), **args)
    assert each.at(0).tolist() == [[400.5, 50]]
    with pytest.raises(InputError, match="ci_g_per_kwh: has no zone FR"):
        load_grid(spec(kind="constant", ci_g_per_kwh={"DE": 1}), **args)


@pytest.mark.parametrize("duration_s", [0.0, -1.0, float("nan"), float("inf"), 1e30])
def test_durations_that_are_refused(duration_s):
    with pytest.raises(InputError, match="duration_s"):
        load_grid(spec(kind="table"), zones=["DE"], start=DAY, duration_s=duration_s, base_dir=Path())


def test_a_start_without_time_zone_and_no_zones_are_refused():
    with pytest.raises(InputError, match="start"):
        load_grid(spec(kind="table"), zones=["DE"], start=datetime(2024, 1, 1), duration_s=1, base_dir=Path())
    with pytest.raises(InputError, match="zone"):
        load_grid(spec(kind="table"), zones=[], start=DAY, duration_s=1, base_dir=Path())


# ---- the shipped table ---------------------------------------------------------------------------------------------------------------


@needs_shared
@pytest.mark.parametrize("signal", ["lca", "direct"])
def test_the_table_is_the_mean_of_the_hourly_files(signal):
    hourly = pd.read_csv(CARBON / f"ci_{signal}_hourly_2021_2024.csv.gz")
    expected = {
        zone: hourly.groupby([hourly.datetime_utc.str[5:7], hourly.datetime_utc.str[11:13]])[zone].mean() for zone in hourly.columns[1:]
    }
    if signal == "lca":
        derived = pd.read_csv(CARBON / "site16_ci_lca_hourly_2021_2024_derived.csv.gz")
        assert set(derived.columns[1:]) - set(hourly.columns) == DERIVED_ZONES
        expected |= {z: derived.groupby([derived.datetime_utc.str[5:7], derived.datetime_utc.str[11:13]])[z].mean() for z in DERIVED_ZONES}
    zones = sorted(expected)
    assert shipped_zones(signal) == tuple(zones)
    # A leap year passes every month; each hour of it is compared.
    grid = load_grid(
        spec(kind="table", signal=signal), zones=zones, start=datetime(2032, 1, 1, tzinfo=UTC), duration_s=366 * 86400, base_dir=Path()
    )
    assert grid.basis == signal and grid.signal == "average" and len(grid.edges_s) == 8784
    stamps = [datetime(2032, 1, 1) + timedelta(hours=i) for i in range(8784)]
    wanted = np.array([[expected[z].loc[(f"{t:%m}", f"{t:%H}")] for z in zones] for t in stamps[:: 24 * 7 + 1]])
    np.testing.assert_allclose(grid.at(np.arange(0, 8784, 24 * 7 + 1) * HOUR_S), wanted, rtol=0, atol=ROUNDING)


def test_the_table_serves_any_date_and_wraps():
    args = {"zones": ["DE", "NL"], "base_dir": Path()}
    old = load_grid(spec(kind="table"), start=datetime(1999, 12, 31, 23, 30, tzinfo=UTC), duration_s=HOUR_S, **args)
    new = load_grid(spec(kind="table"), start=datetime(2040, 1, 1, tzinfo=UTC), duration_s=1.0, **args)
    assert old.edges_s.tolist() == [-1800, 1800] and old.until_s == 5400
    assert old.at(1800).tolist() == new.at(0).tolist() and (old.at(0) != new.at(0)).all()
    assert any("ODbL" in note for note in old.notes) and any("derived" in note and "NL" in note for note in old.notes)
    with pytest.raises(InputError, match="no zone XX"):
        load_grid(spec(kind="table"), zones=["XX"], start=DAY, duration_s=1, base_dir=Path())
    with pytest.raises(InputError, match=r"\(direct\): has no zone NL"):
        load_grid(spec(kind="table", signal="direct"), start=DAY, duration_s=1, **args)


@needs_shared
def test_a_day_of_the_hourly_file_is_read_as_it_stands():
    name = "site16_ci_lca_hourly_2021_2024_derived.csv.gz"
    frame = pd.read_csv(CARBON / name).set_index("datetime_utc")
    zones = list(frame.columns)
    start = datetime(2023, 11, 16, 18, tzinfo=UTC)
    grid = load_grid(spec(kind="file", path=name, basis="lca"), zones=zones, start=start, duration_s=86400, base_dir=CARBON)
    np.testing.assert_array_equal(grid.ci_g_per_kwh, frame.loc["2023-11-16T18:00Z":"2023-11-17T17:00Z"].to_numpy())


# ---- the series ----------------------------------------------------------------------------------------------------------------------


@given(data=st.data(), gaps=st.lists(st.floats(0.5, 5000), min_size=1, max_size=12), first=st.floats(-3600, 0), zones=st.integers(1, 3))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_at_equals_a_plain_loop(data, gaps, first, zones):
    edges = np.cumsum([first, *gaps])
    edges, until = edges[:-1], float(edges[-1])
    values = np.arange(len(edges) * zones, dtype=np.float64).reshape(len(edges), zones)
    names = tuple("ABC"[:zones])
    series = GridSeries(names, edges, values, until, "average", "lca", "here", (), {})
    inside = st.floats(float(edges[0]), until, exclude_max=True) | st.sampled_from(edges.tolist())
    times = data.draw(st.lists(inside, max_size=20))
    expected = []
    for time in times:
        row = None
        for edge, value in zip(edges, values, strict=True):
            if edge <= time:
                row = value
        expected.append(row)
    assert series.at(times).tolist() == [row.tolist() for row in expected]
    assert series.at(times).shape == (len(times), zones)


@pytest.mark.parametrize(
    ("time_s", "hour"), [(-1.0, "2024-03-30T23:59:59Z"), (4 * HOUR_S, "2024-03-31T04:00Z"), (float("nan"), "nan s"), (1e300, "1e+300 s")]
)
def test_at_never_reads_beyond_the_series(tmp_path, time_s, hour):
    with pytest.raises(InputError, match=re.escape(f"not at {hour}") if "+300" not in hour else "not at"):
        load(tmp_path, hours(1, 2, 3, 4)).at([0.0, time_s])
