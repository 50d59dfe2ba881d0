"""Power of every shipped file over batch and prompt tokens, as Markdown: `python -m calibration_fit.power_table`."""

from __future__ import annotations

import numpy as np

from jaxserve.perf.coefficients import Coefficients, load_coefficients, shipped_names
from jaxserve.perf.power import within_board
from jaxserve.types import Real, on_host

CONTEXT = 900.0
"""Mean context of a decode step, tokens."""
BATCHES = (1, 8, 32, 64, 128, 256)
TOKENS = (64, 256, 841, 2048, 8192)
"""Of a prefill step, one prompt (beyond 2048: prompts of 2048)."""


def decode_w(c: Coefficients, batch: np.ndarray, context: np.ndarray) -> np.ndarray:
    """Watts of one GPU in decode steps of `batch` requests of `context` cached tokens each, as a run charges them."""
    b, cached = on_host(batch), on_host(batch * context)
    return _watts(c, c.decode_energy_model()(b, cached), c.decode_time_model()(b, cached))


def prefill_w(c: Coefficients, n_tokens: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Watts of one GPU in prefill steps of `n_tokens` in prompts of `length`, as a run charges them."""
    n, pieces, square = on_host(n_tokens), on_host(n_tokens / length), on_host(n_tokens * length)
    return _watts(c, c.prefill_energy_model()(n, square), c.prefill_time_model()(n, pieces, square))


def power_table() -> str:
    """W a GPU by file: decode over the batch at a context of 900 tokens, prefill over the tokens of the step."""
    batch, tokens = np.array(BATCHES, float), np.array(TOKENS, float)
    heads = [*(f"B = {b}" for b in BATCHES), *(f"N = {n}" for n in TOKENS)]
    lines = [f"| W a GPU | idle | {' | '.join(heads)} | board |", "|---|---:|" + "---:|" * len(heads) + "---:|"]
    for name in shipped_names():
        c = load_coefficients(name)
        watts = [*decode_w(c, batch, np.full_like(batch, CONTEXT)), *prefill_w(c, tokens, np.minimum(tokens, 2048.0))]
        cells = " | ".join(f"{w:.0f}" for w in watts)
        lines.append(f"| {name} | {c.power.idle_w_per_gpu:.0f} | {cells} | {c.power.max_w_per_gpu:.0f} |")
    return "\n".join(lines) + "\n"


def _watts(c: Coefficients, joules: Real, step_s: Real) -> np.ndarray:
    drawn = within_board(joules, step_s, c.power.idle_w_per_gpu * c.setup.tp, c.power.max_w_per_gpu * c.setup.tp)
    return np.asarray(drawn / step_s) / c.setup.tp


if __name__ == "__main__":
    print(power_table(), end="")
