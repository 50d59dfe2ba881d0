"""Runs groups of runs, and keeps every row as soon as its group is done: what is stopped goes on where it was."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

import jaxserve
from jaxserve.errors import InputError
from jaxserve.scenario.load import load_scenario, to_toml
from jaxserve.store import LOCK, held
from jaxserve.studies.processes import spread
from jaxserve.studies.saturation import saturation
from jaxserve.studies.setups import SATURATION, Group, Policy, Variant
from jaxserve.sweep import run_each

Progress = Callable[[str], None]
Row = dict[str, Any]

RUNS = "runs.csv"
TAKEN = (
    *("requests", "carbon_with_drain_g", "carbon_g", "slo_violation", "ttft_violation", "tpot_violation", "idle_share", "batch_mean"),
    *("ttft_p50_s", "ttft_p99_s", "tpot_mean_s", "queue_wait_mean_s", "slo_tpot_s", "fallback_lowest_carbon", "fallback_round_robin"),
    *("horizon_s", "saturation_per_engine", "stay_s"),
)
NAMED = ("key", "model", "part", "load", "setting", "policy", "seed", "batch_capacity", "engines")


def measure(groups: Sequence[Group], folder: Path, jobs: int, progress: Progress) -> pd.DataFrame:
    """A row a run of all groups; those already in the folder's `runs.csv`, made by the same version of the same inputs, are not run again.

    Raises `InputError` where the folder cannot be written or a run cannot be made.
    """
    path = folder / RUNS
    wanted = [keys(group) for group in groups]
    _kept(path)  # refuses a folder of something else before anything is written there
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with held(folder / LOCK):
            kept = _kept(path)
            left = [_without(group, mine, kept) for group, mine in zip(groups, wanted, strict=True)]
            left = [group for group in left if group.runs]
            began = time.perf_counter()
            for done, (group, rows) in enumerate(spread(run_group, left, jobs), start=1):
                kept |= {row["key"]: row for row in rows}
                _write(path, kept)
                name = f"{group.model}, {group.part}, {group.scenario}, {group.policy}"
                progress(f"{done} of {len(left)}, {time.perf_counter() - began:.0f} s: {name} ({len(rows)} runs)")
    except OSError as error:
        raise InputError(f"{error.filename or folder}: cannot be written ({error.strerror or error})") from None
    return pd.DataFrame([kept[key] for mine in wanted for key in mine])


def begun(folder: Path) -> bool:
    """Whether `folder` holds runs to go on with."""
    try:
        return (folder / RUNS).is_file()
    except OSError:
        return False  # a name that cannot be one


def run_group(group: Group) -> list[Row]:
    """The rows of a group."""
    scenario, _ = load_scenario(group.scenario)
    engines = sum(site.nodes * site.gpus_per_node for site in scenario.sites) // scenario.coefficients.setup.tp
    rows = []
    for key, (_, variant), metrics in zip(keys(group), group.runs, _metrics(group), strict=True):
        names = (key, group.model, group.part, variant.load, variant.setting, group.policy, variant.seed)
        told = dict(zip(NAMED, (*names, scenario.dispatch.batch_capacity, engines), strict=True))
        rows.append(told | {name: metrics.get(name) for name in TAKEN})
    return rows


def _metrics(group: Group) -> Iterable[Mapping[str, Any]]:
    if group.part != SATURATION:
        return run_each(group.scenario, [(policy, variant.values) for policy, variant in group.runs])
    found = (saturation(group.scenario, variant.values["workload.rate_req_per_s"]) for _, variant in group.runs)
    return ({"saturation_per_engine": s.req_per_s_per_engine, "stay_s": s.stay_s, "horizon_s": s.horizon_s} for s in found)


def keys(group: Group) -> list[str]:
    """What each run hangs on, hashed: the version, the scenario with its coefficients, the policy and the values."""
    scenario = to_toml(load_scenario(group.scenario)[0])
    return [_key(scenario, group, policy, variant) for policy, variant in group.runs]


def _key(scenario: str, group: Group, policy: Policy, variant: Variant) -> str:
    names = (jaxserve.__version__, scenario, group.part, variant.load, variant.setting, dict(policy), dict(variant.values))
    return hashlib.sha256(json.dumps(names, sort_keys=True, default=str).encode()).hexdigest()[:20]


def _without(group: Group, mine: Sequence[str], kept: dict[str, Row]) -> Group:
    return replace(group, runs=[run for key, run in zip(mine, group.runs, strict=True) if key not in kept])


def _kept(path: Path) -> dict[str, Row]:
    if not begun(path.parent):
        return {}
    try:
        frame = pd.read_csv(path, keep_default_na=False, na_values=[""])
        if list(frame.columns) != [*NAMED, *TAKEN]:
            raise ValueError("its columns are others")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: is not what this command has written ({error}); choose another --out") from None
    return {row["key"]: row for row in frame.to_dict("records")}


def _write(path: Path, kept: dict[str, Row]) -> None:
    """All rows, in one move: whoever stops the command finds a whole file."""
    beside = path.with_suffix(".part")
    pd.DataFrame(list(kept.values())).to_csv(beside, index=False)
    beside.replace(path)
