"""What the optimising policies ask of a solver, in numbers worked by hand: costs, feasible pairs, headroom, openings."""

import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.batch import Batch
from jaxserve.engine.control import View
from jaxserve.perf.power import DecodeEnergy
from jaxserve.policies.estimate import energy_j, headroom, marginal_energy_j
from jaxserve.policies.formulations import AbstractFormulation, FacilityMilp, GreenLlm, Ilp, IterativeIlp
from jaxserve.solvers.problem import AssignmentProblem
from tests.views import J_PER_KWH, ROUNDED, as_arrays, batch_of, fleet_with, t_dec, t_pre, view_of

FAR = {"rtt_s": 9.0}
MEANS = (4.0, 16.0, 2.0)


@eqx.filter_jit
def _ask(formulation: AbstractFormulation, view: View, batch: Batch, placed: Any) -> AssignmentProblem:
    return formulation.problem(view, batch, placed)


def ask(formulation: AbstractFormulation, view: View, batch: Batch, placed: list[int] | None = None) -> AssignmentProblem:
    """The problem, compiled; `placed` for the requests there are, blank places after them."""
    placed = placed or []
    where = jnp.array(placed + [-1] * (batch.isl.shape[0] - len(placed)), jnp.int32)
    return _ask(as_arrays(formulation), *as_arrays((view, batch)), where)


def joules(isl: float, osl: float, b: float, q: float) -> float:
    """E by the letter of the page."""
    return 8.0 / (1.0 + q) + 0.5 * isl + 0.25 * isl**2 + osl * (4.0 / (b + 1.0) + 1.0 + 0.5 * (isl + osl / 2.0))


def assert_costs(problem: AssignmentProblem, wanted_g: list[list[float]]) -> None:
    """Costs of the requests there are."""
    np.testing.assert_allclose(problem.cost[: len(wanted_g)], np.array(wanted_g) / J_PER_KWH, rtol=ROUNDED)


def test_energy_of_a_request() -> None:
    """isl 4, osl 2. With 1 running and 12/4 queued: 8/4 + 2 + 4 + 2 * (4/2 + 1 + 0.5*5) = 19; alone: 8 + 6 + 2 * (4 + 3.5) = 29.

    What the scheduler has sent itself is in B, and in Q, which no energy knows; marginal: 6 + 2 * 3.5 = 13.
    """
    view = view_of(fleet_with(), [{"batch": 1.0, "queued_seen": 12.0, "queued_tokens": 20.0}, {}], MEANS)
    np.testing.assert_allclose(energy_j(view, jnp.float64(4.0), jnp.float64(2.0)), [19.0, 29.0], rtol=ROUNDED)
    np.testing.assert_allclose(marginal_energy_j(view.fleet, jnp.float64(4.0), jnp.float64(2.0)), 13.0, rtol=ROUNDED)
    assert [joules(4.0, 2.0, 1.0, 3.0), joules(4.0, 2.0, 0.0, 0.0)] == [19.0, 29.0]


def test_energy_of_a_request_below_and_above_a_knee() -> None:
    """3 J a request up to 2 of them, then 1 J: of a step's 4 + 3*B J or 8 + 1*(B - 2) J, 1 J a request is its own, 6 J or 8 J are shared.

    isl 4, osl 2, alone: 8 + 6 + 2 * (6/1 + 1 + 0.5*5); as the sixth: 14 + 2 * (8/6 + 3.5).
    """
    fleet = fleet_with(decode_energy=DecodeEnergy(4.0, 1.0, 0.5, 3.0, 2.0))
    assert [float(fleet.decode_energy(b, 0.0)) for b in (1.0, 2.0, 6.0)] == [7.0, 10.0, 14.0]
    view = view_of(fleet, [{}, {"batch": 5.0}], MEANS)
    np.testing.assert_allclose(energy_j(view, jnp.float64(4.0), jnp.float64(2.0)), [33.0, 21.0 + 8.0 / 3.0], rtol=ROUNDED)
    # Waking an engine costs what is shared by one: 8 + 2 * 6 J, here at 1 s of no idle power.
    opening = ask(FacilityMilp.of(), view_of(fleet, [{}], MEANS), batch_of([4.0], [2.0])).opening
    np.testing.assert_allclose(opening, 100.0 * 20.0 / J_PER_KWH, rtol=ROUNDED)


def test_headroom() -> None:
    """floor(N * (4 - B - q)), not below 0: 3*4; 3 * (4 - 0.5 - 2/4); floor(3 * (4 - 0.75)); full; over-full."""
    rows = [{}, {"batch": 0.5, "queued_seen": 2.0, "queued_tokens": 900.0}, {"batch": 0.75}, {"batch": 3.0, "queued_seen": 4.0}]
    view = view_of(fleet_with(), [row | {"engines": 3.0} for row in [*rows, {"batch": 7.0}]], MEANS)
    assert headroom(view).tolist() == [12.0, 9.0, 9.0, 0.0, 0.0]


@pytest.mark.parametrize("engines", [3, 7, 39])
def test_headroom_is_whole_where_thirds_are_not(engines: int) -> None:
    """What n running requests and one sent leave of 40 places an engine, whatever n/N is rounded to."""
    running = np.arange(40 * engines)
    rows = [{"batch": n / engines + 1.0 / engines, "engines": float(engines)} for n in running]
    view = view_of(fleet_with(batch_capacity=40.0), rows, MEANS)
    np.testing.assert_array_equal(headroom(view), 40 * engines - running - 1)


class TestIlp:
    VIEW = view_of(
        fleet_with(batch_capacity=10.0),
        [{"batch": 1.0, "queued_seen": 12.0, "queued_tokens": 12.0, "engines": 2.0}, {"ci": 50.0, "pue": 2.0} | FAR, {"ci": 0.0}],
        MEANS,
    )

    def test_by_hand(self) -> None:
        """Two requests, (4, 2) and (2, 4): 19 and 2 + 2 + 4 * (2 + 1 + 2) = 24 J at the first DC, 29 and 8 + 2 + 4 * (4 + 3) = 38 else."""
        problem = ask(Ilp(), self.VIEW, batch_of([4.0, 2.0], [2.0, 4.0]))
        assert_costs(problem, [[1900.0, 2900.0, 0.0], [2400.0, 3800.0, 0.0]])
        assert np.asarray(problem.feasible).tolist() == [[True, False, True]] * 2 + [[False] * 3] * 4  # blank places are not in it
        assert (problem.capacity.tolist(), problem.opening.tolist()) == ([12.0, 10.0, 10.0], [0.0] * 3)

    def test_first_solve_of_the_iterative_one(self) -> None:
        batch = batch_of([4.0, 2.0], [2.0, 4.0])
        for mine, theirs in zip(vars(ask(IterativeIlp(3), self.VIEW, batch)).values(), vars(ask(Ilp(), self.VIEW, batch)).values()):
            np.testing.assert_array_equal(mine, theirs)


class TestIterativeIlp:
    def test_each_sees_the_others_where_they_were_placed(self) -> None:
        """Requests of 4, 2 and 6 tokens, the first two placed at a DC of 2 engines, which runs 1 an engine, the third at one of 1.

        At the first DC the others of the first two are 1/2 request, for the third they are 2/2; at the second DC 1, 1 and none.
        """
        rows = [{"batch": 1.0, "queued_seen": 8.0, "queued_tokens": 9.0, "engines": 2.0}, {"ci": 200.0}, {"ci": 50.0}]
        view = view_of(fleet_with(), rows, MEANS)
        batch = batch_of([4.0, 2.0, 6.0], [2.0, 4.0, 3.0])
        problem = ask(IterativeIlp(3), view, batch, [0, 0, 1])
        others = [[0.5, 1.0, 0.0], [0.5, 1.0, 0.0], [1.0, 0.0, 0.0]]
        wanted = [
            [100.0 * joules(isl, osl, 1.0 + o[0], 2.0), 200.0 * joules(isl, osl, o[1], 0.0), 50.0 * joules(isl, osl, o[2], 0.0)]
            for isl, osl, o in zip((4.0, 2.0, 6.0), (2.0, 4.0, 3.0), others, strict=True)
        ]
        assert_costs(problem, wanted)
        assert problem.capacity.tolist() == [2.0, 4.0, 4.0]  # 2 * (4 - 1 - 8/4): as before the window

    @pytest.mark.parametrize(("dc", "request_"), [(0, 0), (0, 2), (1, 1), (1, 2)])
    @pytest.mark.parametrize("budget", ["slo_ttft_s", "slo_tpot_s"])
    def test_queue_and_cache_grow_too(self, dc: int, request_: int, budget: str) -> None:
        """Feasible just where the estimate with the others' tokens, shared out over engines, says so."""
        isl, osl, engines = (400.0, 200.0, 600.0), (2.0, 4.0, 3.0), (2.0, 1.0)
        placed, running = [0, 0, 1], (1.0, 0.0)
        mine = [r for r, d in enumerate(placed) if d == dc and r != request_]
        b, tokens = running[dc] + len(mine) / engines[dc], sum(isl[r] for r in mine) / engines[dc]
        at = {"batch": b, "queued_tokens": 30.0 + tokens, "queued_seen": 30.0, "cached": 500.0 + tokens}
        q, means = 30.0 / 300.0, (300.0, 1e5, 5.0)
        wait = max(0.0, b + q + 1.0 - 4.0) * 5.0 * t_dec(max(b, 1.0), at["cached"]) / 4.0
        ttft_s = wait + t_pre(isl[request_] + at["queued_tokens"], 1.0 + q, isl[request_] ** 2 + q * 1e5)
        waiting_s = t_pre(at["queued_tokens"], q, q * 1e5) / osl[request_]
        tpot_s = t_dec(b + 1.0, at["cached"] + isl[request_]) + waiting_s
        edge = {"slo_ttft_s": ttft_s, "slo_tpot_s": tpot_s}[budget]
        rows = [{"queued_tokens": 30.0, "queued_seen": 30.0, "cached": 500.0, "engines": n, "batch": r} for n, r in zip(engines, running)]
        for slack, within in ((1 + 1e-9, True), (1 - 1e-9, False)):
            budgets = {"slo_ttft_s": 1e9, "slo_tpot_s": 1e9} | {budget: edge * slack}
            view = view_of(fleet_with(**budgets), [*rows, {}], means)  # the third DC serves everything: no request keeps its DC
            problem = ask(IterativeIlp(3), view, batch_of(list(isl), list(osl)), placed)
            assert bool(problem.feasible[request_, dc]) is within and bool(problem.feasible[request_, 2])

    def test_a_request_left_with_no_feasible_dc_keeps_its_own(self) -> None:
        """A decode step of two is over the budget, and the other DCs are too far: both stay, and nothing else is open to them."""
        fleet = fleet_with(slo_tpot_s=0.0125)  # t_dec(1, 4) = 0.012144, t_dec(2, 6) = 0.014441
        view, batch = view_of(fleet, [{}, FAR, FAR], MEANS), batch_of([4.0, 2.0], 2.0)
        assert ask(IterativeIlp(3), view, batch).feasible[:2].tolist() == [[True, False, False]] * 2
        assert ask(IterativeIlp(3), view, batch, [0, 0]).feasible.tolist() == [[True, False, False]] * 2 + [[False] * 3] * 4
        # With one near DC more, both flee to it; one that was in no earlier solve is in none.
        view = view_of(fleet, [{}, {}, FAR], MEANS)
        assert ask(IterativeIlp(3), view, batch, [0, 0]).feasible[:2].tolist() == [[False, True, False]] * 2
        assert ask(IterativeIlp(3), view, batch, [0, -1]).feasible[:2].tolist() == [[True, True, False], [False] * 3]

    def test_a_dc_that_is_not_open_serves_nobody(self) -> None:
        """The same two requests with a near DC more that is not open to them: they do not flee to it, but keep their own."""
        batch = eqx.tree_at(lambda b: b.open, batch_of([4.0, 2.0], 2.0), jnp.array([True, False, False]))
        view = view_of(fleet_with(slo_tpot_s=0.0125), [{}, {}, FAR], MEANS)
        assert ask(IterativeIlp(3), view, batch).feasible[:2].tolist() == [[True, False, False]] * 2
        assert ask(IterativeIlp(3), view, batch, [0, 0]).feasible[:2].tolist() == [[True, False, False]] * 2


class TestFacilityMilp:
    """Four requests, all but the last of which two DCs can serve; the last is too long for any. 3, 2 and 2 engines, 0, 0.75, 2 running."""

    ROWS = ({"engines": 3.0}, {"engines": 2.0, "batch": 0.75, "ci": 50.0, "pue": 1.5}, {"engines": 2.0, "batch": 2.0} | FAR)
    ISL, OSL = (4.0, 2.0, 6.0, 900.0), (2.0, 4.0, 3.0, 1.0)
    MEANS = (3.0, 9.0, 2.0)

    def asked(self, isl: tuple[float, ...] = ISL, osl: tuple[float, ...] = OSL, idle_w: float = 100.0, **names: Any) -> AssignmentProblem:
        return ask(
            FacilityMilp.of(**names), view_of(fleet_with(idle_w=idle_w), list(self.ROWS), self.MEANS), batch_of(list(isl), list(osl))
        )

    @pytest.mark.parametrize(
        ("names", "woken"),
        [
            # 3 requests over 2 DCs are 1.5 a DC; no more than are empty: 3 * 1, 2 * 0.25, 0.
            ({}, [1.5, 0.5, 0.0]),
            ({"idle_share": "exp"}, [1.5, 2 * math.exp(-0.75), 2 * math.exp(-2.0)]),
            ({"variant": "f_const"}, [1.0, 1.0, 1.0]),
            ({"variant": "f_const", "idle_share": "exp"}, [1.0, 1.0, 1.0]),
            ({"variant": "c_full"}, [1.5, 0.5, 0.0]),
        ],
    )
    def test_openings(self, names: dict[str, Any], woken: list[float]) -> None:
        """An engine woken: 8 + 2 * (4 - 100 W * t_dec(1, 3 + 2/2)) J, at the DC's PUE and CI."""
        waking_j = 8.0 + 2.0 * (4.0 - 100.0 * 0.012144)
        wanted = np.array([100.0, 75.0, 100.0]) * woken * waking_j / J_PER_KWH
        problem = self.asked(**names)
        np.testing.assert_allclose(problem.opening, wanted, rtol=ROUNDED)
        assert problem.feasible.tolist() == [[True, True, False]] * 3 + [[False] * 3] * 3
        assert problem.capacity.tolist() == [12.0, 6.0, 4.0]

    def test_costs(self) -> None:
        """Marginal, or the ILP's."""
        requests = list(zip(self.ISL[:3], self.OSL[:3], strict=True))
        marginal = [0.5 * isl + 0.25 * isl**2 + osl * (1.0 + 0.5 * (isl + osl / 2.0)) for isl, osl in requests]
        assert marginal[0] == 13.0
        assert_costs(self.asked(), [[100.0 * j, 75.0 * j, 100.0 * j] for j in marginal])
        assert_costs(self.asked(variant="f_const"), [[100.0 * j, 75.0 * j, 100.0 * j] for j in marginal])
        full = [[100.0 * joules(*r, 0.0, 0.0), 75.0 * joules(*r, 0.75, 0.0), 100.0 * joules(*r, 2.0, 0.0)] for r in requests]
        assert_costs(self.asked(variant="c_full"), full)

    def test_no_more_than_one_engine_for_few_requests(self) -> None:
        """One request over two DCs wakes one engine all the same; where none can be served, nothing is divided by nothing."""
        one_engine_j = 8.0 + 2.0 * (4.0 - 100.0 * 0.012144)
        for isl in ((4.0,), (900.0,)):
            wanted = np.array([100.0, 75.0 * 0.5, 0.0]) * one_engine_j / J_PER_KWH
            np.testing.assert_allclose(self.asked(isl, (2.0,)).opening, wanted, rtol=ROUNDED)

    def test_waking_costs_nothing_where_idling_costs_more(self) -> None:
        assert self.asked(idle_w=1e4).opening.tolist() == [0.0] * 3


def test_green_llm() -> None:
    """Energies of a request alone, whatever the load: 29 J and 8 + 4 + 16 + 4 * (4 + 1 + 0.5 * 10) = 68 J. A mean request of 4 + 2 tokens
    takes v = 0.0065 s a token, so 6 tokens have 4.96 s for the way and 12 have 4.92; the SLO counts for nothing, the headroom does.
    """
    v = (t_pre(4.0, 1.0, 16.0) + 2.0 * t_dec(1.0, 4.0)) / 6.0
    rows = [{"batch": 3.0, "queued_seen": 2.0, "engines": 2.0}, {"ci": 50.0, "pue": 1.5, "rtt_s": 5.0 - 7.0 * v}, {"rtt_s": 5.0 - 5.0 * v}]
    problem = ask(GreenLlm(), view_of(fleet_with(slo_ttft_s=1e-6), rows, MEANS), batch_of([4.0, 8.0], [2.0, 4.0]))
    assert_costs(problem, [[2900.0, 75.0 * 29.0, 2900.0], [6800.0, 75.0 * 68.0, 6800.0]])
    assert problem.feasible.tolist() == [[True, True, False], [True, False, False]] + [[False] * 3] * 4
    assert (problem.capacity.tolist(), problem.opening.tolist()) == ([1.0, 4.0, 4.0], [0.0] * 3)


def test_the_fallback_of_green_llm_keeps_to_the_slo() -> None:
    """Nothing keeps the deadline of 5 s; the budgets of TTFT and TPOT are kept where the way is short, of rows that are requests."""
    far = [{"rtt_s": 6.0}, {"rtt_s": 8.0}, {"rtt_s": 6.0}]
    view, batch = view_of(fleet_with(slo_ttft_s=7.0, slo_tpot_s=1.0), far, MEANS), batch_of([4.0, 8.0], [2.0, 4.0])
    problem = ask(GreenLlm(), view, batch)
    assert not np.any(problem.feasible)
    kept = GreenLlm().keeps_slo(view, batch, problem)
    assert kept.tolist() == [[True, False, True]] * 2 + [[False] * 3] * 4
    assert Ilp().keeps_slo(view, batch, problem) is problem.feasible
