"""A formulation is decided alike by the device's solver inside the compiled run and by HiGHS between its steps."""

import dataclasses

import numpy as np
import pytest

from jaxserve.policies.optimise import OnDevice, OnHost
from jaxserve.solvers.highs import HighsSolver
from jaxserve.solvers.problem import OPTIMAL
from tests.parity.moments import moments, parts, route

GAP = 1e-9
"""Asked of both solvers, so that neither may stop before the optimum."""
# Costs of one assignment, added up in another order.
REORDERED = 1e-9


@pytest.mark.slow  # whole runs are decided alike by either in test_batches
@pytest.mark.parametrize("kind", ["green_llm", "ilp", "iterative_ilp", "facility_milp"])
def test_same_decisions(kind: str) -> None:
    solved = fell_back = 0
    for default, moment in moments(kind, "four"):
        assert isinstance(default, OnDevice)
        device = dataclasses.replace(default, gap=np.float64(GAP))
        host = OnHost(default.formulation, HighsSolver(gap=GAP, time_limit_s=60.0), measured=False)
        place, after, told = route(device, moment)
        places, afterwards, tells, wall_s = host.plan(*parts(moment))
        some = moment.counts > 0
        assert np.all(np.asarray(wall_s)[0][some] > 0)
        for name in ("status", "solves", "lowest", "dealt"):
            np.testing.assert_array_equal(getattr(tells, name)[0][some], getattr(told, name)[0][some], err_msg=name)
        np.testing.assert_allclose(tells.objective[0][some], told.objective[0][some], rtol=2 * GAP + REORDERED)
        if np.any(np.asarray(moment.snapshot.ci) > 0):  # without carbon every assignment is as good
            np.testing.assert_array_equal(places[: len(place)], place)
            np.testing.assert_array_equal(afterwards.sent, after.sent)
        solved += int(np.sum(np.asarray(told.status)[0][some] == OPTIMAL))
        fell_back += int(np.asarray(told.lowest).sum())
    assert solved > 8 and fell_back > 1
