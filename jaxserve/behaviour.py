"""How the policies behave at the study's loads: `jaxserve behaviour --out DIR` writes the tables, the directions that hold, and a figure.

Every figure is a mean over seeds with its 95 % interval (Student's t); differences are paired by seed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd

from jaxserve.analysis.directions import Direction, judge
from jaxserve.errors import InputError
from jaxserve.run import run
from jaxserve.scenario.compile import compile_scenario
from jaxserve.scenario.load import load_scenario
from jaxserve.sweep import run_variants

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Model:
    """One of the study's models and its loads."""

    scenario: str
    loads: tuple[float, float, float]  # req/s over all schedulers: low, moderate, high


MODELS = {
    "Llama-3.1-8B": Model("study-llama", (1200.0, 2400.0, 4000.0)),
    "Qwen2.5-7B": Model("study-qwen", (1200.0, 2400.0, 4000.0)),
    "Mixtral-8x7B": Model("study-mixtral", (300.0, 600.0, 950.0)),
}
"""Published loads of the dense models. Those of Mixtral are not known: our choice is the shares of what the fleet sustains of Llama."""

ALPHAS = (0.0, 0.25, 0.5, 0.9)
GREEDY = [f'{{kind="greedy", alpha={alpha}}}' for alpha in ALPHAS]
# One compiled call a group: its policies differ in numbers alone.
GROUPS: tuple[Sequence[str], ...] = (
    ['{kind="round_robin"}'],
    GREEDY,
    ['{kind="moer_soft", w=0.5}'],
    ['{kind="moer_cap"}'],
    ['{kind="freesh"}', '{kind="green_llm_lp"}'],
    ['{kind="green_llm"}'],
    ['{kind="ilp"}'],
    ['{kind="iterative_ilp"}'],
    [f'{{kind="facility_milp", variant="{variant}"}}' for variant in ("default", "f_const", "c_full")],
)
BASELINE = "round_robin"
SATURATED_S = 20.0
"""Seconds of arrivals that saturation is measured over; queues are long after a few."""
OVERLOADED = 0.8
"""Finishing less than this share of what arrives, a fleet is saturated."""
STUDIED: tuple[Sequence[str], ...] = (['{kind="round_robin"}'], GREEDY[:1], ['{kind="ilp"}'])
"""Those whose sensitivities are looked at."""


def sensitivities(scenario: str) -> dict[str, list[str]]:
    """Name -> overrides of what is varied around the scenario."""
    spread = {f"CI spread x{factor:g}": [_squeezed(scenario, factor)] for factor in (0.0, 0.5)}
    return {
        "as shipped": [],
        "poll 0.2 s": ["provisioner.poll_s=0.2"],
        "poll 5 s": ["provisioner.poll_s=5.0"],
        "ledger off": ['dispatch.ledger="off"'],
        "forwarding window": ['dispatch.forwarding="window"'],
        "TTFT budget 5 s": ["slo.ttft_s=5.0"],
        "OSL noise": ['osl_knowledge={kind="noise"}'],
        **spread,
        "8 schedulers": [_split_schedulers(scenario)],
        "engine limit 256": ["engine.max_num_seqs=256"],
    }


APART = ("8 schedulers", "engine limit 256")
"""Variants of another shape, which need a compiled call of their own."""


def _squeezed(scenario: str, factor: float) -> str:
    """The grid at the start of the scenario, its differences from the mean times `factor`, constant."""
    loaded, base = load_scenario(scenario, ["horizon_s=1.0", "workload.rate_req_per_s=10.0"])
    compiled = compile_scenario(loaded, base)
    ci = dict(zip((site.zone for site in loaded.sites), compiled.ci(np.zeros(1))[0], strict=True))
    mean = float(np.mean(list(ci.values())))
    cells = ", ".join(f'"{zone}" = {mean + factor * (float(value) - mean)}' for zone, value in ci.items())
    return f'grid={{kind="constant", ci_g_per_kwh={{{cells}}}}}'


def _split_schedulers(scenario: str) -> str:
    """Every scheduler as two with half of its DCs each."""
    loaded, _ = load_scenario(scenario)
    tables = []
    for s in loaded.schedulers:
        half = len(s.sites) // 2
        for i, sites in enumerate((s.sites[:half], s.sites[half:])):
            names = ", ".join(f'"{name}"' for name in sites)
            tables.append(f'{{name="{s.name}{i}", region="{s.region}", sites=[{names}]}}')
    return f"schedulers=[{', '.join(tables)}]"


def measure(
    scenario: str,
    groups: Iterable[Sequence[str]],
    settings: dict[str, list[str]],
    seeds: Sequence[int],
    horizon_s: float,
    progress: Progress,
) -> pd.DataFrame:
    """A row per policy, setting and seed: saving against round-robin under the same setting and seed, violations, idle share."""
    rows = []
    for policies in groups:
        points = [(policy, name, seed) for policy in policies for name in settings for seed in seeds]
        progress(f"{scenario}: {', '.join(policies)} ({len(points)} runs)")
        variants = [[f"horizon_s={horizon_s}", f"seed={seed}", *settings[name], f"policies=[{policy}]"] for policy, name, seed in points]
        for (policy, name, seed), metrics in zip(points, run_variants(scenario, variants), strict=True):
            rows.append({"policy": _label(policy), "setting": name, "seed": seed} | {m: metrics[m] for m in TAKEN})
    frame = pd.DataFrame(rows)
    for saving, carbon in (("saving", "carbon_with_drain_g"), ("saving_in_horizon", "carbon_g")):
        base = frame[frame["policy"] == BASELINE].set_index(["setting", "seed"])[carbon]
        frame[saving] = 1.0 - frame[carbon].to_numpy() / base.loc[list(zip(frame["setting"], frame["seed"], strict=True))].to_numpy()
    frame["fallback"] = (frame["fallback_lowest_carbon"] + frame["fallback_round_robin"]) / frame["requests"]
    return frame


TAKEN = (
    *("requests", "carbon_g", "carbon_with_drain_g", "slo_violation", "ttft_violation", "tpot_violation", "idle_share"),
    *("ttft_p50_s", "ttft_p99_s", "fallback_lowest_carbon", "fallback_round_robin"),
)


def _label(policy: str) -> str:
    """`{kind="greedy", alpha=0.5}` -> greedy-0.5."""
    parts = [part.partition("=")[2].strip().strip('"') for part in policy.strip("{}").split(",")]
    return "-".join(part for part in parts if part != "default")


def load_directions(model: str, loads: Sequence[str], policies: Iterable[str]) -> list[Direction]:
    """What is expected over alphas and loads."""
    found = []
    for load in loads:
        for low, high in pairwise(ALPHAS):
            where = f"{model}, {load}, alpha {low:g} against {high:g}"
            pair = (f"greedy-{low}", load), (f"greedy-{high}", load)
            found.append(Direction("saving rises as alpha falls", where, "saving", *pair))
            found.append(Direction("violations rise as alpha falls", where, "slo_violation", *pair))
        for capped in ("ilp", "iterative_ilp", "facility_milp"):
            where = f"{model}, {load}, {capped} against greedy-0.0"
            found.append(Direction("capacity-aware violates less", where, "slo_violation", ("greedy-0.0", load), (capped, load)))
    for policy in policies:
        if policy != BASELINE:
            for lighter, heavier in pairwise(loads):
                where = f"{model}, {policy}, {lighter} against {heavier}"
                found.append(Direction("saving shrinks with load", where, "saving", (policy, lighter), (policy, heavier)))
    return found


def setting_directions(model: str) -> list[Direction]:
    """What is expected of the sensitivities."""
    found = []
    shipped = "as shipped"
    for policy in ("greedy-0.0", "ilp"):
        for wide, narrow in ((shipped, "CI spread x0.5"), ("CI spread x0.5", "CI spread x0")):
            where = f"{model}, {policy}, {wide} against {narrow}"
            found.append(Direction("saving grows with the spread of CI", where, "saving", (policy, wide), (policy, narrow)))
        polls = ("poll 0.2 s", shipped, "poll 5 s")
        for fresh, stale in pairwise(polls):
            where = f"{model}, {policy}, {stale} against {fresh}"
            found.append(Direction("staler polls violate more", where, "slo_violation", (policy, stale), (policy, fresh)))
        where = f"{model}, {policy}"
        found.append(Direction("8 schedulers violate more than 4", where, "slo_violation", (policy, "8 schedulers"), (policy, shipped)))
    return found


def saturation_req_per_s(scenario: str, rate_req_per_s: float, horizon_s: float) -> float:
    """Requests a second that the fleet finishes under round-robin when more are offered, in the second half of a run.

    `rate_req_per_s` is where to begin: as long as nearly all that is offered gets done, twice as much is.
    """
    while True:
        overrides = [f"workload.rate_req_per_s={rate_req_per_s}", f"horizon_s={horizon_s}", f"policies=[{GROUPS[0][0]}]"]
        finish_s = run(scenario, overrides=overrides)[BASELINE].requests["finish_s"]
        sustained = finish_s.between(horizon_s / 2, horizon_s).sum() / (horizon_s / 2)
        if sustained < OVERLOADED * rate_req_per_s:
            return float(sustained)
        rate_req_per_s *= 2.0


def behave(
    models: Sequence[str], seeds: Sequence[int], horizon_s: float, progress: Progress
) -> Iterator[tuple[pd.DataFrame, pd.DataFrame]]:
    """After each model, all measurements (a row a run) and directions so far: a model takes minutes, and what is done must not be lost."""
    models = list(dict.fromkeys(models))
    for name in models:
        if name not in MODELS:
            raise InputError(f"behaviour: there is no model {name!r}; known are {', '.join(MODELS)}")
    frames, verdicts = [], []
    for name in models:
        model = MODELS[name]
        loads = {f"{load:g} req/s": [f"workload.rate_req_per_s={load}"] for load in model.loads}
        by_load = measure(model.scenario, GROUPS, loads, seeds, horizon_s, progress)
        verdicts += [judge(by_load, d) for d in load_directions(name, list(loads), dict.fromkeys(by_load["policy"].tolist()))]
        progress(f"{model.scenario}: what the fleet sustains")
        sustained = saturation_req_per_s(model.scenario, model.loads[-1], SATURATED_S)
        around = sensitivities(model.scenario)
        shapes = [{k: v for k, v in around.items() if k not in APART}, *({k: around[k]} for k in APART)]
        settings = pd.concat([measure(model.scenario, STUDIED, shape, seeds, horizon_s, progress) for shape in shapes])
        verdicts += [judge(settings, d) for d in setting_directions(name)]
        share = {label: load / sustained for label, load in zip(loads, model.loads, strict=True)}
        of_saturation = [share[label] for label in by_load["setting"]]
        by_load = by_load.assign(model=name, part="load", saturation_req_per_s=sustained, of_saturation=of_saturation)
        frames += [by_load, settings.assign(model=name, part="setting")]
        yield pd.concat(frames, ignore_index=True), pd.DataFrame(verdicts)
