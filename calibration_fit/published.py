"""The published measurements in `shared/data/calibration`, as measurements of this package: which rows, under which names.

Every choice here is that of the data's README: the recommended GEMM source, the ranges, which rows are static batches that fit in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from calibration_fit.hardware import SAME
from calibration_fit.measurements import Measurements, Setup, Source, in_memory, read_measurements

A100, H100, H200 = "A100-SXM4-80GB", "H100-SXM-80GB", "H200-SXM-141GB"

SETUPS = (("Llama-3.1-8B", 1), ("Llama-3.1-8B", 2), ("Qwen2.5-7B", 1), ("Qwen2.5-7B", 2), ("Mixtral-8x7B", 4))
"""The five setups of the shipped coefficients."""

ANL_NAMES = {"Llama-3.1-8B": "meta-llama/Meta-Llama-3-8B", "Qwen2.5-7B": "Qwen/Qwen2-7B", "Mixtral-8x7B": "mistralai/Mixtral-8x7B-v0.1"}
"""The models of the same shapes that LLM-Inference-Bench ran."""

MLENERGY_NAMES = {"Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B-Instruct", "Mixtral-8x7B": "mistralai/Mixtral-8x7B-Instruct-v0.1"}
"""The models of the same shapes in ML.ENERGY v2."""
MLENERGY_ISL = 85.0
"""Tokens of a prompt there, which the table does not hold (the data's README)."""

PREFILL_TOKENS = (64, 8192)
DECODE_BATCH = (1, 128)
DECODE_CONTEXT = (64, 4096)
"""Ranges of the composed table that are fitted (its README)."""


def in_range(m: Measurements) -> Measurements:
    """The rows of a step table inside the fitted ranges."""
    if m.phase == "prefill":
        return m.select((m.n_tokens >= PREFILL_TOKENS[0]) & (m.n_tokens <= PREFILL_TOKENS[1]))
    keep = (m.batch >= DECODE_BATCH[0]) & (m.batch <= DECODE_BATCH[1]) & (m.length >= DECODE_CONTEXT[0]) & (m.length <= DECODE_CONTEXT[1])
    return m.select(keep)


def composed(data: Path, gpu: str) -> list[Measurements]:
    """Composed step times of the five setups on one GPU, in range, ordered as `SETUPS`; energies on H200 only."""
    found = read_measurements(data / "composed_steps.csv", where={"gpu": gpu, "gemm_source": "aic"})
    order = {setup: i for i, setup in enumerate(SETUPS)}
    return sorted((in_range(m) for m in found), key=lambda m: order[(m.setup.model, m.setup.tp)])


def source_of(path: Path) -> Source:
    """A file and its hash."""
    return Source(str(path), hashlib.sha256(path.read_bytes()).hexdigest())


def anl_end_to_end(data: Path, model: str, tp: int, *, gpu: str = "Nvidia A100 GPU", framework: str = "vLLM") -> Measurements:
    """Static-batch latencies of argonne-lcf/LLM-Inference-Bench for a setup of `SETUPS` (Qwen2-7B has Qwen2.5-7B's shapes).

    The A100 is the 40 GB part. Batches whose cached tokens do not fit beside the weights ran in several rounds and are left out.
    """
    (m,) = read_measurements(
        data / "anl_e2e_batch_latency.csv", where={"framework": framework}, setup={"model": ANL_NAMES[model], "tp": str(tp), "gpu": gpu}
    )
    return _renamed(m.select(in_memory(m)), model)


def anl_energies(data: Path, model: str, *, gpu: str) -> list[Measurements]:
    """Static batches of LLM-Inference-Bench on one GPU whose latency and energy were measured together, of two engines."""
    setup = {"model": ANL_NAMES[model], "tp": "1", "gpu": gpu}
    read = [read_measurements(data / "anl_power.csv", where={"framework": f}, setup=setup) for f in ("vLLM", "TensorRT-LLM")]
    return [_renamed(m, model) for (m,) in read]


def mlenergy_v2(data: Path, model: str, tp: int) -> Measurements:
    """Time and energy of a decode step on A100, prefill included: run averages (vLLM 0.5.4), prompts of `MLENERGY_ISL` tokens assumed.

    Beyond B = 320 these runs bend away from a line (6 % over all, 2 % up to here); no engine here runs such batches.
    """
    setup = {"model": MLENERGY_NAMES[model], "tp": str(tp), "gpu": "NVIDIA A100-SXM4-40GB"}
    (m,) = read_measurements(data / "mlenergy_v2_llm.csv", where={"pp": "1"}, setup=setup, isl=MLENERGY_ISL)
    return _renamed(m.select(m.batch < 330), model)


def prefill_slowdown(data: Path, steps: Sequence[Measurements], gpu: str) -> float:
    """Measured over composed time of prefilling 16 prompts of 1024 tokens, Llama-3.1-8B TP1 (vLLM, two steps), on "A100" or "H100".

    Composed times are of single kernels at full clock, without a host. Another engine without an interpreter (TensorRT-LLM) took the same.
    """
    table: Any = pd.read_csv(data / "validation_e2e.csv")
    same = (table.gpu == gpu) & (table.engine == "vLLM") & (table.model == ANL_NAMES["Llama-3.1-8B"])
    (measured,) = table.value[same & (table.metric == "TTFT (whole batch)")]
    (m,) = (m for m in steps if m.phase == "prefill" and (m.setup.model, m.setup.tp) == ("Llama-3.1-8B", 1))
    (composed_s,) = m.time_s[(m.batch == 8) & (m.n_tokens == 8 * 1024)]
    return float(measured / (2.0 * composed_s))


def _renamed(m: Measurements, model: str) -> Measurements:
    """With our names of model and GPU, and without a note: the shipped files say it in their own words."""
    return replace(m, setup=Setup(model, m.setup.tp, SAME.get(m.setup.gpu, H100)), source=replace(m.source, note=""))
