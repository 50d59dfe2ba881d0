"""A scheduler: its view of the DCs, its ledger of own dispatches, and the policies that decide request by request."""

import math

from tests.oracle.datacenter import Snapshot
from tests.oracle.estimates import Belief, Means, latency, n_engines
from tests.oracle.model import OracleScenario
from tests.oracle.records import Request
from tests.oracle.timeline import window_of


class Scheduler:
    """Decides its requests one after another, in order of arrival, or batch by batch (`batch_policies`)."""

    def __init__(self, scenario: OracleScenario, index: int):
        self.s = scenario
        self.index = index
        n_dcs = len(scenario.nodes)
        first = min(scenario.own[index])
        self.order = [(first + i) % n_dcs for i in range(n_dcs)]
        self.turn = 0  # round-robin position; with all other policies only fallbacks advance it
        self.credit = [0.0] * n_dcs  # of smooth weighted round-robin
        self.decided: list[Request] = []
        self.sent_to: list[list[Request]] = [[] for _ in range(n_dcs)]
        self.sums = (0, 0, 0.0)  # isl, isl^2, believed osl of `decided`
        self.last_decision_s = -math.inf

    def decide(self, r: Request, snapshots: list[Snapshot]) -> int:
        """The DC for a request, given the last snapshot of each DC."""
        kind, *options = self.s.policy
        if kind == "round_robin":
            return self.next_in_turn()
        means = self.means([r])
        if kind == "least_loaded":
            loads = {d: self._with_ledger(d, snapshots[d])[0] + snapshots[d].q / means.isl for d in self.order}
            return min(self.order, key=lambda d: loads[d])  # min keeps the first of equals
        if kind == "greedy":
            return self._greedy(r, snapshots, means, *options)
        if kind == "moer":
            return self._greedy(r, snapshots, means, 0.0, "e2e", "ci")
        if kind == "moer_soft":
            return self._moer_soft(snapshots, means, *options)
        raise ValueError(f"unknown policy {kind!r}")

    def dispatch(self, r: Request, dc: int) -> None:
        """Send off a request that was decided at its arrival."""
        self._send([r], [dc], r.arrival_s, self._decision_s(r.arrival_s, None), hold=False)

    def dispatch_batch(self, requests: list[Request], dcs: list[int], decided_s: float) -> None:
        """Send off requests that were decided together."""
        self._send(requests, dcs, decided_s, self._decision_s(decided_s, len(requests)), hold=self.s.remote_window)

    def _send(self, requests: list[Request], dcs: list[int], decided_s: float, decision_s: float, *, hold: bool) -> None:
        """Fill in the requests' dispatch and remember them; `hold` lets those for other schedulers' DCs wait for a window's end."""
        self.last_decision_s = decision_s
        for r, dc in zip(requests, dcs, strict=True):
            r.dc, r.decided_s, r.decision_s = dc, decided_s, decision_s
            r.dc_arrival_s = decision_s + self.s.rtt_s[self.index][dc]
            if hold and dc not in self.s.own[self.index]:
                r.dc_arrival_s = (window_of(r.dc_arrival_s, self.s.window_s) + 1) * self.s.window_s
            self.decided.append(r)
            self.sent_to[dc].append(r)
            isl, isl2, osl = self.sums
            self.sums = (isl + r.isl, isl2 + r.isl**2, osl + r.believed_osl)

    def next_in_turn(self) -> int:
        """The next DC in round-robin order."""
        dc = self.order[self.turn % len(self.order)]
        self.turn += 1
        return dc

    def means(self, now: list[Request]) -> Means:
        """Over all requests decided before; over the ones to decide now, if they are the first."""
        n = len(self.decided)
        isl, isl2, osl = self.sums
        if n == 0:
            n = len(now)
            isl, isl2, osl = sum(r.isl for r in now), sum(r.isl**2 for r in now), sum(r.believed_osl for r in now)
        return Means(isl / n, isl2 / n, osl / n)

    def belief(self, dc: int, snap: Snapshot, means: Means) -> Belief:
        """What the scheduler takes a DC to be."""
        b, q_tokens = self._with_ledger(dc, snap)
        return Belief(b=b, q_tokens=q_tokens, q=snap.q / means.isl, k=snap.k, duty=snap.duty, ci=snap.ci)

    def estimate(self, r: Request, dc: int, snap: Snapshot, means: Means) -> tuple[float, float]:
        """(TTFT, TPOT) that the scheduler expects for a request at a DC."""
        return latency(self.s, self.s.rtt_s[self.index][dc], r, self.belief(dc, snap, means), means)

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

    def _with_ledger(self, dc: int, snap: Snapshot) -> tuple[float, float]:
        """B and Q of the snapshot plus this scheduler's own dispatches that the snapshot cannot have seen."""
        # What this snapshot has seen, later ones will have seen too.
        self.sent_to[dc] = [r for r in self.sent_to[dc] if self._in_ledger(r, snap.p_s)]
        extra, n = self.sent_to[dc], n_engines(self.s, dc)
        return snap.b + len(extra) / n, snap.q + sum(r.isl for r in extra) / n

    def _in_ledger(self, r: Request, p_s: float) -> bool:
        if self.s.ledger == "off":
            return False
        if self.s.ledger == "reset":
            return r.decided_s >= p_s
        if self.s.ledger == "in-flight":
            return r.dc_arrival_s > p_s or r.decided_s >= p_s
        raise ValueError(f"unknown ledger {self.s.ledger!r}")

    def _greedy(self, r: Request, snapshots: list[Snapshot], means: Means, alpha: float, latency: str, signal: str) -> int:
        s = self.s
        lat: dict[int, float] = {}
        carbon: dict[int, float] = {}
        for d in self.order:
            ttft, tpot = self.estimate(r, d, snapshots[d], means)
            if ttft <= s.slo_ttft_s and tpot <= s.slo_tpot_s:
                e2e = ttft + r.believed_osl * tpot
                lat[d] = {"e2e": e2e, "slo": ttft / s.slo_ttft_s + tpot / s.slo_tpot_s, "ttft": ttft}[latency]
                carbon[d] = {"ci": snapshots[d].ci, "pue_ci": s.pue[d] * snapshots[d].ci}[signal]
        if not lat:
            return self.next_in_turn()
        max_lat, max_carbon = max(lat.values()), max(map(abs, carbon.values()))

        def score(d: int) -> float:
            lat_ratio = lat[d] / max_lat if max_lat != 0.0 else 0.0
            carbon_ratio = carbon[d] / max_carbon if max_carbon != 0.0 else 0.0
            return alpha * lat_ratio + (1.0 - alpha) * carbon_ratio

        return min(lat, key=score)  # `lat` is in this scheduler's order, and min keeps the first of equals

    def _moer_soft(self, snapshots: list[Snapshot], means: Means, w: float) -> int:
        ci = [snap.ci for snap in snapshots]
        spread = max(ci) - min(ci)
        weights = []
        for d, snap in enumerate(snapshots):
            at = self.belief(d, snap, means)
            dirt = (at.ci - min(ci)) / spread if spread else 0.0
            weights.append(max(0.01, 1.0 - (at.b + at.q) / self.s.batch_capacity) * (1.0 - w * dirt))
        total = sum(weights)
        self.credit = [credit + weight / total for credit, weight in zip(self.credit, weights, strict=True)]
        most = max(self.credit)
        dc = next(d for d in self.order if self.credit[d] >= most - 1e-9)
        self.credit[dc] -= 1.0
        return dc
