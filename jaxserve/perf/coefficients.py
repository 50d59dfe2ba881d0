"""Coefficients files: versioned TOML <-> the step-model modules.

A file holds one setup (model, tensor parallel size, GPU), its coefficients under the names of the step models, and where each came from.
"""

import math
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from jaxserve.errors import InputError
from jaxserve.perf.latency import DecodeTime, PrefillTime
from jaxserve.perf.power import DecodeEnergy, PrefillEnergy


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Setup(_Strict):
    """What was measured: model, tensor parallel size, GPU."""

    model: str
    tp: int = Field(ge=1)
    gpu: str


class PrefillTimeCoefficients(_Strict):
    """Seconds; see `jaxserve.perf.latency.PrefillTime`."""

    tok_slope_below: float = Field(ge=0)
    tok_slope_above: float = Field(ge=0)
    tok_knee: float = Field(ge=0)
    b0: float = Field(ge=0)
    b1: float = 0.0
    b2: float = 0.0


class DecodeTimeCoefficients(_Strict):
    """Seconds; see `jaxserve.perf.latency.DecodeTime`."""

    form: Literal["study"] = "study"
    alpha0: float
    alpha1: float
    alpha2: float = 0.0
    beta0: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0


class PrefillEnergyCoefficients(_Strict):
    """Joules of all GPUs of an engine; see `jaxserve.perf.power.PrefillEnergy`."""

    e_pre0: float = Field(default=0.0, ge=0)
    e_pre_tok: float = Field(ge=0)
    e_pre_sq: float = Field(default=0.0, ge=0)


class DecodeEnergyCoefficients(_Strict):
    """Joules of all GPUs of an engine; see `jaxserve.perf.power.DecodeEnergy`."""

    e_dec0: float = Field(ge=0)
    e_dec_req: float = Field(ge=0)
    e_dec_kv: float = Field(default=0.0, ge=0)


class PowerCoefficients(_Strict):
    """Watts that are drawn whether or not a step runs."""

    idle_w_per_gpu: float = Field(ge=0)
    host_w: float = Field(ge=0)


class Source(_Strict):
    """Where a table of this file came from, and what kind of evidence it is."""

    table: str
    text: str
    extrapolated: bool = False


class Coefficients(_Strict):
    """One coefficients file. `caveats` lists what the simulator repeats in its summary."""

    schema_version: Literal[1] = 1
    setup: Setup
    prefill_time: PrefillTimeCoefficients
    decode_time: DecodeTimeCoefficients
    prefill_energy: PrefillEnergyCoefficients
    decode_energy: DecodeEnergyCoefficients
    power: PowerCoefficients
    source: tuple[Source, ...] = ()

    @model_validator(mode="after")
    def _steps_take_time(self) -> "Coefficients":
        # An empty or one-token step that takes no time would let an engine stand still for ever.
        if self.prefill_time.b0 + self.prefill_time.tok_slope_below <= 0:
            raise ValueError("prefill_time: b0 + tok_slope_below must be above 0 s, or a prefill step takes no time")
        if self.decode_time.alpha0 <= 0:
            raise ValueError("decode_time.alpha0 must be above 0 s, or a decode step takes no time")
        return self

    @property
    def caveats(self) -> tuple[str, ...]:
        """Sentences for the summary: the tables that were extrapolated from another GPU or setup."""
        return tuple(f"{self.setup.model} {s.table}: {s.text}" for s in self.source if s.extrapolated)

    def prefill_time_model(self) -> PrefillTime:
        """The prefill step-time module with these coefficients."""
        return PrefillTime(**self.prefill_time.model_dump())

    def decode_time_model(self) -> DecodeTime:
        """The decode step-time module with these coefficients."""
        return DecodeTime(**self.decode_time.model_dump(exclude={"form"}))

    def prefill_energy_model(self) -> PrefillEnergy:
        """The prefill step-energy module with these coefficients."""
        return PrefillEnergy(**self.prefill_energy.model_dump())

    def decode_energy_model(self) -> DecodeEnergy:
        """The decode step-energy module with these coefficients."""
        return DecodeEnergy(**self.decode_energy.model_dump())

    def shortest_decode_s(self, max_batch: int, max_context: int) -> float:
        """Least decode step time over 1 <= B <= `max_batch` and mean contexts up to `max_context` (negative terms make it fall).

        For fixed B the model is linear in the context, so its ends suffice.
        """
        model = self.decode_time
        best = math.inf
        for batch in range(1, max_batch + 1):
            for context in (0, max_context):
                a = [getattr(model, f"alpha{j}") + getattr(model, f"beta{j}") * context for j in range(3)]
                best = min(best, a[0] + a[1] * batch + a[2] * batch**2)
        return best


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
    if not path.exists():
        raise InputError(f"coefficients {name_or_path!r}: neither a file nor one of the shipped sets ({', '.join(shipped_names())})")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: not a readable coefficients file: {error}") from None
    return parse_coefficients(table, str(path))


def parse_coefficients(table: dict[str, Any], where: str) -> Coefficients:
    """Check a table of coefficients; raises `InputError` naming `where` and the field."""
    try:
        return Coefficients.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "coefficients"
        raise InputError(f"{where}: {field}: {first['msg'].removeprefix('Value error, ')}") from None
