"""Step-time and energy coefficients from measurements, with their uncertainty."""

# First of all: it switches jax to float64 and quiets XLA's loader, which takes effect only before jax is loaded.
import jaxserve  # noqa: F401
from calibration_fit.fit import FitResult, fit, fit_all
from calibration_fit.forms import DECODE_ENERGY, DECODE_TIME, PREFILL_ENERGY, PREFILL_TIME, TWO_PIECE_DECODE_TIME, Form
from calibration_fit.measurements import Measurements, Setup, read_measurements

__all__ = [
    "DECODE_ENERGY",
    "DECODE_TIME",
    "PREFILL_ENERGY",
    "PREFILL_TIME",
    "TWO_PIECE_DECODE_TIME",
    "FitResult",
    "Form",
    "Measurements",
    "Setup",
    "fit",
    "fit_all",
    "read_measurements",
]
