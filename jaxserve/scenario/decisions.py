"""When decisions fall: at arrival or at the close of a window, and how long they take (SEMANTICS.md, "From arrival to engine")."""

import numpy as np
from numpy.typing import NDArray

from jaxserve.engine.lane import Windows, windows_of
from jaxserve.scenario.spec import AffineLatency, FixedLatency, Scenario


def decision_times(scenario: Scenario, arrival_s: NDArray[np.float64], scheduler: NDArray[np.integer]) -> NDArray[np.float64]:
    """`decision_s` [A] of policies that decide at arrival (SEMANTICS.md, "From arrival to engine")."""
    latency = scenario.decision_latency
    if isinstance(latency, FixedLatency):
        return arrival_s + latency.seconds
    if not isinstance(latency, AffineLatency):
        return arrival_s
    decided = np.empty_like(arrival_s)
    for g in range(len(scenario.schedulers)):
        mine = np.flatnonzero(scheduler == g)
        free = 0.0
        for r, t in zip(mine.tolist(), arrival_s[mine].tolist(), strict=True):
            free = max(t, free) + latency.c0_s + latency.c1_s
            decided[r] = free
    return decided


def close_windows(arrival_s: NDArray[np.float64], scheduler: NDArray[np.integer], window_s: float, most: int) -> Windows:
    """The windows of batch policies over requests [A] in order of arrival (SEMANTICS.md, "From arrival to engine").

    A window closes at its end or at the arrival of its `most`-th request; what follows forms the next one, to the same end.
    """
    k = windows_of(arrival_s, window_s)
    decided_s, batch = np.empty_like(arrival_s), np.empty(len(arrival_s), np.int64)
    for g in np.unique(scheduler):
        mine = np.flatnonzero(scheduler == g)
        first = np.searchsorted(k[mine], k[mine])  # of the window of each, in `mine`
        opens = (np.arange(len(mine)) - first) % most == 0
        number = np.cumsum(opens) - 1
        starts = np.flatnonzero(opens)
        size = np.diff(np.append(starts, len(mine)))
        close = np.where(size == most, arrival_s[mine[starts + size - 1]], (k[mine[starts]] + 1) * window_s)
        decided_s[mine], batch[mine] = close[number], number
    return Windows(window=k, decided_s=decided_s, batch=batch)


def batch_decision_times(scenario: Scenario, windows: Windows, scheduler: NDArray[np.integer]) -> NDArray[np.float64]:
    """`decision_s` [A] of batch policies; with `measured` latency what the solvers need is added as they run."""
    latency = scenario.decision_latency
    if isinstance(latency, FixedLatency):
        return windows.decided_s + latency.seconds
    decision_s = windows.decided_s.copy()
    if isinstance(latency, AffineLatency):
        for g in np.unique(scheduler):
            mine = np.flatnonzero(scheduler == g)
            starts = np.flatnonzero(np.diff(windows.batch[mine], prepend=-1))
            sizes = np.diff(np.append(starts, len(mine)))
            ends, free = [], 0.0
            for close, n in zip(windows.decided_s[mine[starts]].tolist(), sizes.tolist(), strict=True):
                free = max(close, free) + (latency.c0_s + latency.c1_s * n)
                ends.append(free)
            decision_s[mine] = np.repeat(ends, sizes)
    return decision_s
