"""One scenario of a run as the host sees it: its requests, which of them are on the device and under which row, and what comes back.

Requests live on the device only from their arrival until they and all before them have finished, so memory does not grow with the run.
Finished requests come out in order of their numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import Array
from jaxtyping import PyTree
from numpy.typing import NDArray

from jaxserve.engine.chunk import ChunkOutputs
from jaxserve.engine.control import AbstractPolicy
from jaxserve.engine.hosted import AbstractHostPolicy
from jaxserve.engine.model import Arrivals, Fleet, Sizes
from jaxserve.engine.state import State
from jaxserve.types import on_host

Floats = NDArray[np.float64]
Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Requests:
    """All requests of a run, in order of arrival."""

    arrival_s: Floats  # [N] ascending, in [0, horizon)
    decision_s: Floats  # [N] when the decision is out
    isl: Ints  # [N] tokens
    osl: Ints  # [N] tokens
    scheduler: Ints  # [N]
    osl_believed: Floats | None = None  # [N] tokens, what the schedulers take osl for; None: the truth
    windows: "Windows | None" = None  # for batch policies


@dataclass(frozen=True)
class Windows:
    """Which requests batch policies decide together, and when."""

    window: Ints  # [N] number of the window in which the request arrives
    decided_s: Floats  # [N] its close: the end of the window, or earlier where it was full
    batch: Ints  # [N] number of the batch among its scheduler's; a window that was full has several


@dataclass(frozen=True)
class Case:
    """One scenario as the engine takes it."""

    fleet: Fleet
    policy: AbstractPolicy | AbstractHostPolicy
    requests: Requests
    ci: Callable[[Floats], Floats]  # times [n] s -> [n, D] g/kWh


@dataclass(frozen=True)
class Finished:
    """Requests that have come out of the engine, in order of their numbers from `first` on."""

    first: int
    engine: Ints  # [n]
    decision_s: Floats  # [n]
    dc_arrival_s: Floats  # [n]
    admit_s: Floats  # [n]
    first_token_s: Floats  # [n]
    finish_s: Floats  # [n]


@dataclass(frozen=True)
class Advance:
    """What one chunk brought for one scenario."""

    first_step: int
    finished: Finished
    prefill_j: Floats  # [T, D]
    decode_j: Floats  # [T, D]
    idle_s: Floats  # [T, D] engine-seconds
    running: Ints  # [T, D] at each step's end
    queued: Ints  # [T, D]
    under_way: Ints  # [T]
    seen: Floats  # [T, 4, D] snapshots in force in each step: B, Q, K, duty
    told: "Told | None"  # of a policy that tells of its batches


@dataclass(frozen=True)
class Told:
    """What a batch policy tells of n batches."""

    window: Ints  # [n]
    decided_s: Floats  # [n]
    scheduler: Ints  # [n]
    requests: Ints  # [n]
    wall_s: Floats  # [n], nan where decided on the device
    answer: PyTree  # the policy's own, leading axis n


def first_requests(arrival_s: Floats, window_s: float, step_windows: int, n_steps: int) -> Ints:
    """Number of the first request that arrives in or after each step, [n_steps + 1].

    An arrival on an edge belongs to the step that starts there.
    """
    return np.searchsorted(arrival_s, (np.arange(n_steps + 1) * step_windows) * window_s)


def windows_of(times_s: Floats, window_s: float) -> Ints:
    """The window k of each time, the largest with k*window_s <= time; the quotient may be off by one where the product is exact."""
    guess = np.floor(times_s / window_s)
    return (guess + ((guess + 1.0) * window_s <= times_s) - (guess * window_s > times_s)).astype(np.int64)


class Lane:
    """Bookkeeping of one scenario: which requests are on the device, and under which row."""

    def __init__(self, case: Case, window_s: float, n_steps: int, sizes: Sizes) -> None:
        self.case = case
        r = case.requests
        self.first_request = first_requests(r.arrival_s, window_s, sizes.step_windows, n_steps)
        edges = (np.arange(n_steps + 2) * sizes.step_windows) * window_s
        decided_s = r.windows.decided_s if r.windows else r.arrival_s
        self.step = np.searchsorted(edges, decided_s, side="right") - 1  # [N] in which each request is decided
        self.decision_s = np.array(r.decision_s)
        self.window = windows_of(decided_s, window_s)  # [N] likewise
        self.solver_free_s = np.zeros(case.fleet.n_schedulers)  # where solvers' own time counts
        self.begin = 0  # the requests on the device are begin .. end
        self.end = 0
        self.first_token_s = np.empty(0)
        self.finish_s = np.empty(0)

    def most(self) -> dict[str, int]:
        """The largest step, the longest stay and the largest batches of the run."""
        r, groups = self.case.requests, self.case.fleet.n_schedulers
        stay = int(r.osl.max(initial=2)) - 1
        sizes = {"step_requests": int(np.bincount(self.step, minlength=1).max(initial=0)), "stay": stay, "batches": 1, "batch_requests": 1}
        if r.windows and len(self.step):
            place = self.step * groups + r.scheduler
            first = np.full(place.max() + 1, np.iinfo(np.int64).max)
            np.minimum.at(first, place, r.windows.batch)
            sizes["batches"] = int((r.windows.batch - first[place]).max()) + 1
            _, counts = np.unique(r.windows.batch * groups + r.scheduler, return_counts=True)
            most = int(counts.max())
            if self.case.fleet.forward_owner:
                most = min(int(self.case.fleet.window_max_requests), len(self.step))
            sizes["batch_requests"] = -(-most // 16) * 16
        return sizes

    @property
    def done(self) -> bool:
        return self.begin == len(self.case.requests.arrival_s)

    def taken_in(self, to_step: int) -> int:
        """Number of requests on the device once those that arrive before `to_step` are there."""
        return int(self.first_request[min(to_step, len(self.first_request) - 1)]) - self.begin

    def take_in(self, first_step: int, sizes: Sizes) -> "Chunk":
        """Put the chunk's arrivals on the device, and list the requests to be decided in it."""
        last = len(self.first_request) - 1
        old_end, self.end = self.end, int(self.first_request[min(first_step + sizes.steps, last)])
        new = self.end - old_end
        self.first_token_s = np.concatenate([self.first_token_s, np.full(new, np.nan)])
        self.finish_s = np.concatenate([self.finish_s, np.full(new, np.nan)])
        r, held = self.case.requests, slice(self.begin, self.end)
        blank = sizes.requests - (self.end - self.begin)

        def pad(values: NDArray[Any], dtype: Any, blank_value: float) -> NDArray[Any]:
            return np.concatenate([values[held].astype(dtype), np.full(blank + 1, blank_value, dtype)])

        groups = self.case.fleet.n_schedulers
        # A batch closes one window after its first request at most, so what arrived a step earlier may still be undecided.
        ids = np.arange(max(self.begin, int(self.first_request[np.clip(first_step - 1, 0, last)])), self.end)
        in_step = self.step[ids] - first_step
        ids = ids[(in_step >= 0) & (in_step < sizes.steps)]
        key = (self.step[ids] - first_step) * groups + r.scheduler[ids]
        order = np.argsort(key, kind="stable")
        ids, key = ids[order], key[order]
        by_scheduler = np.full(sizes.requests + sizes.step_requests, sizes.requests, np.int32)
        by_scheduler[: len(ids)] = ids - self.begin
        counts = np.bincount(key, minlength=sizes.steps * groups).reshape(sizes.steps, groups)
        starts = np.concatenate([[0], np.cumsum(counts)])
        group_start = np.concatenate([starts[:-1].reshape(sizes.steps, groups), starts[groups::groups, None]], axis=1)
        rank = np.zeros(len(ids), np.int64)  # of the batch among its scheduler's in the step
        if r.windows and len(ids):
            batch = r.windows.batch[ids]
            rank = batch - batch[starts[key]]
        within = np.bincount(key * sizes.batches + rank, minlength=counts.size * sizes.batches).reshape(sizes.steps, groups, sizes.batches)
        batch_end = (group_start[:, :-1, None] + np.cumsum(within, axis=2)).transpose(0, 2, 1)
        arrivals = Arrivals(
            decision_s=on_host(pad(self.decision_s, np.float64, np.inf)),
            isl=on_host(pad(r.isl, np.float64, 0)),
            osl=on_host(pad(r.osl, np.int32, 0)),
            osl_believed=on_host(pad(r.osl if r.osl_believed is None else r.osl_believed, np.float64, 0)),
            scheduler=on_host(pad(r.scheduler, np.int32, 0)),
            window=on_host(pad(self.window, np.int32, -1)),
            by_scheduler=on_host(by_scheduler),
        )
        return Chunk(arrivals, group_start.astype(np.int32), batch_end.astype(np.int32), ids)

    def batches(self, chunk: "Chunk") -> tuple[tuple[Ints, ...], Ints, Ints]:
        """Of the batches decided in a chunk: where they stand in [T, K, G], the first request of each, and how many it has."""
        end = chunk.batch_end
        begin = np.concatenate([chunk.group_start[:, None, :-1], end[:, :-1]], axis=1)
        where = np.nonzero(end > begin)
        return where, chunk.ids[begin[where]], (end - begin)[where]

    def wait_for_solvers(self, chunk: "Chunk", wall_s: Floats) -> None:
        """Set the decision times of the batches of a one-step chunk, over which the schedulers' solvers took `wall_s` [K, G]."""
        windows = self.case.requests.windows
        assert windows is not None  # only batch policies have solvers
        for k in range(chunk.batch_end.shape[1]):
            begins = chunk.group_start[0, :-1] if k == 0 else chunk.batch_end[0, k - 1]
            for g, (begin, end) in enumerate(zip(begins, chunk.batch_end[0, k], strict=True)):
                mine = chunk.ids[begin:end]
                if len(mine):
                    self.solver_free_s[g] = max(windows.decided_s[mine[0]], self.solver_free_s[g]) + wall_s[k, g]
                    self.decision_s[mine] = self.solver_free_s[g]

    def let_go(self, state: State, out: ChunkOutputs, chunk: "Chunk", wall_s: Floats | None, first_step: int) -> tuple[State, Advance]:
        """Read the times off a chunk and drop the leading requests that have finished from the device."""
        held = self.end - self.begin
        for mine, theirs in ((self.first_token_s, out.first_token_s), (self.finish_s, out.finish_s)):
            news = np.asarray(theirs)[:held]
            np.copyto(mine, news, where=~np.isnan(news))
        pending = np.flatnonzero(np.isnan(self.finish_s))
        n = int(pending[0]) if len(pending) else held
        o = state.outcomes
        finished = Finished(
            first=self.begin,
            engine=np.array(o.engine[:n]),
            decision_s=self.decision_s[self.begin : self.begin + n].copy(),
            dc_arrival_s=np.array(o.dc_arrival_s[:n]),
            admit_s=np.array(o.admit_s[:n]),
            first_token_s=self.first_token_s[:n].copy(),
            finish_s=self.finish_s[:n].copy(),
        )
        self.first_token_s, self.finish_s = self.first_token_s[n:], self.finish_s[n:]
        self.begin += n
        columns = {f: np.asarray(getattr(out, f)) for f in ("prefill_j", "decode_j", "idle_s", "running", "queued", "under_way", "seen")}
        return _shift(state, n), Advance(first_step=first_step, finished=finished, told=self._told(chunk, out, wall_s), **columns)

    def _told(self, chunk: "Chunk", out: ChunkOutputs, wall_s: Floats | None) -> Told | None:
        windows = self.case.requests.windows
        if windows is None or not jax.tree.leaves(out.told):
            return None
        where, first, count = self.batches(chunk)
        return Told(
            window=windows.window[first],
            decided_s=windows.decided_s[first],
            scheduler=self.case.requests.scheduler[first],
            requests=count,
            wall_s=np.full(len(first), np.nan) if wall_s is None else wall_s[where[1:]],
            answer=jax.tree.map(lambda leaf: np.asarray(leaf)[where], out.told),
        )


@dataclass(frozen=True)
class Chunk:
    """What a chunk works on."""

    arrivals: Arrivals
    group_start: NDArray[np.int32]  # [T, G+1]
    batch_end: NDArray[np.int32]  # [T, K, G]
    ids: Ints  # requests decided in it, in the order of `by_scheduler`


def _shift(state: State, n: int) -> State:
    """Renumber the requests on the device after the first `n` have left."""
    rows = state.outcomes.next.shape[0]
    none = rows - 1

    def renumber(ids: Any) -> Array:
        ids = np.asarray(ids)
        return on_host(np.where((ids == none) | (ids < n), none, ids - n).astype(np.int32))

    o, e = state.outcomes, state.engines
    blank = {"dc_arrival_s": np.inf, "engine": e.clock.shape[0], "next": none, "admit_s": np.inf, "admit_decode": 0, "prefill_step": -1}
    columns = {}
    for name, value in blank.items():
        old = np.asarray(getattr(o, name))
        columns[name] = on_host(np.concatenate([old[n:none], np.full(n + 1, value, old.dtype)]))
    columns["next"] = on_host(np.concatenate([renumber(o.next[n:none]), np.full(n + 1, none, np.int32)]))
    return replace(
        state,
        outcomes=type(o)(**columns),
        engines=replace(e, head=renumber(e.head), builder=renumber(e.builder), tail=renumber(e.tail)),
        transit=replace(state.transit, request=renumber(state.transit.request)),
    )


def grow(state: State, old: Sizes, new: Sizes) -> State:
    """Give the state the room of `new`: more requests, more places in transit."""
    none_old, none_new = old.requests, new.requests
    extra, places = none_new - none_old, new.transit - old.transit

    def renumber(ids: Any) -> Array:
        return on_host(np.where(np.asarray(ids) == none_old, none_new, ids).astype(np.int32))

    def longer(column: Any) -> Array:
        column = np.asarray(column)
        return on_host(np.concatenate([column, np.repeat(column[-1:], extra)]))

    o, e, t = state.outcomes, state.engines, state.transit
    outcomes = type(o)(**{name: longer(getattr(o, name)) for name in o.__dataclass_fields__})
    return replace(
        state,
        outcomes=replace(outcomes, next=renumber(outcomes.next)),
        engines=replace(e, head=renumber(e.head), builder=renumber(e.builder), tail=renumber(e.tail)),
        transit=type(t)(
            request=on_host(np.concatenate([renumber(t.request), np.full(places, none_new, np.int32)])),
            dc=on_host(np.concatenate([np.asarray(t.dc), np.full(places, e.dc_count.shape[0], np.int32)])),
            arrival_s=on_host(np.concatenate([np.asarray(t.arrival_s), np.full(places, np.inf)])),
        ),
    )
