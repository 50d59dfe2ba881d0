"""How an answer is put together on the host, whoever calls the solver.

1. The transport with every DC open, an LP whose vertices are whole (Ahuja, Magnanti, Orlin 1993, Network Flows, chapter 11: its matrix is
   totally unimodular). Without openings its vertex is the answer. Its prices prove a bound, whatever tolerance the solver worked to.
2. With openings the vertex is a first answer, and the prices show which pairs are in no better one. A MIP over the other pairs says which
   DCs to open; x stays continuous in it.
3. The transport over the DCs opened.
"""

import time
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from jaxserve.solvers.problem import BUDGET, EMPTY, EXACT, FAILED, GAP, INFEASIBLE, OPTIMAL, AssignmentProblem, Solution

ROUNDS = 4
"""Transports solved for one answer at the most. One is enough unless the costs of a problem differ by many orders."""


class Placeable(NamedTuple):
    """The part of a problem that counts, in NumPy: n requests that some DC can serve."""

    cost: np.ndarray  # [n, D] 0 where not feasible
    feasible: np.ndarray  # [n, D] bool
    capacity: np.ndarray  # [D] float, at most n
    opening: np.ndarray  # [D]


class Answer(NamedTuple):
    """What is known of a window, or of a part of its pairs."""

    status: int  # OPTIMAL where there is a place, else why there is none
    place: np.ndarray | None  # [n] DC of each request
    bound: float  # no assignment costs less
    price: np.ndarray | None = None  # [D] of one place more in a DC, at which a transport's bound holds


NOTHING = Answer(FAILED, None, -np.inf)


class HostSolver(ABC):
    """What the back ends on the host share; `_lp` and `_mip` are theirs.

    A transport has `time_limit_s`, and a MIP what the transport before it has left of that; HiGHS may overrun either.
    """

    def __init__(self, *, gap: float = GAP, time_limit_s: float = 0.25):
        self.gap, self.time_limit_s = gap, time_limit_s

    @abstractmethod
    def _lp(self, w: Placeable, pairs: np.ndarray, scale: float) -> tuple[int, np.ndarray | None, np.ndarray | None]:
        """The transport over pairs [n, D], openings left out: status, and if OPTIMAL x [n, D] and the prices [D] >= 0.

        scale is a typical cost; solvers' tolerances are absolute.
        """

    @abstractmethod
    def _mip(self, w: Placeable, pairs: np.ndarray, scale: float, limit_s: float) -> tuple[np.ndarray | None, float]:
        """The problem over pairs [n, D] with x continuous, within limit_s: y [D] if there is one, and the bound."""

    def solve(self, problem: AssignmentProblem) -> Solution:
        """One problem. Raises `ValueError` for one whose shapes do not go together: HiGHS would read beyond the shorter."""
        start = time.perf_counter()
        cost, feasible = np.asarray(problem.cost, float), np.asarray(problem.feasible, bool)
        capacity, opening = np.asarray(problem.capacity, float), np.asarray(problem.opening, float)
        if cost.shape != feasible.shape or not cost.shape[-1:] == capacity.shape == opening.shape:
            shapes = f"cost {cost.shape}, feasible {feasible.shape}, capacity {capacity.shape}, opening {opening.shape}"
            raise ValueError(f"a formulation with a bug: {shapes}; they must be [N, D], [N, D], [D] and [D]")
        cost = np.where(feasible, cost, 0.0)
        place, rows = np.full(len(cost), -1, np.int32), feasible.any(axis=1)
        status, objective, bound = FAILED, np.inf, -np.inf
        # As `usable` has it.
        if np.isfinite(cost).all() and (np.isfinite(opening) & (opening >= 0) & (capacity >= 0)).all():
            if not rows.any():
                status, objective, bound = EMPTY, 0.0, 0.0
            else:
                w = Placeable(cost[rows], feasible[rows], np.minimum(capacity, rows.sum()), opening)
                status, found, bound, _ = self._search(w, start)
                if found is not None:
                    place[rows], objective = found, total(w, found)
                    bound = min(bound, objective)
                    status = OPTIMAL if objective - bound <= max(self.gap, EXACT) * abs(objective) else BUDGET
        wall_s = time.perf_counter() - start
        return Solution(place=place, objective=np.float64(objective), bound=np.float64(bound), status=np.int32(status), wall_s=wall_s)

    def _search(self, w: Placeable, start: float) -> Answer:
        """The answer to a window that began at `start`, on the clock of time.perf_counter."""
        first = self._transport(w, w.feasible)
        if first.place is None or first.price is None or not w.opening.any():
            return first
        return self._improve(w, first, first.price, start)

    def _improve(self, w: Placeable, first: Answer, price: np.ndarray, start: float) -> Answer:
        """`first`, or what `_whole` finds among the pairs that `first` and the prices [D] leave.

        Again if that was solved in the scale of a far worse answer, which would leave its bound unproven.
        """
        floor, answer, scale = _floor(w, w.feasible, price) + w.opening, first, np.inf
        while True:
            objective = np.inf if answer.place is None else total(w, answer.place)
            pairs = w.feasible & _below(floor, objective, answer)
            # Openings may dwarf every cost.
            each = w.opening.mean() if answer.place is None else objective / len(pairs)
            before, scale = scale, max(typical(w.cost[pairs]), each)
            if scale > 0.1 * before:
                return answer
            limit_s = max(self.time_limit_s - (time.perf_counter() - start), 0.0)
            # The opening of a DC without a pair could be out of any scale.
            found = self._whole(w._replace(opening=w.opening * pairs.any(axis=0)), pairs, scale, limit_s)
            if found.place is not None and total(w, found.place) < objective:
                answer = found
            elif answer.place is None:
                return found
            # Infeasible it cannot be with an answer at hand, but for tolerances.
            answer = answer._replace(bound=first.bound if found.status == INFEASIBLE else max(first.bound, found.bound))

    def _whole(self, w: Placeable, pairs: np.ndarray, scale: float, limit_s: float) -> Answer:
        """The whole problem, openings and all, over pairs [n, D]."""
        opened, bound = self._mip(w, pairs, scale, limit_s)
        answer = NOTHING if opened is None else self._transport(w, pairs & (opened > 0.5))
        return answer._replace(bound=bound)

    def _transport(self, w: Placeable, pairs: np.ndarray) -> Answer:
        """The transport over pairs [n, D], openings left out.

        Solvers work to tolerances of 1e-7 of a typical cost, too coarse if what matters is far cheaper than that. Then the pairs that the
        prices exclude are dropped, and the others solved again in their own scale.
        """
        answer, gap = NOTHING, np.inf
        if not pairs.any(axis=1).all():
            return answer._replace(status=INFEASIBLE, bound=np.inf)
        for _ in range(ROUNDS):
            # What a request costs at the least is a constant; without it, costs that differ by little are in their own scale.
            least = np.where(pairs, w.cost, np.inf).min(axis=1, keepdims=True)
            beyond = w._replace(cost=np.where(pairs, w.cost - least, 0.0))
            status, x, price = self._lp(beyond, pairs, typical(beyond.cost[pairs]))
            place = None if x is None else placed(x, pairs, w.capacity)
            if place is None or price is None:
                return answer if status != INFEASIBLE or answer.place is not None else answer._replace(status=INFEASIBLE, bound=np.inf)
            floor = _floor(w, pairs, price)
            objective, bound = w.cost[np.arange(len(place)), place].sum(), floor.min()
            if objective - bound >= gap:
                break
            answer, gap = Answer(OPTIMAL, place, bound, price), objective - bound
            fewer = pairs & _below(floor, objective, answer)
            if gap <= EXACT * abs(objective) or fewer.sum() == pairs.sum():
                break
            pairs = fewer
        return answer


def total(w: Placeable, place: np.ndarray) -> float:
    """g CO2e of place [n], with the openings of the DCs it uses."""
    return float(w.cost[np.arange(len(place)), place].sum() + w.opening[np.unique(place)].sum())


def placed(x: np.ndarray, pairs: np.ndarray, capacity: np.ndarray) -> np.ndarray | None:
    """The DC of each request by x [n, D]; None unless each has exactly one, of its pairs, and no DC has too many."""
    chosen = pairs & (x > 0.5)
    place = chosen.argmax(axis=1)
    fits = (chosen.sum(axis=1) == 1).all() and (np.bincount(place, minlength=len(capacity)) <= capacity).all()
    return place if fits else None


def typical(costs: np.ndarray) -> float:
    """A typical cost; 1 where all are zero."""
    return float(np.abs(costs).mean()) or 1.0


def _floor(w: Placeable, pairs: np.ndarray, price: np.ndarray) -> np.ndarray:
    """[n, D] no transport over `pairs` that uses this one costs less; inf elsewhere. By weak duality, at any prices [D] >= 0."""
    priced = np.where(pairs, w.cost + price, np.inf)
    least = priced.min(axis=1)
    return priced - least[:, None] + (least.sum() - price @ w.capacity)


def _below(floor: np.ndarray, objective: float, answer: Answer) -> np.ndarray:
    """[n, D] the pairs that may be in an answer as good as the objective, with those of the one at hand."""
    pairs = floor <= objective + EXACT * abs(objective)
    if answer.place is not None:
        pairs[np.arange(len(pairs)), answer.place] = True
    return pairs
