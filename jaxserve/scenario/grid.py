"""The grid: carbon intensity by zone, from a constant, the shipped typical day, or files of the user's own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from jaxserve.errors import InputError
from jaxserve.scenario.signals import (
    US_PER_S,
    Column,
    GridSeries,
    SignalFile,
    missing_zone,
    parse_cells,
    read_signal_file,
    unsorted_lines,
    utc_text,
    utc_us,
)

__all__ = [
    "DERIVED_ZONES", "ConstantGrid", "FileGrid", "GridSeries", "GridSpec", "TableGrid", "load_grid", "shipped_zones",
]  # fmt: skip

TYPICAL_DAY = Path(__file__).parent / "data" / "grid" / "typical_day.csv"
DERIVED_ZONES = frozenset({"BE", "BR-N", "BR-NE", "BR-S", "JP-CB", "JP-CG", "JP-KN", "LT", "LV", "NL", "US-CAR-DUK", "US-NE-ISNE"})
"""Zones of the shipped table that no publisher measured hour by hour for all four years; see data/grid/README.md."""

US_PER_MINUTE = 60 * US_PER_S
US_PER_HOUR = 60 * US_PER_MINUTE
STEPS_MIN = (5, 10, 15, 20, 30, 60)
"""Resolutions that a file may have."""
LONGEST_S = 100 * 366 * 86_400.0
"""A hundred years: beyond it a duration is a slip of the unit, and the steps would not fit in memory."""


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


CarbonIntensity = Annotated[float, Field(strict=True, ge=0, le=1e6, allow_inf_nan=False)]
"""gCO2eq/kWh. Strict, so that neither text nor true becomes a number."""


def _one_or_by_zone(value: Any) -> str:
    return "by_zone" if isinstance(value, dict) else "all_zones"


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class ConstantGrid(_Spec):
    """The same carbon intensity at all times."""

    kind: Literal["constant"]
    # The explicit discriminator keeps the error to the branch that the user meant.
    ci_g_per_kwh: Annotated[
        Annotated[dict[str, CarbonIntensity], Tag("by_zone")] | Annotated[CarbonIntensity, Tag("all_zones")],
        Discriminator(_one_or_by_zone),
    ]
    """gCO2eq/kWh: one number for all zones, or one for each."""


class TableGrid(_Spec):
    """The shipped typical day: means of 2021-2024 by month and UTC hour. It wraps by design, so it serves any date."""

    kind: Literal["table"]
    signal: Literal["lca", "direct"] = "lca"
    """Life-cycle or operational emissions; `direct` is shipped for the 16 published zones only."""


class FileGrid(_Spec):
    """Hourly or finer files: wide (a time column, then one column a zone) or Electricity Maps long exports; .gz too."""

    kind: Literal["file"]
    path: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list), Field(min_length=1)]
    """One file or several, relative to the scenario's folder. The rows of a zone that several files hold are joined."""
    signal: Literal["average", "marginal"] = "average"
    basis: Literal["lca", "direct"] | None = None
    """Chooses the value column of a long export; a label for a wide file."""
    fill: Literal["error", "hold", "interpolate"] = "error"
    """What becomes of a step without a (single) value: refused, the last value before it, or linear between neighbours."""
    allow_negative: bool = False
    zone_column: dict[str, str] = Field(default_factory=dict)
    """Zone -> its column (wide) or zone id (long export), where that is not the zone's own name."""

    @model_validator(mode="after")
    def _negative_only_if_marginal(self) -> "FileGrid":
        if self.allow_negative and self.signal != "marginal":
            raise ValueError("allow_negative is only for signal = 'marginal': an average carbon intensity is never negative")
        return self


GridSpec = Annotated[ConstantGrid | TableGrid | FileGrid, Field(discriminator="kind")]


def load_grid(
    spec: ConstantGrid | TableGrid | FileGrid, *, zones: list[str], start: datetime, duration_s: float, base_dir: Path
) -> GridSeries:
    """Carbon intensity of `zones` over [0, duration_s) of a run that begins at `start` (aware)."""
    if start.tzinfo is None:
        raise InputError(f"start: {start.isoformat()} has no time zone; add Z or an offset")
    if not 0 < duration_s <= LONGEST_S:
        raise InputError(f"duration_s: {duration_s:g} s is not between 0 and a hundred years; give the run's length in seconds")
    if not zones:
        raise InputError("grid: no zone to look up; give every site a zone")
    start = start.astimezone(UTC)
    if isinstance(spec, ConstantGrid):
        return _constant(spec, zones, start)
    span = (utc_us(start), utc_us(start) + math.ceil(duration_s * US_PER_S))
    if isinstance(spec, TableGrid):
        return _typical_day(spec, zones, start, span)
    return _from_files(spec, zones, start, span, base_dir)


def shipped_zones(signal: str = "lca") -> tuple[str, ...]:
    """Zones of the shipped table for `lca` or `direct`."""
    return _read_table(signal)[0]


def _constant(spec: ConstantGrid, zones: list[str], start: datetime) -> GridSeries:
    value = spec.ci_g_per_kwh
    if isinstance(value, dict):
        for zone in zones:
            if zone not in value:
                raise missing_zone("grid.ci_g_per_kwh", zone, list(value))
    row = [value[zone] if isinstance(value, dict) else value for zone in zones]
    return GridSeries(
        zones=tuple(zones), edges_s=np.zeros(1), ci_g_per_kwh=np.array([row], dtype=np.float64), until_s=math.inf,
        signal="average", basis="unspecified", source="grid.ci_g_per_kwh", notes=(), counts=_counts(), start=start,
    )  # fmt: skip


@cache
def _read_table(signal: str) -> tuple[tuple[str, ...], NDArray[np.float64]]:
    """Zones [Z] and gCO2eq/kWh [month 12, UTC hour 24, Z] of the shipped table."""
    table = pd.read_csv(TYPICAL_DAY, keep_default_na=False, na_values=[""])
    table = table.set_index(["signal", "month", "hour_utc"]).sort_index().loc[signal].dropna(axis="columns")
    return tuple(table.columns), table.to_numpy(dtype=np.float64).reshape(12, 24, -1)


def _typical_day(spec: TableGrid, zones: list[str], start: datetime, span: tuple[int, int]) -> GridSeries:
    shipped, table = _read_table(spec.signal)
    for zone in zones:
        if zone not in shipped:
            raise missing_zone(f"grid: the shipped typical day ({spec.signal})", zone, shipped)
    edges_us = np.arange(span[0] // US_PER_HOUR * US_PER_HOUR, span[1], US_PER_HOUR)
    hours = pd.DatetimeIndex(edges_us.astype("datetime64[us]"))
    columns = [shipped.index(zone) for zone in zones]
    derived = sorted(DERIVED_ZONES.intersection(zones))
    return GridSeries(
        zones=tuple(zones), edges_s=(edges_us - span[0]) / US_PER_S,
        ci_g_per_kwh=table[hours.month - 1, hours.hour][:, columns], until_s=float(edges_us[-1] + US_PER_HOUR - span[0]) / US_PER_S,
        signal="average", basis=spec.signal, source=f"typical day 2021-2024 ({spec.signal})",
        notes=("grid: carbon intensity by Electricity Maps (ODbL), means of 2021-2024 by month and UTC hour",)
        + ((f"grid: derived, not measured hour by hour: {', '.join(derived)}",) if derived else ()),
        counts=_counts(), start=start,
    )  # fmt: skip


def _from_files(spec: FileGrid, zones: list[str], start: datetime, span: tuple[int, int], base_dir: Path) -> GridSeries:
    column_of = {zone: spec.zone_column.get(zone, zone) for zone in zones}
    files = [read_signal_file(base_dir / path, list(column_of.values()), spec.basis) for path in spec.path]
    source = ", ".join(spec.path)
    basis = _common_basis(spec, files)
    steps: dict[str, _Steps] = {}
    duplicates: set[tuple[str, int]] = set()
    unsorted: set[tuple[str, int]] = set()
    for zone, name in column_of.items():
        found = [file.columns[name] for file in files if name in file.columns]
        if not found:
            where = ", ".join(file.label for file in files)
            raise missing_zone(where, zone, sorted({n for file in files for n in file.have}), column=name)
        samples = _merge(zone, found, spec.allow_negative)
        steps[zone] = _on_grid(zone, samples, spec.fill, span)
        duplicates |= samples.duplicates
        unsorted = unsorted.union(*map(unsorted_lines, found))
    # Zones may differ in resolution, so the series steps wherever any of them does.
    first_us, until_us = max(int(s.edges_us[0]) for s in steps.values()), min(s.until_us for s in steps.values())
    edges_us = np.unique(np.concatenate([s.edges_us for s in steps.values()]))
    edges_us = edges_us[(edges_us >= first_us) & (edges_us < until_us)]
    by_zone = {zone: s.value[np.searchsorted(s.edges_us, edges_us, side="right") - 1] for zone, s in steps.items()}
    counts = _counts(sum(s.filled for s in steps.values()), len(duplicates), len(unsorted))
    notes = [
        f"grid: zone {zone}: {s.filled} steps of {s.step_min} min filled ({spec.fill}), {s.conflicts} of them had two values"
        for zone, s in steps.items()
        if s.filled
    ]
    notes += [f"grid: {len(duplicates)} duplicate rows merged"] if duplicates else []
    notes += [f"grid: {len(unsorted)} rows out of order sorted"] if unsorted else []
    return GridSeries(
        zones=tuple(zones), edges_s=(edges_us - span[0]) / US_PER_S, ci_g_per_kwh=np.stack([by_zone[zone] for zone in zones], axis=1),
        until_s=(until_us - span[0]) / US_PER_S, signal=spec.signal, basis=basis, source=source, notes=tuple(notes), counts=counts,
        start=start,
    )  # fmt: skip


def _counts(filled: int = 0, duplicates: int = 0, unsorted: int = 0) -> dict[str, int]:
    return {"filled_hours": filled, "duplicate_rows": duplicates, "unsorted_rows": unsorted}


def _common_basis(spec: FileGrid, files: Sequence[SignalFile]) -> str:
    """The basis that all files share; headers that contradict the spec's labels are refused."""
    bases: dict[str, str] = {}
    for file in files:
        for header in file.value_headers:
            if spec.signal == "average" and "marginal" in header.casefold():
                raise InputError(f"{file.label}: row 1: column '{header}' is marginal but grid.signal is 'average'; set it to 'marginal'")
        if file.columns:
            bases.setdefault(file.basis or spec.basis or "unspecified", file.label)
    if len(bases) > 1:
        told = " and ".join(f"{basis} ({label})" for basis, label in sorted(bases.items()))
        raise InputError(f"grid.path: {told} values would be mixed; set grid.basis, or give files of one basis")
    return next(iter(bases), spec.basis or "unspecified")


VALUE, HOLE, WRONG, CONFLICT = 0, 1, 2, 3


@dataclass(frozen=True)
class _Samples:
    """One zone's rows of all files: times ascending and distinct, N of them."""

    label: str
    time_us: NDArray[np.int64]
    value: NDArray[np.float64]
    """[N] gCO2eq/kWh, NaN unless state is VALUE."""
    state: NDArray[np.int8]
    """[N] VALUE, HOLE (empty), WRONG (text, infinite, negative), CONFLICT (duplicates that differ)."""
    told: dict[int, str]
    """By index: where and what a HOLE, WRONG or CONFLICT is."""
    duplicates: set[tuple[str, int]]
    """(file, line) of every row beyond the first of its time stamp."""


@dataclass(frozen=True)
class _Steps:
    """One zone over a run: value i holds on [edges_us[i], edges_us[i] + step)."""

    edges_us: NDArray[np.int64]
    value: NDArray[np.float64]
    until_us: int
    filled: int
    conflicts: int
    """How many of the filled steps had rows that contradict each other."""
    step_min: int


def _merge(zone: str, columns: Sequence[Column], allow_negative: bool) -> _Samples:
    """Sorts one zone's rows and merges those of equal time stamp."""
    labels = [column.label for column in columns for _ in column.cells]
    files = list(dict.fromkeys(labels))
    line = np.concatenate([column.line for column in columns])
    raw_time = np.concatenate([column.time_us for column in columns])
    raw_value, wrong = parse_cells([cell for column in columns for cell in column.cells])
    if not allow_negative:
        advice = "is negative, which only a marginal signal may be (signal = 'marginal', allow_negative = true)"
        wrong |= {int(i): f"{raw_value[i]:g} {advice}" for i in np.flatnonzero(raw_value < 0) if i not in wrong}
    order = np.argsort(raw_time, kind="stable")
    time_us, first = np.unique(raw_time[order], return_index=True)
    lasts = np.append(first[1:], len(order))
    value = raw_value[order[first]]
    state = np.where(np.isnan(value), HOLE, VALUE).astype(np.int8)
    slot = np.empty(len(order), dtype=np.int64)
    slot[order] = np.repeat(np.arange(len(first)), lasts - first)

    def told_row(row: int) -> str:
        return f"row {line[row]}" + (f" of {labels[row]}" if len(files) > 1 else "")

    told = {int(i): f"{told_row(int(order[first[i]]))} is empty" for i in np.flatnonzero(state == HOLE)}
    duplicates: set[tuple[str, int]] = set()
    for i in np.flatnonzero(lasts - first > 1):
        rows = order[first[i] : lasts[i]]
        duplicates |= {(labels[row], int(line[row])) for row in rows[1:]}
        # An empty cell contradicts nothing: the other row's value stands.
        known = rows[~np.isnan(raw_value[rows])]
        if known.size:
            value[i], state[i] = raw_value[known[0]], VALUE
        differs = known[raw_value[known] != value[i]]
        if differs.size:
            a, b = known[0], differs[0]
            value[i], state[i] = np.nan, CONFLICT
            told[int(i)] = f"{told_row(a)} and {told_row(b)} give {raw_value[a]:g} and {raw_value[b]:g}"
    for row, what in wrong.items():
        i = int(slot[row])
        value[i], state[i], told[i] = np.nan, WRONG, f"{told_row(row)}, zone {zone}, hour {utc_text(int(time_us[i]))}: {what}"
    return _Samples(", ".join(files), time_us, value, state, told, duplicates)


def _resolution(zone: str, samples: _Samples) -> tuple[int, int]:
    """The most common step of the file and its most common phase, us."""
    allowed = [minutes * US_PER_MINUTE for minutes in STEPS_MIN]
    gaps, times = np.unique(np.diff(samples.time_us), return_counts=True)
    # Of equally common steps one that is allowed: a single stray stamp in a short file makes two that are not.
    common = sorted(gaps[times == times.max()].tolist(), key=lambda gap: gap not in allowed) if gaps.size else [US_PER_HOUR]
    step = int(common[0])
    if step > US_PER_HOUR and step % US_PER_HOUR == 0:
        step = US_PER_HOUR  # Two rows around a hole, or a file with holes everywhere: each is then told by its hour.
    if step not in allowed:
        raise InputError(
            f"{samples.label}: zone {zone}: most time stamps are {step / US_PER_MINUTE:g} min apart; "
            f"give one row every {', '.join(map(str, STEPS_MIN))} min"
        )
    phases, times = np.unique(samples.time_us % step, return_counts=True)
    return step, int(phases[np.argmax(times)])


def _on_grid(zone: str, samples: _Samples, fill: str, span: tuple[int, int]) -> _Steps:
    """The zone's values over the run [start, end) of `span`; only what the run needs is judged."""
    step, phase = _resolution(zone, samples)
    label, time_us = samples.label, samples.time_us
    regular = (time_us - phase) % step == 0
    edges_us = np.arange((span[0] - phase) // step * step + phase, span[1], step)
    begin, end = int(time_us[regular][0]), int(time_us[regular][-1]) + step
    if edges_us[0] < begin or edges_us[-1] >= end:
        lost = int(edges_us[0]) if edges_us[0] < begin else max(end, int(edges_us[0]))
        raise InputError(
            f"{label}: zone {zone} has no value at hour {utc_text(lost)}, outside the file ({utc_text(begin)} until {utc_text(end)}); "
            "move or shorten the run, or give a file that covers it"
        )
    stray = np.flatnonzero(~regular & (time_us >= edges_us[0]) & (time_us < edges_us[-1] + step))
    if stray.size:
        raise InputError(
            f"{label}: zone {zone}: the time stamp {utc_text(int(time_us[stray[0]]))} is off the file's {step // US_PER_MINUTE} min steps; "
            "correct it, or split the file where its resolution changes"
        )
    at = np.minimum(np.searchsorted(time_us, edges_us), len(time_us) - 1)
    present = time_us[at] == edges_us
    state = np.where(present, samples.state[at], HOLE)
    value = np.where(present, samples.value[at], np.nan)
    _refuse_wrong(samples, at[state == WRONG])
    holes = np.flatnonzero(state != VALUE)
    if holes.size:
        if fill == "error":
            i = holes[0]
            told = samples.told[int(at[i])] if present[i] else "no row"
            what, advice = ("two values", "keep one, write times with their UTC offset") if state[i] == CONFLICT else ("no value", "add it")
            raise InputError(
                f"{label}: zone {zone} has {what} at hour {utc_text(int(edges_us[i]))} ({told}); {advice}, "
                "or set grid.fill to 'hold' or 'interpolate'"
            )
        value[holes] = _filled(zone, samples, regular, fill, edges_us[holes])
    conflicts = int(np.count_nonzero(state == CONFLICT))
    return _Steps(edges_us, value, int(edges_us[-1]) + step, int(holes.size), conflicts, step // US_PER_MINUTE)


def _filled(zone: str, samples: _Samples, regular: NDArray[np.bool_], fill: str, holes_us: NDArray[np.int64]) -> NDArray[np.float64]:
    """gCO2eq/kWh of the holes [H], from the nearest values in the file, inside or outside the run."""
    # A wrong cell stays a neighbour, so that it is told rather than stepped over.
    known = np.flatnonzero(regular & ((samples.state == VALUE) | (samples.state == WRONG)))
    right = np.searchsorted(samples.time_us[known], holes_us)
    alone = (right == 0) | ((right == len(known)) & (fill == "interpolate"))
    if alone.any():
        i = np.flatnonzero(alone)[0]
        side = "before" if right[i] == 0 else "after"
        raise InputError(
            f"{samples.label}: zone {zone} has no value at hour {utc_text(int(holes_us[i]))} and none {side} it in the file "
            f"to {fill} from; add it, or move the run"
        )
    before = known[right - 1]
    _refuse_wrong(samples, before[samples.state[before] == WRONG])
    if fill == "hold":
        return samples.value[before]
    after = known[right]
    _refuse_wrong(samples, after[samples.state[after] == WRONG])
    weight = (holes_us - samples.time_us[before]) / (samples.time_us[after] - samples.time_us[before])
    return samples.value[before] + weight * (samples.value[after] - samples.value[before])


def _refuse_wrong(samples: _Samples, indices: NDArray[np.intp]) -> None:
    if indices.size:
        raise InputError(f"{samples.label}: {samples.told[int(indices[0])]}; correct the cell")
