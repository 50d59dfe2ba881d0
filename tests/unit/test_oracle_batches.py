"""The reference's batch policies, against cases worked by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.oracle.assignment import assign, assign_and_open
from tests.oracle.batch_policies import J_PER_KWH, Problem, opening_g
from tests.oracle.estimates import Means, unloaded_s_per_token, waking_j
from tests.oracle.simulator import simulate
from tests.oracle.small_worlds import NO_DEC, NO_PRE, clean_and_dirty, request, scenario, scheduler, snapshot, two_dcs

ROUNDING = 1e-12  # of a handful of float64 operations


class TestAssignment:
    def test_second_best(self):
        cost = np.array([[1.0, 4.0, 9.0], [2.0, 3.0, math.inf]])
        assert assign(cost, [1, 1, 1]).dcs == [0, 1]
        # At 0 and 1 they cost 4, at 1 and 0 they cost 6; at 2 and 0, 11.
        assert (assign(cost, [1, 1, 1]).objective, assign(cost, [1, 1, 1]).margin) == (4.0, 2.0)
        assert (assign(cost, [2, 1, 0]).dcs, assign(cost, [2, 1, 0]).margin) == ([0, 0], 1.0)
        assert assign(cost[:1], [1, 0, 0]).margin == math.inf

    def test_none(self):
        assert assign(np.ones((3, 2)), [1, 1]) is None
        assert assign(np.array([[1.0, math.inf], [1.0, math.inf]]), [1, 5]) is None
        assert assign_and_open(np.ones((3, 2)), [1, 1], [0.0, 0.0]) is None

    def test_opening(self):
        cost = np.array([[1.0, 2.0], [1.0, 3.0]])
        assert assign_and_open(cost, [2, 2], [9.0, 0.0]).dcs == [1, 1]
        together = assign_and_open(cost, [2, 2], [2.5, 0.0])
        assert (together.dcs, together.objective, together.margin) == ([0, 0], 4.5, 0.5)  # at 1 they cost 5
        assert assign_and_open(cost, [1, 1], [9.0, 9.0]).dcs == [1, 0]


class TestIlp:
    def test_the_heavier_request_gets_the_clean_place(self):
        r = simulate(clean_and_dirty([(0.0, 2, 1), (0.0, 6, 1)], pue=[1.0, 1.5]))
        (batch,) = r.batches
        assert (r.dc, batch.status, batch.by_carbon, batch.in_turn) == ([1, 0], "optimal", 0, 0)
        assert batch.objective == pytest.approx((100 * 18 + 1.5 * 200 * 14) / J_PER_KWH, rel=ROUNDING)
        assert batch.margin == pytest.approx((100 * 14 + 300 * 18) / (100 * 18 + 300 * 14) - 1, rel=ROUNDING)

    def test_objective_takes_the_believed_length_and_the_engine_the_true_one(self):
        r = simulate(clean_and_dirty([(0.0, 2, 1)], believed_osl=[3.0]))
        assert r.batches[0].objective == pytest.approx(100 * (8 + 2 + 3 * 4) / J_PER_KWH, rel=ROUNDING)
        assert r.finish_s == [1.5]

    def test_slo_keeps_requests_from_a_dc(self):
        s = clean_and_dirty([(0.0, 2, 1), (0.0, 6, 1)], batch_capacity=8, rtt_s=[[1.0, 0.0]], own=[[1]], slo_ttft_s=1.5)
        assert simulate(s).dc == [1, 1]

    def test_requests_with_no_feasible_dc_take_turns_and_the_rest_are_solved(self):
        pre = NO_PRE | {"tok_slope_below": 0.25, "tok_knee": 100}
        s = clean_and_dirty([(0.0, 8, 1), (0.0, 2, 1), (0.0, 8, 1), (0.5, 9, 1)], batch_capacity=8, t_pre=pre, slo_ttft_s=1.0)
        r = simulate(s)
        assert r.dc == [0, 0, 1, 0]
        assert [(x.status, x.by_carbon, x.in_turn) for x in r.batches] == [("optimal", 0, 2), ("empty", 0, 1)]
        assert r.batches[0].objective == pytest.approx(100 * (8 + 2 + 4) / J_PER_KWH, rel=ROUNDING)
        assert math.isnan(r.batches[1].objective)

    def test_failed_solve_falls_back_to_the_cleanest_with_headroom_then_takes_turns(self):
        r = simulate(clean_and_dirty([(0.0, 1, 5), (0.0, 2, 5), (0.0, 3, 5), (0.0, 4, 5), (0.5, 1, 5), (0.5, 2, 5)]))
        assert r.dc == [0, 1, 0, 1, 0, 1]
        assert [(x.status, x.by_carbon, x.in_turn) for x in r.batches] == [("infeasible", 2, 2), ("infeasible", 0, 2)]

    def test_fallback_breaks_ties_in_own_order_and_keeps_to_feasible_dcs(self):
        s = clean_and_dirty([(0.0, i, 5) for i in (1, 2, 3)], ci=lambda k: [5.0, 5.0], own=[[1]])
        assert simulate(s).dc == [1, 0, 1]
        # DC 0 is too far for a TTFT of 1.5 s: one request finds room at DC 1, the others take turns from there.
        assert simulate(replace(s, rtt_s=[[1.0, 0.0]], slo_ttft_s=1.5)).dc == [1, 1, 0]


class TestIterativeIlp:
    # A decode step of two lasts longer than the TPOT allows: each request flees the DC of the other.
    CROWDED = clean_and_dirty([(0.0, 2, 2), (0.0, 3, 2)], batch_capacity=8, slo_tpot_s=0.75)

    @pytest.mark.parametrize(("t_max", "expected"), [(1, [0, 0]), (2, [1, 1]), (3, [0, 0])])
    def test_own_load_is_left_out_and_that_of_others_counts(self, t_max, expected):
        assert simulate(replace(self.CROWDED, policy=("iterative_ilp", t_max))).dc == expected

    def test_costs_are_those_of_the_last_solve(self):
        # Without SLOs the second solve repeats the first, with each decode step shared by two: 8 + isl + 2 * 4/2 J.
        r = simulate(replace(self.CROWDED, slo_tpot_s=1e9, policy=("iterative_ilp", 5)))
        assert r.batches[0].objective == pytest.approx(100 * (14 + 15) / J_PER_KWH, rel=ROUNDING)

    def test_request_left_with_no_feasible_dc_keeps_its_own(self):
        far = replace(self.CROWDED, rtt_s=[[0.0, 4.0]], slo_ttft_s=2.0, policy=("iterative_ilp", 3))
        r = simulate(far)
        assert (r.dc, r.batches[0].status, r.batches[0].in_turn) == ([0, 0], "optimal", 0)

    def test_failed_later_solve_leaves_the_assignment_before_it(self):
        r = simulate(replace(self.CROWDED, nodes=[2, 1], batch_capacity=1, policy=("iterative_ilp", 3)))
        assert (r.dc, r.batches[0].status) == ([0, 0], "optimal")  # the second solve has one place, at DC 1, for two
        assert r.batches[0].objective == pytest.approx(100 * (8 + 2 + 2 * 4 + 8 + 3 + 2 * 4) / J_PER_KWH, rel=ROUNDING)

    def test_failed_first_solve_falls_back(self):
        r = simulate(clean_and_dirty([(0.0, i, 1) for i in (1, 2, 3)], policy=("iterative_ilp", 3)))
        assert (r.dc, r.batches[0].by_carbon, r.batches[0].in_turn) == ([0, 1, 0], 2, 1)


class TestFacility:
    ROOMY = clean_and_dirty([(0.0, 2, 1), (0.0, 6, 1)], nodes=[1, 2], ci=lambda k: [100.0, 110.0])

    def test_one_dc_is_opened_rather_than_two(self):
        assert simulate(self.ROOMY).dc == [1, 0]
        r = simulate(replace(self.ROOMY, policy=("facility_milp", "linear", "standard")))
        assert r.dc == [1, 1]
        assert r.batches[0].objective == pytest.approx(110 * (2 + 6 + 8 + 4) / J_PER_KWH, rel=ROUNDING)

    def test_full_costs(self):
        r = simulate(replace(self.ROOMY, policy=("facility_milp", "linear", "c_full")))
        assert r.batches[0].objective == pytest.approx(110 * (14 + 18 + 8 + 4) / J_PER_KWH, rel=ROUNDING)

    def test_waking_energy(self):
        e_pre, e_dec = {"e_pre0": 8.0, "e_pre_tok": 0.5, "e_pre_sq": 0.25}, {"e_dec0": 4.0, "e_dec_req": 1.0, "e_dec_kv": 0.5}
        s = scenario([(0.0, 1, 1)], e_pre=e_pre, e_dec=e_dec, tp=2, idle_w_per_gpu=1.5, t_dec=NO_DEC | {"alpha0": 0.5, "beta0": 0.125})
        assert waking_j(s, Means(isl=3.0, isl2=9.0, osl=2.0, osl2=4.0)) == 8 + 2 * (4 - 3 * (0.5 + 0.125 * 4)) == 10.0
        assert waking_j(replace(s, tp=20), Means(isl=3.0, isl2=9.0, osl=2.0, osl2=4.0)) == 0.0

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            # 4 requests, of whom 2 DCs are feasible: 2 engines a DC, but no more than are idle; the third DC is too far.
            (("linear", "standard"), [2.0, 0.5, 0.0]),
            (("exp", "standard"), [2.0, 2 * math.exp(-0.75), 2 * math.exp(-2.0)]),
            (("linear", "f_const"), [1.0, 1.0, 1.0]),
            (("linear", "c_full"), [2.0, 0.5, 0.0]),
        ],
    )
    def test_engines_to_wake(self, options, expected):
        s = scenario([(0.0, 1, 1)], nodes=[3, 2, 2], engines_per_node=[1] * 3, pue=[1.0, 2.0, 1.0], rtt_s=[[0.0, 0.0, 9.0]], slo_ttft_s=5.0)
        g = scheduler(replace(s, policy=("facility_milp", *options)), snapshot(), snapshot(b=0.75, ci=50.0), snapshot(b=2.0))
        p = Problem(g, [request(isl, 1) for isl in (1, 2, 3, 4)], 0.5)
        f = opening_g(p, p.costs(lambda _, d: p.at[d]), *options)
        assert f == pytest.approx([100 * n * (8 + 4) / J_PER_KWH for n in expected], rel=ROUNDING)


class TestGreenLlm:
    # A mean request of 4 + 4 tokens takes 1 + 4 * 0.75 s by itself, half a second a token: 4 s, and a second is left for the way.
    S = clean_and_dirty([(0.0, 4, 4)], policy=("green_llm",), ci=lambda k: [200.0, 100.0], slo_ttft_s=1e-3)

    def test_unloaded_time(self):
        assert unloaded_s_per_token(self.S, Means(isl=4.0, isl2=16.0, osl=4.0, osl2=16.0)) == 0.5

    @pytest.mark.parametrize(("rtt_s", "expected"), [(0.5, 1), (1.0, 1), (1.5, 0)])
    def test_only_the_way_and_the_length_count(self, rtt_s, expected):
        assert simulate(replace(self.S, rtt_s=[[0.0, rtt_s]])).dc == [expected]

    def test_costs_know_no_state_and_headroom_does(self):
        s = replace(self.S, arrival_s=[0.0, 0.5], isl=[4, 4], osl=[4, 4], scheduler=[0, 0], batch_capacity=2)
        r = simulate(s)
        assert (r.dc, [x.objective for x in r.batches]) == ([1, 1], [100 * (8 + 4 + 16) / J_PER_KWH] * 2)
        assert simulate(replace(s, batch_capacity=1)).dc == [1, 0]

    def test_too_long_for_any_dc_takes_turns(self):
        r = simulate(replace(self.S, rtt_s=[[1.5, 1.5]]))
        assert (r.dc, r.batches[0].status, r.batches[0].in_turn) == ([0], "empty", 1)

    def test_too_long_for_its_deadline_goes_where_the_slo_is_kept(self):
        r = simulate(replace(self.S, rtt_s=[[1.5, 1.5]], slo_ttft_s=9.0, slo_tpot_s=9.0))
        assert (r.dc, r.batches[0].status, r.batches[0].by_carbon) == ([1], "empty", 1)


class TestMoer:
    def test_cap(self):
        s = two_dcs([(0.0, 1, 1)] * 5, policy=("moer_cap", 0.5), ci=lambda k: [2.0, 1.0], slo_ttft_s=1e-3)
        r = simulate(s)
        assert r.dc == [1, 1, 1, 0, 0]
        assert (r.batches[0].status, r.batches[0].by_carbon, r.batches[0].in_turn) == ("rule", 0, 0)
        assert simulate(replace(s, ci=lambda k: [1.0, 1.0], own=[[1]])).dc == [1, 1, 1, 0, 0]
        assert simulate(replace(s, policy=("moer_cap", 0.2))).dc == [1, 0, 0, 0, 0]  # the last takes what the caps leave over

    def test_cap_of_whole_numbers(self):
        s = two_dcs([(0.0, 1, 1)] * 25, policy=("moer_cap", 0.56), ci=lambda k: [1.0, 2.0])
        assert 0.56 * 25 > 14
        assert simulate(s).dc == [0] * 14 + [1] * 11

    def test_hard(self):
        s = two_dcs([(0.0, 1, 1)], policy=("moer",), ci=lambda k: [200.0, 150.0], pue=[1.0, 1.5])
        assert simulate(s).dc == [1]

    def test_soft_takes_turns_by_weight(self):
        # Weights 1 and 1/2. Credits before each choice: (2/3, 1/3), (1/3, 2/3), (1, 0); then as at first.
        s = two_dcs([(0.0, 1, 1)] * 6, policy=("moer_soft", 0.5), ledger="off", ci=lambda k: [100.0, 300.0])
        assert simulate(s).dc == [0, 1, 0, 0, 1, 0]

    @pytest.mark.parametrize(
        ("b", "q", "ci", "expected"),
        [
            (0.0, 0.0, 300.0, [0.75, 0.25]),  # 1 and 1 - w
            (0.0, 0.0, 100.0, [0.5, 0.5]),
            (1.0, 2.0, 100.0, [0.8, 0.2]),  # 1 and 1 - (1 + 2)/4
            (1.0, 9.0, 300.0, [300 / 301, 1 / 301]),  # 1 and 0.01 * (1 - w)
        ],
    )
    def test_soft_weights(self, b, q, ci, expected):
        w = 2 / 3
        s = two_dcs([(0.0, 1, 1)], batch_capacity=4, policy=("moer_soft", w))
        g = scheduler(s, snapshot(), snapshot(b=b, q=2 * q, ci=ci))
        assert g.decide(request(2, 1)) == 0  # equals: the first in order
        assert g.credit == pytest.approx([expected[0] - 1, expected[1]], rel=ROUNDING)
