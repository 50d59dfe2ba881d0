"""The published measurements in `shared/data/calibration`, as measurements of this package: which rows, under which names.

Every choice here is that of the data's README: the recommended GEMM source, the ranges, which rows are static batches that fit in memory.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from calibration_fit.hardware import GPUS, MODELS
from calibration_fit.measurements import Measurements, Source, from_table, read_measurements

A100, H100, H200 = "A100-SXM4-80GB", "H100-SXM-80GB", "H200-SXM-141GB"

SETUPS = (("Llama-3.1-8B", 1), ("Llama-3.1-8B", 2), ("Qwen2.5-7B", 1), ("Qwen2.5-7B", 2), ("Mixtral-8x7B", 4))
"""The five setups of the shipped coefficients."""

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


def composed_a100(data: Path) -> list[Measurements]:
    """`composed` for the A100-SXM4-80GB."""
    return composed(data, A100)


def source_of(path: Path) -> Source:
    """A file and its hash."""
    return Source(str(path), hashlib.sha256(path.read_bytes()).hexdigest())


def anl_end_to_end(data: Path, model: str, tp: int, *, gpu: str = "Nvidia A100 GPU", framework: str = "vLLM") -> Measurements:
    """Static-batch latencies of argonne-lcf/LLM-Inference-Bench for a setup of `SETUPS` (Qwen2-7B has Qwen2.5-7B's shapes).

    The A100 is the 40 GB part. Batches whose cached tokens do not fit beside the weights ran in several rounds and are left out.
    """
    path = data / "anl_e2e_batch_latency.csv"
    names = {"Llama-3.1-8B": "meta-llama/Meta-Llama-3-8B", "Qwen2.5-7B": "Qwen/Qwen2-7B", "Mixtral-8x7B": "mistralai/Mixtral-8x7B-v0.1"}
    table: Any = pd.read_csv(path)
    mine = table[(table.hardware == gpu) & (table.framework == framework) & (table.model == names[model]) & (table.num_gpu == tp)]
    memory, shape = GPUS[_anl_gpu(gpu)].memory_bytes, MODELS[model]
    room = tp * memory * MEMORY_USED - shape.weight_bytes
    fits = mine.batch * 2 * mine.in_out_len * shape.kv_bytes_per_token <= room
    mine = mine[fits]
    frame = pd.DataFrame(
        {
            "model": model, "tp": tp, "gpu": _anl_gpu(gpu), "phase": "end_to_end", "batch": mine.batch, "isl": mine.in_out_len,
            "osl": mine.in_out_len, "time_s": mine.latency_s,
        }
    )  # fmt: skip
    return _with_rows(frame, path, mine.index)


def anl_power(data: Path, *, gpu: str = "Nvidia A100 GPU", frameworks: tuple[str, ...] = ("vLLM", "TensorRT-LLM")) -> Measurements:
    """Run-average power of static batches of Llama-3-8B TP1, in = out = 1024, as energies of the batch."""
    path = data / "anl_power.csv"
    table: Any = pd.read_csv(path)
    mine = table[
        (table.hardware == gpu) & table.framework.isin(frameworks) & (table.model == "meta-llama/Meta-Llama-3-8B") & (table.num_gpu == 1)
    ]
    frame = pd.DataFrame(
        {
            "model": "Llama-3.1-8B", "tp": 1, "gpu": _anl_gpu(gpu), "phase": "end_to_end", "batch": mine.batch, "isl": mine.in_out_len,
            "osl": mine.in_out_len, "time_s": mine.latency_s, "avg_power_w_per_gpu": mine.avg_power_w,
        }
    )  # fmt: skip
    return _with_rows(frame, path, mine.index)


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


def mlenergy_decode_energy(data: Path, model: str, tp: int, version: str) -> Measurements:
    """Energy of a decode step, prefill included, from ML.ENERGY run averages: v2 on A100-40GB (Mixtral TP4), v3 on H100 (Llama-3.1-8B)."""
    if version == "v2":
        path = data / "mlenergy_v2_llm.csv"
        table: Any = pd.read_csv(path)
        mine = table[table.model.str.contains(model) & table.gpu.str.contains("A100") & (table.tp == tp) & (table.pp == 1)]
        mine = mine[mine.model.str.contains("Instruct-v0.1")] if model == "Mixtral-8x7B" else mine
        # Beyond B = 320 these runs bend away from a line (6 % over all, 2 % up to here); no engine here runs such batches.
        mine = mine[mine.avg_batch < 330]
        batch, time_s, energy = mine.avg_batch, mine.avg_tpot_s, mine.step_energy_j
        context, gpu = 85.0 + mine.avg_output_tokens / 2, "A100-SXM4-40GB"
    else:
        path = data / "mlenergy_v3_llm.csv"
        table: Any = pd.read_csv(path)
        mine = table[
            table.model.str.contains(model) & (table.gpu_model == "H100") & (table.num_gpus == tp) & (table.precision == "bfloat16")
        ]
        batch, time_s = mine.avg_batch_size, mine.avg_batch_size / mine.output_throughput_tokens_per_sec
        energy = mine.energy_per_token_joules * batch
        context, gpu = mine.avg_output_len / 2, "H100-SXM-80GB"
    frame = pd.DataFrame(
        {"model": model, "tp": tp, "gpu": gpu, "phase": "decode", "batch": batch, "mean_ctx": context, "time_s": time_s, "energy_j": energy}
    )
    return _with_rows(frame, path, mine.index)


MEMORY_USED = 0.9
"""Share of GPU memory that vLLM takes by default (gpu_memory_utilization)."""


def _anl_gpu(hardware: str) -> str:
    return {"Nvidia A100 GPU": "A100-SXM4-40GB", "Nvidia H100 GPU": H100}[hardware]


def _with_rows(frame: pd.DataFrame, path: Path, index: pd.Index) -> Measurements:
    """Measurements whose row numbers are those of the published file."""
    m = from_table(frame.reset_index(drop=True), source_of(path))[0]
    return replace(m, row=index.to_numpy() + 2)
