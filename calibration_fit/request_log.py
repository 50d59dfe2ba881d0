"""Step-time coefficients from a server's request log: `python -m calibration_fit.request_log LOG --setup MODEL,TP,GPU --out FILE`.

The surrogate follows the engine contract along the *measured* times, so that it is exact for a log that the engine itself wrote:

- Prefill. Requests admitted together are packed into steps; a group's steps last from its admission (or from the end of the group
  before it, if later) to its last first token. Groups whose last token falls inside an earlier group's window shared its steps.
- Decode. Between two events (a first token, a finish) the batch B is known, and the cached tokens K are those of the running requests,
  each making its tokens evenly over the time that is free of prefill. B requests then make free time / t_dec(B, K) tokens each, and over
  the life of a request these must add up to osl - 1.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax import Array

from calibration_fit.fit import FitResult, fit_all
from calibration_fit.forms import DECODE_TIME, PREFILL_TIME
from calibration_fit.losses import ROBUST_DELTA, mape, objective
from calibration_fit.measurements import Setup, Source
from calibration_fit.output import write_coefficients
from calibration_fit.rows import Rows
from calibration_fit.transforms import constrain
from jaxserve.errors import InputError
from jaxserve.perf.coefficients import Coefficients, load_coefficients, parse_coefficients
from jaxserve.perf.request_log import RequestLog, parse_log, parse_where

FEWEST_REQUESTS = 20
TOGETHER_S = 1e-5
"""Admissions closer than this are one: logs are written in microseconds."""
LONGEST_PIECE_STEPS = 32
"""Intervals between events are cut so that K moves little inside one: about this many tokens."""
TOKEN_BUDGET = 8192
DELTA = 5 * ROBUST_DELTA
"""Relative error where the loss turns linear: single requests of a live server scatter by about 10 %."""
ITERATIONS = 500
BLOCKS = 10
"""Parts of the log, in time; every second is held out when the decode form is chosen."""
REDUCED = {"alpha2": 0.0, "beta0": 0.0, "beta2": 0.0}
"""Terms held at 0 in the smaller decode form, as where few batch sizes were measured (`pipeline.FEW_BATCHES`)."""


@dataclass(frozen=True)
class LogFit:
    """Fitted tables of a log, with what they rest on: `prefill` over groups, `decode` (theta [6]) over requests."""

    prefill: FitResult
    decode: np.ndarray
    decode_held: tuple[str, ...]
    decode_mape: float
    decode_held_out: float
    ranges: dict[str, dict[str, list[float]]]
    fitted: int


@dataclass(frozen=True)
class Timeline:
    """J pieces of measured time with constant batch: `free_s`, `batch`, `cached` [J]; request r lives in pieces begin[r] .. end[r]-1."""

    free_s: np.ndarray
    batch: np.ndarray
    cached: np.ndarray
    begin: np.ndarray
    end: np.ndarray


def fit_log(log: RequestLog, setup: Setup, source: Source, *, fit: np.ndarray, budget: int = TOKEN_BUDGET) -> LogFit:
    """Fit both step times to the requests where `fit` [R] is true; the others are only there as company.

    Raises `InputError` when the log does not hold queue waits or too few requests. Engines of a log are treated one by one.
    """
    admit = log.admit_s
    if admit is None:
        raise InputError(f"{log.name}, row 1: there is no column queue_wait_s; without it prefill cannot be told from waiting")
    if fit.sum() < FEWEST_REQUESTS:
        raise InputError(f"{log.name}: {int(fit.sum())} requests are too few to fit coefficients to; give at least {FEWEST_REQUESTS}")
    names = np.array(log.engine if log.engine is not None else [""] * len(log))
    parts = [np.flatnonzero(names == name) for name in dict.fromkeys(names)]
    prefill, timelines, lived = [], [], []
    for part in parts:
        groups = prefill_groups(admit[part], log.first_token_s[part])
        windows = [(start, end) for _, start, end in groups]
        prefill += [(part[m], end - start) for m, start, end in groups if fit[part[m]].all() and end > start]
        use = part[log.osl[part] > 1]
        timelines.append(timeline(log.first_token_s[use], log.finish_s[use], log.isl[use], log.osl[use], windows))
        lived.append(use)
    joined, requests = _join(timelines), np.concatenate(lived)
    osl = log.osl[requests] - 1.0
    keep = fit[requests] & _lively(joined)
    if keep.sum() < FEWEST_REQUESTS:
        raise InputError(f"{log.name}: {int(keep.sum())} requests made more than one token, too few to fit decode steps to")
    pre = fit_all([prefill_rows(log, prefill, setup, source, budget)], PREFILL_TIME, delta=DELTA)[0]
    block = np.minimum(BLOCKS * log.arrival_s[requests] / max(log.arrival_s[fit].max(), 1e-9), BLOCKS - 1).astype(int) % 2
    tried = []
    for held in (REDUCED, {}):
        halves = [_fit_decode(joined, osl, keep & (block == h), held) for h in (0, 1)]
        errors = [np.abs(_tokens(joined, t)[keep & (block != h)] / osl[keep & (block != h)] - 1) for h, t in zip((0, 1), halves, strict=True)]
        tried.append((float(100 * np.mean(np.concatenate(errors))), held))
    # The whole form must earn its three more terms on held-out blocks.
    error, held = tried[1] if tried[1][0] < 0.9 * tried[0][0] else tried[0]
    theta = _fit_decode(joined, osl, keep, held)
    busy = joined.batch > 0
    context = joined.cached[busy] / joined.batch[busy]
    ranges = {
        "prefill_time": {"n_tokens": _span(pre.rows.inputs[0]), "batch": _span(pre.rows.batch)},
        "decode_time": {"batch": _span(joined.batch[busy]), "mean_ctx": _span(context)},
    }
    return LogFit(pre, theta, tuple(held), mape(_tokens(joined, theta)[keep], osl[keep]), error, ranges, int(fit.sum()))


def prefill_groups(admit: np.ndarray, first: np.ndarray) -> list[tuple[np.ndarray, float, float]]:
    """(requests in order of admission, start, end) of each run of prefill steps, in order of time."""
    groups: list[list[Any]] = []
    busy_until = -np.inf
    for r in np.lexsort((first, admit)):
        together = bool(groups) and admit[r] - groups[-1][3] <= TOGETHER_S
        if groups and (together or first[r] <= busy_until + TOGETHER_S):
            groups[-1][0].append(r)
            groups[-1][2] = max(groups[-1][2], first[r])
        else:
            groups.append([[r], max(admit[r], busy_until), first[r], admit[r]])
        busy_until = max(busy_until, first[r])
    return [(np.array(members), start, end) for members, start, end, _ in groups]


def prefill_rows(log: RequestLog, groups: list[tuple[np.ndarray, float]], setup: Setup, source: Source, budget: int) -> Rows:
    """One row a group: its prompts packed into steps of at most `budget` tokens, which together last the measured time."""
    packed = [_pack(log.isl[members].astype(int), budget) for members, _ in groups]
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


def _pack(lengths: np.ndarray, budget: int) -> list[tuple[int, int, int]]:
    """(N, B, S2) of each step (engine contract, step 3)."""
    steps, n, pieces, squares = [], 0, 0, 0
    for length in lengths:
        done = 0
        while done < length:
            take = min(int(length) - done, budget - n)
            n, pieces, squares = n + take, pieces + 1, squares + (done + take) ** 2 - done**2
            done += take
            if n == budget:
                steps.append((n, pieces, squares))
                n = pieces = squares = 0
    return steps + ([(n, pieces, squares)] if n else [])


def timeline(first: np.ndarray, finish: np.ndarray, isl: np.ndarray, osl: np.ndarray, windows: list[tuple[float, float]]) -> Timeline:
    """What decoded when on one engine; `windows` are its stretches of prefill."""
    flat = np.array(windows).reshape(-1, 2)
    merged_end = np.maximum.accumulate(flat[:, 1])
    start = np.maximum(flat[:, 0], np.concatenate([[-np.inf], merged_end[:-1]]))
    length = np.maximum(merged_end - start, 0.0)

    def stalled(t: np.ndarray) -> np.ndarray:
        """Seconds of prefill before t."""
        i = np.searchsorted(start, t, side="right") - 1
        before = np.concatenate([[0.0], np.cumsum(length)])[np.maximum(i, 0)]
        return np.where(i >= 0, before + np.minimum(t - start[np.maximum(i, 0)], length[np.maximum(i, 0)]), 0.0)

    events = np.unique(np.concatenate([first, finish]))
    piece = LONGEST_PIECE_STEPS * float(np.median((finish - first) / (osl - 1)))
    cuts = [np.linspace(a, b, max(2, int(np.ceil((b - a) / piece)) + 1))[:-1] for a, b in zip(events[:-1], events[1:], strict=True)]
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


def _join(parts: list[Timeline]) -> Timeline:
    shift = np.cumsum([0, *(len(p.free_s) for p in parts)])
    columns = {k: np.concatenate([getattr(p, k) for p in parts]) for k in ("free_s", "batch", "cached")}
    begin, end = (np.concatenate([getattr(p, k) + s for p, s in zip(parts, shift, strict=False)]) for k in ("begin", "end"))
    return Timeline(**columns, begin=begin, end=end)


def _lively(t: Timeline) -> np.ndarray:
    """Requests [R] that have any free time: one whose whole life is prefill of others says nothing of decode steps."""
    total = np.concatenate([[0.0], np.cumsum(t.free_s)])
    return total[t.end] - total[t.begin] > 0


def _predict(theta: Any, free_s: Any, batch: Any, cached: Any, begin: Any, end: Any) -> Array:
    steps = jnp.where(batch > 0, free_s / DECODE_TIME.build(theta)(jnp.maximum(batch, 1.0), cached), 0.0)
    total = jnp.concatenate([jnp.zeros(1), jnp.cumsum(steps)])
    return total[end] - total[begin]


def _tokens(t: Timeline, theta: np.ndarray) -> np.ndarray:
    """Decode steps [R] that the coefficients give each request in its measured life."""
    return np.asarray(_predict(theta, t.free_s, t.batch, t.cached, t.begin, t.end))


def _fit_decode(t: Timeline, steps: np.ndarray, keep: np.ndarray, held: dict[str, float]) -> np.ndarray:
    """theta [6] by optax's L-BFGS; `held` coefficients stay where they are."""
    batch, context = float(np.average(t.batch, weights=t.free_s)), float(np.sum(t.cached * t.free_s) / np.sum(t.batch * t.free_s))
    typical = float(np.average(t.free_s[t.batch > 0].sum() / steps.sum() * batch))
    batch = max(batch, 1.0)
    scale = typical / np.array([1.0, batch, batch**2, context, context * batch, context * batch**2])
    scale = np.where([name in held for name in DECODE_TIME.coefficients], 0.0, scale)
    solved = _solve(scale, t.free_s, t.batch, t.cached, t.begin, t.end, steps, keep.astype(float))
    return np.asarray(solved) + np.array([held.get(name, 0.0) for name in DECODE_TIME.coefficients])
