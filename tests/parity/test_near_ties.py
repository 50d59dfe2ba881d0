"""No random world hangs on the last bit, so parity can ask for identical routing of every request, on any machine.

The engine and the reference round differently where XLA contracts a product and a sum. That could turn a decision whose scores
all but tie, or move a step's end across a poll. Here the reference shows that no world has such a coincidence: what is not
equal is far apart, and what is equal is computed from equal numbers, or in exact binary fractions.
The loads of least-loaded are sums and quotients, which both sides round alike, in the same order, unless they are weighted or aged.
"""

from itertools import combinations

import numpy as np
import pytest

from tests.oracle.equations import t_pre
from tests.oracle.model import OracleScenario
from tests.oracle.policies import Means, Scheduler
from tests.oracle.records import Request
from tests.oracle.simulator import Simulation
from tests.parity.worlds import OTHERS, SEEDS, world

CLOSE = 1e-9  # a million times the rounding of a score; the closest scores that differ are 2e-5 apart
CLOSE_S = 1e-9  # s; rounding of a clock is 1e-14 here, and the closest unequal instants are 8e-9 apart


def dyadic(s: OracleScenario) -> bool:
    """Whether steps last exact binary fractions of a second, whatever they hold."""
    return t_pre(s.t_pre, 1, 1, 1) == t_pre(s.t_pre, 9999, 1, 9999**2)


def plain(s: OracleScenario) -> bool:
    """Whether schedulers go by what polls and ledgers count, and nothing else."""
    return s.view == "snapshot" and s.peers == "unknown"


class Watched(Scheduler):
    """Records how close each greedy decision came to another one."""

    def __init__(self, scenario: OracleScenario, index: int):
        super().__init__(scenario, index)
        self.near: list[str] = []

    def decide(self, r: Request) -> int:
        chosen = super().decide(r)
        if self.s.policy == ("least_loaded",) and not plain(self.s):
            at = [self.knows.belief(d, self.means([r])) for d in self.order]
            loads = sorted(x.b + x.q for x in at)
            if any(0.0 < load - loads[0] < CLOSE for load in loads):
                self.near.append(f"request {r.id}: loads {loads}")
        return chosen

    def _greedy(self, r: Request, means: Means, alpha: float, latency: str, signal: str) -> int:
        s, rows = self.s, []
        for d in self.order:
            ttft, tpot = self.estimate(r, d, means)
            for expected, limit in ((ttft, s.slo_ttft_s), (tpot, s.slo_tpot_s)):
                if abs(expected - limit) < CLOSE * limit and not (dyadic(s) and plain(s) and expected == limit):
                    self.near.append(f"request {r.id}: {expected!r} against an SLO of {limit!r}")
            if ttft <= s.slo_ttft_s and tpot <= s.slo_tpot_s:
                lat = {"e2e": ttft + r.osl * tpot, "slo": ttft / s.slo_ttft_s + tpot / s.slo_tpot_s, "ttft": ttft}[latency]
                # What has no weight in the score does not count.
                carbon = self.knows.views[d].ci * (s.pue[d] if signal == "pue_ci" else 1.0)
                rows.append((lat if alpha > 0 else 0.0, carbon if alpha < 1 else 0.0))
        most = [max(column) or 1.0 for column in zip(*rows, strict=True)]
        for a, b in combinations(rows, 2):
            gap = alpha * (a[0] - b[0]) / most[0] + (1 - alpha) * (a[1] - b[1]) / most[1]
            if a != b and abs(gap) < CLOSE:
                self.near.append(f"request {r.id}: {a} against {b}")
        return super()._greedy(r, means, alpha, latency, signal)


@pytest.mark.parametrize("seed", [*SEEDS, *OTHERS])
def test_nothing_all_but_ties(seed: int):
    s = world(seed)
    simulation = Simulation(s, Watched)
    simulation.run()
    watched = [g for g in simulation.schedulers if isinstance(g, Watched)]
    assert watched
    assert not [near for scheduler in watched for near in scheduler.near]
    if dyadic(s):
        return
    for dc in simulation.dcs:
        ends = np.array([step.end_s for engine in dc.engines for step in engine.steps])
        arrivals = np.sort([r.dc_arrival_s for r in simulation.requests if r.dc == dc.index] or [np.inf])
        after = np.minimum(np.searchsorted(arrivals, ends), len(arrivals) - 1)
        edge = np.round(ends / s.window_s) * s.window_s
        for other in (edge, arrivals[after], arrivals[np.maximum(after - 1, 0)]):
            assert not np.any(np.abs(ends - other) < CLOSE_S)
