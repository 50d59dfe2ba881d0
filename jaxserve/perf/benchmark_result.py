"""Results of the load generators of vLLM (`vllm bench serve`, `vllm bench latency`) and SGLang (`bench_serving`), as their JSON has them.

A file holds one JSON object a run: vLLM's `--append-result` and SGLang write several, one after another. With `--save-detailed` (vLLM) or
`--output-details` (SGLang) a run holds lists with an entry a request: `input_lens`, `output_lens` (tokens; 0: the request failed), `ttfts`
(s), `itls` (for each request the times between its tokens, s) and, from vLLM, `start_times` (s on a clock whose zero means nothing).
No file is opened here: the callers bring the text.
"""

import heapq
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import InputError
from jaxserve.perf.stamps import check_seconds

Floats = NDArray[np.float64]

LATENCY, SERVING = "avg_latency", ("total_input_tokens", "total_output_tokens", "input_lens", "output_lens", "mean_tpot_ms", "mean_itl_ms")
"""The key that marks a result of `vllm bench latency`, and keys of which a serving result has at least one."""
MARKS = re.compile(r'"(' + "|".join((LATENCY, "backend", "start_times", "ttfts", "itls", *SERVING)) + r')"\s*:')
"""Of these at least one is near the beginning of a result, and none in a trace."""
BLANKS = re.compile(r"\s*")
MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class RequestDetails:
    """R requests of a run, in the order in which they were sent; failed ones made 0 tokens."""

    isl: Floats  # [R] tokens
    osl: Floats  # [R] tokens
    ttft_s: Floats | None  # [R]
    itls_s: tuple[Floats, ...] | None  # R of [G], the gaps between the tokens of each: one a token, or fewer where tokens came together

    @property
    def decode_s(self) -> Floats | None:
        """Seconds [R] from the first to the last token."""
        return None if self.itls_s is None else np.array([gaps.sum() for gaps in self.itls_s])


@dataclass(frozen=True)
class Result:
    """One run: where it stands (`name` for messages, `line` of its first character, from 1) and what it holds."""

    name: str
    line: int
    values: Mapping[str, Any]

    @property
    def model(self) -> str:
        """The served model; empty where the result does not say (SGLang)."""
        return str(self.values.get("model_id") or "")

    @property
    def is_latency(self) -> bool:
        """Whether it is of `vllm bench latency`: static batches, no requests."""
        return LATENCY in self.values

    def number(self, key: str) -> float:
        """A number above 0; raises `InputError` for anything else."""
        value = self.values.get(key)
        found = _plain([value])
        if found is None or not (np.isfinite(found[0]) and found[0] > 0):
            raise InputError(f"{self.name}: {key} is {_shown(value)}; it must be a number above 0.")
        return float(found[0])

    def details(self) -> RequestDetails | None:
        """The requests one by one; None without input_lens and output_lens. Raises `InputError` for lists that cannot be right."""
        isl, osl = self._tokens("input_lens"), self._tokens("output_lens")
        if isl is None or osl is None:
            return None
        ttft_s, itls_s = self._times("ttfts"), self._gaps()
        for key, held in (("output_lens", osl), ("ttfts", ttft_s), ("itls", itls_s)):
            self._together(key, isl, held)
        return RequestDetails(isl, osl, ttft_s, itls_s)

    def start_s(self, requests: RequestDetails) -> tuple[Floats | None, str]:
        """When each request [R] was sent, s after the first; and a note where that was worked out, or why it cannot be told.

        Requests that are sent at once, at most max_concurrency at a time, start in order as earlier ones end: that can be worked out.
        """
        stamps = self._times("start_times")
        if stamps is not None:
            self._together("start_times", requests.isl, stamps)
            check_seconds(stamps, f"{self.name}: start_times")
            return stamps - stamps.min(), ""
        rate, decode_s = self.values.get("request_rate"), requests.decode_s
        if str(rate).lower() not in ("inf", "infinity") or requests.ttft_s is None or decode_s is None:
            return None, "it does not hold when its requests were sent (start_times), nor were they sent at once (request_rate inf)"
        most = self.values.get("max_concurrency")
        at_once = len(requests.isl) if most is None else int(min(self.number("max_concurrency"), len(requests.isl)))
        if at_once < len(requests.isl) and (requests.osl < 1).any():
            return None, "it does not hold when its requests were sent (start_times), nor how long those that failed kept others waiting"
        start, ends = np.zeros(len(requests.isl)), [0.0] * max(at_once, 1)
        for i, seconds in enumerate(requests.ttft_s + decode_s):
            start[i] = heapq.heappop(ends)
            heapq.heappush(ends, start[i] + seconds)
        return start, f"when requests were sent is not in the file: worked out, {at_once} at a time as earlier ones ended"

    def _tokens(self, key: str) -> Floats | None:
        found = self._list(key, "the length of each request")
        if found is not None and len(bad := np.flatnonzero((found != np.round(found)) | (found > MOST_TOKENS))):
            raise InputError(f"{self.name}: {key} [{bad[0]}] is {found[bad[0]]:.15g}, not a whole number of tokens up to {MOST_TOKENS}.")
        return found

    def _times(self, key: str) -> Floats | None:
        return self._list(key, "the time of each request")

    def _gaps(self) -> tuple[Floats, ...] | None:
        held = self.values.get("itls")
        if not held:
            return None
        gaps = [_plain(one) for one in held] if isinstance(held, list) else [None]
        found = tuple(one for one in gaps if one is not None)
        if len(found) < len(gaps) or not all((np.isfinite(one) & (one >= 0)).all() for one in found):
            raise InputError(f"{self.name}: itls must hold a list of times for each request, none negative.")
        return found

    def _list(self, key: str, what: str) -> Floats | None:
        """A list of numbers not below 0, as an array; None where it is not there or empty."""
        held = self.values.get(key)
        if not held:
            return None
        found = _plain(held)
        if found is None:
            raise InputError(f"{self.name}: {key} must hold {what}, each a number.")
        if len(bad := np.flatnonzero(~(np.isfinite(found) & (found >= 0)))):
            raise InputError(f"{self.name}: {key} must hold {what}; its entry [{bad[0]}] is {found[bad[0]]:g}.")
        return found

    def _together(self, key: str, isl: Floats, held: Any) -> None:
        if held is not None and len(held) != len(isl):
            raise InputError(f"{self.name}: input_lens and {key} do not go together: {len(isl)} and {len(held)} requests.")


def is_json(text: str) -> bool:
    """Whether a text is JSON by its first character."""
    return text.lstrip("\ufeff \t\r\n")[:1] in ("{", "[")


def is_benchmark(head: str) -> bool:
    """Whether a text whose beginning is `head` is a benchmark result, and no other JSON."""
    return is_json(head) and MARKS.search(head) is not None


def parse_results(text: str, name: str) -> list[Result]:
    """All results of a file, in order: one object, or several one after another, a line each or not.

    Raises `InputError` with the row for text that is not whole JSON, and for objects that are no benchmark results.
    """
    text = text.removeprefix("\ufeff").rstrip()
    found, end = [], 0
    while end < len(text):
        begin = len(BLANKS.match(text, end)[0]) + end  # type: ignore[index]
        line = text.count("\n", 0, begin) + 1
        try:
            held, end = json.JSONDecoder().raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            row, reason = getattr(error, "lineno", line), getattr(error, "msg", "nested too deep or a number too long")
            raise InputError(
                f"{name}, row {row}: not a readable JSON file ({reason}; cut short?); save the benchmark's result again."
            ) from None
        if not isinstance(held, dict):
            raise InputError(f"{name}, row {line}: holds JSON that is not one object a benchmark result; give the file as it was written.")
        found.append(Result(name, line, held))
    for result in found:
        if not (result.is_latency or any(key in result.values for key in SERVING)):
            raise InputError(
                f"{name}, row {result.line}: not a result of vLLM's bench latency (avg_latency), nor of bench serve of vLLM or SGLang "
                f"(duration, completed, ...); its keys are {', '.join(map(_shown, result.values))[:120] or 'none'}."
            )
    return found if len(found) == 1 else [Result(f"{name}, row {r.line}", r.line, r.values) for r in found]


def select(results: list[Result], name: str, where: Mapping[str, str]) -> list[Result]:
    """The results whose keys equal `where` (as text); raises `InputError` where there is none, and where they are of several models."""
    for key, value in where.items():
        held = sorted({str(r.values.get(key)) for r in results if not isinstance(r.values.get(key), list | dict)})
        results = [r for r in results if str(r.values.get(key)) == value]
        if not results:
            raise InputError(f"{name}: no result has {key} = {value}; it holds {', '.join(held)[:200]}.")
    models = sorted({result.model for result in results} - {""})
    if len(models) > 1:
        raise InputError(
            f"{name}: holds several values of model_id ({', '.join(models)[:200]}); choose one with --where model_id={models[0]}."
        )
    return results


@dataclass(frozen=True)
class SentRequests:
    """The R requests of all results of a file on one clock, s after the first: what a trace or a request log needs."""

    start_s: Floats
    isl: Floats
    osl: Floats
    ttft_s: Floats | None  # None where a result lacks it
    decode_s: Floats | None  # likewise
    model: tuple[str, ...]  # [R]
    notes: tuple[str, ...]


def sent_requests(results: list[Result]) -> SentRequests:
    """Requests of all results, each run beginning when the one before has ended.

    Raises `InputError` for a result without its requests or without the times at which they were sent.
    """
    parts, starts, notes, begin_s = [], [], [], 0.0
    for result in results:
        requests = result.details()
        if requests is None:
            raise InputError(
                f"{result.name}: does not hold its requests one by one (input_lens, output_lens): "
                "run vLLM's bench serve with --save-detailed, or SGLang's with --output-details."
            )
        start, note = result.start_s(requests)
        if start is None:
            raise InputError(f"{result.name}: {note}; vLLM writes start_times with --save-detailed.")
        parts.append(requests)
        starts.append(begin_s + start)
        notes += [note] if note else []
        lasted = start if requests.ttft_s is None else start + requests.ttft_s
        lasted = lasted if requests.decode_s is None else lasted + requests.decode_s
        begin_s += max(float(lasted.max()), result.number("duration") if "duration" in result.values else 0.0)
    if len(results) > 1:
        notes.append(f"{len(results)} results, one after another: each begins when the one before has ended")

    def joined(held: list[Floats | None]) -> Floats | None:
        known = [one for one in held if one is not None]
        return np.concatenate(known) if len(known) == len(held) else None

    return SentRequests(
        np.concatenate(starts),
        np.concatenate([r.isl for r in parts]),
        np.concatenate([r.osl for r in parts]),
        joined([r.ttft_s for r in parts]),
        joined([r.decode_s for r in parts]),
        tuple(result.model for result, r in zip(results, parts, strict=True) for _ in r.isl),
        tuple(dict.fromkeys(notes)),
    )


def _plain(held: Any) -> Floats | None:
    """A list of JSON numbers as an array; None for anything else."""
    if not isinstance(held, list) or not set(map(type, held)) <= {int, float}:
        return None
    try:
        return np.array(held, np.float64)
    except OverflowError:
        return None


def _shown(value: Any) -> str:
    return repr(value)[:40]
