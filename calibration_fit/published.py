"""The published measurements in `shared/data/calibration`, as measurements of this package: which rows, under which names.

Every choice here is that of the data's README: the recommended GEMM source, the ranges, which rows are static batches that fit in memory.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from calibration_fit.measurements import Measurements, Source, read_measurements

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
