"""Energy tables of the shipped files where no energy of the setup was measured: estimates and extrapolations, each with its sentence."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from calibration_fit.output import Borrowed
from calibration_fit.results import TableFit

Key = tuple[str, int]
"""Model and tensor parallel size."""
LLAMA: Key = ("Llama-3.1-8B", 1)
A100_PREFILL_W = 395.0
"""Measured by Wilkins, Mistral-7B on A100-40GB, prompts of 541 tokens and more (the data's README)."""
A100_PREFILL_J_PER_TOKEN = 25.1e-3
"""395 W (Wilkins, Mistral-7B on A100-40GB) x 63.6 us a token (ANL TTFT of Llama-3-8B): an estimate, no measurement of a step."""
H100_PREFILL_W = 0.98 * 700.0
"""Assumed power of an H100 in prefill: the share of its board power that the A100 draws there (395 of 400 W)."""
CONTEXT = 900.0
"""Mean context at which the H200 energies of two setups are compared."""
RATIO_BATCHES = np.array([1.0, 32.0, 64.0])
POWER_A100 = Borrowed(
    {"idle_w_per_gpu": 60.0, "host_w": 300.0},
    "idle with a model loaded 59 to 62 W (chuyishang/inference-energy, A100-80GB); host: our definition, 37.5 W a GPU for a node of eight",
    False,
)
POWER_H100 = Borrowed(
    {"idle_w_per_gpu": 70.0, "host_w": 300.0},
    "assumed: a tenth of the board power idle, as no idle H100 was measured; host: our definition, 37.5 W a GPU for a node of eight",
    True,
)


def prefill_energy_a100(key: Key, h200: Mapping[Key, Mapping[str, TableFit]], prefill: TableFit) -> Borrowed:
    """The estimate for Llama TP1, times the ratio of composed H200 energies a token for the other dense models.

    The H200 energies of Mixtral are unreliable (the data's README), so for it the measured power of another model, times fitted time.
    """
    if key[0] == "Mixtral-8x7B":
        per_token_s = _least_s_per_token(prefill)
        text = f"extrapolated: {A100_PREFILL_W:.0f} W a GPU (Wilkins, another model) x {key[1]} GPUs x {1e6 * per_token_s:.2f} us a token"
        return _per_token(A100_PREFILL_W * key[1] * per_token_s, text)
    n = 1024.0

    def per_token(k: Key) -> float:
        return float(h200[k]["prefill_energy"].result.module(n, n * n)) / n

    ratio = per_token(key) / per_token(LLAMA)
    estimate = "estimate: 395 W (Wilkins, A100-40GB) x 63.6 us a token (ANL TTFT); the fixed part is unknown and taken as 0"
    if key == LLAMA:
        return _per_token(A100_PREFILL_J_PER_TOKEN, estimate, False)
    text = f"extrapolated: Llama-3.1-8B TP1 on A100 ({1e3 * A100_PREFILL_J_PER_TOKEN:.1f} mJ a token, an {estimate[:8]}) x {ratio:.2f}, "
    return _per_token(A100_PREFILL_J_PER_TOKEN * ratio, text + "the ratio of composed energies on H200")


def prefill_energy_h100(key: Key, prefill: TableFit) -> Borrowed:
    """The power that an H100 is assumed to draw in prefill, times fitted time."""
    per_token_j = H100_PREFILL_W * key[1] * _least_s_per_token(prefill)
    gpus = "" if key[1] == 1 else f" x {key[1]} GPUs"
    text = f"extrapolated: {H100_PREFILL_W:.0f} W, the A100's share of board power in prefill,{gpus} x the least fitted time of a token"
    return _per_token(per_token_j, text)


def decode_energy(key: Key, gpu: str, h200: Mapping[Key, Mapping[str, TableFit]], llama: TableFit) -> Borrowed:
    """That of Llama TP1 on the same GPU, times ratios of composed H200 energies at three batches, refitted to a line."""

    def energy(k: Key) -> np.ndarray:
        return np.asarray(h200[k]["decode_energy"].result.module(RATIO_BATCHES, RATIO_BATCHES * CONTEXT))

    ratio = energy(key) / energy(LLAMA)
    target = np.asarray(llama.result.module(RATIO_BATCHES, 0.0 * RATIO_BATCHES)) * ratio
    slope, constant = np.polyfit(RATIO_BATCHES, target, 1, w=1.0 / target)
    values = {"e_dec0": float(f"{constant:.4g}"), "e_dec_req": float(f"{slope:.4g}"), "e_dec_kv": 0.0}
    shown = " / ".join(f"{r:.2f}" for r in ratio)
    text = f"extrapolated: Llama-3.1-8B TP1 on {gpu} x {shown} at B = 1 / 32 / 64, the ratios of composed energies on H200, "
    return Borrowed(values, text + "refitted to a line")


def _least_s_per_token(prefill: TableFit) -> float:
    """Seconds a token of the measured step that takes the fewest: at the power assumed there, no step draws more than that."""
    return float((prefill.result.predicted / prefill.result.rows.inputs[0, :, 0]).min())


def _per_token(joules: float, text: str, extrapolated: bool = True) -> Borrowed:
    return Borrowed({"e_pre0": 0.0, "e_pre_tok": float(f"{joules:.4g}"), "e_pre_sq": 0.0}, text, extrapolated)
