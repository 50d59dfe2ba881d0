"""A wrong unit is caught by what the values would mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from calibration_fit.columns import FASTEST_STEP_S, POWER_W_PER_GPU, SLOWEST_DECODE_S, SLOWEST_PREFILL_S_PER_TOKEN
from jaxserve.errors import InputError
from jaxserve.units import MS_PER_S

if TYPE_CHECKING:
    from calibration_fit.measurements import Measurements


def check_plausible(m: Measurements) -> None:
    """Catch a wrong unit by what the values would mean; raises `InputError` that says which unit was probably meant."""
    name, first = m.source.path, m.row[0]
    middle = float(np.median(m.time_s))
    ms_hint = f"are the times in milliseconds? Divide them by {MS_PER_S:g}."
    if m.phase == "decode" and middle > SLOWEST_DECODE_S:
        raise InputError(f"{name}: row {first} on: the median decode step of {m.setup} takes {middle:g} s, which no GPU needs; {ms_hint}")
    if m.phase == "prefill":
        per_token = float(np.median(m.time_s / m.n_tokens))
        if middle > 2.0 and per_token > SLOWEST_PREFILL_S_PER_TOKEN:
            raise InputError(f"{name}: row {first} on: prefill of {m.setup} takes {per_token:g} s a token at the median; {ms_hint}")
    slowest = (m.osl - 1.0) * SLOWEST_DECODE_S + m.batch * m.isl * SLOWEST_PREFILL_S_PER_TOKEN
    if m.phase == "end_to_end" and np.median(m.time_s / slowest) > 1.0:
        raise InputError(
            f"{name}: row {first} on: static batches of {m.setup} take more than {SLOWEST_DECODE_S:g} s a decode step and "
            f"{SLOWEST_PREFILL_S_PER_TOKEN:g} s a prompt token; {ms_hint}"
        )
    fast = np.flatnonzero(m.time_s < FASTEST_STEP_S)
    if len(fast):
        i = fast[0]
        raise InputError(
            f"{name}: row {m.row[i]}: a step of {m.time_s[i]:g} s is shorter than launching its kernels takes ({FASTEST_STEP_S:g} s); "
            "is time_s in seconds?"
        )
    power = m.energy_j / m.time_s / m.setup.tp
    wrong = np.flatnonzero((power < POWER_W_PER_GPU[0]) | (power > POWER_W_PER_GPU[1]))
    if len(wrong):
        i = wrong[0]
        raise InputError(
            f"{name}: row {m.row[i]}: energy_j / time_s / tp is {power[i]:g} W a GPU, outside {POWER_W_PER_GPU[0]:g} to "
            f"{POWER_W_PER_GPU[1]:g} W; is the energy in J, of all GPUs together, and the time in s?"
        )
