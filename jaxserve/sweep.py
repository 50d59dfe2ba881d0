"""Many variants of one scenario as one `vmap`ped call, and one dataset with named axes."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import xarray as xr

from jaxserve.analysis.dataset import summary_dataset
from jaxserve.cases import build_case
from jaxserve.collect import EnergyLedger, RequestRows, engine_frame, metrics
from jaxserve.engine.hosted import AbstractHostPolicy
from jaxserve.engine.lane import Case
from jaxserve.engine.model import Sizes
from jaxserve.engine.simulate import Simulation
from jaxserve.errors import InputError
from jaxserve.policies.registry import resolve_policies
from jaxserve.scenario.compile import CHUNK_BYTES, Compiled, compile_scenario
from jaxserve.scenario.load import load_scenario


def parse_axes(texts: Sequence[str]) -> dict[str, list[Any]]:
    """`a.b=v1,v2` each, as field paths and their values, read as in TOML where they can be."""
    axes: dict[str, list[Any]] = {}
    for text in texts:
        path, equals, values = text.partition("=")
        if not equals or not path or not values:
            raise InputError(f"--axis {text}: write a.b=value,value")
        if path in axes:
            raise InputError(f"--axis {text}: {path} has an axis already; give all its values in one")
        axes[path] = [_value(part) for part in values.split(",")]
    return axes


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text.strip()


def sweep(scenario: str | Path, axes: Mapping[str, Sequence[Any]], *, overrides: Sequence[str] = (), policy: int = 0) -> xr.Dataset:
    """Run the grid of all combinations of `axes` (dotted field path -> values) under one policy of the scenario.

    All variants must share shapes: rates, seeds, alphas, carbon intensity, PUE, RTT, polling period, `max_num_seqs`, switches may vary; the
    number of sites, nodes, GPUs, schedulers, window, ledger interval, horizon and the kind of policy may not.
    Returns a dataset with a dimension per axis (the last part of its path, or the whole path where two would clash)
    and the metrics of `jaxserve.analysis.fields`; `attrs["notes"]` has, line by line, what holds for all variants, and the axes that made
    no difference. Raises `InputError` for a variant that cannot run or does not fit the others.
    """
    if not axes:
        raise InputError("sweep: give at least one axis, such as seed = [0, 1, 2]")
    axes = {path: [value.item() if isinstance(value, np.generic) else value for value in values] for path, values in axes.items()}
    for path, values in axes.items():
        if not values or len({_label(value) for value in values}) < len(values):
            raise InputError(f"axis {path}: {'a value appears twice' if values else 'there are no values'}; give each value once")
    points = list(itertools.product(*axes.values()))
    settings = [[_setting(path, value) for path, value in zip(axes, point, strict=True)] for point in points]
    names = [", ".join(map(str, point)) for point in points]
    compiled, cases = _compile_all(scenario, [[*overrides, *setting] for setting in settings], policy)
    grid = _as_grid(_run_all(compiled, cases, names), axes)
    common = [note for note in compiled[0].notes if all(note in c.notes for c in compiled)]
    grid.attrs["notes"] = "\n".join([*common, *_without_effect(grid, policy)])
    return grid


def _without_effect(grid: xr.Dataset, policy: int) -> list[str]:
    """Sentences on axes along which no metric changes: who takes their values for samples takes intervals of zero for knowledge."""
    notes = []
    for name, n in grid.sizes.items():
        first = grid.isel({name: [0] * n}).assign_coords({name: grid[name]})
        if n > 1 and grid.equals(first):
            path = str(grid[name].attrs["field"])
            why = "nothing in these runs depends on it"
            if path.startswith("policies.") and not path.startswith(f"policies.{policy}."):
                why = f"policy number {policy} is run, not that one"
            elif path == "seed":
                why = "nothing in these runs is drawn at random"
            notes.append(f"axis {path}: its {n} values gave the same metrics; {why}")
    return notes


def _setting(path: str, value: Any) -> str:
    return f"{path}={json.dumps(value, default=str, ensure_ascii=False)}"


def _label(value: Any) -> Any:
    """What stands for a value on its axis: itself, or its text where it is a list or a table."""
    return json.dumps(value, default=str, ensure_ascii=False) if isinstance(value, list | dict) else value


def _compile_all(scenario: str | Path, variants: Sequence[Sequence[str]], policy: int) -> tuple[list[Compiled], list[Case]]:
    compiled, cases = [], []
    for overrides in variants:
        loaded, base = load_scenario(scenario, list(overrides))
        tables = loaded.policies
        if not 0 <= policy < len(tables):
            raise InputError(f"policy: there is no policy number {policy}; the scenario has {len(tables)}, counted from 0")
        compiled.append(compile_scenario(loaded, base))
        cases.append(build_case(compiled[-1], resolve_policies([tables[policy]], first=policy)[0]))
    return compiled, cases


def _run_all(compiled: list[Compiled], cases: list[Case], names: list[str]) -> list[dict[str, Any]]:
    first = compiled[0]
    shape = _shape(first, cases[0])
    for c, case, name in zip(compiled, cases, names, strict=True):
        if isinstance(case.policy, AbstractHostPolicy):
            raise InputError('sweep: a policy with a solver on the host cannot run as one call; set solver = "device"')
        if _shape(c, case) != shape:
            what = ", ".join(key for key, value in _shape(c, case).items() if value != shape[key])
            raise InputError(f"sweep: the variant {name} differs from the first in {what}; only variants of one shape run as one call")
    step_windows = int(np.gcd.reduce([c.step_windows(case.policy.observes) for c, case in zip(compiled, cases, strict=True)]))
    return _simulate(compiled, cases, _common([c.sizes(step_windows) for c in compiled], first.fleet.n_engines))[0]


def run_each(scenario: str | Path, runs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Iterator[dict[str, int | float | None]]:
    """The metrics of variants of one scenario, each given by its policy and its values (dotted path -> value), one after another.

    Beside those of `sweep`, `batch_mean`: requests in the batch of an engine, a mean over engines and over the time that counts.
    Compiled shapes are handed on, so put the heaviest first; on a CPU this costs less than one call of many lanes, in which every lane
    waits for the slowest. Variants may differ in more than those of one call may; what differs in shape is compiled for itself.
    """
    shapes: dict[int, Sizes] = {}
    for policy, values in runs:
        loaded, base = load_scenario(scenario, values=values)
        compiled = compile_scenario(loaded, base)
        case = build_case(compiled, resolve_policies([dict(policy)])[0])
        step_windows = compiled.step_windows(case.policy.observes)
        sizes = compiled.sizes(step_windows)
        if before := shapes.get(step_windows):
            sizes = replace(_common([before, sizes], compiled.fleet.n_engines), steps=before.steps)
        (found,), shapes[step_windows] = _simulate([compiled], [case], sizes)
        yield found


def _simulate(compiled: list[Compiled], cases: list[Case], sizes: Sizes) -> tuple[list[dict[str, Any]], Sizes]:
    """The metrics of each case, and the sizes that sufficed."""
    first = compiled[0]
    window_s = first.scenario.dispatch.window_s
    warmup_steps, horizon_steps = (windows // sizes.step_windows for windows in (first.warmup_windows, first.horizon_windows))
    simulation = Simulation(cases, window_s=window_s, horizon_steps=horizon_steps, sizes=sizes, warmup_steps=warmup_steps)
    ledgers, rows = [EnergyLedger(c, sizes.step_windows) for c in compiled], [RequestRows(c) for c in compiled]
    frames: list[list[pd.DataFrame]] = [[] for _ in compiled]
    while not simulation.done:
        for i, advance in enumerate(simulation.advance()):
            ledgers[i].add(advance)
            frames[i].append(rows[i].table(advance.finished).to_pandas())
    summaries = []
    for i, c in enumerate(compiled):
        pieces = [*frames[i], rows[i].rest().to_pandas()]
        engines = engine_frame(c, simulation.engine_s(i))
        lowest, dealt = simulation.fallbacks(i)
        found = metrics(c, pieces, ledgers[i].frame(), engines, ledgers[i].drain_j)
        told = {"fallback_lowest_carbon": lowest, "fallback_round_robin": dealt, "batch_mean": _batch_mean(c, pieces)}
        summaries.append(found | told)
    return summaries, simulation.sizes


def _batch_mean(compiled: Compiled, pieces: Iterable[pd.DataFrame]) -> float:
    """Requests between admission and last token, a mean over engines and over the time that counts."""
    s = compiled.scenario
    busy_s = 0.0
    for piece in pieces:
        finish_s, admit_s = (piece[name].to_numpy(dtype=np.float64) for name in ("finish_s", "admit_s"))
        inside = np.minimum(finish_s, s.horizon_s) - np.maximum(admit_s, s.counted_from_s)
        busy_s += float(np.nansum(np.maximum(inside, 0.0)))  # a rejected request was in no batch
    return busy_s / (compiled.fleet.n_engines * (s.horizon_s - s.counted_from_s))


def _shape(c: Compiled, case: Case) -> dict[str, Any]:
    return {
        "sites": c.fleet.n_dc,
        "engines": c.fleet.n_engines,
        "engines a site": np.asarray(c.fleet.dc_members).shape,
        "schedulers": c.fleet.n_schedulers,
        "engine.token_count": c.fleet.padded,
        "dispatch.window_s": c.scenario.dispatch.window_s,
        "ledger_s": c.ledger_windows,
        "dispatch.forwarding": c.fleet.forward_owner,
        "warmup_s": c.warmup_windows,
        "horizon_s": c.horizon_windows,
        "the form of engine.coefficients": str(jax.tree.map(np.shape, (c.fleet.prefill_time, c.fleet.decode_time))),
        "the kind of policy": str(jax.tree.structure(case.policy)),
    }


def _common(sizes: list[Sizes], n_engines: int) -> Sizes:
    most = {name: max(getattr(s, name) for s in sizes) for name in ("stay", "requests", "step_requests", "transit", "passes")}
    steps = max(8, min(sizes[0].steps, int(8 * CHUNK_BYTES // (len(sizes) * most["passes"] * n_engines * 8))))
    return replace(sizes[0], **most, steps=steps)


def _as_grid(summaries: list[dict[str, Any]], axes: Mapping[str, Sequence[Any]]) -> xr.Dataset:
    short = [path.rsplit(".", 1)[-1] for path in axes]
    names = [last if short.count(last) == 1 else path for last, path in zip(short, axes, strict=True)]
    flat = summary_dataset({str(i): summary for i, summary in enumerate(summaries)})
    index = pd.MultiIndex.from_product([[_label(value) for value in values] for values in axes.values()], names=names)
    coordinates = xr.Coordinates.from_pandas_multiindex(index, "policy")
    grid = flat.drop_vars("policy").assign_coords(coordinates).unstack("policy")
    for name, path in zip(names, axes, strict=True):
        grid[name].attrs["field"] = path
    return grid


def save_dataset(dataset: xr.Dataset, path: Path) -> None:
    """Write the dataset as NetCDF; raises `InputError` where that is not possible."""
    try:
        dataset.to_netcdf(path, engine="h5netcdf")
    except OSError as error:
        raise InputError(f"{path}: cannot write the dataset: {error.strerror or error}") from error
