"""Benchmark results as vLLM's and SGLang's load generators write them, of a small server whose steps are known."""

import json
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.perf.coefficients import Coefficients

CLOCK_S = 353399.725848632
"""`start_times` count from the start of the machine."""


def served(coefficients: Coefficients, *, n: int, rate: float, limits: Mapping[str, int], seed: int = 0) -> dict[str, Any]:
    """The result of `vllm bench serve --save-detailed` for `n` Poisson arrivals at `rate` a second.

    One engine that prefills first (engine contract), its steps written out here; prompts are shorter than a prefill step's budget.
    """
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, n)).tolist()
    isl, osl = rng.integers(20, 1200, n).tolist(), rng.integers(1, 250, n).tolist()
    pre, dec = coefficients.prefill_time.model_dump(), coefficients.decode_time.model_dump()
    token_s: list[list[float]] = [[] for _ in range(n)]
    waiting, running, clock = deque(range(n)), [], 0.0
    while waiting or running:
        came: list[int] = []
        while waiting and arrival[waiting[0]] <= clock:
            held = [*running, *came, waiting[0]]
            prompts = sum(isl[r] for r in held[len(running) :])
            room = len(held) <= limits["max_num_seqs"] and sum(isl[r] + osl[r] for r in held) <= limits["kv_capacity_tokens"]
            if not (room and prompts <= limits["max_num_batched_tokens"]):
                break
            came.append(waiting.popleft())
        if came:
            tokens, squares = sum(isl[r] for r in came), sum(isl[r] ** 2 for r in came)
            below = min(tokens, pre["tok_knee"])
            clock += pre["tok_slope_below"] * below + pre["tok_slope_above"] * (tokens - below)
            clock += pre["b0"] + pre["b1"] * len(came) + pre["b2"] * squares
        elif running:
            b, c = len(running), sum(isl[r] + len(token_s[r]) for r in running) / len(running)
            clock += dec["alpha0"] + dec["alpha1"] * b + dec["alpha2"] * b**2 + (dec["beta0"] + dec["beta1"] * b + dec["beta2"] * b**2) * c
        else:
            clock = arrival[waiting[0]]
        for r in came or running:
            token_s[r].append(clock)
        running = [r for r in [*running, *came] if len(token_s[r]) < osl[r]]
    itls = [np.diff(one).tolist() for one in token_s]
    return {
        "date": "20260120-101500", "backend": "openai", "model_id": "meta-llama/m", "num_prompts": n, "request_rate": rate,
        "max_concurrency": None, "duration": clock, "completed": n, "failed": 0,
        "total_input_tokens": sum(isl), "total_output_tokens": sum(osl), "input_lens": isl, "output_lens": osl,
        "ttfts": [one[0] - a for one, a in zip(token_s, arrival, strict=True)], "itls": itls,
        "start_times": [CLOCK_S + a for a in arrival], "generated_texts": ["one\u2028two"] * n, "errors": [""] * n,
        "mean_tpot_ms": 1e3 * float(np.mean([np.mean(gaps) for gaps in itls if gaps])),
        "mean_itl_ms": 1e3 * float(np.concatenate(itls).mean()),
    }  # fmt: skip


def as_csv(result: Mapping[str, Any]) -> str:
    """The same requests as a request log, with all digits."""
    tpot = [sum(gaps) / len(gaps) if gaps else "" for gaps in result["itls"]]
    columns = zip(result["start_times"], result["input_lens"], result["output_lens"], result["ttfts"], tpot)
    return "\n".join(["arrival_s,isl,osl,ttft_s,tpot_s", *(",".join(map(str, row)) for row in columns)])


def small(**changed: Any) -> dict[str, Any]:
    """A result of three requests, by hand: 2, 1 and 3 tokens; a key set to None is left out."""
    result = {
        "backend": "openai", "model_id": "m", "duration": 4.0, "completed": 3, "total_input_tokens": 60, "total_output_tokens": 6,
        "input_lens": [10, 20, 30], "output_lens": [2, 1, 3], "ttfts": [0.2, 0.3, 0.25], "itls": [[0.02], [], [0.03, 0.05]],
        "start_times": [100.5, 101.0, 100.0], "mean_tpot_ms": 30.0, "mean_itl_ms": 100 / 3,
    }  # fmt: skip
    return {k: v for k, v in {**result, **changed}.items() if v is not None}


def written(path: Path, *results: Mapping[str, Any], indent: int | None = None) -> Path:
    """One object after another, as `--append-result` writes them."""
    path.write_text("\n".join(json.dumps(result, indent=indent) for result in results))
    return path
