"""What does not change during a run, as immutable device arrays.

Dimension legend, used throughout the engine:
E engines, D data centres, G schedulers, H decode steps of a request, R requests held on the device, W requests decided in a step,
C places in transit, M passes of a step, T steps of a chunk; of batch policies: K batches of a scheduler in a step, N requests of a batch.

A *step* is a whole number of windows in which no snapshot is taken after its start; the engine advances step by step.
"""

from dataclasses import dataclass

import equinox as eqx
from jax import Array

from jaxserve.perf.latency import DecodeForm, PrefillForm
from jaxserve.perf.power import DecodeEnergy, PrefillEnergy

PEERS = UNKNOWN, ALIKE, OBSERVED = range(3)


class ValidRange(eqx.Module):
    """Where the step models were measured, as [least, greatest]; infinite where that is not known. Steps outside are counted."""

    prefill_tokens: Array  # [2] new tokens of a prefill step
    batch: Array  # [2] requests of a decode step
    context: Array  # [2] cached tokens a request of a decode step


class Fleet(eqx.Module):
    """Engines, data centres, schedulers and their network.

    Engines are numbered DC by DC, inside a DC in the order in which its round-robin visits them
    (node 0's first engine, node 1's first engine, ..., node 0's second engine, ...).
    """

    prefill_time: PrefillForm
    decode_time: DecodeForm
    prefill_energy: PrefillEnergy
    decode_energy: DecodeEnergy
    valid: ValidRange
    max_num_seqs: Array  # [] int32
    token_budget: Array  # [] tokens of one prefill step
    kv_capacity: Array  # [] tokens
    dc_members: Array  # [D, most engines of a DC] int32, E where a DC has fewer
    dc_first_engine: Array  # [D] int32
    dc_engines: Array  # [D] int32
    pue: Array  # [D]
    rtt_s: Array  # [G, D], 0 for a scheduler's own DCs
    own: Array  # [G, D] bool, whether the DC is one of them
    order: Array  # [G, D] int32, the DC at each place of a scheduler's own order
    place: Array  # [G, D] int32, the place of each DC in it
    slo_ttft_s: Array  # []
    slo_tpot_s: Array  # []
    batch_capacity: Array  # [] requests an engine, as the schedulers believe
    window_s: Array  # []
    poll_windows: Array  # [] int32
    poll_offset: Array  # [D] int32, windows
    prefill_first: Array  # [] bool, the batching loop: vLLM's, or else the study's
    ledger_kept: Array  # [] bool, whether schedulers remember their own dispatches at all ...
    ledger_in_flight: Array  # [] bool, ... and beyond a poll, until it can have seen them
    alike: Array  # [G] requests that one of a scheduler's own stands for, were all schedulers to do as it does
    peers: Array  # [] int32, what schedulers make of their peers: one of PEERS
    view_aged: Array  # [] bool, whether they carry a poll forward to the moment of their decision
    headroom_parts: Array  # [G] into how many parts a scheduler divides a DC's headroom, to take one of them
    window_max_requests: Array  # [] int32, the most that a batch policy decides together
    forward_window: Array  # [] bool, whether what a batch policy forwards waits for the end of a window at the other scheduler
    idle_w: Array  # [] W of an idle engine
    max_w: Array  # [] W of an engine's boards, which no step exceeds
    n_engines: int = eqx.field(static=True)  # E
    padded: bool = eqx.field(static=True)  # whether a prefill step spends its budget by its longest prompt, times their number
    forward_owner: bool = eqx.field(static=True, default=False)  # ... who then places it anew among its own DCs

    @property
    def n_dc(self) -> int:
        """Number of data centres D."""
        return self.dc_engines.shape[-1]

    @property
    def n_schedulers(self) -> int:
        """Number of schedulers G."""
        return self.order.shape[-2]


@dataclass(frozen=True)
class Sizes:
    """Static shapes of the compiled chunk: capacities that the host grows when they prove too small."""

    stay: int  # H, decode steps in which a request leaves, counted from its admission
    requests: int  # R
    step_requests: int  # W
    transit: int  # C
    passes: int  # M
    steps: int  # T
    step_windows: int  # windows in a step
    batches: int = 1  # K
    batch_requests: int = 1  # N


class Arrivals(eqx.Module):
    """The requests a chunk works on, numbered in order of arrival; row R (the last) is a sentinel that never arrives."""

    decision_s: Array  # [R+1]
    isl: Array  # [R+1] tokens, float64
    osl: Array  # [R+1] tokens, int32
    window: Array  # [R+1] int32, in which the request is decided
    osl_believed: Array  # [R+1] tokens, float64, what the schedulers take it for
    scheduler: Array  # [R+1] int32
    by_scheduler: Array  # [R+W] int32, request ids sorted by (step of their decision, scheduler, id), then R


class StepInputs(eqx.Module):
    """What changes from step to step and is known before the run."""

    index: Array  # [T] int32, number of the step in the run
    counted: Array  # [T] bool, whether the step lies between the warm-up and the horizon
    ci: Array  # [T, D] g/kWh at the step's start
    group_start: Array  # [T, G+1] int32, where each scheduler's requests of the step begin in `by_scheduler`
    batch_end: Array  # [T, K, G] int32, where each scheduler's batches of the step end there
