"""Where the intervals of the ledger begin, and what a warm-up leaves out (SEMANTICS.md, "Energy")."""

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import InputError
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


def warmup_note(arrival_s: NDArray[np.float64], warmup_s: float) -> tuple[str, ...]:
    """What is left out of the metrics; refuses a warm-up after which nothing arrives."""
    left_out = int(np.searchsorted(arrival_s, warmup_s))
    if not warmup_s:
        return ()
    if left_out == len(arrival_s):
        raise InputError(f"warmup_s: no request arrives at or after {warmup_s:g} s, the last at {arrival_s[-1]:g} s; shorten it")
    return (
        f"warm-up: what arrives or is spent before {warmup_s:g} s is in no metric ({left_out} of {len(arrival_s)} requests); "
        "the tables of requests and of the ledger have it",
    )
