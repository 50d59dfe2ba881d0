"""One zone's rows of all files as a step function over a run: sorted, merged, filled where that is asked for, and judged."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import InputError
from jaxserve.scenario.signals import US_PER_S, Column, parse_cells, utc_text

US_PER_MINUTE = 60 * US_PER_S
US_PER_HOUR = 60 * US_PER_MINUTE
STEPS_MIN = (5, 10, 15, 20, 30, 60)
"""Resolutions that a file may have."""

VALUE, HOLE, WRONG, CONFLICT = 0, 1, 2, 3


@dataclass(frozen=True)
class Samples:
    """One zone's rows of all files: times ascending and distinct, N of them."""

    label: str
    time_us: NDArray[np.int64]
    value: NDArray[np.float64]
    """[N] gCO2eq/kWh, NaN unless state is VALUE."""
    state: NDArray[np.int8]
    """[N] VALUE, HOLE (empty), WRONG (text, infinite, negative), CONFLICT (duplicates that differ)."""
    told: dict[int, str]
    """By index: where and what a HOLE, WRONG or CONFLICT is."""
    duplicates: set[tuple[str, int]]
    """(file, line) of every row beyond the first of its time stamp."""
    estimated: NDArray[np.bool_]
    """[N] whether the publisher says that it estimated the value."""


@dataclass(frozen=True)
class Steps:
    """One zone over a run: value i holds on [edges_us[i], edges_us[i] + step)."""

    edges_us: NDArray[np.int64]
    value: NDArray[np.float64]
    until_us: int
    filled: int
    conflicts: int
    """How many of the filled steps had rows that contradict each other."""
    step_min: int
    estimated: float
    """Share of the steps whose value the publisher estimated."""


def merge(zone: str, columns: Sequence[Column], g_per_kwh: Sequence[float], allow_negative: bool) -> Samples:
    """Sorts one zone's rows and merges those of equal time stamp; `g_per_kwh` is what one unit of each column is."""
    labels = [column.label for column in columns for _ in column.cells]
    files = list(dict.fromkeys(labels))
    line = np.concatenate([column.line for column in columns])
    raw_time = np.concatenate([column.time_us for column in columns])
    cells = [cell.strip() for column in columns for cell in column.cells]
    raw_value, wrong = parse_cells(cells)
    raw_value *= np.repeat(g_per_kwh, [len(column.cells) for column in columns])
    estimates = [np.zeros(len(column.cells), bool) if column.estimated is None else column.estimated for column in columns]
    if not allow_negative:
        advice = "is negative, which only a marginal signal may be (signal = 'marginal', allow_negative = true)"
        wrong |= {int(i): f"{cells[i]} {advice}" for i in np.flatnonzero(raw_value < 0) if i not in wrong}
    order = np.argsort(raw_time, kind="stable")
    time_us, first = np.unique(raw_time[order], return_index=True)
    lasts = np.append(first[1:], len(order))
    value = raw_value[order[first]]
    state = np.where(np.isnan(value), HOLE, VALUE).astype(np.int8)
    slot = np.empty(len(order), dtype=np.int64)
    slot[order] = np.repeat(np.arange(len(first)), lasts - first)

    def told_row(row: int) -> str:
        return f"row {line[row]}" + (f" of {labels[row]}" if len(files) > 1 else "")

    told = {int(i): f"{told_row(int(order[first[i]]))} is empty" for i in np.flatnonzero(state == HOLE)}
    duplicates: set[tuple[str, int]] = set()
    for i in np.flatnonzero(lasts - first > 1):
        rows = order[first[i] : lasts[i]]
        duplicates |= {(labels[row], int(line[row])) for row in rows[1:]}
        # An empty cell contradicts nothing: the other row's value stands.
        known = rows[~np.isnan(raw_value[rows])]
        if known.size:
            value[i], state[i] = raw_value[known[0]], VALUE
        differs = known[raw_value[known] != value[i]]
        if differs.size:
            a, b = known[0], differs[0]
            value[i], state[i] = np.nan, CONFLICT
            told[int(i)] = f"{told_row(a)} and {told_row(b)} give {cells[a]} and {cells[b]}"
    for row, what in wrong.items():
        i = int(slot[row])
        value[i], state[i], told[i] = np.nan, WRONG, f"{told_row(row)}, zone {zone}, hour {utc_text(int(time_us[i]))}: {what}"
    estimated = np.bincount(slot, weights=np.concatenate(estimates), minlength=len(first)) > 0
    return Samples(", ".join(files), time_us, value, state, told, duplicates, estimated)


def _resolution(zone: str, samples: Samples) -> tuple[int, int]:
    """The most common step of the file and its most common phase, us."""
    allowed = [minutes * US_PER_MINUTE for minutes in STEPS_MIN]
    gaps, times = np.unique(np.diff(samples.time_us), return_counts=True)
    # Of equally common steps one that is allowed: a single stray stamp in a short file makes two that are not.
    common = sorted(gaps[times == times.max()].tolist(), key=lambda gap: gap not in allowed) if gaps.size else [US_PER_HOUR]
    step = int(common[0])
    if step > US_PER_HOUR and step % US_PER_HOUR == 0:
        step = US_PER_HOUR  # Two rows around a hole, or a file with holes everywhere: each is then told by its hour.
    if step not in allowed:
        raise InputError(
            f"{samples.label}: zone {zone}: most time stamps are {step / US_PER_MINUTE:g} min apart; "
            f"give one row every {', '.join(map(str, STEPS_MIN))} min"
        )
    phases, times = np.unique(samples.time_us % step, return_counts=True)
    return step, int(phases[np.argmax(times)])


def on_grid(zone: str, samples: Samples, fill: str, span: tuple[int, int]) -> Steps:
    """The zone's values over the run [start, end) of `span`; only what the run needs is judged."""
    step, phase = _resolution(zone, samples)
    label, time_us = samples.label, samples.time_us
    regular = (time_us - phase) % step == 0
    edges_us = np.arange((span[0] - phase) // step * step + phase, span[1], step)
    begin, end = int(time_us[regular][0]), int(time_us[regular][-1]) + step
    if edges_us[0] < begin or edges_us[-1] >= end:
        lost = int(edges_us[0]) if edges_us[0] < begin else max(end, int(edges_us[0]))
        raise InputError(
            f"{label}: zone {zone} has no value at hour {utc_text(lost)}, outside the file ({utc_text(begin)} until {utc_text(end)}); "
            "move or shorten the run, or give a file that covers it"
        )
    stray = np.flatnonzero(~regular & (time_us >= edges_us[0]) & (time_us < edges_us[-1] + step))
    if stray.size:
        raise InputError(
            f"{label}: zone {zone}: the time stamp {utc_text(int(time_us[stray[0]]))} is off the file's {step // US_PER_MINUTE} min steps; "
            "correct it, or split the file where its resolution changes"
        )
    at = np.minimum(np.searchsorted(time_us, edges_us), len(time_us) - 1)
    present = time_us[at] == edges_us
    state = np.where(present, samples.state[at], HOLE)
    value = np.where(present, samples.value[at], np.nan)
    _refuse_wrong(samples, at[state == WRONG])
    holes = np.flatnonzero(state != VALUE)
    if holes.size:
        if fill == "error":
            i = holes[0]
            told = samples.told[int(at[i])] if present[i] else "no row"
            what, advice = ("two values", "keep one, write times with their UTC offset") if state[i] == CONFLICT else ("no value", "add it")
            raise InputError(
                f"{label}: zone {zone} has {what} at hour {utc_text(int(edges_us[i]))} ({told}); {advice}, "
                "or set grid.fill to 'hold' or 'interpolate'"
            )
        value[holes] = _filled(zone, samples, regular, fill, edges_us[holes])
    conflicts = int(np.count_nonzero(state == CONFLICT))
    estimated = float((samples.estimated[at] & (state == VALUE)).mean())
    return Steps(edges_us, value, int(edges_us[-1]) + step, int(holes.size), conflicts, step // US_PER_MINUTE, estimated)


def _filled(zone: str, samples: Samples, regular: NDArray[np.bool_], fill: str, holes_us: NDArray[np.int64]) -> NDArray[np.float64]:
    """gCO2eq/kWh of the holes [H], from the nearest values in the file, inside or outside the run."""
    # A wrong cell stays a neighbour, so that it is told rather than stepped over.
    known = np.flatnonzero(regular & ((samples.state == VALUE) | (samples.state == WRONG)))
    right = np.searchsorted(samples.time_us[known], holes_us)
    alone = (right == 0) | ((right == len(known)) & (fill == "interpolate"))
    if alone.any():
        i = np.flatnonzero(alone)[0]
        side = "before" if right[i] == 0 else "after"
        raise InputError(
            f"{samples.label}: zone {zone} has no value at hour {utc_text(int(holes_us[i]))} and none {side} it in the file "
            f"to {fill} from; add it, or move the run"
        )
    before = known[right - 1]
    _refuse_wrong(samples, before[samples.state[before] == WRONG])
    if fill == "hold":
        return samples.value[before]
    after = known[right]
    _refuse_wrong(samples, after[samples.state[after] == WRONG])
    weight = (holes_us - samples.time_us[before]) / (samples.time_us[after] - samples.time_us[before])
    return samples.value[before] + weight * (samples.value[after] - samples.value[before])


def _refuse_wrong(samples: Samples, indices: NDArray[np.intp]) -> None:
    if indices.size:
        raise InputError(f"{samples.label}: {samples.told[int(indices[0])]}; correct the cell")
