"""Benchmark results of vLLM and SGLang: what is read from them, and one test for each way in which they can be wrong."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import InputError
from jaxserve.perf.benchmark_result import is_benchmark, parse_results, select, sent_requests
from jaxserve.perf.request_log import read_request_log
from jaxserve.scenario.traces import read_trace
from tests.benchmark_files import small, written
from tests.cli.helpers import call, refused

SGLANG: dict[str, Any] = {"backend": "sglang", "model_id": None, "start_times": None, "request_rate": float("inf"), "max_concurrency": 2}


def test_several_results_are_several_however_they_stand_one_after_another():
    one, two = json.dumps(small()), json.dumps(small(duration=8.0), indent=2)
    for text in (f"{one}\n{two}\n", f"\ufeff\n {one}{two}", f"{one}\r\n\r\n{two}  "):
        assert [result.number("duration") for result in parse_results(text, "r")] == [4.0, 8.0]
    assert [(r.name, r.line) for r in parse_results(f"{one}\n\n{two}", "r")] == [("r, row 1", 1), ("r, row 3", 3)]
    assert parse_results(one, "r")[0].name == "r"


def test_requests_of_two_runs_follow_one_another():
    sent = sent_requests(parse_results(json.dumps(small()) + json.dumps(small(model_id="n")), "r"))
    # The first run lasts 4 s; on its clock the third request came first, at 100 s.
    np.testing.assert_allclose(sent.start_s, [0.5, 1.0, 0.0, 4.5, 5.0, 4.0])
    np.testing.assert_allclose(sent.decode_s, [0.02, 0.0, 0.08] * 2)
    assert sent.model == ("m",) * 3 + ("n",) * 3
    assert sent.notes == ("2 results, one after another: each begins when the one before has ended",)


def test_what_was_sent_at_once_starts_as_earlier_requests_end():
    """Five requests of 3, 1, 1, 4 and 1 s, two at a time: by hand."""
    seconds = [3.0, 1.0, 1.0, 4.0, 1.0]
    lists = {"input_lens": [10] * 5, "output_lens": [2] * 5, "ttfts": [0.5] * 5, "itls": [[s - 0.5] for s in seconds]}
    sent = sent_requests(parse_results(json.dumps(small(**{**SGLANG, **lists})), "r"))
    np.testing.assert_allclose(sent.start_s, [0.0, 0.0, 1.0, 2.0, 3.0])
    assert "worked out, 2 at a time" in sent.notes[0]
    free = parse_results(json.dumps(small(**{**SGLANG, **lists, "max_concurrency": None})), "r")
    assert sent_requests(free).start_s.tolist() == [0.0] * 5


def test_one_result_is_chosen_by_its_keys():
    results = parse_results(json.dumps(small(request_rate=1)) + json.dumps(small(request_rate="inf", model_id="n")), "r")
    assert select(results, "r", {"request_rate": "inf"}) == results[1:]
    with pytest.raises(InputError, match="r: no result has request_rate = 7; it holds 1, inf"):
        select(results, "r", {"request_rate": "7"})
    with pytest.raises(InputError, match=r"r: holds several values of model_id \(m, n\); choose one with --where model_id=m"):
        select(results, "r", {})


def test_a_benchmark_is_told_from_other_json():
    assert is_benchmark(json.dumps(small())) and is_benchmark('\ufeff\n{\n  "avg_latency": 1')
    assert not is_benchmark('{"timestamp": 0, "input_length": 10, "output_length": 1}')
    assert not is_benchmark("arrival_s,isl,osl")


def test_the_same_requests_as_a_log_and_as_a_trace(tmp_path: Path):
    path = written(tmp_path / "r.jsonl", small(), indent=1)
    log = read_request_log(path.read_text(), "r")
    np.testing.assert_allclose(log.arrival_s, [0.0, 0.5, 1.0])
    np.testing.assert_allclose(log.tpot_s, [0.04, 0.02, np.nan])
    assert (log.line.tolist(), log.osl.tolist(), dict(log.setup)) == ([3, 1, 2], [3, 2, 1], {"model": "m"})
    trace = read_trace(path)
    np.testing.assert_allclose(trace.arrival_s, log.arrival_s)
    assert (trace.isl.tolist(), trace.osl.tolist()) == (log.isl.tolist(), log.osl.tolist())
    assert trace.model is not None and set(trace.model) == {"m"}
    assert "made relative to the first request sent" in trace.notes[1] and not any("zero kept" in note for note in trace.notes)


def test_failed_requests_are_refused_or_dropped_by_count(tmp_path: Path):
    path = written(tmp_path / "r.json", small(output_lens=[2, 0, 3], ttfts=[0.2, 0.0, 0.25]))
    with pytest.raises(InputError, match=r"row 2, column output_lens: 0 tokens, at least 1 needed.*--invalid-rows drop.*1 in this log"):
        read_request_log(path.read_text(), "r")
    with pytest.raises(InputError, match=r"row 2, column output_lens: 0 tokens.*invalid_rows = \"drop\""):
        read_trace(path)
    log = read_request_log(path.read_text(), "r", invalid_rows="drop")
    assert len(log) == 2 and log.notes == ("1 of 3 rows have fewer than 1 token and were dropped, with the load that they were",)
    assert read_trace(path, invalid_rows="drop").counts["rows_dropped"] == 1


BAD = {
    "cut short": (json.dumps(small())[:-40], "row 1: not a readable JSON file", "cut short?"),
    "cut short in the second": (json.dumps(small()) + "\n{", "row 2: not a readable JSON file", "cut short?"),
    "nested too deep": ('{"input_lens": ' + "[" * 100_000, "row 1: not a readable JSON file", ""),
    "no object": ('{"itls": 1, "input_lens": 1}\n[1]', "row 2: holds JSON that is not one object", ""),
    "mixed with something else": (json.dumps(small()) + '\n{"x": 1}', "row 2: not a result of vLLM's bench latency", "its keys are 'x'"),
    "no details": (small(input_lens=None), "does not hold its requests one by one", "--save-detailed"),
    "no times": (small(start_times=None, request_rate=2.0), "does not hold when its requests were sent (start_times)", "--save-detailed"),
    "failed ones in the way": (small(**{**SGLANG, "output_lens": [2, 0, 3]}), "nor how long those that failed kept others waiting", ""),
    "NaN": (small(ttfts=[0.2, float("nan"), 0.1]), "ttfts must hold the time of each request", "entry [1] is nan"),
    "a negative time": (small(start_times=[1.0, 2.0, -3.0]), "start_times must hold the time of each request", "entry [2] is -3"),
    "a negative gap": (small(itls=[[0.02], [], [-0.03, 0.05]]), "itls must hold a list of times for each request", "none negative"),
    "text": (small(input_lens=[10, "x", 30]), "input_lens must hold the length of each request", "each a number"),
    "truth": (small(output_lens=[2, True, 3]), "output_lens must hold the length of each request", "each a number"),
    "beyond a float": (small(input_lens=[10, 10**400, 30]), "input_lens must hold the length of each request", "each a number"),
    "half a token": (small(output_lens=[2, 1.5, 3]), "output_lens [1] is 1.5, not a whole number of tokens", ""),
    "unequal lists": (small(itls=[[0.02], []]), "input_lens and itls do not go together: 3 and 2 requests", ""),
    "unequal starts": (small(start_times=[1.0]), "input_lens and start_times do not go together: 3 and 1 requests", ""),
    "milliseconds since 1970": (small(start_times=[1735689600000.0] * 3), "start_times: 1735689600000 s is far beyond any date", "seconds"),
    "a duration of nothing": (small(duration=0), "duration is 0; it must be a number above 0", ""),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_result_is_one_sentence(case: str):
    held, *words = BAD[case]
    with pytest.raises(InputError) as error:
        sent_requests(parse_results(held if isinstance(held, str) else json.dumps(held), "r.json"))
    assert str(error.value).startswith("r.json") and "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), error.value


def test_a_log_needs_times_of_its_requests_and_counts_ttft_from_sending():
    with pytest.raises(InputError, match=r"does not hold the times of its requests \(ttfts, itls\)"):
        read_request_log(json.dumps(small(ttfts=None)), "r")
    with pytest.raises(InputError, match="counts from the moment when a request was sent"):
        read_request_log(json.dumps(small()), "r", {}, "admitted")
    with pytest.raises(InputError, match="row 1, column itls: is 0 though the request made 2 tokens"):
        read_request_log(json.dumps(small(itls=[[], [], [0.03, 0.05]])), "r")


def test_at_the_command_line_a_bad_result_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(small(), indent=2)[:-40])
    refused(call(capsys, monkeypatch, "validate", path, "--coefficients", "llama-3.1-8b_tp1_a100"), None, "not a readable JSON file")
    workload = f'workload={{kind="trace", path="{path}"}}'
    refused(call(capsys, monkeypatch, "check", "two-region", "--set", workload), None, "not a readable JSON file")
    written(path, small())
    origin = f'workload={{kind="trace", path="{path}", split="origin", origin_column="who"}}'
    refused(call(capsys, monkeypatch, "check", "two-region", "--set", origin), None, "is a benchmark result, whose requests have no 'who'")
    with pytest.raises(InputError, match=r"workload.time_unit: .* is a benchmark result, whose times are in s; remove it"):
        read_trace(path, time_unit="ms")
