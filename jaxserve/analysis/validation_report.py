"""A validation for people: a table on the terminal, and a folder with a Markdown report, JSON, the requests and a figure."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from jaxserve.analysis.plots import COLOURS, DPI
from jaxserve.analysis.validation import PERCENTILES, Validation
from jaxserve.errors import InputError
from jaxserve.units import MS_PER_S

TITLES = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "e2e_s": "end to end",
    "admission_to_first_token_s": "admission to first token",
}
HEADER = ("load", "metric", "requests", "measured mean", "predicted", "MAPE", "mean", *(f"p{p}" for p in PERCENTILES))


def rows(result: Validation) -> list[tuple[str, ...]]:
    """The cells of the table, as text: errors in percent, with sign but for the mean absolute one."""
    out = []
    for load, parts in result.errors.items():
        span = parts["load"]
        name = f"{load} ({span['least']:.0f} to {span['most']:.0f} in the server)"
        for metric, title in TITLES.items():
            if metric not in parts:
                continue
            e = parts[metric]
            scale, unit = (MS_PER_S, "ms") if metric == "tpot_s" else (1.0, "s")
            means = (f"{scale * e[f'{side}_mean_s']:.4g} {unit}" for side in ("measured", "predicted"))
            signed = [e["mean_error_percent"], *(e[f"p{p}_error_percent"] for p in PERCENTILES)]
            out.append((name, title, f"{e['requests']:.0f}", *means, f"{e['mape_percent']:.2f} %", *(f"{s:+.2f} %" for s in signed)))
            name = ""
        if result.energy is not None and load in result.energy:
            e = result.energy[load]
            joules = (f"{e[f'{side}_j']:.5g} J" for side in ("measured", "predicted"))
            title = "energy, total" if load == "all" else "energy, total of the load"
            out.append((name, title, f"{e['requests']:.0f}", *joules, "", f"{e['error_percent']:+.2f} %", *("" for _ in PERCENTILES)))
    return out


def headline(result: Validation) -> str:
    """One line of what was replayed with what."""
    limits = result.limits
    setup = " ".join(result.log.setup.values())
    return (
        f"{Path(result.log.name).name}{f' ({setup})' if setup else ''}: {len(result.log)} requests on {limits['engines']} engine(s), "
        f"{limits['batching']}, max_num_seqs {limits['max_num_seqs']}, max_num_batched_tokens {limits['max_num_batched_tokens']}, "
        f"KV {limits['kv_capacity_tokens']} tokens; coefficients {result.coefficients}"
    )


def table(result: Validation) -> Table:
    """The errors as a table for the terminal."""
    out = Table(title="Error of the replay (predicted against measured)")
    for i, name in enumerate(HEADER):
        out.add_column(name, justify="left" if i < 2 else "right", overflow="fold")
    last = ""
    for row in rows(result):
        if row[0] and last:
            out.add_section()
        last = row[0] or last
        out.add_row(*row)
    return out


def figure(result: Validation) -> Figure:
    """Predicted against measured, a mark a request, TTFT and TPOT; on the dashed line they agree."""
    fig = Figure(figsize=(9.0, 4.2), layout="constrained", dpi=DPI)
    FigureCanvasAgg(fig)
    for ax, metric in zip(fig.subplots(1, 2), ("ttft_s", "tpot_s"), strict=True):
        measured, predicted = result.series[metric]
        use = np.isfinite(measured) & (measured > 0)
        scale, unit = (MS_PER_S, "ms") if metric == "tpot_s" else (1.0, "s")
        for mask, label, colour in ((result.counted, "counted", COLOURS[0]), (~result.counted, "not counted", COLOURS[5])):
            if (mask & use).any():
                ax.plot(scale * measured[mask & use], scale * predicted[mask & use], ".", ms=4, alpha=0.5, color=colour, label=label)
        if use.any():
            both = scale * np.concatenate([measured[use], predicted[use]])
            ends = [float(both.min()), float(both.max())]
            ax.plot(ends, ends, color="0.4", lw=1, ls=(0, (4, 2)), zorder=0)
            if metric == "ttft_s" and ends[0] > 0 and ends[1] > 20 * ends[0]:
                ax.set_xscale("log")
                ax.set_yscale("log")
        ax.set_xlabel(f"measured {TITLES[metric]} ({unit})")
        ax.set_ylabel(f"predicted {TITLES[metric]} ({unit})")
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
        if not result.counted.all():
            ax.legend(frameon=False)
    return fig


def markdown(result: Validation) -> str:
    """The report's text."""
    lines = ["# Replay of a request log", "", headline(result), ""]
    lines += ["Errors are of the predicted value against the measured one, in percent of the latter; MAPE is over requests.", ""]
    lines += [f"| {' | '.join(HEADER)} |", f"|{'---|' * len(HEADER)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows(result)]
    lines += ["", *(f"- {note}" for note in result.notes), "", "![predicted against measured](predicted_vs_measured.png)", ""]
    return "\n".join(lines)


def as_json(result: Validation) -> str:
    """The result as JSON; numbers that do not exist are null."""
    return json.dumps(result.as_dict(), indent=2, default=float)


def write(result: Validation, folder: Path) -> None:
    """`report.md`, `validation.json`, `requests.csv` and `predicted_vs_measured.png` in `folder`."""
    columns: dict[str, object] = {"row": result.log.line, "arrival_s": result.log.arrival_s, "isl": result.log.isl, "osl": result.log.osl}
    columns |= {"in_server": result.load, "counted": result.counted}
    for metric, (measured, predicted) in result.series.items():
        columns |= {f"measured_{metric}": measured, f"predicted_{metric}": predicted}
    if result.log.energy_j is not None:
        columns |= {"measured_energy_j": result.log.energy_j, "predicted_step_energy_j": result.replay.request_j}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.md").write_text(markdown(result), encoding="utf-8")
        (folder / "validation.json").write_text(as_json(result) + "\n", encoding="utf-8")
        pd.DataFrame(columns).to_csv(folder / "requests.csv", index=False)
        figure(result).savefig(folder / "predicted_vs_measured.png")
    except OSError as error:
        raise InputError(f"{error.filename or folder}: cannot write the report ({error.strerror or error}); choose another --out") from None
