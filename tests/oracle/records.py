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
    dc: int = -1
    node: int = -1
    engine: int = -1
    decision_s: float = math.inf
    dc_arrival_s: float = math.inf
    admit_s: float = math.inf
    pieces: list[tuple[float, int]] = field(default_factory=list)  # (end of the prefill step, prompt tokens it cached)
    token_s: list[float] = field(default_factory=list)  # instant of each generated token, the first included
    finish_s: float = math.inf

    @property
    def decided_s(self) -> float:
        """When the choice of a DC was made: per-request policies decide at arrival, whatever the latency until `decision_s`."""
        return self.arrival_s


@dataclass(frozen=True, slots=True)
class Step:
    """One prefill or decode step of one engine."""

    start_s: float
    end_s: float
    kind: str  # "prefill" | "decode"
    energy_j: float
    requests: tuple[int, ...]
