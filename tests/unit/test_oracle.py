"""The reference itself, against cases worked by hand. Times are dyadic fractions, so equality is exact."""

import math
from dataclasses import replace

import pytest

from tests.oracle.model import OracleScenario
from tests.oracle.policies import Means
from tests.oracle.random_scenarios import KINDS, random_scenario
from tests.oracle.records import Request
from tests.oracle.simulator import simulate
from tests.oracle.small_worlds import FLAT_E_PRE, NO_DEC, NO_PRE, scenario, scheduler, snapshot, two_dcs
from tests.oracle.timeline import window_of

ROUNDING = 1e-9  # sums of a few thousand float64 terms


class TestEngine:
    def test_single_request_with_every_coefficient(self):
        pre = {"tok_slope_below": 0.125, "tok_slope_above": 0.25, "tok_knee": 3, "b0": 0.5, "b1": 0.0625, "b2": 1 / 64}
        dec = {"alpha0": 0.5, "alpha1": 0.25, "alpha2": 0.125, "beta0": 1 / 16, "beta1": 1 / 32, "beta2": 1 / 64}
        e_pre = {"e_pre0": 8.0, "e_pre_tok": 0.5, "e_pre_sq": 0.25}
        e_dec = {"e_dec0": 4.0, "e_dec_req": 1.0, "e_dec_kv": 0.5}
        r = simulate(scenario([(1.0, 4, 3)], t_pre=pre, t_dec=dec, e_pre=e_pre, e_dec=e_dec))
        prefill = 0.125 * 3 + 0.25 * 1 + 0.5 + 0.0625 + 16 / 64
        decode_k5 = (0.5 + 5 / 16) + (0.25 + 5 / 32) + (0.125 + 5 / 64)
        decode_k6 = (0.5 + 6 / 16) + (0.25 + 6 / 32) + (0.125 + 6 / 64)
        assert r.first_token_s == [1.0 + prefill]
        assert r.finish_s == [1.0 + prefill + decode_k5 + decode_k6]
        assert sum(row[0]["prefill_j"] for row in r.ledger) == pytest.approx(8 + 0.5 * 4 + 0.25 * 16, rel=ROUNDING)
        assert sum(row[0]["decode_j"] for row in r.ledger) == pytest.approx((4 + 1 + 2.5) + (4 + 1 + 3), rel=ROUNDING)
        assert (r.prefill_s, r.decode_s) == ([prefill], [decode_k5 + decode_k6])

    def test_one_output_token_ends_with_the_prefill(self):
        r = simulate(scenario([(0.0, 5, 1), (0.0, 5, 2)]))
        assert r.first_token_s == [1.0, 1.0]
        assert r.finish_s == [1.0, 1.75]  # the decode step holds one request, not two

    def test_prompts_are_split_over_steps(self):
        # Steps of 4 tokens: 4 of the first; 2 + 2; 1 of the second.
        s = scenario([(0.0, 6, 1), (0.0, 3, 1)], max_num_batched_tokens=4, t_pre=NO_PRE | {"b0": 1.0, "b1": 0.25, "b2": 1 / 64})
        first, second, third = 1.25 + 16 / 64, 1.5 + (36 - 16 + 4) / 64, 1.25 + (9 - 4) / 64
        r = simulate(s)
        assert r.admit_s == [0.0, 0.0]
        assert r.first_token_s == [first + second, first + second + third]

    @pytest.mark.parametrize(
        ("batching", "admit", "first", "finish"),
        [
            ("study", [0.0, 1.75], [1.0, 2.75], [4.5, 3.75]),  # prefill, decode alone, prefill, decode both, decode alone
            ("prefill_first", [0.0, 1.0], [1.0, 2.0], [4.5, 3.0]),  # prefill, prefill, decode both, decode alone twice
        ],
    )
    def test_two_requests_share_decode_steps(self, batching, admit, first, finish):
        r = simulate(scenario([(0.0, 3, 4), (0.5, 5, 2)], batching=batching))
        assert (r.admit_s, r.first_token_s, r.finish_s) == (admit, first, finish)

    def test_prefill_first_admits_up_to_the_token_budget_and_longer_prompts_alone(self):
        r = simulate(scenario([(0.0, 6, 1), (0.0, 12, 1), (0.0, 5, 1), (0.0, 5, 1)], batching="prefill_first", max_num_batched_tokens=10))
        assert r.admit_s == [0.0, 1.0, 3.0, 3.0]  # the 12 tokens take two steps
        assert r.finish_s == [1.0, 3.0, 4.0, 4.0]

    def test_padded_steps_hold_whole_prompts_and_are_longer(self):
        """Budget 8: 3 and 4 tokens take 2 * 4; with 2 more it would be 3 * 4, so they open a step, which 5 more, at 2 * 5, do not join."""
        s = scenario([(0.0, 3, 1), (0.0, 4, 1), (0.0, 2, 1), (0.0, 5, 1)], max_num_batched_tokens=8, token_count="padded")
        s = replace(s, t_pre=NO_PRE | {"tok_slope_below": 0.125, "tok_knee": 99.0, "b1": 1.0, "b2": 1 / 64}, e_pre=FLAT_E_PRE)
        r = simulate(s)
        first, second, third = 8 / 8 + 2 + 2 * 16 / 64, 2 / 8 + 1 + 4 / 64, 5 / 8 + 1 + 25 / 64
        assert r.first_token_s == [first, first, first + second, first + second + third]
        assert sum(interval[0]["prefill_j"] for interval in r.ledger) == (8 + 8) + (8 + 2) + (8 + 5)

    def test_a_padded_step_pads_the_rest_of_a_split_prompt_too(self):
        """Budget 4: a prompt of 5 fills a step by itself; its rest of 1, with 4 cached, and 2 tokens of the next take 2 * 2."""
        s = scenario([(0.0, 5, 1), (0.0, 2, 1)], max_num_batched_tokens=4, token_count="padded", t_pre=NO_PRE | {"b0": 1.0, "b2": 1 / 64})
        first, second = 1 + 16 / 64, 1 + ((4 + 2) ** 2 - 4**2 + 2**2) / 64
        assert simulate(s).first_token_s == [first + second, first + second]

    @pytest.mark.parametrize(("token_count", "admit"), [("sum", [0.0, 0.0, 0.0, 1.0]), ("padded", [0.0, 0.0, 1.0, 1.0])])
    def test_prefill_first_admits_by_count_times_longest(self, token_count: str, admit: list[float]):
        """Budget 10: 1 + 4 + 3 tokens, but 3 * 4 padded."""
        requests = [(0.0, 1, 1), (0.0, 4, 1), (0.0, 3, 1), (0.0, 3, 1)]
        s = scenario(requests, batching="prefill_first", max_num_batched_tokens=10, token_count=token_count)
        assert simulate(s).admit_s == admit

    def test_kv_limit_blocks_those_behind(self):
        r = simulate(scenario([(0.0, 4, 4), (0.0, 3, 2), (0.0, 1, 1)], kv_capacity_tokens=10))
        assert r.finish_s[0] == 1.0 + 3 * 0.75
        assert r.admit_s == [0.0, 3.25, 3.25]  # the third would have fitted at once

    def test_batch_limit(self):
        r = simulate(scenario([(0.0, 1, 1), (0.0, 1, 1)], max_num_seqs=1))
        assert r.admit_s == [0.0, 1.0]


class TestPolls:
    def test_snapshots_by_hand(self):
        # prefill 0 [0, 1], decode [1, 1.75]; prefill 1 [1.75, 2.75], decode both [2.75, 3.75];
        # prefill 2 [3.75, 4.75], decode 0 [4.75, 5.5]. Request 2 arrives at the poll at 2 s, too late for it.
        r = simulate(scenario([(0.0, 3, 4), (0.5, 5, 2), (2.0, 7, 1)]))
        assert r.finish_s == [5.5, 3.75, 4.75]
        assert r.polls[:7] == [
            (0, 0, 0.0, 0.0, 0.0, 0.0),
            (2, 0, 1.0, 5.0, 3 + 1, 1.0),
            (4, 0, 2.0, 0.0, 3 + 2, 0.25),
            (6, 0, 2.0, 7.0, 3 + 2 + 5 + 1, 0.75),
            (8, 0, 2.0, 0.0, 3 + 3, 0.25),
            (10, 0, 1.0, 0.0, 3 + 3, 0.75),
            (12, 0, 0.0, 0.0, 0.0, 0.0),
        ]
        assert [p[0] for p in r.polls] == list(range(0, 20, 2))

    def test_iteration_that_starts_at_the_poll_has_not_begun(self):
        r = simulate(scenario([(0.5, 6, 1)], decision=("fixed", 0.5)))
        assert r.admit_s == [1.0]
        assert r.polls[1] == (2, 0, 0.0, 6.0, 0.0, 0.0)

    def test_values_are_means_over_engines(self):
        r = simulate(scenario([(0.0, 3, 4), (0.0, 5, 1), (0.25, 8, 1)], nodes=[2]))
        assert r.polls[1] == (2, 0, 0.5, 4.0, 2.0, 1.0)  # request 1 has finished at 1 s, request 2 waits behind request 0

    def test_asynchronous_offsets(self):
        three = {"nodes": [1] * 3, "engines_per_node": [1] * 3, "pue": [1.0] * 3, "ci": lambda k: [1.0] * 3, "rtt_s": [[0.0] * 3]}
        r = simulate(scenario([(0.0, 1, 1)], poll_mode="async", poll_windows=8, **three))
        assert [p[:2] for p in r.polls] == [(0, 0), (2, 1), (5, 2), (8, 0), (10, 1), (13, 2), (16, 0), (18, 1)]

    def test_windows_are_float_products(self):
        for k in range(2000):
            edge = k * 0.1
            assert window_of(edge, 0.1) == k
            assert window_of(math.nextafter(edge, -1.0), 0.1) == k - 1


class TestEnergy:
    def test_steps_are_shared_over_edges_and_the_drain_is_apart(self):
        # Edges 0, 2, 3, 4, 5: every 2 s, and at 3 s where CI changes. Prefill [1, 4.5] at 2 W; decode [4.5, 6.5] at 4 W, 6 J of it after
        # the horizon. The other engine idles.
        s = scenario(
            [(1.0, 2, 2)],
            window_s=1.0,
            ledger_windows=2,
            horizon_windows=5,
            nodes=[2],
            tp=2,
            t_pre=NO_PRE | {"b0": 3.5},
            t_dec=NO_DEC | {"alpha0": 2.0},
            e_pre={"e_pre0": 7.0, "e_pre_tok": 0.0, "e_pre_sq": 0.0},
            e_dec={"e_dec0": 8.0, "e_dec_req": 0.0, "e_dec_kv": 0.0},
            idle_w_per_gpu=0.5,
            host_w=100.0,
            pue=[1.5],
            ci=lambda k: [100.0, 100.0, 300.0, 400.0, 500.0][k : k + 1],
        )
        r = simulate(s)
        rows = [row[0] for row in r.ledger]
        assert [x["prefill_j"] for x in rows] == [2.0, 2.0, 2.0, 1.0]
        assert [x["decode_j"] for x in rows] == [0.0, 0.0, 0.0, 2.0]
        assert [x["idle_j"] for x in rows] == [1.0 + 2.0, 1.0, 1.0, 1.0]
        assert [x["host_j"] for x in rows] == [400.0, 200.0, 200.0, 200.0]
        assert [x["carbon_g"] for x in rows] == [1.5 * ci * j / 3.6e6 for ci, j in ((100, 405), (300, 203), (400, 203), (500, 204))]
        assert (r.drain_energy_j, r.drain_carbon_g) == (6.0, 1.5 * 500 * 6 / 3.6e6)
        assert (r.prefill_s, r.decode_s, r.idle_s) == ([3.5, 0.0], [0.5, 0.0], [1.0, 5.0])
        # Counted from 2 s on: the rows are cut there (as they are), and of the seconds two fewer are left.
        warm = simulate(replace(s, ledger_windows=5, warmup_windows=2))
        assert warm.ledger == r.ledger
        assert (warm.prefill_s, warm.decode_s, warm.idle_s) == ([2.5, 0.0], [0.5, 0.0], [0.0, 3.0])

    def test_no_step_takes_less_than_idling_or_more_than_the_boards(self):
        # Prefill asks for 8 J in 1 s, each of the two decode steps for 4 J in 0.75 s; two GPUs idle at 3 W each, or may draw 3.5 W each.
        for watts, joules, above in (((3.0, 9.0), (8.0, 9.0), 0), ((0.0, 3.5), (7.0, 8.0), 1), ((4.5, 4.5), (9.0, 13.5), 0)):
            r = simulate(scenario([(1.0, 2, 3)], tp=2, idle_w_per_gpu=watts[0], max_w_per_gpu=watts[1]))
            row = [sum(row[0][use] for row in r.ledger) for use in ("prefill_j", "decode_j")]
            assert (*row, r.above_board) == (*joules, above)

    def test_step_wholly_after_the_horizon_is_drain(self):
        r = simulate(scenario([(9.5, 1, 3)]))  # prefill [9.5, 10.5], decode to 12
        assert r.drain_energy_j == 4.0 + 4.0 + 4.0
        assert sum(row[0]["prefill_j"] for row in r.ledger) == 4.0

    @pytest.mark.parametrize("seed", range(40))
    def test_time_and_energy_are_conserved(self, seed):
        s = random_scenario(seed)
        r = simulate(s)
        horizon = s.horizon_windows * s.window_s
        for parts in zip(r.prefill_s, r.decode_s, r.idle_s):
            assert sum(parts) == pytest.approx(horizon, rel=ROUNDING)
        total = {use: sum(dc[use] for row in r.ledger for dc in row) for use in ("prefill_j", "decode_j", "idle_j", "host_j")}
        assert total["idle_j"] == pytest.approx(s.idle_w_per_gpu * s.tp * sum(r.idle_s), rel=ROUNDING)
        assert total["host_j"] == pytest.approx(s.host_w * sum(s.nodes) * horizon, rel=ROUNDING)
        long_enough = replace(s, horizon_windows=2 + int(max(r.finish_s) / s.window_s), ci=lambda k: s.ci(min(k, s.horizon_windows - 1)))
        everything = simulate(long_enough)
        assert everything.drain_energy_j == 0.0
        assert everything.finish_s == r.finish_s
        steps_j = sum(dc[use] for row in everything.ledger for dc in row for use in ("prefill_j", "decode_j"))
        assert total["prefill_j"] + total["decode_j"] + r.drain_energy_j == pytest.approx(steps_j, rel=ROUNDING)


class TestDispatch:
    def test_decision_latencies(self):
        requests = [(0.0, 1, 1), (0.25, 1, 1), (3.0, 1, 1)]
        assert simulate(scenario(requests)).decision_s == [0.0, 0.25, 3.0]
        assert simulate(scenario(requests, decision=("fixed", 1.0))).decision_s == [1.0, 1.25, 4.0]
        assert simulate(scenario(requests, decision=("affine", 0.75, 0.25))).decision_s == [1.0, 2.0, 4.0]

    def test_engines_take_turns_in_order_of_reaching_the_dc(self):
        # Requests 1 and 3 belong to a scheduler 1 s away; both schedulers start at an own DC.
        s = two_dcs(
            [(0.0, 1, 1), (0.0, 1, 1), (1.0, 1, 1), (1.0, 1, 1)],
            nodes=[2, 1],
            engines_per_node=[2, 1],
            scheduler=[0, 1, 0, 1],
            own=[[0], [1]],
            rtt_s=[[0.0, 1.0], [1.0, 0.0]],
        )
        r = simulate(s)
        assert r.dc == [0, 1, 1, 0]
        assert r.dc_arrival_s == [0.0, 0.0, 2.0, 2.0]
        five = simulate(scenario([(0.0, 1, 1)] * 5, nodes=[2], engines_per_node=[2]))
        assert list(zip(five.node, five.engine)) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 0)]

    def test_order_starts_at_the_first_own_dc(self):
        assert simulate(two_dcs([(0.0, 1, 1)] * 3, own=[[1]])).dc == [1, 0, 1]

    def test_remote_requests_are_placed_when_they_arrive(self):
        s = two_dcs([(0.0, 1, 1), (0.5, 1, 1)], nodes=[2, 1], scheduler=[1, 0], own=[[0], [0]], rtt_s=[[0.0, 0.0], [2.0, 0.0]])
        r = simulate(s)
        assert (r.dc, r.node, r.dc_arrival_s) == ([0, 0], [1, 0], [2.0, 0.5])

    @pytest.mark.parametrize(
        ("ledger", "expected"),
        [
            ("off", [0, 0, 0, 0, 0]),
            ("reset", [0, 1, 0, 0, 1]),  # at 1 s the poll wipes a ledger whose requests the DCs have not seen yet
            ("in-flight", [0, 1, 0, 1, 0]),
        ],
    )
    def test_ledger(self, ledger, expected):
        requests = [(t, 1, 9) for t in (0.0, 0.0, 0.0, 1.0, 1.25)]
        s = two_dcs(requests, ledger=ledger, policy=("least_loaded",), rtt_s=[[4.0, 4.0]])
        assert simulate(s).dc == expected

    def test_ledger_holds_what_reached_the_dc_at_the_instant_of_the_poll(self):
        s = two_dcs([(0.0, 1, 9), (0.0, 1, 9)], ledger="in-flight", policy=("least_loaded",))
        assert simulate(s).dc == [0, 1]

    def test_least_loaded_sees_polls_only(self):
        # Without a ledger everything goes to DC 0 until the poll at 1 s shows it running requests.
        s = two_dcs([(0.0, 1, 9), (0.25, 1, 9), (0.75, 1, 9), (1.0, 1, 9)], ledger="off", policy=("least_loaded",))
        assert simulate(s).dc == [0, 0, 0, 1]


class TestGreedy:
    def test_estimate_by_hand(self):
        s = scenario(
            [(0.0, 8, 4)],
            t_pre=NO_PRE | {"tok_slope_below": 0.5, "tok_slope_above": 0.25, "tok_knee": 10, "b0": 1.0, "b1": 0.125, "b2": 1 / 64},
            t_dec=NO_DEC | {"alpha0": 1.0, "alpha1": 0.5, "beta0": 0.25},
            kv_capacity_tokens=23,
            rtt_s=[[0.5]],
        )
        g = scheduler(s, snapshot(b=2.0, q=8.0, k=16.0, duty=0.5))
        means = Means(isl=4.0, isl2=20.0, osl=4.0, osl2=16.0)
        g.dispatch(Request(id=0, scheduler=0, arrival_s=0.0, isl=8, osl=4), 0)  # in the ledger: B 3, Q 16, q still 2
        ttft, tpot = g.estimate(Request(id=1, scheduler=0, arrival_s=0.0, isl=8, osl=4), 0, means)
        t_res = 4 * (1.0 + 0.25 * 16 / 3 + 0.5 * 3) / 0.5
        wait = (3 + 2 + 1 - 2) * t_res / 2
        prefill = 0.5 * 10 + 0.25 * 14 + 1.0 + 0.125 * 3 + (64 + 2 * 20) / 64
        others = (0.5 * 10 + 0.25 * 6 + 1.0 + 0.125 * 2 + 40 / 64) / 4
        assert ttft == pytest.approx(0.5 + wait + prefill, rel=ROUNDING)
        assert tpot == pytest.approx((1.0 + 0.25 * 24 / 4 + 0.5 * 4 + others) / 0.5, rel=ROUNDING)

    def test_carbon_alone(self):
        dirty_first = {"ci": lambda k: [200.0, 150.0], "pue": [1.0, 1.5]}
        assert simulate(two_dcs([(0.0, 1, 1)], policy=("greedy", 0.0, "e2e", "ci"), **dirty_first)).dc == [1]
        assert simulate(two_dcs([(0.0, 1, 1)], policy=("greedy", 0.0, "e2e", "pue_ci"), **dirty_first)).dc == [0]

    def test_carbon_is_that_of_the_last_poll(self):
        s = two_dcs([(0.5, 1, 1), (1.0, 1, 1)], policy=("greedy", 0.0, "e2e", "ci"), ci=lambda k: [1.0, 2.0] if k == 0 else [2.0, 1.0])
        assert simulate(s).dc == [0, 1]

    def test_latency_alone_and_zero_carbon(self):
        s = two_dcs([(0.0, 1, 1)], policy=("greedy", 1.0, "ttft", "ci"), rtt_s=[[0.5, 0.25]])
        assert simulate(s).dc == [1]
        assert simulate(replace(s, policy=("greedy", 0.5, "slo", "ci"), ci=lambda k: [0.0, 0.0])).dc == [1]

    def test_infeasible_requests_take_turns(self):
        # 8 tokens take 2.5 s and are too much for any DC; request 1 takes 0.75 s and does not advance the fallback's counter.
        pre = NO_PRE | {"b0": 0.5, "tok_slope_below": 0.25, "tok_knee": 100}
        s = two_dcs([(0.0, 8, 1), (1.0, 1, 1), (3.0, 8, 1), (6.0, 8, 1)], policy=("greedy", 0.0, "e2e", "ci"), t_pre=pre, slo_ttft_s=1.0)
        assert simulate(replace(s, ci=lambda k: [2.0, 1.0])).dc == [0, 1, 1, 0]


WANTED = {
    *("round_robin", "least_loaded", "greedy", "e2e", "slo", "ttft", "ci", "pue_ci", "off", "reset", "in-flight", "sync", "async"),
    *("study", "prefill_first", "none", "fixed", "affine", "osl 1", "split prompt", "unused DC", "transit ends on an edge"),
    *("iteration starts on an edge", "finish on an edge", "equal arrivals", "arrival at 0", "drain", "duty over its clamp", "zero CI"),
}


def on_edge(t: float, s: OracleScenario) -> bool:
    return window_of(t, s.window_s) * s.window_s == t


class TestRandomScenarios:
    def test_seeds_repeat_and_choose_their_kind(self):
        a, b = random_scenario(3), random_scenario(3)
        assert replace(a, ci=None) == replace(b, ci=None)
        assert [a.ci(k) for k in range(a.horizon_windows)] == [b.ci(k) for k in range(b.horizon_windows)]
        assert tuple(random_scenario(0, kind=5).nodes) == KINDS[5].nodes

    def test_order_of_events(self):
        for seed in range(40):
            s = random_scenario(seed)
            r = simulate(s)
            for row in zip(s.arrival_s, r.decision_s, r.dc_arrival_s, r.admit_s, r.first_token_s, r.finish_s):
                assert list(row) == sorted(row)
            for osl, first, finish in zip(s.osl, r.first_token_s, r.finish_s):
                assert (finish == first) == (osl == 1)

    def test_rare_branches_are_reached(self):
        seen = set()
        for seed in range(60):
            s = random_scenario(seed)
            r = simulate(s)
            sent_s = [t for t, a in zip(r.dc_arrival_s, s.arrival_s) if t > a]
            facts = {
                "osl 1": 1 in s.osl,
                "split prompt": max(s.isl) > s.max_num_batched_tokens,
                "unused DC": len(set(r.dc)) < len(s.nodes),
                "transit ends on an edge": any(on_edge(t, s) for t in sent_s),
                "iteration starts on an edge": any(on_edge(t, s) for t in r.admit_s),
                "finish on an edge": any(on_edge(t, s) for t in r.finish_s),
                "equal arrivals": len(set(s.arrival_s)) < len(s.arrival_s),
                "arrival at 0": s.arrival_s[0] == 0.0,
                "drain": r.drain_energy_j > 0.0,
                "duty over its clamp": any(p[5] > 0.95 for p in r.polls),
                "zero CI": 0.0 in s.ci(0),
            }
            seen |= {s.policy[0], *s.policy[2:], s.ledger, s.poll_mode, s.batching, s.decision[0]}
            seen |= {fact for fact, holds in facts.items() if holds}
        missing = WANTED - seen
        assert not missing
