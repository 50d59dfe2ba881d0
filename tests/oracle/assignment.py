"""Exact solvers of the two assignment problems, and how much worse the second-best assignment is."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.optimize import linear_sum_assignment


@dataclass(frozen=True)
class Assignment:
    """A DC for each request, what it costs, and by how much any other assignment costs more."""

    dcs: list[int]
    objective: float
    margin: float


def assign(cost: np.ndarray, capacity: Sequence[int]) -> Assignment | None:
    """Least sum of costs [requests, DCs], infinite where forbidden; None where no assignment keeps the capacities."""
    n = len(cost)
    places = np.repeat(np.arange(cost.shape[1]), np.minimum(capacity, n))
    if len(places) < n:
        return None
    try:
        rows, columns = linear_sum_assignment(cost[:, places])
    except ValueError:  # scipy's word for infinite costs that cannot be avoided
        return None
    dcs = places[columns]
    return Assignment(dcs.tolist(), float(cost[rows, dcs].sum()), _margin(cost, capacity, dcs))


def _margin(cost: np.ndarray, capacity: Sequence[int], dcs: np.ndarray) -> float:
    """The cheapest way to move requests in a circle of DCs, or from one DC along others to one with room.

    Any other assignment is this one and some such moves, all of which cost something or this one would not be optimal.
    """
    n_dcs = cost.shape[1]
    move = np.full((n_dcs, n_dcs), np.inf)  # least cost of moving one request from a DC to another
    room = np.zeros(n_dcs, bool)
    for d in range(n_dcs):
        mine = dcs == d
        room[d] = capacity[d] > mine.sum()
        if mine.any():
            move[d] = (cost[mine] - cost[mine, d][:, None]).min(axis=0)
            move[d, d] = np.inf
    for via in range(n_dcs):
        move = np.minimum(move, move[:, [via]] + move[[via], :])
    return float(min(np.diag(move).min(), move[:, room].min(initial=np.inf)))


def assign_and_open(cost: np.ndarray, capacity: Sequence[int], opening: Sequence[float]) -> Assignment | None:
    """The same, where each DC used costs `opening` besides: every set of open DCs in turn."""
    n_dcs = cost.shape[1]
    found: list[tuple[float, list[int], float]] = []  # (cost, routing, margin over others of the same open DCs)
    for size in range(1, n_dcs + 1):
        for open_dcs in combinations(range(n_dcs), size):
            chosen = list(open_dcs)
            one = assign(cost[:, chosen], [capacity[d] for d in chosen])
            if one is not None:
                found.append((one.objective + sum(opening[d] for d in chosen), [chosen[i] for i in one.dcs], one.margin))
    if not found:
        return None
    objective, best, _ = min(found)
    return Assignment(best, objective, min(value - objective + (margin if dcs == best else 0.0) for value, dcs, margin in found))
