"""The random worlds whose schedulers know more reach the rare branches, and what they know matters."""

from dataclasses import replace

from tests.oracle.knowledge import Knowledge
from tests.oracle.model import OracleScenario
from tests.oracle.policies import Scheduler
from tests.oracle.random_batches import POLICIES, random_batches
from tests.oracle.random_knowledge import BATCH_SEEDS, OWNER_SEEDS, REQUEST_SEEDS, informed_batches, informed_scenario
from tests.oracle.random_scenarios import random_scenario
from tests.oracle.simulator import Simulation
from tests.oracle.timeline import window_of

WORLDS = [informed_scenario(seed) for seed in REQUEST_SEEDS] + [informed_batches(seed) for seed in BATCH_SEEDS]

WANTED = {
    *(f"{view} {peers}" for view in ("snapshot", "aged") for peers in ("unknown", "alike", "observed")),
    *("whole", "divided", "shares", "equal parts", "least_loaded", "greedy", *POLICIES),
    *(f"owner {policy}" for policy in POLICIES if policy != "moer_soft"),
    *("queue left for want of room", "prefill longer than a window", "all leave", "others come", "part of a request"),
    *("before the first poll", "carried before a poll", "others follow", "sent next to nothing"),
    *("handed", "handed in groups", "handed before its own batch", "handed at a poll", "handed after the horizon", "handed out of order"),
    *("dealt among its own", "by carbon among its own", "DC of two"),
}


class WatchedKnowledge(Knowledge):
    """Notes what the carrying comes upon."""

    found: set[str]

    def _carry_one(self, d, at, means, w, o):
        before = at.b
        super()._carry_one(d, at, means, w, o)
        facts = {
            "queue left for want of room": at.q_tokens > 0.0,
            "prefill longer than a window": at.prefill_s > 0.0,
            "all leave": before > 0.0 == at.b,
            "others come": o > 0.0,
            "part of a request": 0.0 < at.unseen < 1.0,
            "before the first poll": at.p_s < 0.0,
        }
        self.found |= {fact for fact, holds in facts.items() if holds}

    def peers(self):
        w, o = super().peers()
        if self.s.peers == "observed" and sum(self.others):
            self.found |= {"sent next to nothing"} if 0.0 < sum(self.own) < 1.0 else {"others follow"} if w > 1.0 else set()
        return w, o


class WatchedScheduler(Scheduler):
    """Has such knowledge."""

    def __init__(self, scenario: OracleScenario, index: int):
        super().__init__(scenario, index)
        self.knows = WatchedKnowledge(scenario, index)
        self.knows.found = self.found = set()

    def before_poll(self, window: int) -> None:
        ages = [view.window for view in self.knows.views.values()]
        super().before_poll(window)
        self.found |= {"carried before a poll"} if ages != [view.window for view in self.knows.views.values()] else set()


class Watched(Simulation):
    """Notes what becomes of requests that are handed over."""

    def __init__(self, s: OracleScenario):
        super().__init__(s, WatchedScheduler)
        self.found: set[str] = set()
        self.last: tuple[int, float] = (-1, -1.0)

    def _place_anew(self, owner: int, t: float) -> None:
        handed = [i for _, i in sorted(self.handed.get((owner, t), []))]
        before = len(self.batches)
        super()._place_anew(owner, t)
        if not handed:
            return
        new = self.batches[before:]
        self.last = (owner, t)
        facts = {
            "handed": True,
            "handed in groups": len(new) > 1,
            "handed at a poll": any(window_of(t, self.s.window_s) == poll[0] for poll in self.polls),
            "handed after the horizon": t > self.s.horizon_windows * self.s.window_s,
            "handed out of order": handed != sorted(handed),
            "dealt among its own": len(self.s.own[owner]) > 1 and any(batch.in_turn > 1 for batch in new),
            "by carbon among its own": len(self.s.own[owner]) > 1 and any(batch.by_carbon for batch in new),
            "DC of two": any(sum(self.requests[i].dc in own for own in self.s.own) > 1 for i in handed),
        }
        self.found |= {fact for fact, holds in facts.items() if holds}
        assert all(self.requests[i].dc in self.s.own[owner] for i in handed)

    def _close(self, scheduler: int, t: float) -> None:
        before = len(self.batches)
        super()._close(scheduler, t)
        if len(self.batches) > before and self.last == (scheduler, t):
            self.found.add("handed before its own batch")


def facts(s: OracleScenario) -> set[str]:
    """What a world is made of and comes upon."""
    simulation = Watched(s)
    simulation.run()
    made = {f"{s.view} {s.peers}", s.headroom, "equal parts" if s.alike is None else "shares", s.policy[0]}
    owner = {f"owner {s.policy[0]}"} if s.forwarding == "owner" else set()
    known = [g.found for g in simulation.schedulers if isinstance(g, WatchedScheduler)]
    return (made | owner | simulation.found).union(*known)


def test_rare_branches_are_reached():
    seen = set()
    for s in WORLDS:
        seen |= facts(s)
    assert not WANTED - seen


def test_enough_worlds():
    requests, batches = WORLDS[: len(REQUEST_SEEDS)], WORLDS[len(REQUEST_SEEDS) :]
    assert sum(s.view == "aged" for s in requests) >= 70
    assert sum(s.view == "aged" for s in batches) >= 100
    assert sum(s.forwarding == "owner" for s in batches) >= 40


def routing(s: OracleScenario) -> list[int]:
    simulation = Simulation(s)
    simulation.run()
    return [r.dc for r in simulation.requests]


def test_knowledge_matters():
    """In most worlds of two schedulers or more it sends some request elsewhere; each part of it by itself too. A fifth of them shows it."""
    moved = {"peers": 0, "view": 0, "headroom": 0, "all": 0}
    several = [s for s in WORLDS if len(s.own) > 1][::5]
    plain = {"peers": "unknown", "view": "snapshot", "headroom": "whole"}
    for s in several:
        mine = routing(s)
        moved["all"] += routing(replace(s, **plain)) != mine
        for name, value in plain.items():
            moved[name] += getattr(s, name) != value and routing(replace(s, **{name: value})) != mine
    assert moved["all"] > 0.5 * len(several)
    assert min(moved.values()) >= 3


def test_what_is_new_leaves_the_rest_of_a_world_as_it_was():
    new = {"peers", "view", "headroom", "alike"}
    for seed in (*REQUEST_SEEDS[:14], *BATCH_SEEDS[:12], *OWNER_SEEDS[:12]):
        before, after = (
            (random_scenario(seed), informed_scenario(seed)) if seed in REQUEST_SEEDS else (random_batches(seed), informed_batches(seed))
        )
        changed = {name for name in vars(before) if name != "ci" and getattr(before, name) != getattr(after, name)}
        by_owner = {"forwarding", "decision", "own", "rtt_s", "window_max_requests"} if after.forwarding == "owner" else set()
        assert changed <= new | by_owner | ({"policy"} if before.policy == ("round_robin",) else set())
