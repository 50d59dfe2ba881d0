"""What a request log shows of the server's limits: what ran while other requests had to wait."""

import numpy as np
from numpy.typing import NDArray

from jaxserve.perf.request_log import RequestLog

Floats = NDArray[np.float64]
SHORT_WAIT_S = 0.1
"""Shorter waits, or shorter than the slowest token, are for the step in progress, not for room."""
MOST = 0.95
"""Share of that time in which no more than "the most" ran: clocks of a log do not agree to the microsecond."""


def held_while_waiting(log: RequestLog) -> tuple[float, float, float] | None:
    """Over the time in which one engine let requests wait: median and most requests running, and median tokens reserved. None if never."""
    if log.queue_wait_s is None or log.admit_s is None:
        return None
    long = log.queue_wait_s > max(np.nanmax(log.tpot_s, initial=0.0), SHORT_WAIT_S)
    waits = np.where(long, 1.0, 0.0)
    times = np.concatenate([log.finish_s, log.admit_s, log.arrival_s])
    order = np.argsort(times, kind="stable")

    def over_time(at_finish: Floats, at_admission: Floats, at_arrival: Floats) -> Floats:
        return np.cumsum(np.concatenate([at_finish, at_admission, at_arrival])[order])

    one, none, reserved = np.ones_like(log.isl), np.zeros_like(log.isl), log.isl + log.osl
    running, held = over_time(-one, one, none), over_time(-reserved, reserved, none)
    weight = np.diff(times[order], append=times[order][-1]) * (over_time(none, -waits, waits) > 0.5)
    if weight.sum() <= 0:
        return None
    return _quantile(running, weight, 0.5), _quantile(running, weight, MOST), _quantile(held, weight, 0.5)


def _quantile(values: Floats, weight: Floats, q: float) -> float:
    order = np.argsort(values, kind="stable")
    share = np.cumsum(weight[order])
    return float(values[order][np.searchsorted(share, q * share[-1])])
