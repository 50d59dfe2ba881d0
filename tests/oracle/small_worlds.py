"""Worlds small enough to work by hand: times are dyadic fractions, so that equality is exact."""

import math
from dataclasses import replace

from tests.oracle.datacenter import Snapshot
from tests.oracle.model import OracleScenario
from tests.oracle.policies import Scheduler
from tests.oracle.records import Request

NO_PRE = dict.fromkeys(("tok_slope_below", "tok_slope_above", "tok_knee", "b0", "b1", "b2"), 0.0)
NO_DEC = dict.fromkeys(("alpha0", "alpha1", "alpha2", "beta0", "beta1", "beta2"), 0.0)
FLAT_E_PRE = {"e_pre0": 8.0, "e_pre_tok": 1.0, "e_pre_sq": 0.0}  # a request of osl 1 alone at an engine: 8 + isl + 4 J


def scenario(requests: list[tuple[float, int, int]], **changes) -> OracleScenario:
    """One scheduler, one DC, one engine; prefill steps take 1 s and cost 8 J, decode steps 0.5 + 0.25*B s and 4 J."""
    arrival, isl, osl = zip(*requests)
    base = OracleScenario(
        window_s=0.5,
        poll_windows=2,
        poll_mode="sync",
        ledger_windows=4,
        horizon_windows=20,
        arrival_s=list(arrival),
        isl=list(isl),
        osl=list(osl),
        scheduler=[0] * len(requests),
        decision=("none",),
        nodes=[1],
        engines_per_node=[1],
        pue=[1.0],
        ci=lambda k: [100.0],
        own=[[0]],
        rtt_s=[[0.0]],
        batching="study",
        max_num_seqs=8,
        max_num_batched_tokens=100,
        kv_capacity_tokens=1000,
        tp=1,
        t_pre=NO_PRE | {"b0": 1.0},
        t_dec=NO_DEC | {"alpha0": 0.5, "alpha1": 0.25},
        e_pre={"e_pre0": 8.0, "e_pre_tok": 0.0, "e_pre_sq": 0.0},
        e_dec={"e_dec0": 4.0, "e_dec_req": 0.0, "e_dec_kv": 0.0},
        idle_w_per_gpu=0.0,
        max_w_per_gpu=1e6,
        host_w=0.0,
        slo_ttft_s=1e9,
        slo_tpot_s=1e9,
        batch_capacity=8,
        ledger="in-flight",
        policy=("round_robin",),
    )
    return replace(base, **changes)


def two_dcs(requests, **changes) -> OracleScenario:
    """The same with two DCs of one engine each; the scheduler owns DC 0."""
    two = {"nodes": [1, 1], "engines_per_node": [1, 1], "pue": [1.0, 1.0], "ci": lambda k: [100.0, 100.0], "rtt_s": [[0.0, 0.0]]}
    return scenario(requests, **two | changes)


def clean_and_dirty(requests, **changes) -> OracleScenario:
    """Two DCs of one engine, the first with half the CI of the second; one place for a request at each."""
    usual = {"ci": lambda k: [100.0, 200.0], "batch_capacity": 1, "policy": ("ilp",), "e_pre": FLAT_E_PRE}
    return two_dcs(requests, **usual | changes)


def snapshot(p_s: float = 0.0, came: tuple[int, ...] = (0, 0), **seen: float) -> Snapshot:
    """A poll at p_s; what is not given is 0, but for a CI of 100."""
    return Snapshot(p_s=p_s, came=came, **{"b": 0.0, "q": 0.0, "k": 0.0, "duty": 0.0, "ci": 100.0} | seen)


def scheduler(s: OracleScenario, *snapshots: Snapshot) -> Scheduler:
    """The first scheduler, which has seen these polls of DCs 0, 1, ..."""
    g = Scheduler(s, 0)
    for d, snap in enumerate(snapshots):
        g.knows.see(d, snap)
    return g


def request(isl: int, osl: int, believed: float = math.nan) -> Request:
    """A request by itself."""
    return Request(0, 0, 0.0, isl, osl, believed)
