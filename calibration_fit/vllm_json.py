"""Results of vLLM's own benchmarks, read as they are: `benchmark_latency` and `benchmark_serving` (`--save-detailed`) JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from calibration_fit.measurements import Measurements, from_table
from calibration_fit.published import source_of
from jaxserve.errors import InputError
from jaxserve.units import MS_PER_S


def read_vllm(
    path: Path, setup: Mapping[str, str], batch: int | None = None, isl: int | None = None, osl: int | None = None
) -> list[Measurements]:
    """Measurements of one vLLM benchmark result; `setup` gives model, tp and gpu (a serving result names the model itself).

    benchmark_latency holds latencies only, so its batch, isl and osl are options: an end-to-end row. benchmark_serving gives one decode
    row: the mean TPOT at the mean number of requests in decode and their mean context, an average over the run that holds prefill stalls.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise InputError(f"{path}: not a readable JSON file: {error}") from None
    if not isinstance(result, dict):
        raise InputError(f"{path}: not a result of a vLLM benchmark: it must be one JSON object.")
    if "avg_latency" in result:
        row = _latency_row(path, result, batch, isl, osl)
    elif "mean_tpot_ms" in result:
        row = _serving_row(path, result)
    else:
        raise InputError(f"{path}: not a result of vLLM's benchmark_latency (avg_latency) or benchmark_serving (mean_tpot_ms).")
    row = {"model": str(result.get("model_id", "")), **row, **setup}
    missing = [k for k in ("model", "tp", "gpu") if not row.get(k)]
    if missing:
        raise InputError(f"{path}: the result does not say its {' and '.join(missing)}: give {', '.join('--' + k for k in missing)}.")
    return from_table(pd.DataFrame([row]), source_of(path))


def _latency_row(path: Path, result: Mapping[str, Any], batch: int | None, isl: int | None, osl: int | None) -> dict[str, Any]:
    given = {"batch": batch, "isl": isl, "osl": osl}
    missing = [k for k, v in given.items() if v is None]
    if missing:
        names = ", ".join("--" + k for k in missing)
        raise InputError(f"{path}: a benchmark_latency result does not hold its batch size and lengths: give {names}.")
    return {"phase": "end_to_end", **given, "time_s": _number(path, result, "avg_latency")}


def _serving_row(path: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    duration, completed = _number(path, result, "duration"), _number(path, result, "completed")
    prompt, output = _number(path, result, "total_input_tokens"), _number(path, result, "total_output_tokens")
    tpot_s = _number(path, result, "mean_tpot_ms") / MS_PER_S
    itls = result.get("itls")
    # Without detail: every output token but the first takes one TPOT.
    if itls:
        _check(path, "itls", itls, lambda one: isinstance(one, list) and all(map(_is_number, one)), "a list of times for each request")
        decoding = float(sum(map(sum, itls)))
    else:
        decoding = max(output - completed, 0.0) * tpot_s
    batch = decoding / duration
    lens_in, lens_out = result.get("input_lens"), result.get("output_lens")
    if lens_in and lens_out:
        for key, lengths in (("input_lens", lens_in), ("output_lens", lens_out)):
            _check(path, key, lengths, _is_number, "the length of each request")
        if len(lens_in) != len(lens_out) or not sum(lens_out) > 0:
            raise InputError(f"{path}: input_lens and output_lens do not go together: {len(lens_in)} and {len(lens_out)} requests.")
        # A step meets a request in proportion to the tokens it generates, half of them generated on average.
        isl, osl = np.asarray(lens_in, float), np.asarray(lens_out, float)
        context = float(np.sum(osl * (isl + osl / 2)) / np.sum(osl))
    else:
        context = (prompt + output / 2) / completed
    # Never below one: the time average holds idle moments, a step does not.
    return {"phase": "decode", "batch": max(batch, 1.0), "mean_ctx": context, "time_s": tpot_s}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value)) and value >= 0


def _check(path: Path, key: str, values: Any, right: Callable[[Any], bool], what: str) -> None:
    if not isinstance(values, list) or not all(map(right, values)):
        raise InputError(f"{path}: {key} must hold {what}.")


def _number(path: Path, result: Mapping[str, Any], key: str) -> float:
    value = result.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value) or value <= 0:
        raise InputError(f"{path}: {key} is {value!r}; it must be a number above 0.")
    return float(value)
