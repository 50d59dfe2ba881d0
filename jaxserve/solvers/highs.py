"""HiGHS, called directly through highspy."""

import highspy
import numpy as np

from jaxserve.solvers.host import HostSolver, Placeable
from jaxserve.solvers.problem import BUDGET, FAILED, GAP, INFEASIBLE, OPTIMAL

OPTIONS: dict[str, float | bool | str] = {
    "presolve": "off",  # it finds nothing to remove; without it the transport of 100 requests and 16 DCs takes 2.1 instead of 3.3 ms
    "mip_feasibility_tolerance": 1e-9,  # an opening may be worth millions of requests; 1e-6 of one would spoil the bound
    "mip_abs_gap": 0.0,  # the relative one alone counts: scaled objectives may be small
    "parallel": "off",  # a third less work, and cores are better used by other runs
    # Sub-problems that look for a first answer; we have one. With them 100 requests and 16 DCs take 83 instead of 31 ms.
    "mip_heuristic_run_feasibility_jump": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_root_reduced_cost": False,
}


STATUS_OF = {
    highspy.HighsModelStatus.kOptimal: OPTIMAL,
    highspy.HighsModelStatus.kTimeLimit: BUDGET,
    highspy.HighsModelStatus.kInfeasible: INFEASIBLE,
    highspy.HighsModelStatus.kUnboundedOrInfeasible: INFEASIBLE,  # nothing here is unbounded
}


class HighsSolver(HostSolver):
    """HiGHS through its own Python interface; one object of it, so one problem at a time."""

    def __init__(self, *, gap: float = GAP, time_limit_s: float = 0.25):
        super().__init__(gap=gap, time_limit_s=time_limit_s)
        self._highs = quiet_highs()
        for name, value in {"mip_rel_gap": gap, **OPTIONS}.items():
            self._highs.setOptionValue(name, value)

    def _lp(self, w: Placeable, pairs: np.ndarray, scale: float) -> tuple[int, np.ndarray | None, np.ndarray | None]:
        status = self._run(w, pairs, scale, self.time_limit_s, openings=False)
        if status != OPTIMAL:
            return status, None, None
        solution = self._highs.getSolution()
        x = np.zeros(pairs.shape)
        x[pairs] = solution.col_value
        return status, x, np.maximum(-np.array(solution.row_dual)[len(pairs) :], 0.0) * scale

    def _mip(self, w: Placeable, pairs: np.ndarray, scale: float, limit_s: float) -> tuple[np.ndarray | None, float]:
        status = self._run(w, pairs, scale, limit_s, openings=True)
        if status not in (OPTIMAL, BUDGET):
            return None, -np.inf
        info = self._highs.getInfo()
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        return np.array(self._highs.getSolution().col_value)[pairs.sum() :] if found else None, info.mip_dual_bound * scale

    def _run(self, w: Placeable, pairs: np.ndarray, scale: float, limit_s: float, *, openings: bool) -> int:
        """Columns: x of the pairs, row by row, then y of the DCs if there are openings. Rows: the requests, then the DCs."""
        n, dcs = pairs.shape
        row, dc = np.nonzero(pairs)
        extra = dcs if openings else 0
        x, columns, entries = len(row), len(row) + extra, 2 * len(row) + extra
        model = (
            columns,
            n + dcs,
            entries,
            int(highspy.MatrixFormat.kColwise),
            int(highspy.ObjSense.kMinimize),
            0.0,
            np.concatenate([w.cost[pairs], w.opening[:extra]]) / scale,
            np.zeros(columns),
            np.ones(columns),  # the requests' rows say so already, but the dual simplex is two to six times as fast with it
            np.concatenate([np.ones(n), np.full(dcs, -np.inf)]),
            np.concatenate([np.ones(n), np.zeros(dcs) if openings else w.capacity]),
            np.concatenate([np.arange(0, 2 * x, 2), np.arange(2 * x, entries + 1)]),
            np.concatenate([np.stack([row, n + dc], axis=1).ravel(), np.arange(n, n + extra)]),
            np.concatenate([np.ones(2 * x), -w.capacity[:extra]]),
            # One a column even for an LP: HiGHS reads as many, whatever the length.
            (np.arange(columns) >= x).astype(np.int32),
        )
        try:
            passed = self._highs.passModel(*model)
            # The clock of an object runs on from one problem to the next.
            self._highs.setOptionValue("time_limit", self._highs.getRunTime() + limit_s)
            if passed == highspy.HighsStatus.kError or self._highs.run() == highspy.HighsStatus.kError:
                return FAILED
        except RuntimeError:  # so HiGHS's own exceptions arrive here; the run has other windows
            return FAILED
        return STATUS_OF.get(self._highs.getModelStatus(), FAILED)


class _Quiet(highspy.Highs):
    def enableCallbacks(self) -> None:
        """Nothing: none are used, and this would print HiGHS's banner before any option could forbid it."""


def quiet_highs() -> highspy.Highs:
    """A HiGHS that prints nothing, nor does any made after it: the banner comes once a process, and passes here without a console."""
    highs = _Quiet()
    highs.setOptionValue("log_to_console", False)
    highs.run()
    return highs
