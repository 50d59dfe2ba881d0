"""A benchmark result of vLLM or SGLang as a trace: the requests that its load generator sent (see `jaxserve.perf.benchmark_result`)."""

from pathlib import Path

import pandas as pd

from jaxserve.errors import InputError
from jaxserve.perf.benchmark_result import is_benchmark, parse_results, sent_requests
from jaxserve.scenario.rawfile import HEAD_BYTES, open_input
from jaxserve.scenario.trace_formats import RawTrace, TimeUnit, TraceFormat

BENCHMARK = TraceFormat("benchmark result", "start_times", "input_lens", "output_lens")


def holds_benchmark(path: Path) -> bool:
    """Whether a file is a benchmark result, by its beginning."""
    with open_input(path) as stream:
        return is_benchmark(stream.read(HEAD_BYTES).decode("utf-8", errors="replace"))


def read_benchmark(path: Path, origin_column: str | None, time_unit: TimeUnit | None) -> RawTrace:
    """The requests of all results of a file, times from the first one sent; rows are numbered from 1 in the order of the lists."""
    if origin_column is not None:
        raise InputError(f"workload.origin_column: {path} is a benchmark result, whose requests have no '{origin_column}'; remove it.")
    if time_unit is not None:
        raise InputError(f"workload.time_unit: {path} is a benchmark result, whose times are in s; remove it.")
    with open_input(path) as stream:
        text = stream.read().decode("utf-8")
    sent = sent_requests(parse_results(text, str(path)))
    return RawTrace(
        format=BENCHMARK,
        time=sent.start_s,
        isl=sent.isl,
        osl=sent.osl,
        line_of=lambda index: int(index) + 1,
        model=pd.Categorical(sent.model) if any(sent.model) else None,
        notes=("times of the load generator, made relative to the first request sent", *sent.notes),
    )
