"""The plans behind planned shares, against brute force over engines, a plain loop over batches and a linear program of another make."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import cvxpy
import numpy as np
import pytest
from scipy.optimize import linprog, minimize

from jaxserve.engine.lane import Requests
from jaxserve.engine.model import Fleet
from jaxserve.policies.plans import Load, Outlook, engine_rate, freesh, green_llm_lp
from jaxserve.policies.weighted import PlannedShares
from tests.parity.bridge import orders
from tests.views import ROUNDED, fleet_with, t_dec, t_pre

SOLVED = 1e-6
"""What two solvers of linear programs, each feasible and optimal to 1e-7, may differ by."""
ISL, OSL = 400, 50
ENGINES = (3, 2, 4)
CI = (100.0, 200.0, 150.0)


def fleet_of_plan(**changes: object) -> Fleet:
    """Three DCs of 3, 2 and 4 engines; two schedulers, the second of which calls the second DC its first."""
    usual = {"dc_engines": np.array(ENGINES, np.int32), "pue": np.array([1.0, 1.1, 1.2])}
    usual |= orders([0, 1], 3)
    usual |= {"rtt_s": np.array([[0.0, 0.1, 0.2], [0.1, 0.0, 0.2]])}
    return dataclasses.replace(fleet_with(slo_tpot_s=0.3, batch_capacity=8.0), **usual | changes)


def outlook(
    counts: list[tuple[float, int, int]],
    ci: Callable[[float], tuple[float, ...]] | tuple[float, ...] = CI,
    fleet: Fleet | None = None,
    horizon_s: float = 100.0,
    believed: float | None = None,
) -> Outlook:
    """`counts` (time, requests of the first scheduler, of the second): requests of 400 + 50 tokens that arrive at that time."""
    rows = [(t, g) for t, *each in counts for g, n in enumerate(each) for _ in range(n)]
    arrival_s, scheduler = np.array([t for t, _ in rows]), np.array([g for _, g in rows], int)
    ones = np.ones(len(rows), np.int32)
    requests = Requests(arrival_s, arrival_s, ISL * ones, OSL * ones, scheduler, None if believed is None else believed * ones)
    grams = ci if callable(ci) else lambda _: ci
    return Outlook(("a", "b", "c"), fleet or fleet_of_plan(), requests, lambda t: np.array([grams(x) for x in t]), horizon_s, False)


def by_dc(plan: PlannedShares, fleet: Fleet | None = None) -> np.ndarray:
    """Shares [P, G, D] by number of the DC; those of a scheduler add up to 1."""
    shares = np.array(plan.shares)
    np.testing.assert_allclose(shares.sum(axis=-1), 1.0, rtol=ROUNDED)
    place = np.asarray((fleet or fleet_of_plan()).place)
    return np.take_along_axis(shares, place[None], axis=-1)


def rate_by_the_page(isl: float, isl2: float, osl: float, capacity: int, ttft_s: float, tpot_s: float) -> float:
    """The most requests a second of an engine within the budgets, batch after batch; that of a batch of one where none is."""
    found = []
    for batch in range(1, capacity + 1):
        step_s, prefill_s = t_dec(batch, batch * (isl + osl / 2)), t_pre(isl, 1, isl2)
        rate = 1 / (prefill_s + osl * step_s / batch)
        if batch == 1:
            alone = rate
        if step_s / (1 - rate * prefill_s) <= tpot_s and prefill_s <= ttft_s:
            found.append(rate)
    return max(found, default=alone)


@pytest.mark.parametrize("lengths", [(400.0, 2e5, 50.0), (40.0, 1600.0, 200.0), (900.0, 8.1e5, 1.0)])
@pytest.mark.parametrize("budgets", [(1e9, 1e9), (1e9, 0.05), (1e9, 0.02), (1e9, 1e-3), (0.1, 1e9)])
def test_rate_of_an_engine(lengths: tuple[float, float, float], budgets: tuple[float, float]) -> None:
    fleet = fleet_with(batch_capacity=40.0, slo_ttft_s=budgets[0], slo_tpot_s=budgets[1])
    isl, isl2, osl = lengths
    got = engine_rate(fleet, Load(np.ones(2), isl, isl2, osl))
    assert got == pytest.approx(rate_by_the_page(isl, isl2, osl, 40, *budgets), rel=ROUNDED)


RATE = rate_by_the_page(ISL, ISL**2, OSL, 8, 1.0, 0.3)


class TestFreesh:
    @pytest.mark.parametrize("n", [1, 40, 85, 170, 300, 430, 520, 640, 720, 2000])
    @pytest.mark.parametrize("ci", [CI, (300.0, 10.0, 20.0), (0.0, 90.0, 80.0)])
    def test_by_brute_force(self, n: int, ci: tuple[float, ...]) -> None:
        """Requests go to DCs in proportion to the engines of the cheapest choice that carries 1.1 times the load, or to all engines."""
        pue, needed = (1.0, 1.1, 1.2), 1.1 * n / 100.0
        choices = [c for c in itertools.product(*(range(m + 1) for m in ENGINES)) if sum(c) * RATE >= needed] or [ENGINES]
        least = min(choices, key=lambda c: (sum(c), sum(m * g * p for m, g, p in zip(c, ci, pue))))
        cheapest = min(sum(m * g * p for m, g, p in zip(c, ci, pue)) for c in choices)
        assert sum(m * g * p for m, g, p in zip(least, ci, pue)) == pytest.approx(cheapest, rel=ROUNDED)  # fewest is cheapest too
        shares = by_dc(freesh(outlook([(1.0, n // 2, n - n // 2)], ci)))
        np.testing.assert_allclose(shares, np.broadcast_to(np.array(least) / sum(least), (1, 2, 3)), rtol=ROUNDED)

    def test_half_hours(self) -> None:
        """A period of its own CI and load each; one without requests keeps one engine, and half a period counts as half."""

        def ci(t: float) -> tuple[float, ...]:
            return {0.0: (1.0, 9.0, 9.0), 1800.0: (9.0, 1.0, 9.0), 3600.0: (9.0, 9.0, 1.0), 5400.0: (1.0, 9.0, 9.0)}[t]

        five, two = (int(m * RATE * seconds / 1.1) for m, seconds in ((5, 1800.0), (2, 900.0)))
        plan = freesh(outlook([(1799.0, five, 0), (3600.0, 1, 0), (5400.0, 0, two)], ci, horizon_s=6300.0))
        assert float(plan.period_s) == 1800.0
        wanted = [(3 / 5, 2 / 5, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (1.0, 0.0, 0.0)]
        np.testing.assert_allclose(by_dc(plan), np.repeat(wanted, 2, axis=0).reshape(4, 2, 3), rtol=ROUNDED)
        assert freesh(outlook([(0.0, 1, 0)], horizon_s=1800.0)).shares.shape == (1, 2, 3)

    def test_the_load_is_what_schedulers_believe(self) -> None:
        shares = [by_dc(freesh(outlook([(0.0, 200, 200)], believed=x))) for x in (None, 50.0, 400.0)]
        np.testing.assert_array_equal(shares[0], shares[1])
        assert shares[2][0, 0, 0] < shares[0][0, 0, 0] < 1.0  # longer outputs need more engines beside those of the cleanest DC


def capacities() -> np.ndarray:
    """Requests a second of each DC: engines * batch limit * throughput a place."""
    full_s, prefill_s = t_dec(8.0, 8.0 * (ISL + OSL / 2)), t_pre(ISL, 1.0, ISL**2)
    return np.array(ENGINES) * 8.0 / (OSL * full_s + 8.0 * prefill_s)


def costs(fleet: Fleet, ci: tuple[float, ...]) -> list[np.ndarray]:
    """Carbon, delay and energy of a request a second from each scheduler to each DC [G, D], in the order of the phases."""
    pue, rtt = np.asarray(fleet.pue), np.asarray(fleet.rtt_s)
    carbon = pue * np.array(ci)
    unloaded_s = t_pre(ISL, 1.0, ISL**2) + OSL * t_dec(1.0, ISL)
    return [np.tile(carbon / max(carbon.max(), 1e-300), (2, 1)), rtt + unloaded_s, np.tile(pue, (2, 1))]


def lexicographic(rate: np.ndarray, fleet: Fleet, ci: tuple[float, ...]) -> tuple[list[float], np.ndarray]:
    """The three optima one after another, each kept within a thousandth, by SciPy's linear programs; and of all plans that keep them the
    most even one [G, D], by sequential quadratic programming.
    """
    phases, per_scheduler = costs(fleet, ci), np.kron(np.eye(2), np.ones(3))
    rows = [*np.tile(np.eye(3), 2), *(phases[1].ravel() * per_scheduler)]
    limits, found = [*capacities(), *(5.0 * rate)], []
    for cost in phases:
        answer = linprog(cost.ravel(), np.array(rows), limits, per_scheduler, rate)
        assert answer.status == 0
        rows, limits = [*rows, cost.ravel()], [*limits, 1.001 * answer.fun + 1e-9]
        found.append(float(answer.fun))
    matrix, most, weight = np.array(rows), np.array(limits), 1.0 / np.tile(capacities(), 2)
    even = minimize(
        lambda x: (weight * x * x).sum(),
        answer.x,
        jac=lambda x: 2 * weight * x,
        bounds=[(0, None)] * 6,
        constraints=[
            {"type": "eq", "fun": lambda x: per_scheduler @ x - rate, "jac": lambda x: per_scheduler},
            {"type": "ineq", "fun": lambda x: most - matrix @ x, "jac": lambda x: -matrix},
        ],
        method="SLSQP",
        options={"ftol": 1e-16, "maxiter": 1000},
    )
    return found, even.x.reshape(2, 3)


GREEN = [
    ((60, 40), CI, {}),  # the cleanest DC takes all, but for a thousandth that may be nearer elsewhere
    ((240, 160), CI, {}),  # it is full: the next takes the rest
    ((390, 0), CI, {}),
    ((150, 100), (90.0, 60.0, 55.0), {"rtt_s": np.array([[0.0, 8.0, 9.0], [8.0, 0.0, 9.0]])}),  # the deadline of mean delay binds
    ((150, 100), (132.0, 120.0, 110.0), {"rtt_s": np.zeros((2, 3))}),  # carbon and delay alike everywhere: energy decides
    ((240, 160), (0.0, 0.0, 0.0), {}),
    ((240, 160), (0.0, 0.0, 50.0), {}),
    ((150, 100), (100.0, 100.0, 100.0), {"rtt_s": np.zeros((2, 3)), "pue": np.ones(3)}),  # all alike
]


class TestGreenLlmLp:
    @pytest.mark.parametrize(("counts", "ci", "changes"), GREEN)
    def test_against_another_solver(self, counts: tuple[int, int], ci: tuple[float, ...], changes: dict[str, np.ndarray]) -> None:
        fleet, rate = fleet_of_plan(**changes), np.array(counts) / 100.0
        plan = green_llm_lp(outlook([(0.0, *counts)], ci, fleet))
        shares = by_dc(plan, fleet)
        assert (float(plan.period_s), shares.shape) == (3600.0, (1, 2, 3))
        x = shares[0] * rate[:, None]
        assert np.all(x.sum(axis=0) <= capacities() * (1 + SOLVED))
        carbon, delay, energy = costs(fleet, ci)
        assert np.all((delay * x).sum(axis=1) <= 5.0 * rate * (1 + SOLVED))
        best, even = lexicographic(rate, fleet, ci)
        assert (carbon * x).sum() <= 1.001 * best[0] + SOLVED
        assert (delay * x).sum() <= 1.001 * best[1] + SOLVED
        assert (energy * x).sum() <= 1.001 * best[2] + SOLVED
        np.testing.assert_allclose(x, even, atol=SOLVED * rate.sum())
        for g in np.flatnonzero(rate == 0):
            np.testing.assert_allclose(shares[0, g], 1 / 3, rtol=ROUNDED)

    @pytest.mark.parametrize(("counts", "ci", "changes"), GREEN[1:5])
    def test_no_chance_of_a_solver(self, counts: tuple[int, int], ci: tuple[float, ...], changes: Any, monkeypatch: Any) -> None:
        """An interior-point method ends in the middle of a face, the simplex method at one of its corners: the plan is the same."""
        given = outlook([(0.0, *counts)], ci, fleet_of_plan(**changes))
        usual = by_dc(green_llm_lp(given))
        monkeypatch.setattr(cvxpy, "HIGHS", cvxpy.CLARABEL)
        np.testing.assert_allclose(by_dc(green_llm_lp(given)), usual, atol=SOLVED)

    def test_equal_dcs_are_loaded_by_their_capacity(self) -> None:
        fleet = fleet_of_plan(rtt_s=np.zeros((2, 3)), pue=np.ones(3))
        shares = by_dc(green_llm_lp(outlook([(0.0, 150, 100)], (100.0, 100.0, 100.0), fleet)), fleet)
        np.testing.assert_allclose(shares, np.broadcast_to(np.array(ENGINES) / 9.0, (1, 2, 3)), atol=SOLVED)

    @pytest.mark.parametrize(
        ("counts", "changes"),
        [((700, 300), {}), ((10, 10), {"rtt_s": np.full((2, 3), 9.0)})],  # more than the budgets hold; too far for the deadline
    )
    def test_an_hour_without_a_plan_is_spread_as_the_budgets_are(self, counts: tuple[int, int], changes: dict[str, np.ndarray]) -> None:
        fleet = fleet_of_plan(**changes)
        shares = by_dc(green_llm_lp(outlook([(0.0, *counts)], fleet=fleet)), fleet)
        np.testing.assert_allclose(shares, np.broadcast_to(np.array(ENGINES) / 9.0, (1, 2, 3)), rtol=ROUNDED)

    def test_hours(self) -> None:
        """Each hour by its own CI; one without requests is dealt evenly."""

        def ci(t: float) -> tuple[float, ...]:
            return {0.0: (1.0, 9.0, 9.0), 3600.0: (9.0, 9.0, 1.0), 7200.0: (9.0, 1.0, 9.0)}[t]

        fleet = fleet_of_plan(rtt_s=np.zeros((2, 3)), pue=np.ones(3))
        shares = by_dc(green_llm_lp(outlook([(3599.9, 5, 5), (7200.0, 5, 5)], ci, fleet, horizon_s=7300.0)), fleet)
        np.testing.assert_allclose(shares[0], [[1.0, 0.0, 0.0]] * 2, atol=0.01)  # a thousandth of the carbon may go to energy
        np.testing.assert_allclose(shares[1], np.full((2, 3), 1 / 3), rtol=ROUNDED)
        np.testing.assert_allclose(shares[2], [[0.0, 1.0, 0.0]] * 2, atol=0.01)


@pytest.mark.parametrize("plan", [freesh, green_llm_lp])
def test_nothing_to_plan_for(plan: Callable[[Outlook], PlannedShares]) -> None:
    """A run may have all its requests rejected; its plan deals evenly what never comes."""
    np.testing.assert_allclose(by_dc(plan(outlook([]))), np.full((1, 2, 3), 1 / 3), rtol=ROUNDED)
