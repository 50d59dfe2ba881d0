"""The least carbon that any policy could have caused on the requests of a run: a lower bound by one who knows them all beforehand."""

import time
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import add
from typing import NamedTuple

import cvxpy as cp
import numpy as np
from numpy.typing import NDArray

from jaxserve.perf.shares import DecodeShares, Floats, Ints, PaddedPrefillShares, PrefillShares, Watts, known
from jaxserve.scenario.compile import Compiled
from jaxserve.solvers.highs import quiet_highs
from jaxserve.units import J_PER_KWH

RELAXATION = (
    "Bounded is carbon_with_drain_g. What hosts and idle engines draw between the warm-up and the horizon is fixed; a step there adds its "
    "energy less the idle energy of its time, a step in the warm-up nothing, a step after the horizon all its energy, at the carbon "
    "intensity of the last interval. Each request, those of the warm-up too, is served in one DC. Each of its tokens takes any time after "
    "the request's arrival (round trips, decisions, queues and the order of tokens cost nothing) and its share of the best step that it "
    "could be in: decode with any batch that max_num_seqs and the KV cache allow, prefill with any packing of prompts. In a slice of time "
    "the steps of a DC take no longer than its engines have; after the horizon there is no limit. Where SLOs are kept, those of the "
    "requests after the warm-up are: prefill ends within the TTFT budget of the arrival and decode within (OSL - 1) * TPOT after that."
)
"""What the bound takes for granted. All that it leaves out can only raise the carbon of a real policy."""

MOST_SLICES = 96
TABLE_FLOATS = 20_000_000
"""Most numbers in the table of prefill costs (slices * DCs * prompt lengths): with many lengths there are fewer slices."""
ROUNDING = 1e-9
"""Relative error that float64 sums over a run may have; it is taken off the bound."""


@dataclass(frozen=True)
class Hindsight:
    """What no policy can beat, in g CO2e of `carbon_with_drain_g`, and how it was found."""

    carbon_with_drain_g: float
    """No policy emits less."""
    slo_carbon_with_drain_g: float | None
    """No policy that keeps both budgets of all counted requests but the rejected emits less; None where the programme finds no way to."""
    fixed_g: float
    """Of hosts and idle power between warm-up and horizon: part of both bounds, and of every policy's carbon."""
    gap: float
    """By how much the programme is above the first bound, as a share: about what better prices of engine time could gain."""
    energy_j: float
    """J before PUE from the warm-up to the end of the drain, of the programme's placement; no bound: least carbon is not least energy."""
    drain_energy_j: float
    """J of that after the horizon."""
    placement: dict[str, float]
    """Share of the requests by DC in that placement; empty without requests."""
    slices: int
    wall_s: float
    relaxation: str = RELAXATION

    @property
    def note(self) -> str:
        """A sentence for people."""
        slo = self.slo_carbon_with_drain_g
        kept = "" if slo is None else f", and none that keeps all SLOs less than {slo:.6g} g"
        return (
            f"hindsight: no policy emits less than {self.carbon_with_drain_g:.6g} g with its drain{kept}; "
            f"{self.fixed_g:.6g} g of that is what hosts and idle engines draw whatever is done"
        )


class Programme(NamedTuple):
    """The answer of the linear programme, beyond what is fixed."""

    value_g: float
    price: Floats  # [S, D] g per engine-second
    horizon_j: float
    drain_j: float
    share: Floats  # [D] of the requests


def hindsight(compiled: Compiled) -> Hindsight:
    """Bound the carbon of all policies on a scenario.

    By weak duality: at any prices >= 0 of an engine-second in each slice and DC, the least cost of each request by itself, less the
    price of all engine time, is a lower bound. A linear programme over mean requests (HiGHS) finds good prices; the bound is then
    summed request by request in float64, so that no tolerance of the solver is in it.
    """
    began = time.perf_counter()
    relaxed = _Relaxation(compiled)
    programme, in_time = relaxed.programme(keep_slo=False), relaxed.programme(keep_slo=True)
    bound = relaxed.bound(programme.price if programme else 0.0 * relaxed.engine_s, keep_slo=False)
    # A run that keeps its SLOs is a run, so the first bound holds for it too.
    slo_bound = max(bound, relaxed.bound(in_time.price, keep_slo=True)) if in_time else None if relaxed.n else bound
    sites = [site.name for site in compiled.scenario.sites]
    return Hindsight(
        carbon_with_drain_g=bound,
        slo_carbon_with_drain_g=slo_bound,
        fixed_g=relaxed.fixed_g,
        gap=(relaxed.fixed_g + programme.value_g - bound) / abs(bound) if programme and bound else 0.0,
        energy_j=relaxed.fixed_j + (programme.horizon_j + programme.drain_j if programme else 0.0),
        drain_energy_j=programme.drain_j if programme else 0.0,
        placement=dict(zip(sites, programme.share.tolist(), strict=True)) if programme else {},
        slices=len(relaxed.engine_s),
        wall_s=time.perf_counter() - began,
    )


class _Relaxation:
    """S slices of the horizon and one after it; D data centres; n requests."""

    def __init__(self, c: Compiled) -> None:
        f, s, r, power = c.fleet, c.scenario, c.engine_requests, c.scenario.coefficients.power
        self.n, self.n_dc, self.isl, self.osl = len(r.isl), f.n_dc, r.isl, r.osl
        watts = Watts(power.idle_w_per_gpu * s.coefficients.setup.tp, power.max_w_per_gpu * s.coefficients.setup.tp)
        steps = f.prefill_time, f.prefill_energy, watts, r.isl, float(f.token_budget)
        self.prefill = PaddedPrefillShares(*steps) if f.padded else PrefillShares(*steps, bool(f.prefill_first))
        self.decode = DecodeShares(f.decode_time, f.decode_energy, watts, r.isl, r.osl, int(f.max_num_seqs), float(f.kv_capacity))
        self.length_of = np.searchsorted(self.prefill.lengths, r.isl).astype(np.int32)

        self.watts, self.idle_w = watts, watts.idle
        intervals = len(c.interval_windows) - 1
        edges_s = np.asarray(c.interval_windows * s.dispatch.window_s, np.float64)
        # What a run spends in the warm-up is not counted: a time in which nothing costs anything.
        counted = (c.interval_windows[:-1] >= c.warmup_windows)[:, None]
        g_per_j = np.where(counted, np.asarray(f.pue) * c.ci(edges_s[:-1]) / J_PER_KWH, 0.0)
        fixed_w = power.host_w * np.array([site.nodes for site in s.sites]) + self.idle_w * np.asarray(f.dc_engines)
        fixed_j = np.where(counted, np.diff(edges_s)[:, None] * fixed_w, 0.0)
        self.fixed_j, self.fixed_g = float(fixed_j.sum()), float((g_per_j * fixed_j).sum())

        # Slices are parts of an interval, or several. Where one holds several values of carbon per joule, the ends stand for all.
        most = max(1, min(MOST_SLICES, TABLE_FLOATS // (f.n_dc * max(1, len(self.prefill.lengths)))))
        parts = max(1, most // intervals)
        edges_s = np.interp(np.arange(intervals * parts + 1) / parts, np.arange(intervals + 1), edges_s)
        g_per_j = np.repeat(g_per_j, parts, axis=0)
        even = np.arange(0, len(g_per_j), -(-len(g_per_j) // most))
        changes = np.flatnonzero((np.diff(g_per_j, axis=0) != 0).any(axis=1)) + 1
        warm = parts * int(np.searchsorted(c.interval_windows, c.warmup_windows))
        first = np.unique(np.concatenate([even, [warm], changes if len(changes) <= most else even]))
        self.counted = (first >= warm)[:, None]  # [S, 1]
        ends = [np.minimum.reduceat(g_per_j, first), np.maximum.reduceat(g_per_j, first)]
        self.g_per_j = np.concatenate([np.stack(ends, axis=1), np.stack([g_per_j[-1:]] * 2, axis=1)])  # [S+1, 2, D]
        slice_s = edges_s[np.append(first, len(g_per_j))]
        self.engine_s = np.diff(slice_s)[:, None] * np.asarray(f.dc_engines)  # [S, D]
        # A step takes the place of idling, but not in the drain, where idle engines count for nothing.
        self.saved_w = np.append(np.full(len(first), self.idle_w), 0.0)[:, None, None]

        def last_before(times_s: Floats) -> NDArray[np.int32]:
            return (np.searchsorted(slice_s, times_s) - 1).astype(np.int32)

        self.first = (np.searchsorted(slice_s, r.arrival_s, side="right") - 1).astype(np.int32)
        # Nor are SLOs kept for requests of the warm-up.
        due_s: Floats = np.where(self.first >= np.searchsorted(first, warm), r.arrival_s + s.slo.ttft_s, np.inf)
        self.due = last_before(due_s), last_before(due_s + (r.osl - 1) * s.slo.tpot_s)

    def programme(self, keep_slo: bool) -> Programme | None:
        """The relaxation with each request a mean one, as a linear programme; None where it has no solution, or nothing to place."""
        if not self.n:
            return None
        slices, modes = len(self.engine_s), self._modes()
        saved_g = self.g_per_j * self.saved_w
        costs = [self.watts.least_cost(self.g_per_j, -saved_g, np.asarray(j), known(s)).min(axis=1) for _, j, s in modes]
        # Tolerances are absolute: requests are counted in those of a mean slice, costs and times in the largest.
        unit, gram, second = self.n / slices, max(float(np.abs(c).max()) for c in costs) or 1.0, float(self.engine_s.max())
        shape = slices + 1, self.n_dc
        work = [cp.Variable(shape, nonneg=True) for _ in modes]
        done = [_total([x for x, (phase, _, _) in zip(work, modes, strict=True) if phase == p]) for p in (0, 1)]
        busy = _total([(unit / second * s) * x[:-1] for x, (_, _, s) in zip(work, modes, strict=True)])
        capacity = busy <= cp.Constant(self.engine_s / second)
        rules = [capacity, cp.sum(done[0]) == slices, cp.sum(done[0], axis=0) == cp.sum(done[1], axis=0)]

        def by_then(at: Ints, tokens: Ints) -> Floats:
            counted = np.cumsum(np.bincount(at, weights=tokens, minlength=slices + 1))
            return slices * counted[:slices] / max(counted[-1], 1.0)

        for phase, due, tokens in zip(done, self.due, (self.isl, self.osl - 1), strict=True):
            so_far = cp.cumsum(phase[:-1] @ np.ones(self.n_dc))
            rules += [so_far <= by_then(self.first, tokens), *([so_far >= by_then(due, tokens)] if keep_slo else [])]
        paid = _total([cp.multiply(c / gram, x) for c, x in zip(costs, work, strict=True)])
        problem = cp.Problem(cp.Minimize(cp.sum(paid)), rules)
        quiet_highs()
        try:
            problem.solve(solver=cp.HIGHS, output_flag=False)
        except cp.SolverError:
            return None
        if problem.status not in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE):
            return None
        requests = [unit * np.asarray(x.value, dtype=np.float64) for x in work]
        drawn = [float(np.clip(j, self.watts.idle * s, self.watts.most * s)) for _, j, s in modes]
        return Programme(
            value_g=sum(float((c * x).sum()) for c, x in zip(costs, requests, strict=True)),
            price=np.maximum(np.asarray(capacity.dual_value, dtype=np.float64), 0.0) * (gram * unit / second),
            horizon_j=sum(
                float((self.counted * x[:-1]).sum()) * (j - self.idle_w * s) for x, j, (_, _, s) in zip(requests, drawn, modes, strict=True)
            ),
            drain_j=sum(j * float(x[-1].sum()) for x, j in zip(requests, drawn, strict=True)),
            share=sum((x.sum(axis=0) for x, (phase, _, _) in zip(requests, modes, strict=True) if not phase), np.zeros(self.n_dc)) / self.n,
        )

    def _modes(self) -> list[tuple[int, float, float]]:
        """(phase, J by the energy form, s) of a mean request: its prefill (0) in each kind of step, its decode (1) in promising batches."""
        weight, fitting = np.bincount(self.length_of) / self.n, slice(self.decode.fitting)
        j, s, tokens = self.decode.mean_j[fitting], self.decode.mean_s[fitting], self.decode.tokens / self.n
        worth = np.append(-self.idle_w, j[-1] / s[-1] * np.geomspace(0.1, 100.0, 7))[:, None]  # J that a second may be worth
        batches = np.unique(np.append((j + worth * s).argmin(axis=1), (j - self.idle_w * s).argmax()))
        phases = (self.prefill.joules @ weight, self.prefill.seconds @ weight), (tokens * j[batches], tokens * s[batches])
        return [(phase, float(j), float(s)) for phase, (js, ss) in enumerate(phases) for j, s in zip(js, ss, strict=True)]

    def bound(self, price: Floats, keep_slo: bool) -> float:
        """g that no policy beats, from prices [S, D] >= 0 of an engine-second."""
        g_per_s = np.append(price, np.zeros((1, self.n_dc)), axis=0)[:, None] - self.g_per_j * self.saved_w
        prefill_between, decode_between = self.prefill.least(self.g_per_j, g_per_s), self.decode.least(self.g_per_j, g_per_s)
        after, least_g = len(price), 0.0
        for begin, (low, high) in enumerate(pairwise(np.searchsorted(self.first, np.arange(after + 1)))):
            last = (after + 1) * self.due[0][low:high] + self.due[1][low:high] if keep_slo else np.full(high - low, (after + 2) * after)
            for both in np.unique(last).tolist():
                mine = low + np.flatnonzero(last == both)
                prefill, decode = prefill_between(begin, both // (after + 1) + 1), decode_between(begin, both % (after + 1) + 1)
                length, isl, generated = self.length_of[mine], self.isl[mine], self.osl[mine] - 1.0
                least = np.full(len(mine), np.inf)
                for d in _not_dominated(np.concatenate([prefill, decode], axis=1)):
                    # A request's contexts are equally spaced and costs concave in them: the mean of both ends is at most that of all.
                    ends = sum(np.interp(context, self.decode.contexts, decode[d]) for context in (isl + 1.0, isl + generated))
                    np.minimum(least, prefill[d][length] + generated * ends / 2, out=least)
                least_g += float(least.sum())
        time_g = float((price * self.engine_s).sum())
        return self.fixed_g + least_g - time_g - ROUNDING * (abs(self.fixed_g) + abs(least_g) + time_g)


def _total(terms: list[cp.Expression]) -> cp.Expression:
    return reduce(add, terms)


def _not_dominated(costs: Floats) -> list[int]:
    """Rows of costs [D, m] that are the lowest somewhere, perhaps with a few that are not; of equal rows one."""
    kept: list[int] = []
    for d in np.argsort(costs.mean(axis=1), kind="stable").tolist():
        if not any((costs[k] <= costs[d]).all() for k in kept):
            kept.append(d)
    return kept
