"""What can be fitted: the modules of `jaxserve.perf`, the bound of each coefficient, and the inputs a row gives them."""

from dataclasses import dataclass, field
from typing import Any

import equinox as eqx

from calibration_fit.transforms import Bound
from jaxserve.perf.latency import DecodeTime, PrefillTime, TwoPieceDecodeTime
from jaxserve.perf.power import DecodeEnergy, PrefillEnergy

FREE, NONNEGATIVE, KNEE = Bound.FREE, Bound.NONNEGATIVE, Bound.INTERVAL


@dataclass(frozen=True, eq=False)
class Form:
    """One equation to fit.

    `table` and `name` are the coefficients file's table and its `form`; `inputs` the row quantities in the module's argument order;
    `knee_input` the index of the input the knee cuts.
    """

    table: str
    name: str
    module: type[eqx.Module]
    inputs: tuple[str, ...]
    quantity: str
    bounds: dict[str, Bound]
    units: dict[str, str] = field(default_factory=dict)
    knee: str | None = None
    knee_input: int = 0

    @property
    def coefficients(self) -> tuple[str, ...]:
        """Coefficient names in the module's order."""
        return tuple(self.bounds)

    def build(self, values: Any) -> Any:
        """The module with `values` [C] (in the order of `coefficients`)."""
        return self.module(**dict(zip(self.coefficients, values, strict=True)))


PREFILL_TIME = Form(
    "prefill_time",
    "study",
    PrefillTime,
    ("n_tokens", "batch", "sum_sq"),
    "time_s",
    {
        "tok_slope_below": NONNEGATIVE,
        "tok_slope_above": NONNEGATIVE,
        "tok_knee": KNEE,
        "b0": NONNEGATIVE,
        "b1": NONNEGATIVE,
        "b2": NONNEGATIVE,
    },
    {"tok_slope_below": "s/token", "tok_slope_above": "s/token", "tok_knee": "tokens", "b0": "s", "b1": "s/prompt", "b2": "s/token^2"},
    "tok_knee",
)
# Curvature and context terms of decode may be negative inside the fitted range (README of the calibration data): left free, and the
# fitted curve is checked for positivity and growth over the range instead.
DECODE_TIME = Form(
    "decode_time",
    "study",
    DecodeTime,
    ("batch", "cached_tokens"),
    "time_s",
    {"alpha0": NONNEGATIVE, "alpha1": FREE, "alpha2": FREE, "beta0": FREE, "beta1": FREE, "beta2": FREE},
    {
        "alpha0": "s",
        "alpha1": "s/request",
        "alpha2": "s/request^2",
        "beta0": "s/token of mean context",
        "beta1": "s/token",
        "beta2": "s/(token request)",
    },
)
TWO_PIECE_DECODE_TIME = Form(
    "decode_time",
    "two_piece",
    TwoPieceDecodeTime,
    ("batch", "cached_tokens"),
    "time_s",
    {
        "alpha0": NONNEGATIVE,
        "alpha1_below": NONNEGATIVE,
        "alpha1": FREE,
        "batch_knee": KNEE,
        "alpha2": FREE,
        "beta0": FREE,
        "beta1": FREE,
        "beta2": FREE,
    },
    {**DECODE_TIME.units, "alpha1_below": "s/request", "batch_knee": "requests"},
    "batch_knee",
)
PREFILL_ENERGY = Form(
    "prefill_energy",
    "study",
    PrefillEnergy,
    ("n_tokens", "sum_sq"),
    "energy_j",
    {"e_pre0": NONNEGATIVE, "e_pre_tok": NONNEGATIVE, "e_pre_sq": NONNEGATIVE},
    {"e_pre0": "J", "e_pre_tok": "J/token", "e_pre_sq": "J/token^2"},
)
DECODE_ENERGY = Form(
    "decode_energy",
    "study",
    DecodeEnergy,
    ("batch", "cached_tokens"),
    "energy_j",
    {"e_dec0": NONNEGATIVE, "e_dec_req": NONNEGATIVE, "e_dec_kv": NONNEGATIVE},
    {"e_dec0": "J", "e_dec_req": "J/request", "e_dec_kv": "J/token"},
)
FORMS = (PREFILL_TIME, DECODE_TIME, TWO_PIECE_DECODE_TIME, PREFILL_ENERGY, DECODE_ENERGY)
