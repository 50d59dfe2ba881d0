"""Carbon intensity in its unit and on its clock: what a file says, what a scenario says, and what is told of both."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

from jaxserve.errors import InputError
from jaxserve.scenario.ci_units import G_PER_KWH, unit_of
from jaxserve.scenario.grid import GridSpec, load_grid
from jaxserve.scenario.signals import GridSeries

DAY = datetime(2024, 3, 31, tzinfo=UTC)
HOUR_S = 3600.0
LONG = "Datetime (UTC),Zone id,Carbon intensity gCO₂eq/kWh (direct),Carbon intensity gCO₂eq/kWh (Life cycle),Data estimated"


def load(folder: Path, text: str, *, zones=("DE",), hours_long=2.0, **fields) -> GridSeries:
    (folder / "ci.csv").write_text(text)
    spec = TypeAdapter(GridSpec).validate_python({"kind": "file", "path": "ci.csv"} | fields)
    return load_grid(spec, zones=list(zones), start=DAY, duration_s=hours_long * HOUR_S, base_dir=folder)


def wide(*values: float | str, header: str = "datetime_utc,DE", stamp: str = "2024-03-31T{:02}:00Z") -> str:
    return "\n".join([header, *(f"{stamp.format(h)},{value}" for h, value in enumerate(values)), ""])


# By the definitions: 1 kWh = 3.6 MJ, 1 MWh = 1000 kWh, 1 t = 1000 kg, 1 lb = 453.59237 g.
RIGHT = {"g/kWh": 400.0, "kg/kWh": 400_000.0, "kg/MWh": 400.0, "g/MWh": 0.4, "t/MWh": 400_000.0, "lb/MWh": 181.436948}


@pytest.mark.parametrize("unit", G_PER_KWH)
def test_a_file_in_each_unit(tmp_path, unit):
    grid = load(tmp_path, wide(400, 200), unit=unit)
    np.testing.assert_allclose(grid.ci_g_per_kwh.ravel(), [RIGHT[unit], RIGHT[unit] / 2], rtol=1e-12)
    assert any(note.startswith(f"grid: values read as {unit} (grid.unit)") for note in grid.notes)


@pytest.mark.parametrize(
    ("header", "unit"),
    [
        ("Carbon intensity gCO₂eq/kWh (direct)", "g/kWh"),
        ("ci_g_per_kwh", "g/kWh"),
        ("DE [kgCO2/kWh]", "kg/kWh"),
        ("DE kg CO2e per MWh", "kg/MWh"),
        ("ci_kg_per_mwh", "kg/MWh"),
        ("gCO2/MWh", "g/MWh"),
        ("DE tCO2e/MWh", "t/MWh"),
        ("rate lbs/MWh", "lb/MWh"),
        ("lb CO2/MWh", "lb/MWh"),
        ("co2_moer", "lb/MWh"),
        ("MOER g/kWh", "g/kWh"),
        ("US-MIDA-PJM", None),
        ("EUR/MWh", None),
        ("boomers", None),
        ("mg/kWh", None),
    ],
)
def test_what_a_header_says(header, unit):
    assert unit_of(header)[0] == unit


def test_the_header_speaks_where_the_scenario_does_not(tmp_path):
    text = wide("0.4,300", "0.2,200", header="datetime_utc,DE kg/kWh,FR")
    grid = load(tmp_path, text, zones=("DE", "FR"), zone_column={"DE": "DE kg/kWh"})
    assert grid.ci_g_per_kwh.tolist() == [[400, 300], [200, 200]]
    told = [note for note in grid.notes if "values read as" in note]
    assert told[0] == "grid: values read as kg/kWh (as its header 'DE kg/kWh' says), 1 kg/kWh = 1000 g/kWh" and "read as g/kWh" in told[1]
    with pytest.raises(InputError, match=r"row 1: the header 'DE kg/kWh' says kg/kWh but grid.unit is 'lb/MWh'"):
        load(tmp_path, text, zone_column={"DE": "DE kg/kWh"}, unit="lb/MWh")


def test_watttime_is_marginal_and_in_pounds(tmp_path):
    text = "timestamp,MOER,MOER version,frequency\n" + "".join(f"2024-03-31 00:{m:02}:00+00:00,1000,3.2,300\n" for m in (0, 5))
    fields = {"zone_column": {"DE": "MOER"}, "hours_long": 1 / 6}
    with pytest.raises(InputError, match=r"column 'MOER' is marginal but grid.signal is 'average'; set it to 'marginal'"):
        load(tmp_path, text, **fields)
    grid = load(tmp_path, text, signal="marginal", **fields)
    np.testing.assert_allclose(grid.ci_g_per_kwh, 453.59237, rtol=1e-12)
    assert "grid: values read as lb/MWh (as WattTime publishes 'MOER'), 1 lb/MWh = 0.4536 g/kWh" in grid.notes
    in_kg = load(tmp_path, text, signal="marginal", unit="kg/MWh", **fields)  # a copy converted by someone else
    assert (in_kg.ci_g_per_kwh == 1000).all()


def test_errors_speak_of_the_cells_as_written(tmp_path):
    with pytest.raises(InputError, match="-3 is negative"):
        load(tmp_path, wide(-3, 2), unit="lb/MWh")
    with pytest.raises(InputError, match=r"row 2 and row 4 give 1 and 7"):
        load(tmp_path, wide(1, 2) + "2024-03-31T00:00Z,7\n", unit="lb/MWh")


DOUBTFUL = {
    "kg taken for g": ((0.4, 0.2), {}, "zone DE: no value of the run reaches 1 g/kWh (at most 0.4); is that the unit (grid.unit)?"),
    "g taken for kg": ((400, 300), {"unit": "kg/kWh"}, "zone DE: all values of the run are above 2000 g/kWh (at least 300000)"),
    "all zero": ((0, 0), {}, "zone DE: no value of the run reaches 1 g/kWh (at most 0)"),
    "zero over a life cycle": ((0, 300), {"basis": "lca"}, "zone DE: 1 of 2 values of the run are 0, which no life-cycle intensity is"),
    "zero from the stack": ((0, 0), {"basis": "direct"}, None),
    "zero at the margin": ((0, 0), {"signal": "marginal"}, None),
    "one clean hour": ((0.5, 9), {}, None),
    "lignite": ((1119, 900), {"basis": "lca"}, None),
}


@pytest.mark.parametrize("case", DOUBTFUL)
def test_values_that_no_grid_has(tmp_path, case):
    values, fields, told = DOUBTFUL[case]
    warnings = [note for note in load(tmp_path, wide(*values, 77), **fields).notes if note.startswith("warning: ")]
    assert len(warnings) == (told is not None) and (told is None or told in warnings[0])


def test_a_constant_that_no_grid_has():
    spec = TypeAdapter(GridSpec).validate_python({"kind": "constant", "ci_g_per_kwh": {"DE": 0.38, "FR": 38.0}})
    grid = load_grid(spec, zones=["DE", "FR"], start=DAY, duration_s=60.0, base_dir=Path())
    assert len(grid.notes) == 1 and "zone DE" in grid.notes[0] and "(grid.ci_g_per_kwh)" in grid.notes[0]


# --- clocks


@pytest.mark.parametrize(
    ("column", "stamp", "told"),
    [
        ("Datetime", "2024-03-31 {:02}:00", True),
        ("time", "2024-03-31T{:02}:00:00.000", True),
        ("datetime_utc", "2024-03-31 {:02}:00", False),
        ("Datetime (UTC)", "2024-03-31 {:02}:00", False),
        ("time", "2024-03-31 {:02}:00Z", False),
        ("time", "2024-03-31 {:02}:00 UTC", False),
        ("timestamp", "2024-03-31T{:02}:00+00:00", False),
    ],
)
def test_stamps_of_no_clock_are_told(tmp_path, column, stamp, told):
    grid = load(tmp_path, wide(1, 2, header=f"{column},DE", stamp=stamp))
    assert grid.ci_g_per_kwh.ravel().tolist() == [1, 2]
    assert ("grid: ci.csv: no offset at its time stamps, read as UTC" in grid.notes) == told


def test_stamps_with_and_without_an_offset_are_not_mixed(tmp_path):
    with pytest.raises(InputError, match="row 4, column 'time': time stamps with and without an offset are mixed"):
        load(tmp_path, wide(1, 2, header="time,DE") + "2024-03-31T02:00,3\n")


# --- estimates, and the values over a run


def test_estimated_hours_of_the_run_are_told_by_zone(tmp_path):
    flags = {"DE": "true", "FR": "False", "NL": "True"}
    rows = [f"2024-03-31 0{h}:00:00,{z},5,9,{flag if z != 'DE' or h == 1 else 'false'}" for z, flag in flags.items() for h in range(5)]
    grid = load(tmp_path, "\n".join([LONG, *rows]), zones=("DE", "FR", "NL"), basis="lca", hours_long=4)
    assert "grid: estimated by the publisher, share of the run's values: DE 25%, NL 100%" in grid.notes
    measured = "\n".join([LONG, *(row.replace("rue", "alse") for row in rows if ",FR," in row)])
    assert not any("estimated" in note for note in load(tmp_path, measured, zones=("FR",), basis="lca").notes)


def test_least_mean_and_greatest_over_a_run_by_hand():
    edges = np.array([-1800.0, 1800.0, 5400.0, 9000.0])
    series = GridSeries(
        ("A", "B"), edges, np.array([[4.0, 1.0], [8.0, 1.0], [2.0, 1.0], [99.0, 1.0]]), 12_600.0, "average", "lca", "", (), {}
    )
    # 1800 s at 4, 3600 s at 8, 600 s at 2: nothing of the interval before the start or after the end.
    np.testing.assert_allclose(series.over(6000.0), [[2, 1], [(1800 * 4 + 3600 * 8 + 600 * 2) / 6000, 1], [8, 1]], rtol=1e-14)
    assert series.over(60.0).tolist() == [[4, 1]] * 3


@pytest.mark.parametrize("duration_s", [1.0, 3600.0, 8123.0])
def test_the_mean_over_a_run_is_that_of_its_seconds(tmp_path, duration_s):
    grid = load(tmp_path, wide(3, 1, 4, 1), hours_long=3)
    later = GridSeries(
        grid.zones,
        grid.edges_s - 700.0,
        grid.ci_g_per_kwh,
        grid.until_s - 700.0,
        "average",
        "lca",
        "",
        (),
        {},
        DAY + timedelta(seconds=700),
    )
    seconds = later.at(np.arange(int(duration_s)))
    np.testing.assert_allclose(later.over(duration_s)[:, 0], [seconds.min(), seconds.mean(), seconds.max()], rtol=1e-12)
