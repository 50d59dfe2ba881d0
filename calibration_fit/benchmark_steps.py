"""Decode steps from a serving benchmark: from the gaps between tokens where it holds them, else from its means."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxserve.errors import InputError
from jaxserve.perf.benchmark_result import RequestDetails, Result
from jaxserve.units import MS_PER_S

BINS_A_DOUBLING = 4
"""Batch sizes that differ by less than a factor of 2^(1/4) are taken together."""
FEWEST_TOKENS = 100
"""A mean over fewer gaps says too little: single ones scatter by 10 % and more."""
RUN_MEAN = "mean over the run, stalls for the prefill of others inside"


class Step(NamedTuple):
    """A decode step: requests in it, cached tokens of each, duration in s."""

    batch: float
    mean_ctx: float
    time_s: float


def decode_steps(result: Result) -> tuple[list[Step], str]:
    """Decode steps of a serving result, and in words how they were told.

    By batch size where the gaps between tokens can be placed in time; else one for the run: a mean over tokens, not over requests, whose
    mean TPOT weighs an answer of two tokens like one of two hundred. TPOT is taken only where a result holds neither gaps nor their mean.
    """
    requests = result.details()
    duration_s = result.number("duration")
    if requests is None or requests.itls_s is None:
        return _reported(result, duration_s)
    start_s, note = result.start_s(requests)
    steps = steps_by_batch(start_s, requests) if start_s is not None and requests.ttft_s is not None else []
    if steps:
        words = ["gaps between tokens while no request waited for its first one, by batch size", note]
    else:
        steps, words = [_run_mean(result.name, requests, duration_s)], [RUN_MEAN]
    if failed := int((requests.osl < 1).sum()):
        words.append(f"{failed} of {len(requests.osl)} requests failed")
    return steps, "; ".join(word for word in words if word)


def steps_by_batch(start_s: np.ndarray, requests: RequestDetails) -> list[Step]:
    """A step a range of batch sizes, from the gaps in which no request waited for its first token, so that no prefill ran; requests [R]
    were sent at `start_s`. Empty where there is no such range of `FEWEST_TOKENS`."""
    if requests.ttft_s is None or requests.itls_s is None:
        return []
    served = np.flatnonzero(requests.osl >= 1)
    start, first = start_s[served], (start_s + requests.ttft_s)[served]
    ends = [first[i] + np.cumsum(requests.itls_s[r]) for i, r in enumerate(served)]
    finish = np.array([end[-1] if len(end) else first[i] for i, end in enumerate(ends)])
    many = [i for i, r in enumerate(served) if len(ends[i]) and requests.osl[r] > 1]
    if not many:
        return []
    end = np.concatenate([ends[i] for i in many])
    begin = np.concatenate([np.concatenate([first[i : i + 1], ends[i][:-1]]) for i in many])
    gaps = np.array([len(ends[i]) for i in many])
    # Tokens that came together share a gap.
    tokens = np.repeat((requests.osl[served][many] - 1) / gaps, gaps)
    made = np.concatenate([np.arange(n) for n in gaps]) * tokens
    # The step of a token meets the prompt and the tokens made before it (engine contract, step 4).
    context = np.repeat(requests.isl[served][many], gaps) + made + (tokens + 1) / 2
    middle = (begin + end) / 2
    batch = np.maximum(_until(first, middle, "right") - _until(finish, middle, "right"), 1)
    quiet = _until(start, end, "left") <= _until(first, begin, "right")
    bins = np.floor(BINS_A_DOUBLING * np.log2(batch))
    steps = []
    for one in np.unique(bins[quiet]):
        held = quiet & (bins == one)
        weight = tokens[held]
        if weight.sum() >= FEWEST_TOKENS:
            mean_batch, mean_ctx = (float(np.average(x[held], weights=weight)) for x in (batch, context))
            steps.append(Step(mean_batch, mean_ctx, float((end - begin)[held].sum() / weight.sum())))
    return steps


def _until(events: np.ndarray, at: np.ndarray, side: str) -> np.ndarray:
    """How many of the `events` lie before each time `at` (side "left"), or not after it ("right")."""
    return np.searchsorted(np.sort(events), at, side=side)  # type: ignore[call-overload]


def _run_mean(name: str, requests: RequestDetails, duration_s: float) -> Step:
    """The mean step of a run from its gaps."""
    decoded = np.maximum(requests.osl - 1, 0)
    if requests.decode_s is None or not decoded.sum() > 0 or not requests.decode_s[decoded > 0].sum() > 0:
        raise InputError(
            f"{name}: no request made a second token at a known time (output_lens, itls), so nothing tells how long a step takes"
        )
    decode_s = float(requests.decode_s[decoded > 0].sum())
    context = float(np.average(requests.isl + requests.osl / 2, weights=decoded))
    # Never below one: the time average holds idle moments, a step does not.
    return Step(max(decode_s / duration_s, 1.0), context, decode_s / float(decoded.sum()))


def _reported(result: Result, duration_s: float) -> tuple[list[Step], str]:
    """The mean step of a run that reports means only, at the mean number of requests in decode and their mean context."""
    completed, prompt, output = (result.number(key) for key in ("completed", "total_input_tokens", "total_output_tokens"))
    key = "mean_itl_ms" if "mean_itl_ms" in result.values else "mean_tpot_ms"
    time_s = result.number(key) / MS_PER_S
    batch = max(output - completed, 0.0) * time_s / duration_s
    word = RUN_MEAN if key == "mean_itl_ms" else f"{RUN_MEAN}, and a mean over requests, which weighs short answers like long ones (TPOT)"
    return [Step(max(batch, 1.0), (prompt + output / 2) / completed, time_s)], word
