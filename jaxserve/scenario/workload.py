"""The requests that the workload section of a scenario means.

Every random choice has its own stream, so that changing one (the length distribution, say) leaves the others as they were.
Arrivals, lengths and splits are stable under the horizon: a longer one only adds requests at the end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd

from jaxserve.errors import InputError
from jaxserve.scenario.lengths import length_means, read_table, sample_named
from jaxserve.scenario.rawfile import resolve
from jaxserve.scenario.traces import Trace, at_rows, read_trace
from jaxserve.scenario.workload_spec import LengthsSpec, PoissonWorkload, RatePiece, TraceWorkload, WorkloadSpec

__all__ = ["LengthsSpec", "PoissonWorkload", "RatePiece", "Requests", "TraceWorkload", "WorkloadSpec", "generate_requests"]

MAX_REQUESTS = 200_000_000  # about 6 GB of arrays: beyond it a typing error is likelier than a wish
LEAST_SHARE, LEAST_SPAN = 0.01, 0.01  # of a trace's requests in the run, and of the run under requests: below, a slip is likely
BLOCK = 65536  # fixed, so that the bits of an arrival do not depend on how many follow it

# Second word of the seed sequence. Never renumber: stored runs are repeated by seed.
STREAM_ARRIVALS, STREAM_ISL, STREAM_OSL, STREAM_MIXTURE, STREAM_THIN, STREAM_SPLIT = range(6)
STREAM_BELIEF_ERROR, STREAM_BELIEF_EXACT = 6, 7


@dataclass(frozen=True)
class Requests:
    """R requests in order of arrival, with what was done to get them."""

    arrival_s: np.ndarray  # float64[R], seconds after the start; sorted, in [0, horizon)
    isl: np.ndarray  # int64[R], tokens; >= 1
    osl: np.ndarray  # int64[R], tokens; >= 1
    scheduler: np.ndarray  # int32[R], index into scheduler_names
    notes: tuple[str, ...]  # sentences for the log
    counts: dict[str, int]  # requests; for a trace also rows_read, rows_dropped, rows_unsorted, rows_outside_slice, requests_thinned
    model: pd.Categorical | None = None  # [R], "" where a row does not say; None where the trace does not, and for generated requests
    application: pd.Categorical | None = None  # likewise
    zero: datetime | None = None  # the instant of time 0 (UTC) by a trace's own clock; None where it has none


def generate_requests(
    spec: PoissonWorkload | TraceWorkload,
    *,
    horizon_s: float,
    seed: int,
    scheduler_names: Sequence[str],
    scheduler_weights: Sequence[float],
    base_dir: Path,
) -> Requests:
    """The requests of a workload: a pure function of its arguments and of the files it names.

    `scheduler_weights` count only for `split = "weight"`. Relative paths start at `base_dir`.
    """
    if not (math.isfinite(horizon_s) and horizon_s > 0):
        raise InputError(f"horizon_s: {horizon_s} is not a positive time; give seconds > 0.")
    if seed < 0:
        raise InputError(f"seed: {seed} is negative; give an integer >= 0.")
    if not scheduler_names:
        raise InputError("schedulers: none given; name at least one.")
    origin = model = application = zero = None
    if isinstance(spec, PoissonWorkload):
        arrival, notes = _poisson(spec, horizon_s, seed)
        isl, osl, length_note = _lengths(spec.lengths, len(arrival), seed, base_dir)
        notes, counts = [*notes, length_note], {}
    else:
        arrival, rows, trace, notes, counts = _from_trace(spec, horizon_s, seed, scheduler_names, base_dir)
        isl, osl = trace.isl[rows], trace.osl[rows]
        origin = at_rows(trace.origin, rows)
        model, application = at_rows(trace.model, rows), at_rows(trace.application, rows)
        zero = trace.zero + timedelta(seconds=spec.slice_start_s or 0.0) if trace.zero else None
    scheduler = origin if origin is not None else _split(spec.split, len(arrival), seed, len(scheduler_names), scheduler_weights)
    counts = counts | {"requests": len(arrival)}
    return Requests(arrival, isl, osl, scheduler.astype(np.int32), tuple(notes), counts, model, application, zero)


def random_stream(seed: int, stream: int) -> np.random.Generator:
    """The generator of one of the streams above."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, stream])))


def _check_size(expected: float, remedy: str) -> None:
    if expected > MAX_REQUESTS:
        raise InputError(f"workload: about {expected:.3g} requests, more than the {MAX_REQUESTS} that one run may hold; {remedy}.")


def _poisson(spec: PoissonWorkload, horizon_s: float, seed: int) -> tuple[np.ndarray, list[str]]:
    """Arrivals float64[R] in seconds: a unit-rate Poisson process, mapped through the inverse of the integrated rate."""
    used = [piece for piece in spec.pieces() if piece.start_s < horizon_s]
    start = np.array([piece.start_s for piece in used])
    rate = np.array([piece.rate_req_per_s for piece in used])
    edges = np.concatenate([[0.0], np.cumsum(rate * np.diff(start, append=horizon_s))])  # expected requests before each piece
    field = "workload.rates" if spec.rates is not None else "workload.rate_req_per_s"
    _check_size(edges[-1], f"lower {field} or horizon_s")

    rng = random_stream(seed, STREAM_ARRIVALS)
    blocks, reached = [], 0.0
    while reached < edges[-1]:
        blocks.append(reached + np.cumsum(rng.standard_exponential(BLOCK)))
        reached = float(blocks[-1][-1])
    unit = np.concatenate([*blocks, np.empty(0)])
    unit = unit[unit < edges[-1]]
    piece = np.searchsorted(edges[:-1], unit, side="right") - 1  # a piece of rate 0 has no width here and is never chosen
    arrival = start[piece] + (unit - edges[piece]) / rate[piece]
    arrival = np.maximum.accumulate(arrival)  # rounding at the seam of two pieces must not swap neighbours
    arrival = arrival[arrival < horizon_s]
    if not len(arrival):
        raise InputError(f"{field}: no request arrives within horizon_s = {horizon_s:g}; raise the rate or the horizon.")

    if spec.rates is None:
        return arrival, [f"Poisson arrivals at {spec.rate_req_per_s:g} req/s"]
    notes = [f"Poisson arrivals at {len(used)} piecewise rates, {edges[-1] / horizon_s:g} req/s on average"]
    if len(used) < len(spec.rates):
        notes.append(f"{len(spec.rates) - len(used)} pieces of workload.rates begin at or after horizon_s and have no effect")
    return arrival, notes


def _lengths(spec: LengthsSpec, count: int, seed: int, base_dir: Path) -> tuple[np.ndarray, np.ndarray, str]:
    """ISL and OSL, int64[R] each, and the sentence that says where they come from."""
    if spec.isl is not None and spec.osl is not None:
        return np.full(count, spec.isl), np.full(count, spec.osl), f"fixed lengths: ISL {spec.isl}, OSL {spec.osl} tokens"
    u_isl, u_osl = random_stream(seed, STREAM_ISL).random(count), random_stream(seed, STREAM_OSL).random(count)
    if spec.quantiles_file is not None:
        table = read_table(resolve(base_dir, spec.quantiles_file, "workload.lengths.quantiles_file"))
        (isl, osl), means, name = table.sample(u_isl, u_osl), table.means(), spec.quantiles_file
    else:
        name = spec.distribution or ""
        isl, osl = sample_named(name, u_isl, u_osl, random_stream(seed, STREAM_MIXTURE).random(count))
        means = length_means(name)
    within = "independent within each part of the mixture" if name == "mixed" else "independent"
    return isl, osl, f"lengths from {name}: mean ISL {means[0]:.0f}, mean OSL {means[1]:.0f} tokens, ISL and OSL {within}"


def _from_trace(
    spec: TraceWorkload, horizon_s: float, seed: int, scheduler_names: Sequence[str], base_dir: Path
) -> tuple[np.ndarray, np.ndarray, Trace, list[str], dict[str, int]]:
    """Arrivals float64[R] in seconds, the trace row int64[R] of each, the trace, notes and counts.

    The order of work is: read, slice, compress, repeat, cut at the horizon, thin.
    """
    names = {name: index for index, name in enumerate(scheduler_names)}
    for value, name in (spec.origin_map or {}).items():
        if name not in scheduler_names:
            raise InputError(f"workload.origin_map.{value}: no scheduler is named '{name}'; known are {', '.join(scheduler_names)}.")
        names[value] = scheduler_names.index(name)
    path = resolve(base_dir, spec.path, "workload.path")
    trace = read_trace(
        path,
        time=spec.time,
        time_unit=spec.time_unit,
        invalid_rows=spec.invalid_rows,
        origin_column=spec.origin_column,
        origins=names,
    )
    notes = list(trace.notes)

    start, end = spec.slice_start_s or 0.0, spec.slice_end_s if spec.slice_end_s is not None else math.inf
    first, last = np.searchsorted(trace.arrival_s, [start, end], side="left")
    if first == last:
        option = "workload.slice_start_s" if start > trace.arrival_s[-1] else "workload.slice_end_s"
        span = f"{trace.arrival_s[0]:g} to {trace.arrival_s[-1]:g} s"
        raise InputError(f"{option}: no request of {path} lies in [{start:g}, {end:g}) s, the trace spans {span}; move the slice.")
    arrival, rows = trace.arrival_s[first:last] - start, np.arange(first, last)
    outside = len(trace.arrival_s) - len(rows)
    if spec.slice_start_s is not None or spec.slice_end_s is not None:
        notes.append(f"slice [{start:g}, {end:g}) s of the trace, its start is time 0; {outside} requests lie outside")

    scale = spec.rate_scale if spec.rate_method == "compress" else 1.0
    period = _period(spec, arrival, end - start) / scale if spec.loop else math.inf
    with np.errstate(over="ignore"):  # beyond the largest float is beyond any horizon
        arrival = arrival / scale
    if scale != 1:
        notes.append(f"arrivals compressed in time by {scale:g} (arrival times divided by it)")
    notes += _span_notes(arrival, horizon_s, trace.time_unit, spec.loop)
    if spec.loop and period < horizon_s:
        most = horizon_s / period * len(rows) if period > 0 else math.inf
        _check_size(most, "lower horizon_s or lengthen the slice")
        copies = math.ceil(horizon_s / period)
        arrival = (np.arange(copies)[:, None] * period + arrival).ravel()
        arrival = np.maximum.accumulate(arrival)  # rounding at the seam of two copies must not swap neighbours
        rows = np.tile(rows, copies)
        notes.append(f"trace repeated every {period:g} s until the horizon")
    inside = int(np.searchsorted(arrival, horizon_s, side="left"))
    if not inside:
        raise InputError(
            f"horizon_s: the first request of {path} arrives at {arrival[0]:g} s, the horizon is {horizon_s:g} s; "
            "lengthen it, set workload.slice_start_s, or workload.time_unit if the times are in another unit."
        )
    arrival, rows = arrival[:inside], rows[:inside]

    thinned = 0
    if spec.rate_method == "thin" and spec.rate_scale < 1:
        stay = random_stream(seed, STREAM_THIN).random(inside) < spec.rate_scale
        arrival, rows, thinned = arrival[stay], rows[stay], inside - int(stay.sum())
        notes.append(f"thinned: each request kept with probability {spec.rate_scale:g}, {thinned} of {inside} left out")
        if not len(rows):
            raise InputError(f"workload.rate_scale: thinning by {spec.rate_scale:g} leaves none of {inside} requests; raise it.")
    return arrival, rows, trace, notes, trace.counts | {"rows_outside_slice": outside, "requests_thinned": thinned}


def _span_notes(arrival: np.ndarray, horizon_s: float, unit: str | None, loop: bool) -> list[str]:
    """What of the trace's arrivals [R] in seconds a run of `horizon_s` takes; `unit` is that of the file's numbers, if it holds any."""
    count, reach = len(arrival), float(arrival[-1])
    doubt = f"; are the file's times in {unit}, as they were read (workload.time_unit)?" if unit else ""
    beyond = count - int(np.searchsorted(arrival, horizon_s, side="left"))
    if beyond:
        told = f"{beyond} of {count} requests arrive at or after horizon_s = {horizon_s:g} s and are left out, the last at {reach:g} s"
        return [f"warning: {told}{doubt}" if beyond > (1 - LEAST_SHARE) * count else told]
    if 0 < reach < LEAST_SPAN * horizon_s:
        return [f"warning: all {count} requests arrive within {reach:g} s, the horizon is {horizon_s:g} s{doubt}"]
    if loop:
        return []
    return [f"the last request arrives at {reach:g} s, the horizon is {horizon_s:g} s; loop = true would repeat the trace"]


def _period(spec: TraceWorkload, arrival: np.ndarray, length: float) -> float:
    """Seconds after which a looped trace begins again, before any compression."""
    if spec.slice_end_s is not None:
        return length
    gap = (arrival[-1] - arrival[0]) / (len(arrival) - 1) if len(arrival) > 1 else 0.0
    period = float(arrival[-1] + gap)
    if period <= 0:
        raise InputError("workload.loop: all requests of the trace arrive at time 0, its period is unknown; set workload.slice_end_s.")
    return period


def _split(how: str, count: int, seed: int, schedulers: int, weights: Sequence[float]) -> np.ndarray:
    """Scheduler index of each request, int[R]."""
    if how == "round_robin":
        return np.arange(count) % schedulers
    share = np.asarray(weights, np.float64)
    if len(share) != schedulers or not np.isfinite(share).all() or (share < 0).any() or share.sum() <= 0:
        raise InputError(f'schedulers: split = "weight" needs {schedulers} finite weights >= 0, not all 0; correct them.')
    edges = np.cumsum(share / share.sum())
    edges[np.flatnonzero(share)[-1] :] = 1.0  # rounding must not leave a gap that a scheduler of weight 0 would fall into
    return np.searchsorted(edges, random_stream(seed, STREAM_SPLIT).random(count), side="right")
