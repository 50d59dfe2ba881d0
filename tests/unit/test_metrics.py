"""Metrics and comparisons against values worked by hand and against a plain loop over the requests."""

import io
import json
import math
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from jaxserve.analysis.compare import compare, table
from jaxserve.analysis.dataset import ledger_dataset, summary_dataset
from jaxserve.analysis.fields import LEDGER, METRICS
from jaxserve.analysis.metrics import LEDGER_COLUMNS, REQUEST_COLUMNS, summarise
from jaxserve.errors import InputError

NAN = math.nan
RTOL = 1e-12
"""Sums of a few dozen float64 in another order."""


def request_frame(rows: list[tuple]) -> pd.DataFrame:
    """Rows of (arrival_s, isl, osl, wait_s, ttft_s, tpot_s, status); first contact with the DC 0.1 s after arrival."""
    frame = pd.DataFrame(rows, columns=["arrival_s", "isl", "osl", "wait_s", "ttft_s", "tpot_s", "status"])
    frame = frame.astype({"arrival_s": float, "isl": "int64", "osl": "int64", "wait_s": float, "ttft_s": float, "tpot_s": float})
    frame["dc_arrival_s"] = frame["arrival_s"] + 0.1
    frame["admit_s"] = frame["dc_arrival_s"] + frame["wait_s"]
    frame["first_token_s"] = frame["arrival_s"] + frame["ttft_s"]
    frame["finish_s"] = frame["first_token_s"] + frame["tpot_s"].fillna(0.0) * (frame["osl"] - 1)
    return frame


def ledger_frame(carbon_g: float = 20.0, energy_j: float = 3.6e6) -> pd.DataFrame:
    """Two DCs, two intervals: 4 equal rows, PUE 2, shares of energy 1:2:3:4."""
    rows = [
        {"interval_start_s": start, "interval_s": 5.0, "dc": dc, "ci_g_per_kwh": 20.0, "carbon_g": carbon_g / 4, "facility_j": energy_j / 4}
        | {name: share * energy_j / 80 for name, share in (("prefill_j", 1), ("decode_j", 2), ("idle_j", 3), ("host_j", 4))}
        for start in (0.0, 5.0)
        for dc in ("north", "east")
    ]
    return pd.DataFrame(rows)


ENGINES = pd.DataFrame(
    {"dc": ["north", "east"], "node": 0, "engine": 0, "prefill_s": [1.0, 2.0], "decode_s": [3.0, 4.0], "idle_s": [6.0, 4.0]}
)

# Budgets 1 s and 0.1 s: fine, TTFT over, TPOT over, both over, fine at osl = 1, over at osl = 1, exactly on both budgets, rejected.
ROWS = [
    (0.0, 100, 11, 0.0, 0.5, 0.05, "finished"),
    (1.0, 200, 21, 0.4, 1.5, 0.05, "finished"),
    (2.0, 300, 31, 0.1, 0.5, 0.2, "finished"),
    (3.0, 400, 41, 0.2, 2.5, 0.2, "finished"),
    (4.0, 500, 1, 0.3, 0.5, NAN, "finished"),
    (5.0, 600, 1, 0.5, 1.5, NAN, "finished"),
    (6.0, 700, 71, 0.6, 1.0, 0.1, "finished"),
    (7.0, 9000, 5, NAN, NAN, NAN, "rejected"),
]


JUDGED = {"slo_ttft_s": 1.0, "slo_tpot_s": 0.1, "warmup_s": 0.0, "horizon_s": 10.0}
JUDGED |= {"drain_energy_j": 0.0, "drain_facility_j": 0.0, "drain_carbon_g": 0.0}


def summary_of(rows: list[tuple], ledger: pd.DataFrame | None = None, **changed) -> dict:
    return summarise(request_frame(rows), ledger_frame() if ledger is None else ledger, ENGINES, **(JUDGED | changed))


def test_values_worked_by_hand():
    # PUE is 2; the drain is a tenth of the energy, where power is 2.5 times as dirty.
    got = summary_of(ROWS, drain_energy_j=1.8e5, drain_facility_j=3.6e5, drain_carbon_g=5.0)
    expected = {
        "requests": 8,
        "finished": 7,
        "rejected": 1,
        # 3 + 2.5 + 40 * 0.2 and 6 + 1 + 70 * 0.1 lie after 10 s; 2 + 0.5 + 30 * 0.2 does not.
        "finished_after_horizon": 2,
        "arrival_mean_s": 3.5,
        "input_tokens_asked": 11800,
        "output_tokens_asked": 182,
        "input_tokens_served": 2800,
        "output_tokens_served": 177,
        "slo_attainment": 3 / 8,
        "slo_violation": 5 / 8,
        "ttft_violation": 3 / 8,
        "tpot_violation": 2 / 8,
        "both_violation": 1 / 8,
        "rejected_share": 1 / 8,
        # Sorted TTFT .5 .5 .5 1 1.5 1.5 2.5; the q-th percentile stands at 6 q / 100.
        "ttft_mean_s": 8 / 7,
        "ttft_p50_s": 1.0,
        "ttft_p90_s": 1.5 + 0.4 * 1.0,
        "ttft_p99_s": 1.5 + 0.94 * 1.0,
        # Sorted TPOT .05 .05 .1 .2 .2.
        "tpot_mean_s": 0.12,
        "tpot_p50_s": 0.1,
        "tpot_p90_s": 0.2,
        "tpot_undefined": 2,
        "queue_wait_mean_s": 0.3,
        "queue_wait_p50_s": 0.3,
        "carbon_g": 20.0,
        "energy_kwh": 1.0,
        "facility_energy_j": 3.6e6,
        "prefill_energy_j": 1.8e5,
        "decode_energy_j": 3.6e5,
        "idle_energy_j": 5.4e5,
        "host_energy_j": 7.2e5,
        "drain_energy_j": 1.8e5,
        "carbon_with_drain_g": 25.0,
        "mean_ci_g_per_kwh": 20.0,
        "idle_share": 0.5,
        "prefill_share": 0.15,
        "decode_share": 0.35,
        # Seven requests were served by 25 g and 3.96 MJ, whenever that was.
        "carbon_g_per_request": 25 / 7,
        "energy_j_per_output_token": 3.96e6 / 177,
        "goodput_req_per_s": 0.3,
        "goodput_req_per_j": 3 / 3.96e6,
        "goodput_req_per_g": 3 / 25,
        "goodput_tokens_per_j": (11 + 1 + 71) / 3.96e6,
        "goodput_tokens_per_g": (11 + 1 + 71) / 25,
    }
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=RTOL), name
    assert set(got) == set(METRICS)


def test_a_warm_up_is_left_out_of_everything():
    """Counted from 5 s on: the last three rows (fine at osl = 1 but late, on both budgets, rejected) and the second interval."""
    ledger = ledger_frame()
    ledger["carbon_g"] = [1.0, 2.0, 4.0, 8.0]
    ledger["prefill_j"] = [100.0, 200.0, 400.0, 800.0]
    engines = ENGINES.assign(prefill_s=[0.5, 1.0], decode_s=[1.5, 2.0], idle_s=[3.0, 2.0])  # of 5 s
    drain = {"drain_energy_j": 1.0, "drain_facility_j": 2.0, "drain_carbon_g": 3.0}
    got = summarise(request_frame(ROWS), ledger, engines, **(JUDGED | drain | {"warmup_s": 5.0}))
    expected = {
        "requests": 3, "finished": 2, "rejected": 1, "finished_after_horizon": 1, "arrival_mean_s": 6.0, "warmup_s": 5.0, "horizon_s": 10.0,
        "input_tokens_asked": 10300, "output_tokens_asked": 77, "input_tokens_served": 1300, "output_tokens_served": 72,
        "slo_attainment": 1 / 3, "ttft_violation": 1 / 3, "tpot_violation": 0.0, "both_violation": 0.0, "rejected_share": 1 / 3,
        "ttft_p50_s": 1.25, "tpot_mean_s": 0.1, "tpot_undefined": 1, "queue_wait_mean_s": 0.55, "carbon_g": 12.0,
        "prefill_energy_j": 1200.0, "facility_energy_j": 1.8e6, "drain_energy_j": 1.0, "carbon_with_drain_g": 15.0,
        "mean_ci_g_per_kwh": 24.0, "idle_share": 0.5, "prefill_share": 0.15, "decode_share": 0.35, "carbon_g_per_request": 7.5,
        "goodput_req_per_s": 1 / 5, "goodput_req_per_g": 1 / 15, "goodput_tokens_per_j": 71 / 1800002.0,
    }  # fmt: skip
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=RTOL), name
    # It is what the counted rows alone would give, in any pieces; a fault is told by its row in the whole table.
    frame = request_frame(ROWS)
    alone = summarise(frame[5:], ledger[2:], engines, **(JUDGED | drain | {"warmup_s": 5.0}))
    assert alone == got == summarise([frame[:4], frame[4:6], frame[6:]], ledger, engines, **(JUDGED | drain | {"warmup_s": 5.0}))
    frame.loc[6, "ttft_s"] = NAN
    with pytest.raises(InputError, match="row 6: finished, but ttft_s is missing"):
        summarise([frame[:4], frame[4:]], ledger, engines, **(JUDGED | drain | {"warmup_s": 5.0}))


def test_only_the_named_columns_are_read():
    few = summarise(request_frame(ROWS)[list(REQUEST_COLUMNS)], ledger_frame()[list(LEDGER_COLUMNS)], ENGINES, **JUDGED)
    assert few == summary_of(ROWS)


def test_whatever_stands_in_tpot_at_one_token_is_no_tpot():
    for odd in (0.0, -1.0, math.inf, 99.0):
        rows = [(0.0, 10, 1, 0.0, 0.5, NAN, "finished"), (0.0, 10, 2, 0.0, 0.5, 0.05, "finished")]
        frame = request_frame(rows)
        frame.loc[0, "tpot_s"] = odd
        got = summarise(frame, ledger_frame(), ENGINES, **JUDGED)
        assert (got["slo_attainment"], got["tpot_undefined"], got["tpot_mean_s"], got["tpot_p99_s"]) == (1.0, 1, 0.05, 0.05)


@pytest.mark.parametrize("rows", [[], [(0.0, 9000, 5, NAN, NAN, NAN, "rejected")] * 3])
def test_nothing_served_has_no_latency_and_no_ratio(rows):
    got = summary_of(rows)
    undefined = [name for name in got if name.startswith(("ttft_p", "ttft_m", "tpot_p", "tpot_m", "queue"))]
    undefined += ["carbon_g_per_request", "energy_j_per_output_token"]
    assert [got[name] for name in undefined] == [None] * 14
    assert (got["goodput_req_per_j"], got["goodput_req_per_g"]) == (0.0, 0.0)
    assert got["slo_violation"] == (1.0 if rows else None)
    assert got["output_tokens_asked"] == 5 * len(rows)
    json.dumps(got, allow_nan=False)


@pytest.mark.parametrize("carbon_g", [0.0, -3.0])
def test_no_goodput_per_gram_without_positive_carbon(carbon_g):
    got = summary_of(ROWS, ledger_frame(carbon_g))
    assert got["goodput_req_per_g"] is None and got["goodput_tokens_per_g"] is None
    assert got["carbon_g_per_request"] == pytest.approx(carbon_g / 7, rel=RTOL)
    assert got["goodput_req_per_j"] is not None


def test_no_energy_and_no_engines():
    got = summarise(request_frame([]), ledger_frame()[:0], ENGINES[:0], **JUDGED)
    assert (got["energy_kwh"], got["goodput_req_per_j"], got["mean_ci_g_per_kwh"], got["idle_share"]) == (0.0, None, None, None)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("status", "running", "row 2: status is 'running'"),
        ("arrival_s", NAN, "row 2: finished, but arrival_s is missing"),
        ("ttft_s", NAN, "row 2: finished, but ttft_s is missing"),
        ("tpot_s", NAN, "row 2: finished, but tpot_s is missing"),
        ("finish_s", math.inf, "row 2: finished, but finish_s is missing"),
    ],
)
def test_a_request_that_did_not_end_is_refused(column, value, said):
    frame = request_frame(ROWS)
    frame.loc[2, column] = value
    with pytest.raises(InputError, match=said):
        # In two pieces: the row is counted from the start of the run.
        summarise([frame[:2], frame[2:]], ledger_frame(), ENGINES, **JUDGED)


def test_a_missing_carbon_intensity_is_not_a_number_of_grams():
    ledger = ledger_frame()
    ledger.loc[1, "carbon_g"] = NAN
    with pytest.raises(InputError, match="carbon_g of the run is nan"):
        summary_of(ROWS, ledger)


finished_row = st.builds(
    lambda arrival, isl, osl, wait, ttft, tpot: (arrival, isl, osl, wait, ttft, tpot if osl > 1 else NAN, "finished"),
    st.floats(0, 10, exclude_max=True),
    st.integers(1, 5000),
    st.integers(1, 4),
    st.floats(0, 5),
    st.sampled_from([0.0, 0.5, 1.0, math.nextafter(1.0, 2.0), 3.0]),
    st.sampled_from([0.01, 0.1, math.nextafter(0.1, 1.0), 0.7]),
)
rejected_row = st.builds(lambda isl, osl: (1.0, isl, osl, NAN, NAN, NAN, "rejected"), st.integers(1, 9), st.integers(1, 9))


@settings(derandomize=True, deadline=None)
@given(st.lists(st.one_of(finished_row, rejected_row), max_size=40), st.lists(st.integers(0, 40), max_size=3), st.booleans())
def test_equals_a_plain_loop_in_pieces_or_whole(rows, cuts, categorical):
    got = summary_of(rows)
    good = ttft_over = tpot_over = both = undefined = 0
    ttfts, tpots = [], []
    for _, _, osl, _, ttft, tpot, status in rows:
        if status == "rejected":
            continue
        late, slow = ttft > 1.0, osl > 1 and tpot > 0.1
        good += not late and not slow
        ttft_over, tpot_over, both = ttft_over + late, tpot_over + slow, both + (late and slow)
        undefined += osl == 1
        ttfts.append(ttft)
        if osl > 1:
            tpots.append(tpot)
    n = len(rows)
    if n:
        counts = {"slo_attainment": good, "slo_violation": n - good, "ttft_violation": ttft_over, "tpot_violation": tpot_over}
        assert {name: got[name] for name in counts} == {name: count / n for name, count in counts.items()}
        parts = got["ttft_violation"] + got["tpot_violation"] - got["both_violation"] + got["rejected_share"]
        assert parts == pytest.approx(got["slo_violation"], abs=RTOL)
    assert got["requests"] == got["finished"] + got["rejected"] == n
    assert got["tpot_undefined"] == undefined
    for stem, values in (("ttft", sorted(ttfts)), ("tpot", sorted(tpots))):
        for p in (50, 90, 99):
            assert got[f"{stem}_p{p}_s"] == (None if not values else pytest.approx(percentile(values, p), rel=RTOL, abs=RTOL))
    json.dumps(got, allow_nan=False)
    frame = request_frame(rows)
    if categorical:
        frame["status"] = frame["status"].astype(pd.CategoricalDtype(["rejected", "finished"]))
    edges = [0, *sorted(min(cut, n) for cut in cuts), n]
    pieces = (frame[low:high] for low, high in pairwise(edges))
    again = summarise(pieces, ledger_frame(), ENGINES, **JUDGED)
    assert again == got


def percentile(values: list[float], p: int) -> float:
    """Linear between the order statistics of sorted values."""
    place = (len(values) - 1) * p / 100
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


def test_saving_names_its_baseline_beside_its_attainment():
    base, green = summary_of(ROWS), summary_of(ROWS, ledger_frame(15.0))
    frame = compare({"round_robin": base, "green": green | {"simulated_req_per_wall_s": 5.0}})
    assert list(frame["saving_vs_baseline"]) == [0.0, 0.25]
    assert list(frame["baseline"]) == ["round_robin"] * 2
    columns = list(frame.columns)
    assert columns.index("slo_attainment") == columns.index("saving_vs_baseline") + 1
    assert frame.attrs["units"]["carbon_with_drain_g"] == "g"
    assert list(compare({"a": base, "b": green}, baseline="b")["saving_vs_baseline"]) == pytest.approx([-1 / 3, 0.0], rel=RTOL)


def test_no_saving_for_what_was_not_served():
    base = summary_of(ROWS)
    less = summary_of([*ROWS[:6], (*ROWS[6][:3], NAN, NAN, NAN, "rejected"), ROWS[7]], ledger_frame(1.0))
    row = compare({"rr": base, "lazy": less}).loc["lazy"]
    assert math.isnan(row["saving_vs_baseline"]) and row["note"] == "no saving: finished is 6, with rr 7"
    nothing = summary_of(ROWS[7:])
    assert "nothing was served" in compare({"rr": nothing})["note"].iloc[0]
    free = summary_of(ROWS, ledger_frame(0.0))
    assert compare({"free": free, "rr": base})["saving_vs_baseline"].isna().all()


def test_work_left_for_after_the_horizon_puts_a_saving_in_doubt():
    base = summary_of(ROWS)
    engine_j = 1.8e6

    def left(share: float, carbon_g: float) -> pd.Series:
        drain = {"drain_energy_j": share * engine_j, "drain_facility_j": 2 * share * engine_j, "drain_carbon_g": 0.0}
        return compare({"rr": base, "slow": summary_of(ROWS, ledger_frame(carbon_g), **drain)}).loc["slow"]

    row = left(0.04, 19.0)
    assert row["drain_vs_baseline"] == pytest.approx(0.04, rel=RTOL)
    assert "saving in doubt: beside 5.0 % saved, work worth 4.0 % of rr's energy was left" in row["note"]
    assert left(0.04, 10.0)["note"] == ""
    # However small they are, both numbers show.
    assert "beside 0.14 % saved, work worth 0.016 % of rr's energy" in left(1.6e-4, 20 * (1 - 1.4e-3))["note"]
    assert "beside 30 % saved, work worth 12 % of rr's energy" in left(0.12, 14.0)["note"]


def test_columns_side_by_side_count_the_same_carbon():
    """A world by hand: 100 g and no drain against 60 g and 25 g of work left for later; 70 g can be reached.

    Within the horizon alone the second would have saved 40 %, more than the 30 % that is possible.
    """
    base = summary_of(ROWS, ledger_frame(100.0))
    late = summary_of(ROWS, ledger_frame(60.0), drain_energy_j=4e5, drain_facility_j=8e5, drain_carbon_g=25.0)
    frame = compare({"rr": base, "late": late}, bound_g=70.0)
    assert frame.columns.tolist()[:6] == [
        "carbon_with_drain_g", "baseline", "saving_vs_baseline", "share_of_possible_saving", "slo_attainment", "drain_vs_baseline",
    ]  # fmt: skip
    row = frame.loc["late"]
    assert row["carbon_with_drain_g"] == 85.0 and row["carbon_g"] == 60.0
    assert row["saving_vs_baseline"] == pytest.approx(0.15, rel=RTOL)
    assert row["share_of_possible_saving"] == pytest.approx(0.5, rel=RTOL)
    assert row["goodput_req_per_g"] == pytest.approx(3 / 85, rel=RTOL)
    lines = printed(frame).splitlines()
    late_line = next(line for line in lines if line.startswith("late"))
    assert late_line.split()[:7] == ["late", "85.0", "+15.0", "%", "50.0", "%", "37.5"]  # the share beside its attainment


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"requests": 9}, "same trace: requests is 9 and 8"),
        ({"input_tokens_asked": 1}, "same trace: input_tokens_asked"),
        ({"output_tokens_asked": 1}, "same trace: output_tokens_asked"),
        ({"horizon_s": 11.0}, "same trace: horizon_s"),
        ({"warmup_s": 1.0}, "same trace: warmup_s is 1.0 and 0.0"),
        ({"arrival_mean_s": 3.6}, "same trace: the mean arrival is 3.6 s and 3.5 s"),
        ({"slo_ttft_s": 2.0}, "same SLO: slo_ttft_s is 2.0 and 1.0"),
    ],
)
def test_another_trace_or_budget_is_refused(change, said):
    base = summary_of(ROWS)
    with pytest.raises(InputError, match=said):
        compare({"rr": base, "other": base | change})


def test_compare_refuses_nothing_and_unknown_names():
    base = summary_of(ROWS)
    with pytest.raises(InputError, match="at least one"):
        compare({})
    with pytest.raises(InputError, match="'x' is not among the policies compared: rr"):
        compare({"rr": base}, baseline="x")
    with pytest.raises(InputError, match="'cut' has no carbon_with_drain_g"):
        compare({"rr": base, "cut": {name: value for name, value in base.items() if name != "carbon_with_drain_g"}})


def printed(frame: pd.DataFrame, width: int = 120) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=False).print(table(frame))
    return stream.getvalue()


@pytest.mark.parametrize("rows", [ROWS, ROWS[7:], []])
def test_table_fits_and_says_what_matters(rows):
    summaries = {f"greedy [alpha=0.{i}, latency=e2e]": summary_of(rows) | {"simulated_req_per_wall_s": 312345.6} for i in range(5)}
    text = printed(compare(summaries))
    assert max(map(len, text.splitlines())) <= 120
    # Every name stands whole in both blocks, brackets included.
    assert all(text.count(name) >= 2 for name in summaries)
    assert "baseline" in text and "latency=e2e]" in text.splitlines()[3]
    for word in ("CO2e", "saving vs", "attained", "violated", "TTFT ms", "TPOT ms", "p50", "p90", "p99", "idle", "req/", "312,346"):
        assert word in text, word
    assert "nan" not in text


def test_table_scales_units():
    text = printed(compare({"rr": summary_of(ROWS, ledger_frame(2.5e6, 3.6e9))}))
    assert "2.50" in text and "t CO2e" in text and "req/GJ" in text and "req/tCO2e" in text


def test_ledger_dataset_keeps_order_values_and_units():
    ledger = ledger_frame()
    ledger["decode_j"] = [1.0, 2.0, 3.0, 4.0]
    data = ledger_dataset(ledger.sample(frac=1, random_state=3).assign(dc=lambda f: f["dc"].astype("category")))
    assert data.sizes == {"interval": 2, "dc": 2}
    assert float(data["decode_j"].sel(interval=5.0, dc="north")) == 3.0
    assert list(ledger_dataset(ledger)["dc"].to_numpy()) == ["north", "east"]
    assert {name: data[name].attrs["units"] for name in LEDGER} == {name: field.unit for name, field in LEDGER.items()}
    assert all(data[name].attrs["long_name"] for name in data.variables)
    assert dict(ledger_dataset(ledger[:0]).sizes) == {"interval": 0, "dc": 0}


def test_ledger_dataset_refuses_gaps_and_repeats():
    ledger = ledger_frame()
    with pytest.raises(InputError, match="DC 'east' has 0 rows for the interval that starts at 5 s"):
        ledger_dataset(ledger[:3])
    with pytest.raises(InputError, match="has 2 rows"):
        ledger_dataset(pd.concat([ledger, ledger[:1]]))


def test_summary_dataset_has_units_and_nan_for_undefined():
    data = summary_dataset({"a": summary_of(ROWS), "b": summary_of(ROWS[7:])})
    assert data.sizes == {"policy": 2}
    assert float(data["ttft_p50_s"].sel(policy="a")) == 1.0 and np.isnan(data["ttft_p50_s"].sel(policy="b"))
    assert data["requests"].dtype == np.int64 and data["ttft_p50_s"].attrs["units"] == "s"
    assert "simulated_req_per_wall_s" not in data
    assert summary_dataset({}).sizes == {"policy": 0}
