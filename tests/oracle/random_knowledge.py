"""The random worlds again, of further seeds, with schedulers that know more: of their peers, of what no poll told, of whose the room is.

What is new is drawn from a stream of its own, so the worlds of the seeds below stay as they are, and so do the shapes.
"""

import random
from dataclasses import replace

from tests.oracle.model import OracleScenario
from tests.oracle.random_batches import GROUPS, random_batches
from tests.oracle.random_scenarios import KINDS, random_scenario, round_trips

REQUEST_SEEDS = range(30 * len(KINDS), 43 * len(KINDS))
BATCH_SEEDS = range(6 * GROUPS, 18 * GROUPS)
OWNER_SEEDS = BATCH_SEEDS[len(BATCH_SEEDS) // 2 :]  # in which owners place anew what is forwarded to them, if the policy decides batches
MOST_IN_A_BATCH = 40  # what is handed over at one instant may be all there is, and batches have places for that


def informed_scenario(seed: int) -> OracleScenario:
    """A world of a policy that decides request by request and looks at the DCs."""
    s = random_scenario(seed)
    rng = random.Random(3300 + seed)
    return _informed(rng, s if s.policy != ("round_robin",) else replace(s, policy=("least_loaded",)))


def informed_batches(seed: int) -> OracleScenario:
    """A world of a policy that decides batches, or of `moer_soft`."""
    s = random_batches(seed)
    rng = random.Random(4300 + seed)
    if seed in OWNER_SEEDS and s.policy[0] != "moer_soft":
        own = _uneven_own(rng, s) if rng.random() < 0.6 else s.own
        rtt_s = round_trips(rng, own, len(s.nodes), s.window_s)
        most = min(s.window_max_requests, MOST_IN_A_BATCH)
        s = replace(s, forwarding="owner", decision=("none",), own=own, rtt_s=rtt_s, window_max_requests=most)
    return _informed(rng, s)


def _informed(rng: random.Random, s: OracleScenario) -> OracleScenario:
    return replace(
        s,
        peers=rng.choice(("unknown", "alike", "alike", "observed", "observed")),
        view="aged" if rng.random() < 0.85 else "snapshot",
        headroom=rng.choice(("whole", "divided")),
        alike=_shares(s) if rng.random() < 0.5 else None,
    )


def _shares(s: OracleScenario) -> list[float]:
    """All requests over own ones, as where the trace says whose they are."""
    mine = [s.scheduler.count(g) for g in range(len(s.own))]
    return [len(s.scheduler) / n if n else 1.0 for n in mine]


def _uneven_own(rng: random.Random, s: OracleScenario) -> list[list[int]]:
    """One scheduler has most DCs; where there are three schedulers or more, two of them may share one."""
    n_schedulers, dcs = len(s.own), list(range(len(s.nodes)))
    rng.shuffle(dcs)
    own = [[d] for d in dcs[:n_schedulers]]
    own[rng.randrange(n_schedulers)] += dcs[n_schedulers:]
    if n_schedulers > 2 and rng.random() < 0.5:
        a, b = rng.sample(range(n_schedulers), 2)
        own[a].append(own[b][0])
    return [sorted(x) for x in own]
