"""A scenario under its policies, from files to a folder of results."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.monitoring
import numpy as np
import pandas as pd
import xarray as xr

from jaxserve.analysis.compare import compare
from jaxserve.analysis.dataset import ledger_dataset, summary_dataset
from jaxserve.analysis.metrics import REQUEST_COLUMNS
from jaxserve.analysis.plots import save_figures
from jaxserve.cases import build_case, check_policies, first_sizes
from jaxserve.collect import SOLVE_SCHEMA, EnergyLedger, RequestRows, decision_counts, decision_notes, engine_frame, metrics, solve_table
from jaxserve.engine.simulate import Simulation
from jaxserve.errors import InputError
from jaxserve.policies.code import named_code, source
from jaxserve.policies.registry import resolve_policies
from jaxserve.provenance import inputs, versions
from jaxserve.scenario.compile import Compiled, compile_scenario
from jaxserve.scenario.load import load_scenario, to_toml
from jaxserve.scenario.spec import Scenario
from jaxserve.store import ENGINES, LEDGER, REQUESTS, SOLVES, SUMMARY, Folder, RunWriter, Scratch, read_pieces, write_frame, write_json

if TYPE_CHECKING:
    from jaxserve.hindsight import Hindsight

CHECKPOINT_EVERY_S = 10.0
"""Wall seconds between checkpoints: a killed run loses at most this much work and one chunk."""

Progress = Callable[[str, float], None]
"""Told the policy's label and the share of the horizon that has passed."""


@dataclass(frozen=True)
class Run:
    """The results of one policy, in its folder."""

    label: str
    folder: Path
    summary: dict[str, Any]
    _keep: Scratch | None = field(default=None, repr=False)  # its folder lives as long as it does

    @cached_property
    def requests(self) -> pd.DataFrame:
        """A row a request; times in s, lengths in tokens."""
        return pd.read_parquet(self.folder / REQUESTS)

    @cached_property
    def ledger_frame(self) -> pd.DataFrame:
        """A row per interval and DC."""
        return pd.read_parquet(self.folder / LEDGER)

    @cached_property
    def ledger(self) -> xr.Dataset:
        """Energy and carbon by interval and DC, with units."""
        return ledger_dataset(self.ledger_frame)

    @cached_property
    def solves(self) -> pd.DataFrame:
        """A row a window and scheduler of a policy that optimises; empty for others."""
        path = self.folder / SOLVES
        return pd.read_parquet(path) if path.exists() else pd.DataFrame(columns=SOLVE_SCHEMA.names)

    @cached_property
    def engines(self) -> pd.DataFrame:
        """Seconds of prefill, decode and idling of every engine between the warm-up and the horizon."""
        return pd.read_parquet(self.folder / ENGINES)


@dataclass(frozen=True)
class Results:
    """All policies of one scenario, side by side; the first is the baseline."""

    scenario: Scenario
    folder: Path
    runs: dict[str, Run]
    notes: tuple[str, ...]
    _keep: Scratch | None = field(default=None, repr=False)
    hindsight: "Hindsight | None" = None
    """What no policy can beat, where it was asked for."""

    def __getitem__(self, label: str) -> Run:
        return self.runs[label]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row a policy, savings against the first; `attrs["units"]` has the units."""
        bound_g = self.hindsight.carbon_with_drain_g if self.hindsight else None
        return compare({label: s["metrics"] | s["timing"] | s["decisions"] for label, s in self._summaries()}, bound_g=bound_g)

    @cached_property
    def dataset(self) -> xr.Dataset:
        """The metrics with a dimension `policy` and units."""
        return summary_dataset({label: s["metrics"] | s["decisions"] for label, s in self._summaries()})

    def _summaries(self) -> list[tuple[str, dict[str, Any]]]:
        return [(label, run.summary) for label, run in self.runs.items()]


def run(
    scenario: str | Path | Scenario,
    *,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    resume: bool = False,
    hindsight: bool = False,
    allow_code: bool = False,
    base_dir: Path | None = None,
    progress: Progress | None = None,
) -> Results:
    """Run every policy of a scenario and return the results; with `out`, they stay in that folder.

    `scenario` is the name of a shipped one, a path, or a `Scenario` (its relative paths start at `base_dir`);
    `overrides` are `a.b=c` strings. `hindsight` adds the least carbon that any policy could have caused, and each policy's share of
    the saving that it allows. `allow_code` lets policies run the code that they name, such as `constraints`; its source stays in the
    folder. Raises `InputError` for anything wrong with what was given.
    """
    if isinstance(scenario, Scenario):
        if overrides:
            raise InputError("run: overrides are for a scenario by name or path; change a Scenario itself (model_copy)")
        base = base_dir or Path.cwd()
    else:
        scenario, base = load_scenario(scenario, list(overrides))
    policies = resolve_policies(scenario.policies)
    scenario = scenario.model_copy(update={"policies": policies}).with_absolute_paths(base)
    compiled = compile_scenario(scenario, base)
    compiled = replace(compiled, notes=(*compiled.notes, *check_policies(compiled, policies, allow_code=allow_code)))
    keep = Scratch() if out is None else None
    final = keep.path / "run" if keep else Path(str(out))
    text, code = to_toml(scenario), {path: source(path) for path in named_code(policies)}
    folder = None
    try:
        with Folder.opened(final, text, inputs(compiled, text, code), code, resume=resume) as folder:
            bound = None
            if hindsight:
                from jaxserve.hindsight import hindsight as bound_carbon  # it takes seconds to load cvxpy

                bound = bound_carbon(compiled)
            for policy in policies:
                writer = folder.writer(policy["label"])
                if not writer.whole:
                    _run_policy(compiled, policy, writer, progress or (lambda label, share: None))
            results = _open(scenario, folder.work, compiled.notes, keep, bound)
            _finish(results)
            return _open(scenario, folder.finish(), compiled.notes, keep, bound)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        kept = "make room, then go on with --resume: what is written so far is kept"
        advice = kept if folder else "make room or choose another --out"
        raise InputError(f"{error.filename or final}: cannot write results ({reason}); {advice}") from error


def _open(scenario: Scenario, folder: Path, notes: tuple[str, ...], keep: Scratch | None, bound: "Hindsight | None") -> Results:
    runs = {}
    for policy in scenario.policies:
        label = policy["label"]
        runs[label] = Run(label, folder / label, json.loads((folder / label / SUMMARY).read_text(encoding="utf-8")), keep)
    left = _left_range([run.summary["steps_outside_valid_range"] for run in runs.values()])
    left += _above_board([run.summary["steps_above_board"] for run in runs.values()])
    decided = [f"{label}: {text}" for label, run in runs.items() for text in decision_notes(run.summary["decisions"])]
    possible = [bound.note] if bound else []
    return Results(scenario, folder, runs, (*notes, *possible, *decided, *left), keep, bound)


def _finish(results: Results) -> None:
    counted = [("arrival_s", ">=", results.scenario.counted_from_s)]
    save_figures(
        results.frame,
        {label: pd.read_parquet(run.folder / REQUESTS, columns=["ttft_s"], filters=counted) for label, run in results.runs.items()},
        {label: run.ledger_frame for label, run in results.runs.items()},
        results.folder / "figures",
        slo_ttft_s=results.scenario.slo.ttft_s,
    )
    write_json(
        results.folder / SUMMARY,
        {
            "scenario": results.scenario.name,
            "seed": results.scenario.seed,
            "notes": list(results.notes),
            "versions": versions(),
            "policies": _plain(results.frame.drop(columns="simulated_req_per_wall_s")),
            **({"hindsight": asdict(results.hindsight)} if results.hindsight else {}),
        },
    )


def _plain(frame: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Rows by label, all digits kept, what does not exist as None."""
    return {
        str(label): {str(name): None if pd.isna(value) else getattr(value, "item", lambda v=value: v)() for name, value in row.items()}
        for label, row in frame.astype(object).iterrows()
    }


def _left_range(runs: Sequence[Mapping[str, Sequence[int]]]) -> list[str]:
    """Sentences on the steps, of all runs together, that lie outside what the step models were fitted to."""
    sentences = []
    for phase in ("prefill", "decode"):
        outside, total = (sum(run[phase][i] for run in runs) for i in (0, 1))
        if outside:
            sentences.append(
                f"{outside} of {total} {phase} steps ({outside / total:.2%}) lie outside the range in which their coefficients "
                "were measured (valid_range in scenario.toml)"
            )
    return sentences


def _above_board(runs: Sequence[int]) -> list[str]:
    """A sentence on the steps, of all runs together, whose energy coefficients ask for more than the boards can draw."""
    if not sum(runs):
        return []
    return [f"{sum(runs)} steps ask by their energy coefficients for more than max_w_per_gpu, and are charged that (steps_above_board)"]


_compile_s = [0.0]
"""Seconds that this process has spent compiling, so that the rate told is that of the simulation."""


def _note_compile(event: str, duration_secs: float, **_: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compile_s[0] += duration_secs


jax.monitoring.register_event_duration_secs_listener(_note_compile)


def _run_policy(compiled: Compiled, policy: dict[str, Any], writer: RunWriter, progress: Progress) -> None:
    began, compiled_before = time.perf_counter(), _compile_s[0]
    s = compiled.scenario
    case = build_case(compiled, policy, allow_code=True)  # `run` has asked
    step_windows = compiled.step_windows(case.policy.observes)
    horizon_steps = compiled.horizon_windows // step_windows
    sizes = first_sizes(compiled, case, step_windows)
    warmup_steps = compiled.warmup_windows // step_windows
    simulation = Simulation([case], window_s=s.dispatch.window_s, horizon_steps=horizon_steps, sizes=sizes, warmup_steps=warmup_steps)
    ledger, rows = EnergyLedger(compiled, step_windows), RequestRows(compiled)
    saved = writer.restore()
    if saved is not None:
        simulation.restore(saved)
        ledger.sums, ledger.drain_j, rows.written = saved["ledger"], saved["drain"], int(saved["written"])
    last_checkpoint = time.perf_counter()
    while not simulation.done:
        (advance,) = simulation.advance()
        ledger.add(advance)
        writer.add(REQUESTS, rows.table(advance.finished))
        if advance.told is not None:
            writer.add(SOLVES, solve_table(compiled, advance.told))
        progress(policy["label"], min(1.0, simulation.next_step / horizon_steps))
        if time.perf_counter() - last_checkpoint > CHECKPOINT_EVERY_S:
            writer.checkpoint(simulation.checkpoint() | {"ledger": ledger.sums, "drain": ledger.drain_j, "written": np.array(rows.written)})
            last_checkpoint = time.perf_counter()
    writer.add(REQUESTS, rows.rest())
    wall_s, compile_s = time.perf_counter() - began, _compile_s[0] - compiled_before
    frame, engines = ledger.frame(), engine_frame(compiled, simulation.engine_s())
    writer.join(REQUESTS, rows.schema)
    write_frame(frame, writer.folder / LEDGER)
    write_frame(engines, writer.folder / ENGINES)
    if writer.parts[SOLVES]:
        writer.join(SOLVES, SOLVE_SCHEMA)
    pieces = read_pieces(writer.folder / REQUESTS, list(REQUEST_COLUMNS))
    writer.summarise(
        {
            "scenario": s.name,
            "policy": policy,
            "seed": s.seed,
            "metrics": metrics(compiled, pieces, frame, engines, ledger.drain_j),
            "signal": f"{compiled.grid.signal} carbon intensity ({compiled.grid.basis}), {compiled.grid.source}",
            "counts": compiled.requests.counts | compiled.grid.counts,
            "steps_outside_valid_range": simulation.steps_outside(),
            "steps_above_board": simulation.steps_above_board(),
            "decisions": decision_counts(simulation.fallbacks(), writer.folder / SOLVES, s.counted_from_s),
            "notes": [*compiled.notes, *_left_range([simulation.steps_outside()]), *_above_board([simulation.steps_above_board()])],
            "versions": versions(),
            "device": str(jax.devices()[0].platform),
            "timing": {
                "wall_s": wall_s,
                "compile_s": compile_s,
                "simulated_req_per_wall_s": len(compiled.requests.arrival_s) / max(wall_s - compile_s, 1e-9),
            },
        }
    )
