"""Shared by the calibration tests: where the measured data lie, synthetic tables, and an independent global least-squares solution."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import least_squares

import tests.oracle.engine as oracle
from calibration_fit.measurements import Measurements, Source, from_table
from jaxserve.perf.coefficients import Coefficients
from jaxserve.perf.latency import DecodeTime, PrefillTime
from tests.oracle.records import Request
from tests.request_logs import drive

DATA = Path(__file__).parents[2].parent / "shared" / "data" / "calibration"

needs_data = pytest.mark.skipif(not (DATA / "composed_steps.csv").exists(), reason=f"measured data not found in {DATA}")

PREFILL = PrefillTime(42e-6, 57e-6, 300.0, 9e-3, 28e-6, 1.5e-9)
DECODE = DecodeTime(12e-3, 20e-6, 0.10e-6, 1e-7, 0.08e-6, -1e-10)


def synthetic(phase: str, noise: float = 0.0, seed: int = 0, model: str = "m", n: int | None = None) -> Measurements:
    """Steps of the known coefficients above over a grid, with relative noise."""
    rng = np.random.default_rng(seed)
    if phase == "prefill":
        grid = [(b, s) for b in (1, 2, 4, 8, 16) for s in (32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048) if b * s <= 8192]
        frame = pd.DataFrame([{"batch": b, "seq_len": s} for b, s in grid])
        b, length = frame.batch.to_numpy(float), frame.seq_len.to_numpy(float)
        time_s = np.asarray(PREFILL(b * length, b, b * length**2))
    else:
        grid = [(b, c) for b in (1, 2, 4, 8, 16, 32, 64, 128) for c in (64, 128, 256, 512, 1024, 2048, 4096)]
        frame = pd.DataFrame([{"batch": b, "mean_ctx": c} for b, c in grid])
        time_s = np.asarray(DECODE(frame.batch.to_numpy(float), (frame.batch * frame.mean_ctx).to_numpy(float)))
    frame = frame.assign(model=model, tp=1, gpu="A100", phase=phase, time_s=time_s * (1 + noise * rng.standard_normal(len(frame))))
    return from_table(frame if n is None else frame.iloc[:n], Source("synthetic.csv", "0" * 64))[0]


def prefill_design(m: Measurements, knee: float) -> np.ndarray:
    """Columns of the prefill form at a given knee, written out here: [R, 5] for slope below, slope above, b0, b1, b2."""
    n = m.n_tokens
    return np.stack([np.minimum(n, knee), np.maximum(n - knee, 0), np.ones_like(n), m.batch, m.sum_sq], axis=1)


def decode_design(m: Measurements, knee: float | None = None) -> np.ndarray:
    """Columns of the decode form, [R, 6], or of the two-piece form at a given knee, [R, 7]."""
    b, c = m.batch, m.cached_tokens / m.batch
    middle = [b] if knee is None else [np.minimum(b, knee), np.maximum(b - knee, 0)]
    return np.stack([np.ones_like(b), *middle, b * b, c, b * c, b * b * c], axis=1)


def scipy_solution(design: np.ndarray, measured: np.ndarray, lower: np.ndarray, delta: float) -> tuple[np.ndarray, float]:
    """Robust (soft_l1, f_scale = delta) relative least squares by scipy: coefficients [C] and mean loss. Linear, so globally optimal."""
    a = design / measured[:, None]
    scale = np.abs(a).mean(axis=0)
    a = a / scale
    start = np.maximum(np.linalg.lstsq(a, np.ones(len(a)), rcond=None)[0], np.where(np.isfinite(lower), 1e-6, -np.inf))
    found = least_squares(
        lambda x: a @ x - 1,
        start,
        jac=lambda x: a,
        bounds=(lower, np.full(len(lower), np.inf)),
        loss="soft_l1",
        f_scale=delta,
        xtol=1e-14,
        ftol=1e-14,
        gtol=1e-14,
        max_nfev=2000,
    )
    return found.x / scale, found.cost / len(a)


def oracle_log(
    path: Path,
    c: Coefficients,
    limits: Mapping[str, int],
    monkeypatch: pytest.MonkeyPatch,
    *,
    n: int,
    rate: float,
    noise: float = 0.0,
    waits: bool = True,
    seed: int = 0,
) -> Path:
    """A request log of the reference engine: `n` Poisson arrivals at `rate` a second; each step lasts its time with relative `noise`."""
    rng = np.random.default_rng(seed)
    for name in ("t_pre", "t_dec"):
        exact = getattr(oracle, name)
        monkeypatch.setattr(oracle, name, lambda *a, exact=exact: exact(*a) * float(np.exp(noise * rng.standard_normal())))
    times = {"t_pre": c.prefill_time.model_dump(), "t_dec": c.decode_time.model_dump()}
    power = {"tp": c.setup.tp, "idle_w_per_gpu": c.power.idle_w_per_gpu, "max_w_per_gpu": c.power.max_w_per_gpu}
    energies = power | {"e_pre": c.prefill_energy.model_dump(), "e_dec": c.decode_energy.model_dump(exclude_none=True)}
    engine = oracle.Engine(SimpleNamespace(batching="prefill_first", token_count="sum", **times, **energies, **limits))  # type: ignore[arg-type]
    arrival = np.cumsum(rng.exponential(1 / rate, n)).tolist()
    lengths = zip(rng.integers(20, 1200, n).tolist(), rng.integers(1, 250, n).tolist(), strict=True)
    requests = [Request(i, 0, a, isl, osl, dc_arrival_s=a) for i, (a, (isl, osl)) in enumerate(zip(arrival, lengths, strict=True))]
    drive(engine, requests)
    monkeypatch.undo()
    rows = []
    for r in requests:
        tpot = (r.finish_s - r.token_s[0]) / max(r.osl - 1, 1)
        row = f"{r.arrival_s:.6f},{r.isl},{r.osl},{r.token_s[0] - r.arrival_s:.6f},{tpot:.9f}"
        rows.append(row + (f",{r.admit_s - r.arrival_s:.6f}" if waits else ""))
    path.write_text("\n".join(["arrival_s,isl,osl,ttft_s,tpot_s" + (",queue_wait_s" if waits else ""), *rows]) + "\n")
    return path
