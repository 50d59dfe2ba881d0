"""Coefficients files: versioned TOML <-> the step-model modules.

A file holds one setup (model, tensor parallel size, GPU), its coefficients under the names of the step models, and where each came from.
"""

import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from jaxserve.errors import InputError, explain
from jaxserve.perf.latency import DecodeForm, PrefillForm
from jaxserve.perf.power import DecodeEnergy, PrefillEnergy
from jaxserve.perf.step_times import DecodeTable, PrefillTable, Strict
from jaxserve.tomlfile import read_toml
from jaxserve.types import on_host

LARGEST = 1e12
"""Magnitude of a coefficient in seconds, joules, watts or tokens, far beyond any engine's."""


class Setup(Strict):
    """What was measured: model, tensor parallel size, GPU."""

    model: str
    tp: int = Field(ge=1)
    gpu: str


class PrefillEnergyCoefficients(Strict):
    """Joules of all GPUs of an engine; see `jaxserve.perf.power.PrefillEnergy`."""

    e_pre0: float = Field(default=0.0, ge=0)
    e_pre_tok: float = Field(ge=0)
    e_pre_sq: float = Field(default=0.0, ge=0)


class DecodeEnergyCoefficients(Strict):
    """Joules of all GPUs of an engine; see `jaxserve.perf.power.DecodeEnergy`."""

    e_dec0: float = Field(ge=0)
    e_dec_req: float = Field(ge=0)
    e_dec_kv: float = Field(default=0.0, ge=0)
    e_dec_req_below: float | None = Field(default=None, ge=0)
    """J per request up to `batch_knee`; these two belong together."""
    batch_knee: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _whole_knee(self) -> "DecodeEnergyCoefficients":
        if (self.e_dec_req_below is None) != (self.batch_knee is None):
            raise ValueError("e_dec_req_below and batch_knee belong together: give both or neither")
        return self


class PowerCoefficients(Strict):
    """Watts that are drawn whether or not a step runs, and the most that a GPU's board may draw."""

    idle_w_per_gpu: float = Field(ge=0)
    max_w_per_gpu: float = Field(gt=0)
    host_w: float = Field(ge=0)

    @model_validator(mode="after")
    def _idle_within_board(self) -> "PowerCoefficients":
        if self.idle_w_per_gpu > self.max_w_per_gpu:
            raise ValueError(
                f"idle_w_per_gpu = {self.idle_w_per_gpu:g} W is above the board power, max_w_per_gpu = {self.max_w_per_gpu:g} W"
            )
        return self


Span = Annotated[tuple[float, float], Field(strict=False)]  # TOML has lists only


class ValidRange(Strict):
    """What the measurements behind a table span, as [least, greatest]; a run that leaves it is told so."""

    n_tokens: Span | None = None
    """New tokens of a prefill step."""
    batch: Span | None = None
    """Requests of a decode step, prompts of a prefill step."""
    mean_ctx: Span | None = None
    """Cached tokens a request of a decode step."""
    seq_len: Span | None = None
    cached_tokens: Span | None = None


class Source(Strict):
    """Where a table of this file came from, and what kind of evidence it is."""

    table: str
    text: str
    extrapolated: bool = False


class Coefficients(Strict):
    """One coefficients file. `caveats` lists what the simulator repeats in its summary."""

    schema_version: Literal[1] = 1
    setup: Setup
    prefill_time: PrefillTable
    decode_time: DecodeTable
    prefill_energy: PrefillEnergyCoefficients
    decode_energy: DecodeEnergyCoefficients
    power: PowerCoefficients
    source: tuple[Source, ...] = Field(default=(), strict=False)  # TOML has lists only

    valid_range: dict[str, ValidRange] = Field(default_factory=dict)
    """By table; of a table without one it is not known where it holds."""
    fit: dict[str, Any] = Field(default_factory=dict)
    """How the tables were fitted: errors in and out of sample, intervals, source files. For people; nothing here is simulated."""

    @model_validator(mode="after")
    def _steps_take_time(self) -> "Coefficients":
        # An empty or one-token step that takes no time would let an engine stand still for ever.
        seconds, name = self.prefill_time.one_token_s
        if seconds <= 0:
            raise ValueError(f"prefill_time: {name} must be above 0 s, or a prefill step takes no time")
        if self.decode_time.empty_s <= 0:
            raise ValueError("decode_time.alpha0 must be above 0 s, or a decode step takes no time")
        return self

    @model_validator(mode="after")
    def _no_number_beyond_use(self) -> "Coefficients":
        # Their products with times, batches and carbon intensity must stay finite.
        for table in ("prefill_time", "decode_time", "prefill_energy", "decode_energy", "power"):
            for name, value in getattr(self, table).model_dump().items():
                largest = 0.0 if value is None or isinstance(value, str) else float(np.max(np.abs(value), initial=0.0))
                if largest > LARGEST:
                    raise ValueError(f"{table}.{name} = {largest:g} is beyond {LARGEST:g}; check its unit")
        return self

    @model_validator(mode="after")
    def _warnings_are_sentences(self) -> "Coefficients":
        parts = {"fit": self.fit} | {f"fit.{name}": part for name, part in self.fit.items() if isinstance(part, dict)}
        for name, part in parts.items():
            warnings = part.get("warnings", [])
            if not isinstance(warnings, list) or not all(isinstance(warning, str) for warning in warnings):
                raise ValueError(f"{name}.warnings must be a list of texts")
        return self

    @property
    def caveats(self) -> tuple[str, ...]:
        """Sentences for the summary: tables extrapolated from another GPU or setup, and what the fit found that cannot be."""
        borrowed = [f"{self.setup.model} {s.table}: {s.text}" for s in self.source if s.extrapolated]
        warned = [*self.fit.get("warnings", []), *(w for t in self.fit.values() if isinstance(t, dict) for w in t.get("warnings", []))]
        return (*borrowed, *(f"{self.setup.model}: {warning}" for warning in warned))

    def prefill_time_model(self) -> PrefillForm:
        """The prefill step-time module with these coefficients."""
        return self.prefill_time.model()

    def decode_time_model(self) -> DecodeForm:
        """The decode step-time module with these coefficients."""
        return self.decode_time.model()

    def prefill_energy_model(self) -> PrefillEnergy:
        """The prefill step-energy module with these coefficients."""
        return PrefillEnergy(**self.prefill_energy.model_dump())

    def decode_energy_model(self) -> DecodeEnergy:
        """The decode step-energy module with these coefficients."""
        return DecodeEnergy(**self.decode_energy.model_dump(exclude_none=True))

    def shortest_decode_s(self, max_batch: int, kv_capacity: int) -> float:
        """Least decode step time over 1 <= B <= `max_batch` and the mean contexts that B requests can have (negative terms make it fall).

        For fixed B every form is linear in the context between its bends, so these and the ends suffice.
        """
        batch = np.arange(1.0, max_batch + 1)
        contexts = np.array([0.0, np.inf, *self.decode_time.bends()])[:, None]
        cached = np.minimum(batch * contexts, float(kv_capacity))
        return float(np.min(np.asarray(self.decode_time_model()(on_host(batch), on_host(cached)))))

    def shortest_prefill_s(self, max_batch: int, budget: int, kv_capacity: int) -> float:
        """A lower bound of the prefill step time over steps of 1 <= N <= `budget` tokens in at most `max_batch` pieces."""
        return self.prefill_time.shortest_s(max_batch, budget, kv_capacity)


def shipped_names() -> list[str]:
    """Names of the coefficients files in the package."""
    return sorted(p.name.removesuffix(".toml") for p in (resources.files("jaxserve.perf") / "data").iterdir() if p.name.endswith(".toml"))


def load_coefficients(name_or_path: str, base_dir: Path | None = None) -> Coefficients:
    """Read a shipped coefficients file by name, or one of your own by path (relative to `base_dir`).

    Raises `InputError` when there is no such file or it does not hold what it should, naming file and field.
    """
    if name_or_path in shipped_names():
        text = (resources.files("jaxserve.perf") / "data" / f"{name_or_path}.toml").read_text()
        return parse_coefficients(tomllib.loads(text), name_or_path)
    path = (base_dir or Path()) / name_or_path
    table = read_toml(path, "coefficients", f"engine.coefficients takes a file or one of the shipped sets ({', '.join(shipped_names())})")
    return parse_coefficients(table, str(path))


def parse_coefficients(table: dict[str, Any], where: str) -> Coefficients:
    """Check a table of coefficients; raises `InputError` naming `where` and the field."""
    try:
        return Coefficients.model_validate(table)
    except ValidationError as error:
        raise InputError(f"{where}: {explain(error, table, Coefficients)}") from None
