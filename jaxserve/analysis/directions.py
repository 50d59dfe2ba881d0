"""Whether a difference goes the way it is expected to: paired by seed, with its 95 % interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t at 97.5 % for 1, 2, ... degrees of freedom."""
LEAST = 1e-3
"""A share that differs by less is taken as the same."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % interval."""
    n = len(values)
    if n < 2:
        return float(np.mean(values)), math.nan
    return float(np.mean(values)), T95[min(n, len(T95)) - 2] * float(np.std(values, ddof=1)) / math.sqrt(n)


@dataclass(frozen=True)
class Direction:
    """One pair of settings of which the first is expected to have more of a metric."""

    claim: str
    where: str
    metric: str
    more: tuple[str, str]  # policy, setting
    less: tuple[str, str]


def judge(frame: pd.DataFrame, d: Direction) -> dict[str, Any]:
    """The paired difference of a direction and whether it holds; a difference within its interval, or below `LEAST`, is none."""
    table = frame.set_index(["policy", "setting", "seed"]).sort_index()[d.metric]
    difference = table.loc[d.more] - table.loc[d.less]
    mean, half = interval(difference.to_numpy(dtype=float))
    level = max(half if math.isfinite(half) else 0.0, LEAST)
    verdict = "holds" if mean > level else "does not hold" if mean < -level else "no difference"
    return {"claim": d.claim, "where": d.where, "difference": mean, "half_width": half, "verdict": verdict}
