"""From measurements to everything a coefficients file and a report need: fits, alternatives, held-out errors, intervals, warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calibration_fit.checks import check_fit, not_converged, rows_below_floor
from calibration_fit.fit import fit_all
from calibration_fit.forms import (
    DECODE_ENERGY,
    DECODE_TIME,
    PIECEWISE_DECODE_TIME,
    PIECEWISE_PREFILL_TIME,
    PREFILL_ENERGY,
    PREFILL_TIME,
    TWO_PIECE_DECODE_TIME,
    Form,
)
from calibration_fit.holdout import grouped_mape, hold_out
from calibration_fit.joint import fit_static_batches, only_static_batches
from calibration_fit.knots import choose_knots
from calibration_fit.losses import ROBUST_DELTA
from calibration_fit.measurements import Measurements, Setup, one_setup
from calibration_fit.results import SetupFit, TableFit
from calibration_fit.rows import Rows, make_rows
from calibration_fit.uncertainty import BOOTSTRAP_SAMPLES, bootstrap, identify
from jaxserve.errors import InputError

FEW_BATCHES = 6
"""With fewer different batch sizes the decode form's terms in B^2, and the context term that does not grow with B, are held at 0:
there is nothing to tell them from. (The data's README reaches its end-to-end errors in the same way.)"""
FEW_ROWS = 10
"""The same holds with fewer rows."""
HELD_OF_FEW = {"decode_time": {"alpha2": 0.0, "beta0": 0.0, "beta2": 0.0}, "decode_energy": {"e_dec_kv": 0.0}}
"""What is held at 0 then; of energy, where all rows have one length, so that cached tokens go in step with requests."""
PREFER_NEXT = 0.9
"""A form with more coefficients is taken when its held-out error is below this share of the one's that stood before it."""
FORM_NAMES = ("auto", "study", "two_piece", "piecewise")
"""What may be asked for: by held-out error, or one form. Prefill has no two-piece form of its own: it has one knee in the study's."""


def fit_setups(
    groups: Sequence[Sequence[Measurements]],
    *,
    decode_form: str = "auto",
    prefill_form: str = "auto",
    prefill: Mapping[Setup, Mapping[str, Any]] | None = None,
    fixed: Mapping[str, Mapping[str, float]] | None = None,
    only: Sequence[str] | None = None,
    samples: int = BOOTSTRAP_SAMPLES,
    delta: float = ROBUST_DELTA,
) -> list[SetupFit]:
    """Fit every table that the measurements of each setup bear on; all setups of a form in one solve.

    `groups` holds the measurements of one setup each; the forms are of `FORM_NAMES`; `prefill` gives known prefill modules by
    setup and table for end-to-end rows, where the setup's own prefill rows do not (with neither, both times are fitted to the sums);
    `fixed` holds coefficients by table; `only` names the tables to fit.
    """
    setups = [one_setup(g) for g in groups]
    fixed = {k: dict(v) for k, v in (fixed or {}).items()}
    fitted: list[dict[str, TableFit]] = [{} for _ in groups]
    for i, group in enumerate(groups):
        if only is None and {decode_form, prefill_form} <= {"auto", "study"} and only_static_batches(group):
            try:
                fitted[i] |= fit_static_batches(group, samples, delta)
            except InputError:
                # What the rows tell comes first; known prefill is for rows that do not tell it.
                if "prefill_time" not in (prefill or {}).get(setups[i], {}):
                    raise
    for form in (PREFILL_TIME, PREFILL_ENERGY, DECODE_TIME, DECODE_ENERGY):
        rows: dict[int, Rows] = {}
        for i, group in enumerate(groups):
            if form.table in fitted[i] or not _bears_on(group, form) or (only is not None and form.table not in only):
                continue
            prefill_table = "prefill_time" if form.quantity == "time_s" else "prefill_energy"
            known = (prefill or {}).get(setups[i], {}).get(prefill_table)
            if prefill_table in fitted[i]:
                known = fitted[i][prefill_table].result.module
            rows[i] = make_rows(group, form, known)
        # Setups that hold different coefficients fixed are solved apart: the fixed set shapes the solve.
        for few in (False, True):
            mine = [i for i, r in rows.items() if _few(r, form) == few]
            if not mine:
                continue
            hold = {**(HELD_OF_FEW[form.table] if few else {}), **fixed.get(form.table, {})}
            candidates = [form]
            if form is DECODE_TIME:
                candidates = _candidates(DECODE_TIMES, decode_form, few, hold)
            elif form is PREFILL_TIME:
                candidates = _candidates(PREFILL_TIMES, prefill_form, few, hold)
            tables = _fit_tables([rows[i] for i in mine], candidates, hold, samples, delta)
            for i, table in zip(mine, tables, strict=True):
                fitted[i][form.table] = table
    for setup, group, tables in zip(setups, groups, fitted, strict=True):
        if not tables:
            raise InputError(f"{group[0].source.path}: row {group[0].row[0]}: nothing measured for {setup} can be fitted.")
    return [SetupFit(s, t) for s, t in zip(setups, fitted, strict=True)]


PREFILL_TIMES = PREFILL_TIME, PIECEWISE_PREFILL_TIME
DECODE_TIMES = DECODE_TIME, TWO_PIECE_DECODE_TIME, PIECEWISE_DECODE_TIME
"""In order of the number of their coefficients."""


def _candidates(forms: Sequence[Form], name: str, few: bool, hold: Mapping[str, float]) -> list[Form]:
    """The forms to try: the one named, or all that have the coefficients to hold; of few rows the simplest."""
    if name != "auto":
        return [next((form for form in forms if form.name == name), forms[0])]
    able = [form for form in forms if set(hold) <= set(form.coefficients)]
    return able[:1] if few else able


def _fit_tables(rows: list[Rows], candidates: list[Form], hold: dict[str, float], samples: int, delta: float) -> list[TableFit]:
    """Fit all candidate forms, keep for each setup the one with the least held-out error, and qualify it."""
    tried = []
    for form in candidates:
        knots = [form.with_knots(choose_knots(r, form)) if form.knots else {} for r in rows]
        results = fit_all(rows, form, fixed=[{**hold, **k} for k in knots], delta=delta)
        held = hold_out(results)
        tried.append((form, results, held, [grouped_mape(h) for h in held]))
    choice = []
    for p in range(len(rows)):
        best = 0
        for c in range(1, len(tried)):
            if tried[c][3][p] < PREFER_NEXT * tried[best][3][p]:
                best = c
        choice.append(best)
    out: list[TableFit | None] = [None] * len(rows)
    for c, (form, results, held, _) in enumerate(tried):
        mine = [p for p in range(len(rows)) if choice[p] == c]
        if not mine:
            continue
        intervals = bootstrap([results[p] for p in mine], samples)
        for p, interval in zip(mine, intervals, strict=True):
            result = results[p]
            warnings = not_converged(result) + rows_below_floor(result.rows, form.table) + check_fit(result)
            alternatives = {t[0].name: t[3][p] for t in tried}
            out[p] = TableFit(result, held[p], interval, identify(result), tuple(warnings), alternatives)
    return [t for t in out if t is not None]


def _bears_on(group: Sequence[Measurements], form: Form) -> bool:
    measured = [(m, m.has(form.quantity)) for m in group]
    if form.table.startswith("prefill"):
        return any(m.phase == "prefill" and has.any() for m, has in measured)
    return any((m.phase == "decode" and has.any()) or (m.phase == "end_to_end" and (has & (m.osl >= 2)).any()) for m, has in measured)


def _few(rows: Rows, form: Form) -> bool:
    if form is DECODE_ENERGY:
        return len(np.unique(rows.length)) == 1
    return form is DECODE_TIME and (len(np.unique(rows.batch)) < FEW_BATCHES or len(rows) < FEW_ROWS)
