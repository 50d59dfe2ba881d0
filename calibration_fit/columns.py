"""The columns of a measurements table and their units, in one place, with the values that are plausible in those units."""

from dataclasses import dataclass, field


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
    "cached_tokens": Column("tokens", "cached tokens of the whole batch in a decode step, K", 0, 1e10),
    "mean_ctx": Column("tokens", "cached tokens a request, K/B, instead of cached_tokens", 0, 1e8),
    "isl": Column("tokens", "end_to_end: prompt length of every request", 0, 1e8),
    "osl": Column("tokens", "end_to_end: tokens every request generates, the first one included", 0, 1e8),
    "time_s": Column("s", "duration of the step, or of the whole static batch", 0, 1e6),
    "energy_j": Column("J", "energy of the step or of the static batch, all GPUs together", 0, 1e9),
    "avg_power_w_per_gpu": Column("W", "mean power of one GPU meanwhile, instead of energy_j", 0, 1e5),
}
"""Columns that mean something. A table needs model, tp, gpu, phase (unless given by option), batch, time_s, and what its phase needs."""

INFORMATIONAL = {
    "gemm_source", "t_gemm_s", "t_attn_s", "t_elem_s", "t_comm_s", "t_lmhead_s", "attn_interp", "power_measured_share", "note", "source",
    "framework",
}  # fmt: skip
"""Columns that are allowed and only kept to select rows by."""

PHASES = ("prefill", "decode", "end_to_end")


@dataclass(frozen=True)
class From:
    """A column of ours as the product of a table's `times` columns over its `over` columns, times `factor`, plus the prompt length if
    `after_prompt` says so, which the table does not hold."""

    times: tuple[str, ...]
    over: tuple[str, ...] = ()
    factor: float = 1.0
    after_prompt: bool = False

    @property
    def named(self) -> tuple[str, ...]:
        """Every column that it needs."""
        return self.times + self.over


@dataclass(frozen=True)
class Layout:
    """A published table as its authors wrote it, known by its `marks`.

    `setup` names its columns for model, tp and gpu; `columns` makes ours of its own; `optional` ones of ours need not be there; `kept` are
    its further columns, to select rows by; rows that are used together must agree in `single`, and have the values of `only`; `note` is
    what a file made from it says of it.
    """

    name: str
    marks: tuple[str, ...]
    phase: str
    setup: dict[str, str]
    columns: dict[str, From]
    optional: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    single: tuple[str, ...] = ()
    only: dict[str, str] = field(default_factory=dict)
    note: str = ""


LAYOUTS = (
    Layout(
        "argonne-lcf/LLM-Inference-Bench",
        ("hardware", "num_gpu", "in_out_len", "latency_s"),
        "end_to_end",
        {"model": "model", "tp": "num_gpu", "gpu": "hardware"},
        {
            "batch": From(("batch",)),
            "isl": From(("in_out_len",)),
            "osl": From(("in_out_len",)),
            "time_s": From(("latency_s",)),
            "energy_j": From(("energy_per_batch_j",)),
        },
        optional=("energy_j",),
        kept=("framework", "throughput_tok_s", "avg_power_w"),
        single=("framework",),
    ),
    Layout(
        "ml-energy/leaderboard-v2",
        ("energy_per_req_j", "avg_tpot_s", "avg_batch", "avg_output_tokens", "out_tok_per_s"),
        "decode",
        {"model": "model", "tp": "tp", "gpu": "gpu"},
        {
            "batch": From(("avg_batch",)),
            "mean_ctx": From(("avg_output_tokens",), factor=0.5, after_prompt=True),
            "time_s": From(("avg_tpot_s",)),
            # Energy a request x requests a second is the power; times a step's duration.
            "energy_j": From(("energy_per_req_j", "out_tok_per_s", "avg_tpot_s"), ("avg_output_tokens",)),
        },
        kept=("max_batch", "task", "file", "pp", "req_per_s", "avg_power_w_total", "step_energy_j"),
        single=("task",),
        only={"pp": "1"},
        note="run averages, prefill inside",
    ),
    Layout(
        "ml-energy/leaderboard (v3)",
        ("gpu_model", "num_gpus", "avg_batch_size", "output_throughput_tokens_per_sec", "energy_per_token_joules", "avg_output_len"),
        "decode",
        {"model": "model", "tp": "num_gpus", "gpu": "gpu_model"},
        {
            "batch": From(("avg_batch_size",)),
            "mean_ctx": From(("avg_output_len",), factor=0.5, after_prompt=True),
            "time_s": From(("avg_batch_size",), ("output_throughput_tokens_per_sec",)),
            "energy_j": From(("energy_per_token_joules", "avg_batch_size")),
        },
        kept=(
            "task", "precision", "avg_power_watts", "energy_per_request_joules", "max_num_seqs", "median_itl_ms", "p90_itl_ms",
            "p95_itl_ms", "p99_itl_ms", "tp", "dp", "ep",
        ),
        single=("task", "precision"),
        only={"dp": "1"},
        note="run averages, prefill inside",
    ),
)  # fmt: skip
"""Tables that are read as their authors publish them. Batches are run averages where the source gives no other."""

SLOWEST_DECODE_S = 2.0
"""A decode step of more than this at the median is a unit error: 8B to 400B models take 5 to 200 ms."""
SLOWEST_PREFILL_S_PER_TOKEN = 0.02
"""Beyond 2 s, a prefill step slower than this per token at the median is a unit error: 8B to 400B models take 10 us to 2 ms a token."""
FASTEST_STEP_S = 1e-4
"""No step of a language model on a GPU is shorter: launching its kernels takes longer."""
POWER_W_PER_GPU = (5.0, 2500.0)
"""Range of plausible mean power of one accelerator, from an idling edge module to a rack-scale GPU with margin."""
