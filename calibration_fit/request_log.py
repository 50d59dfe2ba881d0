"""Step-time coefficients from a server's request log, as a command:

python -m calibration_fit.request_log LOG --where gpu=RTX4090 --setup Llama-3.1-8B,1,RTX4090 --energy-from NAME_OR_FILE --out FILE

A log holds no power: the energy tables come from another file and are marked as extrapolated. How well the fitted file predicts the log
is for `jaxserve validate` to say. A log without queue_wait_s is fitted to the requests that cannot have waited for room.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from calibration_fit.log_fit import TOKEN_BUDGET, LogFit, fit_log
from calibration_fit.measurements import Setup, Source
from calibration_fit.output import Borrowed, check_out, coefficients_table, write_coefficients
from calibration_fit.report import write_report
from calibration_fit.uncertainty import BOOTSTRAP_SAMPLES
from jaxserve.errors import InputError
from jaxserve.perf.coefficients import Coefficients, load_coefficients
from jaxserve.perf.request_log import parse_where, read_request_log


def coefficients_of(found: LogFit, energy: Coefficients, energy_name: str, note: str = "") -> dict[str, Any]:
    """A coefficients file's contents: fitted step times, the energy tables of `energy`."""
    text = f"no energy in the log: taken from {energy_name} ({energy.setup.model} TP{energy.setup.tp} {energy.setup.gpu})"
    known = energy.model_dump(mode="json", include={"prefill_energy", "decode_energy", "power"}, exclude_none=True)
    ranges = energy.model_dump(mode="json", include={"valid_range"}, exclude_none=True)["valid_range"]
    borrowed = {table: Borrowed(values, text, valid_range=ranges.get(table, {})) for table, values in known.items()}
    notes = dict.fromkeys(found.fit.tables, "; ".join(part for part in (note, found.waits) if part))
    return coefficients_table(found.fit, borrowed=borrowed, notes=notes, power=borrowed["power"])


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    log: Annotated[Path, typer.Argument(help="CSV log, a row a request, or benchmark JSON with details; as for `jaxserve validate`.")],
    setup: Annotated[str, typer.Option(help="MODEL,TP,GPU: what the log was measured on.")],
    out: Annotated[Path, typer.Option(help="Coefficients file to write.")],
    energy_from: Annotated[str, typer.Option(help="Coefficients (shipped name or file) to take the energy tables from.")],
    report: Annotated[Path | None, typer.Option(help="Folder for the report (Markdown and figures).")] = None,
    where: Annotated[list[str] | None, typer.Option(help="Keep rows with COLUMN=VALUE; may be repeated.")] = None,
    share: Annotated[
        float, typer.Option(help="Fit to this share of the requests, those that arrive first; the rest is for validation.")
    ] = 1.0,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Token budget of a prefill step.")] = TOKEN_BUDGET,
    ttft_from: Annotated[str, typer.Option(help="What the log's TTFT counts from: arrival, queued or admitted.")] = "arrival",
    invalid_rows: Annotated[str, typer.Option(help="What becomes of rows with fewer than one token: error or drop.")] = "error",
    samples: Annotated[int, typer.Option(help="Bootstrap resamples.", min=20)] = BOOTSTRAP_SAMPLES,
) -> None:
    """Fit prefill and decode step times to a server's request log."""
    try:
        check_out(out, report)
        if not 0 < share <= 1:
            raise InputError(f"--share {share:g}: must be above 0 and at most 1")
        named, content = _setup(setup), _read(log)
        source = Source(str(log), hashlib.sha256(content).hexdigest())
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise InputError(f"{log}: is not UTF-8 text; save it as UTF-8") from None
        read = read_request_log(text, str(log), parse_where(where or []), ttft_from, invalid_rows)
        energy = load_coefficients(energy_from)
        counted = np.arange(len(read)) < round(share * len(read))
        found = fit_log(read, named, source, fit=counted, budget=max_num_batched_tokens, samples=samples)
        until = f"the first {counted.sum()} of {len(read)} requests, up to {read.arrival_s[counted][-1]:g} s" if share < 1 else ""
        table = coefficients_of(found, energy, energy_from, until)
        write_coefficients(out, table)
        page = write_report(report, [found.fit]) if report is not None else None
    except InputError as error:
        print(f"calibration_fit.request_log: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(2) from None
    for note in read.notes:
        print(f"warning: {note}")
    for row in table["source"][:2]:
        print(f"{row['table']}: {row['text']}")
        for sentence in (*table["fit"][row["table"]]["identifiability"], *table["fit"][row["table"]].get("warnings", ())):
            print(f"  {sentence}")
    print(f"wrote {out}" + (f" and {page}" if page else "") + f"; what it predicts: jaxserve validate {log} --coefficients {out}")


def _setup(text: str) -> Setup:
    model, tp, gpu = (*(part.strip() for part in text.split(",")), "", "", "")[:3]
    if text.count(",") != 2 or not (model and gpu and tp.isdecimal() and len(tp) < 5 and int(tp) >= 1):
        raise InputError(f"--setup {text!r}: must be MODEL,TP,GPU, for example Llama-3.1-8B,1,RTX4090")
    return Setup(model, int(tp), gpu)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); check the path") from None


if __name__ == "__main__":
    app()
