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

COLUMNS: dict[str, str] = {
    "saving": "saving vs round_robin",
    "saving_in_horizon": "without the drain",
    "slo_violation": "SLO violated",
    "ttft_violation": "TTFT",
    "tpot_violation": "TPOT",
    "idle_share": "engines idle",
    "fallback": "by fallback",
}


def report(runs: pd.DataFrame, verdicts: pd.DataFrame, command: str, horizon_s: float) -> str:
    """All tables, with the command that made them."""
    seeds = sorted(runs["seed"].unique())
    text = [
        "# How the policies behave at the study's loads",
        f"Made by `{command}`: {horizon_s:g} s of arrivals, seeds {', '.join(map(str, seeds))}; means with 95 % intervals over the seeds "
        "(Student's t), shares in per cent. Savings are against round-robin on the same requests: of all carbon, work left for after the "
        "horizon included, and beside it of the carbon within the horizon alone.",
    ]
    for model, mine in runs.groupby("model", sort=False):
        text.append(f"## {model}")
        loads = _where(mine, part="load")
        sustained = float(loads["saturation_req_per_s"].iloc[0])
        text.append(f"The fleet sustains {sustained:.0f} req/s (round-robin, measured under more load than that).")
        for load in _names(loads, "setting"):
            at_load = _where(loads, setting=load)
            share = float(at_load["of_saturation"].iloc[0])
            text += [f"### {load}, {100 * share:.0f} % of saturation", _table(at_load, "policy", COLUMNS)]
        text += ["### What else matters (moderate load)", _settings(_where(mine, part="setting"))]
    text += ["## Directions", _counts(verdicts), "Where one does not hold:", _against(verdicts)]
    return "\n\n".join(text) + "\n"


def _where(frame: pd.DataFrame, **equal: str) -> pd.DataFrame:
    mask = np.ones(len(frame), bool)
    for column, value in equal.items():
        mask &= (frame[column] == value).to_numpy()
    return pd.DataFrame(frame.loc[mask])


def _names(frame: pd.DataFrame, column: str) -> list[str]:
    """Values of a column in order of first appearance."""
    return [str(name) for name in dict.fromkeys(frame[column].tolist())]


def _cell(values: Sequence[float]) -> str:
    mean, half = interval([100.0 * float(value) for value in values])
    return f"{mean:.1f}" if not math.isfinite(half) else f"{mean:.1f} ± {half:.1f}"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _table(frame: pd.DataFrame, by: str, columns: dict[str, str]) -> str:
    rows = [[str(name), *(_cell(mine[column].tolist()) for column in columns)] for name, mine in frame.groupby(by, sort=False)]
    return _markdown([by, *columns.values()], rows)


def _settings(frame: pd.DataFrame) -> str:
    policies = _names(frame, "policy")
    rows = []
    for name, mine in frame.groupby("setting", sort=False):
        cells = [str(name)]
        for policy in policies:
            one = _where(mine, policy=policy)
            cells.append(f"{_cell(one['saving'].tolist())} / {_cell(one['slo_violation'].tolist())}")
        rows.append(cells)
    return _markdown(["saving / SLO violated", *policies], rows)


def _counts(verdicts: pd.DataFrame) -> str:
    outcomes = ["holds", "no difference", "does not hold"]
    rows = [
        [str(claim), *(str(len(_where(mine, verdict=outcome))) for outcome in outcomes)]
        for claim, mine in verdicts.groupby("claim", sort=False)
    ]
    return _markdown(["expected", *outcomes], rows)


def _against(verdicts: pd.DataFrame) -> str:
    against = _where(verdicts, verdict="does not hold")
    columns = (against[name].tolist() for name in ("claim", "where", "difference", "half_width"))
    rows = [[claim, where, f"{100 * mean:+.1f} ± {100 * half:.1f}"] for claim, where, mean, half in zip(*columns, strict=True)]
    return _markdown(["expected", "where", "difference, points"], rows) if rows else "none."


def figure(runs: pd.DataFrame) -> Figure:
    """Saving against SLO violation: a panel a model, its moderate load, a mark a policy (means over seeds)."""
    loads = _where(runs, part="load")
    models, policies = _names(loads, "model"), _names(loads, "policy")
    fig = blank_figure(4.0 * len(models) + 1.8, 4.2)
    axes = fig.subplots(1, len(models), squeeze=False)[0]
    for ax, model in zip(axes, models, strict=True):
        mine = _where(loads, model=model)
        names = _names(mine, "setting")
        load = names[len(names) // 2]
        for place, policy in enumerate(policies):
            one = _where(mine, policy=policy, setting=load)
            x, y = (100 * np.mean(one[column].to_numpy()) for column in ("slo_violation", "saving"))
            ax.plot([x], [y], ls="", label=policy, **style(place))
        ax.set_title(f"{model}, {load}", fontsize=10)
        violation_axis(ax, _where(mine, setting=load)["slo_violation"].to_numpy())
        finish_axes(ax)
        if ax is not axes[-1] and (legend := ax.get_legend()):
            legend.remove()  # one for all
    axes[0].set_ylabel("carbon saved vs round-robin (%)")
    return fig


def write(runs: pd.DataFrame, verdicts: pd.DataFrame, folder: Path, command: str, horizon_s: float) -> None:
    """`behaviour.md`, `behaviour.csv` (a row a run) and `behaviour.png` in `folder`."""
    save_png(figure(runs), folder / "behaviour.png")
    try:
        runs.to_csv(folder / "behaviour.csv", index=False, float_format="%.6g")
        (folder / "behaviour.md").write_text(report(runs, verdicts, command, horizon_s), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{error.filename or folder}: cannot be written ({error.strerror or error})") from None
