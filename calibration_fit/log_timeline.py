"""What ran when, read off a server's request log: the groups of prefill, and the batch and cached tokens of decode over time.

Everything here follows the engine contract along measured times, so that it is exact for a log that the engine itself wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from calibration_fit.measurements import Setup, Source
from calibration_fit.rows import Rows, prefill_steps, prefill_terms
from jaxserve.perf.request_log import RequestLog

TOGETHER_S = 1e-5
"""Admissions closer than this are one: logs are written in microseconds."""
LONGEST_PIECE_STEPS = 32
"""Intervals between events are cut so that K moves little inside one: about this many tokens."""


class Run(NamedTuple):
    """One or more steps of prefill without a pause: `packs` of requests, each packed into steps of its own, in order of admission; when
    it began and ended, s; and how uncertain the beginning is: `slack_s` is 0 where it was measured, infinite where nothing tells it."""

    packs: tuple[np.ndarray, ...]
    start: float
    end: float
    slack_s: float = 0.0

    @property
    def members(self) -> np.ndarray:
        """All its requests."""
        return np.concatenate(self.packs)


@dataclass(frozen=True)
class Timeline:
    """J pieces of measured time with constant batch: `free_s`, `batch`, `cached` [J]; request r lives in pieces begin[r] .. end[r]-1."""

    free_s: np.ndarray
    batch: np.ndarray
    cached: np.ndarray
    begin: np.ndarray
    end: np.ndarray


def prefill_runs(admit: np.ndarray, first: np.ndarray) -> list[Run]:
    """The runs of prefill of one engine, in order of time; they do not overlap.

    The engine admits nothing while it prefills, so in its own logs a run is what was admitted together. A server that prefills in chunks
    beside decoding does; there, requests whose prefill overlaps make up one run, which only says how long their prompts took together.
    """
    groups: list[list[Any]] = []
    for r in np.lexsort((first, admit)):
        if groups and (admit[r] < groups[-1][2] - TOGETHER_S or admit[r] <= groups[-1][1] + TOGETHER_S):
            groups[-1][0].append(r)
            groups[-1][2] = max(groups[-1][2], first[r])
        else:
            groups.append([[r], admit[r], first[r]])
    return [Run((np.array(members),), start, end) for members, start, end in groups]


def prefill_rows(log: RequestLog, runs: list[Run], setup: Setup, source: Source, budget: int) -> Rows:
    """One row a run: its prompts packed into steps of at most `budget` tokens, which together last the measured time."""
    packed = [[s for pack in run.packs for s in prefill_steps(log.isl[pack].astype(int).tolist(), budget)] for run in runs]
    inputs, weight = prefill_terms(packed)
    row = np.array([log.line[run.members[0]] for run in runs])
    batch = np.array([float(len(run.members)) for run in runs])
    length = np.array([float(np.mean(log.isl[run.members])) for run in runs])
    measured = np.array([run.end - run.start for run in runs])
    file, n = np.full(len(runs), source.path, dtype=object), len(runs)
    kind = "runs of prefill in the request log"
    return Rows(setup, (source,), file, row, batch, length, inputs, weight, np.zeros(n), measured, np.zeros(n, bool), kind)


def stalled(runs: list[Run], at: np.ndarray) -> np.ndarray:
    """Seconds [Q] of prefill before each time `at`."""
    start, length = np.array([run.start for run in runs]), np.array([run.end - run.start for run in runs])
    i = np.searchsorted(start, at, side="right") - 1
    before = np.concatenate([[0.0], np.cumsum(length)])[np.maximum(i, 0)]
    return np.where(i >= 0, before + np.minimum(at - start[np.maximum(i, 0)], length[np.maximum(i, 0)]), 0.0)


def timeline(first: np.ndarray, finish: np.ndarray, isl: np.ndarray, osl: np.ndarray, runs: list[Run]) -> Timeline:
    """What decoded when on one engine, beside its runs of prefill."""
    events = np.unique(np.concatenate([first, finish]))
    piece = LONGEST_PIECE_STEPS * float(np.median((finish - first) / (osl - 1)))
    cuts = [np.linspace(a, b, max(2, int(np.ceil((b - a) / piece)) + 1))[:-1] for a, b in pairwise(events)]
    edges = np.concatenate([*cuts, events[-1:]])
    free = edges - stalled(runs, edges)
    free_s, middle = np.diff(free), (free[1:] + free[:-1]) / 2
    begin, end = np.searchsorted(edges, first), np.searchsorted(edges, finish)

    def running(each: np.ndarray) -> np.ndarray:
        change = np.zeros(len(edges))
        np.add.at(change, begin, each)
        np.add.at(change, end, -each)
        return np.cumsum(change)[:-1]

    # Tokens of a request at free time f: 1 + rate * (f - its free time at the first token); summed over the running ones.
    first_free, finish_free = first - stalled(runs, first), finish - stalled(runs, finish)
    rate = (osl - 1) / np.maximum(finish_free - first_free, 1e-9)
    # A step over tokens made so far sees half a token less than the even flow at its middle.
    cached = running(isl + 0.5 - rate * first_free) + running(rate) * middle
    return Timeline(free_s, running(np.ones(len(first))), cached, begin, end)


def join(parts: list[Timeline]) -> Timeline:
    shift = np.cumsum([0, *(len(p.free_s) for p in parts)])
    columns = {k: np.concatenate([getattr(p, k) for p in parts]) for k in ("free_s", "batch", "cached")}
    begin, end = (np.concatenate([getattr(p, k) + s for p, s in zip(parts, shift, strict=False)]) for k in ("begin", "end"))
    return Timeline(**columns, begin=begin, end=end)


def lively(t: Timeline) -> np.ndarray:
    """Requests [R] that have any free time: one whose whole life is prefill of others says nothing of decode steps."""
    total = np.concatenate([[0.0], np.cumsum(t.free_s)])
    return total[t.end] - total[t.begin] > 0
