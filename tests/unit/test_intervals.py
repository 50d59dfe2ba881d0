"""Where the ledger is cut, and that carbon does not hang on it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxserve
from jaxserve.scenario.compile import compile_scenario
from jaxserve.scenario.intervals import ci_changes, interval_windows
from jaxserve.scenario.load import load_scenario
from jaxserve.scenario.signals import GridSeries
from jaxserve.units import J_PER_KWH
from tests.cli.helpers import write_scenario

SUMMED = 1e-12
"""Sums of a few hundred float64 in another order."""


def series(edges_s: list[float], *zones: list[float]) -> GridSeries:
    """Carbon intensity of `zones` in steps that begin at `edges_s`."""
    names = tuple(f"zone {i}" for i in range(len(zones)))
    return GridSeries(names, np.array(edges_s), np.array(zones).T, 1e9, "average", "lca", "made up", (), {})


@pytest.mark.parametrize(
    ("edges_s", "zones", "columns", "windows"),
    [
        ([-5.0, 0.3, 1.0], [[1.0, 2.0, 3.0]], [0], [3, 10]),  # 3*0.1 is a little over 0.3, and so the first window that begins there
        ([0.0, 0.25, 0.31, 1.0], [[1.0, 2.0, 3.0, 4.0]], [0], [3, 4, 10]),  # changes inside a window hold from the next on
        ([0.0, 0.21, 0.25, 1.0], [[1.0, 2.0, 1.0, 4.0]], [0], [10]),  # there and back before any window begins
        ([0.0, 1.0, 2.0], [[1.0, 1.0, 2.0], [5.0, 6.0, 6.0]], [0], [20]),  # of the sites' zones only
        ([0.0, 1.0, 2.0], [[1.0, 1.0, 2.0], [5.0, 6.0, 6.0]], [1, 0, 1], [10, 20]),
        ([0.0, 4.95, 5.0, 7.0], [[1.0, 2.0, 3.0, 4.0]], [0], []),  # the horizon is after 50 windows
        ([0.0], [[1.0]], [0], []),
    ],
)
def test_changes_by_hand(edges_s: list[float], zones: list[list[float]], columns: list[int], windows: list[int]) -> None:
    assert ci_changes(series(edges_s, *zones), np.array(columns), 0.1, 50).tolist() == windows


@pytest.mark.parametrize(("window_s", "start_s"), [(0.1, 0.0), (0.1, 7.3), (0.7, 0.0), (0.05, 1.234567), (0.25, 1e6)])
def test_changes_against_all_windows(window_s: float, start_s: float) -> None:
    rng = np.random.default_rng(1)
    grid = series([-start_s, *np.sort(rng.uniform(0, 60, 30)).round(2)], rng.integers(1, 3, 31).tolist(), rng.integers(1, 3, 31).tolist())
    ci = [grid.at(k * window_s).tolist() for k in range(70)]
    wanted = [k for k in range(1, 70) if ci[k] != ci[k - 1]]
    assert ci_changes(grid, np.array([0, 1]), window_s, 70).tolist() == wanted


def test_intervals_by_hand() -> None:
    assert interval_windows(20, 0, 50, np.array([], np.int64)).tolist() == [0, 20, 40, 50]
    assert interval_windows(20, 15, 50, np.array([7, 40])).tolist() == [0, 7, 15, 20, 40, 50]
    assert interval_windows(100, 0, 50, np.array([49])).tolist() == [0, 49, 50]


@pytest.mark.parametrize(
    ("start", "changes", "windows", "step"),
    [
        ("11:59:58Z", {}, [0, 10, 20, 30, 40], 10),
        ("11:59:57.5Z", {}, [0, 10, 20, 25, 30, 40], 5),
        ("11:59:57.46Z", {"ledger_s": 4.0}, [0, 26, 40], 2),
        ("11:59:58Z", {"ledger_s": 4.0, "warmup_s": 0.5}, [0, 5, 20, 40], 5),
        ("11:00:00Z", {"ledger_s": 4.0}, [0, 40], 10),
    ],
)
def test_steps_end_where_the_ledger_does(start: str, changes: dict[str, Any], windows: list[int], step: int, tmp_path: Path) -> None:
    case = compile_scenario(*load_scenario(str(write_scenario(tmp_path, hourly(tmp_path, start) | changes))))
    assert (case.interval_windows.tolist(), case.step_windows(False)) == (windows, step)


def hourly(folder: Path, start: str) -> dict[str, Any]:
    """Changes to a grid of an hour at 100 (and 40) and one at 500 g/kWh."""
    (folder / "hourly.csv").write_text("datetime,FR,PL\n2022-01-04 11:00Z,100,40\n2022-01-04 12:00Z,500,500\n")
    return {"start_time": f"2022-01-04T{start}", "grid": {"kind": "file", "path": "hourly.csv"}}


def test_carbon_does_not_hang_on_the_ledger(tmp_path: Path) -> None:
    """The hour turns 2.5 s after the start: until then 100 and 40 g/kWh, after that 500. All requests are done at 2.4 s."""
    (tmp_path / "trace.csv").write_text("arrival_s,isl,osl\n0.1,200,20\n0.2,300,20\n0.9,400,10\n1.3,200,20\n")
    changes = {"workload": {"kind": "trace", "path": "trace.csv"}}
    scenario = write_scenario(tmp_path, hourly(tmp_path, "11:59:57.5Z") | changes)
    found = {}
    for ledger_s in (0.5, 1.0, 3.0, 4.0):
        results = jaxserve.run(scenario, overrides=[f"ledger_s={ledger_s}"])
        run, power = results["round_robin"], results.scenario.coefficients.power
        assert run.requests["finish_s"].max() < 2.4
        frame, found[ledger_s] = run.ledger_frame, run.summary["metrics"]
        assert sorted(set(frame["interval_start_s"])) == sorted({*np.arange(0, 4, ledger_s).tolist(), 2.5})
        late = frame[frame["interval_start_s"] >= 2.5]
        assert (late["ci_g_per_kwh"] == 500.0).all() and (frame["ci_g_per_kwh"].to_numpy()[:2] == [100.0, 40.0]).all()
        # Two idle engines a site and its node, at PUE 1.1 and 1.2.
        watts = 2 * power.idle_w_per_gpu + power.host_w
        assert late["carbon_g"].sum() == pytest.approx((1.1 + 1.2) * watts * 1.5 * 500 / J_PER_KWH, rel=1e-9)
        early = frame[frame["interval_start_s"] < 2.5]
        by_site = early["facility_j"].groupby(early["dc"], observed=True).sum()
        wanted_g = (by_site["clean"] * 100 + by_site["dirty"] * 40) / J_PER_KWH
        assert early["carbon_g"].sum() == pytest.approx(wanted_g, rel=1e-9)
    for name in ("carbon_g", "carbon_with_drain_g", "facility_energy_j", "idle_energy_j", "goodput_req_per_g"):
        assert all(found[s][name] == pytest.approx(found[1.0][name], rel=SUMMED) for s in found), name
