"""The report: a Markdown page with figures, one folder a setup."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from calibration_fit.checks import valid_range
from calibration_fit.holdout import grouped_mape, regions
from calibration_fit.output import against_others
from calibration_fit.results import SetupFit, TableFit

SCALE = {"time_s": (1e3, "ms"), "energy_j": (1.0, "J")}


def write_report(folder: Path, fits: Sequence[SetupFit]) -> Path:
    """Write report.md and its PNG figures for the given setups into a folder that is there; returns the page's path."""
    lines = ["# Calibration report", "", *_summary(fits)]
    for fit in fits:
        stem = re.sub(r"[^a-z0-9._-]+", "-", f"{fit.setup.model}_tp{fit.setup.tp}_{fit.setup.gpu}".lower())
        lines += ["", f"## {fit.setup}"]
        for table, t in fit.tables.items():
            name = f"{stem}_{table}.png"
            _save(_fit_figure(t), folder / name)
            lines += ["", f"### {table} ({t.result.form.name})", "", *_coefficient_lines(t), "", *_words(t), "", f"![{table}]({name})"]
        name = f"{stem}_curves.png"
        _save(_curves_figure(fit), folder / name)
        lines += ["", "### Prefill and decode curves", "", f"![curves]({name})"]
    page = folder / "report.md"
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return page


def _summary(fits: Sequence[SetupFit]) -> list[str]:
    """Errors of all tables; the held-out columns say what was left out together."""
    out = [
        "MAPE in percent. Held out: whole batch sizes, whole lengths, and both together (`grouped`), extrapolation included; `random` "
        "leaves out single rows and is kind, since their neighbours stay. Of a request log, stretches of time are left out (`grouped`).",
        "",
        "| setup | table | form | rows | in sample | grouped | batch sizes | lengths | random rows | one by one |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for fit in fits:
        for table, t in fit.tables.items():
            held = {k: f"{h.mape_all:.2f}" for k, h in t.held.items()}
            grouped = f"{grouped_mape(t.held):.2f}" if t.held else "-"
            cells = [held.get(k, "-") for k in ("batch", "length", "random", "one")]
            name = t.result.form.name
            out.append(f"| {fit.setup} | {table} | {name} | {len(t.result.rows)} | {t.result.mape:.2f} | {grouped} | {' | '.join(cells)} |")
    return out


def _coefficient_lines(t: TableFit) -> list[str]:
    r = t.result
    out = [f"| coefficient | value | {100 * t.intervals.level:.0f} % interval | unit |", "|---|---|---|---|"]
    for j, (name, value) in enumerate(r.coefficients.items()):
        if name not in r.form.used(r.coefficients):
            continue
        interval = "held fixed" if name in r.fixed else f"{t.intervals.low[j]:.4g} to {t.intervals.high[j]:.4g}"
        out.append(f"| {name} | {value:.5g} | {interval} | {r.form.units.get(name, '')} |")
    return out


def _words(t: TableFit) -> list[str]:
    limits = ", ".join(f"{k} {a:g} to {b:g}" for k, (a, b) in valid_range(t.result.rows, t.result.form.table).items())
    out = [f"Valid range: {limits}.", "", *(f"- {s}" for s in t.identifiability.sentences), *(f"- **Warning:** {w}" for w in t.warnings)]
    if len(t.alternatives) > 1:
        out.append(f"- By grouped held-out MAPE: {against_others(t)}.")
    held = next((t.held[k] for k in ("batch", "length", "time", "one", "random") if k in t.held), None)
    if held is not None:
        out += ["", f"Held out by {held.scheme}, by region:", "", "| batch | length | rows | MAPE % |", "|---|---|---|---|"]
        out += [f"| {b} | {n} | {count} | {error:.2f} |" for b, n, count, error in regions(held)]
    return out


def _fit_figure(t: TableFit) -> Figure:
    """Predicted against measured, and relative residuals over batch and over length."""
    r, (scale, unit) = t.result, SCALE[t.result.form.quantity]
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    measured, predicted = r.rows.measured * scale, r.predicted * scale
    ends = [min(measured.min(), predicted.min()), max(measured.max(), predicted.max())]
    axes[0].loglog(ends, ends, color="0.6", lw=1)
    axes[0].loglog(measured, predicted, ".", ms=4)
    for axis in (axes[0].xaxis, axes[0].yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes[0].set(xlabel=f"measured ({unit})", ylabel=f"predicted ({unit})", title=f"{r.form.table}: MAPE {r.mape:.2f} %")
    error = 100 * (predicted / measured - 1)
    for ax, x, name in ((axes[1], r.rows.batch, "batch (requests)"), (axes[2], r.rows.length, "length (tokens)")):
        ax.axhline(0, color="0.6", lw=1)
        ax.semilogx(np.maximum(x, 0.5), error, ".", ms=4)
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set(xlabel=name, ylabel="predicted / measured - 1 (%)", title=f"residuals over {name.split(' ')[0]}")
    return figure


def _curves_figure(fit: SetupFit) -> Figure:
    """Step time, and mean power of a GPU where energy is fitted, over prompt tokens and over batch (the study's Figures 1 and 2)."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    prefill, decode = fit.tables.get("prefill_time"), fit.tables.get("decode_time")
    if prefill is not None:
        limits = valid_range(prefill.result.rows, "prefill_time")
        n = np.geomspace(limits["n_tokens"][0], limits["n_tokens"][1], 200)
        length = np.minimum(n, 1024.0)
        time_s = np.asarray(prefill.result.module(n, n / length, n * length))
        rows = prefill.result.rows
        one = (rows.term_weight.sum(axis=1) == 1) & ~rows.end_to_end
        axes[0, 0].plot(rows.inputs[0, one, 0], rows.measured[one] * 1e3, ".", ms=3, color="0.7", label="measured")
        axes[0, 0].plot(n, time_s * 1e3, label="fit, prompts of 1024")
        energy = fit.tables.get("prefill_energy")
        if energy is not None:
            axes[1, 0].plot(n, np.asarray(energy.result.module(n, n * length)) / time_s / fit.setup.tp)
    if decode is not None:
        limits = valid_range(decode.result.rows, "decode_time")
        batch = np.linspace(limits["batch"][0], limits["batch"][1], 200)
        rows = decode.result.rows
        step = ~rows.end_to_end
        axes[0, 1].plot(rows.batch[step], rows.measured[step] * 1e3, ".", ms=3, color="0.7")
        for context in np.geomspace(max(limits["mean_ctx"][0], 16.0), limits["mean_ctx"][1], 3):
            keep = batch * context <= limits["cached_tokens"][1]
            time_s = np.asarray(decode.result.module(batch[keep], batch[keep] * context))
            axes[0, 1].plot(batch[keep], time_s * 1e3, label=f"fit, context {context:.0f}")
            energy = fit.tables.get("decode_energy")
            if energy is not None:
                power = np.asarray(energy.result.module(batch[keep], batch[keep] * context)) / time_s / fit.setup.tp
                axes[1, 1].plot(batch[keep], power, label=f"context {context:.0f}")
    axes[0, 0].set(xlabel="tokens of the prefill step", ylabel="prefill step (ms)", xscale="log", yscale="log")
    axes[0, 1].set(xlabel="batch (requests)", ylabel="decode step (ms)")
    axes[1, 0].set(xlabel="tokens of the prefill step", ylabel="power of one GPU (W)")
    axes[1, 1].set(xlabel="batch (requests)", ylabel="power of one GPU (W)")
    for ax in axes.flat:
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=8)
        if not ax.lines:
            ax.text(0.5, 0.5, "not measured", ha="center", va="center", transform=ax.transAxes, color="0.5")
    figure.suptitle(str(fit.setup))
    return figure


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=110)
    plt.close(figure)
