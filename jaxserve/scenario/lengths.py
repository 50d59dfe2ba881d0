"""Token lengths of prompts (ISL) and answers (OSL): quantile tables, the named ones shipped in `data/lengths`."""

import csv
import io
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from jaxserve.errors import InputError
from jaxserve.scenario.rawfile import MAX_TOKENS, open_input

DATA = Path(__file__).parent / "data" / "lengths"
COLUMNS = ["probability", "isl_tokens", "osl_tokens"]

# The study mixes six data sets to a mean ISL of 2.9K tokens (arXiv 2610.14571, V-C) and does not say how. Our choice: two short uses in
# equal parts, and as many long documents as that mean needs.
MIXED_WEIGHTS = {"cnn_dailymail": 0.383, "openorca": 0.383, "long": 0.234}
TABLES = tuple(MIXED_WEIGHTS)
NAMES = (*TABLES, "mixed")


@dataclass(frozen=True)
class LengthTable:
    """Quantile functions of ISL and OSL, P rows, linear in between; ISL and OSL are independent."""

    probability: np.ndarray  # float64[P], 0 to 1, strictly rising
    isl_tokens: np.ndarray  # float64[P], tokens, never falling
    osl_tokens: np.ndarray  # float64[P], tokens, never falling

    def means(self) -> tuple[float, float]:
        """Mean (ISL, OSL) in tokens: the exact integral of the piecewise linear quantile functions, before rounding."""
        return float(np.trapezoid(self.isl_tokens, self.probability)), float(np.trapezoid(self.osl_tokens, self.probability))

    def sample(self, u_isl: np.ndarray, u_osl: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lengths (int64[R], int64[R]) in tokens, at least 1, by inverse transform of uniforms float64[R] in [0, 1)."""
        return self._invert(u_isl, self.isl_tokens), self._invert(u_osl, self.osl_tokens)

    def _invert(self, u: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return np.maximum(np.rint(np.interp(u, self.probability, tokens)).astype(np.int64), 1)


@cache
def named_table(name: str) -> LengthTable:
    """The shipped table `name`, one of `TABLES`."""
    return read_table(DATA / f"{name}.csv")


def length_means(name: str) -> tuple[float, float]:
    """Mean (ISL, OSL) in tokens of a named distribution, `mixed` included."""
    if name not in NAMES:
        raise InputError(f"lengths.distribution: '{name}' is not known; choose one of {', '.join(NAMES)}.")
    parts = MIXED_WEIGHTS if name == "mixed" else {name: 1.0}
    means = [(weight, *named_table(part).means()) for part, weight in parts.items()]
    return math.fsum(w * isl for w, isl, _ in means), math.fsum(w * osl for w, _, osl in means)


def sample_named(name: str, u_isl: np.ndarray, u_osl: np.ndarray, u_part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of a named distribution, int64[R] each; `u_part` float64[R] picks the component of a mixture and is unused otherwise."""
    if name != "mixed":
        return named_table(name).sample(u_isl, u_osl)
    edges = np.cumsum(list(MIXED_WEIGHTS.values()))[:-1]  # the last component takes what rounding leaves
    part = np.searchsorted(edges, u_part, side="right")
    isl, osl = np.empty(len(part), np.int64), np.empty(len(part), np.int64)
    for index, component in enumerate(TABLES):
        mine = part == index
        isl[mine], osl[mine] = named_table(component).sample(u_isl[mine], u_osl[mine])
    return isl, osl


def read_table(path: Path) -> LengthTable:
    """Read and check a quantile table: `probability,isl_tokens,osl_tokens`, lines that begin with # are comments."""
    header: list[str] | None = None
    rows: list[list[float]] = []
    with open_input(path) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig") as lines:
        for line, text in enumerate(lines, start=1):
            if not text.strip() or text.startswith("#"):
                continue
            try:
                fields = [cell.strip() for cell in next(csv.reader([text]))]
            except csv.Error as error:
                raise InputError(f"{path}, row {line}: is not CSV ({error}); correct the row.") from error
            if header is None:
                header = fields
                if sorted(header) != sorted(COLUMNS):
                    raise InputError(f"{path}, row {line}: the header '{text.strip()[:80]}' should be {','.join(COLUMNS)}.")
                continue
            rows.append(_row(path, line, header, fields, rows[-1] if rows else None))
    if len(rows) < 2:
        raise InputError(f"{path}: has {len(rows)} row(s) of quantiles; give at least two, at probability 0 and 1.")
    if rows[-1][0] != 1.0:
        raise InputError(f"{path}, column probability: ends at {rows[-1][0]:g}; the last row must be at probability 1.")
    probability, isl, osl = np.array(rows, np.float64).T
    return LengthTable(probability, isl, osl)


def _row(path: Path, line: int, header: list[str], fields: list[str], before: list[float] | None) -> list[float]:
    """One checked row, in the order of COLUMNS."""
    if len(fields) != len(header):
        raise InputError(f"{path}, row {line}: has {len(fields)} field(s) where the header has {len(header)}; correct the row.")
    row: list[float] = []
    for index, name in enumerate(COLUMNS):
        where = f"{path}, row {line}, column {name}"
        cell = fields[header.index(name)]
        try:
            value = float(cell)
        except ValueError as error:
            raise InputError(f"{where}: '{cell[:40]}' is not a number; give a plain number.") from error
        low, high = (0, 1) if name == "probability" else (1, MAX_TOKENS)
        if not low <= value <= high:  # NaN too
            raise InputError(f"{where}: {value:g} is outside {low} to {high}; correct the row.")
        if before is None and name == "probability" and value != 0:
            raise InputError(f"{where}: starts at {value:g}; the first row must be at probability 0.")
        if before is not None and (value < before[index] or (name == "probability" and value == before[index])):
            raise InputError(f"{where}: {value:g} after {before[index]:g}; quantiles must not fall and probabilities must rise.")
        row.append(value)
    return row
