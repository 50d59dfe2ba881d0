"""Published tables as their authors wrote them become measurements: names, units and sums are declared in `columns.LAYOUTS`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from calibration_fit.columns import LAYOUTS, From, Layout
from jaxserve.errors import InputError


def find_layout(columns: Iterable[str]) -> Layout | None:
    """The layout all of whose marks are among the `columns`."""
    held = set(columns)
    return next((layout for layout in LAYOUTS if held.issuperset(layout.marks)), None)


def read_as(layout: Layout, columns: Iterable[str]) -> set[str]:
    """Which of the `columns` the layout knows."""
    known = {*layout.kept, *layout.setup.values(), *(c for part in layout.columns.values() for c in part.named)}
    return known & set(columns)


def translated(table: Any, layout: Layout, name: str, row: np.ndarray, isl: float | None) -> pd.DataFrame:
    """The rows of one setup in our columns, as text; `row` [R] are their numbers in the file, `isl` the prompt length if it is not there.

    Raises `InputError` naming file, row and the file's own column for what is no number, for rows that cannot be used together, and for a
    prompt length that is needed.
    """
    for column in layout.single:
        values = table[column].unique() if column in table.columns else []
        if len(values) > 1:
            held, one = ", ".join(values), values[0]
            raise InputError(f"{name}: row {row[0]} on: holds several values of {column} ({held}): choose one with --where {column}={one}")
    for column, value in layout.only.items():
        if column in table.columns and len(other := np.flatnonzero((table[column] != value).to_numpy())):
            found = table[column].iloc[other[0]]
            raise InputError(f"{name}: row {row[other[0]]}: {column} is {found}, which is not modelled here: keep --where {column}={value}")
    out: dict[str, Any] = {"phase": layout.phase}
    for column, part in layout.columns.items():
        if column in layout.optional and not set(part.named) <= set(table.columns):
            continue
        if part.after_prompt and isl is None:
            raise InputError(f"{name}: row 1: a table of {layout.name} does not hold the prompt length: give it with --isl")
        out[column] = [repr(float(v)) for v in _made(table, part, name, row) + (isl if part.after_prompt and isl else 0.0)]
    return pd.DataFrame(out, index=table.index, dtype=str)


def _made(table: Any, part: From, name: str, row: np.ndarray) -> np.ndarray:
    """Values [R] of one of our columns."""
    result = np.full(len(table), part.factor)
    for column in part.named:
        values = np.array(pd.to_numeric(table[column], errors="coerce"), dtype=float)
        bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if len(bad):
            text = table[column].iloc[bad[0]]
            raise InputError(f"{name}: row {row[bad[0]]}: {column} is {text or 'empty'}; it must be a number above 0.")
        result = result * values if column in part.times else result / values
    return result
