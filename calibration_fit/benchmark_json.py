"""Benchmark results of vLLM and SGLang as measurements: static batches of `vllm bench latency`, decode steps of a serving run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from calibration_fit.benchmark_steps import decode_steps
from calibration_fit.measurements import Measurements, Source, from_table
from jaxserve.errors import InputError
from jaxserve.perf.benchmark_result import Result, is_json, parse_results, select

HEAD_BYTES = 4096
"""Enough to get past blank lines."""


def read_results(path: Path, where: Mapping[str, str] | None = None) -> list[Result]:
    """The benchmark results of a file whose keys equal `where`; none if it is no JSON or cannot be read, which is for others to say."""
    try:
        with path.open("rb") as stream:
            if not is_json(stream.read(HEAD_BYTES).decode("utf-8-sig", errors="ignore")):
                return []
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError:
        return []
    return select(parse_results(text, str(path)), str(path), where or {})


def from_results(
    path: Path, results: Sequence[Result], setup: Mapping[str, str], static: Iterator[Mapping[str, int]]
) -> list[Measurements]:
    """Measurements of the results of one file; `setup` gives model, tp and gpu (a serving result of vLLM names the model itself).

    A latency result holds latencies only: `static` yields the batch, isl and osl of each in turn, and it becomes an end-to-end row. A
    serving result gives decode steps (`decode_steps`).
    """
    source = Source(str(path), hashlib.sha256(path.read_bytes()).hexdigest())
    found = []
    for result in results:
        if result.is_latency:
            rows: list[dict[str, Any]] = [{"phase": "end_to_end", **next(static), "time_s": result.number("avg_latency")}]
            note = ""
        else:
            steps, note = decode_steps(result)
            rows = [{"phase": "decode", **step._asdict()} for step in steps]
        named = {"model": result.model, **setup}
        missing = [k for k in ("model", "tp", "gpu") if not named.get(k)]
        if missing:
            options = ", ".join("--" + k for k in missing)
            raise InputError(f"{result.name}: the result does not say its {' and '.join(missing)}: give {options}.")
        line = np.full(len(rows), result.line)
        found += from_table(pd.DataFrame(rows).assign(**named), replace(source, note=note), row=line)
    return found


def static_batches(count: int, given: Mapping[str, Sequence[int]]) -> Iterator[Mapping[str, int]]:
    """The batch, isl and osl of each of `count` latency results: given once for all, or once for each in the order of the files."""
    for option, values in given.items():
        if count and len(values) not in (1, count):
            held = f"is given {len(values)} times for {count} results" if values else "is missing"
            raise InputError(
                f"--{option} {held}: JSON of vLLM's bench latency does not hold its batch size and lengths; "
                "give --batch, --isl and --osl, each once for all results or once for each"
            )
    return iter([{k: v[0 if len(v) == 1 else i] for k, v in given.items()} for i in range(count)])
