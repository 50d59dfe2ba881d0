"""The host's side of a run: chunk after chunk, with capacities that grow when they prove too small."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxserve.engine.chunk import run_chunk, run_chunks
from jaxserve.engine.control import AbstractPolicy
from jaxserve.engine.hosted import AbstractHostPolicy, Given, observe
from jaxserve.engine.lane import Advance, Case, Chunk, Floats, Lane, grow
from jaxserve.engine.model import Sizes, StepInputs
from jaxserve.engine.programs import forget_programs_if_many
from jaxserve.engine.state import State, initial_state
from jaxserve.errors import InputError
from jaxserve.types import on_host

MOST_PASSES = 1 << 18
"""Of a step, which is a second long at most: engine steps of a few microseconds, a thousand times shorter than any that was measured."""


class Simulation:
    """A run of one scenario, or of many that share shapes, chunk by chunk."""

    def __init__(self, cases: list[Case], *, window_s: float, horizon_steps: int, sizes: Sizes, warmup_steps: int = 0) -> None:
        forget_programs_if_many()
        self.warmup_steps, self.horizon_steps = warmup_steps, horizon_steps
        self.window_s = window_s
        self.next_step = 0
        self._lanes = [Lane(case, window_s, horizon_steps, sizes) for case in cases]
        needs = [lane.most() for lane in self._lanes]
        self.sizes = replace(sizes, **{name: max(getattr(sizes, name), *(need[name] for need in needs)) for name in needs[0]})
        hosted = [case.policy for case in cases if isinstance(case.policy, AbstractHostPolicy)]
        if hosted and (len(cases) > 1 or sizes.steps != 1):
            raise ValueError("a policy that plans on the host runs by itself, step by step")
        self._planner = hosted[0] if hosted else None
        self._stack = len(cases) > 1
        self._fleet = self._stacked([case.fleet for case in cases])
        self._policy = None if self._planner else self._stacked([case.policy for case in cases])
        self._states = [self._initial(lane.case) for lane in self._lanes]
        self._warm = np.zeros((len(cases), 2), np.int64)  # what the fallbacks had placed when the warm-up was over

    def _initial(self, case: Case) -> State:
        groups = case.fleet.n_schedulers
        memory = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf)[None], groups, axis=0), case.policy.init(case.fleet.n_dc))
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
        """Seconds of prefill, decode and idling of each engine so far, between the warm-up and the horizon: [3, E]."""
        return np.asarray(self._states[lane].engine_s)

    def fallbacks(self, lane: int = 0) -> tuple[int, int]:
        """Requests that the policy's fallback has sent to the lowest-carbon DC with headroom, and dealt in turn, since the warm-up."""
        lowest, dealt = np.asarray(self._lanes[lane].case.policy.fallbacks(self._states[lane].schedulers.memory)) - self._warm[lane]
        return int(lowest), int(dealt)

    def steps_outside(self, lane: int = 0) -> dict[str, tuple[int, int]]:
        """Steps run outside the valid range of the step models, and all steps, by phase."""
        e = self._states[lane].engines
        prefill = int(np.sum(e.prefill_outside, dtype=np.int64)), int(np.sum(e.n_prefill, dtype=np.int64))
        decode = int(np.sum(e.decode_outside, dtype=np.int64)), int(np.sum(e.n_decode, dtype=np.int64))
        return {"prefill": prefill, "decode": decode}

    def steps_above_board(self, lane: int = 0) -> int:
        """Steps whose energy form asks for more than board power; they are charged that."""
        return int(np.sum(self._states[lane].engines.above_board, dtype=np.int64))

    def advance(self) -> list[Advance]:
        """Run one chunk of all scenarios; returns what it brought for each."""
        first = self.next_step
        self._make_room(max(lane.taken_in(first + self.sizes.steps) for lane in self._lanes))
        chunks = [lane.take_in(first, self.sizes) for lane in self._lanes]
        index = first + np.arange(self.sizes.steps)
        last_window = self.horizon_steps * self.sizes.step_windows - 1  # carbon intensity need not be known after it
        times = np.minimum(index * self.sizes.step_windows, last_window) * self.window_s
        steps = self._stacked(
            [
                StepInputs(
                    index=on_host(index.astype(np.int32)),
                    counted=on_host((index >= self.warmup_steps) & (index < self.horizon_steps)),
                    ci=on_host(lane.case.ci(times)),
                    group_start=on_host(chunk.group_start),
                    batch_end=on_host(chunk.batch_end),
                )
                for lane, chunk in zip(self._lanes, chunks, strict=True)
            ]
        )
        policy, wall_s = self._policy, None
        if self._planner:
            policy, chunks[0], wall_s = self._plan(self._planner, chunks[0], steps)
        arrivals = self._stacked([chunk.arrivals for chunk in chunks])
        while True:
            run = run_chunks if self._stack else run_chunk
            state, out = run(self._fleet, policy, arrivals, self._stacked(self._states), steps, self.sizes)
            passes, transit = np.any(np.asarray(out.short_of).reshape(-1, 2), axis=0).tolist()
            if not (passes or transit):
                break
            # The chunk ran out of room: nothing of it is kept, and it runs again with more.
            if passes and self.sizes.passes > MOST_PASSES:
                now_s = first * self.sizes.step_windows * self.window_s
                raise InputError(
                    f"after {now_s:g} s an engine takes over {MOST_PASSES} steps within a second: they last (nearly) no time; "
                    "check the coefficients"
                )
            self._resize(
                replace(
                    self.sizes,
                    passes=self.sizes.passes * 2 if passes else self.sizes.passes,
                    transit=max(self.sizes.transit * 2, 64) if transit else self.sizes.transit,
                )
            )
        state, out = jax.tree.map(np.asarray, (state, out))
        self._refuse_stray(out.stray.reshape(-1, 2))
        last_warm = self.warmup_steps - 1 - first
        advances = []
        for i, lane in enumerate(self._lanes):
            lane_state, lane_out = jax.tree.map(lambda leaf, i=i: leaf[i], (state, out)) if self._stack else (state, out)
            if 0 <= last_warm < self.sizes.steps:
                self._warm[i] = lane_out.fell_back[last_warm]
            self._states[i], advance = lane.let_go(lane_state, lane_out, chunks[i], wall_s, first)
            advances.append(advance)
        self.next_step = first + self.sizes.steps
        return advances

    def _plan(self, planner: AbstractHostPolicy, chunk: Chunk, steps: StepInputs) -> tuple[AbstractPolicy, Chunk, Floats]:
        """Let the host decide the one step of a chunk: what it decided as a policy, the chunk with the times of these decisions, and
        the wall seconds [K, G] of its solves.
        """
        (lane,) = self._lanes
        row = jax.tree.map(lambda leaf: leaf[0], steps)
        state, requests = observe(self._fleet, chunk.arrivals, self._states[0], row, self.sizes)
        place, schedulers, told, wall_s = planner.plan(self._fleet, chunk.arrivals, state.snapshot, state.schedulers, requests)
        self._states[0] = replace(state, schedulers=schedulers)
        if planner.measured:
            lane.wait_for_solvers(chunk, wall_s)
            decision_s = np.asarray(chunk.arrivals.decision_s).copy()
            decision_s[: lane.end - lane.begin] = lane.decision_s[lane.begin : lane.end]
            chunk = replace(chunk, arrivals=replace(chunk.arrivals, decision_s=on_host(decision_s)))
        return Given(place=on_host(place), told=told, fell_back=planner.fallbacks(schedulers.memory)), chunk, wall_s

    def _refuse_stray(self, stray: NDArray[np.int32]) -> None:
        """Refuse a policy that names a DC that does not exist; `stray` [L, 2] as in `StepOutputs`."""
        for lane, (request, place) in zip(self._lanes, stray.tolist(), strict=True):
            if request < self.sizes.requests:
                n, number, named = lane.case.fleet.n_dc, lane.begin + request, type(lane.case.policy).__name__
                raise InputError(
                    f"policy {named}: sends request {number} (arrival {lane.case.requests.arrival_s[number]:g} s) to place {place}, which "
                    f"does not exist; there are {n} DCs, places 0 to {n - 1} of the scheduler's own order"
                )

    def _make_room(self, requests: int) -> None:
        if requests > self.sizes.requests:
            self._resize(replace(self.sizes, requests=-(-requests * 2 // 1024) * 1024))

    def _resize(self, sizes: Sizes) -> None:
        self._states = [grow(state, self.sizes, sizes) for state in self._states]
        self.sizes = sizes

    def checkpoint(self) -> dict[str, NDArray[Any]]:
        """Everything that a later `restore` on a new `Simulation` of the same cases needs, as plain arrays."""
        saved = {"next_step": np.array(self.next_step), "sizes": np.array([getattr(self.sizes, f) for f in _SIZE_FIELDS])}
        for i, (lane, state) in enumerate(zip(self._lanes, self._states, strict=True)):
            saved[f"held{i}"] = np.array([lane.begin, lane.end])
            saved[f"first_token{i}"], saved[f"finish{i}"] = lane.first_token_s, lane.finish_s
            saved[f"warm{i}"] = self._warm[i]
            saved[f"solver_free{i}"], saved[f"decision{i}"] = lane.solver_free_s, lane.decision_s[lane.begin : lane.end]
            saved |= {f"state{i}_{j}": np.asarray(leaf) for j, leaf in enumerate(jax.tree.leaves(state))}
        return saved

    def restore(self, saved: Mapping[str, NDArray[Any]]) -> None:
        """Go on from a `checkpoint`; the run ends with the same bits as if it had not been interrupted."""
        self.next_step = int(saved["next_step"])
        self.sizes = Sizes(**dict(zip(_SIZE_FIELDS, saved["sizes"].tolist(), strict=True)))
        for i, lane in enumerate(self._lanes):
            lane.begin, lane.end = saved[f"held{i}"].tolist()
            self._warm[i] = saved[f"warm{i}"]
            lane.first_token_s, lane.finish_s = np.array(saved[f"first_token{i}"]), np.array(saved[f"finish{i}"])
            lane.solver_free_s, lane.decision_s[lane.begin : lane.end] = np.array(saved[f"solver_free{i}"]), saved[f"decision{i}"]
            structure = jax.tree.structure(self._states[i])
            self._states[i] = jax.tree.unflatten(structure, [saved[f"state{i}_{j}"] for j in range(structure.num_leaves)])


_SIZE_FIELDS = tuple(field.name for field in fields(Sizes))
