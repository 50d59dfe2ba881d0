"""What must not matter does not: running again, chunk length, padding, room that has to grow, longer steps, an interruption."""

import io
from dataclasses import fields
from functools import cache

import numpy as np
import pytest

from jaxserve.engine.lane import Advance
from jaxserve.engine.model import Sizes
from jaxserve.engine.simulate import Simulation
from tests.oracle.model import OracleScenario
from tests.parity.bridge import EngineResult, finish, policy_of, run_engine, simulation_of, sizes_of, step_windows_of
from tests.parity.worlds import lane_policy, world

# Greedy with an in-flight ledger, 300 requests each, steps of up to two windows. 30: prompts split over prefill steps and a drain of
# 900 windows; 37: every prompt split, vLLM's loop; 191: queues, and up to 67 requests under way at once.
SEEDS = (30, 37, 191)
# A longer step adds up the same energies of engine steps in another order.
REORDERED = 1e-12
PER_REQUEST = ("dc", "node", "engine", "dc_arrival_s", "admit_s", "first_token_s", "finish_s")
SHORT = 7  # steps: a number that divides neither the horizon nor the usual chunk
TIGHT = {"requests": 64, "step_requests": 1, "transit": 40, "passes": 24}  # world 191 needs more of each
ROOMY = {"requests": 700, "step_requests": 200, "transit": 250, "passes": 600}


@cache
def usual(seed: int) -> EngineResult:
    """The run that the others must repeat."""
    return run_engine(world(seed))


def alone(s: OracleScenario, **changes: int) -> Simulation:
    """A simulation of one world that has not begun."""
    policy = policy_of(s)
    return simulation_of([s], [policy], sizes_of(s, step_windows_of(s, policy.observes), **changes))


def assert_same_requests(got: EngineResult, wanted: EngineResult) -> None:
    """The same routing and times, to the last bit."""
    for name in PER_REQUEST:
        assert getattr(got, name).tobytes() == getattr(wanted, name).tobytes(), name


def assert_same_bits(got: EngineResult, wanted: EngineResult) -> None:
    """Everything the same, to the last bit."""
    for field in fields(EngineResult):
        assert np.asarray(getattr(got, field.name)).tobytes() == np.asarray(getattr(wanted, field.name)).tobytes(), field.name


def assert_same_ledger(got: EngineResult, wanted: EngineResult, steps_each: int = 1) -> None:
    """The same energy and idle time in every step of `wanted`, which is `steps_each` steps of `got`, while both ran."""
    for name in ("prefill_j", "decode_j", "idle_s"):
        mine, theirs = getattr(got, name), getattr(wanted, name)
        n = min(len(mine) // steps_each, len(theirs))
        mine = mine[: n * steps_each].reshape(n, steps_each, -1).sum(axis=1)
        np.testing.assert_allclose(mine, theirs[:n], rtol=0, atol=REORDERED * max(1.0, theirs.max()), err_msg=name)
    np.testing.assert_allclose(got.engine_s, wanted.engine_s, rtol=REORDERED, atol=REORDERED)


@pytest.mark.parametrize("seed", SEEDS)
def test_twice_the_same_bits(seed: int):
    assert_same_bits(run_engine(world(seed)), usual(seed))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("changes", [{"steps": SHORT}, ROOMY], ids=["short chunks", "roomy"])
def test_chunks_and_padding(seed: int, changes: dict[str, int]):
    got = run_engine(world(seed), **changes)
    assert_same_requests(got, usual(seed))
    assert_same_ledger(got, usual(seed))


def test_room_grows():
    s = world(191)
    simulation = alone(s, **TIGHT)
    got = finish([s], simulation, [])[0]
    assert {name for name in TIGHT if getattr(simulation.sizes, name) > TIGHT[name]} == set(TIGHT)
    assert_same_requests(got, usual(191))
    assert_same_ledger(got, usual(191))


@pytest.mark.parametrize("seed", SEEDS)
def test_windows_in_a_step(seed: int):
    assert usual(seed).step_windows == 2
    got = run_engine(world(seed), step_windows=1)
    assert_same_requests(got, usual(seed))
    assert_same_ledger(got, usual(seed), steps_each=2)


def through_a_file(simulation: Simulation) -> dict[str, np.ndarray]:
    """A checkpoint as another process reads it."""
    file = io.BytesIO()
    np.savez(file, **simulation.checkpoint())
    with np.load(io.BytesIO(file.getvalue()), allow_pickle=False) as saved:
        return dict(saved)


def interrupted(scenarios: list[OracleScenario], first: Simulation, second: Simulation, chunks: int) -> list[EngineResult]:
    """Run `first` for some chunks and `second`, which starts from its checkpoint, to the end."""
    advances: list[list[Advance]] = [first.advance() for _ in range(chunks)]
    assert not first.done
    second.restore(through_a_file(first))
    return finish(scenarios, second, advances)


@pytest.mark.parametrize("seed", SEEDS)
def test_interrupted_within_the_horizon(seed: int):
    s = world(seed)
    chunks = 2
    assert chunks * SHORT * usual(seed).step_windows < s.horizon_windows
    got = interrupted([s], alone(s, steps=SHORT), alone(s, steps=SHORT), chunks)[0]
    assert_same_bits(got, finish([s], alone(s, steps=SHORT), [])[0])
    assert_same_requests(got, usual(seed))


def test_interrupted_after_growing():
    s = world(191)
    first = alone(s, **TIGHT)
    got = interrupted([s], first, alone(s, **TIGHT), chunks=1)[0]
    assert first.sizes.transit > TIGHT["transit"]
    assert_same_bits(got, finish([s], alone(s, **TIGHT), [])[0])


def test_interrupted_lanes():
    scenarios = [world(seed) for seed in (2, 37, 205)]

    def lanes() -> Simulation:
        sizes: Sizes = sizes_of(scenarios[0], 1)
        return simulation_of(scenarios, [lane_policy(s) for s in scenarios], sizes)

    for got, wanted in zip(interrupted(scenarios, lanes(), lanes(), chunks=2), finish(scenarios, lanes(), []), strict=True):
        assert_same_bits(got, wanted)
