"""The random worlds of batch policies reach the rare branches."""

from dataclasses import replace

from tests.oracle.model import OracleResult, OracleScenario
from tests.oracle.random_batches import GROUPS, KINDS, POLICIES, random_batches
from tests.oracle.simulator import simulate
from tests.oracle.timeline import window_of

SEEDS = range(6 * GROUPS)

WANTED = {
    *(*POLICIES, "linear", "exp", "standard", "f_const", "c_full"),
    *("off", "reset", "in-flight", "sync", "async", "study", "prefill_first", "none", "fixed", "affine"),
    *("optimal", "infeasible", "empty", "rule", "by carbon", "in turn", "by carbon and in turn", "iteration moves", "opening costs move"),
    *("full early", "full at once", "two full in a window", "last window", "arrival on an edge", "window without requests"),
    *("busy solver", "held", "held on an edge", "not held", "wrong belief", "equal CI", "zero CI"),
    *(f"{n} schedulers" for n in (1, 2, 3, 4)),
}


def windows(s: OracleScenario, r: OracleResult) -> set[str]:
    """What the windows of a world reach."""
    found, closed_early = set(), set()
    for batch in r.batches:
        window = window_of(batch.decided_s, s.window_s)
        early = batch.requests == s.window_max_requests and s.window_max_requests > 1
        if early and window * s.window_s < batch.decided_s:
            found |= {"full early", *(["two full in a window"] if (batch.scheduler, window) in closed_early else [])}
            closed_early.add((batch.scheduler, window))
        if early and sum(t == batch.decided_s for t in s.arrival_s) >= batch.requests:
            found.add("full at once")
        if batch.decided_s == s.horizon_windows * s.window_s:
            found.add("last window")
    if any(window_of(t, s.window_s) * s.window_s == t for t in s.arrival_s):
        found.add("arrival on an edge")
    if len({window_of(t, s.window_s) for t in s.arrival_s}) < s.horizon_windows:
        found.add("window without requests")
    return found


def dispatch(s: OracleScenario, r: OracleResult) -> set[str]:
    """What happens to its requests on their way."""
    found = set()
    if s.decision[0] == "affine" and any(b - a > s.decision[1] + 40 * s.decision[2] for a, b in zip(r.decided_s, r.decision_s)):
        found.add("busy solver")
    for scheduler, dc, decision_s, dc_arrival_s in zip(s.scheduler, r.dc, r.decision_s, r.dc_arrival_s):
        reached_s = decision_s + s.rtt_s[scheduler][dc]
        if dc not in s.own[scheduler]:
            found.add("held" if dc_arrival_s > reached_s else "not held")
            if dc_arrival_s > reached_s == window_of(reached_s, s.window_s) * s.window_s:
                found.add("held on an edge")
    return found


def decisions(s: OracleScenario, r: OracleResult) -> set[str]:
    """How its batches were decided."""
    found = {batch.status for batch in r.batches}
    for batch in r.batches:
        found |= {name for name, n in (("by carbon", batch.by_carbon), ("in turn", batch.in_turn)) if n}
        found |= {"by carbon and in turn"} if batch.by_carbon and batch.in_turn else set()
    for name, fact in (("iterative_ilp", "iteration moves"), ("facility_milp", "opening costs move")):
        if s.policy[0] == name and simulate(replace(s, policy=("ilp",))).dc != r.dc:
            found.add(fact)
    return found


def world(s: OracleScenario) -> set[str]:
    """What a world is made of."""
    first = s.ci(0)
    facts = {
        "wrong belief": s.believed_osl is not None and s.believed_osl != s.osl,
        "equal CI": len(set(first)) < len(first),
        "zero CI": 0.0 in first,
    }
    named = {s.policy[0], s.ledger, s.poll_mode, s.batching, s.decision[0], *(x for x in s.policy[1:] if isinstance(x, str))}
    return named | {fact for fact, holds in facts.items() if holds} | {f"{len(set(s.scheduler))} schedulers"}


def test_rare_branches_are_reached():
    seen = set()
    for seed in SEEDS:
        s = random_batches(seed)
        r = simulate(s)
        seen |= world(s) | windows(s, r) | dispatch(s, r) | decisions(s, r)
    missing = WANTED - seen
    assert not missing


def test_seeds_repeat_and_share_shapes():
    for seed in range(GROUPS):
        a, b = random_batches(seed), random_batches(seed)
        assert replace(a, ci=None) == replace(b, ci=None)
        other = random_batches(seed + GROUPS)
        assert tuple(a.nodes) == tuple(other.nodes) == KINDS[seed % len(KINDS)].nodes
        assert a.policy[0] == other.policy[0]


def test_batches_are_those_of_their_requests():
    for seed in range(GROUPS):
        s = random_batches(seed)
        r = simulate(s)
        if s.policy[0] == "moer_soft":
            assert r.decided_s == s.arrival_s
            continue
        assert sum(batch.requests for batch in r.batches) == len(s.arrival_s)
        assert sorted({(b.decided_s, b.scheduler) for b in r.batches}) == sorted(set(zip(r.decided_s, s.scheduler)))
        for arrival_s, decided_s in zip(s.arrival_s, r.decided_s):
            assert arrival_s <= decided_s <= (window_of(arrival_s, s.window_s) + 1) * s.window_s
