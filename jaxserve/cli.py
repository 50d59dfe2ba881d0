"""The command line. Wrong input is one sentence on stderr and exit code 2, never a traceback."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxserve.errors import InputError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

LONGEST_LINE = 800
"""Characters of an error: a name that is repeated in it may be of any length."""

INTERRUPTED = 130
"""Exit code of what Ctrl-C ended."""

ScenarioArgument = Annotated[str, typer.Argument(help="A shipped scenario (see `jaxserve list`) or a .toml file.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a field, e.g. workload.rate_req_per_s=40; repeat at will.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of a table.")]


@app.command()
def run(
    scenario: ScenarioArgument,
    overrides: SetOption = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", metavar="KIND", help="Run these in place of the scenario's, the first as baseline: KIND or {kind=..., ...}."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; default runs/SCENARIO-TIME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished run of --out.")] = False,
    hindsight: Annotated[bool, typer.Option("--hindsight", help="Also find the least carbon that any policy could have caused.")] = False,
    allow_code: Annotated[bool, typer.Option("--allow-code", help="Run the code that policies name, such as constraints.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a scenario under its policies and compare them."""
    from jaxserve.analysis.compare import table
    from jaxserve.running import run as run_scenario

    if resume and out is None:
        raise InputError("--resume needs the --out of the run to go on with")
    out = out or Path("runs") / f"{Path(scenario).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        with _progress() as progress:
            results = run_scenario(
                scenario,
                overrides=[*(overrides or []), *_policies(policies or [])],
                out=out,
                resume=resume,
                hindsight=hindsight,
                allow_code=allow_code,
                progress=progress,
            )
    except KeyboardInterrupt:
        print("jaxserve: interrupted; what is written so far is kept, go on with --resume", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print((results.folder / "summary.json").read_text(encoding="utf-8"), end="")
        return
    console = _console(120)
    console.print(table(results.frame))
    _tell(console, results.notes)
    console.print(f"Results: {results.folder}", highlight=False)


@app.command()
def sweep(
    scenario: ScenarioArgument,
    axes: Annotated[list[str], typer.Option("--axis", metavar="A.B=V1,V2", help="Vary a field over values; repeat for a grid.")],
    overrides: SetOption = None,
    policy: Annotated[int, typer.Option(help="Which of the scenario's policies, counted from 0.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the dataset to this NetCDF file.")] = None,
) -> None:
    """Run many variants of a scenario as one call on the device."""
    from jaxserve.outputs import check_free
    from jaxserve.sweep import parse_axes, save_dataset
    from jaxserve.sweep import sweep as run_sweep

    if out is not None:
        check_free(out)
    dataset = run_sweep(scenario, parse_axes(axes), overrides=overrides or [], policy=policy)
    shown = ["carbon_with_drain_g", "slo_attainment", "ttft_p99_s", "tpot_p99_s", "idle_share"]
    console = _console(120)
    console.print(dataset[shown].to_dataframe().to_string(float_format=lambda v: f"{v:.4g}"), highlight=False)
    _tell(console, dataset.attrs["notes"].splitlines())
    if out is not None:
        save_dataset(dataset, out)


MeasuredModels = Annotated[list[str] | None, typer.Option("--model", help="Llama-3.1-8B, Qwen2.5-7B or Mixtral-8x7B; default: all.")]
Seeds = Annotated[int, typer.Option(min=1, max=10, help="How many seeds, from 0 on.")]
Horizon = Annotated[float, typer.Option("--horizon", min=1.0, max=86400.0, help="Seconds of arrivals in each run.")]
Jobs = Annotated[int | None, typer.Option(min=1, max=256, help="Processes; default: one a core.")]


@app.command()
def behaviour(
    out: Annotated[Path, typer.Option(help="Folder for behaviour.md, its tables and its figure; a begun one is gone on with.")],
    models: MeasuredModels = None,
    seeds: Seeds = 5,
    horizon_s: Horizon = 200.0,
    jobs: Jobs = None,
) -> None:
    """Measure all policies at the study's loads, what they are sensitive to and how the text can be read, beside what was published."""
    from jaxserve.studies.behaviour import behave

    _measure("behaviour", behave, out, models, seeds, horizon_s, jobs)


@app.command()
def knowledge(
    out: Annotated[Path, typer.Option(help="Folder for knowledge.md and its figure; a begun one is gone on with.")],
    models: MeasuredModels = None,
    seeds: Seeds = 1,
    horizon_s: Horizon = 60.0,
    jobs: Jobs = None,
) -> None:
    """Measure what schedulers' knowledge of each other and of the time since a poll is worth, over loads, polls and schedulers."""
    from jaxserve.studies.knowledge import study

    _measure("knowledge", study, out, models, seeds, horizon_s, jobs)


def _measure(
    name: str, study: Callable[..., Any], out: Path, models: list[str] | None, seeds: int, horizon_s: float, jobs: int | None
) -> None:
    """A study of many runs, which goes on from what `out` holds."""
    from jaxserve.outputs import check_free
    from jaxserve.studies.measure import begun
    from jaxserve.studies.setups import MODELS

    if not begun(out):
        check_free(out, folder=True)
    options = [*(f"--model {model}" for model in models or []), f"--seeds {seeds} --horizon {horizon_s:g}"]
    try:
        study(
            models or list(MODELS),
            range(seeds),
            horizon_s,
            out=out,
            jobs=jobs or os.cpu_count() or 1,
            command=" ".join([f"jaxserve {name}", *options]),
            progress=lambda text: print(text, file=sys.stderr),
        )
    except KeyboardInterrupt:
        print("jaxserve: interrupted; what is measured so far is kept, the same command goes on with it", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    print(f"{name.capitalize()}: {out}")


@app.command()
def check(scenario: ScenarioArgument, overrides: SetOption = None) -> None:
    """Read a scenario with its trace and grid, and say what a run would do, without running it."""
    from jaxserve.cases import check_policies
    from jaxserve.policies.code import named_code, without_code
    from jaxserve.policies.registry import resolve_policies
    from jaxserve.scenario.compile import compile_scenario
    from jaxserve.scenario.load import load_scenario
    from jaxserve.scenario.overview import overview

    loaded, base = load_scenario(scenario, overrides)
    policies = resolve_policies(loaded.policies)
    labels = [policy["label"] for policy in policies]
    compiled = compile_scenario(loaded, base)
    notes = [*compiled.notes, *check_policies(compiled, [without_code(policy) for policy in policies])]
    notes += [f"{path} is code that a policy names: not looked at here, and run only with --allow-code" for path in named_code(policies)]
    r = compiled.requests
    console = _console(120)

    def tell(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    tell(f"{loaded.name}: {compiled.fleet.n_engines} engines in {compiled.fleet.n_dc} DCs, {len(loaded.schedulers)} schedulers")
    n, rejected = len(r.arrival_s), len(r.arrival_s) - len(compiled.accepted)
    tell(f"{n} requests in {loaded.horizon_s:g} s ({n / loaded.horizon_s:.4g} a second), {rejected} to be rejected")
    tell(f"mean ISL {r.isl.mean():.1f}, mean OSL {r.osl.mean():.1f} tokens")
    tell(f"KV cache of an engine: {int(compiled.fleet.kv_capacity)} tokens; policies: {', '.join(labels)}")
    tell(overview(compiled))
    _tell(console, notes)


@app.command()
def validate(
    log: Annotated[
        Path,
        typer.Argument(
            help="CSV: arrival_s, isl, osl, ttft_s, tpot_s; perhaps queue_wait_s, engine, energy_j. "
            "Or JSON of vLLM's bench serve (--save-detailed) or SGLang's (--output-details)."
        ),
    ],
    coefficients: Annotated[str, typer.Option(help="A shipped set (see `jaxserve list`) or a coefficients file.")],
    where: Annotated[list[str] | None, typer.Option(metavar="COLUMN=VALUE", help="Keep rows of one setup; repeat at will.")] = None,
    engines: Annotated[int | None, typer.Option(help="Deal requests to N engines in turn; default: as logged, or one.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Batch capacity; default: as the log shows, or 256.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Token budget of a prefill step; default 8192.")] = None,
    kv_capacity_tokens: Annotated[int | None, typer.Option(help="KV cache; default: as the log shows, or never short.")] = None,
    batching: Annotated[str, typer.Option(help="prefill_first or study.")] = "prefill_first",
    ttft_from: Annotated[str, typer.Option(help="What the log's TTFT counts from: arrival, queued or admitted.")] = "arrival",
    invalid_rows: Annotated[str, typer.Option(help="What becomes of rows with fewer than one token: error or drop.")] = "error",
    count_from: Annotated[float, typer.Option(metavar="S", help="Count only requests from S seconds after the first on.")] = 0.0,
    as_json: JsonOption = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the report, the figure and the requests.")] = None,
) -> None:
    """Replay a real request log with all decisions fixed, and report the error of TTFT, TPOT and energy by load."""
    from jaxserve.analysis import validation_report as report
    from jaxserve.outputs import check_free
    from jaxserve.validate import validate as replay_log

    if out is not None:
        check_free(out, folder=True)

    result = replay_log(
        log,
        coefficients,
        engines=engines,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_capacity_tokens=kv_capacity_tokens,
        batching=batching,
        ttft_from=ttft_from,
        invalid_rows=invalid_rows,
        where=where or [],
        count_from_s=count_from,
    )
    if out is not None:
        report.write(result, out)
    if as_json:
        print(report.as_json(result))
        return
    console = _console(150)
    console.print(report.headline(result), highlight=False)
    console.print(report.table(result))
    _tell(console, result.notes)
    if out is not None:
        console.print(f"Report: {out}", highlight=False)


@app.command(name="osl-train")
def osl_train(
    trace: Annotated[Path, typer.Argument(help="A trace as for a scenario, with columns for model and application or without.")],
    out: Annotated[Path, typer.Option(help="Write the predictor to this file.")],
    where: Annotated[list[str] | None, typer.Option(metavar="COLUMN=VALUE", help="Keep one model or application; repeat at will.")] = None,
    time_unit: Annotated[str | None, typer.Option(help="Of times that are numbers: s, ms, us or ns; default: as in a scenario.")] = None,
    invalid_rows: Annotated[str, typer.Option(help="What becomes of rows with fewer than one token: error or drop.")] = "error",
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of the first weights and the order of learning.")] = 0,
) -> None:
    """Train a predictor of output lengths for schedulers (`osl_knowledge` of a scenario), and say how good it is on later requests."""
    from jaxserve.osl.files import save
    from jaxserve.osl.report import lines
    from jaxserve.osl.train import train
    from jaxserve.outputs import check_free
    from jaxserve.perf.request_log import parse_where
    from jaxserve.scenario.osl_knowledge import training_requests

    check_free(out)
    if invalid_rows not in ("error", "drop"):
        raise InputError(f"--invalid-rows {invalid_rows!r}: must be error or drop")
    if time_unit not in (None, "s", "ms", "us", "ns"):
        raise InputError(f"--time-unit {time_unit!r}: must be s, ms, us or ns")
    requests, notes = training_requests(trace, time_unit=time_unit, invalid_rows=invalid_rows, where=parse_where(where or []))
    predictor = train(requests, seed=seed, source=trace.name)
    save(predictor, out)
    console = _console(120)
    for line in lines(predictor):
        console.print(line, highlight=False, markup=False)
    _tell(console, notes)
    console.print(f"Predictor: {out}", highlight=False)


@app.command(name="list")
def list_shipped() -> None:
    """The scenarios, coefficients and policies that come with the package."""
    from jaxserve.perf.coefficients import shipped_names
    from jaxserve.policies.registry import REGISTRY
    from jaxserve.scenario.load import load_scenario, shipped_scenarios

    for name in shipped_scenarios():
        print(f"scenario      {name}: {load_scenario(name)[0].description}")
    for name in shipped_names():
        print(f"coefficients  {name}")
    for name, (parameters, _) in REGISTRY.items():
        fields = ", ".join(f"{n}={f.default}" for n, f in parameters.model_fields.items() if n not in ("kind", "label"))
        print(f"policy        {name}({fields}): {(parameters.__doc__ or '').strip()}")


def _policies(texts: Sequence[str]) -> list[str]:
    """`--policy` options as the override that they stand for."""
    tables = [text if text.lstrip().startswith("{") else f'{{kind="{text}"}}' for text in texts]
    return [f"policies=[{', '.join(tables)}]"] if tables else []


def _console(width: int) -> Console:
    """The terminal, or a page of `width` columns where there is none: a pipe has no width of its own."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def _tell(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        console.print(f"- {note}", style="bold" if note.startswith("warning: ") else "dim", highlight=False, markup=False)


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A bar with ETA that appears on a terminal once a run has lasted a second; nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    began, tasks = time.perf_counter(), dict[str, TaskID]()

    def told(label: str, share: float) -> None:
        if time.perf_counter() - began > 1.0:
            bar.start()
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=1.0)
            bar.update(tasks[label], completed=share)

    try:
        yield told
    finally:
        bar.stop()


def _one_line(text: str) -> str:
    """Names and cells that are repeated to the user may hold line breaks and what a terminal would obey."""
    line = " ".join("".join(c if c.isprintable() or c.isspace() else repr(c)[1:-1] for c in text).split())
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 2 :]}"


def main() -> None:
    """Entry point of the `jaxserve` command."""
    try:
        app()
    except InputError as error:
        print(f"jaxserve: {_one_line(str(error))}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
