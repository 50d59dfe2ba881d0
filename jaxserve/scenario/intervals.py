"""Where the intervals of the ledger begin (SEMANTICS.md, "Energy")."""

import numpy as np
from numpy.typing import NDArray

from jaxserve.scenario.signals import GridSeries


def interval_windows(ledger: int, warmup: int, horizon: int, changes: NDArray[np.int64]) -> NDArray[np.int64]:
    """First window [I+1] of each interval, then the horizon: every `ledger` windows, at the warm-up, and where carbon intensity changes."""
    return np.unique(np.concatenate([np.arange(0, horizon, ledger), [warmup, horizon], changes]).astype(np.int64))


def ci_changes(grid: GridSeries, columns: NDArray[np.int64], window_s: float, horizon: int) -> NDArray[np.int64]:
    """Windows before the horizon at whose start the carbon intensity of one of `columns` is another than that of the window before."""
    edges_s = grid.edges_s[grid.edges_s > 0]
    window = np.floor(edges_s / window_s)
    window += window * window_s < edges_s  # the first that starts at the change or after it; its edge is the float64 product
    window = np.unique(window[(window > 0) & (window < horizon)])
    before, after = (grid.at(k * window_s)[:, columns] for k in (window - 1, window))
    return window[(before != after).any(axis=1)].astype(np.int64)
