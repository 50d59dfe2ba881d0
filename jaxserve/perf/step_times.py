"""The step times of a coefficients file: one table a phase, in one of several forms, each with its module of `jaxserve.perf.latency`."""

from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from jaxserve.perf.latency import (
    DecodeTime,
    DecodeTimeTable,
    PiecewiseDecodeTime,
    PiecewisePrefillTime,
    PrefillTime,
    PrefillTimeTable,
    TwoPieceDecodeTime,
)
from jaxserve.types import on_host

PAD = 8
"""Knots and grids are filled up to a multiple of this, so that files of one form share a compiled engine. What is added changes nothing."""

Floats = NDArray[np.float64]


class Strict(BaseModel):
    """A part of a coefficients file: no unknown field, no infinity, no text for a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


NonNegative = Annotated[float, Field(ge=0)]
Points = Annotated[tuple[float, ...], Field(strict=False)]  # TOML has lists only
Slopes = Annotated[tuple[NonNegative, ...], Field(strict=False)]


class PrefillTimeCoefficients(Strict):
    """Seconds; see `jaxserve.perf.latency.PrefillTime`."""

    form: Literal["study"] = "study"
    tok_slope_below: float = Field(ge=0)
    tok_slope_above: float = Field(ge=0)
    tok_knee: float = Field(ge=0)
    b0: float = Field(ge=0)
    b1: float = 0.0
    b2: float = 0.0

    @property
    def one_token_s(self) -> tuple[float, str]:
        """What a step of one token takes at least, and what that is in the file."""
        return self.b0 + self.tok_slope_below, "b0 + tok_slope_below"

    def model(self) -> PrefillTime:
        """The module with these coefficients."""
        return PrefillTime(**self.model_dump(exclude={"form"}))

    def shortest_s(self, max_batch: int, budget: int, kv_capacity: int) -> float:
        """A lower bound of the step time over steps of 1 <= N <= `budget` tokens in at most `max_batch` pieces."""
        return _shortest(self.model(), [self.tok_knee], max_batch, budget, kv_capacity)


class PiecewisePrefillTimeCoefficients(Strict):
    """Seconds; see `jaxserve.perf.latency.PiecewisePrefillTime`. Never falls in N, B or S2."""

    form: Literal["piecewise"]
    tok_slopes: Slopes
    """s per token, one more than there are knots."""
    tok_knots: Points
    """Tokens at which the slope changes, ascending."""
    b0: float = Field(ge=0)
    b1: float = Field(default=0.0, ge=0)
    b2: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _whole(self) -> "PiecewisePrefillTimeCoefficients":
        _check_pieces("tok", self.tok_knots, self.tok_slopes)
        return self

    @property
    def one_token_s(self) -> tuple[float, str]:
        """As in `PrefillTimeCoefficients`."""
        return self.b0 + self.tok_slopes[0], "b0 + tok_slopes.0"

    def model(self) -> PiecewisePrefillTime:
        """The module with these coefficients, its knots filled up."""
        knots, slopes = _filled(self.tok_knots, self.tok_slopes)
        return PiecewisePrefillTime(tok_slopes=slopes, tok_knots=knots, b0=self.b0, b1=self.b1, b2=self.b2)

    def shortest_s(self, max_batch: int, budget: int, kv_capacity: int) -> float:
        """As in `PrefillTimeCoefficients`."""
        return _shortest(self.model(), self.tok_knots, max_batch, budget, kv_capacity)


class DecodeTimeCoefficients(Strict):
    """Seconds; see `jaxserve.perf.latency.DecodeTime`."""

    form: Literal["study", "two_piece"] = "study"
    alpha0: float
    alpha1: float
    alpha1_below: float | None = None
    """Slope up to `batch_knee`; these two belong to the two-piece form only."""
    batch_knee: float | None = None
    alpha2: float = 0.0
    beta0: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0

    @model_validator(mode="after")
    def _whole_form(self) -> "DecodeTimeCoefficients":
        pieces = [value is not None for value in (self.alpha1_below, self.batch_knee)]
        if pieces != [self.form == "two_piece"] * 2:
            raise ValueError("alpha1_below and batch_knee belong to form = 'two_piece', which needs both")
        return self

    @property
    def empty_s(self) -> float:
        """What a step takes whatever it holds."""
        return self.alpha0

    def model(self) -> DecodeTime | TwoPieceDecodeTime:
        """The module with these coefficients."""
        values = self.model_dump(exclude={"form"}, exclude_none=True)
        return TwoPieceDecodeTime(**values) if self.form == "two_piece" else DecodeTime(**values)

    def bends(self) -> Points:
        """Mean contexts at which the slope in the context changes: none."""
        return ()


class PiecewiseDecodeTimeCoefficients(Strict):
    """Seconds; see `jaxserve.perf.latency.PiecewiseDecodeTime`. Never falls in the batch or in the mean context."""

    form: Literal["piecewise"]
    alpha0: float
    batch_slopes: Slopes
    """s per request, one more than there are knots."""
    batch_knots: Points
    """Requests at which the slope changes, ascending."""
    beta0: float = Field(default=0.0, ge=0)
    beta1: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _whole(self) -> "PiecewiseDecodeTimeCoefficients":
        _check_pieces("batch", self.batch_knots, self.batch_slopes)
        return self

    @property
    def empty_s(self) -> float:
        """What a step takes whatever it holds."""
        return self.alpha0

    def model(self) -> PiecewiseDecodeTime:
        """The module with these coefficients, its knots filled up."""
        knots, slopes = _filled(self.batch_knots, self.batch_slopes)
        return PiecewiseDecodeTime(alpha0=self.alpha0, batch_slopes=slopes, batch_knots=knots, beta0=self.beta0, beta1=self.beta1)

    def bends(self) -> Points:
        """Mean contexts at which the slope in the context changes: none."""
        return ()


def _rows(value: Any) -> Any:
    """A grid as rows; a plain list is a grid of one column."""
    if not isinstance(value, list | tuple):
        return value
    return tuple(tuple(row) if isinstance(row, list | tuple) else (row,) for row in value)


Grid = Annotated[tuple[tuple[float, ...], ...], BeforeValidator(_rows)]


class PrefillTimeGrid(Strict):
    """A grid of measured prefill steps, taken as it is; see `jaxserve.perf.latency.PrefillTimeTable`."""

    form: Literal["table"]
    n_tokens: Points
    """New tokens of the step, ascending."""
    seq_len: Points | None = None
    """Tokens of its prompts, which are alike, ascending; without it time does not depend on them."""
    time_s: Grid
    """Seconds, a row for each of `n_tokens`, in it one for each of `seq_len`."""

    @model_validator(mode="after")
    def _a_grid(self) -> "PrefillTimeGrid":
        _check_grid("n_tokens", self.n_tokens, "seq_len", self.seq_len, self.time_s)
        return self

    @property
    def one_token_s(self) -> tuple[float, str]:
        """As in `PrefillTimeCoefficients`."""
        return self.time_s[0][0], "time_s.0"

    def model(self) -> PrefillTimeTable:
        """The module of this grid, filled up."""
        return PrefillTimeTable(*_filled_grid(self.n_tokens, self.seq_len, self.time_s))

    def shortest_s(self, max_batch: int, budget: int, kv_capacity: int) -> float:
        """As in `PrefillTimeCoefficients`; S2/N lies between 1 and 2 * `kv_capacity`, and the least is at a corner of a cell."""
        tokens, lengths = _ends(self.n_tokens, 1.0, budget), _ends(self.seq_len or (), 1.0, 2.0 * kv_capacity)
        return float(jnp.min(jnp.asarray(self.model()(on_host(tokens[:, None]), 1.0, on_host(tokens[:, None] * lengths)))))


class DecodeTimeGrid(Strict):
    """A grid of measured decode steps, taken as it is; see `jaxserve.perf.latency.DecodeTimeTable`."""

    form: Literal["table"]
    batch: Points
    """Requests of the step, ascending."""
    mean_ctx: Points | None = None
    """Cached tokens a request, ascending; without it time does not depend on them."""
    time_s: Grid
    """Seconds, a row for each of `batch`, in it one for each of `mean_ctx`."""

    @model_validator(mode="after")
    def _a_grid(self) -> "DecodeTimeGrid":
        _check_grid("batch", self.batch, "mean_ctx", self.mean_ctx, self.time_s)
        return self

    @property
    def empty_s(self) -> float:
        """The least time of the grid."""
        return self.time_s[0][0]

    def model(self) -> DecodeTimeTable:
        """The module of this grid, filled up."""
        return DecodeTimeTable(*_filled_grid(self.batch, self.mean_ctx, self.time_s))

    def bends(self) -> Points:
        """Mean contexts at which the slope in the context changes."""
        return self.mean_ctx or ()


def _named(value: Any) -> Any:
    """A table that names no form is in the study's."""
    return {"form": "study"} | value if isinstance(value, dict) else value


PrefillTable = Annotated[
    Annotated[PrefillTimeCoefficients | PiecewisePrefillTimeCoefficients | PrefillTimeGrid, Field(discriminator="form")],
    BeforeValidator(_named),
]
DecodeTable = Annotated[
    Annotated[DecodeTimeCoefficients | PiecewiseDecodeTimeCoefficients | DecodeTimeGrid, Field(discriminator="form")],
    BeforeValidator(_named),
]


def _shortest(
    model: PrefillTime | PiecewisePrefillTime, knots: tuple[float, ...] | list[float], max_batch: int, budget: int, kv_capacity: int
) -> float:
    """A bound for forms linear in B and S2: S2 is below 2 * `kv_capacity` * N. Piecewise linear in N, so the ends of its pieces suffice."""
    tokens = np.unique(np.clip([1.0, *knots, max_batch, budget], 1.0, budget))
    pieces = float(model.b1) * (np.minimum(tokens, max_batch) if float(model.b1) < 0 else 1.0)
    squares = float(model.b2) * (2.0 * kv_capacity * tokens if float(model.b2) < 0 else tokens)
    return float((np.asarray(model(on_host(tokens), 0.0, 0.0)) + pieces + squares).min())


def _check_pieces(what: str, knots: tuple[float, ...], slopes: tuple[float, ...]) -> None:
    if len(slopes) != len(knots) + 1:
        raise ValueError(f"{what}_slopes must have one entry more than {what}_knots (got {len(slopes)} and {len(knots)})")
    _check_ascending(f"{what}_knots", knots)
    if knots and knots[0] <= 0:
        raise ValueError(f"{what}_knots.0 must be above 0 (got {knots[0]:g})")


def _check_ascending(name: str, values: tuple[float, ...]) -> None:
    for i in range(1, len(values)):
        if values[i] <= values[i - 1]:
            raise ValueError(f"{name}.{i} must be above the entry before it (got {values[i]:g} after {values[i - 1]:g})")


def _check_grid(x_name: str, x: tuple[float, ...], y_name: str, y: tuple[float, ...] | None, time_s: tuple[tuple[float, ...], ...]) -> None:
    """Raise `ValueError` on fewer than two points along an axis, gaps, a step that takes no time, or more work that takes less of it."""
    for name, points in ((x_name, x), *(((y_name, y),) if y is not None else ())):
        if len(points) < 2:
            raise ValueError(f"{name} must have at least 2 points to interpolate between (got {len(points)})")
        _check_ascending(name, points)
        if points[0] < 0:
            raise ValueError(f"{name}.0 must be at least 0 (got {points[0]:g})")
    if len(time_s) != len(x):
        raise ValueError(f"time_s must have a row for each of {x_name} (got {len(time_s)} rows, {len(x)} points)")
    columns = 1 if y is None else len(y)
    for i, row in enumerate(time_s):
        if len(row) != columns:
            wanted = f"one for each of {y_name}" if y is not None else f"there is no {y_name} to tell them apart"
            raise ValueError(f"time_s.{i} must have {columns} entr{'ies' if columns > 1 else 'y'}, {wanted} (got {len(row)})")
    grid = np.array(time_s)
    if (grid <= 0).any():
        i, j = np.argwhere(grid <= 0)[0]
        raise ValueError(f"time_s.{i}.{j} must be above 0 s (got {grid[i, j]:g})")
    for axis, name, points in ((0, x_name, x), (1, y_name, y or (0.0,))):
        falls = np.argwhere(np.diff(grid, axis=axis) < 0)
        if len(falls):
            i, j = falls[0]
            before, after = grid[i, j], grid[i + 1 - axis, j + axis]
            low, high = points[(i, j)[axis]], points[(i, j)[axis] + 1]
            raise ValueError(
                f"time_s falls from {before:g} s at {name} = {low:g} to {after:g} s at {high:g} (row {i + 1 - axis}, column {j + axis}): "
                "more work cannot take less time; measure again or leave that point out"
            )


def _filled(knots: tuple[float, ...], slopes: tuple[float, ...]) -> tuple[Array, Array]:
    """Knots at infinity and slopes beyond them, up to a multiple of `PAD`."""
    spare = -len(knots) % PAD if knots else PAD
    return on_host(np.append(knots, np.full(spare, np.inf))), on_host(np.append(slopes, np.full(spare, slopes[-1])))


def _filled_grid(x: tuple[float, ...], y: tuple[float, ...] | None, time_s: tuple[tuple[float, ...], ...]) -> tuple[Array, Array, Array]:
    """Axes and grid, up to multiples of `PAD` points that carry the outermost cells on."""
    values = np.array(time_s)
    second = np.array([0.0, 1.0] if y is None else y)
    values = np.repeat(values, 2, axis=1) if y is None else values
    first, values = _carried_on(np.array(x), values)
    second, values = _carried_on(second, values.T)
    return on_host(first), on_host(second), on_host(values.T)


def _carried_on(points: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Points [I] and values [I, J] with more at their end, in a line with the last two."""
    ahead = np.arange(1.0, -len(points) % PAD + 1)
    more = values[-1] + ahead[:, None] * (values[-1] - values[-2])
    return np.append(points, points[-1] + ahead * (points[-1] - points[-2])), np.concatenate([values, more])


def _ends(points: tuple[float, ...], low: float, high: float) -> Floats:
    """The points inside [low, high] and its ends."""
    return np.unique(np.clip([low, *points, high], low, high))
