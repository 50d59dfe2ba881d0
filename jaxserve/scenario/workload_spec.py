"""The workload section of a scenario: what may be written, and what contradicts itself."""

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from jaxserve.scenario.rawfile import MAX_TOKENS

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
FilePath = Annotated[str, Field(min_length=1)]


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class LengthsSpec(_Spec):
    """Exactly one of: a named distribution, fixed lengths in tokens, or a quantile table of your own."""

    distribution: Literal["cnn_dailymail", "openorca", "long", "mixed"] | None = None
    isl: Tokens | None = None
    osl: Tokens | None = None
    quantiles_file: FilePath | None = None

    @model_validator(mode="after")
    def _one_way(self) -> "LengthsSpec":
        if (self.isl is None) != (self.osl is None):
            raise ValueError("fixed lengths need both isl and osl; give the missing one")
        if sum(value is not None for value in (self.distribution, self.isl, self.quantiles_file)) != 1:
            raise ValueError("give exactly one of distribution, isl with osl, or quantiles_file")
        return self


class RatePiece(_Spec):
    """A Poisson rate from `start_s` until the next piece, the last one until the horizon."""

    start_s: NotNegative
    rate_req_per_s: NotNegative


def _refuse(data: Any, fields: tuple[str, ...], why: str) -> None:
    """Name fields that would be meaningless here, where "extra input" alone would not say why."""
    given = [name for name in fields if isinstance(data, dict) and data.get(name) is not None]
    if given:
        raise ValueError(f"{', '.join(given)}: {why}")


class PoissonWorkload(_Spec):
    """Poisson arrivals, all schedulers together, at one rate or at piecewise constant rates."""

    kind: Literal["poisson"]
    rate_req_per_s: Positive | None = None
    rates: list[RatePiece] | None = None
    lengths: LengthsSpec
    split: Literal["round_robin", "weight"] = "round_robin"

    @model_validator(mode="before")
    @classmethod
    def _no_trace_options(cls, data: Any) -> Any:
        fields = ("path", "slice_start_s", "slice_end_s", "rate_scale", "rate_method", "loop", "time", "time_unit", "invalid_rows")
        _refuse(data, fields, 'has a meaning only for kind = "trace"; remove it or change kind')
        _refuse(data, ("origin_column", "origin_map"), 'Poisson requests have no origin; remove it or change kind to "trace"')
        if isinstance(data, dict) and data.get("split") == "origin":
            raise ValueError('split = "origin" needs a trace; choose "round_robin" or "weight"')
        return data

    @model_validator(mode="after")
    def _one_rate(self) -> "PoissonWorkload":
        if (self.rate_req_per_s is None) == (self.rates is None):
            raise ValueError("give exactly one of rate_req_per_s and rates")
        if self.rates is not None:
            starts = [piece.start_s for piece in self.rates]
            if not starts or starts[0] != 0:
                raise ValueError("rates must begin with a piece at start_s = 0")
            if any(later <= earlier for earlier, later in pairwise(starts)):
                raise ValueError("rates must be in rising order of start_s, none twice")
        return self

    def pieces(self) -> list[RatePiece]:
        """The rate as pieces, the first one at 0."""
        return self.rates if self.rates is not None else [RatePiece(start_s=0.0, rate_req_per_s=self.rate_req_per_s or 0.0)]


class TraceWorkload(_Spec):
    """Requests of a trace file, sliced, scaled and repeated as asked."""

    kind: Literal["trace"]
    path: FilePath
    time: Literal["auto", "absolute", "relative"] = "auto"
    time_unit: Literal["s", "ms", "us", "ns"] | None = None
    """Of times that are numbers; absent: what the format says, for JSON lines what the stamps show."""
    invalid_rows: Literal["error", "drop"] = "error"
    slice_start_s: NotNegative | None = None
    slice_end_s: Positive | None = None
    rate_scale: Positive = 1.0
    rate_method: Literal["thin", "compress"] | None = None
    loop: bool = False
    split: Literal["round_robin", "weight", "origin"] = "round_robin"
    origin_column: FilePath | None = None
    origin_map: dict[str, str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_poisson_options(cls, data: Any) -> Any:
        _refuse(data, ("rate_req_per_s", "rates"), "a trace brings its own rate; remove it, or set rate_scale and rate_method")
        _refuse(data, ("lengths",), "a trace brings its own lengths; remove it")
        return data

    @model_validator(mode="after")
    def _consistent(self) -> "TraceWorkload":
        if self.path.startswith("package:"):
            raise ValueError("path: the prefix package: is reserved; give the path of a file")
        if self.slice_end_s is not None and self.slice_end_s <= (self.slice_start_s or 0.0):
            raise ValueError("slice_end_s must be after slice_start_s; correct one of them")
        if self.rate_scale != 1 and self.rate_method is None:
            raise ValueError('rate_scale needs rate_method: "thin" keeps a share of the requests, "compress" divides arrival times')
        if self.rate_method == "thin" and self.rate_scale > 1:
            raise ValueError('rate_method = "thin" cannot raise a rate; use rate_scale <= 1 or rate_method = "compress"')
        if (self.split == "origin") != (self.origin_column is not None):
            raise ValueError('split = "origin" and origin_column go together; give both or neither')
        if self.origin_map is not None and self.origin_column is None:
            raise ValueError('origin_map needs split = "origin" and origin_column')
        return self


WorkloadSpec = Annotated[PoissonWorkload | TraceWorkload, Field(discriminator="kind")]
