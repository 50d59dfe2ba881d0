"""When the windows of batch policies close, against a plain loop over the requests and against numbers worked by hand."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.lane import Lane, Requests, Windows
from jaxserve.engine.model import Sizes
from jaxserve.engine.transit import _window_end
from jaxserve.scenario.compile import compile_scenario
from jaxserve.scenario.decisions import batch_decision_times, close_windows
from jaxserve.scenario.load import parse_scenario
from jaxserve.scenario.spec import AffineLatency, FixedLatency, MeasuredLatency, NoLatency, Scenario
from tests.cli.helpers import changed

AWKWARD = (0.1, 0.3, 1 / 3, 0.7, 0.025)
"""Window lengths whose multiples are not exact: edges are where quotients go wrong."""
MOST_WINDOWS = 60


def window_of(time_s: float, window_s: float) -> int:
    """The largest k with k*window_s <= time, by counting."""
    k = 0
    while (k + 1) * window_s <= time_s:
        k += 1
    return k


def by_the_page(arrival_s: list[float], scheduler: list[int], window_s: float, most: int) -> list[tuple[int, float, int]]:
    """(window, decided_s, number of the batch) of each request, one request after another."""
    told: list[tuple[int, float, int]] = [(-1, -1.0, -1)] * len(arrival_s)
    for g in set(scheduler):
        waiting: list[int] = []
        batches = 0
        for r in [r for r, mine in enumerate(scheduler) if mine == g]:
            k = window_of(arrival_s[r], window_s)
            if waiting and told[waiting[0]][0] != k:
                waiting, batches = [], batches + 1
            waiting.append(r)
            told[r] = (k, (k + 1) * window_s, batches)
            if len(waiting) == most:
                for full in waiting:
                    told[full] = (k, arrival_s[r], batches)
                waiting, batches = [], batches + 1
    return told


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[float, list[float], list[int]]:
    """Window length, arrival times on edges, one float beside them, inside windows and at one instant, and schedulers."""
    window_s = draw(st.sampled_from((*AWKWARD, 0.25)))
    times = []
    for _ in range(draw(st.integers(0, 40))):
        edge = draw(st.integers(0, MOST_WINDOWS)) * window_s
        beside = (edge, edge, float(np.nextafter(edge, -1.0)), float(np.nextafter(edge, 1e9)), edge + 0.4 * window_s)
        times += [max(draw(st.sampled_from(beside)), 0.0)] * draw(st.sampled_from((1, 1, 1, 2, 6)))
    groups = draw(st.integers(1, 3))
    return window_s, sorted(times), [draw(st.integers(0, groups - 1)) for _ in times]


def closed(arrival_s: list[float], scheduler: list[int], window_s: float, most: int) -> Windows:
    """`close_windows` of lists."""
    return close_windows(np.array(arrival_s, float), np.array(scheduler, int), window_s, most)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(requests=arrivals(), most=st.integers(1, 5))
def test_windows_by_the_page(requests: tuple[float, list[float], list[int]], most: int) -> None:
    window_s, arrival_s, scheduler = requests
    got = closed(arrival_s, scheduler, window_s, most)
    told = by_the_page(arrival_s, scheduler, window_s, most)
    assert list(zip(got.window.tolist(), got.decided_s.tolist(), got.batch.tolist(), strict=True)) == told  # to the last bit


def decision_by_the_page(windows: Windows, scheduler: list[int], c0_s: float, c1_s: float) -> list[float]:
    """One solver a scheduler, which takes batches in order."""
    out = [0.0] * len(scheduler)
    free: dict[int, float] = {}
    for g, batch in sorted({(g, int(b)) for g, b in zip(scheduler, windows.batch, strict=True)}):
        mine = [r for r in range(len(scheduler)) if (scheduler[r], windows.batch[r]) == (g, batch)]
        close = float(windows.decided_s[mine[0]])
        free[g] = max(close, free.get(g, 0.0)) + (c0_s + c1_s * len(mine))
        for r in mine:
            out[r] = free[g]
    return out


def decisions(latency: Any, windows: Windows, scheduler: list[int]) -> list[float]:
    """`batch_decision_times` of a scenario that has this decision latency."""
    scenario = cast(Scenario, SimpleNamespace(decision_latency=latency))
    return batch_decision_times(scenario, windows, np.array(scheduler, int)).tolist()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(requests=arrivals(), most=st.integers(1, 5), c0_s=st.sampled_from((0.0, 0.01, 0.5)), c1_s=st.sampled_from((0.0, 0.003, 0.3)))
def test_decision_times_by_the_page(requests: tuple[float, list[float], list[int]], most: int, c0_s: float, c1_s: float) -> None:
    window_s, arrival_s, scheduler = requests
    windows = closed(arrival_s, scheduler, window_s, most)
    close = windows.decided_s.tolist()
    affine = decisions(AffineLatency(kind="affine", c0_s=c0_s, c1_s=c1_s), windows, scheduler)
    assert affine == decision_by_the_page(windows, scheduler, c0_s, c1_s)
    assert decisions(FixedLatency(kind="fixed", seconds=c0_s), windows, scheduler) == [t + c0_s for t in close]
    # What the solvers need is added only when they have run.
    assert decisions(NoLatency(), windows, scheduler) == decisions(MeasuredLatency(kind="measured"), windows, scheduler) == close
    assert windows.decided_s.tolist() == close  # not changed in place


def test_windows_worked_by_hand() -> None:
    """Windows of 0.5 s, 2 requests at most. Window 0: full at 0.25, the third alone until 0.5. Window 1: 0.5 is its own, full at 0.625."""
    got = closed([0.0, 0.25, 0.375, 0.5, 0.625, 2.0], [0] * 6, 0.5, 2)
    assert got.window.tolist() == [0, 0, 0, 1, 1, 4]
    assert got.decided_s.tolist() == [0.25, 0.25, 0.5, 0.625, 0.625, 2.5]
    assert got.batch.tolist() == [0, 0, 1, 2, 2, 3]
    # A solver that takes 0.5 + 0.25 a request: done at 1.25; waits, 2.0; waits, 3.0; waits, 3.75.
    latency = AffineLatency(kind="affine", c0_s=0.5, c1_s=0.25)
    assert decisions(latency, got, [0] * 6) == [1.25, 1.25, 2.0, 3.0, 3.0, 3.75]


def test_schedulers_have_windows_and_solvers_of_their_own() -> None:
    """Four requests at one instant, dealt in turn: each scheduler's second fills its window there."""
    got = closed([0.25, 0.25, 0.25, 0.25, 0.375], [0, 1, 0, 1, 1], 0.5, 2)
    assert got.decided_s.tolist() == [0.25, 0.25, 0.25, 0.25, 0.5]
    assert got.batch.tolist() == [0, 0, 0, 0, 1]
    assert decisions(AffineLatency(kind="affine", c0_s=1.0, c1_s=0.0), got, [0, 1, 0, 1, 1]) == [1.25, 1.25, 1.25, 1.25, 2.25]


@pytest.mark.parametrize("window_s", AWKWARD)
def test_every_edge_of_a_day(window_s: float) -> None:
    """An arrival on an edge belongs to the window that starts there, one float before it to the one before."""
    k = np.arange(1, min(round(86_400 / window_s), 1_000_000))
    edges = k * window_s
    for times, wanted in ((edges, k), (np.nextafter(edges, 0.0), k - 1)):
        got = close_windows(times, np.zeros(len(k), int), window_s, 300)
        np.testing.assert_array_equal(got.window, wanted)
        np.testing.assert_array_equal(got.decided_s, (wanted + 1) * window_s)
        np.testing.assert_array_equal(jax.jit(_window_end)(times, window_s), (wanted + 1) * window_s)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(requests=arrivals())
def test_remote_window_by_the_page(requests: tuple[float, list[float], list[int]]) -> None:
    window_s, times, _ = requests
    padded = np.append(times, np.full(240 - len(times), np.inf))  # one shape; places without a request must stay out of the way
    got = np.asarray(jax.jit(_window_end)(padded, window_s))
    assert got[: len(times)].tolist() == [(window_of(t, window_s) + 1) * window_s for t in times]
    assert np.all(np.isinf(got[len(times) :]))


def lane_of(windows: Windows, arrival_s: list[float], scheduler: list[int], window_s: float) -> tuple[Lane, Sizes]:
    """The host's side of a run of these requests in steps of two windows, and the sizes of its chunks of seven steps."""
    requests = Requests(
        arrival_s=np.array(arrival_s, float),
        decision_s=windows.decided_s,
        isl=np.ones(len(arrival_s), int),
        osl=np.ones(len(arrival_s), int),
        scheduler=np.array(scheduler, int),
        windows=windows,
    )
    sizes = Sizes(stay=1, requests=len(arrival_s), step_requests=1, transit=1, passes=1, steps=7, step_windows=2)
    case: Any = SimpleNamespace(requests=requests, fleet=SimpleNamespace(n_schedulers=3, forward_owner=False))
    lane = Lane(case, window_s, MOST_WINDOWS // 2 + 1, sizes)
    most = {name: max(getattr(sizes, name), value) for name, value in lane.most().items()}
    return lane, Sizes(**{**vars(sizes), **most})


@settings(max_examples=60, deadline=None, derandomize=True)
@given(requests=arrivals(), most=st.integers(1, 5))
def test_every_batch_is_decided_once_in_the_step_of_its_close(requests: tuple[float, list[float], list[int]], most: int) -> None:
    window_s, arrival_s, scheduler = requests
    windows = closed(arrival_s, scheduler, window_s, most)
    lane, sizes = lane_of(windows, arrival_s, scheduler, window_s)
    seen: list[tuple[int, int, int]] = []  # (scheduler, batch, request) in order
    for first_step in range(0, MOST_WINDOWS // 2 + 2, sizes.steps):
        chunk = lane.take_in(first_step, sizes)
        for t in range(sizes.steps):
            start_s, end_s = ((first_step + t + i) * 2 * window_s for i in (0, 1))
            for g in range(3):
                bounds = [chunk.group_start[t, g], *chunk.batch_end[t, :, g]]
                assert bounds[-1] == chunk.group_start[t, g + 1]
                for a, b in pairwise(bounds):
                    ids = chunk.ids[a:b]
                    assert len({int(windows.batch[r]) for r in ids}) <= 1 and len(ids) <= sizes.batch_requests
                    assert all(start_s <= windows.decided_s[r] < end_s for r in ids)
                    seen += [(g, int(windows.batch[r]), int(r)) for r in ids]
    assert sorted(seen) == sorted(zip(scheduler, windows.batch.tolist(), range(len(scheduler)), strict=True))
    for g in range(3):  # batches in order, and the requests in each
        assert [x for x in seen if x[0] == g] == sorted(x for x in seen if x[0] == g)


def test_a_scenario_has_windows_for_batch_policies_alone() -> None:
    latency = {"kind": "fixed", "seconds": 0.25}
    table = changed({"dispatch": {"window_max_requests": 2}, "decision_latency": latency, "workload.rate_req_per_s": 40.0})
    compiled = compile_scenario(parse_scenario(table, "small", Path()), Path())
    at_arrival, batched = compiled.requests_for(False), compiled.requests_for(True)
    assert at_arrival.windows is None
    np.testing.assert_array_equal(at_arrival.decision_s, at_arrival.arrival_s + 0.25)
    assert batched.windows is not None
    told = by_the_page(at_arrival.arrival_s.tolist(), at_arrival.scheduler.tolist(), 0.1, 2)
    np.testing.assert_array_equal(batched.windows.decided_s, [close for _, close, _ in told])
    np.testing.assert_array_equal(batched.decision_s, batched.windows.decided_s + 0.25)
    assert len(set(batched.windows.decided_s.tolist()) & set(at_arrival.arrival_s.tolist())) > 3  # some filled up early
