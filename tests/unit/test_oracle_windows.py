"""The reference's windows of batch policies and what it expects of requests, against cases worked by hand.

Times are dyadic fractions, so equality is exact.
"""

from dataclasses import replace

import pytest

from tests.oracle.estimates import Belief, Means, energy_j, headroom, latency, marginal_energy_j
from tests.oracle.simulator import simulate
from tests.oracle.small_worlds import NO_PRE, clean_and_dirty, request, scenario, scheduler, snapshot, two_dcs

E_PRE = {"e_pre0": 8.0, "e_pre_tok": 0.5, "e_pre_sq": 0.25}
E_DEC = {"e_dec0": 4.0, "e_dec_req": 1.0, "e_dec_kv": 0.5}
CLEANEST = ("moer_cap", 1.0)


class TestWindows:
    def test_what_arrives_on_an_edge_waits_for_the_next_close(self):
        r = simulate(scenario([(0.0, 1, 1), (0.25, 1, 1), (0.5, 1, 1), (2.125, 1, 1)], policy=CLEANEST))
        assert r.decided_s == [0.5, 0.5, 1.0, 2.5]
        assert r.dc_arrival_s == r.decision_s == r.decided_s
        assert [(x.decided_s, x.requests) for x in r.batches] == [(0.5, 2), (1.0, 1), (2.5, 1)]  # empty windows decide nothing

    def test_full_window_closes_early(self):
        requests = [(t, 1, 1) for t in (0.0, 0.125, 0.25, 0.625, 0.625, 0.625, 0.625, 0.625)]
        r = simulate(scenario(requests, policy=CLEANEST, window_max_requests=2))
        assert r.decided_s == [0.125, 0.125, 0.5, 0.625, 0.625, 0.625, 0.625, 1.0]
        assert [x.requests for x in r.batches] == [2, 1, 2, 2, 1]

    def test_window_that_ends_comes_before_one_that_fills_at_that_instant(self):
        r = simulate(scenario([(0.25, 1, 1), (0.5, 1, 1), (0.5, 1, 1)], policy=CLEANEST, window_max_requests=2))
        assert [(x.decided_s, x.requests) for x in r.batches] == [(0.5, 1), (0.5, 2)]

    def test_schedulers_have_windows_of_their_own(self):
        s = scenario([(0.0, 1, 1), (0.125, 1, 1), (0.25, 1, 1)], policy=CLEANEST, window_max_requests=2, scheduler=[0, 1, 0])
        r = simulate(replace(s, own=[[0], [0]], rtt_s=[[0.0], [0.0]]))
        assert r.decided_s == [0.25, 0.5, 0.25]
        assert [(x.scheduler, x.requests) for x in r.batches] == [(0, 2), (1, 1)]

    def test_close_sees_the_polls_of_its_edge(self):
        s = two_dcs([(0.75, 1, 1)], policy=CLEANEST, ci=lambda k: [1.0, 2.0] if k < 2 else [2.0, 1.0])
        assert simulate(s).dc == [1]
        assert simulate(replace(s, window_max_requests=1)).dc == [0]

    def test_last_window_closes_on_the_horizon_and_sees_its_poll(self):
        # The CI of the last window, 19, is seen by the poll on the horizon alone; later ones are not known.
        ci = {19: [2.0, 1.0], 20: [1.0, 2.0]}
        r = simulate(two_dcs([(9.75, 1, 1)], policy=CLEANEST, ci=lambda k: ci.get(k, [1.0, 2.0])))
        assert (r.decided_s, r.dc, r.polls[-1][0]) == ([10.0], [1], 20)

    def test_poll_does_not_count_what_is_decided_at_its_edge(self):
        r = simulate(scenario([(0.5, 6, 1), (0.75, 6, 1)], policy=CLEANEST, decision=("fixed", 0.5)))
        assert r.decided_s == [1.0, 1.0]
        assert r.polls[1:3] == [(2, 0, 0.0, 0.0, 0.0, 0.0), (4, 0, 2.0, 0.0, 0.0, 0.5)]

    def test_decision_latencies(self):
        s = scenario([(0.0, 1, 1), (0.25, 1, 1), (0.5, 1, 1), (3.5, 1, 1)], policy=CLEANEST)
        assert simulate(replace(s, decision=("fixed", 1.0))).decision_s == [1.5, 1.5, 2.0, 5.0]
        # The batch at 1 s waits for the solver, which has taken 0.75 + 2 * 0.25 s over the first.
        assert simulate(replace(s, decision=("affine", 0.75, 0.25))).decision_s == [1.75, 1.75, 2.75, 5.0]

    @pytest.mark.parametrize(
        ("forwarding", "rtt_s", "expected"),
        [("direct", 0.25, 0.75), ("window", 0.25, 1.0), ("window", 0.5, 1.5), ("window", 0.0, 1.0)],
    )
    def test_forwarded_requests_wait(self, forwarding, rtt_s, expected):  # on an edge for a whole window
        s = two_dcs([(0.25, 1, 1), (2.25, 1, 1)], forwarding=forwarding, own=[[0], [1]], rtt_s=[[0.0, rtt_s], [rtt_s, 0.0]])
        s = replace(s, policy=CLEANEST, ci=lambda k: [2.0, 1.0] if k < 2 else [1.0, 2.0])
        assert simulate(s).dc_arrival_s == [expected, 2.5]  # the second stays at home

    def test_per_request_policies_know_no_windows(self):
        s = two_dcs([(0.25, 1, 1), (0.25, 1, 1)], forwarding="window", window_max_requests=1, own=[[0], [1]], rtt_s=[[0.0, 0.125]] * 2)
        r = simulate(s)
        assert (r.decided_s, r.dc_arrival_s, r.batches) == ([0.25, 0.25], [0.25, 0.375], [])


class TestEstimates:
    def test_energy_of_a_request(self):
        s, r = scenario([(0.0, 1, 1)], e_pre=E_PRE, e_dec=E_DEC), request(4, 9, believed=2.0)
        assert marginal_energy_j(s, r) == 0.5 * 4 + 0.25 * 16 + 2 * (1 + 0.5 * (4 + 1)) == 13.0
        assert energy_j(s, r, b=1.0, q=3.0) == 8 / 4 + 2 * 4 / 2 + 13.0 == 19.0

    @pytest.mark.parametrize(
        ("b", "q", "expected"), [(0.0, 0.0, 12), (1 / 3 + 1 / 3, 0.0, 10), (2 / 3, 0.5, 8), (4.0, 0.0, 0), (3.0, 2.0, 0)]
    )
    def test_headroom(self, b, q, expected):
        s = scenario([(0.0, 1, 1)], nodes=[3], batch_capacity=4)
        assert headroom(s, 0, 0, Belief(b=b, q_tokens=0.0, q=q, k=0.0, duty=0.0, ci=0.0)) == expected

    def test_headroom_is_whole_where_thirds_are_not(self):
        for running in range(40):
            s = scenario([(0.0, 1, 1)], nodes=[3], batch_capacity=40)
            at = Belief(b=running / 3 + 1 / 3, q_tokens=0.0, q=0.0, k=0.0, duty=0.0, ci=0.0)
            assert headroom(s, 0, 0, at) == 3 * 40 - running - 1

    def test_first_batch_has_its_own_means_and_later_ones_those_before(self):
        s = two_dcs([(0.0, 1, 1)], policy=("ilp",))
        g = scheduler(s, snapshot(), snapshot())
        first = [request(2, 1, believed=3.0), request(4, 5)]
        assert g.means(first) == Means(isl=3.0, isl2=10.0, osl=4.0, osl2=17.0)
        g.dispatch_batch(first, [0, 1], 0.5)
        assert g.means([request(9, 9)]) == Means(isl=3.0, isl2=10.0, osl=4.0, osl2=17.0)

    def test_latency_uses_the_believed_length(self):
        s = scenario([(0.0, 1, 1)], t_pre=NO_PRE | {"b0": 1.0})
        at = Belief(b=0.0, q_tokens=4.0, q=0.0, k=0.0, duty=0.0, ci=0.0)
        assert latency(s, 0.25, request(4, 9, believed=2.0), at, Means(4.0, 16.0, 2.0, 4.0)) == (1.25, 0.75 + 1.0 / 2)

    def test_belief_with_more_requests(self):
        at = Belief(b=1.0, q_tokens=2.0, q=3.0, k=4.0, duty=0.5, ci=6.0).plus([request(8, 1), request(2, 1)], 2)
        assert at == Belief(b=2.0, q_tokens=7.0, q=3.0, k=9.0, duty=0.5, ci=6.0)

    def test_a_batch_sees_the_batches_before_it(self):
        s = clean_and_dirty([(0.0, 2, 9), (0.5, 3, 9)], poll_windows=10)
        assert simulate(s).dc == [0, 1]
        assert simulate(replace(s, ledger="off")).dc == [0, 0]
