"""Batch policies of the vectorised engine against the event-driven reference, request by request and batch by batch."""

import math
from dataclasses import replace

import equinox as eqx
import numpy as np
import pytest

from jaxserve.policies.greedy import Greedy
from tests.oracle.model import OracleResult, OracleScenario
from tests.oracle.policies import Scheduler
from tests.oracle.random_batches import POLICIES
from tests.oracle.simulator import Simulation
from tests.parity.batch_bridge import EngineBatches, batch_sizes, policy_of, run_batches
from tests.parity.batch_worlds import SEEDS, programs, reference, result, world
from tests.parity.bridge import EngineResult, by_interval, step_windows_of

# The engine and the reference add the same few thousand float64 terms in another order; either is some 1e-13 off at most.
EXACT = 1e-9
# The closest second-best assignment, or SLO, is 1e-4 off, and the closest credits are 7e-4 apart: far over the tolerances of solvers.
UNIQUE = 1e-6
CLOSE_S = 1e-9  # s; rounding of a clock is 1e-14 here

ALL = [seed for seeds in programs().values() for seed in seeds]
# By itself, in the policy's own program and in steps of four windows.
ALONE = (50,)
# With HiGHS between steps of four windows, so that one program serves all policies: every policy that solves, on one kind of world.
ON_HOST = (0, 60, 2, 14, 4, 64, 54)


def compare_requests(expected: OracleResult, got: EngineResult) -> None:
    for name in ("dc", "node", "engine"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)
    for name in ("dc_arrival_s", "admit_s", "first_token_s", "finish_s"):
        wanted = np.array(getattr(expected, name))
        assert np.max(np.abs(getattr(got, name) - wanted) / np.maximum(1.0, np.abs(wanted))) < EXACT, name


def compare_energies(s: OracleScenario, expected: OracleResult, got: EngineResult) -> None:
    assert got.above_board == expected.above_board
    kept = s.horizon_windows // got.step_windows
    first = np.arange(0, kept, s.ledger_windows // got.step_windows)
    for name, per_step in (("prefill_j", got.prefill_j), ("decode_j", got.decode_j), ("idle_j", got.idle_s * s.idle_w_per_gpu * s.tp)):
        wanted = by_interval(s, expected, name)
        assert np.max(np.abs(np.add.reduceat(per_step[:kept], first, axis=0) - wanted)) <= EXACT * np.max(wanted), name
    drain_j = got.prefill_j[kept:].sum() + got.decode_j[kept:].sum()
    assert drain_j == pytest.approx(expected.drain_energy_j, rel=EXACT, abs=EXACT)


def compare_polls(expected: OracleResult, got: EngineResult) -> None:
    window, dc, *wanted = (np.array(column) for column in zip(*expected.polls, strict=True))
    seen = got.seen[window // got.step_windows, :, dc]
    for name, column, truth in zip(("B", "Q", "K", "duty"), seen.T, wanted, strict=True):
        assert np.max(np.abs(column - truth)) <= EXACT * max(1.0, np.max(truth)), name


def compare_batches(expected: OracleResult, told: EngineBatches | None) -> None:
    if {batch.status for batch in expected.batches} <= {"rule"}:
        return  # policies without a solver have nothing to tell
    assert told is not None
    assert told.fallbacks == (sum(batch.by_carbon for batch in expected.batches), sum(batch.in_turn for batch in expected.batches))
    own = [batch for batch in expected.batches if not batch.handed]
    batches = sorted(own, key=lambda batch: (batch.decided_s, batch.scheduler))  # a stable sort
    for name in ("decided_s", "scheduler", "requests", "status", "by_carbon", "in_turn"):
        np.testing.assert_array_equal(getattr(told, name), [getattr(batch, name) for batch in batches], err_msg=name)
    # What has no assignment is known by its status, and costs infinitely much or, with nothing to assign, nothing.
    costs = {"infeasible": math.inf, "empty": 0.0}
    wanted = [costs.get(batch.status, batch.objective) for batch in batches]
    np.testing.assert_allclose(told.objective, wanted, rtol=EXACT, atol=0, err_msg="objective")


def compare(s: OracleScenario, expected: OracleResult, got: EngineResult, told: EngineBatches | None) -> None:
    compare_requests(expected, got)
    compare_batches(expected, told)
    compare_polls(expected, got)
    compare_energies(s, expected, got)


def test_every_policy_has_its_worlds():
    assert sorted(ALL) == SEEDS
    assert len(ALL) >= 60
    assert {world(seed).policy[0] for seed in ALL} == set(POLICIES)
    assert {world(seed).policy[0] for seed in ON_HOST} == {"ilp", "iterative_ilp", "facility_milp", "green_llm"}


def test_moer_is_greedy_for_carbon():
    moer = policy_of(replace(world(0), policy=("moer",)))
    assert eqx.tree_equal(moer, Greedy.of(alpha=0.0))


@pytest.mark.parametrize("seed", ALL)
def test_world(seed: int):
    compare(world(seed), reference(seed), *result(seed))


@pytest.mark.parametrize("seed", ALONE)
def test_alone_in_long_steps(seed: int):
    s = world(seed)
    step_windows = step_windows_of(s, observes=True)
    assert step_windows > 1
    ((got, told),) = run_batches([s], [policy_of(s)], batch_sizes(s, step_windows))
    compare(s, reference(seed), got, told)


@pytest.mark.parametrize("seed", ON_HOST)
def test_host_solver(seed: int):
    s = world(seed)
    step_windows = step_windows_of(s, observes=True)
    ((got, told),) = run_batches([s], [policy_of(s, "highs")], batch_sizes(s, step_windows, steps=1))
    compare(s, reference(seed), got, told)


class Watched(Scheduler):
    """Records how near each choice of `moer_soft` came to another one; equal credits go to the first in order on both sides."""

    nearest = math.inf

    def _moer_soft(self, *args) -> int:
        dc = super()._moer_soft(*args)
        gaps = [self.credit[dc] + 1.0 - credit for d, credit in enumerate(self.credit) if d != dc]
        self.nearest = min([self.nearest, *(gap for gap in gaps if gap != 0.0)])
        return dc


@pytest.mark.parametrize("seed", ALL)
def test_nothing_all_but_ties(seed: int):
    """No world hangs on the last bit: optima are unique, and neither estimates nor instants all but meet a limit."""
    s = world(seed)
    simulation = Simulation(s, Watched)
    simulation.run()
    watched = [g for g in simulation.schedulers if isinstance(g, Watched)]
    assert watched
    assert min((batch.margin for batch in simulation.batches), default=math.inf) > UNIQUE
    assert min(scheduler.nearest for scheduler in watched) > UNIQUE
    for dc in simulation.dcs:
        ends = np.array([step.end_s for engine in dc.engines for step in engine.steps])
        arrivals = np.sort([-np.inf, np.inf, *(r.dc_arrival_s for r in simulation.requests if r.dc == dc.index)])
        after = np.searchsorted(arrivals, ends)
        for other in (np.round(ends / s.window_s) * s.window_s, arrivals[after], arrivals[after - 1]):
            assert not np.any(np.abs(ends - other) < CLOSE_S)
