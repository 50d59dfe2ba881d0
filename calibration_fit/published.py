"""The published measurements in `shared/data/calibration`, as measurements of this package: which rows, under which names.

Every choice here is that of the data's README: the recommended GEMM source, the ranges, which rows are static batches that fit in memory.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from calibration_fit.hardware import SAME
from calibration_fit.measurements import Measurements, Setup, Source, from_table, in_memory, read_measurements

A100, H100, H200 = "A100-SXM4-80GB", "H100-SXM-80GB", "H200-SXM-141GB"

SETUPS = (("Llama-3.1-8B", 1), ("Llama-3.1-8B", 2), ("Qwen2.5-7B", 1), ("Qwen2.5-7B", 2), ("Mixtral-8x7B", 4))
"""The five setups of the shipped coefficients."""

ANL_NAMES = {"Llama-3.1-8B": "meta-llama/Meta-Llama-3-8B", "Qwen2.5-7B": "Qwen/Qwen2-7B", "Mixtral-8x7B": "mistralai/Mixtral-8x7B-v0.1"}
"""The models of the same shapes that LLM-Inference-Bench ran."""

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


def llama_decode_energy_a100(data: Path) -> Measurements:
    """Decode step energies of Llama-3(.1)-8B TP1 on A100-SXM4-40GB, derived from 14 direct run averages (the data's README)."""
    path = data / "a100_8b_decode_step_energy_derived.csv"
    table: Any = pd.read_csv(path)
    # The file holds no step time and none is fitted from it; a step at 300 W stands in, which only the plausibility check reads.
    frame = pd.DataFrame(
        {
            "model": "Llama-3.1-8B", "tp": 1, "gpu": "A100-SXM4-40GB", "phase": "decode", "batch": table.B, "mean_ctx": table.l,
            "time_s": table.e_step / 300.0, "energy_j": table.e_step,
        }
    )  # fmt: skip
    return _with_rows(frame, path, table.index)


def mlenergy_v2(data: Path) -> Measurements:
    """Time and energy of a decode step of Mixtral TP4 on A100, prefill included: run averages (vLLM 0.5.4), prompts of 85 tokens assumed.

    Beyond B = 320 these runs bend away from a line (6 % over all, 2 % up to here); no engine here runs such batches.
    """
    setup = {"model": "mistralai/Mixtral-8x7B-Instruct-v0.1", "tp": "4", "gpu": "NVIDIA A100-SXM4-40GB"}
    (m,) = read_measurements(data / "mlenergy_v2_llm.csv", where={"pp": "1"}, setup=setup, isl=85.0)
    return _renamed(m.select(m.batch < 330), "Mixtral-8x7B")


def mlenergy_v3(data: Path) -> Measurements:
    """The same of Llama-3.1-8B on H100 (vLLM 0.11.1), whose prompts are not known and taken as of no length."""
    setup = {"model": "meta-llama/Llama-3.1-8B-Instruct", "tp": "1", "gpu": "H100"}
    (m,) = read_measurements(data / "mlenergy_v3_llm.csv", where={"precision": "bfloat16"}, setup=setup, isl=0.0)
    return _renamed(m, "Llama-3.1-8B")


def _renamed(m: Measurements, model: str) -> Measurements:
    """With our names of model and GPU, and without a note: the shipped files say it in their own words."""
    return replace(m, setup=Setup(model, m.setup.tp, SAME.get(m.setup.gpu, H100)), source=replace(m.source, note=""))


def _with_rows(frame: pd.DataFrame, path: Path, index: pd.Index) -> Measurements:
    """Measurements whose row numbers are those of the published file."""
    m = from_table(frame.reset_index(drop=True), source_of(path))[0]
    return replace(m, row=index.to_numpy() + 2)
