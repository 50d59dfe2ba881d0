"""What a scheduler knows of the DCs between polls: the last snapshots, its own ledger, what its peers do, and how that ages."""

import math
from dataclasses import dataclass

from tests.oracle.datacenter import Snapshot
from tests.oracle.equations import t_dec, t_pre
from tests.oracle.estimates import Belief, Means, alike, most_running, n_engines
from tests.oracle.model import OracleScenario
from tests.oracle.timeline import window_of


@dataclass(frozen=True)
class Sent:
    """A request as the ledger of the scheduler that sent it has it."""

    isl: int
    decided_s: float
    dc_arrival_s: float


@dataclass
class View:
    """A DC as its last poll saw it, or carried from there up to the start of `window`: means over its engines."""

    p_s: float
    window: int
    b: float
    q_tokens: float
    k: float
    duty: float
    ci: float
    prefill_s: float = 0.0  # X: prefill begun and not over
    unseen: float = 0.0  # U: requests that have come unseen
    progress: float = 0.0  # g: tokens that a running request has generated


class Knowledge:
    """What one scheduler knows; everything by DC."""

    def __init__(self, scenario: OracleScenario, index: int):
        n_dcs = len(scenario.nodes)
        self.s, self.index = scenario, index
        self.views: dict[int, View] = {}
        self.unpolled: list[list[Sent]] = [[] for _ in range(n_dcs)]  # the ledger by the last poll
        self.ledger: list[list[Sent]] = [[] for _ in range(n_dcs)]  # the same without what has been carried into the view since
        self.own = [0.0] * n_dcs  # a_d
        self.others = [0.0] * n_dcs  # b_d

    def see(self, d: int, snap: Snapshot) -> None:
        """Learn from a poll."""
        progress = self.views[d].progress if d in self.views else 0.0  # no poll tells it
        window = window_of(snap.p_s, self.s.window_s)
        self.views[d] = View(snap.p_s, window, snap.b, snap.q, snap.k, snap.duty, snap.ci, progress=progress)
        # What this snapshot has seen, later ones will have seen too.
        self.unpolled[d] = [x for x in self.unpolled[d] if self._in_ledger(x, snap.p_s)]
        self.ledger[d] = list(self.unpolled[d])
        came_own = snap.came[self.index]
        self.own[d] = came_own + self.own[d] / 2
        self.others[d] = sum(snap.came) - came_own + self.others[d] / 2

    def note(self, d: int, sent: Sent) -> None:
        """Remember a request that the scheduler has sent to a DC."""
        if self._in_ledger(sent, self.views[d].p_s):
            self.unpolled[d].append(sent)
            self.ledger[d].append(sent)

    def belief(self, d: int, means: Means) -> Belief:
        """What the scheduler takes a DC to be."""
        view, mine, n = self.views[d], self.ledger[d], n_engines(self.s, d)
        w, _ = self.peers()
        sent = w * len(mine) / n
        b, q = view.b + sent, view.q_tokens / means.isl
        return Belief(
            b=b,
            q_tokens=view.q_tokens + w * sum(x.isl for x in mine) / n,
            q=q,
            k=view.k,
            duty=view.duty,
            ci=view.ci,
            above_mean=2.33 * math.sqrt(b + q + view.unseen + sent) if self.s.view == "aged" else 0.0,
        )

    def peers(self) -> tuple[float, list[float]]:
        """(w, how many requests one own request stands for; o, requests of others a second that come to each DC besides)."""
        none = [0.0] * len(self.own)
        if self.s.peers == "unknown":
            return 1.0, none
        w0 = alike(self.s, self.index)
        if self.s.peers == "alike":
            return w0, none
        w, follow, total = w0, none, sum(self.own)
        if total >= 1.0:
            k = sum(self.others) / total
            follow = [min(k * a, b) for a, b in zip(self.own, self.others, strict=True)]
            w = 1.0 + sum(follow) / total
        poll_s = self.s.poll_windows * self.s.window_s
        return w, [(b - c) / (2 * poll_s) for b, c in zip(self.others, follow, strict=True)]

    def carry(self, window: int, means: Means) -> None:
        """Age the views to the start of a window, in which a decision is taken that has these means."""
        if self.s.view == "snapshot":
            return
        w, o = self.peers()
        for d, view in self.views.items():
            while view.window < window:
                self._carry_one(d, view, means, w, o[d])
                view.window += 1

    def _carry_one(self, d: int, at: View, means: Means, w: float, o: float) -> None:
        """One window of the page's fluid: what is queued is admitted, prefilled, decoded and leaves."""
        s, n_d = self.s, n_engines(self.s, d)
        mine, self.ledger[d] = self.ledger[d], []
        at.unseen += w * len(mine) / n_d + o * s.window_s / n_d
        at.q_tokens += w * sum(x.isl for x in mine) / n_d + o * s.window_s / n_d * means.isl
        tokens = min(at.q_tokens, max(0.0, most_running(s, means, s.max_num_seqs) - at.b) * means.isl)
        admitted = tokens / means.isl
        prefills = min(admitted, max(1.0, s.window_s / t_dec(s.t_dec, max(at.b, 1.0), at.k)))
        if prefills > 0.0:
            each = admitted / prefills
            at.prefill_s += prefills * t_pre(s.t_pre, each * means.isl, each, each * means.isl2)
        prefill_s = min(at.prefill_s, s.window_s)
        generated = at.b * at.progress
        at.b += admitted
        at.k += tokens
        at.q_tokens -= tokens
        steps = (s.window_s - prefill_s) / t_dec(s.t_dec, max(at.b, 1.0), at.k)
        generated += steps * at.b
        age = generated / at.b if at.b > 0.0 else 0.0
        finished = at.b * min(1.0, steps / means.osl * age / (means.osl2 / (2.0 * means.osl)))
        generated = max(0.0, generated - finished * means.osl)
        at.k = max(0.0, at.k + steps * at.b - finished * (means.isl + means.osl))
        at.b -= finished
        at.progress = generated / at.b if at.b > 0.0 else 0.0
        at.k = at.k if at.b > 0.0 else 0.0
        at.duty += (prefill_s / s.window_s - at.duty) / s.poll_windows
        at.prefill_s -= prefill_s

    def _in_ledger(self, x: Sent, p_s: float) -> bool:
        if self.s.ledger == "off":
            return False
        if self.s.ledger == "reset":
            return x.decided_s >= p_s
        if self.s.ledger == "in-flight":
            return x.dc_arrival_s > p_s or x.decided_s >= p_s
        raise ValueError(f"unknown ledger {self.s.ledger!r}")
