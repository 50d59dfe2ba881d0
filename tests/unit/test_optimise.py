"""From a solver's answer to where requests go: the fallback, and solving again; on the device and on the host alike."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.model import Fleet
from jaxserve.policies.formulations import AbstractFormulation, Ilp, IterativeIlp
from jaxserve.policies.optimise import Memory, OnDevice, OnHost, Solved, settle
from jaxserve.solvers.highs import HighsSolver
from jaxserve.solvers.problem import FAILED, INFEASIBLE, OPTIMAL, AssignmentProblem, Solution
from tests.parity.bridge import orders
from tests.views import J_PER_KWH, QUICK_TO_COMPILE, ROUNDED, as_arrays, batch_of, fleet_with, schedulers_of, snapshot_of, step_of, view_of

_settle = eqx.filter_jit(settle)
CI = (300.0, 100.0, 200.0)


def settled(place: list[int], feasible: Any, capacity: list[float], dealt: int = 0, ci: tuple[float, ...] = CI) -> tuple[list[int], Solved]:
    """Where the requests of a batch go that a solver has placed at `place` (-1: not at all), and what is told of it."""
    n, batch = len(place), batch_of([1.0] * len(place), room=8)
    pad = 8 - n
    allowed = jnp.asarray(np.concatenate([np.broadcast_to(np.asarray(feasible, bool), (n, 3)), np.zeros((pad, 3), bool)]))
    status = OPTIMAL if max(place) >= 0 else INFEASIBLE
    answer = Solution(jnp.array(place + [-1] * pad, jnp.int32), jnp.float64(7.0), jnp.float64(6.0), jnp.int32(status), jnp.float64(np.nan))
    view = view_of(fleet_with(), [{"ci": grams} for grams in ci])
    memory = Memory(jnp.int32(5), jnp.int32(dealt))
    got, after, told = _settle(as_arrays(view), batch, allowed, jnp.asarray(capacity), answer, jnp.int32(2), memory)
    assert (int(told.status), float(told.objective), float(told.bound), int(told.solves)) == (status, 7.0, 6.0, 2)
    assert (int(after.lowest) - 5, int(after.dealt) - dealt) == (int(told.lowest), int(told.dealt))
    return got[:n].tolist(), told


class TestFallback:
    def test_what_the_solver_placed_stays(self) -> None:
        place, told = settled([2, 0, 1], True, [0.0, 0.0, 0.0])
        assert (place, int(told.lowest), int(told.dealt)) == ([2, 0, 1], 0, 0)

    def test_lowest_carbon_with_headroom_then_in_turn(self) -> None:
        """Room for one at the second DC, one at the third and two at the first; then turns, of which one was taken before."""
        place, told = settled([-1] * 7, True, [2.0, 1.0, 1.0], dealt=1)
        assert (place, int(told.lowest), int(told.dealt)) == ([1, 2, 0, 0, 1, 2, 0], 4, 3)

    def test_only_feasible_dcs_in_order_of_arrival(self) -> None:
        """The second DC's one place goes to the second request, for the first cannot use it; the last finds only that DC feasible."""
        feasible = [[True, False, False], [True, True, False], [True, True, True], [False, True, False]]
        place, told = settled([-1] * 4, feasible, [9.0, 1.0, 9.0])
        assert (place, int(told.lowest), int(told.dealt)) == ([0, 1, 2, 0], 3, 1)

    def test_requests_without_a_feasible_dc_take_turns_among_the_solved(self) -> None:
        feasible = [[True] * 3, [False] * 3, [True] * 3, [False] * 3]
        place, told = settled([1, -1, 1, -1], feasible, [4.0, 2.0, 4.0], dealt=2)
        assert (place, int(told.lowest), int(told.dealt)) == ([1, 2, 1, 0], 0, 2)

    def test_only_its_own_requests_use_up_its_headroom(self) -> None:
        """A solver that leaves out requests it could have placed: those find the headroom as it was at the close."""
        place, told = settled([1, -1, -1, -1], True, [5.0, 2.0, 5.0])
        assert (place, int(told.lowest)) == ([1, 1, 1, 2], 3)

    def test_equals_go_to_the_first_in_own_order(self) -> None:
        assert settled([-1, -1], True, [1.0, 1.0, 1.0], ci=(100.0, 50.0, 50.0))[0] == [1, 2]

    def test_by_a_plain_loop(self) -> None:
        rng = np.random.default_rng(3)
        kinds = set()
        for _ in range(60):
            n = int(rng.integers(1, 9))
            feasible, capacity, dealt = rng.random((n, 3)) < 0.6, rng.integers(0, 4, 3).astype(float), int(rng.integers(0, 9))
            ci = tuple(rng.choice([50.0, 100.0, 200.0], 3))
            solved = rng.random() < 0.5
            place = [int(rng.choice(np.flatnonzero(row))) if solved and row.any() else -1 for row in feasible]
            left, turn, lowest, wanted = list(capacity), dealt, 0, []
            for r, placed in enumerate(place):
                open_ = [d for d in range(3) if feasible[r, d] and left[d] > 0]
                if placed >= 0:
                    wanted.append(placed)
                elif open_:
                    wanted.append(min(open_, key=lambda d: ci[d]))
                    left[wanted[-1]] -= 1
                    lowest += 1
                else:
                    wanted.append(turn % 3)
                    turn += 1
            got, told = settled(place, feasible, capacity.tolist(), dealt, ci)
            assert (got, int(told.lowest), int(told.dealt)) == (wanted, lowest, turn - dealt)
            kinds.add((solved, lowest > 0, turn > dealt))
        assert kinds >= {(False, True, True), (True, False, True), (False, True, False), (True, False, False)}


class Decided(NamedTuple):
    """Where the requests of two schedulers go, by DC number, and what is told of their batches."""

    dcs: list[list[int]]
    told: Solved
    wall_s: np.ndarray | None


FLEET = {"rtt_s": np.array([[0.0, 0.0, 9.0]] * 2), "pue": np.ones(3), **orders([0, 1], 3)}


def fleet_of_two(engines: tuple[int, int, int] = (1, 1, 1), **changes: Any) -> Fleet:
    """Two schedulers, of whom the second calls the second DC its first, and three DCs, of which the third is too far."""
    return dataclasses.replace(fleet_with(**changes), dc_engines=np.array(engines, np.int32), **FLEET)


_route = jax.jit(lambda policy, *rest: policy.route(*rest), compiler_options=QUICK_TO_COMPILE)


def decided(policy: OnDevice | OnHost, fleet: Fleet, requests: list[list[tuple[float, float]]], ci: tuple[float, ...]) -> Decided:
    """One step of both schedulers."""
    arrivals, step = step_of(requests)
    snapshot = as_arrays(snapshot_of([{"ci": grams} for grams in ci]))
    rest = (*as_arrays((fleet, arrivals)), snapshot, schedulers_of(fleet, policy.init(3), snapshot), step)
    wall_s = None
    if isinstance(policy, OnDevice):
        place, after, told = _route(as_arrays(policy), *rest)
    else:
        place, after, told, wall_s = policy.plan(*rest)
    np.testing.assert_array_equal(np.asarray(after.decided), [len(mine) for mine in requests])
    start = np.asarray(step.start)
    dcs = [((np.asarray(place)[a:b] + first) % 3).tolist() for a, b, first in zip(start, start[1:], (0, 1))]
    return Decided(dcs, told, wall_s)


def make(formulation: AbstractFormulation, where: str) -> OnDevice | OnHost:
    """The policy with a solver of its own."""
    return OnDevice(formulation, np.float64(1e-4)) if where == "device" else OnHost(formulation, HighsSolver(), measured=False)


# A decode step of one lasts 0.01214 s, of two 0.0144 s: more than this budget, so each of two requests flees the DC of the other.
CROWDED = {"slo_tpot_s": 0.0125}
TWO, ONE, NEAR = [(4.0, 2.0), (2.0, 2.0)], [(4.0, 2.0)], (100.0, 200.0, 1.0)


def grams(isl: float, osl: float, b: float) -> float:
    """Of a request at the first DC, which runs `b` others."""
    return 100.0 * (8.0 + 0.5 * isl + 0.25 * isl**2 + osl * (4.0 / (b + 1.0) + 1.0 + 0.5 * (isl + osl / 2.0))) / J_PER_KWH


@pytest.mark.parametrize("where", ["device", "host"])
class TestSolvingAgain:
    @pytest.mark.parametrize(("t_max", "dc"), [(2, 1), (5, 0)])
    def test_until_t_max(self, where: str, t_max: int, dc: int) -> None:
        """The first scheduler's two go to and fro; the second's one stays where it is, and is not asked for again."""
        got = decided(make(IterativeIlp(t_max), where), fleet_of_two(**CROWDED), [TWO, ONE], NEAR)
        assert got.dcs == [[dc, dc], [0]]
        assert np.asarray(got.told.solves)[0].tolist() == [t_max, 2]
        assert np.asarray(got.told.status)[0].tolist() == [OPTIMAL, OPTIMAL]

    def test_until_it_repeats(self, where: str) -> None:
        """Without the budget the second solve repeats the first; its costs, steps being shared with the other, are those told."""
        got = decided(make(IterativeIlp(5), where), fleet_of_two(), [TWO, []], NEAR)
        assert (got.dcs, np.asarray(got.told.solves)[0, 0]) == ([[0, 0], []], 2)
        np.testing.assert_allclose(got.told.objective[0, 0], grams(4.0, 2.0, 1.0) + grams(2.0, 2.0, 1.0), rtol=ROUNDED)

    def test_what_no_dc_can_serve_any_more_stays(self, where: str) -> None:
        fleet = dataclasses.replace(fleet_of_two(**CROWDED), rtt_s=np.array([[0.0, 9.0, 9.0]] * 2))
        got = decided(make(IterativeIlp(5), where), fleet, [TWO, []], NEAR)
        assert (got.dcs, np.asarray(got.told.solves)[0, 0], int(np.asarray(got.told.dealt).sum())) == ([[0, 0], []], 2, 0)

    def test_a_later_failure_leaves_the_assignment_before_it(self, where: str) -> None:
        """Both flee to the second DC, which has one place: the first solve stands, with its own objective."""
        got = decided(make(IterativeIlp(5), where), fleet_of_two((2, 1, 1), batch_capacity=1.0, **CROWDED), [TWO, []], NEAR)
        assert (got.dcs, np.asarray(got.told.solves)[0, 0], np.asarray(got.told.status)[0, 0]) == ([[0, 0], []], 2, OPTIMAL)
        np.testing.assert_allclose(got.told.objective[0, 0], grams(4.0, 2.0, 0.0) + grams(2.0, 2.0, 0.0), rtol=ROUNDED)

    def test_a_first_failure_falls_back_and_ends_it(self, where: str) -> None:
        """Three requests for two places, and the other scheduler's two: the cleaner, the dirtier, and one in turn."""
        three = [(4.0, 2.0)] * 3
        got = decided(make(IterativeIlp(5), where), fleet_of_two(batch_capacity=1.0), [three, TWO], NEAR)
        assert got.dcs[0] == [0, 1, 0] and sorted(got.dcs[1]) == [0, 1]
        assert np.asarray(got.told.status)[0].tolist() == [INFEASIBLE, OPTIMAL]
        assert (np.asarray(got.told.lowest)[0].tolist(), np.asarray(got.told.dealt)[0].tolist()) == ([2, 0], [1, 0])
        assert np.asarray(got.told.solves)[0, 0] == 1


class Scripted:
    """A solver on the host that gives the answers of a list, whatever it is asked, and keeps the problems."""

    def __init__(self, answers: list[tuple[list[int], int, float]]) -> None:
        self.answers, self.asked = iter(answers), []

    def solve(self, problem: AssignmentProblem) -> Solution:
        """The next answer: DCs of the first requests, status and wall seconds. Blank problems are no question."""
        if not np.any(problem.feasible):
            return Solution(np.full(6, -1, np.int32), np.float64(0.0), np.float64(0.0), np.int32(4), 0.0)
        self.asked.append(problem)
        dcs, status, wall_s = next(self.answers)
        return Solution(np.array(dcs + [-1] * (6 - len(dcs)), np.int32), np.float64(1.0), np.float64(1.0), np.int32(status), wall_s)


class TestOnHost:
    def test_solvers_see_dcs_in_their_common_order(self) -> None:
        solver = Scripted([([0, 1], OPTIMAL, 0.5), ([2], OPTIMAL, 0.25)])
        fleet = dataclasses.replace(fleet_of_two((2, 3, 1)), rtt_s=np.zeros((2, 3)))
        got = decided(OnHost(Ilp(), solver, measured=False), fleet, [TWO, ONE], (100.0, 200.0, 50.0))
        assert got.dcs == [[0, 1], [2]]
        for problem in solver.asked:
            np.testing.assert_allclose(problem.cost[0] / problem.cost[0, 2], [2.0, 4.0, 1.0], rtol=ROUNDED)
            assert problem.capacity.tolist() == [8.0, 12.0, 4.0]
        assert got.wall_s is not None and got.wall_s.tolist() == [[0.5, 0.25], [0.0, 0.0]]

    def test_wall_time_of_all_solves_and_the_last_that_placed_anything(self) -> None:
        """The first scheduler's third solve fails; the second's second repeats its first, and it is asked no more."""
        answers = [([0, 0], 0.5), ([1], 0.125), ([1, 1], 0.25), ([1], 0.125), ([-1, -1], 1.0)]
        solver = Scripted([(dcs, OPTIMAL if dcs[0] >= 0 else FAILED, wall_s) for dcs, wall_s in answers])
        got = decided(OnHost(IterativeIlp(9), solver, measured=False), fleet_of_two(), [TWO, ONE], NEAR)
        assert (got.dcs, len(solver.asked), np.asarray(got.told.solves)[0].tolist()) == ([[1, 1], [1]], 5, [3, 2])
        assert got.wall_s is not None and got.wall_s[0].tolist() == [1.75, 0.25]
        assert np.asarray(got.told.status)[0].tolist() == [OPTIMAL, OPTIMAL]
