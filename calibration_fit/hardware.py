"""A small table of GPUs and models, for the physical floor: no step is faster than its FLOPs at peak or its bytes at full bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Gpu:
    """Vendor data sheet: dense BF16 peak, memory bandwidth, board power, memory."""

    peak_flops: float
    bytes_per_s: float
    power_w: float
    memory_bytes: float


@dataclass(frozen=True)
class Model:
    """Shape of a model, BF16: `dense` parameters read by every step (attention, MLP, head), of which `head`; per expert `expert`
    (all layers together), `top_k` used a token; `layers`, `heads`, `kv_heads`, `head_dim`."""

    dense: float
    head: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    expert: float = 0.0
    experts: int = 0
    top_k: int = 0

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values of one token."""
        return 2.0 * 2.0 * self.layers * self.kv_heads * self.head_dim

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights that a step can read."""
        return 2.0 * (self.dense + self.experts * self.expert)


GPUS = {
    "A100-SXM4-80GB": Gpu(312e12, 2.039e12, 400.0, 80e9),
    "A100-SXM4-40GB": Gpu(312e12, 1.555e12, 400.0, 40e9),
    "A100": Gpu(312e12, 2.039e12, 400.0, 80e9),
    "H100-SXM-80GB": Gpu(989e12, 3.35e12, 700.0, 80e9),
    "H100": Gpu(989e12, 3.35e12, 700.0, 80e9),
    "H200-SXM-141GB": Gpu(989e12, 4.8e12, 700.0, 141e9),
    "L40S-48GB": Gpu(362e12, 0.864e12, 350.0, 48e9),
    "B200": Gpu(2250e12, 8.0e12, 1000.0, 180e9),
}
MODELS = {
    # Parameters without the input embedding, which a step reads only a few rows of. Sizes from the models' published configurations.
    "Llama-3.1-8B": Model(7.50e9, 0.525e9, 32, 32, 8),
    "Qwen2.5-7B": Model(7.07e9, 0.545e9, 28, 28, 4),
    "Mixtral-8x7B": Model(1.47e9, 0.131e9, 32, 32, 8, expert=5.64e9, experts=8, top_k=2),
}

SAME = {
    "Nvidia A100 GPU": "A100-SXM4-40GB",  # of LLM-Inference-Bench: its bandwidth and the batches that did not fit say 40 GB
    "NVIDIA A100-SXM4-40GB": "A100-SXM4-40GB",
    "Nvidia H100 GPU": "H100-SXM-80GB",
    "NVIDIA H100 80GB HBM3": "H100-SXM-80GB",
    "meta-llama/Meta-Llama-3-8B": "Llama-3.1-8B",  # the same shapes, as in the others here
    "meta-llama/Meta-Llama-3.1-8B-Instruct": "Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B-Instruct": "Llama-3.1-8B",
    "Qwen/Qwen2-7B": "Qwen2.5-7B",
    "mistralai/Mixtral-8x7B-v0.1": "Mixtral-8x7B",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "Mixtral-8x7B",
}
"""Published names of GPUs and models that are in the tables above under another name."""
MEMORY_USED = 0.9
"""Share of GPU memory that vLLM takes by default (gpu_memory_utilization)."""


def known_gpu(name: str) -> Gpu | None:
    """The GPU of that name; None if it is not in the table."""
    return GPUS.get(SAME.get(name, name))


def known_model(name: str) -> Model | None:
    """The model of that name; None if it is not in the table."""
    return MODELS.get(SAME.get(name, name))


def fits_beside_weights(model: str, gpu: str, tp: int, tokens: np.ndarray) -> np.ndarray | None:
    """Whether so many cached tokens [R] fit beside the weights; None when model or GPU is not in the table."""
    m, g = known_model(model), known_gpu(gpu)
    if m is None or g is None:
        return None
    return tokens * m.kv_bytes_per_token <= tp * g.memory_bytes * MEMORY_USED - m.weight_bytes


def floor_s(
    model: str, gpu: str, tp: int, *, batch: np.ndarray, new_tokens: np.ndarray, sum_sq: np.ndarray, cached_tokens: np.ndarray
) -> np.ndarray | None:
    """Least possible duration [R] of a step of `batch` requests; None when model or GPU is not in the table.

    FLOPs: 2 per parameter and token (the head only for one token a request) + 4 * layers * heads * head_dim per pair of query and key,
    half of `sum_sq` with the causal mask, and the cached tokens. Bytes: the weights once (of a MoE no more experts than one token needs,
    the least that is certain) and the cached keys and values.
    """
    m, g = known_model(model), known_gpu(gpu)
    if m is None or g is None:
        return None
    attention = 4.0 * m.layers * m.heads * m.head_dim * (0.5 * sum_sq + cached_tokens)
    flops = 2.0 * (m.dense - m.head + m.top_k * m.expert) * new_tokens + 2.0 * m.head * batch + attention
    bytes_read = 2.0 * (m.dense + m.top_k * m.expert) + m.kv_bytes_per_token * cached_tokens
    return np.maximum(flops / (tp * g.peak_flops), bytes_read / (tp * g.bytes_per_s))
