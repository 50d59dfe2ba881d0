"""The device's solvers, called from the host: the same call as the back ends there, for one problem or for many at once."""

import time
from functools import partial

import equinox as eqx
import jax
import numpy as np
from jax.typing import ArrayLike

from jaxserve.solvers.facility import NODES, solve_facilities
from jaxserve.solvers.problem import GAP, AssignmentProblem, Solution
from jaxserve.solvers.transport import solve_transport

ROWS = 32
"""Requests are padded to a multiple of this, so that few shapes are compiled."""

TOGETHER = 4
"""Problems side by side on a CPU; more would not make it faster there."""


class DeviceSolver:
    """Exact solvers on JAX's default device. `nodes`, at least 1, limits the search of each problem with openings."""

    def __init__(self, *, gap: float = GAP, nodes: int = NODES):
        self.gap, self.nodes = gap, nodes

    def solve(self, problem: AssignmentProblem) -> Solution:
        """One problem [N, D], or a batch of them [P, N, D] in one call; `wall_s` is then that of the whole call, for each."""
        batch = jax.tree.map(np.asarray, problem)
        many = np.ndim(batch.cost) == 3
        if not many:
            batch = jax.tree.map(lambda leaf: leaf[None], batch)
        problems, n, _ = batch.cost.shape
        together = TOGETHER if jax.default_backend() == "cpu" else problems
        missing = -problems % together if problems > together else 0
        blank = -(-max(n, 1) // ROWS) * ROWS - n
        # What is added has no feasible pair: requests to leave out, problems that are empty.
        by_pair, by_dc = [(0, missing), (0, blank), (0, 0)], [(0, missing), (0, 0)]
        batch = jax.tree.map(lambda leaf: np.pad(leaf, by_pair if leaf.ndim == 3 else by_dc), batch)
        opens = bool(np.any(batch.opening != 0))
        began = time.perf_counter()
        solved = jax.device_get(_solve(batch, np.asarray(self.gap), np.asarray(self.nodes), opens, together))
        wall_s = np.full(problems, time.perf_counter() - began)
        solved = jax.tree.map(lambda leaf: leaf[:problems], solved)
        solution = eqx.tree_at(lambda s: (s.place, s.wall_s), solved, (solved.place[:, :n], wall_s))
        return solution if many else jax.tree.map(lambda leaf: leaf[0], solution)


@eqx.filter_jit
def _solve(batch: AssignmentProblem, gap: ArrayLike, nodes: ArrayLike, opens: bool, together: int) -> Solution:
    if opens:
        return solve_facilities(batch, together, gap=gap, nodes=nodes)
    solve = partial(solve_transport, gap=gap)
    many = np.shape(batch.cost)[0] > together
    return jax.lax.map(solve, batch, batch_size=together) if many else jax.vmap(solve)(batch)
