"""Published figures beside ours: the difference of each, and which reading explains it."""

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from jaxserve.analysis.directions import interval
from jaxserve.studies.readings import AS_SHIPPED, readings
from jaxserve.studies.setups import BASELINE, MODELS, SATURATION

GROUPS = {"all": list(MODELS), "dense": ["Llama-3.1-8B", "Qwen2.5-7B"]}
POINTS = 5.0
"""A share that is off by more than this many points has to be explained."""
FACTOR = 2.0
"""So has a time or a rate that is off by more than this factor."""
UNEXPLAINED = "unexplained"
STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "max": max,
    "mean": lambda values: math.fsum(values) / len(values),
    "max_abs": lambda values: max(map(abs, values)),
}
"""How one figure is made of several."""
OWN_RUN = ["model", "part", "load", "seed"]


@dataclass(frozen=True)
class Published:
    """One published figure, or a bound on several; `low` and `high` are infinite where it has none."""

    source: str
    models: Sequence[str]
    loads: Sequence[str]
    """Empty where the set-up has a load of its own."""
    setting: str
    policies: Sequence[str]
    minus_policies: Sequence[str]
    minus_setting: str
    statistic: str
    """each, max, mean or max_abs over models, loads and policies."""
    metric: str
    low: float
    high: float
    unit: str
    text: str

    @property
    def shown(self) -> str:
        """What is published, as text."""
        if self.low == self.high:
            return f"{self.low:g}"
        if not math.isfinite(self.low):
            return f"<= {self.high:g}"
        return f">= {self.low:g}" if not math.isfinite(self.high) else f"{self.low:g} to {self.high:g}"

    def off(self, value: float) -> float:
        """How far `value` lies outside: signed, in the unit of the figure."""
        return value - min(max(value, self.low), self.high)

    def distance(self, value: float) -> float:
        """How far outside, over what is still taken as agreement: points of a share, or the logarithm of the factor of a time or rate."""
        off = self.off(value)
        if self.unit in ("%", "points") or off == 0.0:
            return abs(off) / POINTS
        return abs(math.log(max(value, 1e-9) / (value - off))) / math.log(FACTOR)


def published() -> list[Published]:
    """The published figures that these runs can give, from `published.csv`."""
    text = (resources.files("jaxserve.studies") / "published.csv").read_text(encoding="utf-8")
    return [_row(row) for row in csv.DictReader(text.splitlines())]


def _row(row: dict[str, str]) -> Published:
    def names(cell: str) -> list[str]:
        return cell.split(";") if cell else []

    return Published(
        source=row["source"],
        models=GROUPS.get(row["models"]) or names(row["models"]),
        loads=names(row["loads"]),
        setting=row["setting"],
        policies=names(row["policies"]),
        minus_policies=names(row["minus_policies"]),
        minus_setting=row["minus_setting"],
        statistic=row["statistic"],
        metric=row["metric"],
        low=float(row["low"] or -math.inf),
        high=float(row["high"] or math.inf),
        unit=row["unit"],
        text=row["text"],
    )


def with_shares(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs with savings against round-robin, and other shares.

    Round-robin is that of the same setting and seed, or, where the setting leaves it as it is, that as shipped.
    """
    runs = runs.copy()
    carbon = {
        (*key, setting): value
        for *key, setting, policy, value in runs[[*OWN_RUN, "setting", "policy", "carbon_with_drain_g"]].itertuples(index=False, name=None)
        if policy == BASELINE
    }
    own = runs[[*OWN_RUN, "setting"]].itertuples(index=False, name=None)
    base = [carbon.get((*key, setting), carbon.get((*key, AS_SHIPPED), np.nan)) for *key, setting in own]
    runs["saving"] = 1.0 - runs["carbon_with_drain_g"].to_numpy(float) / np.array(base, float)
    runs["fallback"] = (runs["fallback_lowest_carbon"] + runs["fallback_round_robin"]) / runs["requests"]
    runs["batch_share"] = runs["batch_mean"] / runs["batch_capacity"]
    runs["tpot_headroom"] = 1.0 - runs["tpot_mean_s"] / runs["slo_tpot_s"]
    return runs


Place = tuple[str, str, str, str]  # model, part, setting, policy
Lookup = Callable[[str, str | None, str, str, str], dict[int, float]]
"""Values by seed of (model, load, setting, policy, metric)."""


def _by_place(runs: pd.DataFrame) -> dict[Place, list[dict[str, Any]]]:
    found: dict[Place, list[dict[str, Any]]] = {}
    for row in runs.to_dict("records"):
        found.setdefault((row["model"], row["part"], row["setting"], row["policy"]), []).append(row)
    return found


def _lookup(runs: dict[Place, list[dict[str, Any]]], parts: Sequence[str]) -> Lookup:
    """In the first of `parts` that has such runs; a reading that leaves a policy as it is has it as shipped."""

    def find(model: str, load: str | None, setting: str, policy: str, metric: str) -> dict[int, float]:
        column = "carbon_with_drain_g" if metric == "carbon_change" else metric
        places = [(part, setting or AS_SHIPPED) for part in parts]
        for part, name in [*places, ("reading", AS_SHIPPED)] if "reading" in parts else places:
            mine = {row["seed"]: row[column] for row in runs.get((model, part, name, policy), []) if load in (None, row["load"])}
            if mine:
                return mine
        return {}

    return find


def _cells(p: Published, find: Lookup, setting: str) -> Iterator[tuple[str, list[float]]]:
    """What it is about, and its values by seed in the unit of the figure: one for `each`, else one over all."""
    scale = 100.0 if p.unit in ("%", "points") else 1.0
    cells: dict[str, dict[int, float]] = {}
    for model, load, policy in product(p.models, p.loads or [None], p.policies):
        mine = find(model, load, setting, policy, p.metric)
        others = [find(model, load, setting, other, p.metric) for other in p.minus_policies]
        if p.minus_setting:
            others = [find(model, load, p.minus_setting, policy, p.metric)]
        for i, other in enumerate(others or [None]):
            cell = f"{model}{', ' + load if load else ''}, {policy}{f' {i}' if len(others) > 1 else ''}"
            if other is None:
                cells[cell] = {seed: scale * value for seed, value in mine.items()}
            elif p.metric == "carbon_change":
                cells[cell] = {seed: scale * (mine[seed] / other[seed] - 1.0) for seed in mine if seed in other}
            else:
                cells[cell] = {seed: scale * (mine[seed] - other[seed]) for seed in mine if seed in other}
    cells = {cell: values for cell, values in cells.items() if values}
    if p.statistic == "each":
        yield from ((cell, list(values.values())) for cell, values in cells.items())
    elif cells:
        seeds = [seed for seed in next(iter(cells.values())) if all(seed in values for values in cells.values())]
        models = dict.fromkeys(cell.split(",")[0] for cell in cells)
        name = f"{p.statistic} over {', '.join(models)}; {', '.join(p.loads)}; {', '.join(p.policies)}"
        yield name, [STATISTICS[p.statistic]([values[seed] for values in cells.values()]) for seed in seeds]


def compare(runs: pd.DataFrame) -> pd.DataFrame:
    """A row for each published figure and what it is about: published, ours with its 95 % interval, the difference and its explanation.

    `runs` come from `with_shares`. A difference of over `POINTS` points, or of a time or rate by over `FACTOR`, is explained by the
    readings under which it is less than half, in order of what is left of it. Readings are measured in shorter runs; what is not off in
    such a run as shipped is explained by the length.
    """
    by_place = _by_place(runs)
    main, saturated = _lookup(by_place, ["load", "setup", "setting"]), _lookup(by_place, [SATURATION])
    short = _lookup(by_place, ["setting"])  # what a setting is set against has to be of its own length
    rows = []
    for p in published():
        find = short if p.minus_setting and p.metric != "carbon_change" else saturated if p.metric == "saturation_per_engine" else main
        for name, values in _cells(p, find, p.setting):
            mean, half = interval(values)
            beyond = p.distance(mean) > 1.0
            less = f" less {', '.join(p.minus_policies)}" if p.minus_policies else f" less {p.minus_setting}" if p.minus_setting else ""
            row = {
                "source": p.source,
                "figure": f"{p.metric}{less}: {name}{f', {p.setting}' if p.setting else ''}",
                "unit": p.unit,
                "published": p.shown,
                "ours": mean,
                "half_width": half if len(values) > 2 else math.nan,
                "difference": p.off(mean),
                "beyond": beyond,
            }
            rows.append(row | {"explained_by": _explanation(p, name, by_place) if beyond else ""})
    return pd.DataFrame(rows)


def _explanation(p: Published, name: str, runs: dict[Place, list[dict[str, Any]]]) -> str:
    if p.setting or p.metric == "saturation_per_engine":
        return f"{UNEXPLAINED} (readings are measured as shipped)"
    find = _lookup(runs, ["reading"])

    def mean(setting: str) -> float | None:
        return next((math.fsum(values) / len(values) for cell, values in _cells(p, find, setting) if cell == name), None)

    shipped = mean(AS_SHIPPED)
    if shipped is None:
        return f"{UNEXPLAINED} (no readings were measured)"
    if p.distance(shipped) <= 1.0:
        return f"the length of the run ({shipped:.3g} in one as short as those of the readings)"
    under = {r.name: value for r in readings() if (value := mean(r.name)) is not None}
    near = sorted((p.distance(value), r) for r, value in under.items() if p.distance(value) < p.distance(shipped) / 2)
    return ", ".join(f"{r} ({under[r]:.3g})" for _, r in near) or UNEXPLAINED
