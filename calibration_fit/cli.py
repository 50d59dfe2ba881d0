"""The command `calibration-fit`: measurements in, a coefficients file and a report out."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from calibration_fit.benchmark_json import from_results, read_results, static_batches
from calibration_fit.hardware import known_gpu
from calibration_fit.holdout import grouped_mape
from calibration_fit.joint import only_static_batches
from calibration_fit.measurements import Measurements, in_memory, one_setup, read_measurements
from calibration_fit.output import TABLES, Borrowed, against_others, check_out, coefficients_table, write_coefficients
from calibration_fit.pipeline import FORM_NAMES, fit_setups
from calibration_fit.report import write_report
from calibration_fit.uncertainty import BOOTSTRAP_SAMPLES
from jaxserve.errors import InputError, explain
from jaxserve.perf.coefficients import Coefficients, load_coefficients, shipped_names
from jaxserve.perf.power import PrefillEnergy
from jaxserve.perf.request_log import parse_where
from jaxserve.perf.step_times import DecodeTable, PrefillTable

TIMES: dict[str, Any] = {"prefill_time": PrefillTable, "decode_time": DecodeTable}
TABLES_OF: dict[str, TypeAdapter[Any]] = {
    name: TypeAdapter(TIMES.get(name, Coefficients.model_fields[name].annotation)) for name in (*TABLES, "power")
}
"""What a base file may hold; none of it has to be there."""
IDLE_W, HOST_W = 72.0, 300.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def calibrate(
    measurements: Annotated[
        list[Path], typer.Argument(help="CSV tables, of our columns or as published, or JSON of benchmarks of vLLM or SGLang.")
    ],
    out: Annotated[Path, typer.Option(help="Coefficients file to write.")],
    report: Annotated[Path | None, typer.Option(help="Folder for the report (Markdown and figures).")] = None,
    model: Annotated[str | None, typer.Option(help="Keep rows of this model (or name it, if the tables do not).")] = None,
    tp: Annotated[int | None, typer.Option(help="Keep rows of this tensor parallel size (or give it).")] = None,
    gpu: Annotated[str | None, typer.Option(help="Keep rows of this GPU (or name it).")] = None,
    where: Annotated[list[str] | None, typer.Option(help="Keep rows with COLUMN=VALUE; may be repeated.")] = None,
    base: Annotated[Path | None, typer.Option(help="Coefficients file, or shipped set, for the tables that are not measured.")] = None,
    form: Annotated[
        str,
        typer.Option(help="Form of step times: auto (by held-out error), study, two_piece (decode only) or piecewise."),
    ] = "auto",
    samples: Annotated[int, typer.Option(help="Bootstrap resamples.", min=20)] = BOOTSTRAP_SAMPLES,
    idle_w: Annotated[float | None, typer.Option(help="Idle power of one GPU, W.")] = None,
    max_w: Annotated[float | None, typer.Option(help="Board power of one GPU, W (default: its data sheet's, if the GPU is known).")] = None,
    host_w: Annotated[float | None, typer.Option(help="Power of the host, W.")] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Batch size of JSON of vLLM's bench latency, which does not hold it; once, or once a result.")
    ] = None,
    isl: Annotated[list[int] | None, typer.Option(help="Its prompt length, or that of a published table without one.", min=1)] = None,
    osl: Annotated[list[int] | None, typer.Option(help="Its output length.")] = None,
) -> None:
    """Fit step-time and energy coefficients to measurements of one model on one kind of GPU."""
    try:
        if form not in FORM_NAMES:
            own = ' A table is not fitted: write form = "table" and the grid itself into a coefficients file.' if form == "table" else ""
            raise InputError(f"--form {form!r} is none of {', '.join(FORM_NAMES)}.{own}")
        check_out(out, report)
        chosen = {"model": model, "tp": None if tp is None else str(tp), "gpu": gpu}
        chosen = {k: v for k, v in chosen.items() if v is not None}
        data, left_out = _read(measurements, chosen, parse_where(where or []), {"batch": batch or [], "isl": isl or [], "osl": osl or []})
        setup = one_setup(data)
        known = _base(base)
        prefill: dict[str, Any] = {}
        if "prefill_time" in known:
            prefill["prefill_time"] = TABLES_OF["prefill_time"].validate_python(known["prefill_time"]).model()
        if "prefill_energy" in known:
            prefill["prefill_energy"] = PrefillEnergy(**known["prefill_energy"])
        fit = fit_setups([data], decode_form=form, prefill_form=form, prefill={setup: prefill}, samples=samples)[0]
        if not ("prefill_time" in fit.tables and only_static_batches(data)):
            left_out += _without_decode(data)
        ranges = known.get("valid_range", {})
        borrowed = {t: Borrowed(known[t], f"taken from {base}", True, ranges.get(t, {})) for t in TABLES if t in known}
        given = {"idle_w_per_gpu": idle_w, "max_w_per_gpu": max_w, "host_w": host_w}
        table = coefficients_table(fit, borrowed=borrowed, power=_power(given, setup.gpu, known, base))
        write_coefficients(out, table)
        page = write_report(report, [fit]) if report is not None else None
    except InputError as error:
        print(f"calibration-fit: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    for warning in (*left_out, *table["fit"].get("warnings", ())):
        print(f"warning: {warning}")
    for name, t in fit.tables.items():
        held = f", held out {grouped_mape(t.held):.2f} %" if t.held else ""
        print(f"{name} ({t.result.form.name}): {len(t.result.rows)} rows, MAPE in sample {t.result.mape:.2f} %{held}")
        if len(t.alternatives) > 1:
            print(f"  By held-out error: {against_others(t)}.")
        for sentence in (*t.identifiability.sentences, *(f"warning: {w}" for w in t.warnings)):
            print(f"  {sentence}")
    for note in dict.fromkeys(m.source.note for m in data if m.source.note):
        print(f"{', '.join(dict.fromkeys(m.source.path for m in data if m.source.note == note))}: {note}")
    for source in table["source"]:
        if source["table"] not in fit.tables:
            print(f"{source['table']}: not measured here, {source['text']}")
    print(f"wrote {out}" + (f" and {page}" if page else ""))


def _read(
    paths: list[Path], chosen: dict[str, str], where: dict[str, str], static: dict[str, list[int]]
) -> tuple[list[Measurements], list[str]]:
    """All measurements of all files, and what was left out of them in words; the chosen setup selects rows where a table holds the column
    and fills it in where not; `static` holds the options batch, isl and osl."""
    found: list[Measurements] = []
    left_out = []
    benchmarks = {path: results for path in paths if (results := read_results(path, where))}
    latency = static_batches(sum(result.is_latency for path in paths for result in benchmarks.get(path, [])), static)
    for path in paths:
        if path in benchmarks:
            found += from_results(path, benchmarks[path], chosen, latency)
            if any("ttfts" in result.values for result in benchmarks[path]):
                left_out.append(f"{path}: times to first token are not used here: python -m calibration_fit.request_log fits to them too")
            continue
        if len(static["isl"]) > 1:
            raise InputError(f"{path}: --isl is given {len(static['isl'])} times, but this table has one prompt length.")
        for m in read_measurements(path, where=where, setup=chosen, isl=next(iter(static["isl"]), None)):
            fits = in_memory(m)
            if not fits.all():
                left_out.append(f"{path}: rows {', '.join(map(str, m.row[~fits]))}: their cache does not fit beside the weights, left out")
            if fits.any():
                found.append(m.select(fits))
    if not found:
        raise InputError("; ".join(left_out) + ": nothing is left to fit.")
    return found, left_out


def _without_decode(data: list[Measurements]) -> list[str]:
    """Static batches of one output token, which only count where prefill is fitted to static batches."""
    alone = [(m.source.path, m.row[m.osl < 2]) for m in data if m.phase == "end_to_end" and (m.osl < 2).any()]
    return [f"{path}: rows {', '.join(map(str, rows))}: osl = 1 holds no decode step, left out" for path, rows in alone]


def _base(path: Path | None) -> dict[str, Any]:
    """Tables of a coefficients file, or of a shipped set by name."""
    if path is None:
        return {}
    if str(path) in shipped_names():
        return load_coefficients(str(path)).model_dump(exclude_none=True)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        for name in table.keys() & TABLES_OF.keys():
            try:
                table[name] = TABLES_OF[name].validate_python(table[name]).model_dump(exclude_none=True)
            except ValidationError as error:
                raise InputError(f"{path}: {explain(error, table[name], Coefficients, name)}") from None
        ranges = table.get("valid_range", {})
        if not isinstance(ranges, dict) or not all(isinstance(part, dict) for part in ranges.values()):
            raise InputError(f"{path}: valid_range must hold a table of ranges for each table")
        return table
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: not a readable coefficients file: {error}") from None


def _power(given: dict[str, float | None], gpu: str, known: dict[str, Any], base: Path | None) -> Borrowed:
    """Idle, board and host power: as given, else the base file's, else defaults that the file owns up to.

    Raises `InputError` for a board that is neither given nor known.
    """
    held, board = known.get("power", {}), known_gpu(gpu)
    defaults = {"idle_w_per_gpu": IDLE_W, "max_w_per_gpu": board.power_w if board else None, "host_w": HOST_W}
    values, words = {}, []
    for key, value in given.items():
        found = value if value is not None else held.get(key, defaults[key])
        if found is None:
            raise InputError(f"the board power of {gpu!r} is not known, which no step may exceed: give it with --max-w (W a GPU).")
        values[key] = float(found)
        source = "data sheet" if key == "max_w_per_gpu" else "the tool's default, not measured"
        words.append(f"{key}: " + ("given" if value is not None else f"taken from {base}" if key in held else source))
    return Borrowed(values, "; ".join(words), any("given" not in w and "data sheet" not in w for w in words))


def main() -> None:
    """Entry point of the console script."""
    app()
