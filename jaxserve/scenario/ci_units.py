"""Units of carbon intensity: what a file's header says, and values that no grid has."""

import re
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

CiUnit = Literal["g/kWh", "kg/kWh", "kg/MWh", "g/MWh", "t/MWh", "lb/MWh"]
G_PER_KWH: dict[CiUnit, float] = {
    "g/kWh": 1.0, "kg/kWh": 1e3, "kg/MWh": 1.0, "g/MWh": 1e-3, "t/MWh": 1e3, "lb/MWh": 0.45359237,
}  # fmt: skip
"""One of each in g/kWh; a pound is 453.59237 g."""

LEAST_G_PER_KWH, MOST_G_PER_KWH = 1.0, 2000.0
"""No grid stays below the one or above the other: of 123 zones of Electricity Maps, hour by hour over a life cycle (2022, 16 of them
2021 to 2024), none has an hour above 1,119 g/kWh, and each has one of 24 or more."""

_UNIT = re.compile(r"(?<![a-z])(kg|g|lbs?|t|tonnes?)[ _]?(?:co2)?[ _-]?(?:eq?)?[ _]*(?:/|per)[ _]*([km])wh(?![a-z])")
_MASS = {"lbs": "lb", "tonne": "t", "tonnes": "t"}
_MOER = re.compile(r"(?<![a-z])moer(?![a-z])")


def is_moer(header: str) -> bool:
    """Whether a column is WattTime's marginal operating emissions rate, published in lb/MWh."""
    return _MOER.search(header.casefold()) is not None


def unit_of(header: str) -> tuple[CiUnit | None, str]:
    """The unit that the header of a column of values shows, and why; None where it shows none that is known."""
    found = _UNIT.search(header.replace("₂", "2").casefold())
    if found:
        unit = f"{_MASS.get(found[1], found[1])}/{'M' if found[2] == 'm' else 'k'}Wh"
        for known in G_PER_KWH:
            if unit == known:
                return known, f"as its header '{header}' says"
    return ("lb/MWh", f"as WattTime publishes '{header}'") if is_moer(header) else (None, "")


def implausible(zones: Sequence[str], ci_g_per_kwh: NDArray[np.float64], signal: str, basis: str, field: str) -> tuple[str, ...]:
    """Warnings on zones whose values [T, Z] within a run are those of another unit, or zeros that are no measurement.

    `field` is the one of the scenario to look at where the unit is in doubt.
    """
    may_be_zero = signal == "marginal" or basis == "direct"
    found: list[str] = []
    for zone, values in zip(zones, np.abs(ci_g_per_kwh).T, strict=True):
        least, most, zeros = float(values.min()), float(values.max()), int(np.count_nonzero(values == 0))
        if zeros and basis == "lca":
            told = f"{zeros} of {len(values)} values of the run are 0, which no life-cycle intensity is; were missing ones written as 0?"
        elif most < LEAST_G_PER_KWH and not (most == 0 and may_be_zero):
            told = f"no value of the run reaches {LEAST_G_PER_KWH:g} g/kWh (at most {most:g}); is that the unit ({field})?"
        elif least > MOST_G_PER_KWH:
            told = f"all values of the run are above {MOST_G_PER_KWH:g} g/kWh (at least {least:g}); is that the unit ({field})?"
        else:
            continue
        found.append(f"warning: grid: zone {zone}: {told}")
    return tuple(dict.fromkeys(found))
