"""Figures drawn from made-up runs: what is on the axes, and that files come out without pyplot, display or warnings."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from jaxserve.analysis.plots import MAX_BINS, MAX_LINES, carbon_vs_violation, power_and_ci, save_figures, ttft_cdf
from jaxserve.errors import InputError

PNG = b"\x89PNG\r\n\x1a\n"


def ledger_frame(n_dc: int, n_intervals: int, interval_s: float = 2.0) -> pd.DataFrame:
    """DC d draws (d + 1) kW in interval 0 and 1 W more in each later one; two DCs a zone, CI 100 * zone + interval."""
    interval, dc = (grid.ravel() for grid in np.meshgrid(np.arange(n_intervals), np.arange(n_dc), indexing="ij"))
    facility_j = (1e3 * (dc + 1) + interval) * interval_s
    return pd.DataFrame(
        {"interval_start_s": interval * interval_s, "interval_s": interval_s, "dc": [f"dc-{d}" for d in dc], "facility_j": facility_j}
        | dict.fromkeys(("prefill_j", "decode_j", "idle_j", "host_j"), facility_j / 5)
        | {"ci_g_per_kwh": 100.0 * (dc // 2) + interval, "carbon_g": 1.0}
    )


def comparison(carbon_g: list[float], violation: list[float]) -> pd.DataFrame:
    names = [f"policy {i}" for i in range(len(carbon_g))]
    return pd.DataFrame({"carbon_with_drain_g": carbon_g, "slo_violation": violation}, index=pd.Index(names, name="policy"))


def legend_of(ax) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_carbon_vs_violation_points_and_units():
    ax = Figure().subplots()
    assert carbon_vs_violation(comparison([2500.0, 2000.0, 1.0], [0.01, 0.2, np.nan]), ax) is ax
    points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines]
    assert points[:2] == [(1.0, 2.5), (20.0, 2.0)]
    assert np.isnan(points[2][0])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("SLO violated (% of requests)", "carbon (kg CO2e)")
    assert legend_of(ax) == ["policy 0", "policy 1", "policy 2"]


@pytest.mark.parametrize(("carbon_g", "violation"), [([0.0], [0.0]), ([5.0], [1.0]), ([], []), ([np.nan], [np.nan]), ([-5e6], [0.5])])
def test_carbon_vs_violation_draws_edge_cases(carbon_g, violation):
    figure = Figure(layout="constrained")
    carbon_vs_violation(comparison(carbon_g, violation), figure.subplots())
    figure.draw_without_rendering()


def test_small_violations_keep_apart_beside_large_ones():
    def gap(violation: list[float]) -> float:
        """Between the first two policies, as a share of the width."""
        ax = Figure().subplots()
        carbon_vs_violation(comparison([1.0] * len(violation), violation), ax)
        x = [ax.transAxes.inverted().transform(ax.transData.transform((line.get_xdata()[0], 1.0)))[0] for line in ax.lines]
        assert all(0.0 < at < 1.0 for at in x)
        return x[1] - x[0]

    assert gap([0.0, 0.01, 0.99]) > 0.2
    assert gap([0.0, 0.05]) > 0.8  # nothing large: as it is


def test_ttft_cdf_counts_rejected_requests():
    ax = ttft_cdf({"a": pd.DataFrame({"ttft_s": [0.2, np.nan, 0.1, 0.4]})}, Figure().subplots(), 1.0)
    line = ax.lines[0]
    assert list(line.get_xdata()) == [0.1, 0.1, 0.2, 0.4]
    assert list(line.get_ydata()) == [0.0, 0.25, 0.5, 0.75]
    assert legend_of(ax) == ["a", "budget 1 s"]


def test_ttft_cdf_of_many_requests_is_a_short_line_with_both_ends():
    ttft_s = np.random.default_rng(0).lognormal(size=50_000)
    line = ttft_cdf({"a": pd.DataFrame({"ttft_s": ttft_s})}, Figure().subplots(), 1.0).lines[0]
    x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    assert len(x) < 2100
    assert (x[0], x[-1], y[-1]) == (ttft_s.min(), ttft_s.max(), 1.0)
    assert y[1000] == np.mean(ttft_s <= x[1000])


def test_power_is_energy_over_time_and_one_zone_is_one_line():
    axes = Figure().subplots(2, 1)
    power_and_ci(ledger_frame(4, 3), axes)
    # stairs draw patches, whose data are (values, edges, baseline).
    assert np.array([patch.get_data()[0] for patch in axes[0].patches]) == pytest.approx(np.arange(1.0, 5.0)[:, None] + [0, 0.001, 0.002])
    assert list(axes[0].patches[0].get_data()[1]) == [0, 2, 4, 6]
    assert [list(patch.get_data()[0]) for patch in axes[1].patches] == [[0, 1, 2], [100, 101, 102]]
    assert legend_of(axes[1]) == ["dc-0\ndc-1", "dc-2\ndc-3"]
    assert (axes[0].get_ylabel(), axes[1].get_ylabel()) == ("facility power (kW)", "carbon intensity (g CO2e/kWh)")
    assert axes[1].get_xlabel() == "time since start (s)"


def test_binning_keeps_energy():
    axes = Figure().subplots(2, 1)
    ledger = ledger_frame(1, 5 * MAX_BINS + 7)
    power_and_ci(ledger, axes)
    power_kw, edges_min, _ = axes[0].patches[0].get_data()
    assert len(power_kw) <= MAX_BINS
    assert axes[0].get_xlabel() == "time since start (min)"
    assert np.sum(power_kw * np.diff(edges_min)) * 60e3 == pytest.approx(ledger["facility_j"].sum(), rel=1e-12)


def test_many_dcs_are_rows_of_a_colour_map():
    figure = Figure(layout="constrained")
    axes = figure.subplots(2, 1)
    power_and_ci(ledger_frame(MAX_LINES + 8, 3), axes)
    mesh = np.asarray(axes[0].collections[0].get_array()).reshape(MAX_LINES + 8, 3)
    assert mesh[:, 0] == pytest.approx(np.arange(MAX_LINES + 8) + 1.0)
    assert [tick.get_text() for tick in axes[0].get_yticklabels()] == [f"dc-{d}" for d in range(MAX_LINES + 8)]
    assert [ax.get_ylabel() for ax in figure.axes[2:]] == ["facility power (kW)", "carbon intensity (g CO2e/kWh)"]


def test_an_empty_ledger_is_told():
    with pytest.raises(InputError, match="no interval"):
        power_and_ci(ledger_frame(1, 1)[:0], Figure().subplots(2, 1))


@pytest.mark.parametrize(("n_dc", "n_intervals"), [(1, 1), (16, 1), (70, 300)])
def test_save_figures_writes_every_file(tmp_path, n_dc, n_intervals):
    # Names that matplotlib would read as formula or leave out of legends, and two that make one file name.
    names = ["_a$b", "x/y", "x y"]
    frame = comparison([1.0, 2.0, 3.0], [0.0, 0.5, 1.0]).set_axis(names)
    requests = {
        names[0]: pd.DataFrame({"ttft_s": [0.0, 0.3]}),
        names[1]: pd.DataFrame({"ttft_s": [np.nan]}),
        names[2]: pd.DataFrame({"ttft_s": []}),
    }
    written = save_figures(frame, requests, {name: ledger_frame(n_dc, n_intervals) for name in names}, tmp_path / "figures", slo_ttft_s=0.5)
    assert [path.name for path in written] == [
        "carbon_vs_violation.png",
        "ttft_cdf.png",
        "power_and_ci_a_b.png",
        "power_and_ci_x_y.png",
        "power_and_ci_x_y_2.png",
    ]
    assert all(path.read_bytes().startswith(PNG) for path in written)


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"carbon_vs_violation\.png: the figure cannot be written"):
        save_figures(comparison([1.0], [0.0]), {}, {}, tmp_path / "file", slo_ttft_s=1.0)


def test_neither_pyplot_nor_a_display_is_needed():
    code = "import sys, jaxserve.analysis.plots; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PATH": "", "MPLBACKEND": "TkAgg"}, check=False).returncode == 0
