"""How far a replay is off the log it replays: errors of requests, of means and of percentiles, overall and by load."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.analysis.validation_energy import energy_errors
from jaxserve.perf.coefficients import Coefficients
from jaxserve.perf.request_log import RequestLog

Floats = NDArray[np.float64]
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Replay:
    """What the engine predicted for the requests of a log; times [R] in s since the first arrival, energies in J of all GPUs."""

    admit_s: Floats
    first_token_s: Floats
    finish_s: Floats
    request_j: Floats  # [R] its share of prefill and decode steps, see `validation_energy`
    idle_j: float  # from the first arrival to the last finish
    steps_outside: Mapping[str, tuple[int, int]]  # by phase: steps outside the coefficients' valid range, and all steps


@dataclass(frozen=True)
class Validation:
    """A replay beside its log. `errors[load][metric]` holds numbers (see `error_table`); `series[metric]` is (measured, predicted) [R]."""

    log: RequestLog
    replay: Replay
    coefficients: str
    limits: Mapping[str, Any]
    load: NDArray[np.int64]  # [R] requests in the server at each arrival
    counted: NDArray[np.bool_]  # [R]
    errors: dict[str, dict[str, dict[str, float]]]
    energy: dict[str, dict[str, float]] | None  # by load, see `validation_energy.energy_errors`
    series: dict[str, tuple[Floats, Floats]]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Everything but the series, for JSON."""
        return {
            "log": self.log.name,
            "requests": len(self.log),
            "counted": int(self.counted.sum()),
            "log_setup": dict(self.log.setup),
            "coefficients": self.coefficients,
            "limits": {k: v for k, v in self.limits.items() if k != "origin"},
            "limits_from": dict(self.limits["origin"]),
            "errors": self.errors,
            "energy": self.energy,
            "notes": list(self.notes),
        }


def error_table(measured: Floats, predicted: Floats) -> dict[str, float]:
    """Errors in percent of the measured value, with sign (positive: predicted too high) but for the mean absolute one; values in s."""
    out = {
        "requests": len(measured),
        "mape_percent": _percent(np.mean(np.abs(predicted / measured - 1.0))),
        "measured_mean_s": float(np.mean(measured)),
        "predicted_mean_s": float(np.mean(predicted)),
        "mean_error_percent": _percent(np.mean(predicted) / np.mean(measured) - 1.0),
    }
    for p in PERCENTILES:
        m, q = np.percentile(measured, p), np.percentile(predicted, p)
        out |= {f"measured_p{p}_s": float(m), f"predicted_p{p}_s": float(q), f"p{p}_error_percent": _percent(q / m - 1.0)}
    return out


def _percent(share: Any) -> float:
    return float(100.0 * share)


def load_groups(load: NDArray[np.int64]) -> dict[str, NDArray[np.bool_]]:
    """Requests [R] of each third of the load; equal loads stay together, so that thirds may be uneven or empty (left out)."""
    low, high = np.percentile(load, [100 / 3, 200 / 3])
    groups = {"low": load <= low, "middle": (load > low) & (load <= high), "high": load > high}
    return {name: mask for name, mask in groups.items() if mask.any()}


def evaluate(
    log: RequestLog,
    replay: Replay,
    coefficients: Coefficients,
    label: str,
    limits: Mapping[str, Any],
    counted: NDArray[np.bool_],
) -> Validation:
    """Compare a replay with its log over the `counted` [R] requests."""
    many = log.osl > 1
    tpot = np.where(many, (replay.finish_s - replay.first_token_s) / np.maximum(log.osl - 1, 1), np.nan)
    series = {"ttft_s": (log.ttft_s, replay.first_token_s - log.arrival_s), "tpot_s": (log.tpot_s, tpot)}
    series["e2e_s"] = (log.finish_s - log.arrival_s, replay.finish_s - log.arrival_s)
    if log.admit_s is not None:
        series["admission_to_first_token_s"] = (log.first_token_s - log.admit_s, replay.first_token_s - replay.admit_s)
    load = log.in_system()
    masks = {"all": counted} | {f"{name} load": mask & counted for name, mask in load_groups(load).items()}
    errors = {}
    for name, mask in masks.items():
        parts = {}
        for metric, (measured, predicted) in series.items():
            use = mask & np.isfinite(measured) & (measured > 0)
            if use.any():
                parts[metric] = error_table(measured[use], predicted[use])
        if parts:
            errors[name] = parts | {"load": {"least": float(load[mask].min()), "most": float(load[mask].max())}}
    by_load = {name: mask for name, mask in masks.items() if name != "all"}
    energy = energy_errors(log, replay.request_j, replay.idle_j, counted, by_load)
    notes = _notes(log, replay, coefficients, limits, counted)
    return Validation(log, replay, label, limits, load, counted, errors, energy, series, notes)


def _notes(
    log: RequestLog, replay: Replay, coefficients: Coefficients, limits: Mapping[str, Any], counted: NDArray[np.bool_]
) -> tuple[str, ...]:
    """What a reader must know before believing the numbers."""
    setup, notes = coefficients.setup, list(log.notes)
    for quantity, mine in (("gpu", setup.gpu), ("model", setup.model), ("tp", str(setup.tp))):
        logged = log.setup.get(quantity)
        what = {"gpu": "GPU", "model": "model", "tp": "tensor parallel size"}[quantity]
        if logged is None:
            notes.append(f"the log does not name its {what}; the coefficients are of {mine}")
        elif _plain(logged) != _plain(mine):
            notes.append(f"the coefficients' {what} ({mine}) differs from the log's ({logged}): this is no validation of either")
    if log.energy_j is not None:
        notes += coefficients.caveats
        notes.append(
            "energy by load: a step's energy is shared among its requests (prefill by tokens, decode equally), idle energy "
            f"({replay.idle_j:.4g} J) in proportion; a log that shares otherwise moves energy between loads, not the total"
        )
    origin = limits["origin"]
    inferred = [f"{name} {limits[name]}" for name in ("max_num_seqs", "kv_capacity_tokens") if origin[name] == "log"]
    if inferred:
        notes.append(f"read off the log itself (what ran while others waited), not the server's configuration: {', '.join(inferred)}")
    assumed = [n for n in ("engines", "max_num_seqs", "max_num_batched_tokens") if origin[n] == "default"]
    if assumed:
        notes.append(f"assumed, neither given nor in the log: {', '.join(f'{n} {limits[n]}' for n in assumed)}")
    if origin["kv_capacity_tokens"] == "default":
        notes.append("the KV capacity is neither given nor in the log: taken as never short")
    for phase, (out, steps) in replay.steps_outside.items():
        if out:
            notes.append(f"{out} of {steps} {phase} steps were outside the range in which the coefficients were measured")
    if log.unused:
        notes.append(f"columns not used: {', '.join(log.unused)}")
    if not counted.all():
        notes.append(f"{int((~counted).sum())} of {len(log)} requests were replayed but not counted (--count-from)")
    return tuple(notes)


def _plain(name: str) -> str:
    """Letters and digits of a name without its owner (meta-llama/...), which servers put before a model's."""
    return "".join(c for c in name.rpartition("/")[2].lower() if c.isalnum())
