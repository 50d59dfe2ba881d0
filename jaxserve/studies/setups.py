"""What is measured: models and loads as published, the readings, what else matters, and the study's other set-ups, as groups of runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.errors import InputError
from jaxserve.policies.registry import resolve_policies
from jaxserve.scenario.compile import compile_scenario
from jaxserve.scenario.load import load_scenario, scenario_table
from jaxserve.studies.readings import AS_SHIPPED, readings

BASELINE = "round_robin"
SATURATION = "saturation"
Policy = Mapping[str, Any]


@dataclass(frozen=True)
class Model:
    """One of the study's models and its loads (arXiv 2610.14571, Table II)."""

    scenario: str
    loads: Mapping[str, float]
    """Requests a second over all schedulers."""
    setups: Mapping[str, str]
    """Other set-ups of the study by name: the scenarios that hold them."""


DENSE = {"low": 1200.0, "moderate": 2400.0, "high": 4000.0}
MODELS = {
    "Llama-3.1-8B": Model(
        "study-llama",
        DENSE,
        {
            "TP2": "study-llama-tp2",
            "8 schedulers": "study-llama-8-schedulers",
            "8 DCs": "study-llama-8-dcs",
            "PUE by site": "study-llama-site-pue",
        },
    ),
    "Qwen2.5-7B": Model("study-qwen", DENSE, {}),
    "Mixtral-8x7B": Model(
        "study-mixtral",
        {"low": 800.0, "moderate": 1200.0, "high": 2000.0},
        {
            "PUE by site": "study-mixtral-site-pue",
            "long prompts": "study-mixtral-long",
            "mixed prompts": "study-mixtral-mixed",
        },
    ),
}
STUDIED = (BASELINE, "greedy-0.0", "facility_milp")
"""Those whose sensitivities are looked at."""
READ = (BASELINE, "greedy-0.0", "greedy-0.5", "greedy-0.9", "green_llm", "ilp", "facility_milp")
READ_AT = ("moderate", "high")
"""Policies and loads at which the readings are measured: the study's own, where they differ."""
ONE_SEED = ("moer_cap",)
"""It knows no queue and overfills the cleanest DCs at every load: its backlog takes longer to serve than the run, and one seed shows it."""

WARMUP_S = 15.0
"""Of 200 s a run: engines reach "a stable load within the first 15 s" (V-A)."""
SHORT_SHARE = 0.2
"""Of the horizon: the length of runs of readings and sensitivities, which are set against runs as short, by seed."""
SHORT_SEEDS = 2
"""Seeds of sensitivities and of other set-ups; readings take one."""


@dataclass(frozen=True)
class Variant:
    """One run of a group."""

    load: str
    setting: str
    seed: int
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Group:
    """Runs of one scenario under policies of one name, one after another in one process; the heaviest first."""

    model: str
    part: str  # load, setting, reading, setup or saturation
    scenario: str
    policy: str  # its label
    runs: Sequence[tuple[Policy, Variant]]


def policies_of(scenario: str) -> dict[str, Policy]:
    """The policies of a scenario by label."""
    return {policy["label"]: policy for policy in resolve_policies(load_scenario(scenario)[0].policies)}


def groups(models: Sequence[str], seeds: Sequence[int], horizon_s: float) -> list[Group]:
    """All that is measured of `models`; raises `InputError` for one that is not known."""
    found = []
    for name in dict.fromkeys(models):
        if name not in MODELS:
            raise InputError(f"behaviour: there is no model {name!r}; known are {', '.join(MODELS)}")
        model = MODELS[name]
        short_s = max(1.0, round(SHORT_SHARE * horizon_s))
        policies = policies_of(model.scenario)
        by_load = [v for seed in seeds for v in at_loads(model, model.loads, AS_SHIPPED, seed, horizon_s, {})]
        for label, policy in policies.items():
            mine = [v for v in by_load if label not in ONE_SEED or v.seed == seeds[0]]
            found.append(Group(name, "load", model.scenario, label, _heaviest_first([(policy, v) for v in mine])))
        offered = Variant("high", AS_SHIPPED, 0, {"workload.rate_req_per_s": model.loads["high"]})
        found.append(Group(name, SATURATION, model.scenario, BASELINE, [(policies[BASELINE], offered)]))
        few = seeds[:SHORT_SEEDS]
        for label in STUDIED:
            around = [(policies[label], v) for seed in few for v in _settings(model, seed, short_s, sees=label != BASELINE)]
            found.append(Group(name, "setting", model.scenario, label, _heaviest_first(around)))
        for label in READ:
            read = list(_readings(model, policies[label], seeds[0], short_s))
            found.append(Group(name, "reading", model.scenario, label, _heaviest_first(read)))
        for setup, scenario in model.setups.items():
            other = policies_of(scenario)
            load = next((load for load, rate in model.loads.items() if rate == rate_of(scenario)), "published")
            for label in (BASELINE, "facility_milp"):
                runs = [(other[label], Variant(load, setup, seed, _timing(seed, horizon_s))) for seed in few]
                found.append(Group(name, "setup", scenario, label, runs))
    return found


def rate_of(scenario: str) -> float:
    """Requests a second of a scenario with Poisson arrivals at one rate."""
    return float(scenario_table(scenario)["workload"]["rate_req_per_s"])


def warmup_s(horizon_s: float) -> float:
    """What is not counted of a run: as published, but of a short one not more than a quarter."""
    return min(WARMUP_S, round(horizon_s / 4, 1))


def _timing(seed: int, horizon_s: float) -> dict[str, Any]:
    return {"seed": seed, "horizon_s": horizon_s, "warmup_s": warmup_s(horizon_s)}


def at_loads(
    model: Model, loads: Sequence[str] | Mapping[str, float], setting: str, seed: int, horizon_s: float, values: Mapping[str, Any]
) -> Iterator[Variant]:
    """One run at each of `loads`, with `values` changed."""
    for load in loads:
        own = {**_timing(seed, horizon_s), "workload.rate_req_per_s": model.loads[load], **values}
        yield Variant(load, setting, seed, own)


def _heaviest_first(runs: list[tuple[Policy, Variant]]) -> list[tuple[Policy, Variant]]:
    return sorted(runs, key=lambda run: -run[1].values["workload.rate_req_per_s"])


def _settings(model: Model, seed: int, horizon_s: float, *, sees: bool) -> Iterator[Variant]:
    """What is varied around the study, at the loads at which something about it is published, and at the moderate one.

    A policy that `sees` nothing is left out where nothing else changes for it.
    """
    yield from at_loads(model, model.loads, AS_SHIPPED, seed, horizon_s, {})
    for cv, loads in ((0.0, ["moderate"]), (0.31, model.loads), (0.94, model.loads)):
        grid = {"kind": "constant", "ci_g_per_kwh": spread_ci(model.scenario, cv)}
        yield from at_loads(model, loads, f"CI of CV {cv:g}", seed, horizon_s, {"grid": grid})
    if sees:
        for poll_s in (0.5, 2.0, 5.0):
            yield from at_loads(model, ["moderate"], f"poll {poll_s:g} s", seed, horizon_s, {"provisioner.poll_s": poll_s})
        yield from at_loads(model, ["moderate", "high"], "OSL noise", seed, horizon_s, {"osl_knowledge": {"kind": "noise"}})


def _readings(model: Model, policy: Policy, seed: int, horizon_s: float) -> Iterator[tuple[Policy, Variant]]:
    scenario, _ = load_scenario(model.scenario)
    coefficients = scenario_table(model.scenario)["engine"]["coefficients"]
    for variant in at_loads(model, READ_AT, AS_SHIPPED, seed, horizon_s, {}):
        yield policy, variant
    for reading in readings():
        values = reading.scenario(scenario, coefficients) if reading.concerns(policy["kind"]) else None
        if values is not None:
            for variant in at_loads(model, READ_AT, reading.name, seed, horizon_s, values):
                yield {**policy, **reading.policy}, variant


def spread_ci(scenario: str, cv: float) -> dict[str, float]:
    """CI by zone, g/kWh, of the start of a scenario, raised to the power that gives it a coefficient of variation `cv`; the mean stays."""
    short = {"horizon_s": 1.0, "warmup_s": 0.0, "workload.rate_req_per_s": 1.0}
    loaded, base = load_scenario(scenario, values=short)
    zones = [site.zone for site in loaded.sites]
    ci = np.asarray(compile_scenario(loaded, base).ci(np.zeros(1))[0])

    def spread(power: float) -> np.ndarray:
        raised = ci**power
        return raised * ci.mean() / raised.mean()

    low, high = 0.0, 8.0  # the CV rises with the power
    for _ in range(60):
        power = (low + high) / 2
        low, high = (power, high) if spread(power).std() / ci.mean() < cv else (low, power)
    return {zone: float(value) for zone, value in zip(zones, spread(low), strict=True)}
