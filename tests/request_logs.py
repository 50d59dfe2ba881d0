"""Request logs that the engine itself writes, from known coefficients: for the tests of the replay and of the fit."""

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxserve.perf.coefficients import Coefficients, parse_coefficients
from jaxserve.perf.request_log import parse_log
from jaxserve.validate import find_limits, replay
from tests.oracle.engine import Engine
from tests.oracle.records import Request

COEFFICIENTS: Coefficients = parse_coefficients(
    {
        "setup": {"model": "m", "tp": 1, "gpu": "G"},
        "prefill_time": {"tok_slope_below": 42e-6, "tok_slope_above": 57e-6, "tok_knee": 300.0, "b0": 9e-3, "b1": 28e-6, "b2": 1.5e-9},
        "decode_time": {"alpha0": 12e-3, "alpha1": 80e-6, "alpha2": 0.2e-6, "beta0": 1e-7, "beta1": 0.1e-6, "beta2": 0.0},
        "prefill_energy": {"e_pre_tok": 0.025},
        "decode_energy": {"e_dec0": 3.2, "e_dec_req": 0.09},
        "power": {"idle_w_per_gpu": 60.0, "max_w_per_gpu": 1000.0, "host_w": 300.0},
    },
    "known",
)


def drive(engine: Engine, requests: Sequence[Request]) -> None:
    """The reference engine alone, from the first arrival until all requests, in order of arrival, have ended."""
    coming, clock = deque(requests), 0.0
    while True:
        while coming and coming[0].arrival_s <= clock:
            engine.waiting.append(coming.popleft())
        end = engine.iterate(clock)
        if end is None and not coming:
            break
        clock = coming[0].arrival_s if end is None else end


def written_log(
    path: Path,
    coefficients: Coefficients,
    *,
    n: int,
    rate: float,
    limits: Mapping[str, int | None],
    engines: int = 1,
    batching: str = "prefill_first",
    noise: float = 0.0,
    seed: int = 0,
) -> Path:
    """`n` Poisson arrivals at `rate` a second through the engine, written with six digits after the point; noise is relative."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, n))
    isl, osl = rng.integers(20, 1200, n), rng.integers(1, 250, n)
    lines = ["arrival_s,isl,osl,ttft_s,tpot_s", *(f"{t!r},{i},{o},1,0.01" for t, i, o in zip(arrival.tolist(), isl, osl, strict=True))]
    blank = parse_log(lines, "arrivals")
    assert batching in ("prefill_first", "study")
    found = replay(blank, coefficients, find_limits(blank, {**limits, "engines": engines}, batching))
    jitter = 1 + noise * rng.standard_normal((2, n))
    wait, pre = found.admit_s - blank.arrival_s, (found.first_token_s - found.admit_s) * jitter[0]
    tpot = (found.finish_s - found.first_token_s) / np.maximum(blank.osl - 1, 1) * jitter[1]
    rows = [
        f"{a:.6f},{i:.0f},{o:.0f},{w + p:.6f},{t:.9f},{w:.6f}" + (f",{k % engines}" if engines > 1 else "")
        for k, (a, i, o, w, p, t) in enumerate(zip(blank.arrival_s, blank.isl, blank.osl, wait, pre, tpot, strict=True))
    ]
    path.write_text("\n".join(["arrival_s,isl,osl,ttft_s,tpot_s,queue_wait_s" + (",engine" if engines > 1 else ""), *rows]) + "\n")
    return path
