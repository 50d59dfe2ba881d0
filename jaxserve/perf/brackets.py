"""Two forms between which the step times of any form lie, simple enough for the share of a request in a step to be told.

Of forms that are linear in what requests bring (S2 of prefill, K of decode) both are the form itself. A table is not: there a form
piecewise linear in N (B) and linear in S2 (K) below it and one above it are taken. In each cell of the grid, table minus form is bilinear,
so that what holds at the corners of the cells holds everywhere.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxserve.perf.latency import DecodeForm, DecodeTimeTable, PiecewiseDecodeTime, PiecewisePrefillTime, PrefillForm, PrefillTime
from jaxserve.types import on_host

Floats = NDArray[np.float64]


def prefill_bracket(time: PrefillForm, tokens: tuple[float, float], lengths: tuple[float, float]) -> tuple[PiecewisePrefillTime, ...]:
    """(below, above) for steps with N and S2/N in these ranges, ends included."""
    if isinstance(time, PiecewisePrefillTime):
        return time, time
    if isinstance(time, PrefillTime):
        slopes = jnp.stack([jnp.asarray(time.tok_slope_below), jnp.asarray(time.tok_slope_above)])
        same = PiecewisePrefillTime(slopes, jnp.asarray(time.tok_knee)[None], time.b0, time.b1, time.b2)
        return same, same
    x, y = _within(time.n_tokens, tokens), _within(time.seq_len, lengths)
    seconds = np.asarray(time(on_host(x[:, None]), 1.0, on_host(x[:, None] * y)))
    per_sq = _slope(x[:, None] * y, seconds)
    beside = seconds - per_sq * x[:, None] * y
    return tuple(
        PiecewisePrefillTime(on_host(slopes), on_host(x[1:-1]), start, 0.0, per_sq)
        for start, slopes in (_through(x, beside.min(axis=1)), _through(x, beside.max(axis=1)))
    )


def decode_bracket(time: DecodeForm, batch: tuple[float, float], contexts: tuple[float, float]) -> tuple[Any, Any]:
    """(below, above), linear in K at each B, for steps with B and K/B in these ranges, ends included."""
    if not isinstance(time, DecodeTimeTable):
        return time, time
    x, y = _within(time.batch, batch), _within(time.mean_ctx, contexts)
    seconds = np.asarray(time(on_host(x[:, None]), on_host(x[:, None] * y)))
    per_token = _slope(x[:, None] * y, seconds)
    beside = seconds - per_token * x[:, None] * y
    below, above = (
        PiecewiseDecodeTime(start, on_host(slopes), on_host(x[1:-1]), 0.0, per_token)
        for start, slopes in (_through(x, beside.min(axis=1)), _through(x, beside.max(axis=1)))
    )
    return below, above


def _within(points: Any, ends: tuple[float, float]) -> Floats:
    """The grid's points inside a range and the range's ends; two at least."""
    low, high = ends
    return np.unique(np.clip([low, *np.asarray(points), high if high > low else low + 1.0], low, max(high, low + 1.0)))


def _slope(x: Floats, seconds: Floats) -> float:
    """Seconds per unit of x [I, J] that makes the rows of `seconds` as level as can be: any slope would do, this one binds most."""
    x, t = x - x.mean(axis=1, keepdims=True), seconds - seconds.mean(axis=1, keepdims=True)
    return float((x * t).sum() / (x * x).sum())


def _through(x: Floats, y: Floats) -> tuple[float, Floats]:
    """What a line through points [I] is at 0, and its slopes [I-1] between them, the first and last going on."""
    slopes = np.diff(y) / np.diff(x)
    return float(y[0] - slopes[0] * x[0]), slopes
