"""Which DC serves which request of a window: the problem, and what every back end answers.

    min  sum_rd cost_rd x_rd + sum_d opening_d y_d
    s.t. sum_d x_rd = 1 over the feasible DCs of each request r,  sum_r x_rd <= capacity_d y_d,  x, y in {0, 1}

With `opening` zero it is the ILP of arXiv 2610.14571, a transportation problem; otherwise its facility MILP.
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

Values = Any
"""An array of NumPy or of JAX: the host's back ends take the one, the device's the other."""

STATUSES = ("optimal", "budget", "infeasible", "failed", "empty")
"""`optimal`: proven within the gap asked for. `budget`: an assignment, but its gap is larger. `infeasible`: proven that there is none.
`failed`: no answer (a cost or opening that is not finite, an error of the solver). `empty`: no request to place."""
OPTIMAL, BUDGET, INFEASIBLE, FAILED, EMPTY = range(len(STATUSES))

GAP = 1e-4
"""Relative gap at which an answer counts as proven, unless another is asked for."""
EXACT = 1e-9
"""Relative gap that counts as none: what rounding may leave."""


class AssignmentProblem(eqx.Module):
    """One problem, or many along leading axes. N requests, D data centres."""

    cost: Values  # [N, D] g CO2e; whatever it is where not feasible counts for nothing
    feasible: Values  # [N, D] bool; a row with none is no part of the problem (padding, or a request that no DC can serve)
    capacity: Values  # [D] requests, whole numbers >= 0
    opening: Values  # [D] g CO2e >= 0 for using a DC at all


class Solution(eqx.Module):
    """The answer of a back end to one problem, or to many along leading axes."""

    place: Values  # [N] int32 DC of each request; -1 where the row is no part of the problem or there is no assignment
    objective: Values  # [] cost of `place` in the problem's unit; inf without an assignment, 0 for an empty problem
    bound: Values  # [] no assignment costs less; -inf where nothing is known, inf where there is none
    status: Values  # [] int32, index into STATUSES
    wall_s: Values  # [] seconds the solver took; nan inside a compiled run, where it has no time of its own

    @property
    def gap(self) -> NDArray[np.float64]:
        """(objective - bound)/|objective|, 0 for an empty problem; nan without an assignment."""
        return relative_gap(np.asarray(self.objective), np.asarray(self.bound))


def relative_gap(objective: NDArray[np.float64], bound: NDArray[np.float64]) -> NDArray[np.float64]:
    """(objective - bound)/|objective| of assignments that cost `objective` and cannot cost less than `bound`; nan where there is none."""
    known = np.isfinite(objective)
    cost = np.where(known, objective, 1.0)
    return np.where(known, np.maximum(cost - bound, 0.0) / np.maximum(np.abs(cost), np.finfo(float).tiny), np.nan)


def usable(problem: AssignmentProblem) -> Array:
    """Whether everything that counts is a finite number and no opening or capacity is negative: []."""
    cost_ok = jnp.all(jnp.isfinite(problem.cost) | ~jnp.asarray(problem.feasible), axis=(-2, -1))
    rest = jnp.isfinite(problem.opening) & (jnp.asarray(problem.opening) >= 0) & (jnp.asarray(problem.capacity) >= 0)
    return cost_ok & jnp.all(rest, axis=-1)
