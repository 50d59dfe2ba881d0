"""A scheduler: its view of the DCs, its ledger of own dispatches, its estimates and its policy."""

import math
from dataclasses import dataclass

from tests.oracle.datacenter import Snapshot
from tests.oracle.equations import t_dec, t_pre
from tests.oracle.model import OracleScenario
from tests.oracle.records import Request


@dataclass(frozen=True)
class Means:
    """Mean lengths of the requests a scheduler has decided so far."""

    isl: float
    isl2: float
    osl: float


class Scheduler:
    """Decides its requests one after another, in order of arrival."""

    def __init__(self, scenario: OracleScenario, index: int):
        self.s = scenario
        self.index = index
        n_dcs = len(scenario.nodes)
        first = min(scenario.own[index])
        self.order = [(first + i) % n_dcs for i in range(n_dcs)]
        self.turn = 0  # round-robin position; with greedy only fallbacks advance it
        self.decided: list[Request] = []
        self.sent_to: list[list[Request]] = [[] for _ in range(n_dcs)]
        self.sums = (0, 0, 0)  # isl, isl^2, osl of `decided`
        self.last_decision_s = -math.inf

    def decide(self, r: Request, snapshots: list[Snapshot]) -> int:
        """The DC for a request, given the last snapshot of each DC."""
        kind, *options = self.s.policy
        if kind == "round_robin":
            return self._next_in_turn()
        means = self._means(r)
        if kind == "least_loaded":
            loads = {d: self._with_ledger(d, snapshots[d])[0] + snapshots[d].q / means.isl for d in self.order}
            return min(self.order, key=lambda d: loads[d])  # min keeps the first of equals
        if kind == "greedy":
            return self._greedy(r, snapshots, means, *options)
        raise ValueError(f"unknown policy {kind!r}")

    def dispatch(self, r: Request, dc: int) -> None:
        """Fill in the request's dispatch and remember it."""
        r.dc = dc
        kind, *options = self.s.decision
        if kind == "none":
            r.decision_s = r.arrival_s
        elif kind == "fixed":
            r.decision_s = r.arrival_s + options[0]
        elif kind == "affine":
            c0, c1 = options
            r.decision_s = max(r.arrival_s, self.last_decision_s) + c0 + c1
        else:
            raise ValueError(f"unknown decision latency {kind!r}")
        self.last_decision_s = r.decision_s
        r.dc_arrival_s = r.decision_s + self.s.rtt_s[self.index][dc]
        self.decided.append(r)
        self.sent_to[dc].append(r)
        isl, isl2, osl = self.sums
        self.sums = (isl + r.isl, isl2 + r.isl**2, osl + r.osl)

    def _next_in_turn(self) -> int:
        dc = self.order[self.turn % len(self.order)]
        self.turn += 1
        return dc

    def _means(self, r: Request) -> Means:
        n = len(self.decided)
        if n == 0:
            return Means(float(r.isl), float(r.isl**2), float(r.osl))
        isl, isl2, osl = self.sums
        return Means(isl / n, isl2 / n, osl / n)

    def _with_ledger(self, dc: int, snap: Snapshot) -> tuple[float, float]:
        """B and Q of the snapshot plus this scheduler's own dispatches that the snapshot cannot have seen."""
        # What this snapshot has seen, later ones will have seen too.
        self.sent_to[dc] = [r for r in self.sent_to[dc] if self._in_ledger(r, snap.p_s)]
        extra = self.sent_to[dc]
        n_engines = self.s.nodes[dc] * self.s.engines_per_node[dc]
        return snap.b + len(extra) / n_engines, snap.q + sum(r.isl for r in extra) / n_engines

    def _in_ledger(self, r: Request, p_s: float) -> bool:
        if self.s.ledger == "off":
            return False
        if self.s.ledger == "reset":
            return r.decided_s >= p_s
        if self.s.ledger == "in-flight":
            return r.dc_arrival_s > p_s or r.decided_s >= p_s
        raise ValueError(f"unknown ledger {self.s.ledger!r}")

    def estimate(self, r: Request, dc: int, snap: Snapshot, means: Means) -> tuple[float, float]:
        """(TTFT, TPOT) that the scheduler expects for a request at a DC."""
        s = self.s
        b, q_tokens = self._with_ledger(dc, snap)
        q = snap.q / means.isl
        duty = min(snap.duty, 0.95)
        m = max(1, min(s.batch_capacity, math.floor(s.kv_capacity_tokens / (means.isl + means.osl))))
        t_res = means.osl * t_dec(s.t_dec, max(b, 1.0), snap.k) / (1.0 - duty)
        wait = max(0.0, b + q + 1.0 - m) * t_res / m
        prefill = t_pre(s.t_pre, r.isl + q_tokens, 1.0 + q, r.isl**2 + q * means.isl2)
        ttft = s.rtt_s[self.index][dc] + wait + prefill
        others_prefill = 0.0 if q_tokens == 0.0 else t_pre(s.t_pre, q_tokens, q, q * means.isl2) / r.osl
        tpot = (t_dec(s.t_dec, b + 1.0, snap.k + r.isl) + others_prefill) / (1.0 - duty)
        return ttft, tpot

    def _greedy(self, r: Request, snapshots: list[Snapshot], means: Means, alpha: float, latency: str, signal: str) -> int:
        s = self.s
        lat: dict[int, float] = {}
        carbon: dict[int, float] = {}
        for d in self.order:
            ttft, tpot = self.estimate(r, d, snapshots[d], means)
            if ttft <= s.slo_ttft_s and tpot <= s.slo_tpot_s:
                lat[d] = {"e2e": ttft + r.osl * tpot, "slo": ttft / s.slo_ttft_s + tpot / s.slo_tpot_s, "ttft": ttft}[latency]
                carbon[d] = {"ci": snapshots[d].ci, "pue_ci": s.pue[d] * snapshots[d].ci}[signal]
        if not lat:
            return self._next_in_turn()
        max_lat, max_carbon = max(lat.values()), max(carbon.values())

        def score(d: int) -> float:
            lat_ratio = lat[d] / max_lat if max_lat != 0.0 else 0.0
            carbon_ratio = carbon[d] / max_carbon if max_carbon != 0.0 else 0.0
            return alpha * lat_ratio + (1.0 - alpha) * carbon_ratio

        return min(lat, key=score)  # `lat` is in this scheduler's order, and min keeps the first of equals
