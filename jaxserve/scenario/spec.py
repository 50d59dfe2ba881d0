"""The scenario file: every field, its unit, its default and its bounds."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from jaxserve.perf.coefficients import Coefficients
from jaxserve.scenario.grid import FileGrid, GridSpec
from jaxserve.scenario.osl_knowledge import NoiseKnowledge, OracleKnowledge, OslKnowledge, PredictedKnowledge
from jaxserve.scenario.rawfile import MAX_TOKENS
from jaxserve.scenario.workload import TraceWorkload, WorkloadSpec
from jaxserve.units import BYTES_PER_GIB

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, pattern=r"^[^/\\\x00-\x1f]+$")]

ASSUMED_UTC = timezone(timedelta(0), "UTC, assumed")
"""The zone of a `start_time` that was given without an offset: UTC, but a run should say so."""

WINDOW_TOLERANCE = 1e-9
"""How far, relatively, a time may be from a whole number of windows: decimal fractions are not exact in binary."""

# Beyond these a slip of the unit or of the finger is likelier than a wish; they keep such a slip from a hang or from all memory.
MOST_WINDOWS = 2**31 - 1
MOST_LEDGER_ROWS = 20_000_000
MOST_KV_TOKENS = 10**12
LONGEST_DELAY_S = 86_400.0
Milliseconds = Annotated[float, Field(ge=0, le=60_000, allow_inf_nan=False)]
Budget = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Delay = Annotated[float, Field(ge=0, le=LONGEST_DELAY_S, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Site(_Strict):
    """One data centre (DC)."""

    name: Name
    region: Name
    """Looks up `network.rtt_ms`."""
    zone: Name
    """Electricity Maps zone of its grid."""
    pue: float = Field(ge=1, le=100, allow_inf_nan=False)
    nodes: int = Field(ge=1, le=1_000_000)
    gpus_per_node: int = Field(ge=1, le=1024)


def _named_or_inline(value: Any) -> str:
    return "named" if isinstance(value, str) else "inline"


def _name_or_table(value: Any) -> Any:
    if not isinstance(value, str | dict | Coefficients):
        raise ValueError("must be the name of a shipped set, the path of a file, or a table")
    return value


class Engine(_Strict):
    """One inference engine; all sites run the same kind."""

    # The explicit discriminator keeps the error to the branch that the user meant.
    coefficients: Annotated[
        Annotated[str, Tag("named")] | Annotated[Coefficients, Tag("inline")],
        Discriminator(_named_or_inline),
        BeforeValidator(_name_or_table),
    ]
    """A shipped set by name, a file (relative to the scenario), or the table itself."""
    batching: Literal["study", "prefill_first"] = "prefill_first"
    max_num_seqs: int = Field(default=256, ge=1, le=65_536)
    max_num_batched_tokens: int = Field(default=8192, ge=1, le=MAX_TOKENS)
    """Token budget of one prefill step."""
    token_count: Literal["sum", "padded"] = "sum"
    """What of it a step spends: its tokens, or its longest prompt times their number, where prompts are padded to the longest."""
    max_model_len: int | None = Field(default=None, ge=2, le=MAX_TOKENS)
    """Most tokens of a request, prompt and output together; nothing is ever truncated to it."""
    kv_capacity_tokens: int | None = Field(default=None, ge=2, le=MOST_KV_TOKENS)
    """Tokens that fit beside the weights; or the four below, from which it follows."""
    gpu_memory_gib: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    weights_gib: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False)
    """Of the whole model, over all GPUs of the engine."""
    kv_bytes_per_token: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Of the whole model: 2 * layers * kv_heads * head_dim * bytes."""
    oversize: Literal["error", "reject"] = "error"
    """What becomes of a request that can never fit: refused with the scenario, or counted as rejected and as an SLO violation."""

    @model_validator(mode="after")
    def _capacity_known(self) -> "Engine":
        parts = (self.gpu_memory_gib, self.weights_gib, self.kv_bytes_per_token)
        if self.kv_capacity_tokens is None and any(part is None for part in parts):
            raise ValueError("give kv_capacity_tokens, or gpu_memory_gib, weights_gib and kv_bytes_per_token")
        return self

    def kv_tokens(self, tp: int) -> int:
        """KV-cache capacity of an engine of `tp` GPUs, in tokens: (memory * utilisation * tp - weights) / bytes a token."""
        if self.kv_capacity_tokens is not None:
            return self.kv_capacity_tokens
        assert self.gpu_memory_gib and self.weights_gib and self.kv_bytes_per_token  # the validator has seen to it
        spare = (self.gpu_memory_gib * self.gpu_memory_utilization * tp - self.weights_gib) * BYTES_PER_GIB
        return int(min(spare // self.kv_bytes_per_token, MOST_KV_TOKENS + 1))


class Network(_Strict):
    """Round-trip times between regions; what is given one way holds both ways. Inside a region 0 unless given."""

    rtt_ms: dict[str, dict[str, Milliseconds]] = Field(default_factory=dict)


class Slo(_Strict):
    """Latency budgets of every request."""

    ttft_s: Budget
    tpot_s: Budget


class Scheduler(_Strict):
    """A regional entry point."""

    name: Name
    region: Name
    sites: list[Name] = Field(min_length=1)
    """Its own DCs: reached without a round trip."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Its share of the requests where the workload is split by weight."""


class Dispatch(_Strict):
    """What all schedulers have in common."""

    window_s: Seconds = 0.1
    window_max_requests: int = Field(default=300, ge=1, le=65_536)
    """A batch policy's window closes early at the arrival of this many requests."""
    forwarding: Literal["direct", "window", "owner"] = "direct"
    """A request that a batch policy sends to a DC of another scheduler goes there at once, waits there for the end of a window, or is
    placed anew at that end by the scheduler that owns the DC, among its own (`solves.parquet` holds the first placing).
    """
    batch_capacity: int = Field(default=40, ge=1, le=MAX_TOKENS)
    """Requests that schedulers believe an engine takes at once."""
    ledger: Literal["off", "reset", "in-flight"] = "in-flight"
    """What a scheduler remembers of its own dispatches between polls."""
    peers: Literal["unknown", "alike", "observed"] = "unknown"
    """What it makes of the other schedulers' dispatches between polls: nothing, as many as its own, or what the polls have told."""
    headroom: Literal["whole", "divided"] = "whole"
    """Whether each scheduler fills all the room of a DC, or its part of it."""
    view: Literal["snapshot", "aged"] = "snapshot"
    """Whether it takes a DC as it was at its last poll, or carries it forward to the moment of decision."""


class Provisioner(_Strict):
    """How the state of the DCs reaches the schedulers."""

    poll_s: Seconds = 1.0
    mode: Literal["sync", "async"] = "sync"


class NoLatency(_Strict):
    """Decisions take no time."""

    kind: Literal["none"] = "none"


class FixedLatency(_Strict):
    """Every decision takes the same time, many at once."""

    kind: Literal["fixed"]
    seconds: Delay


class AffineLatency(_Strict):
    """One solver a scheduler, which takes c0 + c1 * requests."""

    kind: Literal["affine"]
    c0_s: Delay
    c1_s: Delay


class MeasuredLatency(_Strict):
    """One solver a scheduler, which takes its own wall time; for policies with a solver on the host. No run repeats it exactly."""

    kind: Literal["measured"]


class Scenario(_Strict):
    """Everything a run depends on."""

    name: Name
    description: str = ""
    seed: int = Field(default=0, ge=0, lt=2**63)
    start_time: datetime
    """When the run begins, for the grid; with an offset, or else UTC (`ASSUMED_UTC`)."""
    horizon_s: Seconds
    """Requests arrive in [0, horizon); those in flight then are served to the end."""
    warmup_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """What arrives or is spent before this is in no metric: the fleet starts empty, and a steady state takes some stays of a request."""
    ledger_s: Seconds = 1.0
    """Length of the intervals over which energy and carbon are added up; they also end where carbon intensity changes."""
    sites: list[Site] = Field(min_length=1)
    engine: Engine
    network: Network = Network()
    grid: GridSpec
    workload: WorkloadSpec
    slo: Slo
    schedulers: list[Scheduler] = Field(min_length=1)
    dispatch: Dispatch = Dispatch()
    provisioner: Provisioner = Provisioner()
    decision_latency: Annotated[NoLatency | FixedLatency | AffineLatency | MeasuredLatency, Field(discriminator="kind")] = NoLatency()
    osl_knowledge: OslKnowledge = OracleKnowledge()
    """What schedulers know of a request's output length when they decide."""
    policies: list[dict[str, Any]] = Field(min_length=1)
    """The policies to compare, the first being the baseline; each `{kind = ..., ...}` as `jaxserve list` lists them."""

    @field_validator("start_time", mode="before")
    @classmethod
    def _in_utc(cls, value: Any) -> datetime:
        # Text too, for overrides and axes; a bare number would be a guess.
        try:
            instant = datetime.fromisoformat(value) if isinstance(value, str) and len(value) > len("2022-01-04") else value
            if isinstance(instant, datetime):
                return instant.replace(tzinfo=ASSUMED_UTC) if instant.tzinfo is None else instant.astimezone(UTC)
        except (ValueError, OverflowError):
            pass
        raise ValueError(f"must be a date with a time, such as 2022-01-04T11:00:00Z (got {str(value)[:40]!r})")

    @model_validator(mode="after")
    def _hangs_together(self) -> "Scenario":
        for what, items in (("sites", self.sites), ("schedulers", self.schedulers)):
            names = [item.name for item in items]
            doubled = sorted({name for name in names if names.count(name) > 1})
            if doubled:
                raise ValueError(f"{what}: the name {doubled[0]!r} is used twice; names must differ")
        sites = {site.name for site in self.sites}
        owner: dict[str, str] = {}
        for i, scheduler in enumerate(self.schedulers):
            for name in scheduler.sites:
                if name not in sites:
                    raise ValueError(f"schedulers.{i}.sites: there is no site {name!r}; known are {', '.join(sorted(sites))}")
                if owner.setdefault(name, scheduler.name) != scheduler.name:
                    raise ValueError(f"schedulers.{i}.sites: {name!r} belongs to scheduler {owner[name]!r} already")
        lengths = {"ledger_s": self.ledger_s, "provisioner.poll_s": self.provisioner.poll_s, "horizon_s": self.horizon_s}
        for field, seconds in (lengths | ({"warmup_s": self.warmup_s} if self.warmup_s else {})).items():
            window_s = self.dispatch.window_s
            ratio = seconds / window_s
            if ratio > MOST_WINDOWS:
                raise ValueError(
                    f"{field}: {seconds:g} s is {ratio:.3g} windows of dispatch.window_s = {window_s:g} s; raise dispatch.window_s"
                )
            if round(ratio) < 1 or abs(ratio - round(ratio)) > WINDOW_TOLERANCE * ratio:
                raise ValueError(f"{field}: {seconds:g} s is not a whole number of windows of dispatch.window_s = {window_s:g} s")
        if self.dispatch.forwarding == "owner" and self.decision_latency.kind != "none":
            raise ValueError('dispatch.forwarding: "owner" takes decisions without latency; set decision_latency.kind = "none"')
        if self.windows(self.warmup_s) >= self.windows(self.horizon_s):
            raise ValueError(f"warmup_s: {self.warmup_s:g} s leaves nothing of horizon_s = {self.horizon_s:g} s to count; shorten it")
        rows = self.horizon_s / self.ledger_s * len(self.sites)
        if rows > MOST_LEDGER_ROWS:
            raise ValueError(
                f"ledger_s: {self.ledger_s:g} s makes {rows:.3g} ledger rows of horizon_s = {self.horizon_s:g} s; raise ledger_s"
            )
        return self

    @property
    def coefficients(self) -> Coefficients:
        """The engine's coefficients; `load_scenario` has inlined those that were given by name."""
        assert isinstance(self.engine.coefficients, Coefficients)
        return self.engine.coefficients

    def windows(self, seconds: float) -> int:
        """`seconds` as a number of windows."""
        return round(seconds / self.dispatch.window_s)

    @property
    def counted_from_s(self) -> float:
        """End of the warm-up: the edge of a window, as the engine takes it."""
        return self.windows(self.warmup_s) * self.dispatch.window_s

    def with_absolute_paths(self, base_dir: Path) -> "Scenario":
        """The same scenario with its file paths made absolute, so that it means the same from any folder."""
        return self._with_paths(lambda path: str((base_dir / path).resolve()))

    def input_files(self) -> list[str]:
        """The paths of the files that the scenario reads, as it has them."""
        paths: list[str] = []

        def note(path: str) -> str:
            paths.append(path)
            return path

        self._with_paths(note)
        return paths

    def _with_paths(self, change: Callable[[str], str]) -> "Scenario":
        workload, grid, knowledge = self.workload, self.grid, self.osl_knowledge
        if isinstance(workload, TraceWorkload):
            workload = workload.model_copy(update={"path": change(workload.path)})
        elif workload.lengths.quantiles_file is not None:
            lengths = workload.lengths.model_copy(update={"quantiles_file": change(workload.lengths.quantiles_file)})
            workload = workload.model_copy(update={"lengths": lengths})
        if isinstance(grid, FileGrid):
            grid = grid.model_copy(update={"path": [change(path) for path in grid.path]})
        if isinstance(knowledge, PredictedKnowledge | NoiseKnowledge) and knowledge.model is not None:
            knowledge = knowledge.model_copy(update={"model": change(knowledge.model)})
        return self.model_copy(update={"workload": workload, "grid": grid, "osl_knowledge": knowledge})
