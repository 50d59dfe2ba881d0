"""The device's solvers against exact references and HiGHS: alone, side by side, and out of budget."""

import equinox as eqx
import jax
import numpy as np
import pytest

from jaxserve.solvers.device import DeviceSolver
from jaxserve.solvers.facility import solve_facilities, solve_facility
from jaxserve.solvers.highs import HighsSolver
from jaxserve.solvers.problem import BUDGET, EMPTY, FAILED, GAP, INFEASIBLE, OPTIMAL, AssignmentProblem
from jaxserve.solvers.transport import solve_transport
from tests.solvers.cases import adversarial, brute_force, expected_status, padded, random_problem
from tests.solvers.recorded import stacked
from tests.solvers.test_host_backends import check

CASES = adversarial()
# Sums of a few hundred costs in another order, and the same once more for the prices.
ROUNDING = 1e-9


def lanes(openings: bool) -> list[AssignmentProblem]:
    """Windows of one shape: loose to tight, of 1 to 60 requests and 6 DCs."""
    return [random_problem(seed, 1 + (7 * seed) % 60, 6, openings, (0.2, 0.6, 0.95)[seed % 3]) for seed in range(48)]


def shared(p: AssignmentProblem) -> AssignmentProblem:
    """The problem in one of few shapes, since every shape compiles: small, large, and a single DC, which stays one."""
    n, d = np.shape(p.cost)
    return padded(p, 64, d if d == 1 else 8) if n <= 64 and d <= 8 else padded(p, 320, 64)


@pytest.mark.parametrize("name", CASES)
def test_adversarial(name: str):
    p = shared(CASES[name])
    s, status = DeviceSolver().solve(p), expected_status(p)
    assert s.status == status
    if status == OPTIMAL:
        check(p, s, brute_force(CASES[name]), GAP if np.any(p.opening) else 1e-6)
        assert s.gap <= GAP
    else:
        assert (np.asarray(s.place) == -1).all()
        assert (s.objective, s.bound) == {EMPTY: (0.0, 0.0), INFEASIBLE: (np.inf, np.inf), FAILED: (np.inf, -np.inf)}[status]


@pytest.mark.parametrize("openings", [False, True], ids=["ilp", "facility"])
def test_many_at_once(openings: bool):
    """48 problems in one call: each as good as the exact reference says it can be, and its bound no better."""
    problems = lanes(openings)
    together = DeviceSolver().solve(stacked(problems))
    assert np.all(together.status == OPTIMAL)
    for i, p in enumerate(problems):
        mine = jax.tree.map(lambda leaf, i=i: leaf[i], together)
        assert np.all(mine.place[len(p.cost) :] == -1)
        mine = jax.tree.map(np.asarray, mine)
        mine = type(mine)(mine.place[: len(p.cost)], mine.objective, mine.bound, mine.status, mine.wall_s)
        check(p, mine, brute_force(p), GAP if openings else ROUNDING)
        assert mine.gap <= (GAP if openings else ROUNDING)


@pytest.mark.parametrize("openings", [False, True], ids=["ilp", "facility"])
def test_alone_as_among_others(openings: bool):
    problems = lanes(openings)
    together = DeviceSolver().solve(stacked(problems))
    for i in range(0, len(problems), 8):
        alone = DeviceSolver().solve(shared(problems[i]))
        np.testing.assert_allclose(alone.objective, together.objective[i], rtol=GAP if openings else ROUNDING)
        assert alone.status == together.status[i]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_as_highs_at_the_study_s_size(seed: int):
    """16 DCs, too many open sets to enumerate."""
    for openings, exact in ((False, 1e-6), (True, GAP)):
        p = random_problem(seed, 90, 16, openings, (0.05, 0.5, 0.95)[seed % 3])
        mine, theirs = DeviceSolver().solve(p), HighsSolver(time_limit_s=60.0).solve(p)
        assert mine.status == theirs.status == OPTIMAL
        np.testing.assert_allclose(mine.objective, theirs.objective, rtol=exact)
        assert mine.bound <= theirs.objective * (1 + ROUNDING) and theirs.bound <= mine.objective * (1 + ROUNDING)


def test_a_search_out_of_nodes_says_so():
    """The best so far is handed over with its true gap, or nothing at all is claimed."""
    full, short = DeviceSolver(gap=0.0), DeviceSolver(gap=0.0, nodes=1)
    seen = set()
    for seed in range(40):
        p = padded(random_problem(seed, 60, 16, True, 0.6), 96, 16)
        cut, best = short.solve(p), full.solve(p)
        seen.add(int(cut.status))
        assert cut.status in (OPTIMAL, BUDGET, FAILED)
        assert cut.bound <= best.objective * (1 + ROUNDING)
        if cut.status != FAILED:
            assert cut.objective >= best.objective * (1 - ROUNDING)
            assert (cut.status == OPTIMAL) == (cut.gap <= ROUNDING)
    assert BUDGET in seen


_queued = jax.jit(lambda problems, nodes, lanes: solve_facilities(problems, lanes, nodes=nodes), static_argnames="lanes")
_side_by_side = jax.jit(jax.vmap(lambda problem, nodes: solve_facility(problem, nodes=nodes), in_axes=(0, None)))


@pytest.mark.parametrize(("lanes", "nodes"), [pytest.param(1, 1000, marks=pytest.mark.slow), (3, 1000), (3, 4)])
def test_lanes_that_take_the_next_problem_answer_as_side_by_side(lanes: int, nodes: int):
    """Wherever a problem is taken up; side by side all wait for the slowest. One is infeasible, one empty, and with few nodes some are
    cut short.

    Rounding differs, so that another answer within the gap may be found: what one proves binds the other.
    """
    problems = [random_problem(seed, 40, 8, True, 0.3) for seed in range(9)]
    problems[3] = eqx.tree_at(lambda p: p.capacity, problems[3], np.zeros_like(problems[3].capacity))
    problems[5] = eqx.tree_at(lambda p: p.feasible, problems[5], np.zeros_like(problems[5].feasible))
    queued, beside = _queued(stacked(problems), nodes, lanes=lanes), _side_by_side(stacked(problems), nodes)
    for i, problem in enumerate(problems):
        mine, alone = (jax.tree.map(lambda leaf, i=i: leaf[i], found) for found in (queued, beside))
        if i in (3, 5):
            assert mine.status == alone.status == (INFEASIBLE if i == 3 else EMPTY)
            continue
        assert max(mine.bound, alone.bound) <= min(mine.objective, alone.objective) * (1 + ROUNDING)
        check(problem, mine, float(mine.objective), ROUNDING)
        if nodes == 1000:
            assert mine.status == OPTIMAL and mine.gap <= GAP
    assert (BUDGET in queued.status) == (nodes == 4)


def test_a_transport_out_of_paths_claims_nothing():
    p = random_problem(3, 60, 6, False, 0.95)
    cut = jax.jit(lambda q: solve_transport(q, paths=1))(jax.tree.map(np.asarray, p))
    best = brute_force(p)
    assert cut.status in (FAILED, BUDGET) and cut.bound <= best * (1 + ROUNDING)
    assert np.all(np.asarray(cut.place) == -1) or cut.status == BUDGET
