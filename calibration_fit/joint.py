"""Prefill and decode times fitted together, through the sum, to static batches of which only the whole latency is known.

The sum tells them apart only as far as batches differ in how much of each they hold: prompt tokens and generated tokens of a request must
not go in step. Where they do (in = out in every row), prefill is not pinned down, and the fit is refused with the numbers that say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from calibration_fit.checks import check_fit, not_converged, rows_below_floor
from calibration_fit.fit import FitResult, fit_all
from calibration_fit.forms import DECODE_TIME, PREFILL_TIME, Form
from calibration_fit.holdout import hold_out
from calibration_fit.measurements import Measurements
from calibration_fit.results import TableFit
from calibration_fit.rows import Rows, concatenated, decode_terms, make_rows, prefill_steps, prefill_terms, rows_of
from calibration_fit.transforms import Bound
from calibration_fit.uncertainty import LOOSE_SHARE, PINNED, Bootstrap, bootstrap, classical_covariance, identify, sensitivity
from jaxserve.errors import InputError
from jaxserve.perf.latency import DecodeTime, PrefillTime

NO_KNEE = 1e9
"""Tokens: a knee that no step reaches leaves one slope."""
HELD = {"tok_slope_above": 0.0, "tok_knee": NO_KNEE, "b1": 0.0, "alpha2": 0.0, "beta0": 0.0, "beta2": 0.0}
"""What sums of whole batches do not resolve: the bend at small prefill steps, the cost of a prompt as such, and the small decode terms."""


class StaticBatch(eqx.Module):
    """Both step times as one module, its terms being prefill steps (`is_prefill` 1) and decode steps (0)."""

    coefficients: tuple[Any, ...]

    def __init__(self, **coefficients: Any) -> None:
        self.coefficients = tuple(coefficients[k] for k in (*PREFILL_TIME.coefficients, *DECODE_TIME.coefficients))

    def __call__(self, n_tokens, pieces, sum_sq, batch, cached_tokens, is_prefill):
        n = len(PREFILL_TIME.coefficients)
        prefill = PrefillTime(*self.coefficients[:n])(n_tokens, pieces, sum_sq)
        return jnp.where(is_prefill > 0, prefill, DecodeTime(*self.coefficients[n:])(batch, cached_tokens))


STATIC_BATCH = Form(
    "static_batch",
    "study",
    StaticBatch,
    ("n_tokens", "pieces", "sum_sq", "batch", "cached_tokens", "is_prefill"),
    "time_s",
    # Without the small terms, a step that grows with neither the batch nor the context would be none.
    PREFILL_TIME.bounds | dict.fromkeys(DECODE_TIME.bounds, Bound.NONNEGATIVE),
    PREFILL_TIME.units | DECODE_TIME.units,
    "tok_knee",
)


def only_static_batches(group: Sequence[Measurements]) -> bool:
    """Whether times of static batches are there and no prefill step."""
    timed = [m.phase for m in group if len(m) and m.has("time_s").any()]
    return "end_to_end" in timed and "prefill" not in timed


def fit_static_batches(group: Sequence[Measurements], samples: int, delta: float) -> dict[str, TableFit]:
    """Both time tables of a setup; raises `InputError` when the rows do not tell prefill from decode."""
    timed = [m.select(m.has("time_s")) for m in group if m.has("time_s").any()]
    rows = _joint_rows(timed)
    (result,) = fit_all([rows], STATIC_BATCH, fixed=[HELD], delta=delta)
    if _untold(result):
        # The quadratic part of prefill is small up to some thousand tokens, and the first to go where the rows do not tell everything.
        (result,) = fit_all([rows], STATIC_BATCH, fixed=[{**HELD, "b2": 0.0}], delta=delta)
    if untold := _untold(result):
        raise InputError(untold)
    (held,), (intervals,), identity = hold_out([result]), bootstrap([result], samples), identify(result)
    value = result.coefficients
    # One slope, whatever the knee: written as two that are equal, on both sides of the largest step.
    value |= {"tok_slope_above": value["tok_slope_below"], "tok_knee": float(result.rows.inputs[0].max())}
    prefill, decode = (form.build([value[k] for k in form.coefficients]) for form in (PREFILL_TIME, DECODE_TIME))
    static = [m for m in timed if m.phase == "end_to_end"]
    tables = {}
    for form, module, rows in (
        (PREFILL_TIME, prefill, concatenated([_prefill_rows(m, decode) for m in static])),
        (DECODE_TIME, decode, make_rows(timed, DECODE_TIME, prefill)),
    ):
        index = [STATIC_BATCH.coefficients.index(k) for k in form.coefficients]
        part = replace(
            result,
            form=form,
            rows=rows,
            theta=np.array([value[k] for k in form.coefficients]),
            fixed=tuple(k for k in form.coefficients if k in result.fixed),
            predicted=rows.predict(module),
        )
        interval = Bootstrap(intervals.samples[:, index], intervals.low[index], intervals.high[index], intervals.level)
        said = [s for s in identity.sentences if any(k in s for k in form.coefficients)]
        if form is PREFILL_TIME:
            said.append(f"Whole batches do not resolve a bend: one slope is fitted{', and b2 held at 0' if 'b2' in result.fixed else ''}.")
        told = replace(identity, sentences=tuple(said or [PINNED]))
        warnings = (*not_converged(part), *rows_below_floor(part.rows, form.table), *check_fit(part))
        tables[form.table] = TableFit(part, held, interval, told, warnings)
    return tables


def _joint_rows(timed: Sequence[Measurements]) -> Rows:
    """Static batches, and decode steps if there are any, with a term for each kind of step: see `STATIC_BATCH.inputs`."""
    usual = float(np.median(np.concatenate([m.isl for m in timed if m.phase == "end_to_end"])))
    parts = []
    for m in timed:
        terms = []
        if m.phase == "end_to_end":
            prefill, weight = _prefill_terms(m)
            terms.append((np.concatenate([prefill, np.ones_like(prefill)]), weight))
            decode, weight = decode_terms(m)
        else:
            decode, weight = np.stack([m.batch, m.cached_tokens])[:, :, None], np.ones((len(m), 1))
        # The inputs of the other kind do not count, but must not be out of all proportion: coefficients are scaled by them.
        other = np.full((3, *weight.shape), usual)
        terms.append((np.concatenate([other, decode, np.zeros((1, *weight.shape))]), weight))
        inputs, weight = np.concatenate([i for i, _ in terms], axis=2), np.concatenate([w for _, w in terms], axis=1)
        parts.append(rows_of(m, inputs, weight, np.zeros(len(m)), m.time_s, m.phase == "end_to_end"))
    return concatenated(parts)


def _prefill_terms(m: Measurements) -> tuple[np.ndarray, np.ndarray]:
    return prefill_terms([prefill_steps([int(n)] * int(b)) for b, n in zip(m.batch, m.isl, strict=True)])


def _prefill_rows(m: Measurements, decode: Callable[..., np.ndarray]) -> Rows:
    """Static batches as rows of prefill, their decode steps being known."""
    inputs, weight = _prefill_terms(m)
    steps, many = decode_terms(m)
    known = (many * np.asarray(decode(*steps))).sum(axis=1)
    return rows_of(m, inputs, weight, known, m.time_s, True)


def _untold(result: FitResult) -> str:
    """What is wrong with a fit whose prefill could as well be something else: its standard error at the median row is over half of it."""
    rows = result.rows
    part = replace(rows, term_weight=rows.term_weight * rows.inputs[5])
    seconds = part.predict(result.module)
    slope = sensitivity(replace(result, rows=part)) * rows.measured[:, None]
    error = np.sqrt(np.einsum("rc,cd,rd->r", slope, classical_covariance(result), slope))
    at = np.flatnonzero(rows.end_to_end)
    share = error[at] / np.maximum(seconds[at], 1e-12)
    i = at[np.argsort(share)[len(at) // 2]]
    if np.median(share) <= LOOSE_SHARE:
        return ""
    low, high = np.clip(seconds[i] + np.array([-2.0, 2.0]) * error[i], 0.0, rows.measured[i])
    may = f"prefill may take anything from {low:.2g} to {high:.3g} s"
    return (
        f"{rows.file[i]}: rows {rows.row.min()} to {rows.row.max()}: these static batches do not tell prefill from decode (of the "
        f"{rows.measured[i]:.3g} s of row {rows.row[i]}, {may}): add batches whose osl does not go in step with isl (with osl = 1 they are "
        "prefill alone) or prefill rows, or take prefill_time from a file with --base."
    )
