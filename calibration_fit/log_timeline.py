"""What ran when, read off a server's request log: the groups of prefill, and the batch and cached tokens of decode over time.

Everything here follows the engine contract along measured times, so that it is exact for a log that the engine itself wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from calibration_fit.measurements import Setup, Source
from calibration_fit.rows import Rows, prefill_steps
from jaxserve.perf.request_log import RequestLog

TOGETHER_S = 1e-5
"""Admissions closer than this are one: logs are written in microseconds."""
LONGEST_PIECE_STEPS = 32
"""Intervals between events are cut so that K moves little inside one: about this many tokens."""


@dataclass(frozen=True)
class Timeline:
    """J pieces of measured time with constant batch: `free_s`, `batch`, `cached` [J]; request r lives in pieces begin[r] .. end[r]-1."""

    free_s: np.ndarray
    batch: np.ndarray
    cached: np.ndarray
    begin: np.ndarray
    end: np.ndarray


def prefill_groups(admit: np.ndarray, first: np.ndarray) -> list[tuple[np.ndarray, float, float]]:
    """(requests in order of admission, start, end) of each run of prefill steps, in order of time; runs do not overlap.

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
    return [(np.array(members), start, end) for members, start, end in groups]


def prefill_rows(log: RequestLog, groups: list[tuple[np.ndarray, float]], setup: Setup, source: Source, budget: int) -> Rows:
    """One row a group: its prompts packed into steps of at most `budget` tokens, which together last the measured time."""
    packed = [prefill_steps(log.isl[members].astype(int).tolist(), budget) for members, _ in groups]
    terms = max(len(steps) for steps in packed)
    inputs, weight = np.ones((3, len(groups), terms)), np.zeros((len(groups), terms))
    for g, steps in enumerate(packed):
        inputs[:, g, : len(steps)] = np.array(steps, float).T
        weight[g, : len(steps)] = 1.0
    row = np.array([log.line[members[0]] for members, _ in groups])
    batch = np.array([float(len(members)) for members, _ in groups])
    length = np.array([float(np.mean(log.isl[members])) for members, _ in groups])
    measured = np.array([seconds for _, seconds in groups])
    file, n = np.full(len(groups), source.path, dtype=object), len(groups)
    return Rows(setup, (source,), file, row, batch, length, inputs, weight, np.zeros(n), measured, np.zeros(n, bool))


def timeline(first: np.ndarray, finish: np.ndarray, isl: np.ndarray, osl: np.ndarray, windows: list[tuple[float, float]]) -> Timeline:
    """What decoded when on one engine; `windows` are its stretches of prefill."""
    flat = np.array(windows).reshape(-1, 2)
    start, length = flat[:, 0], flat[:, 1] - flat[:, 0]

    def stalled(t: np.ndarray) -> np.ndarray:
        """Seconds of prefill before t."""
        i = np.searchsorted(start, t, side="right") - 1
        before = np.concatenate([[0.0], np.cumsum(length)])[np.maximum(i, 0)]
        return np.where(i >= 0, before + np.minimum(t - start[np.maximum(i, 0)], length[np.maximum(i, 0)]), 0.0)

    events = np.unique(np.concatenate([first, finish]))
    piece = LONGEST_PIECE_STEPS * float(np.median((finish - first) / (osl - 1)))
    cuts = [np.linspace(a, b, max(2, int(np.ceil((b - a) / piece)) + 1))[:-1] for a, b in pairwise(events)]
    edges = np.concatenate([*cuts, events[-1:]])
    free = edges - stalled(edges)
    free_s, middle = np.diff(free), (free[1:] + free[:-1]) / 2
    begin, end = np.searchsorted(edges, first), np.searchsorted(edges, finish)

    def running(each: np.ndarray) -> np.ndarray:
        change = np.zeros(len(edges))
        np.add.at(change, begin, each)
        np.add.at(change, end, -each)
        return np.cumsum(change)[:-1]

    # Tokens of a request at free time f: 1 + rate * (f - its free time at the first token); summed over the running ones.
    first_free, finish_free = first - stalled(first), finish - stalled(finish)
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
