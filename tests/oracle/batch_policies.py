"""The policies that decide a batch of requests together, and their common fallback."""

import math
from collections.abc import Callable

import numpy as np

from tests.oracle.assignment import Assignment, assign, assign_and_open
from tests.oracle.estimates import WHOLE, Belief, energy_j, headroom, latency, marginal_energy_j, n_engines, unloaded_s_per_token, waking_j
from tests.oracle.policies import Scheduler
from tests.oracle.records import Batch, Request
from tests.oracle.timeline import window_of

BATCH_POLICIES = ("ilp", "iterative_ilp", "facility_milp", "green_llm", "moer_cap")
GREEN_LLM_S = 5.0  # what Green-LLM allows rtt + v*(isl + osl)
J_PER_KWH = 3.6e6


def decide_batch(g: Scheduler, batch: list[Request], decided_s: float, *, handed: bool = False) -> Batch:
    """Choose DCs for the requests of a batch, in the order in which they came, and send them off; own DCs alone for `handed` ones."""
    p = Problem(g, batch, decided_s, own_only=handed)
    plan = None
    if p.kind == "moer_cap":
        status = "rule"
        dcs, by_carbon, in_turn = _moer_cap(p, *p.options), 0, 0
    else:
        plan = _solve(p) if p.solvable else None
        status = "optimal" if plan else "infeasible" if p.solvable else "empty"
        dcs, by_carbon, in_turn = _with_fallback(p, plan)
    g.dispatch_batch(batch, dcs, decided_s)
    objective = plan.objective if plan else math.nan
    return Batch(decided_s, g.index, len(batch), status, objective, by_carbon, in_turn, min(p.margins, default=math.inf), handed)


class Problem:
    """A batch, and what its scheduler takes the DCs to be at the close."""

    def __init__(self, g: Scheduler, batch: list[Request], decided_s: float, *, own_only: bool = False):
        self.g, self.s, self.batch = g, g.s, batch
        self.kind, *self.options = g.s.policy
        self.order = [d for d in g.order if d in g.own or not own_only]  # where the requests may go
        self.means = g.means(batch)
        g.knows.carry(window_of(decided_s, g.s.window_s), self.means)
        self.at = [g.knows.belief(d, self.means) for d in range(len(g.s.nodes))]
        self.headroom = [headroom(g.s, g.index, d, at) for d, at in enumerate(self.at)]
        self.margins: list[float] = []  # how near, relatively, each choice came to another one
        self.feasible = [[self._within(r, d, at) for d, at in enumerate(self.at)] for r in batch]
        self.solvable = [i for i, row in enumerate(self.feasible) if any(row)]  # what reaches the solver

    def _within(self, r: Request, d: int, at: Belief) -> bool:
        """Whether a DC is feasible for a request; always, for `moer_cap`."""
        if d not in self.order:
            return False
        if self.kind == "moer_cap":
            return True
        if self.kind != "green_llm":
            return self.keeps_slo(r, d, at)
        return self._all_within([(self._rtt_s(d) + unloaded_s_per_token(self.s, self.means) * (r.isl + r.believed_osl), GREEN_LLM_S)])

    def keeps_slo(self, r: Request, d: int, at: Belief) -> bool:
        """Whether the estimates are within both budgets."""
        ttft, tpot = latency(self.s, self._rtt_s(d), r, at, self.means)
        return self._all_within([(ttft, self.s.slo_ttft_s), (tpot, self.s.slo_tpot_s)])

    def _rtt_s(self, d: int) -> float:
        return self.s.rtt_s[self.g.index][d]

    def _all_within(self, pairs: list[tuple[float, float]]) -> bool:
        self.margins += [abs(expected / limit - 1.0) for expected, limit in pairs]
        return all(expected <= limit for expected, limit in pairs)

    def grams(self, d: int, joules: float) -> float:
        """Carbon of energy spent at a DC, by the CI of its last poll."""
        return self.s.pue[d] * self.at[d].ci * joules / J_PER_KWH

    def _cost(self, r: Request, d: int, at: Belief) -> float:
        if self.kind == "green_llm":
            return self.grams(d, energy_j(self.s, r, 0.0, 0.0))
        if self.kind == "facility_milp" and "c_full" not in self.options:
            return self.grams(d, marginal_energy_j(self.s, r))
        return self.grams(d, energy_j(self.s, r, at.b, at.q))

    def costs(self, at: Callable[[int, int], Belief], kept: list[int] | None = None) -> np.ndarray:
        """Costs [solvable, DCs] by a belief for each, infinite where not feasible; a request without feasible DC is `kept` where it is."""
        rows = []
        for i in self.solvable:
            r = self.batch[i]
            allowed = [self._within(r, d, at(i, d)) for d in range(len(self.at))]
            if kept is not None and not any(allowed):
                allowed[kept[self.solvable.index(i)]] = True
            rows.append([self._cost(r, d, at(i, d)) if ok else math.inf for d, ok in enumerate(allowed)])
        return np.array(rows)


def _solve(p: Problem) -> Assignment | None:
    costs = p.costs(lambda _, d: p.at[d])
    if p.kind == "facility_milp":
        return _noted(p, assign_and_open(costs, p.headroom, opening_g(p, costs, *p.options)))
    plan = _noted(p, assign(costs, p.headroom))
    return _iterate(p, plan, *p.options) if plan and p.kind == "iterative_ilp" else plan


def _noted(p: Problem, plan: Assignment | None) -> Assignment | None:
    """The plan itself; its margin is remembered."""
    if plan:
        p.margins.append(plan.margin / abs(plan.objective) if plan.objective else plan.margin)
    return plan


def _iterate(p: Problem, plan: Assignment, t_max: int) -> Assignment:
    """Solve again with the last assignment in the estimates, until it repeats."""
    for _ in range(t_max - 1):
        place = dict(zip(p.solvable, plan.dcs, strict=True))

        def with_others(i: int, d: int, place: dict[int, int] = place) -> Belief:
            return p.at[d].plus([p.batch[j] for j, there in place.items() if there == d and j != i], n_engines(p.s, d))

        again = _noted(p, assign(p.costs(with_others, kept=plan.dcs), p.headroom))
        if again is None:
            break
        repeated = again.dcs == plan.dcs
        plan = again
        if repeated:
            break
    return plan


def opening_g(p: Problem, costs: np.ndarray, idle_share: str, variant: str) -> list[float]:
    """f of each DC."""
    used = int(np.isfinite(costs).any(axis=0).sum())
    share = {"linear": lambda b: max(0.0, 1.0 - b), "exp": lambda b: math.exp(-b)}[idle_share]
    woken = [min(n_engines(p.s, d) * share(at.b), max(1.0, len(costs) / used)) for d, at in enumerate(p.at)]
    if variant == "f_const":
        woken = [1.0] * len(p.at)
    return [max(0.0, p.grams(d, n * waking_j(p.s, p.means))) for d, n in enumerate(woken)]


def _moer_cap(p: Problem, cap: float) -> list[int]:
    """Cleanest DC first, each up to its share of the batch; what the shares leave over goes to the last."""
    most = math.ceil(cap * len(p.batch) - WHOLE)
    cleanest_first = sorted(p.order, key=lambda d: p.at[d].ci)  # a stable sort: equals stay in the scheduler's order
    places = [d for d in cleanest_first for _ in range(most)]
    return [places[i] if i < len(places) else cleanest_first[-1] for i in range(len(p.batch))]


def _with_fallback(p: Problem, plan: Assignment | None) -> tuple[list[int], int, int]:
    """(DC of each request of the batch, requests sent by the fallback to the DC of lowest CI, and in turn)."""
    planned = dict(zip(p.solvable, plan.dcs, strict=True)) if plan else {}
    left = list(p.headroom)
    dcs: list[int] = []
    by_carbon = in_turn = 0
    for i, r in enumerate(p.batch):
        if i in planned:
            dcs.append(planned[i])
            continue
        open_to_it = [d for d in p.order if left[d] > 0 and p.keeps_slo(r, d, p.at[d])]
        if open_to_it:
            dcs.append(min(open_to_it, key=lambda d: p.at[d].ci))
            left[dcs[-1]] -= 1
            by_carbon += 1
        else:
            dcs.append(p.g.next_in_turn(p.order))
            in_turn += 1
    return dcs, by_carbon, in_turn
