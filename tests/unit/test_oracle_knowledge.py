"""What the reference's schedulers know between polls, against values worked by hand."""

import math
from dataclasses import replace

import pytest

from tests.oracle.datacenter import DataCenter
from tests.oracle.estimates import Belief, Means, headroom, latency
from tests.oracle.knowledge import Knowledge, Sent, View
from tests.oracle.small_worlds import NO_DEC, NO_PRE, request, scenario, scheduler, snapshot, two_dcs

ROUNDING = 1e-12  # of a handful of float64 operations
MEANS = Means(isl=4.0, isl2=20.0, osl=8.0, osl2=128.0)  # running requests are 8 tokens old on average
THREE = {"own": [[0], [1], [0]], "rtt_s": [[0.0, 0.0]] * 3}


class TestPolls:
    def test_who_has_come_since_the_poll_before(self):
        dc = DataCenter(two_dcs([(0.0, 1, 1)], **THREE), 0)  # polled each second

        def send(placed_by: int, decided_s: float, dc_arrival_s: float) -> None:
            r = request(1, 1)
            r.placed_by, r.decided_s, r.dc_arrival_s = placed_by, decided_s, dc_arrival_s
            dc.send(r)

        send(0, 0.25, 0.25)
        send(2, 0.5, 1.0)  # there at the poll
        send(2, 1.0, 1.0)  # placed at the poll, and there at once: the next one counts it
        send(0, 0.5, 1.25)  # on the way
        assert dc.poll(2).came == (1, 0, 1)
        assert dc.poll(4).came == (1, 0, 1)
        assert dc.poll(6).came == (0, 0, 0)

    def test_who_has_finished_has_come_too(self):
        dc = DataCenter(scenario([(0.0, 1, 1)]), 0)
        r = request(1, 1)
        r.placed_by, r.decided_s, r.dc_arrival_s, r.finish_s = 0, 0.0, 0.0, 0.5
        dc.send(r)
        assert dc.poll(2).came == (1,)


class TestPeers:
    @pytest.mark.parametrize(
        ("changes", "w"),
        [({}, 1.0), ({"peers": "alike"}, 3.0), ({"peers": "alike", "alike": [2.5, 1.0, 9.0]}, 2.5), ({"peers": "observed"}, 3.0)],
    )
    def test_ledger_is_weighted(self, changes, w):
        s = two_dcs([(0.0, 1, 1)], nodes=[2, 1], **THREE | changes)
        g = scheduler(s, snapshot(b=1.0, q=4.0, k=3.0, duty=0.5, came=(0, 0, 0)), snapshot(came=(0, 0, 0)))
        g.dispatch(request(8, 2), 0)
        g.dispatch(request(4, 2), 0)
        at = g.knows.belief(0, MEANS)
        assert at == Belief(b=1.0 + w * 2 / 2, q_tokens=4.0 + w * 12 / 2, q=1.0, k=3.0, duty=0.5, ci=100.0)
        assert g.knows.belief(1, MEANS) == Belief(b=0.0, q_tokens=0.0, q=0.0, k=0.0, duty=0.0, ci=100.0)

    def test_observed(self):
        g = scheduler(two_dcs([(0.0, 1, 1)], peers="observed", **THREE), *[snapshot(came=(0, 0, 0))] * 2)
        knows = g.knows
        assert knows.peers() == (3.0, [0.0, 0.0])
        knows.see(0, snapshot(1.0, came=(2, 1, 1)))
        knows.see(1, snapshot(1.0, came=(0, 4, 0)))
        # a 2 and 0, b 2 and 4, k = 6/2: of the others 2 (of 6 at most) and 0 follow; 0 and 4 come as they came in two seconds.
        assert (knows.own, knows.others, knows.peers()) == ([2.0, 0.0], [2.0, 4.0], (2.0, [0.0, 2.0]))
        knows.see(0, snapshot(2.0, came=(1, 0, 0)))
        knows.see(1, snapshot(2.0, came=(1, 1, 2)))
        # a 1 + 1 and 1 + 0, b 0 + 1 and 3 + 2, k = 6/3: 1 (of 4 at most) and 2 follow, 0 and 3 do not.
        assert (knows.own, knows.others, knows.peers()) == ([2.0, 1.0], [1.0, 5.0], (2.0, [0.0, 1.5]))

    def test_observed_knows_little_of_a_scheduler_that_sent_next_to_nothing(self):
        g = scheduler(two_dcs([(0.0, 1, 1)], peers="observed", **THREE), *[snapshot(came=(0, 0, 0))] * 2)
        g.knows.see(0, snapshot(1.0, came=(1, 2, 2)))
        assert g.knows.peers() == (5.0, [0.0, 0.0])
        g.knows.see(0, snapshot(2.0, came=(0, 2, 0)))  # a 1/2, b 2 + 4/2
        assert g.knows.peers() == (3.0, [2.0, 0.0])

    def test_polls_of_one_dc_change_what_is_known_of_all(self):
        g = scheduler(two_dcs([(0.0, 1, 1)], peers="observed", **THREE), *[snapshot(came=(0, 0, 0))] * 2)
        g.knows.see(0, snapshot(1.0, came=(1, 0, 0)))
        assert g.knows.peers() == (1.0, [0.0, 0.0])
        g.knows.see(1, snapshot(1.5, came=(1, 6, 0)))  # k = 6/2: 0 (of 3) and 3 follow
        assert g.knows.peers() == (2.5, [0.0, 1.5])


class Watched(Knowledge):
    """Records which windows of which DC are carried, and with which ledger."""

    def __init__(self, *args):
        super().__init__(*args)
        self.carried: list[tuple[int, int, list[int]]] = []

    def _carry_one(self, d, at, *args):
        self.carried.append((d, at.window, [x.isl for x in self.ledger[d]]))
        super()._carry_one(d, at, *args)


def watched(**changes) -> Watched:
    """What the one scheduler of two DCs knows after their polls at 0 s."""
    knows = Watched(two_dcs([(0.0, 1, 1)], **{"view": "aged"} | changes), 0)
    for d in (0, 1):
        knows.see(d, snapshot(came=(0,)))
    return knows


class TestAgeing:
    def test_windows_are_carried_once_and_take_the_ledger(self):
        knows = watched()
        knows.note(0, Sent(isl=5, decided_s=0.0, dc_arrival_s=0.0))
        knows.carry(0, MEANS)
        assert knows.carried == []
        knows.carry(2, MEANS)
        assert knows.carried == [(0, 0, [5]), (0, 1, []), (1, 0, []), (1, 1, [])]
        knows.carry(2, MEANS)
        assert len(knows.carried) == 4
        knows.note(1, Sent(isl=7, decided_s=1.0, dc_arrival_s=1.0))
        knows.carry(3, MEANS)
        assert knows.carried[4:] == [(0, 2, []), (1, 2, [7])]

    def test_a_poll_begins_anew_with_what_it_cannot_have_seen(self):
        knows = watched()
        knows.note(0, Sent(isl=5, decided_s=0.0, dc_arrival_s=0.5))
        knows.note(0, Sent(isl=6, decided_s=0.0, dc_arrival_s=1.5))
        knows.carry(2, MEANS)
        assert knows.ledger[0] == []
        knows.see(0, snapshot(1.0, b=3.0, q=8.0, k=9.0, duty=0.25, came=(0,)))
        # The one still on the way is the only one that the poll has not seen.
        above_mean = 2.33 * math.sqrt(4 + 2 + 1)
        assert knows.belief(0, MEANS) == Belief(b=4.0, q_tokens=14.0, q=2.0, k=9.0, duty=0.25, ci=100.0, above_mean=above_mean)
        knows.carry(3, MEANS)
        assert knows.carried[4:] == [(0, 2, [6]), (1, 2, [])]

    def test_before_the_first_poll(self):
        knows = watched()
        knows.see(1, snapshot(-0.5, came=(0,)))
        knows.carry(1, MEANS)
        assert knows.carried == [(0, 0, []), (1, -1, []), (1, 0, [])]
        assert knows.belief(1, MEANS) == Belief(b=0.0, q_tokens=0.0, q=0.0, k=0.0, duty=0.0, ci=100.0)

    def test_polls_tell_nothing_of_progress(self):
        knows = watched()
        knows.views[0].progress = 3.0
        knows.see(0, snapshot(1.0, b=2.0, came=(0,)))
        assert (knows.views[0].progress, knows.views[1].progress) == (3.0, 0.0)

    def test_who_has_decided_carries_all_before_a_poll_of_any(self):
        g = scheduler(two_dcs([(0.0, 1, 1)], view="aged", peers="alike", alike=[3.0]), *[snapshot(came=(0,))] * 2)
        g.before_poll(1)
        assert [g.knows.views[d].window for d in (0, 1)] == [0, 0]
        g.dispatch(request(8, 2), 0)
        g.before_poll(1)
        assert [g.knows.views[d].window for d in (0, 1)] == [1, 1]
        assert (g.knows.ledger[0], g.knows.views[0].unseen) == ([], 3.0)
        g.knows.see(1, snapshot(0.5, came=(0,)))  # the other DC keeps what has come to it
        assert (g.knows.views[0].unseen, g.knows.views[0].prefill_s) == (3.0, 0.5)

    def test_snapshots_stay(self):
        knows = watched(view="snapshot")
        knows.note(0, Sent(isl=5, decided_s=0.0, dc_arrival_s=0.0))
        knows.carry(2, MEANS)
        assert knows.carried == []
        assert knows.ledger[0] == [Sent(isl=5, decided_s=0.0, dc_arrival_s=0.0)]

    def test_one_engine_in_a_hundred_has_more_than_the_mean(self):
        knows = watched(nodes=[2, 1])
        knows.see(0, snapshot(b=5.0, q=12.0, k=10.0, came=(0,)))
        knows.views[0].unseen = 0.5
        knows.note(0, Sent(isl=4, decided_s=0.0, dc_arrival_s=0.0))
        assert knows.belief(0, MEANS).above_mean == 2.33 * math.sqrt(5.5 + 3 + 0.5 + 0.5)
        assert knows.belief(1, MEANS).above_mean == 0.0

    @pytest.mark.parametrize("above_mean", [0.0, 2.5])
    def test_which_adds_to_the_wait(self, above_mean):
        s = scenario([(0.0, 1, 1)], kv_capacity_tokens=24)  # room for two mean requests
        at = Belief(b=5.0, q_tokens=0.0, q=3.0, k=10.0, duty=0.0, ci=0.0, above_mean=above_mean)
        t_res = 8 * (0.5 + 0.25 * 5)
        assert latency(s, 0.0, request(4, 8), at, MEANS)[0] == (5 + 3 + above_mean + 1 - 2) * t_res / 2 + 1.0

    def test_and_stays_while_an_ilp_iterates(self):
        at = Belief(b=1.0, q_tokens=2.0, q=3.0, k=4.0, duty=0.5, ci=6.0, above_mean=0.25).plus([request(8, 1)], 2)
        assert at == Belief(b=1.5, q_tokens=6.0, q=3.0, k=8.0, duty=0.5, ci=6.0, above_mean=0.25)


class TestCarrying:
    """Windows of 0.5 s, polls of two; steps last as long whatever they hold, but where a test says otherwise."""

    @staticmethod
    def carried(at: View, *, sent: int = 0, w: float = 1.0, o: float = 0.0, **changes) -> tuple[float, ...]:
        """(B, Q, K, duty, X, U, g) after one window into which so many requests of 4 tokens have been sent."""
        steps = {"t_pre": NO_PRE | {"b0": 0.25}, "t_dec": NO_DEC | {"alpha0": 0.125}}
        knows = Knowledge(scenario([(0.0, 1, 1)], view="aged", **steps | changes), 0)
        knows.ledger[0] = [Sent(isl=4, decided_s=0.0, dc_arrival_s=0.0)] * sent
        knows._carry_one(0, at, MEANS, w, o)
        assert knows.ledger[0] == []
        return at.b, at.q_tokens, at.k, at.duty, at.prefill_s, at.unseen, at.progress

    @staticmethod
    def busy() -> View:
        """Two requests run, 4 tokens old; two are queued."""
        return View(p_s=0.0, window=0, b=2.0, q_tokens=8.0, k=24.0, duty=0.25, ci=0.0, progress=4.0)

    def test_prefill_fills_the_window_and_more(self):
        at = self.busy()
        # Three are admitted, in three steps of 0.25 s between which no decode step finds time.
        assert self.carried(at, sent=1) == pytest.approx((5.0, 0.0, 36.0, 0.625, 0.25, 1.0, 8 / 5), rel=ROUNDING)
        # The rest of the third leaves time for two decode steps: G 8 + 2*5; of the five 2/8 * (18/5)/8 finish.
        left = 5 * 2 / 8 * (18 / 5) / 8
        wanted = (5 - left, 0.0, 36 + 10 - left * 12, 0.5625, 0.0, 1.0, (18 - left * 8) / (5 - left))
        assert self.carried(at) == pytest.approx(wanted, rel=ROUNDING)

    def test_room_for_one(self):
        left = 3 * 2 / 8 * (14 / 3) / 8  # two decode steps of three: G 2*4 + 2*3
        wanted = (3 - left, 8.0, 24 + 4 + 6 - left * 12, 0.375, 0.0, 1.0, (14 - left * 8) / (3 - left))
        assert self.carried(self.busy(), sent=1, max_num_seqs=3) == pytest.approx(wanted, rel=ROUNDING)

    def test_no_room(self):
        left = 2 * 4 / 8 * 8 / 8  # four decode steps of two: G 2*4 + 4*2
        wanted = (2 - left, 8.0, 24 + 8 - left * 12, 0.125, 0.0, 0.0, (16 - left * 8) / (2 - left))
        assert self.carried(self.busy(), max_num_seqs=1, batch_capacity=80) == pytest.approx(wanted, rel=ROUNDING)

    def test_more_are_admitted_than_decode_steps_fit_between(self):
        pre = NO_PRE | {"tok_slope_below": 1 / 128, "tok_knee": 10, "tok_slope_above": 1 / 64, "b0": 1 / 16, "b1": 1 / 32, "b2": 1 / 1024}
        at = View(p_s=0.0, window=0, b=0.0, q_tokens=24.0, k=0.0, duty=0.0, ci=0.0)
        prefill_s = 2 * (10 / 128 + 2 / 64 + 1 / 16 + 3 / 32 + 3 * 20 / 1024)  # two steps of three prompts, 12 tokens each
        wanted = (6.0, 0.0, 24.0, 0.5, prefill_s - 0.5, 0.0, 0.0)
        assert self.carried(at, t_pre=pre, t_dec=NO_DEC | {"alpha0": 0.25}) == pytest.approx(wanted, rel=ROUNDING)

    def test_half_a_request_is_half_a_step(self):
        at = View(p_s=0.0, window=0, b=0.0, q_tokens=0.0, k=0.0, duty=0.0, ci=0.0)
        # One on two engines; a decode step is longer than a window: j = 3/8. G 3/16; 3/64 * (3/8)/8 of them finish.
        left = 0.5 * (3 / 8) / 8 * (3 / 8) / 8
        wanted = (0.5 - left, 0.0, 2 + 3 / 16 - left * 12, 0.125, 0.0, 0.5, (3 / 16 - left * 8) / (0.5 - left))
        assert self.carried(at, sent=1, nodes=[2], t_dec=NO_DEC | {"alpha0": 1.0}) == pytest.approx(wanted, rel=ROUNDING)

    def test_others_come_by_weight_and_by_rate(self):
        at = View(p_s=0.0, window=0, b=0.0, q_tokens=0.0, k=0.0, duty=0.0, ci=0.0)
        # 1.5 for the one sent and half a second of 3 a second: 3 for 2 engines. They fill the one place of each, and half a request waits.
        b, q, *_, unseen, _ = self.carried(at, sent=1, w=1.5, o=3.0, nodes=[2], max_num_seqs=1, t_pre=NO_PRE | {"b0": 0.5})
        assert (b, q, unseen) == (1.0, 2.0, 1.5)

    def test_all_finish_at_most(self):
        at = View(p_s=0.0, window=0, b=2.0, q_tokens=0.0, k=24.0, duty=0.0, ci=0.0, progress=7.0)
        # 16 steps: G 14 + 32, an age of 23, 16/8 * 23/8 > 1. Nobody who runs holds no context.
        assert self.carried(at, t_dec=NO_DEC | {"alpha0": 1 / 32}) == (0.0,) * 7

    def test_who_are_of_the_usual_age_leave_at_the_usual_rate(self):
        at = View(p_s=0.0, window=0, b=4.0, q_tokens=0.0, k=48.0, duty=0.5, ci=0.0, progress=7.5)
        # Two decode steps of 4 + 1 requests, that are 8 tokens old then: as many tokens as 2*5/8 requests have.
        assert self.carried(at, sent=1)[0] == 5 - 2 * 5 / 8


class TestHeadroom:
    EMPTY = Belief(b=0.0, q_tokens=0.0, q=0.0, k=0.0, duty=0.0, ci=0.0)

    @pytest.mark.parametrize(("alike", "expected"), [(None, [6, 6]), ([2.5, 12.5], [4, 0]), ([1.0, 4.0], [12, 3])])
    def test_divided(self, alike, expected):
        s = scenario([(0.0, 1, 1)], nodes=[3], batch_capacity=4, own=[[0], [0]], headroom="divided", alike=alike)
        assert [headroom(s, g, 0, self.EMPTY) for g in (0, 1)] == expected
        assert [headroom(replace(s, headroom="whole"), g, 0, self.EMPTY) for g in (0, 1)] == [12, 12]

    def test_a_third_of_a_whole_number_is_one(self):
        s = scenario([(0.0, 1, 1)], nodes=[3], batch_capacity=40, headroom="divided", alike=[3.0])
        for running in range(120):
            assert headroom(s, 0, 0, replace(self.EMPTY, b=running / 3)) == (120 - running) // 3
