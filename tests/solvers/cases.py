"""Assignment problems to try every back end on: awkward ones by name, random ones like real windows, and an exact reference."""

import itertools

import numpy as np
from scipy.optimize import linear_sum_assignment

from jaxserve.solvers.problem import EMPTY, FAILED, INFEASIBLE, OPTIMAL, AssignmentProblem


def problem(cost, capacity, opening=0.0, feasible=None) -> AssignmentProblem:
    """A problem in NumPy from whatever is short to write: cost [N, D], capacity [] or [D], opening [] or [D], feasible [N, D] or all."""
    cost = np.asarray(cost, float)
    feasible = np.ones(cost.shape, bool) if feasible is None else np.asarray(feasible, bool)
    dcs = cost.shape[1]
    return AssignmentProblem(
        cost=cost,
        feasible=feasible,
        capacity=np.broadcast_to(np.asarray(capacity), dcs).astype(np.int64),
        opening=np.broadcast_to(np.asarray(opening, float), dcs).copy(),
    )


def padded(p: AssignmentProblem, rows: int, dcs: int) -> AssignmentProblem:
    """The same problem in a larger shape, which others share: with requests that no DC can serve and DCs that have no place."""
    n, d = np.shape(p.cost)
    pairs, by_dc = ((0, rows - n), (0, dcs - d)), (0, dcs - d)
    return AssignmentProblem(np.pad(p.cost, pairs), np.pad(p.feasible, pairs), np.pad(p.capacity, by_dc), np.pad(p.opening, by_dc))


def random_problem(seed: int, n: int, d: int, openings: bool, tight: float) -> AssignmentProblem:
    """A window of n requests over d DCs: cost = a DC's g CO2e/kWh times a request's kWh, a tenth of it scattered by hardware.

    About a third of the DCs are copies of another, 3 % of the pairs are infeasible. `tight` is requests per place over all DCs.
    Openings are worth ten to a hundred requests each.
    """
    rng = np.random.default_rng(seed)
    weight = rng.uniform(20.0, 800.0, d) * rng.uniform(1.05, 1.5, d)
    hardware = rng.integers(3, size=d)
    opening = rng.uniform(10.0, 100.0, d)
    for copy in range(1, d, 3):
        weight[copy], hardware[copy], opening[copy] = weight[copy - 1], hardware[copy - 1], opening[copy - 1]
    energy = rng.lognormal(np.log(4e-4), 0.8, (n, 1)) * rng.uniform(0.9, 1.1, (n, 3))
    cost = weight * energy[:, hardware]
    places = max(int(np.ceil(n / tight)), 1)
    capacity = rng.multinomial(places, rng.dirichlet(np.full(d, 3.0)))
    return problem(cost, capacity, opening * cost.mean() if openings else 0.0, rng.random((n, d)) > 0.03)


def adversarial() -> dict[str, AssignmentProblem]:
    """Problems that break a careless back end, by what is awkward about them."""
    rng = np.random.default_rng(1)
    square = rng.uniform(1.0, 10.0, (6, 3))
    wide = 10.0 ** rng.uniform(-9.0, 9.0, (30, 6))
    window, opened = random_problem(2, 40, 8, False, 0.8), random_problem(3, 40, 8, True, 0.4)
    masked = np.ones((6, 3), bool)
    masked[[1, 4]] = False
    hall = np.ones((6, 3), bool)
    hall[:4, 1:] = False  # four requests that only the first DC can serve, with three places
    poison = square.copy()
    poison[2, 1], poison[4, 0] = np.nan, np.inf
    harmless = np.ones((6, 3), bool)
    harmless[2, 1] = harmless[4, 0] = False
    one_nan, one_inf = square.copy(), square.copy()
    one_nan[2, 1], one_inf[3, 2] = np.nan, np.inf
    return {
        "all requests equal": problem(np.tile([3.0, 1.0, 2.0], (9, 1)), [5, 3, 4]),
        "all requests equal, openings": problem(np.tile([3.0, 1.0, 2.0], (9, 1)), [5, 3, 4], [1.0, 20.0, 6.0]),
        "capacity exactly tight": problem(square, [3, 2, 1]),
        "capacity exactly tight, openings": problem(square, [3, 2, 1], [5.0, 6.0, 7.0]),
        "capacity one short": problem(square, [3, 1, 1]),
        "capacity one short, openings": problem(square, [3, 1, 1], 4.0),
        "one feasible DC": problem(square, 6, feasible=np.arange(3) == np.full((6, 1), 1)),
        "one DC": problem(square[:, :1], 6, 2.0),
        "all costs zero": problem(np.zeros((6, 3)), [2, 3, 4]),
        "all costs zero, openings": problem(np.zeros((6, 3)), [2, 3, 4], [1.0, 2.0, 4.0]),
        "equal columns": problem(np.tile(square[:, :1], (1, 3)), [2, 2, 3]),
        "equal columns, equal openings": problem(np.tile(square[:, :1], (1, 3)), [3, 3, 3], 5.0),
        "openings dominate": problem(square, [6, 4, 3], [1e6, 4e5, 5e5]),
        "openings negligible": problem(square, [3, 2, 4], [1e-7, 2e-7, 3e-7]),
        "negative costs": problem(-square, [3, 2, 4]),
        "negative costs, openings": problem(-square, [3, 2, 4], [5.0, 6.0, 7.0]),
        "one opening": problem(square, [3, 2, 4], [0.0, 30.0, 0.0]),
        "1 request": problem([[4.0, 2.0, 3.0]], [1, 0, 1]),
        "1 request, openings": problem([[4.0, 2.0, 3.0]], 1, [0.0, 5.0, 0.5]),
        "300 requests": random_problem(4, 300, 16, False, 0.9),
        "64 DCs": random_problem(5, 100, 64, False, 0.7),
        "costs scaled by 1e-9": problem(window.cost * 1e-9, window.capacity, 0.0, window.feasible),
        "costs scaled by 1e9": problem(window.cost * 1e9, window.capacity, 0.0, window.feasible),
        "scaled by 1e-9, openings": problem(opened.cost * 1e-9, opened.capacity, opened.opening * 1e-9, opened.feasible),
        "scaled by 1e9, openings": problem(opened.cost * 1e9, opened.capacity, opened.opening * 1e9, opened.feasible),
        "costs from 1e-9 to 1e9": problem(wide, [4, 9, 6, 5, 8, 3]),
        "costs from 1e-9 to 1e9, openings": problem(wide, [10, 19, 16, 5, 8, 13], 10.0 ** rng.uniform(-9.0, 9.0, 6)),
        "rows from 1e-9 to 1e9": problem(rng.uniform(1.0, 10.0, (19, 4)) * 10.0 ** np.arange(-9, 10)[:, None], [5, 5, 5, 5]),
        "NaN in a cost that counts": problem(one_nan, 6),
        "inf in a cost that counts": problem(one_inf, 6),
        "NaN in an opening": problem(square, 6, [1.0, np.nan, 2.0]),
        "NaN and inf where they do not count": problem(poison, [2, 3, 2], feasible=harmless),
        "NaN and inf where they do not count, openings": problem(poison, [6, 3, 4], 3.0, harmless),
        "requests no DC can serve": problem(square, [1, 2, 1], feasible=masked),
        "requests no DC can serve, openings": problem(square, [1, 2, 4], 2.0, masked),
        "Hall's condition": problem(square, 3, feasible=hall),
        "Hall's condition, openings": problem(square, 3, 1.0, hall),
        "no capacity": problem(square, 0),
        "no capacity, openings": problem(square, 0, 1.0),
        "no requests": problem(np.full((6, 3), np.nan), 2, feasible=np.zeros((6, 3), bool)),
        "no requests, openings": problem(square, 2, 1.0, np.zeros((6, 3), bool)),
        "no rows": problem(np.zeros((0, 3)), 2),
    }


def expected_status(problem: AssignmentProblem) -> int:
    """What a back end with time enough must say: a cost that counts, or an opening, that is no number fails, even without requests."""
    feasible, opening = np.asarray(problem.feasible), np.asarray(problem.opening)
    if not (np.isfinite(np.asarray(problem.cost)[feasible]).all() and np.isfinite(opening).all() and (opening >= 0).all()):
        return FAILED
    if not np.any(problem.feasible):
        return EMPTY
    return INFEASIBLE if brute_force(problem) is None else OPTIMAL


def brute_force(problem: AssignmentProblem) -> float | None:
    """The least cost, None where there is no assignment: SciPy's matching on columns repeated capacity times, for every open set.

    With openings at most 8 DCs. Sets that are open but unused cost more than the same without them, so the least over all is exact.
    """
    feasible = np.asarray(problem.feasible)
    cost = np.where(feasible, problem.cost, np.inf)[feasible.any(1)]
    capacity = np.minimum(np.asarray(problem.capacity), len(cost))
    opening, dcs = np.asarray(problem.opening), np.arange(len(capacity))
    if not opening.any():
        return _matching(cost, capacity)
    if len(dcs) > 8:
        raise ValueError("with openings, at most 8 DCs are enumerated")
    opened = (np.array(s, int) for k in range(len(dcs) + 1) for s in itertools.combinations(dcs, k))
    totals = ((opening[s].sum(), _matching(cost[:, s], capacity[s])) for s in opened)
    return min((extra + matched for extra, matched in totals if matched is not None), default=None)


def _matching(cost: np.ndarray, capacity: np.ndarray) -> float | None:
    """Least cost of giving each row of cost [N, D] a place, D with capacity [D] places each; None where it cannot be."""
    if capacity.sum() < len(cost):
        return None
    places = np.repeat(cost, capacity, axis=1)
    try:
        rows, columns = linear_sum_assignment(places)
    except ValueError:  # "cost matrix is infeasible"
        return None
    return float(places[rows, columns].sum())
