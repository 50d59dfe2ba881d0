"""HiGHS called directly and through cvxpy, against exact references."""

import itertools
import subprocess
import sys

import cvxpy
import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import InputError
from jaxserve.solvers import cvxpy_model
from jaxserve.solvers.cvxpy_model import CvxpySolver, Model
from jaxserve.solvers.highs import HighsSolver
from jaxserve.solvers.problem import BUDGET, EMPTY, FAILED, GAP, INFEASIBLE, OPTIMAL, AssignmentProblem, Solution
from tests.solvers.cases import adversarial, brute_force, expected_status, problem, random_problem

CASES = adversarial()
LONG = 60.0  # s; no test may hang on how busy the machine is


@pytest.fixture(params=[HighsSolver, CvxpySolver], scope="module")
def solver(request):
    """One of each for all problems, as a run has it."""
    return request.param(time_limit_s=LONG)


def check(p: AssignmentProblem, s: Solution, best: float, gap: float = 1e-6) -> None:
    """The answer keeps to the problem, costs what it says, at most `gap` more than the best, and its bound is one."""
    place, rows = np.asarray(s.place), np.asarray(p.feasible).any(1)
    assert place.dtype == np.int32
    np.testing.assert_array_equal(place >= 0, rows)
    served, cost = np.flatnonzero(rows), np.asarray(p.cost)
    assert np.asarray(p.feasible)[served, place[served]].all()
    assert (np.bincount(place[served], minlength=cost.shape[1]) <= p.capacity).all()
    paid = cost[served, place[served]].sum() + np.asarray(p.opening)[np.unique(place[served])].sum()
    np.testing.assert_allclose(s.objective, paid, rtol=1e-12)
    assert best - 1e-9 * abs(best) <= s.objective <= best + gap * abs(best)
    assert s.bound <= best + 1e-9 * abs(best)
    assert s.bound <= s.objective


@pytest.mark.parametrize("name", CASES)
def test_adversarial(solver, name):
    p = CASES[name]
    s, status = solver.solve(p), expected_status(p)
    assert s.status == status
    if status == OPTIMAL:
        check(p, s, brute_force(p), GAP if np.any(p.opening) else 1e-6)
        assert s.gap <= GAP
    else:
        assert (np.asarray(s.place) == -1).all()
        assert (s.objective, s.bound) == {EMPTY: (0.0, 0.0), INFEASIBLE: (np.inf, np.inf), FAILED: (np.inf, -np.inf)}[status]


@pytest.mark.parametrize("seed", range(12))
def test_ilp(solver, seed):
    p = random_problem(seed, 20 + 10 * seed, 3 + seed, False, (0.3, 0.7, 0.95)[seed % 3])
    s = solver.solve(p)
    assert s.status == OPTIMAL
    check(p, s, brute_force(p))
    assert s.gap < 1e-9  # of a linear program the prices prove the optimum itself


@pytest.mark.parametrize("seed", range(12))
def test_milp(solver, seed):
    p = random_problem(seed, 10 + 5 * seed, 3 + seed % 6, True, (0.3, 0.5, 0.8)[seed % 3])
    s = solver.solve(p)
    assert s.status == OPTIMAL
    check(p, s, brute_force(p), GAP)


@pytest.mark.parametrize("seed", range(40))
def test_milp_of_many_orders(seed):
    """First answers are off by a factor of up to 1e12 here, and a MIP solved in their scale would prove nonsense."""
    rng = np.random.default_rng(seed)
    n, d = rng.integers(1, 30), rng.integers(2, 6)
    capacity = rng.multinomial(3 * n, rng.dirichlet(np.full(d, 2.0)))
    p = problem(10.0 ** rng.uniform(-9, 9, (n, d)), capacity, 10.0 ** rng.uniform(-9, 9, d))
    s = HighsSolver(time_limit_s=LONG).solve(p)
    assert s.status == OPTIMAL
    check(p, s, brute_force(p), GAP)


def test_both_agree_on_a_window():
    p = random_problem(0, 100, 16, True, 0.5)
    a, b = HighsSolver(time_limit_s=LONG).solve(p), CvxpySolver(time_limit_s=LONG).solve(p)
    assert a.status == b.status == OPTIMAL
    check(p, a, b.objective, GAP) if b.objective <= a.objective else check(p, b, a.objective, GAP)


def test_jax_arrays(solver):
    p = random_problem(1, 20, 4, True, 0.5)
    on_device = AssignmentProblem(jnp.asarray(p.cost), jnp.asarray(p.feasible), jnp.asarray(p.capacity), jnp.asarray(p.opening))
    np.testing.assert_array_equal(solver.solve(on_device).place, solver.solve(p).place)


def test_a_mip_without_result_leaves_the_transport(solver, monkeypatch):
    p = random_problem(5, 60, 8, True, 0.4)
    monkeypatch.setattr(solver, "_mip", lambda w, pairs, scale, limit_s: (None, -np.inf))
    s = solver.solve(p)
    assert s.status == BUDGET
    check(p, s, brute_force(p), np.inf)
    assert s.gap > GAP


def test_a_mip_stopped_at_once(solver, monkeypatch):
    p = random_problem(0, 200, 64, True, 0.4)
    mip = solver._mip
    monkeypatch.setattr(solver, "_mip", lambda w, pairs, scale, limit_s: mip(w, pairs, scale, 0.0))
    s = solver.solve(p)
    check(p, s, s.objective)
    # HiGHS looks at its clock now and then, and on a busy machine may be done before it does.
    assert (s.status, bool(s.gap > GAP)) in ((BUDGET, True), (OPTIMAL, False))


@pytest.mark.parametrize("kind", [HighsSolver, CvxpySolver])
@pytest.mark.parametrize("openings", [False, True])
def test_no_time(kind, openings):
    s = kind(time_limit_s=0.0).solve(random_problem(0, 100, 16, openings, 0.9))
    assert (s.status, s.objective, s.bound) == (FAILED, np.inf, -np.inf)


def test_the_time_limit_is_of_one_problem():
    """HiGHS counts the time of an object's runs together."""
    s, p = HighsSolver(time_limit_s=0.5), random_problem(0, 300, 16, False, 0.9)
    while s._highs.getRunTime() < 1.0:
        s.solve(p)
    assert s.solve(random_problem(0, 20, 4, False, 0.5)).status == OPTIMAL


def test_errors_of_a_solver_stay_inside(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("from the depths")

    direct, model = HighsSolver(), CvxpySolver()
    monkeypatch.setattr(direct._highs, "run", fail)
    monkeypatch.setattr(cvxpy.Problem, "solve", fail)
    for s in (direct, model):
        assert s.solve(random_problem(0, 5, 3, False, 0.5)).status == FAILED


@pytest.mark.parametrize("kind", [HighsSolver, CvxpySolver])
def test_a_bug_in_a_formulation_surfaces(kind, monkeypatch):
    """It is no window that failed: the fallback would place every request, and nobody would know."""
    p = random_problem(0, 5, 3, True, 0.5)
    for name in ("capacity", "opening"):  # a DC too few, and a row of them a request
        for wrong in (getattr(p, name)[:-1], np.broadcast_to(getattr(p, name), (5, 3))):
            with pytest.raises(ValueError, match="a formulation with a bug: cost \\(5, 3\\)"):
                kind().solve(eqx.tree_at(lambda q, name=name: getattr(q, name), p, wrong))
    with pytest.raises(ValueError, match="feasible \\(5, 2\\)"):
        kind().solve(eqx.tree_at(lambda q: q.feasible, p, np.asarray(p.feasible)[:, :2]))

    def mistyped(*args, **options):
        raise TypeError("incompatible function arguments")

    s = kind()
    monkeypatch.setattr(*((s._highs, "passModel", mistyped) if kind is HighsSolver else (cvxpy.Problem, "solve", mistyped)))
    with pytest.raises(TypeError, match="incompatible function arguments"):
        s.solve(p)


def test_cvxpy_compiles_once_a_shape(monkeypatch):
    shapes, assignment = [], cvxpy_model.assignment
    monkeypatch.setattr(cvxpy_model, "assignment", lambda n, *args, **kind: shapes.append(n) or assignment(n, *args, **kind))
    s = CvxpySolver(time_limit_s=LONG)
    s.solve(random_problem(0, 33, 5, False, 0.5))
    (compiled,) = s._compiled.values()
    canonical = compiled.problem._cache.param_prog
    for n in (40, 50, 64):
        s.solve(random_problem(n, n, 5, False, 0.5))
    assert shapes == [64]
    assert compiled.problem.is_dpp()
    assert compiled.problem._cache.param_prog is canonical


def test_nothing_is_printed():
    code = (
        "from tests.solvers.cases import random_problem\n"
        "from jaxserve.solvers.highs import HighsSolver\n"
        "from jaxserve.solvers.cvxpy_model import CvxpySolver\n"
        "for kind in (CvxpySolver, HighsSolver):\n"
        "    kind().solve(random_problem(0, 9, 3, True, 0.5))\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


NAMES = ("br-south", "us-east", "br-north")


def region_cap(m: Model) -> list[cvxpy.Constraint]:
    """At most half of the requests go to Brazil."""
    brazil = [i for i, name in enumerate(m.names) if name.startswith("br-")]
    return [cvxpy.sum(m.x[:, brazil]) <= 0.5 * cvxpy.sum(m.active)]


def carbon_cap(m: Model) -> list[cvxpy.Constraint]:
    """At most 9 g CO2e from the first DC: a knapsack, whose LP is not whole."""
    return [m.cost[:, 0] @ m.x[:, 0] <= 9.0]


def capped(p: AssignmentProblem, allowed) -> float | None:
    """The least cost over every assignment that is allowed."""
    n, dcs = np.shape(p.cost)
    best = None
    for place in map(np.array, itertools.product(range(dcs), repeat=n)):
        fits = np.asarray(p.feasible)[np.arange(n), place].all() and (np.bincount(place, minlength=dcs) <= p.capacity).all()
        if fits and allowed(place):
            cost = np.asarray(p.cost)[np.arange(n), place].sum() + np.asarray(p.opening)[np.unique(place)].sum()
            best = cost if best is None else min(best, cost)
    return best


@pytest.mark.parametrize("openings", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_constraints_of_the_user(seed, openings):
    rng = np.random.default_rng(seed)
    # The first DC is the one to go to, were it not for the constraint.
    cost = rng.uniform(1.0, 5.0, (7, 3)) + np.array([0.0, 6.0, 3.0])
    p = problem(cost, [7, 5, 6], rng.uniform(1.0, 9.0, 3) * openings, rng.random((7, 3)) > 0.05)
    free = brute_force(p)
    for constraint, allowed in (
        (region_cap, lambda place: (place != 1).sum() <= 3.5),
        (carbon_cap, lambda place: np.asarray(p.cost)[np.flatnonzero(place == 0), 0].sum() <= 9.0),
    ):
        s = CvxpySolver(time_limit_s=LONG, constraints=constraint, names=NAMES).solve(p)
        best = capped(p, allowed)
        assert s.status == OPTIMAL
        check(p, s, best, GAP)
        assert allowed(s.place)
        assert free is not None and best is not None and best > free * 1.01


def test_constraints_that_cannot_be_met():
    s = CvxpySolver(time_limit_s=LONG, constraints=lambda m: [m.x[:, 0] + m.x[:, 1] + m.x[:, 2] <= 0.0])
    assert s.solve(random_problem(0, 5, 3, False, 0.5)).status == INFEASIBLE
    assert s.solve(CASES["no requests"]).status == EMPTY


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"constraints": lambda m: [cvxpy.sum(m.x, axis=0) >= cvxpy.max(m.x)], "names": ["a", "b"]}, "2 names for 3 DCs"),
        ({"constraints": lambda m: [cvxpy.sum_squares(m.x) <= 1.0]}, "piecewise linear"),
        ({"constraints": lambda m: [m.capacity[0] * m.active[0] * m.x[0, 0] <= 1.0]}, "not DPP"),
        ({"constraints": lambda m: [cvxpy.sum(m.x[:, 0]) <= cvxpy.Parameter(name="most")]}, "the parameter most has no value"),
    ],
)
def test_constraints_that_cannot_be_solved(options, words):
    with pytest.raises(InputError, match=words):
        CvxpySolver(**options).solve(random_problem(0, 5, 3, False, 0.5))
