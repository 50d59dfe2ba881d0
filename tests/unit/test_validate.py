"""`jaxserve validate`: the replay of a request log, its error tables, its output, and what it says to bad input."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from jaxserve.analysis.validation import error_table, load_groups
from jaxserve.analysis.validation_energy import shared_out
from jaxserve.errors import InputError
from jaxserve.perf.request_log import parse_log, parse_where
from jaxserve.validate import find_limits, read_log, replay, validate
from tests.benchmark_files import as_csv, served, written
from tests.cli.helpers import call
from tests.oracle.engine import Engine
from tests.oracle.records import Request
from tests.request_logs import COEFFICIENTS, drive, written_log

Floats = NDArray[np.float64]
GIVEN = {"engines": None, "max_num_seqs": 16, "max_num_batched_tokens": 2048, "kv_capacity_tokens": 20_000}
HEADER = "arrival_s,isl,osl,ttft_s,tpot_s"
ROW = "0.0,100,10,0.2,0.02"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log that the engine itself wrote."""
    return written_log(tmp_path_factory.mktemp("log") / "log.csv", COEFFICIENTS, n=120, rate=8.0, limits=GIVEN)


def test_the_engines_own_log_is_replayed_exactly(log: Path):
    result = validate(log, COEFFICIENTS, max_num_seqs=16, max_num_batched_tokens=2048, kv_capacity_tokens=20_000)
    for metric, e in result.errors["all"].items():
        if metric != "load":
            assert e["mape_percent"] < 0.01, metric
            assert abs(e["p99_error_percent"]) < 0.01
    assert {"low load", "middle load", "high load"} < set(result.errors)
    assert sum(result.errors[f"{g} load"]["ttft_s"]["requests"] for g in ("low", "middle", "high")) == 120


def test_slower_decoding_shows_as_that_error(log: Path):
    slow = COEFFICIENTS.model_copy(update={"decode_time": COEFFICIENTS.decode_time.model_copy(update={"alpha0": 0.02})})
    errors = validate(log, slow, max_num_seqs=16, max_num_batched_tokens=2048, kv_capacity_tokens=20_000).errors["all"]
    assert errors["tpot_s"]["mean_error_percent"] > 10


def test_batch_capacity_is_read_off_a_log_whose_requests_wait(tmp_path: Path):
    limits = GIVEN | {"max_num_seqs": 4}
    path = written_log(tmp_path / "log.csv", COEFFICIENTS, n=80, rate=20.0, limits=limits)
    found = find_limits(read_log(path), dict.fromkeys(GIVEN), "prefill_first")
    assert (found.max_num_seqs, found.origin["max_num_seqs"]) == (4, "log")
    assert found.origin["kv_capacity_tokens"] == "default"


def test_logged_engines_are_replayed_one_by_one(tmp_path: Path):
    path = written_log(tmp_path / "log.csv", COEFFICIENTS, n=60, rate=8.0, limits=GIVEN, engines=2)
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "kv_capacity_tokens": 20_000}
    logged = validate(path, COEFFICIENTS, **limits)
    in_turn = validate(path, COEFFICIENTS, engines=2, **limits)
    one = validate(path, COEFFICIENTS, engines=1, **limits)
    assert logged.limits["engines"] == 2
    assert logged.errors["all"]["e2e_s"]["mape_percent"] < 0.01
    np.testing.assert_allclose(logged.replay.finish_s, in_turn.replay.finish_s, atol=1e-5)
    assert one.errors["all"]["e2e_s"]["mape_percent"] > 1


LIMITS: dict[str, int] = {k: v for k, v in GIVEN.items() if v is not None}


def with_energy(log: Path, joules: Sequence[float] | Floats, path: Path) -> Path:
    """The log with a column energy_j."""
    head, *lines = log.read_text().splitlines()
    path.write_text("\n".join([f"{head},energy_j", *(f"{line},{j!r}" for line, j in zip(lines, map(float, joules), strict=True))]))
    return path


def exact_shares(path: Path, limits: Mapping[str, int]) -> Floats:
    """Each request's joules [R], step by step from the reference engine: prefill by tokens, decode equally."""
    read, c = read_log(path), COEFFICIENTS
    t_dec = {**c.decode_time.model_dump(exclude={"form", "alpha1_below", "batch_knee"})}
    power = {"tp": c.setup.tp, "idle_w_per_gpu": c.power.idle_w_per_gpu, "max_w_per_gpu": c.power.max_w_per_gpu}
    energies = power | {"e_pre": c.prefill_energy.model_dump(), "e_dec": c.decode_energy.model_dump(exclude_none=True)}
    times = {"t_pre": c.prefill_time.model_dump(), "t_dec": t_dec}
    world = SimpleNamespace(batching="prefill_first", token_count="sum", **times, **energies, **limits)
    engine, out = Engine(world), np.zeros(len(read))  # type: ignore[arg-type]
    drive(engine, [Request(i, 0, a, int(n), int(o), dc_arrival_s=a) for i, (a, n, o) in enumerate(zip(read.arrival_s, read.isl, read.osl))])
    for step in engine.steps:
        weight = read.isl[list(step.requests)] if step.kind == "prefill" else np.ones(len(step.requests))
        np.add.at(out, list(step.requests), step.energy_j * weight / weight.sum())
    return out


def test_energy_is_compared_in_total_and_by_load(tmp_path: Path, log: Path):
    """Of the engine's own log, each request's energy known step by step; then without what a step costs however few share it."""
    exact = exact_shares(log, LIMITS)
    found = replay(read_log(log), COEFFICIENTS, find_limits(read_log(log), GIVEN, "prefill_first"))
    assert found.request_j.sum() == pytest.approx(exact.sum(), rel=1e-6)
    assert np.median(np.abs(found.request_j / exact - 1)) < 0.03
    path = with_energy(log, exact * (1 + found.idle_j / exact.sum()), tmp_path / "log.csv")
    energy = validate(path, COEFFICIENTS, **LIMITS).energy
    assert energy is not None and set(energy) == {"all", "low load", "middle load", "high load"}
    assert energy["all"]["error_percent"] == pytest.approx(0.0, abs=1e-3)
    assert sum(energy[f"{g} load"]["predicted_j"] for g in ("low", "middle", "high")) == pytest.approx(energy["all"]["predicted_j"])
    assert all(abs(e["error_percent"]) < 1.0 for e in energy.values())
    lean = COEFFICIENTS.model_copy(update={"decode_energy": COEFFICIENTS.decode_energy.model_copy(update={"e_dec0": 0.5})})
    off = validate(path, lean, **LIMITS).energy
    assert off is not None and off["low load"]["error_percent"] < off["high load"]["error_percent"] - 2 < -2


def test_energy_by_load_is_in_the_report(tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    path = with_energy(log, np.full(120, 50.0), tmp_path / "log.csv")
    limits = ["--max-num-seqs", "16", "--max-num-batched-tokens", "2048", "--kv-capacity-tokens", "20000"]
    options = ["--coefficients", "llama-3.1-8b_tp1_a100", *limits, "--count-from", "5", "--out", tmp_path / "out"]
    done = call(capsys, monkeypatch, "validate", path, *options)
    assert done.code == 0, done.err
    page = (tmp_path / "out" / "report.md").read_text()
    assert page.count("energy, total of the load") == 3
    assert "energy by load: a step's energy is shared among its requests" in page
    told = json.loads((tmp_path / "out" / "validation.json").read_text())
    # In total and by load over the counted requests.
    by_load = [told["energy"][f"{g} load"] for g in ("low", "middle", "high")]
    assert told["energy"]["all"]["requests"] == sum(part["requests"] for part in by_load) < 120
    assert told["energy"]["all"]["measured_j"] == pytest.approx(sum(part["measured_j"] for part in by_load))
    assert "predicted_step_energy_j" in (tmp_path / "out" / "requests.csv").read_text().splitlines()[0]


def test_energy_goes_to_those_present_by_weight_and_time():
    edges, joules = np.array([0.0, 1.0, 2.0]), np.array([10.0, 6.0])
    begin, end, weight = np.array([0.0, 0.5, 1.0]), np.array([1.0, 1.5, 2.0]), np.array([1.0, 2.0, 1.0])
    # First second: 1 * 1 s against 2 * 0.5 s; second one: 2 * 0.5 s against 1 * 1 s.
    np.testing.assert_allclose(shared_out(edges, joules, begin, end, weight), [5.0, 5.0 + 3.0, 3.0])


def test_idle_and_step_energy_of_one_request(tmp_path: Path):
    """Two requests a minute apart, by hand: the engine idles from the end of the first to the arrival of the second."""
    lines = [HEADER, "0,100,1,0.2,", "60,100,1,0.2,"]
    read = parse_log(lines, "two")
    found = replay(read, COEFFICIENTS, find_limits(read, GIVEN, "prefill_first"))
    one = float(COEFFICIENTS.prefill_energy_model()(100.0, 100.0**2))
    busy = float(COEFFICIENTS.prefill_time_model()(100.0, 1.0, 100.0**2))
    np.testing.assert_allclose(found.request_j, [one, one])
    assert found.idle_j == pytest.approx((60 - busy) * COEFFICIENTS.power.idle_w_per_gpu)


def test_errors_of_known_numbers():
    e = error_table(np.array([1.0, 2.0]), np.array([1.1, 1.8]))
    assert e["mape_percent"] == pytest.approx(10.0)
    assert e["mean_error_percent"] == pytest.approx(100 * (2.9 / 3.0 - 1))


def test_equal_loads_stay_together():
    groups = load_groups(np.array([1, 1, 1, 1, 5, 9]))
    assert sorted(sum(g.astype(int) for g in groups.values())) == [1] * 6
    assert groups["low"].sum() == 4
    assert set(load_groups(np.ones(5, int))) == {"low"}


def test_names_units_and_waits_are_understood():
    text = ["arrival_time_s,prompt_tokens,output_toks,ttft_ms,mean_tpot_ms,queue_wait_s,note", "5,10,3,200,20,0.1,x", "4,10,1,300,,0,y"]
    read = parse_log(text, "log", {}, "admitted")
    assert read.arrival_s.tolist() == [0.0, 1.0]
    assert read.ttft_s.tolist() == pytest.approx([0.3, 0.3])
    assert read.finish_s.tolist() == pytest.approx([0.3, 1.34])
    assert read.in_system().tolist() == [1, 1]
    assert read.unused == ("note",)


@pytest.mark.parametrize("missing", ["", "nan", "NaN", "0"])
def test_the_tpot_of_one_token_may_be_missing_in_any_way(missing: str):
    read = parse_log([HEADER, "0,500,20,0.03,0.014", f"1,500,1,0.03,{missing}"], "log")
    np.testing.assert_array_equal(read.tpot_s, [0.014, np.nan])
    np.testing.assert_allclose(read.finish_s, [0.03 + 19 * 0.014, 1.03])


def test_failed_requests_are_dropped_when_asked_and_counted():
    """Their other cells are not read: a request that failed has no TTFT."""
    lines = [HEADER, "3,500,20,0.03,0.014", "1,500,0,nan,", "2,0,5,,x"]
    read = parse_log(lines, "log", invalid_rows="drop")
    assert (read.arrival_s.tolist(), read.line.tolist()) == ([0.0], [2])
    assert read.notes == ("2 of 3 rows have fewer than 1 token and were dropped, with the load that they were",)
    with pytest.raises(InputError, match=r"row 3, column osl: 0 tokens.*2 in this log"):
        parse_log(lines, "log")
    with pytest.raises(InputError, match="leaves no row, all 2 have too few tokens"):
        parse_log([HEADER, *lines[2:]], "log", invalid_rows="drop")


def test_times_since_1970_are_seconds_and_stamps_in_ms_are_named_so():
    in_ms = [HEADER.replace("arrival_s", "arrival_ms"), "1735689600500,10,5,0.1,0.1", "1735689600000,10,5,0.1,0.1"]
    np.testing.assert_allclose(parse_log(in_ms, "log").arrival_s, [0.0, 0.5])
    np.testing.assert_allclose(parse_log([HEADER, "1735689600,10,5,0.1,0.1", "1735689602,10,5,0.1,0.1"], "log").arrival_s, [0.0, 2.0])


def test_a_benchmark_result_is_replayed_as_the_same_requests_in_csv(tmp_path: Path):
    result = served(COEFFICIENTS, n=80, rate=8.0, limits=LIMITS)
    (tmp_path / "log.csv").write_text(as_csv(result))
    results = [validate(path, COEFFICIENTS, **LIMITS) for path in (written(tmp_path / "r.json", result, indent=1), tmp_path / "log.csv")]
    assert results[0].errors["all"]["e2e_s"]["mape_percent"] < 0.01  # a server by the contract made it
    for ours, csv in zip(*(r.series.values() for r in results), strict=True):
        np.testing.assert_allclose(ours, csv, rtol=0, atol=1e-9)
    assert not any("model" in note for note in results[0].notes)  # meta-llama/m is the coefficients' m


def test_the_command_prints_writes_and_names_another_gpu(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    lines = log.read_text().splitlines()
    path = tmp_path / "log.csv"
    path.write_text("\n".join([f"{lines[0]},gpu", *(f"{line},{'X' if i % 2 else 'L40'}" for i, line in enumerate(lines[1:]))]))
    options = ["--coefficients", "llama-3.1-8b_tp1_a100", "--max-num-seqs", "16"]
    assert "--where gpu=L40" in call(capsys, monkeypatch, "validate", path, *options).err
    done = call(capsys, monkeypatch, "validate", path, *options, "--where", "gpu=X", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert "differs from the log's (X)" in " ".join(done.out.split())
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"report.md", "validation.json", "requests.csv", "predicted_vs_measured.png"}
    assert "| all" in (tmp_path / "out" / "report.md").read_text()
    told = json.loads(call(capsys, monkeypatch, "validate", path, *options, "--where", "gpu=X", "--json", "--count-from", "2").out)
    assert told["requests"] == 60 > told["counted"]
    assert told["limits"]["max_num_seqs"] == 16


BAD_LOGS = {
    "no rows": (HEADER, "holds no request"),
    "a missing column": ("arrival_s,isl,osl,tpot_s\n0,1,1,0.1", "row 1: there is no column ttft_s"),
    "a column twice": (f"{HEADER},isl\n{ROW},3", "row 1: the column isl appears more than once"),
    "two names of one quantity": (f"{HEADER},ttft_ms\n{ROW},3", "row 1: the columns ttft_s and ttft_ms hold the same quantity"),
    "text": (f"{HEADER}\n{ROW}\n0,ten,1,0.1,0.1", "row 3, column isl: 'ten' is not a number"),
    "an empty cell": (f"{HEADER}\n0,10,5,,0.1", "row 2, column ttft_s: is empty"),
    "NaN": (f"{HEADER}\nnan,10,5,0.1,0.1", "row 2, column arrival_s: nan is not a finite number"),
    "a short row": (f"{HEADER}\n{ROW}\n0,10", "row 3: has 2 field(s) where the header has 5"),
    "half a token": (f"{HEADER}\n0,10.5,5,0.1,0.1", "row 2, column isl: 10.5 is not a whole number"),
    "no output": (f"{HEADER}\n0,10,0,,", "row 2, column osl: 0 tokens, at least 1 needed; correct the row or say --invalid-rows drop"),
    "a negative time": (f"{HEADER}\n0,10,5,-0.1,0.1", "row 2, column ttft_s: -0.1 is below 0 s"),
    "no TTFT": (f"{HEADER}\n0,10,5,0,0.1", "row 2, column ttft_s: 0 s cannot be"),
    "no TPOT": (f"{HEADER}\n0,10,5,0.1,", "row 2, column tpot_s: is missing though the request made 5 tokens"),
    "a TPOT of nan": (f"{HEADER}\n0,10,5,0.1,nan", "row 2, column tpot_s: is missing though the request made 5 tokens"),
    "an infinite TPOT": (f"{HEADER}\n0,10,1,0.1,inf", "row 2, column tpot_s: inf is not a finite number"),
    "milliseconds": (f"{HEADER}\n0,10,5,100,20", "let the column's name end in _ms"),
    "nanoseconds": (f"{HEADER}\n{ROW}\n1.7e18,10,5,0.1,0.1", "column arrival_s: 1.7e+18 s is far beyond any date"),
    "milliseconds since 1970": (
        f"{HEADER}\n1735689600000,10,5,0.1,0.1",
        "1735689600000 s is far beyond any date, so these are milliseconds",
    ),
    "over a hundred days": (f"{HEADER}\n{ROW}\n2e7,10,5,0.1,0.1", "the log spans 2e+07 s; give arrivals in seconds"),
    "JSON that is no benchmark": ('{\n "arrival_s": 0\n}', "row 1: not a result of vLLM's bench latency"),
    "a wait beyond the TTFT": (f"{HEADER},queue_wait_s\n{ROW},0.5", "say --ttft-from admitted"),
    "several GPUs": (f"{HEADER},gpu\n{ROW},A\n{ROW},B", "choose one with --where gpu=A"),
    "more than the cache": (f"{HEADER}\n0,30000,5,0.1,0.1", "row 2: needs 30005 tokens of KV cache"),
    "binary data": ("\0\1\2", "holds binary data"),
}


@pytest.mark.parametrize("case", BAD_LOGS)
def test_a_bad_log_is_one_sentence(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    text, sentence = BAD_LOGS[case]
    path = tmp_path / "log.csv"
    path.write_text(text)
    out = tmp_path / "out"
    options = ["--coefficients", "llama-3.1-8b_tp1_a100", "--kv-capacity-tokens", "20000", "--out", out]
    done = call(capsys, monkeypatch, "validate", path, *options)
    assert done.code == 2
    assert sentence in done.err
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err
    assert path.name in done.err
    assert not out.exists()


BAD_OPTIONS = {
    "--where gpu": "must be COLUMN=VALUE",
    "--where gpu=X": "there is no such column",
    "--where isl=7": "no row has isl = 7; the column holds 100",
    "--batching both": "must be prefill_first or study",
    "--invalid-rows skip": "--invalid-rows 'skip': must be error or drop",
    "--ttft-from noon": "must be one of arrival, queued, admitted",
    "--ttft-from admitted": "needs the column queue_wait_s",
    "--engines 0": "--engines 0: must be from 1 to",
    "--max-num-seqs -3": "--max-num-seqs -3: must be from 1 to",
    "--kv-capacity-tokens 50": "raise --kv-capacity-tokens",
    "--count-from 9": "arrives at 0 s",
    "--count-from nan": "must be at least 0 s",
    "--coefficients none": "there is no such coefficients file",
}


@pytest.mark.parametrize("option", BAD_OPTIONS)
def test_a_bad_option_is_one_sentence(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "log.csv"
    path.write_text(f"{HEADER}\n{ROW}")
    done = call(capsys, monkeypatch, "validate", path, "--coefficients", "llama-3.1-8b_tp1_a100", *option.split(" "))
    assert done.code == 2
    assert BAD_OPTIONS[option] in done.err
    assert done.err.count("\n") == 1


def test_a_missing_log_is_one_sentence(tmp_path: Path):
    with pytest.raises(InputError, match="no such file"):
        validate(tmp_path / "none.csv", COEFFICIENTS)
    assert parse_where(["gpu = RTX 4090"]) == {"gpu": "RTX 4090"}
