"""Plan policies: the shares of each DC, fixed for a period at its start from the grid and the forecast, before the run begins.

The forecast is perfect: the arrivals of the period itself (our definition; the originals predict them).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxserve.engine.lane import Requests
from jaxserve.engine.model import Fleet
from jaxserve.policies.formulations import GREEN_LLM_DEADLINE_S
from jaxserve.policies.weighted import PlannedShares
from jaxserve.types import on_host

Floats = NDArray[np.float64]

FREESH_PERIOD_S = 1800.0
FREESH_MARGIN = 1.1
"""Capacity over predicted load (arXiv 2511.00807)."""
GREEN_LLM_PERIOD_S = 3600.0
KEPT = 1.001
"""How far a later phase may give up an earlier one's optimum (arXiv 2507.09942)."""

SLACK = 1e-9
"""Keeps an optimum of zero reachable for the next phase."""


@dataclass(frozen=True)
class Outlook:
    """What is known of a run before it begins."""

    sites: tuple[str, ...]  # names of the DCs
    fleet: Fleet
    requests: Requests
    ci: Callable[[Floats], Floats]  # times [n] s -> [n, D] g/kWh
    horizon_s: float
    measured: bool  # whether the wall time of solvers delays decisions


@dataclass(frozen=True)
class Load:
    """The requests of one period, by scheduler."""

    rate: Floats  # [G] requests a second
    isl: float  # mean tokens
    isl2: float  # mean of isl^2
    osl: float  # mean tokens


def freesh(outlook: Outlook) -> PlannedShares:
    """FREESH's first layer (arXiv 2511.00807, our port): the engines n_d <= N_d to be active for the next 30 minutes, so that they serve
    1.1 times the load with the least sum of CI*PUE*n. Requests go to DCs in proportion to n_d. With engines of one kind the cleanest
    DCs fill up first. Idle engines stay powered, and there is no frequency scaling.
    """
    fleet = outlook.fleet
    engines = np.asarray(fleet.dc_engines)
    shares = []
    for load, ci in _periods(outlook, FREESH_PERIOD_S):
        wanted = min(math.ceil(FREESH_MARGIN * load.rate.sum() / engine_rate(fleet, load)), engines.sum())
        order = np.argsort(ci * np.asarray(fleet.pue), kind="stable")
        before = np.concatenate([[0], np.cumsum(engines[order])[:-1]])
        active = np.empty(len(engines))
        active[order] = np.clip(max(wanted, 1) - before, 0, engines[order])
        shares.append(np.tile(active, (fleet.n_schedulers, 1)))
    return _planned(fleet, shares, FREESH_PERIOD_S)


def engine_rate(fleet: Fleet, load: Load) -> float:
    """mu: the most requests a second that an engine serves within the SLO, all of mean lengths, at a steady batch B <= batch_capacity.

    An engine works mu*(t_pre + osl*t_dec(B, K)/B) = 1 of the time, K = B*(isl + osl/2), and TPOT = t_dec/(1 - mu*t_pre).
    Where no batch keeps the SLO, the rate at B = 1.
    """
    batch = np.arange(1.0, float(fleet.batch_capacity) + 1.0)
    prefill_s = float(fleet.prefill_time(load.isl, 1.0, load.isl2))
    decode_s = np.asarray(fleet.decode_time(on_host(batch), on_host(batch * (load.isl + load.osl / 2.0))))
    rate = 1.0 / (prefill_s + load.osl * decode_s / batch)
    within = (decode_s / (1.0 - rate * prefill_s) <= float(fleet.slo_tpot_s)) & (prefill_s <= float(fleet.slo_ttft_s))
    return float(rate[within].max()) if within.any() else float(rate[0])


def green_llm_lp(outlook: Outlook) -> PlannedShares:
    """The authors' Green-LLM (arXiv 2507.09942): hour by hour the shares of each scheduler's load by DC, lexicographically with the least
    carbon, then delay, then energy, each phase within 0.1 % of the optima before it. Many plans are left, and which of them a solver of
    linear programs returns is chance; so a last phase takes the most even one (our definition): the least sum over schedulers and DCs of
    load^2 over the DC's capacity, which only one plan has. Where all DCs are alike, loads go by capacity.

    Of their constraints stand here: all load placed, a token budget by DC and hour (the engines' batch limit times its throughput), and the
    deadline of mean delay, unless a mean request outlasts it even by itself, wherever it goes: then it does not bind. Water, renewables,
    prices and grid limits have no data in a scenario. One type of query a scheduler and hour.
    """
    import cvxpy as cp  # takes a second to load, and most runs have no such plan

    from jaxserve.solvers.highs import quiet_highs

    quiet_highs()
    fleet = outlook.fleet
    rtt, pue = np.asarray(fleet.rtt_s), np.asarray(fleet.pue)
    shares = []
    for load, ci in _periods(outlook, GREEN_LLM_PERIOD_S):
        batch = float(fleet.batch_capacity)
        full_s = float(fleet.decode_time(batch, batch * (load.isl + load.osl / 2.0)))
        prefill_s = float(fleet.prefill_time(load.isl, 1.0, load.isl2))
        capacity = np.asarray(fleet.dc_engines) * batch / (load.osl * full_s + batch * prefill_s)  # requests a second
        unloaded_s = prefill_s + load.osl * float(fleet.decode_time(1.0, load.isl))
        x = cp.Variable(rtt.shape, nonneg=True)  # load from scheduler g to DC d, as a share of all load
        total = load.rate.sum() or 1.0
        by_dc, rate, room = cp.sum(x, axis=0), load.rate / total, capacity / total
        delay = cp.sum(cp.multiply(rtt + unloaded_s, x), axis=1)
        within = [cp.sum(x, axis=1) == rate, by_dc <= room]
        if unloaded_s <= GREEN_LLM_DEADLINE_S:
            within.append(delay <= GREEN_LLM_DEADLINE_S * rate)
        planned = np.tile(capacity, (len(rtt), 1))  # more load than the budgets hold is spread as they are
        evenly = cp.sum_squares(cp.multiply(x, np.tile(np.sqrt(room.sum() / room), (len(rtt), 1))))
        phases = by_dc @ (pue * ci / (np.abs(pue * ci).max() or 1.0)), cp.sum(delay), by_dc @ pue, evenly
        for objective in phases:
            problem = cp.Problem(cp.Minimize(objective), within)
            try:
                problem.solve(solver=cp.CLARABEL if objective is evenly else cp.HIGHS)
            except cp.SolverError:
                break
            if problem.status != cp.OPTIMAL:
                break
            planned = np.where(rate[:, None] > 0, np.maximum(np.asarray(x.value), 0.0), 0.0)
            best = float(problem.value)  # type: ignore[arg-type]
            within = [*within, objective <= best + (KEPT - 1.0) * abs(best) + SLACK]
        shares.append(planned)
    return _planned(fleet, shares, GREEN_LLM_PERIOD_S)


def _periods(outlook: Outlook, period_s: float) -> list[tuple[Load, Floats]]:
    """Load of each period and CI [D] at its start. A period without arrivals takes the means of all; there is none without any."""
    r, groups = outlook.requests, outlook.fleet.n_schedulers
    if not len(r.arrival_s):
        return []
    osl = r.osl if r.osl_believed is None else r.osl_believed
    starts = np.arange(max(1, math.ceil(outlook.horizon_s / period_s - 1e-9)), dtype=np.float64) * period_s
    edges = np.searchsorted(r.arrival_s, [*starts, np.inf])
    periods = []
    for i, (start, ci) in enumerate(zip(starts, outlook.ci(starts), strict=True)):
        mine = slice(edges[i], edges[i + 1]) if edges[i + 1] > edges[i] else slice(None)
        isl = r.isl[mine].astype(np.float64)
        seconds = min(period_s, outlook.horizon_s - start)
        rate = np.bincount(r.scheduler[edges[i] : edges[i + 1]], minlength=groups) / seconds
        periods.append((Load(rate, float(isl.mean()), float((isl**2).mean()), float(osl[mine].mean())), ci))
    return periods


def _planned(fleet: Fleet, shares: list[Floats], period_s: float) -> PlannedShares:
    """Shares [G, D] of each period, turned into each scheduler's own order; without load they are even."""
    table = np.stack(shares or [np.zeros(fleet.rtt_s.shape)])
    table = np.where(table.sum(axis=-1, keepdims=True) > 0, table, 1.0)
    table = np.take_along_axis(table, np.asarray(fleet.order)[None], axis=-1)
    return PlannedShares(shares=on_host(table / table.sum(axis=-1, keepdims=True)), period_s=np.float64(period_s))
