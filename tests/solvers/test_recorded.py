"""The back ends against one another on windows of real runs: all three models, low to high load."""

import numpy as np
import pytest

from jaxserve.solvers.cvxpy_model import CvxpySolver
from jaxserve.solvers.device import DeviceSolver
from jaxserve.solvers.problem import GAP, OPTIMAL
from tests.solvers.recorded import Recorder, record, stacked

SMALL = ("sites.*.nodes=1", "horizon_s=2.0", "warmup_s=0.0")  # a quarter of the fleet
LOADS = {"study-llama": (300.0, 600.0, 1000.0), "study-qwen": (600.0, 1000.0), "study-mixtral": (150.0, 300.0, 500.0)}
SHORT = [("study-llama", 1000.0), ("study-qwen", 600.0), ("study-mixtral", 300.0)]  # the small form
EVERY = [pytest.param(s, 4 * rate, marks=pytest.mark.benchmark) for s, rates in LOADS.items() for rate in rates]
# Sums of a hundred costs in another order.
ROUNDING = 1e-9


def agree(recorder: Recorder, exact: float, sample: int) -> None:
    """The device on all windows and cvxpy on every `sample`-th one, against HiGHS, within `exact` and what each has proven."""
    reference = np.array([answer.objective for answer in recorder.answers])
    assert all(answer.status == OPTIMAL for answer in recorder.answers)
    device = DeviceSolver().solve(stacked(recorder.problems))
    assert np.all(np.asarray(device.status) == OPTIMAL)
    np.testing.assert_allclose(device.objective, reference, rtol=exact)
    bounds = np.array([answer.bound for answer in recorder.answers])
    slack = 1 + ROUNDING
    assert np.all(np.asarray(device.bound) <= reference * slack) and np.all(bounds <= np.asarray(device.objective) * slack)
    solver = CvxpySolver(time_limit_s=5.0)
    for problem, objective in list(zip(recorder.problems, reference, strict=True))[::sample]:
        answer = solver.solve(problem)
        assert answer.status == OPTIMAL
        np.testing.assert_allclose(answer.objective, objective, rtol=exact)


@pytest.mark.slow  # random windows of this size are compared in test_device
@pytest.mark.parametrize(("scenario", "rate"), SHORT)
@pytest.mark.parametrize(("kind", "exact"), [("ilp", 1e-6), ("facility_milp", GAP)])
def test_three_back_ends_agree(scenario: str, rate: float, kind: str, exact: float):
    recorder = record(scenario, kind, *SMALL, f"workload.rate_req_per_s={rate}")
    assert len(recorder.problems) >= 60
    agree(recorder, exact, 20)


@pytest.mark.parametrize(("scenario", "rate"), EVERY)
@pytest.mark.parametrize(("kind", "exact"), [("ilp", 1e-6), ("facility_milp", GAP)])
def test_three_back_ends_agree_at_length(scenario: str, rate: float, kind: str, exact: float):
    """The full form, on the whole fleet: over 2,000 windows of each kind."""
    recorder = record(scenario, kind, "horizon_s=8.0", "warmup_s=0.0", f"workload.rate_req_per_s={rate}")
    assert len(recorder.problems) >= 300
    agree(recorder, exact, 40)
