"""The behaviour of policies as Markdown tables and a figure."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from jaxserve.analysis.directions import interval
from jaxserve.analysis.plots import blank_figure, finish_axes, save_png, style, violation_axis
from jaxserve.errors import InputError
from jaxserve.studies.comparison import FACTOR, POINTS, compare, published, with_shares
from jaxserve.studies.readings import QUESTIONS
from jaxserve.studies.setups import MODELS, ONE_SEED, READ_AT, SATURATION, SHORT_SHARE, warmup_s
from jaxserve.studies.tables import markdown, names, where

COLUMNS: dict[str, str] = {
    "saving": "saving vs round_robin",
    "slo_violation": "SLO violated",
    "ttft_violation": "TTFT",
    "tpot_violation": "TPOT",
    "idle_share": "engines idle",
    "batch_share": "batch, of capacity",
    "fallback": "by fallback",
}


def report(runs: pd.DataFrame, compared: pd.DataFrame, verdicts: pd.DataFrame, command: str, horizon_s: float) -> str:
    """All tables, with the command that made them; `runs` with their shares, `compared` with what was published."""
    seeds = sorted(where(runs, part="load")["seed"].unique())
    text = [
        "# How the policies behave at the study's loads",
        f"Made by `{command}`: {horizon_s:g} s of arrivals, the first {warmup_s(horizon_s):g} not counted, seeds "
        f"{', '.join(map(str, seeds))}; means with 95 % intervals over three and more seeds (Student's t), shares in per "
        "cent. "
        f"{', '.join(ONE_SEED)}: one seed. Savings are against round-robin on the same requests, of all carbon that they cause, work left "
        "for after the horizon included.",
    ]
    for model, mine in runs.groupby("model", sort=False):
        text.append(f"## {model}")
        (sustained,) = where(mine, part=SATURATION).to_dict("records")
        fleet = sustained["engines"] * sustained["saturation_per_engine"]
        text.append(
            f"An engine sustains {sustained['saturation_per_engine']:.2f} req/s, the fleet {fleet:.0f}: measured under more load, "
            f"over {sustained['horizon_s']:.0f} s, with requests in a batch for {sustained['stay_s']:.1f} s."
        )
        loads = where(mine, part="load")
        for load in MODELS[str(model)].loads:
            rate = MODELS[str(model)].loads[load]
            text.append(f"### {load}: {rate:g} req/s, {100 * rate / fleet:.0f} % of saturation")
            text.append(_table(where(loads, load=load), "policy", COLUMNS))
        text += [
            "### What else matters",
            f"Runs of {SHORT_SHARE:.0%} of the length, saving / SLO violated.",
            _settings(where(mine, part="setting")),
        ]
        if len(setups := where(mine, part="setup")):
            text += ["### The study's other set-ups", _table(setups.assign(at=setups["setting"] + ", " + setups["policy"]), "at", COLUMNS)]
    text += ["## Published and measured", COMPARED, _compared(compared)]
    text += [
        "## What the text leaves open",
        _questions(),
        f"Saving / SLO violated under each reading, one seed, {SHORT_SHARE:.0%} of the length:",
    ]
    for model, mine in where(runs, part="reading").groupby("model", sort=False):
        for load in READ_AT:
            text += [f"### {model}, {load} load", _readings(str(model), load, where(mine, load=load))]
    text += ["## Directions", _counts(verdicts), "Where one does not hold:", _against(verdicts)]
    return "\n\n".join(text) + "\n"


COMPARED = (
    f"Figures of arXiv 2610.14571. A difference of over {POINTS:g} points, or by over a factor of {FACTOR:g} in a time or rate, is "
    "explained by the readings under which it is less than half (in brackets: ours under that reading alone), or said to be unexplained."
)


def _compared(compared: pd.DataFrame) -> str:
    rows = [
        [
            str(row["source"]),
            str(row["figure"]),
            f"{row['published']} {row['unit']}",
            f"{row['ours']:.3g}" + (f" ± {row['half_width']:.2g}" if math.isfinite(row["half_width"]) else ""),
            f"{row['difference']:+.3g}" if row["difference"] else "0",
            str(row["explained_by"]),
        ]
        for row in compared.to_dict("records")
    ]
    return markdown(["where", "figure", "published", "ours", "difference", "explained by"], rows, text=(0, 1, 5))


def _questions() -> str:
    rows = [[q.name, q.default, q.evidence, "; ".join(reading.name for reading in q.others)] for q in QUESTIONS]
    return markdown(["open", "default here", "words behind it", "other readings"], rows, text=(0, 1, 2, 3))


def _readings(model: str, load: str, frame: pd.DataFrame) -> str:
    """A row a reading, a column a policy; first what is published for them."""
    policies = names(frame, "policy")
    stated = [f"{_stated(model, load, policy, 'saving')} / {_stated(model, load, policy, 'slo_violation')}" for policy in policies]
    rows = [["published", *stated]]
    for name in names(frame, "setting"):
        cells = []
        for policy in policies:
            one = where(frame, policy=policy, setting=name)
            cells.append(f"{_cell(one['saving'].tolist())} / {_cell(one['slo_violation'].tolist())}" if len(one) else "as shipped")
        rows.append([name, *cells])
    return markdown(["saving / SLO violated", *policies], rows)


def _stated(model: str, load: str, policy: str, metric: str) -> str:
    """What is published of one policy at one load, as set up in Table II."""
    found = [
        p.shown if p.statistic == "each" else f"up to {p.shown}"
        for p in published()
        if p.metric == metric and not (p.setting or p.minus_policies) and p.statistic in ("each", "max")
        if model in p.models and p.loads == [load] and policy in p.policies
    ]
    return ", ".join(dict.fromkeys(found)) or "–"


def _cell(values: Sequence[float]) -> str:
    mean, half = interval([100.0 * float(value) for value in values])
    return f"{mean:.1f}" if len(values) < 3 else f"{mean:.1f} ± {half:.1f}"  # of two, Student's t says next to nothing


def _table(frame: pd.DataFrame, by: str, columns: dict[str, str]) -> str:
    rows = [[str(name), *(_cell(mine[column].tolist()) for column in columns)] for name, mine in frame.groupby(by, sort=False)]
    return markdown([by, *columns.values()], rows)


def _settings(frame: pd.DataFrame) -> str:
    """A row a setting and load, a column a policy."""
    policies = names(frame, "policy")
    rows = []
    for name in names(frame, "setting"):
        for load in reversed(names(where(frame, setting=name), "load")):  # measured from the heaviest down
            cells = []
            for policy in policies:
                one = where(frame, setting=name, load=load, policy=policy)
                cells.append(f"{_cell(one['saving'].tolist())} / {_cell(one['slo_violation'].tolist())}" if len(one) else "as shipped")
            rows.append([f"{name}, {load} load", *cells])
    return markdown(["saving / SLO violated", *policies], rows)


def _counts(verdicts: pd.DataFrame) -> str:
    outcomes = ["holds", "no difference", "does not hold"]
    rows = [
        [str(claim), *(str(len(where(mine, verdict=outcome))) for outcome in outcomes)]
        for claim, mine in verdicts.groupby("claim", sort=False)
    ]
    return markdown(["expected", *outcomes], rows)


def _against(verdicts: pd.DataFrame) -> str:
    against = where(verdicts, verdict="does not hold")
    columns = (against[name].tolist() for name in ("claim", "where", "difference", "half_width"))
    rows = [[claim, where, f"{100 * mean:+.1f} ± {100 * half:.1f}"] for claim, where, mean, half in zip(*columns, strict=True)]
    return markdown(["expected", "where", "difference, points"], rows) if rows else "none."


def figure(runs: pd.DataFrame) -> Figure:
    """Saving against SLO violation: a panel a model, its moderate load, a mark a policy (means over seeds)."""
    loads = where(runs, part="load", load="moderate")
    models, policies = names(loads, "model"), names(loads, "policy")
    fig = blank_figure(4.0 * len(models) + 1.8, 4.2)
    axes = fig.subplots(1, len(models), squeeze=False)[0]
    for ax, model in zip(axes, models, strict=True):
        mine = where(loads, model=model)
        for place, policy in enumerate(policies):
            one = where(mine, policy=policy)
            x, y = (100 * np.mean(one[column].to_numpy()) for column in ("slo_violation", "saving"))
            ax.plot([x], [y], ls="", label=policy, **style(place))
        ax.set_title(f"{model}, {MODELS[model].loads['moderate']:g} req/s", fontsize=10)
        violation_axis(ax, mine["slo_violation"].to_numpy())
        finish_axes(ax)
        if ax is not axes[-1] and (legend := ax.get_legend()):
            legend.remove()  # one for all
    axes[0].set_ylabel("carbon saved vs round-robin (%)")
    return fig


def write(runs: pd.DataFrame, verdicts: pd.DataFrame, folder: Path, command: str, horizon_s: float) -> None:
    """`behaviour.md`, `published.csv` (a row a published figure, with ours) and `behaviour.png` in `folder`, beside the runs."""
    runs = with_shares(runs)
    compared = compare(runs)
    save_png(figure(runs), folder / "behaviour.png")
    try:
        compared.to_csv(folder / "published.csv", index=False, float_format="%.6g")
        (folder / "behaviour.md").write_text(report(runs, compared, verdicts, command, horizon_s), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{error.filename or folder}: cannot be written ({error.strerror or error})") from None
