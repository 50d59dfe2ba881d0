"""The assignment problem as one writes it down, in cvxpy: the back end to read, and to extend by constraints of one's own.

def at_most_half_in_brazil(m: Model) -> list[cvxpy.Constraint]:
    brazil = [i for i, name in enumerate(m.names) if name.startswith("br-")]
    return [cvxpy.sum(m.x[:, brazil]) <= 0.5 * cvxpy.sum(m.active)]

CvxpySolver(constraints=at_most_half_in_brazil, names=["br-south", "br-north", "us-east"])
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any, NamedTuple

import cvxpy
import numpy as np
from cvxpy.settings import INFEASIBLE_OR_UNBOUNDED

from jaxserve.errors import InputError
from jaxserve.solvers.highs import OPTIONS, quiet_highs
from jaxserve.solvers.host import NOTHING, Answer, HostSolver, Placeable, placed
from jaxserve.solvers.problem import BUDGET, FAILED, GAP, INFEASIBLE, OPTIMAL

PAD = 32
"""Requests are padded to a multiple of this, for each shape is compiled once, in some 50 ms."""


@dataclass(frozen=True)
class Model:
    """What a constraint can be about. Padding requests have nothing feasible and are not active."""

    x: cvxpy.Variable  # [N, D] 1 where the request goes to the DC
    y: cvxpy.Variable | None  # [D] 1 where the DC is used; None in windows without openings
    cost: cvxpy.Parameter  # [N, D] g CO2e, 0 where not feasible
    feasible: cvxpy.Parameter  # [N, D] 1 or 0
    capacity: cvxpy.Parameter  # [D] requests
    opening: cvxpy.Parameter  # [D] g CO2e
    active: cvxpy.Parameter  # [N] 1 where there is a request to place
    names: tuple[str, ...]  # of the DCs, in the order of the columns; empty if none were given


Constraints = Callable[[Model], list[cvxpy.Constraint]]


class Compiled(NamedTuple):
    """A model, and what to solve: the dual values of `capacities` are the prices of places."""

    model: Model
    problem: cvxpy.Problem
    capacities: Any


def assignment(n: int, dcs: int, names: tuple[str, ...], constraints: Constraints | None, *, openings: bool) -> Compiled:
    """The problem of `jaxserve.solvers.problem`, for n requests. With constraints x is boolean: the LP need not be whole any more."""
    x = cvxpy.Variable((n, dcs), name="x", boolean=True) if constraints else cvxpy.Variable((n, dcs), name="x", bounds=[0, 1])
    y = cvxpy.Variable(dcs, name="y", boolean=True) if openings else None
    cost, feasible = cvxpy.Parameter((n, dcs), name="cost"), cvxpy.Parameter((n, dcs), name="feasible", nonneg=True)
    capacity, opening = cvxpy.Parameter(dcs, name="capacity", nonneg=True), cvxpy.Parameter(dcs, name="opening", nonneg=True)
    active = cvxpy.Parameter(n, name="active", nonneg=True)
    model = Model(x, y, cost, feasible, capacity, opening, active, names)

    # Products of flat vectors: compiling cvxpy.multiply of matrices takes memory and time quadratic in their size.
    # Not x <= feasible, which is n * D rows; and with parameters in the bounds of x, cost times x would be no DPP.
    carbon: Any = cvxpy.vec(cost, order="C") @ cvxpy.vec(x, order="C")
    misplaced: Any = cvxpy.vec(1 - feasible, order="C") @ cvxpy.vec(x, order="C")
    load = cvxpy.sum(x, axis=0)
    if y is None:
        capacities = load <= capacity
    else:
        carbon += opening @ y
        capacities = load <= cvxpy.multiply(capacity, y)
    given: list[Any] = [cvxpy.sum(x, axis=1) == active, misplaced == 0, capacities]
    own = _asked(constraints, model) if constraints else []
    return Compiled(model, cvxpy.Problem(cvxpy.Minimize(carbon), given + own), capacities)


def _asked(constraints: Constraints, model: Model) -> list[cvxpy.Constraint]:
    """What the user's function adds; whatever goes wrong in it is told as theirs."""
    try:
        asked = list(constraints(model))
    except Exception as error:
        raise InputError(f"constraints: the function failed with {type(error).__name__}: {error}") from error
    for one in asked:
        if not isinstance(one, cvxpy.Constraint | bool):
            raise InputError(f"constraints: the function returned {one!r} among its constraints; they must be cvxpy constraints")
    return asked


class CvxpySolver(HostSolver):
    """cvxpy with HiGHS. `constraints` is called once for each shape of window that turns up.

    They must be linear, or piecewise linear and convex, and DPP: no product of two parameters. `names` are the DCs' in the order of the
    columns.
    """

    def __init__(
        self,
        *,
        gap: float = GAP,
        time_limit_s: float = 0.25,
        constraints: Constraints | None = None,
        names: Sequence[str] | None = None,
    ):
        super().__init__(gap=gap, time_limit_s=time_limit_s)
        self.constraints, self.names = constraints, tuple(names or ())
        self._compiled: dict[tuple[int, int, bool], Compiled] = {}
        quiet_highs()

    def _search(self, w: Placeable, start: float) -> Answer:
        if self.constraints is None:
            return super()._search(w, start)
        return self._improve(w, NOTHING, np.zeros(len(w.capacity)), start)

    def _whole(self, w: Placeable, pairs: np.ndarray, scale: float, limit_s: float) -> Answer:
        if self.constraints is None:
            return super()._whole(w, pairs, scale, limit_s)
        status, (m, problem, _) = self._run(w, pairs, scale, limit_s, openings=bool(w.opening.any()))
        if status not in (OPTIMAL, BUDGET):
            return Answer(INFEASIBLE, None, np.inf) if status == INFEASIBLE else NOTHING
        place = placed(_value(m.x)[: len(pairs)], pairs, w.capacity)
        return Answer(FAILED if place is None else OPTIMAL, place, _bound(problem))

    def _lp(self, w: Placeable, pairs: np.ndarray, scale: float) -> tuple[int, np.ndarray | None, np.ndarray | None]:
        status, (m, _, capacities) = self._run(w, pairs, scale, self.time_limit_s, openings=False)
        if status != OPTIMAL:
            return status, None, None
        return status, _value(m.x)[: len(pairs)], np.maximum(capacities.dual_value, 0.0)

    def _mip(self, w: Placeable, pairs: np.ndarray, scale: float, limit_s: float) -> tuple[np.ndarray | None, float]:
        status, (m, problem, _) = self._run(w, pairs, scale, limit_s, openings=True)
        if status not in (OPTIMAL, BUDGET) or m.y is None:
            return None, -np.inf
        return _value(m.y), _bound(problem)

    def _run(self, w: Placeable, pairs: np.ndarray, scale: float, limit_s: float, *, openings: bool) -> tuple[int, Compiled]:
        n, dcs = pairs.shape
        padding = -n % PAD
        compiled = self._problem(n + padding, dcs, openings=openings)
        m = compiled.model
        m.cost.value = np.pad(np.where(pairs, w.cost, 0.0), ((0, padding), (0, 0)))
        m.feasible.value = np.pad(pairs.astype(float), ((0, padding), (0, 0)))
        m.active.value = np.pad(np.ones(n), (0, padding))
        m.capacity.value, m.opening.value = w.capacity, w.opening
        options: dict[str, Any] = {
            "time_limit": limit_s,
            "mip_rel_gap": self.gap,
            # By HiGHS and not by us, so that constraints can be written in g CO2e.
            "user_objective_scale": -round(log2(scale)),
            **OPTIONS,
        }
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "Solution may be inaccurate" is its word for a time limit
                compiled.problem.solve(solver=cvxpy.HIGHS, **options)
        except (cvxpy.SolverError, RuntimeError):  # cvxpy's word for a solver that failed, and HiGHS's own; the run has other windows
            return FAILED, compiled
        return STATUS_OF.get(compiled.problem.status, FAILED), compiled

    def _problem(self, n: int, dcs: int, *, openings: bool) -> Compiled:
        key = n, dcs, openings
        if key not in self._compiled:
            if self.names and len(self.names) != dcs:
                raise InputError(f"names: {len(self.names)} names for {dcs} DCs; give one for each, in the order of the columns")
            compiled = assignment(n, dcs, self.names, self.constraints, openings=openings)
            ours = set(map(id, vars(compiled.model).values()))
            for parameter in compiled.problem.parameters():
                if id(parameter) not in ours and parameter.value is None:
                    raise InputError(f"constraints: the parameter {parameter.name()} has no value; give it one in the function")
            if not compiled.problem.is_qp():
                raise InputError("constraints: HiGHS needs them linear, or piecewise linear and convex; rewrite those that are not")
            if not compiled.problem.is_dpp():
                raise InputError("constraints: not DPP, so every window would be compiled anew; do not multiply parameters by each other")
            self._compiled[key] = compiled
        return self._compiled[key]


STATUS_OF = {
    cvxpy.OPTIMAL: OPTIMAL,
    cvxpy.USER_LIMIT: BUDGET,
    cvxpy.INFEASIBLE: INFEASIBLE,
    INFEASIBLE_OR_UNBOUNDED: INFEASIBLE,  # nothing here is unbounded
}


def _value(variable: cvxpy.Variable) -> np.ndarray:
    """The variable's value; zeros where HiGHS has none."""
    return np.zeros(variable.shape) if variable.value is None else np.asarray(variable.value)


def _bound(problem: cvxpy.Problem) -> float:
    """HiGHS's bound of a MIP, g CO2e; cvxpy passes on what HiGHS says of itself."""
    stats: Any = problem.solver_stats
    return stats.extra_stats.mip_dual_bound
