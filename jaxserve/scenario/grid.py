"""The grid: carbon intensity by zone, from a constant, the shipped typical day, or files of the user's own."""

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from jaxserve.errors import InputError
from jaxserve.scenario.ci_units import G_PER_KWH, CiUnit, implausible, is_moer, unit_of
from jaxserve.scenario.grid_steps import US_PER_HOUR, Steps, merge, on_grid
from jaxserve.scenario.signals import US_PER_S, Column, GridSeries, SignalFile, missing_zone, read_signal_file, unsorted_lines, utc_us

__all__ = [
    "DERIVED_ZONES", "ConstantGrid", "FileGrid", "GridSeries", "GridSpec", "TableGrid", "load_grid", "shipped_zones",
]  # fmt: skip

TYPICAL_DAY = Path(__file__).parent / "data" / "grid" / "typical_day.csv"
DERIVED_ZONES = frozenset({"BE", "BR-N", "BR-NE", "BR-S", "JP-CB", "JP-CG", "JP-KN", "LT", "LV", "NL", "US-CAR-DUK", "US-NE-ISNE"})
"""Zones of the shipped table that no publisher measured hour by hour for all four years; see data/grid/README.md."""

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
    unit: CiUnit | None = None
    """Of the values; absent: what their header says, else g/kWh."""
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
    span = (utc_us(start), utc_us(start) + math.ceil(duration_s * US_PER_S))
    if isinstance(spec, ConstantGrid):
        series = _constant(spec, zones, start)
    elif isinstance(spec, TableGrid):
        series = _typical_day(spec, zones, start, span)
    else:
        series = _from_files(spec, zones, start, span, base_dir)
    field = "grid.unit" if isinstance(spec, FileGrid) else "grid.ci_g_per_kwh"
    doubts = implausible(series.zones, series.ci_g_per_kwh, series.signal, series.basis, field)
    return replace(series, notes=(*series.notes, *doubts))


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
    steps: dict[str, Steps] = {}
    duplicates: set[tuple[str, int]] = set()
    unsorted: set[tuple[str, int]] = set()
    for zone, name in column_of.items():
        found = [file.columns[name] for file in files if name in file.columns]
        if not found:
            where = ", ".join(file.label for file in files)
            raise missing_zone(where, zone, sorted({n for file in files for n in file.have}), column=name)
        samples = merge(zone, found, [G_PER_KWH[_unit(spec, column)[0]] for column in found], spec.allow_negative)
        steps[zone] = on_grid(zone, samples, spec.fill, span)
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
    used = [file for file in files if file.columns]
    notes += dict.fromkeys(
        f"grid: values read as {unit} ({why})" + (f", 1 {unit} = {G_PER_KWH[unit]:.4g} g/kWh" if unit != "g/kWh" else "")
        for file in used
        for unit, why in (_unit(spec, column) for column in file.columns.values())
    )
    notes += [f"grid: {Path(file.label).name}: no offset at its time stamps, read as UTC" for file in used if file.assumed_utc]
    estimated = [f"{zone} {s.estimated:.0%}" for zone, s in steps.items() if s.estimated]
    notes += [f"grid: estimated by the publisher, share of the run's values: {', '.join(estimated)}"] if estimated else []
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
        for header in dict.fromkeys(column.header for column in file.columns.values()):
            if spec.signal == "average" and ("marginal" in header.casefold() or is_moer(header)):
                raise InputError(f"{file.label}: row 1: column '{header}' is marginal but grid.signal is 'average'; set it to 'marginal'")
        if file.columns:
            bases.setdefault(file.basis or spec.basis or "unspecified", file.label)
    if len(bases) > 1:
        told = " and ".join(f"{basis} ({label})" for basis, label in sorted(bases.items()))
        raise InputError(f"grid.path: {told} values would be mixed; set grid.basis, or give files of one basis")
    return next(iter(bases), spec.basis or "unspecified")


def _unit(spec: FileGrid, column: Column) -> tuple[CiUnit, str]:
    """The unit of a column's values, and why it is taken for that; a scenario that contradicts the header is refused."""
    says, why = unit_of(column.header)
    if says is None:
        return (spec.unit, "grid.unit") if spec.unit else ("g/kWh", "the header names no unit, nor does grid.unit")
    if spec.unit and G_PER_KWH[spec.unit] != G_PER_KWH[says] and not is_moer(column.header):
        raise InputError(
            f"{column.label}: row 1: the header '{column.header}' says {says} but grid.unit is '{spec.unit}'; correct one of them"
        )
    return (spec.unit, "grid.unit") if spec.unit else (says, why)
