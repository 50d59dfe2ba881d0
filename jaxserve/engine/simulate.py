"""The host's side of a run: chunk after chunk, with capacities that grow when they prove too small.

Requests live on the device only from their arrival until they and all before them have finished, so memory does not grow with the run.
Finished requests come out in order of their numbers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jaxserve.engine.chunk import ChunkOutputs, run_chunk, run_chunks
from jaxserve.engine.control import AbstractPolicy
from jaxserve.engine.model import Arrivals, Fleet, Sizes, StepInputs
from jaxserve.engine.state import State, initial_state
from jaxserve.types import on_host

Floats = NDArray[np.float64]
Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Requests:
    """All requests of a run, in order of arrival."""

    arrival_s: Floats  # [N] ascending, in [0, horizon)
    decision_s: Floats  # [N]
    isl: Ints  # [N] tokens
    osl: Ints  # [N] tokens
    scheduler: Ints  # [N]


@dataclass(frozen=True)
class Case:
    """One scenario as the engine takes it."""

    fleet: Fleet
    policy: AbstractPolicy
    requests: Requests
    ci: Callable[[Floats], Floats]  # times [n] s -> [n, D] g/kWh


@dataclass(frozen=True)
class Finished:
    """Requests that have come out of the engine, in order of their numbers from `first` on."""

    first: int
    engine: Ints  # [n]
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


def first_requests(arrival_s: Floats, window_s: float, step_windows: int, n_steps: int) -> Ints:
    """Number of the first request that arrives in or after each step, [n_steps + 1].

    An arrival on an edge belongs to the step that starts there.
    """
    return np.searchsorted(arrival_s, (np.arange(n_steps + 1) * step_windows) * window_s)


class _Lane:
    """Bookkeeping of one scenario: which requests are on the device, and under which row."""

    def __init__(self, case: Case, window_s: float, n_steps: int, sizes: Sizes) -> None:
        self.case = case
        self.first_request = first_requests(case.requests.arrival_s, window_s, sizes.step_windows, n_steps)
        self.begin = 0  # the requests on the device are begin .. end
        self.end = 0
        self.first_token_s = np.empty(0)
        self.finish_s = np.empty(0)

    @property
    def done(self) -> bool:
        return self.begin == len(self.case.requests.arrival_s)

    def taken_in(self, to_step: int) -> int:
        """Number of requests on the device once those that arrive before `to_step` are there."""
        return int(self.first_request[min(to_step, len(self.first_request) - 1)]) - self.begin

    def take_in(self, first_step: int, sizes: Sizes) -> tuple[Arrivals, NDArray[np.int32]]:
        """Put the chunk's arrivals on the device; returns their arrays and the group starts [T, G+1]."""
        last = len(self.first_request) - 1
        steps = np.minimum(first_step + np.arange(sizes.steps + 1), last)
        old_end, self.end = self.end, int(self.first_request[steps[-1]])
        new = self.end - old_end
        self.first_token_s = np.concatenate([self.first_token_s, np.full(new, np.nan)])
        self.finish_s = np.concatenate([self.finish_s, np.full(new, np.nan)])
        r, held = self.case.requests, slice(self.begin, self.end)
        blank = sizes.requests - (self.end - self.begin)

        def pad(values: NDArray[Any], dtype: Any, blank_value: float) -> NDArray[Any]:
            return np.concatenate([values[held].astype(dtype), np.full(blank + 1, blank_value, dtype)])

        groups = self.case.fleet.n_schedulers
        ids = np.arange(old_end, self.end)
        in_step = np.searchsorted(self.first_request[steps], ids, side="right") - 1
        key = in_step * groups + r.scheduler[ids]
        by_scheduler = np.full(sizes.requests + sizes.step_requests, sizes.requests, np.int32)
        by_scheduler[:new] = ids[np.argsort(key, kind="stable")] - self.begin
        counts = np.bincount(key, minlength=sizes.steps * groups).reshape(sizes.steps, groups)
        starts = np.concatenate([[0], np.cumsum(counts)])
        group_start = np.concatenate([starts[:-1].reshape(sizes.steps, groups), starts[groups::groups, None]], axis=1)
        arrivals = Arrivals(
            decision_s=on_host(pad(r.decision_s, np.float64, np.inf)),
            isl=on_host(pad(r.isl, np.float64, 0)),
            osl=on_host(pad(r.osl, np.int32, 0)),
            scheduler=on_host(pad(r.scheduler, np.int32, 0)),
            by_scheduler=on_host(by_scheduler),
        )
        return arrivals, group_start.astype(np.int32)

    def let_go(self, state: State, out: ChunkOutputs, first_step: int) -> tuple[State, Advance]:
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
            dc_arrival_s=np.array(o.dc_arrival_s[:n]),
            admit_s=np.array(o.admit_s[:n]),
            first_token_s=self.first_token_s[:n].copy(),
            finish_s=self.finish_s[:n].copy(),
        )
        self.first_token_s, self.finish_s = self.first_token_s[n:], self.finish_s[n:]
        self.begin += n
        columns = {f: np.asarray(getattr(out, f)) for f in ("prefill_j", "decode_j", "idle_s", "running", "queued", "under_way", "seen")}
        return _shift(state, n), Advance(first_step=first_step, finished=finished, **columns)


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


def _grow(state: State, old: Sizes, new: Sizes) -> State:
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


class Simulation:
    """A run of one scenario, or of many that share shapes, chunk by chunk."""

    def __init__(self, cases: list[Case], *, window_s: float, horizon_steps: int, sizes: Sizes) -> None:
        self.horizon_steps = horizon_steps
        self.window_s = window_s
        self.next_step = 0
        self._lanes = [_Lane(case, window_s, horizon_steps, sizes) for case in cases]
        busiest = max(int(np.diff(lane.first_request).max()) for lane in self._lanes)
        self.sizes = replace(sizes, step_requests=max(sizes.step_requests, busiest))
        self._stack = len(cases) > 1
        self._fleet = self._stacked([case.fleet for case in cases])
        self._policy = self._stacked([case.policy for case in cases])
        self._states = [self._initial(lane.case) for lane in self._lanes]

    def _initial(self, case: Case) -> State:
        groups = case.fleet.n_schedulers
        memory = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf)[None], groups, axis=0), case.policy.init())
        state = initial_state(case.fleet, self.sizes, memory, jnp.asarray(case.ci(np.zeros(1))[0]))
        return jax.tree.map(np.asarray, state)

    def _stacked(self, trees: list[Any]) -> Any:
        return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *trees) if self._stack else trees[0]

    @property
    def done(self) -> bool:
        """Whether the horizon has passed, every request has finished, and the energy of every step has been counted."""
        now_s = self.next_step * self.sizes.step_windows * self.window_s
        counted = all(np.max(state.engines.clock) <= now_s for state in self._states)
        return self.next_step >= self.horizon_steps and counted and all(lane.done for lane in self._lanes)

    def engine_s(self, lane: int = 0) -> Floats:
        """Seconds of prefill, decode and idling of each engine so far, before the horizon: [3, E]."""
        return np.asarray(self._states[lane].engine_s)

    def steps_outside(self, lane: int = 0) -> dict[str, tuple[int, int]]:
        """Steps run outside the valid range of the step models, and all steps, by phase."""
        e = self._states[lane].engines
        prefill = int(np.sum(e.prefill_outside, dtype=np.int64)), int(np.sum(e.n_prefill, dtype=np.int64))
        decode = int(np.sum(e.decode_outside, dtype=np.int64)), int(np.sum(e.n_decode, dtype=np.int64))
        return {"prefill": prefill, "decode": decode}

    def advance(self) -> list[Advance]:
        """Run one chunk of all scenarios; returns what it brought for each."""
        first = self.next_step
        self._make_room(max(lane.taken_in(first + self.sizes.steps) for lane in self._lanes))
        taken = [lane.take_in(first, self.sizes) for lane in self._lanes]
        arrivals = self._stacked([arrivals for arrivals, _ in taken])
        index = first + np.arange(self.sizes.steps)
        times = np.minimum(index, self.horizon_steps - 1) * self.sizes.step_windows * self.window_s
        steps = self._stacked(
            [
                StepInputs(
                    index=on_host(index.astype(np.int32)),
                    counted=on_host(index < self.horizon_steps),
                    ci=on_host(lane.case.ci(times)),
                    group_start=on_host(group_start),
                )
                for lane, (_, group_start) in zip(self._lanes, taken, strict=True)
            ]
        )
        while True:
            run = run_chunks if self._stack else run_chunk
            state, out = run(self._fleet, self._policy, arrivals, self._stacked(self._states), steps, self.sizes)
            short_of = np.asarray(out.short_of).reshape(-1, 2)
            passes, transit = bool(short_of[:, 0].any()), bool(short_of[:, 1].any())
            if not (passes or transit):
                break
            # The chunk ran out of room: nothing of it is kept, and it runs again with more.
            self._resize(
                replace(
                    self.sizes,
                    passes=-(-self.sizes.passes * 3 // 16) * 8 if passes else self.sizes.passes,
                    transit=self.sizes.transit * 2 if transit else self.sizes.transit,
                )
            )
        state, out = jax.tree.map(np.asarray, (state, out))
        advances = []
        for i, lane in enumerate(self._lanes):
            lane_state, lane_out = jax.tree.map(lambda leaf, i=i: leaf[i], (state, out)) if self._stack else (state, out)
            self._states[i], advance = lane.let_go(lane_state, lane_out, first)
            advances.append(advance)
        self.next_step = first + self.sizes.steps
        return advances

    def _make_room(self, requests: int) -> None:
        if requests > self.sizes.requests:
            self._resize(replace(self.sizes, requests=-(-requests * 5 // 4096) * 1024))

    def _resize(self, sizes: Sizes) -> None:
        self._states = [_grow(state, self.sizes, sizes) for state in self._states]
        self.sizes = sizes

    def checkpoint(self) -> dict[str, NDArray[Any]]:
        """Everything that a later `restore` on a new `Simulation` of the same cases needs, as plain arrays."""
        saved = {"next_step": np.array(self.next_step), "sizes": np.array([getattr(self.sizes, f) for f in _SIZE_FIELDS])}
        for i, (lane, state) in enumerate(zip(self._lanes, self._states, strict=True)):
            saved[f"held{i}"] = np.array([lane.begin, lane.end])
            saved[f"first_token{i}"], saved[f"finish{i}"] = lane.first_token_s, lane.finish_s
            saved |= {f"state{i}_{j}": np.asarray(leaf) for j, leaf in enumerate(jax.tree.leaves(state))}
        return saved

    def restore(self, saved: Mapping[str, NDArray[Any]]) -> None:
        """Go on from a `checkpoint`; the run ends with the same bits as if it had not been interrupted."""
        self.next_step = int(saved["next_step"])
        self.sizes = Sizes(**dict(zip(_SIZE_FIELDS, saved["sizes"].tolist(), strict=True)))
        for i, lane in enumerate(self._lanes):
            lane.begin, lane.end = saved[f"held{i}"].tolist()
            lane.first_token_s, lane.finish_s = np.array(saved[f"first_token{i}"]), np.array(saved[f"finish{i}"])
            structure = jax.tree.structure(self._states[i])
            self._states[i] = jax.tree.unflatten(structure, [saved[f"state{i}_{j}"] for j in range(structure.num_leaves)])


_SIZE_FIELDS = tuple(field.name for field in fields(Sizes))
