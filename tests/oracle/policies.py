"""A scheduler: what it has decided, how it sends requests off, and the policies that decide request by request."""

import math

from tests.oracle.estimates import Means, latency
from tests.oracle.knowledge import Knowledge, Sent
from tests.oracle.model import OracleScenario
from tests.oracle.records import Request
from tests.oracle.timeline import window_of


class Scheduler:
    """Decides its requests one after another, in order of arrival, or batch by batch (`batch_policies`)."""

    def __init__(self, scenario: OracleScenario, index: int):
        self.s = scenario
        self.index = index
        self.own = scenario.own[index]
        self.knows = Knowledge(scenario, index)
        n_dcs = len(scenario.nodes)
        first = min(self.own)
        self.order = [(first + i) % n_dcs for i in range(n_dcs)]
        self.turn = 0  # round-robin position; with all other policies only fallbacks advance it
        self.credit = [0.0] * n_dcs  # of smooth weighted round-robin
        self.decided: list[Request] = []
        self.sums = (0, 0, 0.0, 0.0)  # isl, isl^2, believed osl, believed osl^2 of `decided`
        self.last_decision_s = -math.inf

    def decide(self, r: Request) -> int:
        """The DC for a request that has arrived."""
        kind, *options = self.s.policy
        if kind == "round_robin":
            return self.next_in_turn(self.order)
        means = self.means([r])
        self.knows.carry(window_of(r.arrival_s, self.s.window_s), means)
        if kind == "least_loaded":
            at = {d: self.knows.belief(d, means) for d in self.order}
            return min(self.order, key=lambda d: at[d].b + at[d].q)  # min keeps the first of equals
        if kind == "greedy":
            return self._greedy(r, means, *options)
        if kind == "moer":
            return self._greedy(r, means, 0.0, "e2e", "ci")
        if kind == "moer_soft":
            return self._moer_soft(means, *options)
        raise ValueError(f"unknown policy {kind!r}")

    def dispatch(self, r: Request, dc: int) -> None:
        """Send off a request that was decided at its arrival."""
        self._send([r], [dc], r.arrival_s, self._decision_s(r.arrival_s, None), "direct")

    def dispatch_batch(self, requests: list[Request], dcs: list[int], decided_s: float) -> None:
        """Send off requests that were decided together."""
        self._send(requests, dcs, decided_s, self._decision_s(decided_s, len(requests)), self.s.forwarding)

    def other_owner(self, dc: int) -> int | None:
        """The scheduler to whom a DC belongs, where it is neither this one's nor nobody's."""
        return None if dc in self.own else next((g for g, own in enumerate(self.s.own) if dc in own), None)

    def _send(self, requests: list[Request], dcs: list[int], decided_s: float, decision_s: float, forwarding: str) -> None:
        """Fill in the requests' dispatch and remember them; those for other schedulers' DCs may wait for a window's end."""
        self.last_decision_s = decision_s
        for r, dc in zip(requests, dcs, strict=True):
            r.dc, r.placed_by, r.decided_s, r.decision_s = dc, self.index, decided_s, decision_s
            r.dc_arrival_s = decision_s + self.s.rtt_s[self.index][dc]
            elsewhere = {"direct": False, "window": dc not in self.own, "owner": self.other_owner(dc) is not None}
            if elsewhere[forwarding]:
                r.dc_arrival_s = (window_of(r.dc_arrival_s, self.s.window_s) + 1) * self.s.window_s
            self.decided.append(r)
            self.knows.note(dc, Sent(r.isl, decided_s, r.dc_arrival_s))
            isl, isl2, osl, osl2 = self.sums
            self.sums = (isl + r.isl, isl2 + r.isl**2, osl + r.believed_osl, osl2 + r.believed_osl**2)

    def next_in_turn(self, dcs: list[int]) -> int:
        """The next of these DCs, which are in own order."""
        dc = dcs[self.turn % len(dcs)]
        self.turn += 1
        return dc

    def means(self, now: list[Request]) -> Means:
        """Over all requests decided before; over the ones to decide now, if they are the first."""
        n, sums = len(self.decided), self.sums
        if n == 0:
            n, osl = len(now), [r.believed_osl for r in now]
            sums = (sum(r.isl for r in now), sum(r.isl**2 for r in now), sum(osl), sum(x**2 for x in osl))
        return Means(*(x / n for x in sums))

    def before_poll(self, window: int) -> None:
        """Age the views to the start of a window in which DCs are polled."""
        if self.decided:
            self.knows.carry(window, self.means([]))

    def estimate(self, r: Request, dc: int, means: Means) -> tuple[float, float]:
        """(TTFT, TPOT) that the scheduler expects for a request at a DC."""
        return latency(self.s, self.s.rtt_s[self.index][dc], r, self.knows.belief(dc, means), means)

    def _decision_s(self, decided_s: float, batch: int | None) -> float:
        """When the decision on a request, or on a batch of so many, is out."""
        kind, *options = self.s.decision
        if kind == "none":
            return decided_s
        if kind == "fixed":
            return decided_s + options[0]
        if kind == "affine":
            c0, c1 = options
            ready_s = max(decided_s, self.last_decision_s)
            # Added up as the page does: which of two requests reaches a DC first may hang on the last bit.
            return ready_s + c0 + c1 if batch is None else ready_s + (c0 + c1 * batch)
        raise ValueError(f"unknown decision latency {kind!r}")

    def _greedy(self, r: Request, means: Means, alpha: float, latency: str, signal: str) -> int:
        s = self.s
        lat: dict[int, float] = {}
        carbon: dict[int, float] = {}
        for d in self.order:
            ttft, tpot = self.estimate(r, d, means)
            if ttft <= s.slo_ttft_s and tpot <= s.slo_tpot_s:
                e2e = ttft + r.believed_osl * tpot
                lat[d] = {"e2e": e2e, "slo": ttft / s.slo_ttft_s + tpot / s.slo_tpot_s, "ttft": ttft}[latency]
                ci = self.knows.views[d].ci
                carbon[d] = {"ci": ci, "pue_ci": s.pue[d] * ci}[signal]
        if not lat:
            return self.next_in_turn(self.order)
        max_lat, max_carbon = max(lat.values()), max(map(abs, carbon.values()))

        def score(d: int) -> float:
            lat_ratio = lat[d] / max_lat if max_lat != 0.0 else 0.0
            carbon_ratio = carbon[d] / max_carbon if max_carbon != 0.0 else 0.0
            return alpha * lat_ratio + (1.0 - alpha) * carbon_ratio

        return min(lat, key=score)  # `lat` is in this scheduler's order, and min keeps the first of equals

    def _moer_soft(self, means: Means, w: float) -> int:
        beliefs = [self.knows.belief(d, means) for d in range(len(self.order))]
        cleanest = min(at.ci for at in beliefs)
        spread = max(at.ci for at in beliefs) - cleanest
        weights = []
        for at in beliefs:
            dirt = (at.ci - cleanest) / spread if spread else 0.0
            weights.append(max(0.01, 1.0 - (at.b + at.q) / self.s.batch_capacity) * (1.0 - w * dirt))
        total = sum(weights)
        self.credit = [credit + weight / total for credit, weight in zip(self.credit, weights, strict=True)]
        most = max(self.credit)
        dc = next(d for d in self.order if self.credit[d] >= most - 1e-9)
        self.credit[dc] -= 1.0
        return dc
