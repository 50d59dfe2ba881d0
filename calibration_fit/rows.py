"""From measurements to what a fit sees: rows whose prediction is a weighted sum of module calls, plus a known part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibration_fit.forms import Form
from calibration_fit.measurements import Measurements, Setup, Source, one_setup
from calibration_fit.slopes import slopes
from jaxserve.errors import InputError

PREFILL_STEP_TOKENS = 8192
"""Token budget of one prefill step of a static batch, when the source does not say (vLLM's default at the time of the ANL runs)."""


@dataclass(frozen=True)
class Rows:
    """Rows of one setup for one form: prediction [R] = offset + sum over terms of term_weight * module(*inputs).

    `inputs` [I, R, T], `term_weight` [R, T], `offset`, `measured` [R]. A step has one term. A static batch has the first and the last
    of its decode steps, each standing for half of them: the forms are linear in the context, so this is the sum over all steps.
    `kind` says in words what a row is.
    """

    setup: Setup
    sources: tuple[Source, ...]
    file: np.ndarray
    row: np.ndarray
    batch: np.ndarray
    length: np.ndarray
    inputs: np.ndarray
    term_weight: np.ndarray
    offset: np.ndarray
    measured: np.ndarray
    end_to_end: np.ndarray
    kind: str = "steps"

    def __len__(self) -> int:
        return len(self.measured)

    def select(self, which: np.ndarray) -> Rows:
        """The rows of these places, in that order."""
        by_row = ("file", "row", "batch", "length", "term_weight", "offset", "measured", "end_to_end")
        return replace(self, inputs=self.inputs[:, which], **{name: getattr(self, name)[which] for name in by_row})

    def predict(self, module: Callable[..., np.ndarray]) -> np.ndarray:
        """Predictions [R] of a module."""
        return self.offset + (self.term_weight * np.asarray(module(*self.inputs))).sum(axis=1)

    def sensitivity(self, form: Form, theta: np.ndarray) -> np.ndarray:
        """d(predicted / measured) / d(coefficients) of a form at `theta` [C]: [R, C]."""
        return (self.term_weight[:, :, None] * slopes(form, theta, self.inputs)).sum(axis=1) / self.measured[:, None]


def make_rows(measurements: Sequence[Measurements], form: Form, prefill: Callable[..., np.ndarray] | None = None) -> Rows:
    """The rows of one setup that bear on `form`; `prefill` gives the known prefill time or energy inside end-to-end rows.

    Raises `InputError` when nothing bears on the form or the data cannot carry a fit (too few rows, one batch size, a constant column).
    """
    setup = one_setup(measurements)
    wanted = "prefill" if form.table.startswith("prefill") else "decode"
    parts = []
    for m in measurements:
        use = m.select(m.has(form.quantity))
        if m.phase == "end_to_end":
            use = use.select(use.osl >= 2)  # the first token is prefill's
        if len(use) and m.phase == wanted:
            parts.append(_step_rows(use, form))
        elif len(use) and m.phase == "end_to_end" and wanted == "decode":
            if prefill is None:
                raise InputError(
                    f"{m.source.path}: row {m.row[0]}: end-to-end rows need {form.table.replace('decode', 'prefill')} (fitted from prefill "
                    "rows, or from a coefficients file given with --base): this sum alone cannot tell prefill from decode."
                )
            parts.append(_end_to_end_rows(use, form, prefill))
    name = measurements[0].source.path
    if not parts:
        raise InputError(f"{name}: no {wanted} row of {setup} with {form.quantity}: {form.table} cannot be fitted.")
    return concatenated(parts)


def concatenated(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, which are of one setup."""
    terms = max(p.inputs.shape[2] for p in parts)

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(p, name) for p in parts])

    return Rows(
        parts[0].setup,
        tuple(dict.fromkeys(s for p in parts for s in p.sources)),
        joined("file"),
        joined("row"),
        joined("batch"),
        joined("length"),
        np.concatenate([_pad_terms(p.inputs, terms) for p in parts], axis=1),
        np.concatenate([_pad_terms(p.term_weight, terms) for p in parts]),
        joined("offset"),
        joined("measured"),
        joined("end_to_end"),
        " and ".join(dict.fromkeys(p.kind for p in parts)),
    )


def check_rows(rows: Rows, form: Form, free: int) -> None:
    """Raise `InputError` when `rows` cannot carry a fit of `free` coefficients."""
    where = f"{rows.file[0]}: rows {rows.row.min()} to {rows.row.max()}"
    if len(rows) < free + 2:
        raise InputError(
            f"{where}: {len(rows)} {form.table} rows of {rows.setup} are too few for {free} coefficients; give at least {free + 2}."
        )
    if len(np.unique(rows.measured)) == 1:
        raise InputError(f"{where}: {form.quantity} of {rows.setup} is constant ({rows.measured[0]:g}): nothing can be fitted to it.")
    if not form.table.startswith("prefill") and len(np.unique(rows.batch)) == 1:
        raise InputError(
            f"{where}: {form.table} rows of {rows.setup} hold one batch size only ({rows.batch[0]:g}): "
            "its effect cannot be fitted; add other batch sizes."
        )
    if form.table.startswith("prefill") and len(np.unique(rows.inputs[0])) < 4:
        raise InputError(
            f"{where}: prefill rows of {rows.setup} hold fewer than 4 different token counts: "
            "the slopes cannot be fitted; add other lengths."
        )


def _step_rows(m: Measurements, form: Form) -> Rows:
    inputs = np.stack([getattr(m, name) for name in form.inputs])[:, :, None]
    return rows_of(m, inputs, np.ones((len(m), 1)), np.zeros(len(m)), getattr(m, form.quantity), False)


def _end_to_end_rows(m: Measurements, form: Form, prefill: Callable[..., np.ndarray]) -> Rows:
    """Static batches whose prefill is known."""
    inputs, weight = decode_terms(m)
    offset = np.array([prefill_total(prefill, b, n, form.quantity) for b, n in zip(m.batch, m.isl, strict=True)])
    return rows_of(m, inputs, weight, offset, getattr(m, form.quantity), True)


def decode_terms(m: Measurements) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [2, R, 2] (B, K) and weights [R, 2] of the decode steps of static batches: osl - 1 of them, at contexts isl + 1 to
    isl + osl - 1 (engine contract, step 4)."""
    batch = np.repeat(m.batch[:, None], 2, axis=1)
    context = np.stack([m.isl + 1.0, m.isl + m.osl - 1.0], axis=1)
    return np.stack([batch, batch * context]), np.repeat(((m.osl - 1.0) / 2.0)[:, None], 2, axis=1)


def prefill_total(prefill: Callable[..., np.ndarray], batch: float, isl: float, quantity: str) -> float:
    """Time or energy of prefilling `batch` prompts of `isl` tokens, packed into steps as in the engine contract, step 3."""
    total = 0.0
    for n, pieces, sum_sq in prefill_steps([int(isl)] * int(batch)):
        total += float(prefill(n, pieces, sum_sq) if quantity == "time_s" else prefill(n, sum_sq))
    return total


def prefill_steps(lengths: Sequence[int], budget: int = PREFILL_STEP_TOKENS) -> list[tuple[int, int, int]]:
    """(N, B, S2) of each step when prompts of `lengths` tokens are packed in order and split at the budget (engine contract, step 3)."""
    steps, n, pieces, sum_sq = [], 0, 0, 0
    for isl in lengths:
        done = 0
        while done < isl:
            take = min(isl - done, budget - n)
            n, pieces, sum_sq = n + take, pieces + 1, sum_sq + (done + take) ** 2 - done**2
            done += take
            if n == budget:
                steps.append((n, pieces, sum_sq))
                n = pieces = sum_sq = 0
    return steps + ([(n, pieces, sum_sq)] if n else [])


def prefill_terms(packed: Sequence[Sequence[tuple[int, int, int]]]) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [3, R, T] (N, B, S2) and weights [R, T] of R runs of prefill steps, full steps of one run being one term of their mean.

    Prefill is linear in B and S2, so that is their sum. Padding repeats the last term, with no weight.
    """
    runs = []
    for steps in packed:
        table = np.array(steps, float)
        tokens, count = np.unique(table[:, 0], return_counts=True)
        means = np.array([table[table[:, 0] == n].mean(axis=0) for n in tokens])
        runs.append((means, count.astype(float)))
    terms = max(len(count) for _, count in runs)
    inputs = np.stack([np.pad(means, ((0, terms - len(means)), (0, 0)), mode="edge").T for means, _ in runs], axis=1)
    return inputs, np.stack([np.pad(count, (0, terms - len(count))) for _, count in runs])


def rows_of(m: Measurements, inputs: np.ndarray, weight: np.ndarray, offset: np.ndarray, measured: np.ndarray, end_to_end: bool) -> Rows:
    """Rows of given terms; see `Rows`."""
    # The row's length is what hold-out groups by; for a static batch that is the prompt's.
    file = np.full(len(m), m.source.path, dtype=object)
    kind = "static-batch end-to-end runs" if end_to_end else "steps"
    return Rows(m.setup, (m.source,), file, m.row, m.batch, m.length, inputs, weight, offset, measured, np.full(len(m), end_to_end), kind)


def _pad_terms(x: np.ndarray, terms: int) -> np.ndarray:
    """Repeat the last term up to `terms`; repeated term weights are 0."""
    missing = terms - x.shape[-1]
    if not missing:
        return x
    filler = np.zeros_like(x[..., -1:]) if x.ndim == 2 else x[..., -1:]
    return np.concatenate([x] + [filler] * missing, axis=-1)
