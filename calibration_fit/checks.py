"""What must hold of rows and of a fit: positive, growing over the valid range, never faster than physics."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from calibration_fit.fit import FitResult
from calibration_fit.hardware import floor_s
from calibration_fit.rows import Rows
from jaxserve.perf.coefficients import Coefficients
from jaxserve.types import on_host

GRID = 25
POWER_MARGIN = 1.1
"""Power beyond the board's by less than the errors of two fits, and what boards overshoot, is not worth naming."""
FALL = 1e-3
"""A fall below this share of the value is not worth naming."""


def valid_range(rows: Rows, table: str) -> dict[str, list[float]]:
    """What the rows span: [least, greatest] of each quantity. `mean_ctx` is K/B; of static batches over the whole run."""
    if table.startswith("prefill"):
        pieces = rows.inputs[1] if table == "prefill_time" else rows.batch  # the form of energies has no term in them
        return {"n_tokens": _span(rows.inputs[0]), "batch": _span(pieces), "seq_len": _span(rows.length)}
    batch, cached = rows.inputs
    return {"batch": _span(batch), "mean_ctx": _span(cached / batch), "cached_tokens": _span(cached)}


def rows_below_floor(rows: Rows, table: str) -> list[str]:
    """A sentence for each measured step faster than its physical floor (static batches are not steps and are skipped)."""
    step = ~rows.end_to_end
    floor = _floor(rows.setup, table, rows.inputs[:, :, 0], rows.batch) if table.endswith("time") else None
    if floor is None:
        return []
    bad = np.flatnonzero(step & (rows.measured < floor))
    return [
        f"{rows.file[i]}: row {rows.row[i]}: {rows.measured[i]:.3g} s is below the physical floor of {floor[i]:.3g} s for {rows.setup}."
        for i in bad
    ]


def not_converged(result: FitResult) -> list[str]:
    """A sentence if the fit stopped short of its optimum."""
    return [] if result.converged else [f"{result.form.table}: the fit of {result.rows.setup} has not converged."]


def check_fit(result: FitResult) -> list[str]:
    """Sentences on what the fitted curve does over its valid range that a step cannot do; empty when all is well."""
    table, rows = result.form.table, result.rows
    limits = valid_range(rows, table)
    out = []
    if table.startswith("prefill"):
        length = np.geomspace(limits["seq_len"][0], limits["seq_len"][1], GRID)
        # Along one prompt of growing length, and along growing numbers of the shortest prompt, within the tokens measured.
        most = max(1.0, limits["n_tokens"][1] / limits["seq_len"][0])
        pieces = np.geomspace(1.0, min(most, limits["batch"][1]), GRID)
        lines = {
            "prompt length": (np.ones(GRID), length),
            "the number of prompts": (pieces, np.full(GRID, limits["seq_len"][0])),
        }
        inputs = {k: {"n_tokens": b * n, "batch": b, "sum_sq": b * n**2} for k, (b, n) in lines.items()}
    else:
        batch = np.unique(np.round(np.geomspace(limits["batch"][0], limits["batch"][1], GRID)))
        context = np.geomspace(max(limits["mean_ctx"][0], 1.0), limits["mean_ctx"][1], GRID)
        inputs = {}
        for c in (context[0], context[-1]):
            inputs[f"batch at context {c:.0f}"] = {"batch": batch, "cached_tokens": batch * c}
        for b in (batch[0], batch[-1]):
            inputs[f"context at batch {b:.0f}"] = {"batch": np.full(GRID, b), "cached_tokens": b * context}
    for along, line in inputs.items():
        # Corners of the box that hold more cached tokens than any row did are outside the range.
        if "cached_tokens" in line:
            keep = line["cached_tokens"] <= limits["cached_tokens"][1]
            line = {k: v[keep] for k, v in line.items()}
        if line and len(next(iter(line.values()))):
            out += _check_line(result, along, line)
    return out


def check_power(c: Coefficients) -> list[str]:
    """Whether step energy over step time asks clearly more of a GPU than its board power, over the range in which the times hold.

    No step is charged more; but where one asks for it, energies and times do not belong together. Tables that were borrowed are checked
    as well: what is extrapolated has no other witness.
    """
    board_w = c.power.max_w_per_gpu
    out = []
    if (limits := _shared(c, "prefill_time", "prefill_energy", ("n_tokens", "seq_len"))) is not None:
        tokens, length = (x.ravel() for x in np.meshgrid(*(np.linspace(*x, GRID) for x in limits)))
        tokens, length = tokens[tokens >= length], length[tokens >= length]
        n, pieces, square = map(on_host, (tokens, tokens / length, tokens * length))  # whole prompts of one length
        power = np.asarray(c.prefill_energy_model()(n, square) / c.prefill_time_model()(n, pieces, square))
        out += _over("prefill", power / c.setup.tp, board_w, lambda i: f"{tokens[i]:.0f} tokens")
    if (limits := _shared(c, "decode_time", "decode_energy", ("batch", "mean_ctx", "cached_tokens"))) is not None:
        batch, context = (x.ravel() for x in np.meshgrid(*(np.linspace(*x, GRID) for x in limits[:2])))
        held = batch * context <= limits[2][1]
        batch, context = batch[held], context[held]
        b, cached = on_host(batch), on_host(batch * context)
        power = np.asarray(c.decode_energy_model()(b, cached) / c.decode_time_model()(b, cached))
        out += _over("decode", power / c.setup.tp, board_w, lambda i: f"B = {batch[i]:.0f}, context {context[i]:.0f}")
    return out


def _shared(c: Coefficients, time: str, energy: str, names: tuple[str, ...]) -> list[tuple[float, float]] | None:
    """[least, greatest] of each quantity that both tables (or the times alone, where the energy has no range) were measured in."""
    spans = []
    for name in names:
        found = [getattr(c.valid_range[table], name) for table in (time, energy) if table in c.valid_range]
        if time not in c.valid_range or any(span is None for span in found):
            return None
        spans.append((max(span[0] for span in found), min(span[1] for span in found)))
    return spans if all(low <= high for low, high in spans) else None


def _over(phase: str, power: np.ndarray, board_w: float, where: Callable[[int], str]) -> list[str]:
    """The sentence on the greatest `power` [...], if that is beyond the board's."""
    if not power.size or power.max() <= POWER_MARGIN * board_w:
        return []
    worst = int(np.argmax(power))
    return [
        f"{phase} power: energy over time is {power[worst]:.0f} W a GPU at {where(worst)}, above the {board_w:.0f} W of the board, "
        "which are charged: the two were not measured together, or a form does not hold there."
    ]


def _check_line(result: FitResult, along: str, line: dict[str, np.ndarray]) -> list[str]:
    form = result.form
    inputs = [line[k] for k in form.inputs]
    value = np.asarray(result.module(*inputs)) * np.ones(len(inputs[0]))
    out = []
    if (value <= 0).any():
        return [f"{form.table}: the fit is not positive along {along}."]
    if any(b < a * (1 - FALL) for a, b in pairwise(value)):
        share = 100 * (1 - min(b / a for a, b in pairwise(np.maximum.accumulate(value))))
        share = max(share, 100 * (1 - (value / np.maximum.accumulate(value)).min()))
        out.append(f"{form.table}: the fit falls along {along}, by {share:.1f} % at most.")
    floor = None
    if form.table.endswith("time"):
        floor = _floor(result.rows.setup, form.table, np.stack(inputs), line["batch"])
    if floor is not None and (value < floor).any():
        i = int(np.argmin(value / floor))
        out.append(f"{form.table}: the fit is below the physical floor along {along} ({value[i]:.3g} s against {floor[i]:.3g} s).")
    return out


def _floor(setup, table: str, inputs: np.ndarray, batch: np.ndarray) -> np.ndarray | None:
    """Floor of steps whose `inputs` [I, R] are (N, B, S2) of prefill or (B, K) of decode."""
    zero = np.zeros_like(batch, dtype=float)
    if table.startswith("prefill"):
        return floor_s(setup.model, setup.gpu, setup.tp, batch=batch, new_tokens=inputs[0], sum_sq=inputs[2], cached_tokens=zero)
    return floor_s(setup.model, setup.gpu, setup.tp, batch=batch, new_tokens=batch, sum_sq=zero, cached_tokens=inputs[1])


def _span(x: np.ndarray) -> list[float]:
    return [float(np.min(x)), float(np.max(x))]
