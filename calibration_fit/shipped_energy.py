"""Energy tables of the shipped files: the power of each part of a step's time, from runs whose power was measured.

A decode step's time is a sum of parts: what every step takes, what each request adds, what each cached token adds. An energy that gives
each part a power of its own has the same terms, and its power is the mean of those powers, weighted by time. So where all lie between idle
and board power, and what requests and tokens add draws no less than what every step takes, no step whatever leaves that range, and power
never falls with the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cvxpy as cp
import numpy as np

from calibration_fit.forms import NO_KNOT
from calibration_fit.losses import mape
from calibration_fit.measurements import Measurements, Source
from calibration_fit.output import Borrowed
from calibration_fit.results import TableFit
from calibration_fit.rows import prefill_total
from jaxserve.perf.brackets import prefill_bracket
from jaxserve.perf.latency import DecodeTime, PrefillTime, TwoPieceDecodeTime
from jaxserve.perf.power import DecodeEnergy, PrefillEnergy
from jaxserve.types import on_host

Key = tuple[str, int]
"""Model and tensor parallel size."""
LLAMA: Key = ("Llama-3.1-8B", 1)
AnyDecodeTime = DecodeTime | TwoPieceDecodeTime


@dataclass(frozen=True)
class Board:
    """A GPU in watts: idle with a model loaded, in prefill once it is saturated, and the most that its board may draw."""

    name: str
    idle_w: float
    prefill_w: float
    max_w: float
    prefill_text: str
    power: Borrowed


HOST_W = 300.0
"""Of a node, as the study has it."""
A100 = Board(
    "A100",
    72.0,
    395.0,
    400.0,
    "395 W a GPU in prefill (Wilkins, Mistral-7B on A100-40GB, prompts of 541 tokens and more)",
    Borrowed(
        {"idle_w_per_gpu": 72.0, "max_w_per_gpu": 400.0, "host_w": HOST_W},
        "idle with a model loaded and host as in arXiv 2610.14571 (measured: 59 to 62 W by chuyishang/inference-energy, 85 to 88 W by "
        "powertrace-sim); board: data sheet of the SXM part",
        False,
    ),
)
H100 = Board(
    "H100",
    70.0,
    0.98 * 700.0,
    700.0,
    "686 W a GPU in prefill, the share of its board power that the A100 draws there",
    Borrowed(
        {"idle_w_per_gpu": 70.0, "max_w_per_gpu": 700.0, "host_w": HOST_W},
        "assumed: a tenth of the board power idle, as no idle H100 was measured; host as in arXiv 2610.14571; board: data sheet of "
        "the SXM part",
        True,
    ),
)
H200_IDLE_W = 70.0
"""Assumed, as for the H100: it cancels but for the part of a step's energy that it makes up."""


@dataclass(frozen=True)
class Runs:
    """Decode steps whose energy was measured: batch, mean context, duration and energy of all GPUs, [R] each; `text` says what they are."""

    batch: np.ndarray
    context: np.ndarray
    step_s: np.ndarray
    step_j: np.ndarray
    sources: tuple[Source, ...]
    text: str

    @property
    def cached(self) -> np.ndarray:
        """Cached tokens K [R]."""
        return self.batch * self.context


def joined(runs: Sequence[Runs], text: str) -> Runs:
    """All runs in one."""
    arrays = {name: np.concatenate([getattr(r, name) for r in runs]) for name in ("batch", "context", "step_s", "step_j")}
    return Runs(**arrays, sources=tuple(dict.fromkeys(s for r in runs for s in r.sources)), text=text)


def prefill_energy(key: Key, board: Board, prefill: TableFit) -> Borrowed:
    """Power in saturated prefill times a line in N that touches the step time at a knee and is nowhere above it, nor below 0.

    So no step draws more than that power; one below the knee, or of many prompts, less.
    """
    t, _ = prefill_bracket(prefill.result.module, (1.0, 1.0), (1.0, 1.0))  # any form with knees, as one with several
    knees = np.append(1.0, np.asarray(t.tok_knots)[np.asarray(t.tok_knots) < NO_KNOT])
    at_s, last_s = (np.asarray(t(on_host(n), 0.0, 0.0)) for n in (knees, knees[-1:] + 1.0))
    watts = board.prefill_w * key[1]
    slope_s = min(float(last_s[0] - at_s[-1]), float((at_s / knees).min()))
    fixed_s = min(float(t.b0), float((at_s - slope_s * knees).min()))
    values = {"e_pre0": watts * max(fixed_s, 0.0), "e_pre_tok": watts * slope_s, "e_pre_sq": watts * float(t.b2)}
    gpus = "" if key[1] == 1 else f" x {key[1]} GPUs"
    of_another = board is not A100 or key != LLAMA
    text = f"{'extrapolated: ' if of_another else ''}{board.prefill_text}{gpus} x a line that touches the step time at its knee"
    return Borrowed(_rounded(values), text, of_another)


def static_runs(measured: Sequence[Measurements], prefill: PrefillTime, energy: PrefillEnergy, text: str) -> Runs:
    """Mean decode steps of static batches of which latency and energy were measured together; prefill is taken off both."""

    def before(m: Measurements, module: Any, quantity: str) -> np.ndarray:
        return np.array([prefill_total(module, b, n, quantity) for b, n in zip(m.batch, m.isl, strict=True)])

    parts = []
    for m in measured:
        step_s = (m.time_s - before(m, prefill, "time_s")) / (m.osl - 1.0)
        step_j = (m.energy_j - before(m, energy, "energy_j")) / (m.osl - 1.0)
        parts.append(Runs(m.batch, m.isl + m.osl / 2.0, step_s, step_j, (m.source,), text))
    return joined(parts, text)


def served_runs(m: Measurements, isl: float, energy: PrefillEnergy, text: str) -> Runs:
    """Mean decode steps of served batches; the energy of prefilling prompts of `isl` tokens, spread over their output, is taken off."""
    context = m.cached_tokens / m.batch
    osl = 2.0 * (context - isl)  # the context is the prompt and half of the output
    return Runs(m.batch, context, m.time_s, m.energy_j - m.batch * energy.e_pre_tok * isl / osl, (m.source,), text)


def step_seconds(time: AnyDecodeTime, batch: np.ndarray, cached: np.ndarray) -> np.ndarray:
    """Step times [R] of a module."""
    return np.asarray(time(on_host(batch), on_host(cached)))


def by_work(runs: Runs, time: AnyDecodeTime, idle_w: float) -> np.ndarray:
    """Energies [R] at our step times: what a run drew above idle is its work and comes along, waiting costs idle power (engine, W)."""
    return runs.step_j + idle_w * (step_seconds(time, runs.batch, runs.cached) - runs.step_s)


def by_power(runs: Runs, time: AnyDecodeTime) -> np.ndarray:
    """Energies [R] at our step times of engines that draw the power of the runs at their batches and contexts."""
    return runs.step_j / runs.step_s * step_seconds(time, runs.batch, runs.cached)


def from_llama(
    steps: Measurements,
    composed: tuple[Measurements, Measurements] | None,
    time: DecodeTime,
    energy: DecodeEnergy,
    board: Board,
    tp: int,
) -> tuple[Runs, Runs]:
    """What the steps of another setup draw at the batches and contexts of `steps`, from Llama TP1 on the same board: its work, its power.

    `composed` are H200 energies of the setup and of Llama, by whose ratio the work (energy above idle) and the power of a GPU are scaled;
    without them Llama's are taken as they are.
    """
    tables = composed or (steps, steps)
    own, llama = ({(b, c): (s, j) for b, c, s, j in zip(m.batch, m.length, m.time_s, m.energy_j, strict=True)} for m in tables)
    at = [place for place in dict.fromkeys(zip(steps.batch, steps.length, strict=True)) if place in own and place in llama]
    batch, context = np.array(at).T
    (own_s, own_j), (llama_s, llama_j) = (np.array([table[place] for place in at]).T for table in (own, llama))
    gpus = tp if composed else 1
    step_s, step_j = step_seconds(time, batch, batch * context), np.asarray(energy(on_host(batch), on_host(batch * context)))
    work = (own_j - H200_IDLE_W * gpus * own_s) / (llama_j - H200_IDLE_W * llama_s)
    power = (own_j / own_s / gpus) / (llama_j / llama_s)
    scaled = ", scaled by the ratio of composed energies on H200" if composed else ""
    like = f"extrapolated: {{}} of Llama-3.1-8B TP1 on {board.name} at the same batch and context{scaled}"
    above = (step_j - board.idle_w * step_s) * work + board.idle_w * tp * step_s
    sources = (steps.source,)
    return (
        Runs(batch, context, step_s, above, sources, like.format("energy above idle")),
        Runs(batch, context, step_s, step_j * power * tp, sources, like.format("power of a GPU")),
    )


def decode_energy(runs: Runs, joules: np.ndarray, time: AnyDecodeTime, board: Board, tp: int, extrapolated: bool) -> Borrowed:
    """The energy table whose parts draw powers between idle and board that come closest to `joules` [R], by relative squares.

    Raises `ValueError` where the step time has terms that the energy has not.
    """
    if time.alpha2 or time.beta0 or time.beta2:
        raise ValueError("decode_time has terms in B^2 or in the context alone, of which the energy has no part: hold them at 0")
    parts = _parts(time, runs)
    every = np.ones(len(joules), bool)
    watts = _powers(parts, joules, every, board, tp)
    held = np.array([parts[i] @ _powers(parts, joules, every & (np.arange(len(joules)) != i), board, tp) for i in range(len(joules))])
    base_w, request_w, token_w = watts
    values = {"e_dec0": base_w * time.alpha0, "e_dec_req": request_w * time.alpha1, "e_dec_kv": token_w * time.beta1}
    if isinstance(time, TwoPieceDecodeTime):
        values |= {"e_dec_req_below": base_w * time.alpha1_below, "batch_knee": time.batch_knee}
    error, out = mape(parts @ watts, joules), mape(held, joules)
    powers = " / ".join(f"{w / tp:.0f}" for w in watts)
    text = f"{runs.text}: {len(joules)} points, MAPE {error:.1f} %, left out one by one {out:.1f} %; "
    text += f"{powers} W a GPU while what every step / each request / each cached token takes"
    spans = {"batch": runs.batch, "mean_ctx": runs.context, "cached_tokens": runs.cached}
    return Borrowed(
        _rounded(values),
        text,
        extrapolated,
        {name: [float(x.min()), float(x.max())] for name, x in spans.items()},
        {"rows": len(joules), "mape_in_sample_percent": float(f"{error:.3g}"), "mape_held_out_percent": float(f"{out:.3g}")},
        runs.sources,
    )


def _parts(time: AnyDecodeTime, runs: Runs) -> np.ndarray:
    """Seconds [R, 3] of every step (up to the knee with its requests, for a step of few), of each request, of each cached token."""
    below = np.minimum(runs.batch, time.batch_knee) if isinstance(time, TwoPieceDecodeTime) else 0.0 * runs.batch
    first = time.alpha0 + (time.alpha1_below * below if isinstance(time, TwoPieceDecodeTime) else below)
    return np.stack([first, time.alpha1 * (runs.batch - below), time.beta1 * runs.cached], axis=1)


def _powers(parts: np.ndarray, joules: np.ndarray, used: np.ndarray, board: Board, tp: int) -> np.ndarray:
    """Watts [3] of the parts: the least relative squares over the rows that are `used`."""
    watts = cp.Variable(3)
    errors = cp.multiply(1.0 / joules[used], parts[used] @ watts) - 1.0
    bounds: list[cp.Constraint] = [watts[0] >= board.idle_w * tp, watts[1:] >= watts[0], watts <= board.max_w * tp]
    cp.Problem(cp.Minimize(cp.sum_squares(errors)), bounds).solve(solver=cp.CLARABEL)
    # The solver's answer may leave a bound by its tolerance.
    base, *rest = np.asarray(watts.value, float)
    base = np.clip(base, board.idle_w * tp, board.max_w * tp)
    return np.array([base, *np.clip(rest, base, board.max_w * tp)])


def _rounded(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(f"{value:.7g}") for name, value in values.items()}
