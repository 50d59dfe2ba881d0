"""Step-time coefficients from a server's request log, as a command:

python -m calibration_fit.request_log LOG --where gpu=RTX4090 --setup Llama-3.1-8B,1,RTX4090 --energy-from NAME_OR_FILE --out FILE

A log holds no power: the energy tables come from another file and are marked as extrapolated. How well the fitted file predicts the log
is for `jaxserve validate` to say.
"""

from __future__ import annotations

import hashlib
import sys
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from calibration_fit.forms import DECODE_TIME
from calibration_fit.log_fit import TOKEN_BUDGET, LogFit, fit_log
from calibration_fit.measurements import Setup, Source
from calibration_fit.output import write_coefficients
from jaxserve.errors import InputError
from jaxserve.perf.coefficients import Coefficients, load_coefficients, parse_coefficients
from jaxserve.perf.request_log import parse_log, parse_where


def coefficients_of(found: LogFit, setup: Setup, source: Source, energy: Coefficients, energy_name: str, note: str = "") -> dict[str, Any]:
    """A coefficients file's contents: fitted step times, the energy tables of `energy`."""

    def rounded(values: dict[str, float]) -> dict[str, float]:
        return {k: float(f"{v:.7g}") for k, v in values.items()}

    name = Path(source.path).name
    held = f"; held at 0: {', '.join(found.decode_held)}" if found.decode_held else ""
    at = f" ({note})" if note else ""
    groups = len(found.prefill.rows)
    texts = {
        "prefill_time": f"fitted by calibration_fit to {groups} runs of prefill in the request log {name}{at}: "
        f"MAPE {found.prefill.mape:.1f} %",
        "decode_time": f"fitted by calibration_fit to the tokens of {found.fitted} requests in the request log {name}{at}: "
        f"MAPE {found.decode_mape:.1f} %, in held-out blocks of time {found.decode_held_out:.1f} %{held}",
    }
    borrowed = f"no energy in the log: taken from {energy_name} ({energy.setup.model} TP{energy.setup.tp} {energy.setup.gpu})"
    table = energy.model_dump(mode="json", include={"prefill_energy", "decode_energy", "power"})
    sources: list[dict[str, Any]] = [{"table": t, "text": text} for t, text in texts.items()]
    sources += [{"table": t, "text": borrowed, "extrapolated": True} for t in table]
    return {
        "schema_version": 1,
        "setup": {"model": setup.model, "tp": setup.tp, "gpu": setup.gpu},
        "prefill_time": rounded(found.prefill.coefficients),
        "decode_time": {"form": "study", **rounded(dict(zip(DECODE_TIME.coefficients, found.decode.tolist(), strict=True)))},
        **table,
        "source": sources,
        "valid_range": found.ranges,
        "fit": {
            "date": date.today().isoformat(),
            "warnings": list(found.warnings),
            "files": [{"path": name, "sha256": source.sha256}],
            "prefill_time": {"rows": groups, "mape_in_sample_percent": round(found.prefill.mape, 3)},
            "decode_time": {
                "rows": found.fitted,
                "mape_in_sample_percent": round(found.decode_mape, 3),
                "mape_held_out_percent": round(found.decode_held_out, 3),
            },
        },
    }


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    log: Annotated[Path, typer.Argument(help="CSV log, a row a request; columns as for `jaxserve validate`, queue_wait_s among them.")],
    setup: Annotated[str, typer.Option(help="MODEL,TP,GPU: what the log was measured on.")],
    out: Annotated[Path, typer.Option(help="Coefficients file to write.")],
    energy_from: Annotated[str, typer.Option(help="Coefficients (shipped name or file) to take the energy tables from.")],
    where: Annotated[list[str] | None, typer.Option(help="Keep rows with COLUMN=VALUE; may be repeated.")] = None,
    share: Annotated[
        float, typer.Option(help="Fit to this share of the requests, those that arrive first; the rest is for validation.")
    ] = 1.0,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Token budget of a prefill step.")] = TOKEN_BUDGET,
    ttft_from: Annotated[str, typer.Option(help="What the log's TTFT counts from: arrival, queued or admitted.")] = "arrival",
) -> None:
    """Fit prefill and decode step times to a server's request log."""
    try:
        if not 0 < share <= 1:
            raise InputError(f"--share {share:g}: must be above 0 and at most 1")
        named, content = _setup(setup), _read(log)
        source = Source(str(log), hashlib.sha256(content).hexdigest())
        try:
            lines = content.decode("utf-8-sig").splitlines()
        except UnicodeDecodeError:
            raise InputError(f"{log}: is not UTF-8 text; save it as UTF-8") from None
        read = parse_log(lines, str(log), parse_where(where or []), ttft_from)
        energy = load_coefficients(energy_from)
        counted = np.arange(len(read)) < round(share * len(read))
        found = fit_log(read, named, source, fit=counted, budget=max_num_batched_tokens)
        until = f"the first {counted.sum()} of {len(read)} requests, up to {read.arrival_s[counted][-1]:g} s" if share < 1 else ""
        table = coefficients_of(found, named, source, energy, energy_from, until)
        parse_coefficients(table, str(out))
        write_coefficients(out, table)
    except InputError as error:
        print(f"calibration_fit.request_log: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(2) from None
    for source_row in table["source"][:2]:
        print(f"{source_row['table']}: {source_row['text']}")
    for sentence in found.warnings:
        print(f"warning: {sentence}")
    print(f"wrote {out}; see what it predicts with: jaxserve validate {log} --coefficients {out}")


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
