"""The workload section: what may be written, and the requests it means."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from jaxserve.errors import InputError
from jaxserve.scenario import workload
from jaxserve.scenario.workload import Requests, WorkloadSpec, generate_requests

DATA = Path(os.environ.get("JAXSERVE_SHARED_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
real_data = pytest.mark.skipif(not (DATA / "traces").is_dir(), reason=f"no real traces at {DATA} (set JAXSERVE_SHARED_DATA)")

SPEC = TypeAdapter(WorkloadSpec)
FIXED = {"isl": 3, "osl": 4}


def generate(
    base_dir: Path = Path(), /, *, horizon_s: float = 100.0, seed: int = 7, names: str = "ab", weights: Any = None, **section: Any
):
    section.setdefault("kind", "poisson")
    if section["kind"] == "poisson":
        section.setdefault("lengths", FIXED)
    return generate_requests(
        SPEC.validate_python(section),
        horizon_s=horizon_s,
        seed=seed,
        scheduler_names=list(names),
        scheduler_weights=list(weights or [1.0] * len(names)),
        base_dir=base_dir,
    )


def write_trace(tmp_path: Path, times: list[float], origins: str | None = None) -> dict[str, Any]:
    """A trace with isl = 1, 2, 3, ... so that rows can be told apart."""
    rows = [f"{t!r},{i + 1},1,{origins[i] if origins else 'a'}" for i, t in enumerate(times)]
    (tmp_path / "t.csv").write_text("\n".join(["arrival_s,isl,osl,from", *rows, ""]))
    return {"kind": "trace", "path": "t.csv"}


def same(one: Requests, two: Requests) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(two, name)) for name in ("arrival_s", "isl", "osl", "scheduler"))


# --- the section


BAD_SECTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no kind": ({}, "kind"),
    "unknown kind": ({"kind": "uniform"}, "poisson"),
    "no rate": ({"kind": "poisson", "lengths": FIXED}, "exactly one of rate_req_per_s and rates"),
    "both rates": (
        {"kind": "poisson", "rate_req_per_s": 1, "rates": [{"start_s": 0, "rate_req_per_s": 1}], "lengths": FIXED},
        "exactly one of rate_req_per_s and rates",
    ),
    "no lengths": ({"kind": "poisson", "rate_req_per_s": 1}, "lengths"),
    "misspelt": ({"kind": "poisson", "rate_req_per_sec": 1, "lengths": FIXED}, "rate_req_per_sec"),
    "zero rate": ({"kind": "poisson", "rate_req_per_s": 0, "lengths": FIXED}, "greater than 0"),
    "negative rate": ({"kind": "poisson", "rate_req_per_s": -1.0, "lengths": FIXED}, "greater than 0"),
    "NaN rate": ({"kind": "poisson", "rate_req_per_s": float("nan"), "lengths": FIXED}, "finite"),
    "infinite rate": ({"kind": "poisson", "rate_req_per_s": float("inf"), "lengths": FIXED}, "finite"),
    "text rate": ({"kind": "poisson", "rate_req_per_s": "5", "lengths": FIXED}, "valid number"),
    "empty rates": ({"kind": "poisson", "rates": [], "lengths": FIXED}, "start_s = 0"),
    "rates begin late": ({"kind": "poisson", "rates": [{"start_s": 1, "rate_req_per_s": 1}], "lengths": FIXED}, "start_s = 0"),
    "rates out of order": (
        {"kind": "poisson", "rates": [{"start_s": s, "rate_req_per_s": 1} for s in (0, 5, 5)], "lengths": FIXED},
        "rising order",
    ),
    "negative piece": ({"kind": "poisson", "rates": [{"start_s": 0, "rate_req_per_s": -1}], "lengths": FIXED}, "greater than or equal"),
    "poisson with path": (
        {"kind": "poisson", "rate_req_per_s": 1, "lengths": FIXED, "path": "x"},
        'path: has a meaning only for kind = "trace"',
    ),
    "poisson with a time unit": ({"kind": "poisson", "rate_req_per_s": 1, "lengths": FIXED, "time_unit": "ms"}, "time_unit: has a meaning"),
    "poisson with loop": ({"kind": "poisson", "rate_req_per_s": 1, "lengths": FIXED, "loop": True}, "loop: has a meaning only"),
    "poisson by origin": ({"kind": "poisson", "rate_req_per_s": 1, "lengths": FIXED, "split": "origin"}, "needs a trace"),
    "poisson origin column": ({"kind": "poisson", "rate_req_per_s": 1, "lengths": FIXED, "origin_column": "x"}, "no origin"),
    "trace with rate": ({"kind": "trace", "path": "x", "rate_req_per_s": 5}, "rate_req_per_s: a trace brings its own rate"),
    "trace with rates": ({"kind": "trace", "path": "x", "rates": [{"start_s": 0, "rate_req_per_s": 1}]}, "a trace brings its own rate"),
    "trace with lengths": ({"kind": "trace", "path": "x", "lengths": FIXED}, "lengths: a trace brings its own lengths"),
    "trace without path": ({"kind": "trace"}, "path"),
    "empty path": ({"kind": "trace", "path": ""}, "path"),
    "package path": ({"kind": "trace", "path": "package:x"}, "reserved"),
    "scale without method": ({"kind": "trace", "path": "x", "rate_scale": 2.0}, "needs rate_method"),
    "thin above one": ({"kind": "trace", "path": "x", "rate_scale": 2.0, "rate_method": "thin"}, "cannot raise a rate"),
    "zero scale": ({"kind": "trace", "path": "x", "rate_scale": 0.0, "rate_method": "thin"}, "greater than 0"),
    "NaN scale": ({"kind": "trace", "path": "x", "rate_scale": float("nan"), "rate_method": "thin"}, "finite"),
    "unknown method": ({"kind": "trace", "path": "x", "rate_scale": 2.0, "rate_method": "stretch"}, "compress"),
    "negative slice": ({"kind": "trace", "path": "x", "slice_start_s": -1.0}, "greater than or equal"),
    "slice backwards": ({"kind": "trace", "path": "x", "slice_start_s": 5.0, "slice_end_s": 5.0}, "after slice_start_s"),
    "origin without column": ({"kind": "trace", "path": "x", "split": "origin"}, "go together"),
    "column without origin": ({"kind": "trace", "path": "x", "origin_column": "from"}, "go together"),
    "map without column": ({"kind": "trace", "path": "x", "origin_map": {"x": "a"}}, "origin_map needs"),
    "unknown distribution": ({"kind": "poisson", "rate_req_per_s": 1, "lengths": {"distribution": "short"}}, "openorca"),
    "isl alone": ({"kind": "poisson", "rate_req_per_s": 1, "lengths": {"isl": 5}}, "both isl and osl"),
    "two lengths": ({"kind": "poisson", "rate_req_per_s": 1, "lengths": {"distribution": "long", **FIXED}}, "exactly one of distribution"),
    "unknown time unit": ({"kind": "trace", "path": "x", "time_unit": "min"}, "'ms'"),
    "no length": ({"kind": "poisson", "rate_req_per_s": 1, "lengths": {}}, "exactly one of distribution"),
    "zero isl": ({"kind": "poisson", "rate_req_per_s": 1, "lengths": {"isl": 0, "osl": 1}}, "greater than or equal to 1"),
    "fraction isl": ({"kind": "poisson", "rate_req_per_s": 1, "lengths": {"isl": 1.5, "osl": 1}}, "integer"),
    "true isl": ({"kind": "poisson", "rate_req_per_s": 1, "lengths": {"isl": True, "osl": 1}}, "integer"),
    "isl beyond int32": ({"kind": "poisson", "rate_req_per_s": 1, "lengths": {"isl": 2**31, "osl": 1}}, "less than or equal"),
}


@pytest.mark.parametrize("case", BAD_SECTIONS)
def test_bad_section(case: str) -> None:
    section, pattern = BAD_SECTIONS[case]
    with pytest.raises(ValidationError) as caught:
        SPEC.validate_python(section)
    assert pattern in str(caught.value)


# --- Poisson


def test_poisson_rate_and_shape() -> None:
    requests = generate(rate_req_per_s=200, horizon_s=500.0)
    expected = 200 * 500
    assert abs(len(requests.arrival_s) - expected) < 4 * expected**0.5  # four standard deviations of a Poisson count
    gaps = np.diff(requests.arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.02)  # exponential gaps
    assert requests.arrival_s.dtype == np.float64 and requests.isl.dtype == requests.osl.dtype == np.int64
    assert requests.scheduler.dtype == np.int32 and requests.counts == {"requests": len(requests.arrival_s)}
    assert set(requests.isl) == {3} and set(requests.osl) == {4}


def test_piecewise_rates() -> None:
    pieces = [(0, 50), (100, 0), (200, 10), (900, 5)]
    requests = generate(rates=[{"start_s": s, "rate_req_per_s": r} for s, r in pieces], horizon_s=400.0)
    counts, _ = np.histogram(requests.arrival_s, [0, 100, 200, 400])
    assert counts[1] == 0 and abs(counts[0] - 5000) < 4 * 5000**0.5 and abs(counts[2] - 2000) < 4 * 2000**0.5
    assert any("1 pieces" in note and "no effect" in note for note in requests.notes)
    ends_in_silence = generate(rates=[{"start_s": 0, "rate_req_per_s": 5}, {"start_s": 10, "rate_req_per_s": 0}])
    assert ends_in_silence.arrival_s[-1] < 10
    one = generate(rates=[{"start_s": 0, "rate_req_per_s": 5}])
    assert same(one, generate(rate_req_per_s=5))


def test_streams_are_separate() -> None:
    base = generate(rate_req_per_s=20, lengths={"distribution": "openorca"}, split="weight")
    assert same(base, generate(rate_req_per_s=20, lengths={"distribution": "openorca"}, split="weight"))
    other_lengths = generate(rate_req_per_s=20, lengths={"distribution": "mixed"}, split="weight")
    assert np.array_equal(base.arrival_s, other_lengths.arrival_s) and np.array_equal(base.scheduler, other_lengths.scheduler)
    assert not np.array_equal(base.isl, other_lengths.isl)
    other_split = generate(rate_req_per_s=20, lengths={"distribution": "openorca"}, split="round_robin")
    assert np.array_equal(base.arrival_s, other_split.arrival_s) and np.array_equal(base.isl, other_split.isl)
    assert other_split.scheduler.tolist() == [i % 2 for i in range(len(base.isl))]
    assert not np.array_equal(base.arrival_s[:50], generate(rate_req_per_s=20, seed=8).arrival_s[:50])


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    rates=st.lists(st.tuples(st.floats(0.1, 50), st.one_of(st.just(0.0), st.floats(0.01, 50))), min_size=1, max_size=5),
    horizon_s=st.floats(1, 200),
    seed=st.integers(0, 2**63),
)
def test_a_longer_horizon_only_adds_requests(rates: list[tuple[float, float]], horizon_s: float, seed: int) -> None:
    starts = np.concatenate([[0.0], np.cumsum([width for width, _ in rates])[:-1]])
    section = {
        "rates": [{"start_s": float(s), "rate_req_per_s": r} for s, (_, r) in zip(starts, [*rates[:-1], (1.0, 7.0)])],
        "lengths": {"distribution": "mixed"},
        "split": "weight",
    }
    long = generate(**section, horizon_s=horizon_s + 200, seed=seed)
    assert (np.diff(long.arrival_s) >= 0).all() and long.arrival_s[0] >= 0 and long.arrival_s[-1] < horizon_s + 200
    kept = int(np.searchsorted(long.arrival_s, horizon_s))
    if not kept:
        return
    short = generate(**section, horizon_s=horizon_s, seed=seed)
    assert len(short.arrival_s) == kept
    for name in ("arrival_s", "isl", "osl", "scheduler"):
        assert np.array_equal(getattr(short, name), getattr(long, name)[:kept])


def test_poisson_limits() -> None:
    with pytest.raises(InputError, match=r"workload.rate_req_per_s: no request arrives within horizon_s = 1"):
        generate(rate_req_per_s=1e-9, horizon_s=1.0)
    with pytest.raises(InputError, match=r"workload.rates: no request"):
        generate(rates=[{"start_s": 0, "rate_req_per_s": 0}])
    with pytest.raises(InputError, match=r"lower workload.rate_req_per_s or horizon_s"):
        generate(rate_req_per_s=1e12)
    for horizon in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="horizon_s"):
            generate(rate_req_per_s=1, horizon_s=horizon)
    with pytest.raises(InputError, match="seed"):
        generate(rate_req_per_s=1, seed=-1)
    with pytest.raises(InputError, match="schedulers"):
        generate(rate_req_per_s=1, names="")


# --- traces


def test_slice_is_half_open_and_rebased(tmp_path: Path) -> None:
    section = write_trace(tmp_path, [0.0, 1.0, 2.0, 2.0, 3.0])
    requests = generate(tmp_path, **section, slice_start_s=1.0, slice_end_s=3.0)
    assert requests.arrival_s.tolist() == [0.0, 1.0, 1.0] and requests.isl.tolist() == [2, 3, 4]
    assert requests.counts["rows_outside_slice"] == 2 and requests.counts["requests"] == 3
    whole = generate(tmp_path, **section)
    assert whole.arrival_s.tolist() == [0.0, 1.0, 2.0, 2.0, 3.0] and any("loop = true" in note for note in whole.notes)
    assert generate(tmp_path, **section, horizon_s=2.0).isl.tolist() == [1, 2]  # the horizon is open too


def test_compress_and_stretch(tmp_path: Path) -> None:
    section = write_trace(tmp_path, [0.0, 1.0, 4.0])
    fast = generate(tmp_path, **section, rate_scale=4.0, rate_method="compress")
    assert fast.arrival_s.tolist() == [0.0, 0.25, 1.0] and any("compressed in time by 4" in note for note in fast.notes)
    slow = generate(tmp_path, **section, rate_scale=0.5, rate_method="compress", horizon_s=8.0)
    assert slow.arrival_s.tolist() == [0.0, 2.0]


def test_thinning_keeps_the_share_and_nests(tmp_path: Path) -> None:
    section = write_trace(tmp_path, [i * 0.01 for i in range(5000)])
    half = generate(tmp_path, **section, rate_scale=0.5, rate_method="thin")
    fifth = generate(tmp_path, **section, rate_scale=0.2, rate_method="thin")
    assert len(half.isl) == pytest.approx(2500, abs=4 * 1250**0.5) and len(fifth.isl) == pytest.approx(1000, abs=4 * 800**0.5)
    assert set(fifth.isl.tolist()) < set(half.isl.tolist())  # common random numbers across a sweep of rate_scale
    assert half.counts["requests_thinned"] == 5000 - len(half.isl) and any("kept with probability 0.5" in note for note in half.notes)
    assert generate(tmp_path, **section, rate_scale=1.0, rate_method="thin").isl.tolist() == list(range(1, 5001))


def test_loop(tmp_path: Path) -> None:
    section = write_trace(tmp_path, [0.0, 1.0, 2.0])
    by_gap = generate(tmp_path, **section, loop=True, horizon_s=7.0)  # period 2 + mean gap 1
    assert by_gap.arrival_s.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0] and by_gap.isl.tolist() == [1, 2, 3, 1, 2, 3, 1]
    by_slice = generate(tmp_path, **section, loop=True, horizon_s=12.0, slice_start_s=1.0, slice_end_s=6.0)  # period 5
    assert by_slice.arrival_s.tolist() == [0.0, 1.0, 5.0, 6.0, 10.0, 11.0]
    compressed = generate(tmp_path, **section, loop=True, horizon_s=3.0, rate_scale=2.0, rate_method="compress")
    assert compressed.arrival_s.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    once = generate(tmp_path, **section, loop=True, horizon_s=2.5)
    assert once.arrival_s.tolist() == [0.0, 1.0, 2.0]
    thinned = generate(tmp_path, **section, loop=True, horizon_s=3000.0, rate_scale=0.5, rate_method="thin")
    assert len(set(np.bincount(thinned.isl)[1:])) > 1  # each repetition is thinned anew


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    times=st.lists(st.floats(0, 50), min_size=1, max_size=12),
    scale=st.floats(0.1, 10),
    start=st.floats(0, 10),
    length=st.one_of(st.none(), st.floats(0.5, 60)),
    loop=st.booleans(),
)
def test_any_slice_scale_and_loop_is_sorted_and_inside(
    tmp_path_factory: pytest.TempPathFactory, times: list[float], scale: float, start: float, length: float | None, loop: bool
) -> None:
    tmp_path = tmp_path_factory.mktemp("t")
    section = write_trace(tmp_path, times) | {"rate_scale": scale, "rate_method": "compress", "slice_start_s": start, "loop": loop}
    if length is not None:
        section["slice_end_s"] = start + length
    try:
        requests = generate(tmp_path, **section, horizon_s=20.0)
    except InputError as error:
        assert str(error).startswith(("workload.slice", "workload.loop", "horizon_s", "workload: about"))
        return
    assert (np.diff(requests.arrival_s) >= 0).all() and requests.arrival_s[0] >= 0 and requests.arrival_s[-1] < 20.0
    copies = np.bincount(requests.isl, minlength=len(times) + 1)[1:]
    inside = np.array([start <= t < start + (length or np.inf) for t in times])
    assert (copies[~inside] == 0).all() and copies[inside].max() - copies[inside].min() <= (
        1 if loop and len(requests.isl) else copies.max()
    )


def test_nothing_left_names_the_option(tmp_path: Path) -> None:
    section = write_trace(tmp_path, [5.0, 6.0])
    with pytest.raises(InputError, match=r"workload.slice_start_s: no request .* spans 5 to 6 s"):
        generate(tmp_path, **section, slice_start_s=7.0)
    with pytest.raises(InputError, match=r"workload.slice_end_s: no request"):
        generate(tmp_path, **section, slice_end_s=5.0)
    with pytest.raises(InputError, match=r"horizon_s: the first request .* arrives at 5 s"):
        generate(tmp_path, **section, horizon_s=5.0)
    with pytest.raises(InputError, match=r"workload.rate_scale: thinning by 1e-12 leaves none"):
        generate(tmp_path, **section, rate_scale=1e-12, rate_method="thin")
    with pytest.raises(InputError, match="lower horizon_s or lengthen the slice"):
        generate(tmp_path, **section, loop=True, slice_end_s=6.5, horizon_s=1e10)
    at_zero = write_trace(tmp_path, [0.0, 0.0])
    with pytest.raises(InputError, match=r"workload.loop: .* set workload.slice_end_s"):
        generate(tmp_path, **at_zero, loop=True)
    assert len(generate(tmp_path, **at_zero, loop=True, slice_end_s=10.0).isl) == 20


def test_requests_beyond_the_horizon_are_counted(tmp_path: Path) -> None:
    section = write_trace(tmp_path, [600.0 * i for i in range(500)])  # milliseconds, as arrival_s
    one = generate(tmp_path, **section, horizon_s=300.0)
    (told,) = [note for note in one.notes if "499 of 500 requests arrive at or after horizon_s = 300 s" in note]
    assert told.startswith("warning: ") and "the last at 299400 s; are the file's times in s" in told and "workload.time_unit" in told
    right = generate(tmp_path, **section, horizon_s=300.0, time_unit="ms")
    assert right.arrival_s.tolist() == pytest.approx([0.6 * i for i in range(500)], rel=1e-15)
    assert not any("warning" in note or "left out" in note for note in right.notes)
    (few,) = [note for note in generate(tmp_path, **section, horizon_s=299_000.0).notes if "left out" in note]
    assert few.startswith("1 of 500 requests arrive at or after")
    assert not any("left out" in note for note in generate(tmp_path, **section, horizon_s=3e5).notes)


@pytest.mark.parametrize("loop", [False, True])
def test_a_trace_that_is_over_at_once_is_told(tmp_path: Path, loop: bool) -> None:
    section = write_trace(tmp_path, [0.0, 0.05, 0.09]) | {"loop": loop}
    told = "warning: all 3 requests arrive within 0.09 s, the horizon is 10 s; are the file's times in s"
    assert any(note.startswith(told) for note in generate(tmp_path, **section, horizon_s=10.0).notes)
    assert not any("warning" in note for note in generate(tmp_path, **section, horizon_s=9.0).notes)
    burst = write_trace(tmp_path, [0.0, 0.0])  # in any unit
    assert not any("warning" in note for note in generate(tmp_path, **burst).notes)


def test_the_instant_of_time_0_follows_the_slice(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 16:00:00Z,1,1\n2024-05-10 16:00:09Z,1,1\n")
    noon = datetime(2024, 5, 10, 16, tzinfo=UTC)
    assert generate(tmp_path, kind="trace", path="t.csv").zero == noon
    assert generate(tmp_path, kind="trace", path="t.csv", slice_start_s=5.0).zero == noon + timedelta(seconds=5)
    relative = write_trace(tmp_path, [0.0, 1.0])
    assert generate(tmp_path, **relative).zero is None and generate(tmp_path, **relative, time="absolute").zero is None
    assert generate(rate_req_per_s=1).zero is None


def test_path_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        generate(tmp_path, kind="trace", path="nothing.csv")
    with pytest.raises(InputError, match=r"workload.path: .*NUL"):
        generate(tmp_path, kind="trace", path="a\0b")
    with pytest.raises(InputError, match="is a directory"):
        generate(tmp_path, kind="trace", path=".")


# --- the split


def test_split_by_weight(tmp_path: Path) -> None:
    requests = generate(rate_req_per_s=100, split="weight", names="abc", weights=[1.0, 0.0, 3.0])
    share = np.bincount(requests.scheduler, minlength=3) / len(requests.scheduler)
    assert share[1] == 0 and share[2] == pytest.approx(0.75, abs=0.02)
    for weights in ([1.0, -1.0, 1.0], [0.0, 0.0, 0.0], [1.0, float("nan"), 1.0], [1.0, 1.0]):
        with pytest.raises(InputError, match='split = "weight"'):
            generate(rate_req_per_s=100, split="weight", names="abc", weights=weights)


def test_split_by_origin(tmp_path: Path) -> None:
    section: dict[str, Any] = write_trace(tmp_path, [0.0, 2.0, 1.0], "abx") | {"split": "origin", "origin_column": "from"}
    requests = generate(tmp_path, **section, origin_map={"x": "b"})
    assert requests.isl.tolist() == [1, 3, 2] and requests.scheduler.tolist() == [0, 1, 1]
    with pytest.raises(InputError, match=r"row 4, column from: the origin 'x' belongs to no scheduler .*origin_map"):
        generate(tmp_path, **section)
    with pytest.raises(InputError, match=r"workload.origin_map.x: no scheduler is named 'z'"):
        generate(tmp_path, **section, origin_map={"x": "z"})


# --- the real trace


@real_data
def test_azure_conversation_trace() -> None:
    section = {"kind": "trace", "path": "azure2023_conv.csv.gz", "slice_start_s": 600.0, "slice_end_s": 1200.0}
    once = generate(DATA / "traces", **section, horizon_s=600.0, names="abcd")
    twice = generate(DATA / "traces", **section, horizon_s=1200.0, names="abcd", loop=True)
    assert len(twice.isl) == 2 * len(once.isl) > 4000
    np.testing.assert_array_equal(twice.arrival_s[len(once.isl) :], once.arrival_s + 600.0)
    assert np.ptp(np.bincount(once.scheduler)) <= 1
    assert workload.MAX_REQUESTS < 2**31  # request ids are int32 on a device
