"""What can be fitted: the modules of `jaxserve.perf`, the bound of each coefficient, and the inputs a row gives them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from calibration_fit.transforms import Bound
from jaxserve.perf.latency import DecodeTime, PiecewiseDecodeTime, PiecewisePrefillTime, PrefillTime, TwoPieceDecodeTime
from jaxserve.perf.power import DecodeEnergy, PrefillEnergy

FREE, NONNEGATIVE, KNEE = Bound.FREE, Bound.NONNEGATIVE, Bound.INTERVAL
MOST_KNOTS = 7
"""Of a piecewise form: its rise is fitted in up to one piece more."""
NO_KNOT = 1e12
"""Tokens or requests: a knot that no step reaches is none."""


@dataclass(frozen=True, eq=False)
class Form:
    """One equation to fit.

    `table` and `name` are the coefficients file's table and its `form`; `inputs` the row quantities in the module's argument order;
    `knee_input` the index of the input the knee cuts.
    """

    table: str
    name: str
    module: Callable[..., Any]
    inputs: tuple[str, ...]
    quantity: str
    bounds: dict[str, Bound]
    units: dict[str, str] = field(default_factory=dict)
    knee: str | None = None
    knee_input: int = 0
    knots: tuple[str, ...] = ()
    """Coefficients that are chosen (`calibration_fit.knots`), not fitted, and cut the same input; ..."""
    slopes: tuple[str, ...] = ()
    """... and the slopes up to, between and beyond them."""

    @property
    def coefficients(self) -> tuple[str, ...]:
        """Coefficient names in the module's order."""
        return tuple(self.bounds)

    def build(self, values: Any) -> Any:
        """The module with `values` [C] (in the order of `coefficients`)."""
        return self.module(**dict(zip(self.coefficients, values, strict=True)))

    def with_knots(self, knots: Sequence[float]) -> dict[str, float]:
        """The coefficients that are held when these are the knots: they themselves, and the slopes beyond the last piece."""
        spare = len(self.knots) - len(knots)
        held = dict(zip(self.knots, [*map(float, knots), *[NO_KNOT] * spare], strict=True))
        return held | dict.fromkeys(self.slopes[len(knots) + 1 :], 0.0)

    def used(self, coefficients: Mapping[str, float]) -> list[str]:
        """The names of the coefficients without knots that are none and the slopes beyond them."""
        n = sum(coefficients[knot] < NO_KNOT for knot in self.knots)
        return [name for name in self.coefficients if name not in (*self.knots[n:], *self.slopes[n + 1 :])]

    def in_file(self, coefficients: Mapping[str, float]) -> dict[str, Any]:
        """The coefficients as the file holds them: `name.0`, `name.1`, ... as one list."""
        out: dict[str, Any] = {list_name: [] for list_name in dict.fromkeys(k.split(".")[0] for k in (*self.slopes, *self.knots))}
        for name in self.used(coefficients):
            base, _, place = name.partition(".")
            if place:
                out[base].append(coefficients[name])
            else:
                out[name] = coefficients[name]
        return out


def _piecewise(module: Callable[..., Any], what: str) -> Callable[..., Any]:
    """The module from flat coefficients."""

    def build(**values: Any) -> Any:
        flat = {name: value for name, value in values.items() if "." not in name}
        lists = {
            f"{what}_{part}": jnp.stack([jnp.asarray(v, float) for k, v in values.items() if k.startswith(f"{what}_{part}.")])
            for part in ("slopes", "knots")
        }
        return module(**flat, **lists)

    return build


def _places(name: str, n: int) -> tuple[str, ...]:
    return tuple(f"{name}.{i}" for i in range(n))


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
_TOK_SLOPES, _TOK_KNOTS = _places("tok_slopes", MOST_KNOTS + 1), _places("tok_knots", MOST_KNOTS)
PIECEWISE_PREFILL_TIME = Form(
    "prefill_time",
    "piecewise",
    _piecewise(PiecewisePrefillTime, "tok"),
    PREFILL_TIME.inputs,
    "time_s",
    dict.fromkeys(_TOK_SLOPES, NONNEGATIVE) | dict.fromkeys(_TOK_KNOTS, KNEE) | dict.fromkeys(("b0", "b1", "b2"), NONNEGATIVE),
    PREFILL_TIME.units | dict.fromkeys(_TOK_SLOPES, "s/token") | dict.fromkeys(_TOK_KNOTS, "tokens"),
    knots=_TOK_KNOTS,
    slopes=_TOK_SLOPES,
)
_BATCH_SLOPES, _BATCH_KNOTS = _places("batch_slopes", MOST_KNOTS + 1), _places("batch_knots", MOST_KNOTS)
PIECEWISE_DECODE_TIME = Form(
    "decode_time",
    "piecewise",
    _piecewise(PiecewiseDecodeTime, "batch"),
    DECODE_TIME.inputs,
    "time_s",
    dict.fromkeys(("alpha0", *_BATCH_SLOPES), NONNEGATIVE)
    | dict.fromkeys(_BATCH_KNOTS, KNEE)
    | dict.fromkeys(("beta0", "beta1"), NONNEGATIVE),
    DECODE_TIME.units | dict.fromkeys(_BATCH_SLOPES, "s/request") | dict.fromkeys(_BATCH_KNOTS, "requests"),
    knots=_BATCH_KNOTS,
    slopes=_BATCH_SLOPES,
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
FORMS = (
    PREFILL_TIME,
    PIECEWISE_PREFILL_TIME,
    DECODE_TIME,
    TWO_PIECE_DECODE_TIME,
    PIECEWISE_DECODE_TIME,
    PREFILL_ENERGY,
    DECODE_ENERGY,
)
