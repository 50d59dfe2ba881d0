"""Requests that the reference's schedulers hand to the owners of other DCs, against cases worked by hand. Times are dyadic fractions."""

from dataclasses import replace

import pytest

from tests.oracle.batch_policies import J_PER_KWH, Problem, opening_g
from tests.oracle.knowledge import Sent
from tests.oracle.simulator import Simulation, simulate
from tests.oracle.small_worlds import FLAT_E_PRE, request, scenario, scheduler, snapshot

ROUNDING = 1e-12  # of a handful of float64 operations
CLEANEST = ("moer_cap", 1.0)


def three_dcs(requests, **changes):
    """DC 0 belongs to scheduler 0, 1 and 2 to scheduler 1, a quarter of a second away; DC 1 is cleanest, then 2. Polls each second."""
    usual = {
        "nodes": [1] * 3,
        "engines_per_node": [1] * 3,
        "pue": [1.0] * 3,
        "ci": lambda k: [300.0, 100.0, 200.0],
        "own": [[0], [1, 2]],
        "rtt_s": [[0.0, 0.25, 0.25], [0.25, 0.0, 0.0]],
        "forwarding": "owner",
        "policy": CLEANEST,
        "e_pre": FLAT_E_PRE,
    }
    return scenario(requests, **usual | changes)


def told(result):
    """(decided_s, scheduler, requests) of each batch."""
    return [(x.decided_s, x.scheduler, x.requests) for x in result.batches]


class TestOwner:
    def test_places_at_the_end_of_the_window_in_which_a_request_gets_there(self):
        r = simulate(three_dcs([(0.25, 1, 1)]))
        assert (r.dc, r.decided_s, r.decision_s, r.dc_arrival_s) == ([1], [1.0], [1.0], [1.0])
        assert told(r) == [(0.5, 0, 1), (1.0, 1, 1)]
        on_an_edge = replace(three_dcs([(0.25, 1, 1)]), rtt_s=[[0.0, 0.5, 0.5], [0.5, 0.0, 0.0]])
        assert simulate(on_an_edge).dc_arrival_s == [1.5]

    @pytest.mark.parametrize(("from_1_s", "expected"), [([300.0, 200.0, 100.0], 2), ([50.0, 200.0, 100.0], 2), ([50.0, 100.0, 200.0], 1)])
    def test_sees_the_polls_of_that_instant_and_keeps_to_its_own(self, from_1_s, expected):
        ci = {0: [300.0, 100.0, 200.0], 1: [300.0, 100.0, 200.0]}
        assert simulate(three_dcs([(0.25, 1, 1)], ci=lambda k: ci.get(k, from_1_s))).dc == [expected]

    def test_own_dcs_and_those_of_nobody_are_reached_directly(self):
        s = three_dcs([(0.25, 1, 1)], own=[[0, 1], [2]], rtt_s=[[0.0, 0.0, 0.25], [0.25, 0.25, 0.0]])
        assert simulate(s).dc_arrival_s == [0.5]
        nobodys = three_dcs([(0.25, 1, 1)], own=[[0], [2]])
        assert (simulate(nobodys).dc, simulate(nobodys).dc_arrival_s, len(simulate(nobodys).batches)) == ([1], [0.75], 1)
        assert simulate(replace(nobodys, forwarding="window")).dc_arrival_s == [1.0]

    def test_the_first_of_two_owners(self):
        s = three_dcs([(0.25, 1, 1)], own=[[0], [1], [1, 2]], rtt_s=[[0.0, 0.25, 0.25], [0.25, 0.0, 0.25], [0.25, 0.0, 0.0]])
        assert told(simulate(s)) == [(0.5, 0, 1), (1.0, 1, 1)]
        assert told(simulate(replace(s, own=[[0], [2], [1, 2]]))) == [(0.5, 0, 1), (1.0, 2, 1)]

    def test_order_is_that_of_getting_there_then_of_numbers(self):
        # Scheduler 2 is nearer than 0: request 2, decided at 1 s, is there before 0 and 1, decided at 0.5 s. All are placed at 1.5 s.
        own, rtt_s = [[0], [1, 2], [0]], [[0.0, 0.875, 0.875], [0.25, 0.0, 0.0], [0.0, 0.125, 0.125]]
        s = three_dcs([(0.25, 1, 1), (0.375, 1, 1), (0.75, 1, 1)], own=own, rtt_s=rtt_s, scheduler=[0, 0, 2])
        half = replace(s, policy=("moer_cap", 0.4))  # all of one, and 2 of 3 by the cap
        # The senders' batches of two and of one fill DC 1, then 2: 1 each of two; the owner's of three takes 2, 0 | 1.
        r = simulate(half)
        assert told(r) == [(0.5, 0, 2), (1.0, 2, 1), (1.5, 1, 3)]
        assert (r.dc, r.dc_arrival_s) == ([1, 2, 1], [1.5] * 3)

    def test_groups_and_own_batch(self):
        requests = [(0.0, 1, 1), (0.125, 1, 1), (0.25, 1, 1), (0.375, 1, 1), (0.75, 1, 1), (1.0, 1, 1), (1.0, 1, 1)]
        r = simulate(three_dcs(requests, window_max_requests=2, scheduler=[0, 0, 0, 1, 1, 1, 1], rtt_s=[[0.0, 0.5, 0.5], [0.5, 0.0, 0.0]]))
        # Sent at 0.125 and 0.5 s, the three of scheduler 0 get there at 0.625 and 1.0 s. The last two fill a batch at 1 s.
        assert told(r) == [(0.125, 0, 2), (0.5, 0, 1), (0.5, 1, 1), (1.0, 1, 2), (1.0, 1, 1), (1.0, 1, 2), (1.5, 1, 1)]
        together = simulate(three_dcs([(0.25, i, 1) for i in range(1, 6)], window_max_requests=5))
        assert told(together) == [(0.25, 0, 5), (1.0, 1, 5)]
        assert told(simulate(three_dcs([(0.25, i, 1) for i in range(1, 6)], window_max_requests=2))) == [
            *[(0.25, 0, 2), (0.25, 0, 2), (0.5, 0, 1)],
            *[(1.0, 1, 2), (1.0, 1, 2), (1.0, 1, 1)],
        ]

    def test_own_batch_sees_what_was_handed_over_before_it(self):
        s = three_dcs([(0.25, 2, 1), (0.75, 2, 1)], scheduler=[0, 1], policy=("ilp",), batch_capacity=1)
        r = simulate(s)
        assert told(r) == [(0.5, 0, 1), (1.0, 1, 1), (1.0, 1, 1)]
        assert r.dc == [1, 2]
        assert simulate(replace(s, ledger="off")).dc == [1, 1]

    def test_the_sender_books_its_own_choice_and_the_owner_the_place(self):
        ci = {0: [300.0, 100.0, 200.0], 1: [300.0, 100.0, 200.0]}
        simulation = Simulation(three_dcs([(0.25, 6, 3)], ci=lambda k: ci.get(k, [300.0, 200.0, 100.0]), horizon_windows=3))
        simulation.run()
        sender, owner = simulation.schedulers
        assert sender.knows.ledger == [[], [], []]  # since the poll at 1 s, which is when it got there
        assert owner.knows.ledger == [[], [], [Sent(isl=6, decided_s=1.0, dc_arrival_s=1.0)]]
        assert (sender.sums, owner.sums) == ((6, 36, 3.0, 9.0), (6, 36, 3.0, 9.0))
        unpolled = Simulation(replace(simulation.s, poll_windows=10, ci=lambda k: [300.0, 100.0, 200.0]))
        unpolled.run()
        assert unpolled.schedulers[0].knows.ledger == [[], [Sent(isl=6, decided_s=0.5, dc_arrival_s=1.0)], []]

    def test_a_poll_at_that_instant_counts_nothing_of_it(self):
        simulation = Simulation(three_dcs([(0.25, 6, 9)], horizon_windows=5))
        simulation.run()
        assert [p[2:] for p in simulation.polls if p[:2] == (2, 1)] == [(0.0, 0.0, 0.0, 0.0)]
        assert [p[2:] for p in simulation.polls if p[:2] == (4, 1)] == [(1.0, 0.0, 7.0, 1.0)]
        # Who it was that placed it is told at 2 s: the owner.
        assert [g.knows.own for g in simulation.schedulers] == [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
        assert [g.knows.others for g in simulation.schedulers] == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]

    def test_after_the_horizon(self):
        r = simulate(three_dcs([(9.75, 1, 1)], rtt_s=[[0.0, 0.75, 0.75], [0.75, 0.0, 0.0]]))
        assert (r.dc, r.dc_arrival_s) == ([1], [11.0])
        assert sorted({p[0] for p in r.polls})[-3:] == [18, 20, 22]

    def test_fallback_takes_turns_among_its_own(self):
        # No DC is fast enough. Scheduler 1 deals its own request to DC 1. Scheduler 0 deals to 0, 1, 2, of which the owner has the last two
        # to place: its counter stands at 1, so they go to 2 and then to 1.
        requests = [(0.0, 1, 1), (0.25, 1, 1), (0.375, 1, 1), (0.375, 1, 1)]
        s = three_dcs(requests, scheduler=[1, 0, 0, 0], policy=("ilp",), slo_ttft_s=1e-3)
        r = simulate(s)
        assert (r.dc, r.dc_arrival_s) == ([1, 0, 2, 1], [0.5, 0.5, 1.0, 1.0])
        assert [(x.scheduler, x.status, x.in_turn) for x in r.batches] == [(0, "empty", 3), (1, "empty", 1), (1, "empty", 2)]
        # What comes after is dealt among all: the counter stands at 3, which is its first DC again.
        s = replace(s, arrival_s=[*s.arrival_s, 1.25], isl=[1] * 5, osl=[1] * 5, scheduler=[*s.scheduler, 1])
        assert simulate(s).dc[4] == 1

    def test_fallback_prefers_its_cleanest_with_room(self):
        # One place at each DC, and two senders that do not know of one another: of the three requests handed over, the first gets the
        # cleaner of the owner's DCs, the second the other, and the third its turn, though there is room at DC 0.
        own, rtt_s = [[0], [1, 2], [0]], [[0.0, 0.25, 0.25], [0.25, 0.0, 0.0], [0.0, 0.25, 0.25]]
        requests = [(0.25, 3, 9), (0.25, 4, 9), (0.25, 5, 9)]
        r = simulate(three_dcs(requests, own=own, rtt_s=rtt_s, scheduler=[0, 2, 2], policy=("ilp",), batch_capacity=1))
        assert [(x.scheduler, x.status, x.by_carbon, x.in_turn) for x in r.batches] == [
            *[(0, "optimal", 0, 0), (2, "optimal", 0, 0)],
            (1, "infeasible", 2, 1),
        ]
        assert r.dc == [1, 2, 1]

    def test_latency_is_refused(self):
        with pytest.raises(ValueError, match="no latency"):
            simulate(three_dcs([(0.25, 1, 1)], decision=("fixed", 0.5)))


@pytest.mark.parametrize(("own_only", "dcs"), [(False, 3), (True, 2)])
def test_opening_costs_count_own_dcs_alone(own_only, dcs):
    s = replace(three_dcs([(0.0, 1, 1)], nodes=[9, 9, 9], policy=("facility_milp", "linear", "standard")), own=[[0, 2], [1]])
    g = scheduler(s, *[snapshot(ci=50.0)] * 3)
    p = Problem(g, [request(isl, 1) for isl in (1, 2, 3, 4, 5, 6)], 0.5, own_only=own_only)
    f = opening_g(p, p.costs(lambda _, d: p.at[d]), *p.options)
    assert f == pytest.approx([50 * 6 / dcs * (8 + 4) / J_PER_KWH] * 3, rel=ROUNDING)
    assert [len(row) - row.count(False) for row in p.feasible] == [dcs] * 6
