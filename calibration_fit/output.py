"""The coefficients file: coefficients, where they came from, where they hold and how far to trust them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import tomli_w

from calibration_fit.checks import check_power, valid_range
from calibration_fit.holdout import grouped_mape
from calibration_fit.measurements import Source
from calibration_fit.results import SetupFit, TableFit
from jaxserve.errors import InputError
from jaxserve.perf.coefficients import parse_coefficients

TABLES = ("prefill_time", "decode_time", "prefill_energy", "decode_energy")
VERSION = "0.1.0"


@dataclass(frozen=True)
class Borrowed:
    """A table without a `TableFit`: its values, a sentence saying where they come from, and where they hold, how far off they are and what
    files they are from, if that is known."""

    values: Mapping[str, Any]
    text: str
    extrapolated: bool = True
    valid_range: Mapping[str, Any] = field(default_factory=dict)
    quality: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()


def coefficients_table(
    fit: SetupFit,
    *,
    gpu: str | None = None,
    borrowed: Mapping[str, Borrowed] | None = None,
    notes: Mapping[str, str] | None = None,
    power: Borrowed,
    today: date | None = None,
) -> dict[str, Any]:
    """The contents of a coefficients file.

    `gpu` is the name to write if not the measurements' own; `borrowed` fills tables that were not fitted; `notes` adds to the source text
    of fitted ones; `power` holds idle_w_per_gpu, max_w_per_gpu and host_w. Raises `InputError` when a table is neither fitted nor borrowed.
    """
    borrowed, notes = borrowed or {}, notes or {}
    out: dict[str, Any] = {
        "schema_version": 1,
        "setup": {"model": fit.setup.model, "tp": fit.setup.tp, "gpu": gpu or fit.setup.gpu},
    }
    sources, ranges, quality = [], {}, {}
    for table in TABLES:
        if table in fit.tables:
            t = fit.tables[table]
            out[table] = {"form": t.result.form.name} if table.endswith("time") else {}
            out[table] |= _coefficients(t)
            ranges[table] = valid_range(t.result.rows, table)
            quality[table] = _quality(t)
            sources.append({"table": table, "text": _source_text(t, notes.get(table, ""))})
        elif table in borrowed:
            out[table] = dict(borrowed[table].values)
            if borrowed[table].valid_range:
                ranges[table] = dict(borrowed[table].valid_range)
            if borrowed[table].quality:
                quality[table] = dict(borrowed[table].quality)
            sources.append({"table": table, "text": borrowed[table].text, "extrapolated": borrowed[table].extrapolated})
        else:
            raise InputError(
                f"{fit.setup}: nothing measured gives {table}; name a coefficients file to take it from with --base, or measure "
                f"{'energy_j or avg_power_w_per_gpu' if table.endswith('energy') else 'time_s'} of {table.split('_')[0]} steps."
            )
    out["power"] = dict(power.values)
    sources.append({"table": "power", "text": power.text, "extrapolated": power.extrapolated})
    out["source"] = sources
    out["valid_range"] = ranges
    read = [*(t.result.rows.sources for t in fit.tables.values()), *(b.sources for b in borrowed.values())]
    files = {s.path: s.sha256 for part in read for s in part}
    out["fit"] = {
        "date": (today or date.today()).isoformat(),
        "tool": f"calibration_fit {VERSION}",
        "files": [{"path": Path(p).name, "sha256": h} for p, h in sorted(files.items())],
        **quality,
    }
    if power_words := check_power(parse_coefficients(out, str(fit.setup))):
        out["fit"]["warnings"] = power_words
    return out


def write_coefficients(path: Path, table: Mapping[str, Any], comment: str = "") -> None:
    """Write the file whole or not at all."""
    text = "".join(f"# {line}\n" for line in comment.splitlines()) + tomli_w.dumps(table)
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written: {error}") from None


def check_out(out: Path, report: Path | None) -> None:
    """Raise `InputError`, before anything takes time, when the file `out` or the folder `report` cannot be written."""
    if not out.name or out.is_dir():
        raise InputError(f"{out}: is a folder; name the coefficients file to write.")
    if not out.parent.is_dir():
        raise InputError(f"{out}: there is no folder {out.parent}; make it first.")
    if report is not None:
        try:
            report.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{report}: cannot be the folder of the report: {error.strerror or error}") from None


def _coefficients(t: TableFit) -> dict[str, Any]:
    """Fitted values to seven digits: more would claim what no measurement holds."""
    return t.result.form.in_file({k: _round(v) for k, v in t.result.coefficients.items()})


def _quality(t: TableFit) -> dict[str, Any]:
    intervals = zip(t.result.form.coefficients, t.intervals.low, t.intervals.high, strict=True)
    out: dict[str, Any] = {
        "rows": len(t.result.rows),
        "mape_in_sample_percent": _round(t.result.mape, 3),
        "interval_level": t.intervals.level,
        "interval": {k: [_round(a, 4), _round(b, 4)] for k, a, b in intervals if k not in t.result.fixed},
        "identifiability": list(t.identifiability.sentences),
    }
    if t.held:
        out["mape_held_out_percent"] = _round(grouped_mape(t.held), 3)
        out["mape_held_out_by"] = {k: _round(h.mape_all, 3) for k, h in t.held.items()}
    if len(t.alternatives) > 1:
        out["mape_held_out_by_form"] = {k: _round(v, 3) for k, v in t.alternatives.items()}
    if t.warnings:
        out["warnings"] = list(t.warnings)
    return out


def against_others(t: TableFit) -> str:
    """Which form the held-out error chose, and by how much."""
    others = [f"{name} {error:.2f} %" for name, error in t.alternatives.items() if name != t.result.form.name]
    return f"form {t.result.form.name} (held out {t.alternatives[t.result.form.name]:.2f} %) over {', '.join(others)}"


def _source_text(t: TableFit, note: str) -> str:
    r = t.result
    names = ", ".join(sorted({Path(s.path).name for s in r.rows.sources}))
    held = f", held-out {grouped_mape(t.held):.1f} %" if t.held else ""
    held_at_0 = [k for k in r.fixed if k in r.form.used(r.coefficients)]
    fixed = f"; held at 0: {', '.join(held_at_0)}" if held_at_0 and not any(r.coefficients[k] for k in held_at_0) else ""
    if r.form.knots:
        fixed += f"; knots chosen by held-out error; {against_others(t)}" if len(t.alternatives) > 1 else "; knots chosen by held-out error"
    text = f"fitted by calibration_fit to {len(r.rows)} {r.rows.kind} of {names}: MAPE {r.mape:.1f} %{held}{fixed}"
    said = [*dict.fromkeys(s.note for s in r.rows.sources), note]
    return "; ".join([text, *(part for part in said if part)])


def _round(value: float, digits: int = 7) -> float:
    return float(f"{value:.{digits}g}")
