"""What schedulers know between polls, and what it is worth: `jaxserve knowledge --out DIR`.

Two policies over loads, polls and numbers of schedulers, each under four ways to know (SEMANTICS.md, "What a scheduler knows between
polls"): savings and violations side by side, and which way is best where.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxserve.analysis.plots import blank_figure, finish_axes, save_png, style, violation_axis
from jaxserve.errors import InputError
from jaxserve.scenario.load import load_scenario
from jaxserve.studies.comparison import with_shares
from jaxserve.studies.measure import Progress, measure
from jaxserve.studies.readings import AS_SHIPPED
from jaxserve.studies.setups import BASELINE, MODELS, Group, Model, Policy, Variant, at_loads, policies_of, warmup_s
from jaxserve.studies.tables import markdown, names, where
from jaxserve.studies.unlike import WORLDS, as_trace

KNOWN = {
    "unknown, snapshot": {"dispatch.peers": "unknown", "dispatch.view": "snapshot"},
    "alike, snapshot": {"dispatch.peers": "alike", "dispatch.view": "snapshot"},
    "alike, aged": {"dispatch.peers": "alike", "dispatch.view": "aged"},
    "observed, aged": {"dispatch.peers": "observed", "dispatch.view": "aged"},
}
PLAIN = "unknown, snapshot"
POLICIES = ("greedy-0.0", "ilp")
POLLS_S = (0.5, 1.0, 2.0, 5.0, 10.0)
LOW_POLLS_S = (1.0, 5.0)
"""At the low load, where little is at stake."""
UNLIKE_POLLS_S = (1.0, 5.0)
SCHEDULERS = (4, 8)
HORIZON_S = 60.0
PART = "knowledge"
PLACE = ["model", "schedulers", "load", "policy", "known", "poll"]
WITHIN = ((2.0, 0.01, 0.97), (5.0, 0.02, 0.90))
"""For polls of up to so many seconds: most violations, and least share of the saving that the same policy has with `PLAIN`."""


def groups(models: Sequence[str], seeds: Sequence[int], horizon_s: float, folder: Path) -> Iterator[Group]:
    """Runs by model, policy and number of schedulers, and where schedulers are unlike, whose traces go to `folder`.

    Raises `InputError` for a model that is not known.
    """
    for name in dict.fromkeys(models):
        if name not in MODELS:
            raise InputError(f"knowledge: there is no model {name!r}; known are {', '.join(MODELS)}")
        model = MODELS[name]
        policies = policies_of(model.scenario)
        base = [v for seed in seeds for v in _variants(model, seed, horizon_s, {AS_SHIPPED: {}})]
        yield Group(name, PART, model.scenario, BASELINE, [(policies[BASELINE], v) for v in base])
        for label in POLICIES:
            for schedulers in SCHEDULERS:
                runs: list[tuple[Policy, Variant]] = []
                for seed in seeds:
                    for poll_s in POLLS_S:
                        loads = None if poll_s in LOW_POLLS_S else ("moderate", "high")
                        settings = {
                            _setting(schedulers, poll_s, known): {"provisioner.poll_s": poll_s, **_topology(model, schedulers), **values}
                            for known, values in KNOWN.items()
                        }
                        runs += [(policies[label], v) for v in _variants(model, seed, horizon_s, settings, loads)]
                yield Group(name, PART, model.scenario, label, sorted(runs, key=lambda run: -run[1].values["workload.rate_req_per_s"]))
        worlds = [variant for seed in seeds for variant in _unlike(model, seed, horizon_s, folder)]
        for label in (BASELINE, *POLICIES):
            mine = [(policies[label], v) for v in worlds if (v.setting == AS_SHIPPED) == (label == BASELINE)]
            yield Group(name, PART, model.scenario, label, mine)


def _unlike(model: Model, seed: int, horizon_s: float, folder: Path) -> Iterator[Variant]:
    """At high load, the scenario's own schedulers, in worlds that stand in the place of loads."""
    few = len(load_scenario(model.scenario)[0].schedulers)
    (variant,) = at_loads(model, ["high"], AS_SHIPPED, seed, horizon_s, {})
    for world in WORLDS:
        workload = as_trace(world, model.scenario, variant.values, folder)
        values = {name: value for name, value in variant.values.items() if not name.startswith("workload.")} | {"workload": workload}
        yield Variant(world.name, AS_SHIPPED, seed, values)
        for poll_s, (known, how) in product(UNLIKE_POLLS_S, KNOWN.items()):
            yield Variant(world.name, _setting(few, poll_s, known), seed, {**values, "provisioner.poll_s": poll_s, **how})


def _setting(schedulers: int, poll_s: float, known: str) -> str:
    return f"{schedulers} schedulers | {poll_s:g} s | {known}"


def _topology(model: Model, schedulers: int) -> dict[str, Any]:
    """The scenario's own schedulers, or each as two of half its DCs."""
    own = load_scenario(model.scenario)[0].schedulers
    if schedulers == len(own):
        return {}
    halves = [(s, part) for s in own for part in (s.sites[: len(s.sites) // 2], s.sites[len(s.sites) // 2 :])]
    tables = [{"name": f"{s.name}-{i % 2 + 1}", "region": s.region, "sites": sites} for i, (s, sites) in enumerate(halves)]
    return {"schedulers": tables}


def _variants(
    model: Model, seed: int, horizon_s: float, settings: dict[str, dict[str, Any]], loads: Sequence[str] | None = None
) -> Iterator[Variant]:
    for setting, values in settings.items():
        yield from at_loads(model, loads or model.loads, setting, seed, horizon_s, values)


def study(
    models: Sequence[str], seeds: Sequence[int], horizon_s: float, *, out: Path, jobs: int, command: str, progress: Progress
) -> pd.DataFrame:
    """Measure `models` and write `knowledge.md` and `knowledge.png` to `out`; returns `means`. Goes on from what `out` holds.

    Raises `InputError`.
    """
    runs = means(with_shares(measure(list(groups(models, seeds, horizon_s, out / "worlds")), out, jobs, progress)))
    save_png(figure(runs), out / "knowledge.png")
    try:
        (out / "knowledge.md").write_text(report(runs, command, horizon_s, len(seeds)), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{error.filename or out}: cannot be written ({error.strerror or error})") from None
    return runs


def means(runs: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds of runs `with_shares`, a row for each of PLACE."""
    values: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for row in runs.to_dict("records"):
        if row["policy"] != BASELINE:
            schedulers, poll, known = row["setting"].split(" | ")
            place = (row["model"], schedulers, row["load"], row["policy"], known, poll)
            values.setdefault(place, []).append((row["saving"], row["slo_violation"]))
    return pd.DataFrame([(*place, *np.mean(pairs, axis=0)) for place, pairs in values.items()], columns=[*PLACE, "saving", "slo_violation"])


def report(runs: pd.DataFrame, command: str, horizon_s: float, seeds: int) -> str:
    """The tables, from `means` over so many seeds."""
    polls = [f"{poll_s:g} s" for poll_s in POLLS_S]
    text = [
        "# What schedulers know between polls, and what it is worth",
        f"Made by `{command}`: {horizon_s:g} s of arrivals, the first {warmup_s(horizon_s):g} not counted, {seeds} seed(s). In per cent: "
        "carbon saved against round-robin / requests that violate the SLO. The readings are those of the study scenarios. "
        "Where a world stands in the place of a load, the load is high and the schedulers are unlike.",
        "## What holds everywhere",
        _held(runs),
    ]
    for model, schedulers in product(names(runs, "model"), names(runs, "schedulers")):
        mine, rows = where(runs, model=model, schedulers=schedulers), []
        loads = [*MODELS[model].loads, *(world.name for world in WORLDS)]
        for load, policy, known in product(loads, names(mine, "policy"), names(mine, "known")):
            cells = where(mine, load=load, policy=policy, known=known).to_dict("records")
            by_poll = {row["poll"]: f"{100 * row['saving']:.1f} / {100 * row['slo_violation']:.2f}" for row in cells}
            if by_poll:
                rows.append([load, policy, known, *(by_poll.get(poll, "") for poll in polls)])
        text += [f"## {model}, {schedulers}", markdown(["load", "policy", "peers, view", *polls], rows, text=(0, 1, 2))]
    return "\n\n".join(text) + "\n"


def _held(runs: pd.DataFrame) -> str:
    """For each policy and way to know: worst violation and least share of the plain way's saving, at moderate and high load."""
    heavy = [row for row in runs.to_dict("records") if row["load"] in ("moderate", "high")]
    world = ("model", "schedulers", "load", "policy", "poll")
    plain = {tuple(row[name] for name in world): row["saving"] for row in heavy if row["known"] == PLAIN}
    rows, least_s = [], 0.0
    for poll_s, violation, share in WITHIN:
        polls = {f"{p:g} s" for p in POLLS_S if least_s < p <= poll_s}
        for policy, known in product(names(runs, "policy"), names(runs, "known")):
            mine = [row for row in heavy if (row["policy"], row["known"]) == (policy, known) and row["poll"] in polls]
            ratios = [row["saving"] / plain[tuple(row[name] for name in world)] for row in mine]
            inside = sum(row["slo_violation"] < violation and ratio >= share for row, ratio in zip(mine, ratios, strict=True))
            if mine:
                worst = 100 * max(row["slo_violation"] for row in mine)
                told = [policy, known, f"{inside} of {len(mine)}", f"{worst:.2f} %", f"{100 * min(ratios):.0f} %"]
                rows.append([f"over {least_s:g} to {poll_s:g} s", f"< {100 * violation:g} %, >= {100 * share:g} %", *told])
        least_s = poll_s
    head = ["polls", "asked: violated, of plain saving", "policy", "peers, view", "worlds within", "worst violated", "least of plain"]
    intro = f"Moderate and high load of all models, with {SCHEDULERS[0]} and {SCHEDULERS[1]} schedulers; plain is {PLAIN}."
    return f"{intro}\n\n{markdown(head, rows, text=(0, 1, 2, 3))}"


def figure(runs: pd.DataFrame) -> Figure:
    """Saving against violations, a panel a model at high load: a line a policy and way to know, over the polls."""
    models = names(runs, "model")
    fig = blank_figure(4.2 * len(models) + 2.4, 4.4)
    axes = fig.subplots(1, len(models), squeeze=False)[0]
    for ax, model in zip(axes, models, strict=True):
        _panel(where(runs, model=model, load="high", schedulers=f"{SCHEDULERS[0]} schedulers"), ax)
        ax.set_title(f"{model}, {MODELS[model].loads['high']:g} req/s, polls 0.5 to 10 s", fontsize=10)
        if ax is not axes[-1] and (legend := ax.get_legend()):
            legend.remove()  # one for all
    axes[0].set_ylabel("carbon saved vs round-robin (%)")
    return fig


def _panel(runs: pd.DataFrame, ax: Axes) -> Axes:
    for place, (policy, known) in enumerate(product(names(runs, "policy"), names(runs, "known"))):
        mine = sorted(where(runs, policy=policy, known=known).to_dict("records"), key=lambda row: float(row["poll"].split()[0]))
        x, y = ([100 * row[name] for row in mine] for name in ("slo_violation", "saving"))
        mark = style(place)
        ax.plot(x, y, lw=0.8, color=mark["mec"], label=f"{policy}: {known}", **mark)
    violation_axis(ax, runs["slo_violation"].to_numpy())
    return finish_axes(ax)
