"""Figures: each function draws on the axes it is given and returns them. No pyplot state, no display, no browser, no network."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from numpy.typing import NDArray

from jaxserve.analysis.dataset import ledger_dataset
from jaxserve.errors import InputError
from jaxserve.units import S_PER_HOUR

Floats = NDArray[np.float64]

# Okabe and Ito without yellow (too pale for a line on white), with wine: apart for all common forms of colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#444444", "#882255")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
MARKERS = "osD^vPX*"
MAX_BINS = 200
"""Steps drawn over time: more would be noise, so neighbouring intervals are averaged (energy is kept)."""
MAX_STEPS = 2000
"""Steps of a distribution: 8.6 M requests make the same line as this many quantiles."""
MAX_LINES = len(COLOURS)
"""DCs drawn as lines; more would tangle, and become rows of a colour map."""
MAX_NAMES = 24
"""DCs named beside a colour map: every one, or every second, third, ... of them."""
LEGEND_ROWS = 18
WIDE_PERCENT = 10.0
"""Violations beyond this are drawn on a logarithmic axis."""
DPI = 150


def carbon_vs_violation(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Carbon against the share of requests that violate the SLO, one mark a policy of a `compare` frame. Lower left is better."""
    violation = np.asarray(frame["slo_violation"], dtype=np.float64)
    carbon_g = np.asarray(frame["carbon_with_drain_g"], dtype=np.float64)
    largest = np.max(np.abs(carbon_g), initial=0.0)
    factor, unit = (1e-6, "t") if largest >= 1e6 else (1e-3, "kg") if largest >= 1e3 else (1.0, "g")
    # Without requests there is no share of them, and so no point (NaN); the policy keeps its place in the legend.
    for place, policy in enumerate(frame.index):
        x, y = [100 * violation[place]], [factor * carbon_g[place]]
        ax.plot(x, y, ls="", label=_label(policy), **style(place))
    violation_axis(ax, violation)
    ax.margins(y=0.12)
    ax.set_ylabel(f"carbon ({unit} CO2e)")
    return finish_axes(ax)


def ttft_cdf(requests_by_policy: Mapping[str, pd.DataFrame], ax: Axes, slo_ttft_s: float) -> Axes:
    """Share of all requests (rejected ones included, so that a line may end below 1) with a TTFT up to x seconds; the budget dashed."""
    smallest, largest = math.inf, 0.0
    for place, (policy, requests) in enumerate(requests_by_policy.items()):
        x_s, share = _ecdf(requests["ttft_s"].to_numpy(dtype=float, na_value=np.nan))
        if x_s.size:
            smallest, largest = min(smallest, x_s[0]), max(largest, x_s[-1])
        colour, dash = _line(place)
        ax.step(x_s, share, where="post", color=colour, ls=dash, lw=1.6, label=_label(policy))
    ax.axvline(slo_ttft_s, color="0.45", lw=1, ls=(0, (2, 2)), label=f"budget {slo_ttft_s:g} s", zorder=0)
    if smallest > 0 and max(largest, slo_ttft_s) > 20 * min(smallest, slo_ttft_s):
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_ylim(0, 1.02)
    ax.set_xlabel("TTFT (s)")
    ax.set_ylabel("share of requests")
    return finish_axes(ax)


def power_and_ci(ledger: pd.DataFrame, axes: Sequence[Axes]) -> Sequence[Axes]:
    """Facility power of every DC (kW) on the first axes and carbon intensity (g CO2e/kWh) on the second, over time since the start.

    Lines for up to MAX_LINES DCs; for more a colour map, one row a DC, which adds a colour bar to the figure.
    """
    data = ledger_dataset(ledger)
    start_s, length_s = data["interval"].to_numpy(), data["interval_s"].to_numpy()
    if not start_s.size:
        raise InputError("ledger: no interval to draw.")
    names = [_label(name) for name in data["dc"].to_numpy()]
    first = np.arange(0, start_s.size, -(-start_s.size // MAX_BINS))
    bin_s = np.add.reduceat(length_s, first)[:, None]
    power_kw = np.add.reduceat(data["facility_j"].to_numpy(), first) / bin_s / 1e3
    ci = np.add.reduceat(data["ci_g_per_kwh"].to_numpy() * length_s[:, None], first) / bin_s
    end_s = start_s[-1] + length_s[-1]
    unit_s, unit = (S_PER_HOUR, "h") if end_s > 2 * S_PER_HOUR else (60.0, "min") if end_s > 600 else (1.0, "s")
    edges = np.append(start_s[first], end_s) / unit_s
    draw = _lines if len(names) <= MAX_LINES else _colour_map
    draw(axes[0], power_kw, edges, names, "facility power (kW)")
    draw(axes[1], ci, edges, names, "carbon intensity (g CO2e/kWh)")
    for ax in axes:
        ax.set_xlim(edges[0], edges[-1])
        ax.set_xlabel(f"time since start ({unit})")
    return axes


def save_figures(
    frame: pd.DataFrame,
    requests_by_policy: Mapping[str, pd.DataFrame],
    ledgers: Mapping[str, pd.DataFrame],
    folder: Path,
    *,
    slo_ttft_s: float,
) -> list[Path]:
    """Write `carbon_vs_violation.png`, `ttft_cdf.png` and `power_and_ci_<policy>.png` for each ledger; the paths written."""
    folder = Path(folder)
    figure = blank_figure(6.8, 4.2)
    carbon_vs_violation(frame, figure.subplots())
    written = [save_png(figure, folder / "carbon_vs_violation.png")]
    figure = blank_figure(6.8, 4.2)
    ttft_cdf(requests_by_policy, figure.subplots(), slo_ttft_s)
    written.append(save_png(figure, folder / "ttft_cdf.png"))
    for policy, ledger in ledgers.items():
        figure = blank_figure(8.5, 6.4)
        figure.suptitle(_label(policy), fontsize=10)
        for ax in power_and_ci(ledger, figure.subplots(2, 1, sharex=True)):
            ax.label_outer(remove_inner_ticks=False)
        path = folder / f"power_and_ci_{re.sub(r'[^A-Za-z0-9._-]+', '_', policy).strip('_')}.png"
        stem, again = path.stem, 2
        while path in written:
            path, again = path.with_name(f"{stem}_{again}.png"), again + 1
        written.append(save_png(figure, path))
    return written


def violation_axis(ax: Axes, violation: Floats) -> None:
    """Label the x axis for shares of requests [P] that violate the SLO, drawn in per cent.

    From zero, where the best policy would be, with room for half a mark. Where some violate nearly all and others next to nothing the
    axis is logarithmic from 1 % on, so that the latter are not one spot.
    """
    most = max(100 * np.max(violation[np.isfinite(violation)], initial=0.0), 0.1)  # a run without violations still has an axis
    if most > WIDE_PERCENT:
        ax.set_xscale("symlog", linthresh=1.0, linscale=0.6, subs=range(2, 10))
        ax.set_xticks([0.0, 1.0, 3.0, 10.0, 30.0, 100.0])
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set_xlim(-0.12, 1.25 * most)
    else:
        ax.set_xlim(-0.03 * most, 1.12 * most)
    ax.set_xlabel("SLO violated (% of requests)")


def style(place: int) -> dict[str, Any]:
    """Marker of the place-th policy, see-through, so that policies that do the same are seen to; the second round of colours has other
    shapes."""
    colour, marker = COLOURS[place % len(COLOURS)], MARKERS[(place + place // len(COLOURS)) % len(MARKERS)]
    return {"marker": marker, "ms": 9, "mfc": to_rgba(colour, 0.45), "mec": colour}


def blank_figure(width_in: float, height_in: float) -> Figure:
    """A figure without pyplot, display or browser."""
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_png(figure: Figure, path: Path) -> Path:
    """Write the figure, and return its path; raises `InputError` where that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI, format="png")
    except OSError as error:
        raise InputError(f"{path}: the figure cannot be written ({error.strerror or error}).") from error
    return path


def _line(place: int) -> tuple[str, str | tuple[int, tuple[float, ...]]]:
    """Colour and dash of the place-th line: all colours solid first, then dashed, then dotted."""
    return COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]


def _lines(ax: Axes, values: Floats, edges: Floats, names: list[str], label: str) -> None:
    """One step line a DC, or one for DCs with the same values (one zone): drawn apart they would hide each other."""
    for members in _alike(values):
        colour, dash = _line(members[0])
        listed = "\n".join(names[member] for member in members)
        ax.stairs(values[:, members[0]], edges, baseline=None, color=colour, ls=dash, lw=1.4, label=listed)
    if np.min(values) >= 0:
        ax.set_ylim(0, 1.08 * np.max(values) or 1.0)
    ax.set_ylabel(label)
    finish_axes(ax)


def _colour_map(ax: Axes, values: Floats, edges: Floats, names: list[str], label: str) -> None:
    """One row a column of `values` [bins, DCs], the first DC on top."""
    rows = np.arange(len(names))
    # Cividis reads the same with and without red-green vision.
    mesh = ax.pcolormesh(edges, np.append(rows, len(names)) - 0.5, values.T, cmap="cividis", rasterized=True)
    ax.invert_yaxis()
    shown = rows[:: -(-len(names) // MAX_NAMES)]
    ax.set_yticks(shown, [names[row] for row in shown], fontsize=8)
    ax.tick_params(axis="y", length=0)
    ax.spines[:].set_visible(False)
    ax.figure.colorbar(mesh, ax=ax, label=label, pad=0.01).outline.set_visible(False)


def _ecdf(values: Floats) -> tuple[Floats, Floats]:
    """Where the distribution steps and the share of all values, NaN included, reached there."""
    known = np.sort(values[np.isfinite(values)])
    if not known.size:
        return known, known
    rank = np.unique(np.linspace(0, known.size - 1, min(known.size, MAX_STEPS)).round().astype(np.int64))
    x_s, share = known[rank], (rank + 1) / values.size
    return np.append(x_s[0], x_s), np.append(0.0, share)


def _alike(values: Floats) -> list[list[int]]:
    """Columns with the same values, grouped, in order of first appearance."""
    groups: dict[bytes, list[int]] = {}
    for column in range(values.shape[1]):
        groups.setdefault(np.ascontiguousarray(values[:, column]).tobytes(), []).append(column)
    return list(groups.values())


def _label(name: object) -> str:
    """A name as it stands: `$` would start a formula, and matplotlib leaves what begins with an underscore out of legends."""
    text = str(name).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def finish_axes(ax: Axes) -> Axes:
    """A quiet grid, and the legend to the right of the axes where it covers no data."""
    ax.grid(color="0.9", lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    handles, _ = ax.get_legend_handles_labels()
    if handles:
        columns = -(-len(handles) // LEGEND_ROWS)
        ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8, ncols=columns, handlelength=2.6, borderaxespad=0)
    return ax
