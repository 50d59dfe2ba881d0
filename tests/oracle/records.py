"""What happened to each request, and what each engine did: the facts that polls and the energy ledger are computed from."""

import math
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Request:
    """A request and its instants; an instant that is not known yet is infinite."""

    id: int
    scheduler: int
    arrival_s: float
    isl: int
    osl: int
    believed_osl: float = math.nan  # what the schedulers take osl to be; osl itself unless given
    placed_by: int = -1  # the scheduler that chose the DC: that of the request, or the DC's owner to whom it was handed
    dc: int = -1
    node: int = -1
    engine: int = -1
    decided_s: float = math.inf  # when its DC was chosen, whatever the latency until `decision_s`
    decision_s: float = math.inf
    dc_arrival_s: float = math.inf
    admit_s: float = math.inf
    pieces: list[tuple[float, int]] = field(default_factory=list)  # (end of the prefill step, prompt tokens it cached)
    token_s: list[float] = field(default_factory=list)  # instant of each generated token, the first included
    finish_s: float = math.inf

    def __post_init__(self) -> None:
        if math.isnan(self.believed_osl):
            self.believed_osl = self.osl


@dataclass(frozen=True, slots=True)
class Step:
    """One prefill or decode step of one engine."""

    start_s: float
    end_s: float
    kind: str  # "prefill" | "decode"
    energy_j: float
    requests: tuple[int, ...]
    above_board: bool  # it asks for more than the boards can draw


@dataclass(frozen=True, slots=True)
class Batch:
    """What became of one batch of a batch policy."""

    decided_s: float
    scheduler: int
    requests: int
    status: str  # of the (first) solve: "optimal" | "infeasible" | "empty", when no request has a feasible DC | "rule", without a solve
    objective: float  # g, of the assignment that stands; nan without one
    by_carbon: int  # requests that the fallback sent to a feasible DC, the one of lowest CI
    in_turn: int  # requests that the fallback sent to the next DC in round-robin order
    margin: float  # how near the batch was to being decided otherwise, relative: SLOs, and the second-best assignment
    handed: bool  # whether the scheduler placed it anew, as the owner of the DCs it was sent to
