"""The columns of a measurements table and their units, in one place, with the values that are plausible in those units."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column: its unit, what it holds, and the open range of plausible values (`None`: text)."""

    unit: str
    text: str
    low: float | None = None
    high: float | None = None
    integer: bool = False


COLUMNS: dict[str, Column] = {
    "model": Column("", "model name"),
    "tp": Column("GPUs", "tensor parallel size", 0, 4096, integer=True),
    "gpu": Column("", "GPU name"),
    "phase": Column("", "prefill, decode or end_to_end"),
    "batch": Column("requests", "requests in the step or in the static batch (prefill: prompt pieces)", 0, 1e6),
    "tokens": Column("tokens", "new tokens of a prefill step, N (default batch * seq_len)", 0, 1e9),
    "seq_len": Column("tokens", "prompt length of every request of a prefill step", 0, 1e8),
    "lengths": Column("", "prompt lengths of a prefill step, separated by spaces, instead of seq_len or sum_sq"),
    "sum_sq": Column("tokens^2", "sum of (c+n)^2 - c^2 over the pieces of a prefill step (default batch * seq_len^2)", 0, 1e16),
    "cached_tokens": Column("tokens", "cached tokens of the whole batch in a decode step, K", -1, 1e10),
    "mean_ctx": Column("tokens", "cached tokens a request, K/B, instead of cached_tokens", -1, 1e8),
    "isl": Column("tokens", "end_to_end: prompt length of every request", 0, 1e8),
    "osl": Column("tokens", "end_to_end: tokens every request generates, the first one included", 0, 1e8),
    "time_s": Column("s", "duration of the step, or of the whole static batch", 0, 1e6),
    "energy_j": Column("J", "energy of the step or of the static batch, all GPUs together", 0, 1e9),
    "avg_power_w_per_gpu": Column("W", "mean power of one GPU meanwhile, instead of energy_j", 0, 1e5),
}
"""Columns that mean something. A table needs model, tp, gpu, phase (unless given by option), batch, time_s, and what its phase needs."""

INFORMATIONAL = {
    "gemm_source", "t_gemm_s", "t_attn_s", "t_elem_s", "t_comm_s", "t_lmhead_s", "attn_interp", "power_measured_share", "note", "source",
}  # fmt: skip
"""Columns that are allowed and only kept to select rows by."""

PHASES = ("prefill", "decode", "end_to_end")

SLOWEST_DECODE_S = 2.0
"""A decode step of more than this at the median is a unit error: 8B to 400B models take 5 to 200 ms."""
SLOWEST_PREFILL_S_PER_TOKEN = 0.02
"""Beyond 2 s, a prefill step slower than this per token at the median is a unit error: 8B to 400B models take 10 us to 2 ms a token."""
FASTEST_STEP_S = 1e-4
"""No step of a language model on a GPU is shorter: launching its kernels takes longer."""
POWER_W_PER_GPU = (5.0, 2500.0)
"""Range of plausible mean power of one accelerator, from an idling edge module to a rack-scale GPU with margin."""
