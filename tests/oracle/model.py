"""What the reference reads and what it returns."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.oracle.records import Batch


@dataclass(frozen=True)
class OracleScenario:
    """A whole scenario. Requests are sorted by arrival; their index is their id. Coefficient names: see `equations.py`."""

    window_s: float
    poll_windows: int
    poll_mode: str  # "sync" | "async"
    ledger_windows: int
    horizon_windows: int
    # requests
    arrival_s: list[float]
    isl: list[int]
    osl: list[int]
    scheduler: list[int]
    decision: tuple  # ("none",) | ("fixed", seconds) | ("affine", c0, c1)
    # data centres
    nodes: list[int]
    engines_per_node: list[int]
    pue: list[float]
    ci: Callable[[int], list[float]]  # CI of each DC at the start edge of window k >= 0
    own: list[list[int]]  # own[s]: the DCs of scheduler s
    rtt_s: list[list[float]]  # [scheduler][dc], 0 for own DCs
    # engines
    batching: str  # "study" | "prefill_first"
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_capacity_tokens: int
    tp: int
    t_pre: dict
    t_dec: dict
    e_pre: dict
    e_dec: dict
    idle_w_per_gpu: float
    max_w_per_gpu: float
    host_w: float
    # policy
    slo_ttft_s: float
    slo_tpot_s: float
    batch_capacity: int
    ledger: str  # "off" | "reset" | "in-flight"
    policy: tuple
    # ("round_robin",) | ("least_loaded",) | ("greedy", alpha, latency, signal) | ("moer",) | ("moer_soft", w)
    # | ("ilp",) | ("iterative_ilp", t_max) | ("green_llm",) | ("moer_cap", cap)
    # | ("facility_milp", "linear" | "exp", "standard" | "f_const" | "c_full")
    token_count: str = "sum"  # "sum" | "padded"
    # batches
    window_max_requests: int = 1_000_000
    forwarding: str = "direct"  # | "window" | "owner"
    headroom: str = "whole"  # | "divided"
    believed_osl: list[float] | None = None  # None: the true ones
    warmup_windows: int = 0
    # what schedulers know between polls
    peers: str = "unknown"  # | "alike" | "observed"
    view: str = "snapshot"  # | "aged"
    alike: list[float] | None = None  # w0 of each scheduler; None: the number of schedulers


@dataclass(frozen=True)
class OracleResult:
    """Lists per request are indexed by request id; lists per engine run over (dc, node, engine), the last fastest."""

    dc: list[int]
    node: list[int]
    engine: list[int]  # within the node
    decided_s: list[float]
    decision_s: list[float]
    dc_arrival_s: list[float]
    admit_s: list[float]
    first_token_s: list[float]
    finish_s: list[float]
    ledger: list[list[dict[str, float]]]  # [interval][dc] -> prefill_j, decode_j, idle_j, host_j, carbon_g
    drain_energy_j: float
    drain_carbon_g: float
    above_board: int  # steps that ask for more than board power
    prefill_s: list[float]  # per engine, between the warm-up and the horizon
    decode_s: list[float]
    idle_s: list[float]
    polls: list[tuple[int, int, float, float, float, float]]  # (window, dc, B, Q, K, duty) in order of time
    batches: list[Batch]  # in order of time
