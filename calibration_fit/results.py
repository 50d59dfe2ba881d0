"""What a fit of a setup comes to: its tables, with what is known of their errors."""

from __future__ import annotations

from dataclasses import dataclass, field

from calibration_fit.fit import FitResult
from calibration_fit.holdout import HoldOut
from calibration_fit.measurements import Setup
from calibration_fit.uncertainty import Bootstrap, Identifiability


@dataclass(frozen=True)
class TableFit:
    """One fitted table of a setup, with what is known of its error; `alternatives` holds the grouped held-out MAPE of each form tried."""

    result: FitResult
    held: dict[str, HoldOut]
    intervals: Bootstrap
    identifiability: Identifiability
    warnings: tuple[str, ...]
    alternatives: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SetupFit:
    """All tables fitted for one setup, by table name."""

    setup: Setup
    tables: dict[str, TableFit]
