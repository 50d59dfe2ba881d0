"""When a server began each run of prefill, from a request log that does not say how long requests waited.

A request that arrives while everything in the server fits in what the server was seen to run at once cannot wait for room: it is admitted
at the end of the iteration in progress (engine contract, step 2). If that is a run of prefill, it ends at a logged first token; if it is a
decode step, half of it is left on average, give or take the other half; if there is none, admission is at arrival. Of a request that may
have waited for room the log does not tell: its run takes no part in the fit of prefill and gets its length from that fit (`filled_in`).
"""

from __future__ import annotations

import numpy as np

from calibration_fit.log_timeline import TOGETHER_S, Run, stalled
from jaxserve.perf.request_log import RequestLog

SAME_STEP = 0.5
"""First tokens closer than this share of the shortest decode step come from one step: clocks and sockets blur them."""


def inferred_runs(log: RequestLog, step_s: np.ndarray) -> list[Run]:
    """The runs of prefill of a log of one engine; `step_s` [R] is the mean decode step in the life of each request (nan: none)."""
    arrival, first, finish = log.arrival_s, log.first_token_s, log.finish_s
    one, need = np.ones(len(log)), log.isl + log.osl
    room = np.ones(len(log), bool)
    for amount in (one, need):
        room &= _held(arrival, arrival, finish, amount) <= _held(first, first, finish, amount).max()
    order = np.lexsort((arrival, first))
    apart = max(SAME_STEP * float(np.nanmin(step_s)), TOGETHER_S) if np.isfinite(step_s).any() else TOGETHER_S
    begin = np.flatnonzero(np.diff(first[order], prepend=-np.inf) > apart)
    end = np.maximum.reduceat(first[order], begin)
    before = np.concatenate([[-np.inf], end[:-1]])
    earliest, latest = np.minimum.reduceat(arrival[order], begin), np.maximum.reduceat(arrival[order], begin)
    running = _held(earliest, first, finish, one)
    step = _held(earliest, first, finish, np.nan_to_num(step_s)) / np.maximum(running, 1.0)
    # The boundary that the earliest waited for lies between the latest arrival and one whole step after the earliest.
    slack = np.where((earliest > before) & (running > 0), np.maximum(earliest + step - latest, 0.0), 0.0)
    start = np.minimum(np.maximum(latest, before) + slack / 2, end)
    slack = np.where(np.logical_and.reduceat(room[order], begin), slack, np.inf)
    runs: list[Run] = []
    for pack, s, e, u in zip(np.split(order, begin[1:]), start.tolist(), end.tolist(), slack.tolist(), strict=True):
        # Steps without a pause are one run: a server that prefills in chunks works on the next prompt before the last one's first token.
        if runs and s == runs[-1].end and np.isfinite(u) and np.isfinite(runs[-1].slack_s):
            runs[-1] = runs[-1]._replace(packs=(*runs[-1].packs, pack), end=e)
        else:
            runs.append(Run((pack,), s, e, u))
    return runs


def filled_in(log: RequestLog, runs: list[Run], seconds: np.ndarray) -> list[Run]:
    """The runs, those of unknown beginning lasting predicted `seconds` [runs], but from no earlier than the last run's end and arrivals."""
    out: list[Run] = []
    for run, length in zip(runs, seconds, strict=True):
        least = max(out[-1].end if out else -np.inf, float(log.arrival_s[run.members].max()))
        out.append(run if np.isfinite(run.slack_s) else run._replace(start=min(max(run.end - float(length), least), run.end)))
    return out


def decode_steps(log: RequestLog, runs: list[Run]) -> np.ndarray:
    """Mean decode step [R] in the life of each request, the prefill of others apart; nan without one."""
    free = (log.finish_s - log.first_token_s) - (stalled(runs, log.finish_s) - stalled(runs, log.first_token_s))
    return np.where((log.osl > 1) & (free > 0), free / np.maximum(log.osl - 1.0, 1.0), np.nan)


def _held(at: np.ndarray, begin: np.ndarray, end: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """Sum [Q] of `amount` [R] over the requests with begin <= at < end."""

    def until(times: np.ndarray) -> np.ndarray:
        order = np.argsort(times, kind="stable")
        total = np.concatenate([[0.0], np.cumsum(amount[order])])
        return total[np.searchsorted(times[order], at, side="right")]

    return until(begin) - until(end)
