"""The event loop: polls, arrivals, transit and engine iterations, in order of time."""

import heapq

from tests.oracle.batch_policies import BATCH_POLICIES, decide_batch
from tests.oracle.datacenter import DataCenter
from tests.oracle.energy import energy_ledger, engine_seconds
from tests.oracle.model import OracleResult, OracleScenario
from tests.oracle.policies import Scheduler
from tests.oracle.records import Batch, Request
from tests.oracle.timeline import first_poll_window, window_of
from tests.oracle.windows import Gathering

# At one instant: a poll comes before the decisions and iterations of its window; an owner places what was handed to it before its
# own window ends, and that ends before the requests of the next arrive; a request decided without latency can reach its DC at once;
# and an iteration sees all that reached its engine by then.
POLL, HANDED, CLOSE, ARRIVAL, DC_ARRIVAL, ITERATION = range(6)


class Simulation:
    """The state of a run. An event is (time, kind, index, window): index is a DC, scheduler, request or engine, window that of a poll."""

    def __init__(self, scenario: OracleScenario, scheduler: type[Scheduler] = Scheduler):
        s = self.s = scenario
        check(s)
        believed = s.believed_osl or s.osl
        self.requests = [Request(*row) for row in zip(range(len(s.arrival_s)), s.scheduler, s.arrival_s, s.isl, s.osl, believed)]
        self.gathering = [Gathering(s.window_s, s.window_max_requests) for _ in s.own] if s.policy[0] in BATCH_POLICIES else []
        self.batches: list[Batch] = []
        self.schedulers = [scheduler(s, i) for i in range(len(s.own))]
        self.dcs = [DataCenter(s, d) for d in range(len(s.nodes))]
        self.engines = [e for dc in self.dcs for e in dc.engines]
        self.first_engine = [sum(len(dc.engines) for dc in self.dcs[:d]) for d in range(len(self.dcs))]
        self.handed: dict[tuple[int, float], list[tuple[float, int]]] = {}  # (owner, when it places them): (when they got there, id)
        for d, dc in enumerate(self.dcs):
            for g in self.schedulers:
                g.knows.see(d, dc.empty_snapshot(first_poll_window(s, d) - s.poll_windows))
        self.polls: list[tuple[int, int, float, float, float, float]] = []
        self.events = [(r.arrival_s, ARRIVAL, r.id, 0) for r in self.requests]
        heapq.heapify(self.events)
        self.polls_planned = 0
        # No request arrives after the horizon; the last windows close on it.
        self._plan_polls(s.horizon_windows + (1 if self.gathering else 0))

    def run(self) -> None:
        while self.events:
            t, kind, index, window = heapq.heappop(self.events)
            if kind == POLL:
                self._poll(index, window)
            elif kind == HANDED:
                self._place_anew(index, t)
            elif kind == CLOSE:
                self._close(index, t)
            elif kind == ARRIVAL:
                self._arrive(self.requests[index])
            elif kind == DC_ARRIVAL:
                self._reach_dc(self.requests[index])
            else:
                self._iterate(index, t)

    def _plan_polls(self, end: int) -> None:
        """Poll in all windows before `end`."""
        for d in range(len(self.dcs)):
            for k in range(first_poll_window(self.s, d), end, self.s.poll_windows):
                if k >= self.polls_planned:
                    heapq.heappush(self.events, (k * self.s.window_s, POLL, d, k))
        self.polls_planned = max(self.polls_planned, end)

    def _poll(self, d: int, window: int) -> None:
        snap = self.dcs[d].poll(window)
        for g in self.schedulers:
            g.before_poll(window)  # of all DCs, at the first poll of an instant
            g.knows.see(d, snap)
        self.polls.append((window, d, snap.b, snap.q, snap.k, snap.duty))

    def _arrive(self, r: Request) -> None:
        if self.gathering:
            end = self.gathering[r.scheduler].add(r)
            if end is None:
                self._close(r.scheduler, r.arrival_s)
            else:
                heapq.heappush(self.events, (end, CLOSE, r.scheduler, 0))
            return
        # Polls fall on window edges and precede decisions of the same instant, so the latest poll of each DC
        # is its last one at or before the start of the window in which the request arrives.
        scheduler = self.schedulers[r.scheduler]
        scheduler.dispatch(r, scheduler.decide(r))
        self._send(r)

    def _close(self, scheduler: int, t: float) -> None:
        batch = self.gathering[scheduler].close()
        if not batch:
            return
        g = self.schedulers[scheduler]
        self.batches.append(decide_batch(g, batch, t))
        for r in batch:
            owner = g.other_owner(r.dc) if self.s.forwarding == "owner" else None
            if owner is None:
                self._send(r)
            else:
                self._hand_over(r, owner, r.decision_s + self.s.rtt_s[scheduler][r.dc])

    def _hand_over(self, r: Request, owner: int, reached_s: float) -> None:
        """Let the owner of its DC place a request anew, at the end of the window in which it gets there."""
        self.handed.setdefault((owner, r.dc_arrival_s), []).append((reached_s, r.id))
        heapq.heappush(self.events, (r.dc_arrival_s, HANDED, owner, 0))
        self._plan_polls(window_of(r.dc_arrival_s, self.s.window_s) + 1)

    def _place_anew(self, owner: int, t: float) -> None:
        """Decide what was handed to an owner at t; the first event of that instant finds all of it, and the others nothing."""
        requests = [self.requests[i] for _, i in sorted(self.handed.pop((owner, t), []))]
        most = self.s.window_max_requests
        for i in range(0, len(requests), most):
            group = requests[i : i + most]
            self.batches.append(decide_batch(self.schedulers[owner], group, t, handed=True))
            for r in group:
                self._send(r)

    def _send(self, r: Request) -> None:
        self.dcs[r.dc].send(r)
        heapq.heappush(self.events, (r.dc_arrival_s, DC_ARRIVAL, r.id, 0))

    def _reach_dc(self, r: Request) -> None:
        index = self.first_engine[r.dc] + self.dcs[r.dc].place(r)
        self.engines[index].waiting.append(r)
        self._plan_iteration(index, r.dc_arrival_s)

    def _plan_iteration(self, index: int, t: float) -> None:
        if not self.engines[index].wake_planned:
            self.engines[index].wake_planned = True
            heapq.heappush(self.events, (t, ITERATION, index, 0))

    def _iterate(self, index: int, t: float) -> None:
        engine = self.engines[index]
        engine.wake_planned = False
        end = engine.iterate(t)
        if end is not None:  # else idle until the next request reaches it
            self._plan_iteration(index, end)


def check(s: OracleScenario) -> None:
    """Refuse what would never end or is not a scenario."""
    if any(a > b for a, b in zip(s.arrival_s, s.arrival_s[1:])):
        raise ValueError("requests must be sorted by arrival_s")
    if any(not 0.0 <= a < s.horizon_windows * s.window_s for a in s.arrival_s):
        raise ValueError("arrivals must lie in [0, horizon)")
    if any(isl < 1 or osl < 1 or isl + osl > s.kv_capacity_tokens for isl, osl in zip(s.isl, s.osl)):
        raise ValueError("every request needs isl >= 1, osl >= 1 and isl + osl <= kv_capacity_tokens")
    if s.forwarding == "owner" and s.decision != ("none",):
        raise ValueError("owners place requests anew at once, so decisions must have no latency")
    choices = {"forwarding": ("direct", "window", "owner"), "peers": ("unknown", "alike", "observed"), "view": ("snapshot", "aged")}
    for name, values in choices.items():
        if getattr(s, name) not in values:
            raise ValueError(f"{name} must be one of {values}")
    if not all(s.own):
        raise ValueError("every scheduler needs a DC of its own")


def simulate(scenario: OracleScenario) -> OracleResult:
    """Run a scenario until its last request has finished."""
    simulation = Simulation(scenario)
    simulation.run()
    ledger, drain_j, drain_g = energy_ledger(scenario, simulation.dcs)
    seconds = [engine_seconds(scenario, e) for e in simulation.engines]
    requests = simulation.requests
    return OracleResult(
        dc=[r.dc for r in requests],
        node=[r.node for r in requests],
        engine=[r.engine for r in requests],
        decided_s=[r.decided_s for r in requests],
        decision_s=[r.decision_s for r in requests],
        dc_arrival_s=[r.dc_arrival_s for r in requests],
        admit_s=[r.admit_s for r in requests],
        first_token_s=[r.token_s[0] for r in requests],
        finish_s=[r.finish_s for r in requests],
        ledger=ledger,
        drain_energy_j=drain_j,
        drain_carbon_g=drain_g,
        above_board=sum(step.above_board for engine in simulation.engines for step in engine.steps),
        prefill_s=[x[0] for x in seconds],
        decode_s=[x[1] for x in seconds],
        idle_s=[x[2] for x in seconds],
        polls=simulation.polls,
        batches=simulation.batches,
    )
