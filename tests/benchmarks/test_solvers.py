"""Speed of the solvers, opt-in: `pytest -m benchmark -s tests/benchmarks/test_solvers.py`. Warm, medians, ratios to HiGHS.

The windows are made like those of the study: 100 requests of CNN/DailyMail-like lengths, 16 DCs with the study's carbon intensities.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
import pytest

from jaxserve.solvers.cvxpy_model import CvxpySolver
from jaxserve.solvers.device import DeviceSolver
from jaxserve.solvers.highs import HighsSolver
from jaxserve.solvers.problem import OPTIMAL, AssignmentProblem
from tests.benchmarks.test_speed import compiled, report, run_once
from tests.solvers.cases import random_problem
from tests.solvers.recorded import stacked

pytestmark = pytest.mark.benchmark
WINDOWS = 64
REQUESTS, DCS = 100, 16
TIGHT = (0.05, 0.2, 1.0)


def windows(openings: bool) -> list[AssignmentProblem]:
    """As many windows of every tightness."""
    return [random_problem(seed, REQUESTS, DCS, openings, TIGHT[seed % len(TIGHT)]) for seed in range(WINDOWS)]


def median_ms(act: Callable[[], object], repeats: int = 9) -> float:
    """Median of `repeats` after one that does not count."""
    act()
    walls = []
    for _ in range(repeats):
        began = time.perf_counter()
        act()
        walls.append(time.perf_counter() - began)
    return 1e3 * statistics.median(walls)


@pytest.mark.parametrize("openings", [False, True], ids=["ilp", "facility"])
def test_solvers(openings: bool) -> None:
    """A window of 100 requests and 16 DCs on each back end; the device's is a share of 4 or of 64 solved at once."""
    problems = windows(openings)
    figures, objectives = {}, {}
    for name, solver in (("highs", HighsSolver(time_limit_s=5.0)), ("cvxpy", CvxpySolver(time_limit_s=5.0))):
        answers = [solver.solve(p) for p in problems]
        assert all(answer.status == OPTIMAL for answer in answers)
        objectives[name] = np.array([answer.objective for answer in answers])
        walls = [statistics.median(solver.solve(p).wall_s for _ in range(3)) for p in problems]
        figures[f"{name}_ms"], figures[f"{name}_p99_ms"] = 1e3 * statistics.median(walls), 1e3 * float(np.quantile(walls, 0.99))
    device = DeviceSolver()
    for lanes in (4, WINDOWS):
        batches = [stacked(problems[i : i + lanes]) for i in range(0, WINDOWS, lanes)]
        answers = [device.solve(batch) for batch in batches]
        objectives[f"device{lanes}"] = np.concatenate([np.asarray(answer.objective) for answer in answers])
        wall = median_ms(lambda batches=batches: [device.solve(batch) for batch in batches])
        figures[f"device_by_{lanes}_ms"] = wall / WINDOWS
        figures[f"highs_over_device_by_{lanes}"] = figures["highs_ms"] / figures[f"device_by_{lanes}_ms"]
    for found in objectives.values():
        np.testing.assert_allclose(found, objectives["highs"], rtol=2e-4 if openings else 1e-6)
    report(f"window of {REQUESTS} x {DCS}, {'facility MILP' if openings else 'ILP'}", **figures)


@pytest.mark.parametrize("kind", ["ilp", "iterative_ilp", "facility_milp"])
def test_whole_run(kind: str) -> None:
    """512 engines, 4000 req/s, 200 s, four schedulers, solved on the device."""
    case = compiled("workload.rate_req_per_s=4000.0", "horizon_s=200.0")
    first_s = run_once(case, {"kind": kind})
    wall_s = statistics.median(run_once(case, {"kind": kind}) for _ in range(3))
    report(f"200 s at 4000 req/s, {kind}", wall_s=wall_s, requests_per_wall_s=len(case.engine_requests.arrival_s) / wall_s, first_s=first_s)
