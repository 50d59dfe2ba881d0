"""From a scenario to arrays: capacities, round trips, polls, decision times and steps, each checked by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import InputError
from jaxserve.perf.coefficients import Coefficients, load_coefficients
from jaxserve.perf.step_times import PrefillTimeCoefficients
from jaxserve.scenario.compile import Compiled, build_fleet, compile_scenario
from jaxserve.scenario.decisions import decision_times
from jaxserve.scenario.load import load_scenario, parse_scenario
from jaxserve.scenario.spec import Scenario
from tests.cli.helpers import changed


def scenario(changes: dict[str, Any] | None = None) -> Scenario:
    """The small scenario, changed as said."""
    return parse_scenario(changed(changes or {}), "small", Path())


def compiled(changes: dict[str, Any] | None = None) -> Compiled:
    """The same, compiled."""
    return compile_scenario(scenario(changes), Path())


def sites(*names: str, nodes: int = 1, gpus: int = 2) -> list[dict[str, Any]]:
    """Sites in regions of their own, all of one zone."""
    one = {"zone": "FR", "pue": 1.1, "nodes": nodes, "gpus_per_node": gpus}
    return [{"name": name, "region": f"r-{name}"} | one for name in names]


# --- Capacity


def test_kv_capacity_of_llama_by_hand() -> None:
    # Llama-3.1-8B in bfloat16: 2 (K, V) * 32 layers * 8 KV heads * 128 * 2 bytes = 131072 bytes a token, 14.96 GiB of weights.
    assert 2 * 32 * 8 * 128 * 2 == 131072
    spare_gib = 40 * 0.9 - 14.96  # 21.04
    assert scenario().engine.kv_tokens(1) == int(spare_gib * 2**30 // 131072) == 172359
    assert int(build_fleet(scenario()).kv_capacity) == 172359
    # On an A100 of 80 GB, and at full utilisation.
    assert scenario({"engine.gpu_memory_gib": 80.0}).engine.kv_tokens(1) == int((80 * 0.9 - 14.96) * 8192)
    assert scenario({"engine.gpu_memory_utilization": 1.0}).engine.kv_tokens(1) == int(25.04 * 8192)


def test_kv_capacity_spans_the_gpus_of_an_engine() -> None:
    mixtral, _ = load_scenario("study-mixtral")  # 86.99 GiB over four GPUs of 40 GiB
    assert mixtral.engine.kv_tokens(4) == int((4 * 36 - 86.99) * 2**30 // 131072)
    assert mixtral.engine.kv_tokens(1) < 0
    assert int(build_fleet(mixtral).n_engines) == 16 * 4 * 2


def test_a_given_capacity_wins() -> None:
    assert scenario({"engine.kv_capacity_tokens": 1000}).engine.kv_tokens(1) == 1000


@pytest.mark.parametrize(("weights", "fits"), [(35.99, True), (36.0, False), (50.0, False)])
def test_weights_must_leave_room(weights: float, fits: bool) -> None:
    s = scenario({"engine.weights_gib": weights})
    if fits:
        assert int(build_fleet(s).kv_capacity) == 81
    else:
        with pytest.raises(InputError, match=r"^engine: 1 GPU\(s\) of 40 GiB at utilisation 0.9 leave no room"):
            build_fleet(s)


def test_engines_of_sites_that_differ() -> None:
    table = sites("a", nodes=2, gpus=4) + sites("b", nodes=1, gpus=8)[:1] + sites("c", nodes=3, gpus=4)
    fleet = build_fleet(
        scenario(
            {
                "engine.coefficients": "mixtral-8x7b_tp4_a100",
                "engine.gpu_memory_gib": 80.0,
                "engine.weights_gib": 90.0,
                "sites": table,
                "schedulers": [{"name": "all", "region": "r-a", "sites": ["a", "b", "c"]}],
                "network": {},
            }
        )
    )
    assert (fleet.n_engines, fleet.n_dc, fleet.n_schedulers) == (7, 3, 1)
    np.testing.assert_array_equal(fleet.dc_engines, [2, 2, 3])
    np.testing.assert_array_equal(fleet.dc_first_engine, [0, 2, 4])
    np.testing.assert_array_equal(fleet.dc_members, [[0, 1, 7], [2, 3, 7], [4, 5, 6]])  # 7 stands for none
    np.testing.assert_array_equal(fleet.rtt_s, np.zeros((1, 3)))  # its own sites, wherever they are


# --- Network


def test_round_trips_hold_both_ways_and_are_zero_at_home() -> None:
    fleet = build_fleet(scenario({"network.rtt_ms": {"there": {"here": 80.0}}}))  # given one way only
    np.testing.assert_array_equal(fleet.rtt_s, [[0.0, 0.08], [0.08, 0.0]])
    fleet = build_fleet(scenario({"network.rtt_ms": {"there": {"here": 80.0}, "here": {"there": 80.0}}}))  # given twice, alike
    np.testing.assert_array_equal(fleet.rtt_s, [[0.0, 0.08], [0.08, 0.0]])


def test_round_trips_inside_a_region() -> None:
    changes = {"sites.1.region": "here", "schedulers.1.region": "here", "network": {}}
    np.testing.assert_array_equal(build_fleet(scenario(changes)).rtt_s, np.zeros((2, 2)))
    changes["network"] = {"rtt_ms": {"here": {"here": 2.0}}}
    np.testing.assert_array_equal(build_fleet(scenario(changes)).rtt_s, [[0.0, 0.002], [0.002, 0.0]])  # not to one's own


# --- Polls, windows, steps


def test_asynchronous_polls_are_spread_over_window_edges() -> None:
    three = {
        "sites": sites("a", "b", "c"),
        "schedulers": [{"name": "all", "region": "r-a", "sites": ["a", "b", "c"]}],
        "network": {},
        "provisioner": {"poll_s": 1.0, "mode": "async"},
    }
    fleet = build_fleet(scenario(three))
    assert int(fleet.poll_windows) == 10
    np.testing.assert_array_equal(fleet.poll_offset, [0, 3, 6])  # 0, 3.33 and 6.67 windows, rounded down
    np.testing.assert_array_equal(build_fleet(scenario(three | {"provisioner": {"poll_s": 0.2, "mode": "async"}})).poll_offset, [0, 0, 1])
    np.testing.assert_array_equal(build_fleet(scenario(three | {"provisioner": {"poll_s": 1.0}})).poll_offset, [0, 0, 0])


@pytest.mark.parametrize(
    ("changes", "blind", "observing"),
    [
        ({}, 10, 10),  # a second: ledger interval and poll
        ({"ledger_s": 2.0, "horizon_s": 8.0}, 10, 10),  # no step is longer than a second
        ({"ledger_s": 0.5}, 5, 5),
        ({"provisioner.poll_s": 0.4}, 10, 2),  # 4 windows and 10: every 2
        ({"provisioner.poll_s": 0.3}, 10, 1),
        ({"provisioner": {"poll_s": 1.0, "mode": "async"}}, 10, 5),  # the second DC is read half a second later
        ({"horizon_s": 4.5}, 5, 5),  # the horizon ends an interval early
        ({"dispatch.window_s": 2.0, "ledger_s": 2.0, "provisioner.poll_s": 4.0}, 1, 1),  # a window is the least
    ],
)
def test_steps_end_at_every_edge_that_matters(changes: dict[str, Any], blind: int, observing: int) -> None:
    case = compiled(changes)
    assert (case.step_windows(False), case.step_windows(True)) == (blind, observing)
    for observes in (False, True):
        step = case.step_windows(observes)
        assert case.horizon_windows % step == 0 and case.ledger_windows % step == 0
        assert case.sizes(step).step_windows == step


def test_sizes_hold_the_busiest_step() -> None:
    case = compiled({"workload.rate_req_per_s": 100.0})
    sizes = case.sizes(10)
    busiest = int(np.bincount(case.engine_requests.arrival_s.astype(int)).max())
    longest = int(case.engine_requests.osl.max())
    assert longest - 1 <= sizes.stay and busiest <= sizes.step_requests < busiest + 16


def test_answers_too_long_for_so_many_engines(tmp_path: Path) -> None:
    """A calendar of 2^20 and more decode steps on each of over 256 engines is more than the 200 million that a run may hold."""
    (tmp_path / "t.csv").write_text("arrival_s,isl,osl\n0,5,5\n1,5,1200000\n")
    trace = {"workload": {"kind": "trace", "path": str(tmp_path / "t.csv")}, "sites.0.nodes": 128, "engine.kv_capacity_tokens": 2_000_000}
    with pytest.raises(
        InputError, match=r"request 1 \(arrival 1 s\) has an OSL of 1200000, on \d+ engines more than a run may hold \(524288 tokens\)"
    ):
        compiled(trace)


# --- Decision latency


def test_affine_decision_times_by_hand() -> None:
    # One solver a scheduler; a decision takes 0.1 + 0.05 s and starts when the one before it has ended.
    s = scenario({"decision_latency": {"kind": "affine", "c0_s": 0.1, "c1_s": 0.05}})
    arrival = np.array([0.0, 0.02, 0.05, 0.1, 1.0])
    scheduler = np.array([0, 1, 0, 0, 0])
    np.testing.assert_allclose(decision_times(s, arrival, scheduler), [0.15, 0.17, 0.30, 0.45, 1.15], rtol=0, atol=1e-15)


def test_fixed_and_no_decision_latency() -> None:
    arrival, scheduler = np.array([0.0, 0.0, 1.0]), np.array([0, 1, 0])
    fixed = scenario({"decision_latency": {"kind": "fixed", "seconds": 0.25}})
    np.testing.assert_array_equal(decision_times(fixed, arrival, scheduler), arrival + 0.25)  # many at once
    np.testing.assert_array_equal(decision_times(scenario(), arrival, scheduler), arrival)


# --- What only shows when the parts meet


def test_oversize_requests_are_refused_or_counted() -> None:
    changes = {"workload.lengths": {"distribution": "openorca"}, "engine.max_model_len": 500, "workload.rate_req_per_s": 50.0}
    with pytest.raises(InputError, match=r"^workload: request \d+ .* more than the 500 of engine.max_model_len, .* nothing is truncated"):
        compiled(changes)
    case = compiled(changes | {"engine.oversize": "reject"})
    total = case.requests.isl.astype(int) + case.requests.osl
    np.testing.assert_array_equal(case.accepted, np.flatnonzero(total <= 500))
    assert 0 < len(case.accepted) < len(total)
    np.testing.assert_array_equal(case.engine_requests.isl, case.requests.isl[case.accepted])
    assert len(case.engine_requests.decision_s) == len(case.accepted)


@pytest.mark.parametrize(("isl", "fits"), [(172_339, True), (172_340, False)])
def test_a_request_may_fill_the_whole_cache(isl: int, fits: bool) -> None:
    changes = {"workload.lengths": {"isl": isl, "osl": 20}}
    if fits:
        assert len(compiled(changes).accepted)
    else:
        with pytest.raises(InputError, match="more than the 172359 of the KV cache of an engine"):
            compiled(changes)


def test_carbon_intensity_by_site() -> None:
    case = compiled({"sites.1.zone": "FR", "sites.0.zone": "PL"})
    np.testing.assert_array_equal(case.ci(np.array([0.0, 3.9])), [[700.0, 50.0]] * 2)


def test_notes_say_what_was_read_and_what_was_assumed() -> None:
    notes = compiled().notes
    assert any("Poisson arrivals at 10 req/s" in note for note in notes)
    assert any(note.startswith("grid: average carbon intensity") for note in notes)


def test_the_fingerprint_is_of_what_was_read() -> None:
    assert compiled().fingerprint() == compiled({"name": "other", "sites.0.pue": 1.5}).fingerprint()
    others = [{"seed": 2}, {"workload.lengths.osl": 21}, {"grid.ci_g_per_kwh.PL": 701.0}]
    assert len({compiled(changes).fingerprint() for changes in ({}, *others)}) == 4


# --- Step times within the engine's limits


def with_one_knee() -> Coefficients:
    """Shipped coefficients with a prefill of the study's form."""
    prefill = PrefillTimeCoefficients(tok_slope_below=4e-5, tok_slope_above=6e-5, tok_knee=320.0, b0=9e-3)
    return load_coefficients("llama-3.1-8b_tp1_a100").model_copy(update={"prefill_time": prefill})


def test_shortest_steps_by_hand() -> None:
    base = with_one_knee()
    falling = base.model_copy(
        update={
            "decode_time": base.decode_time.model_copy(
                update={"alpha0": 14.2e-3, "alpha1": 1e-4, "alpha2": 0.0, "beta0": -1e-8, "beta1": 0.0, "beta2": 0.0}
            )
        }
    )
    # alpha0 + alpha1*B - 1e-8 * capacity/B is least for one request with the whole cache.
    assert falling.shortest_decode_s(16, 100_000) == pytest.approx(14.2e-3 + 1e-4 - 1e-3, rel=1e-12)
    concave = base.model_copy(
        update={
            "decode_time": base.decode_time.model_copy(
                update={"alpha0": 14.2e-3, "alpha1": 0.0, "alpha2": -1e-5, "beta0": 0.0, "beta1": 0.0, "beta2": 0.0}
            )
        }
    )
    assert concave.shortest_decode_s(16, 100_000) == pytest.approx(14.2e-3 - 256e-5, rel=1e-12)
    known = base.model_copy(update={"prefill_time": base.prefill_time.model_copy(update={"b1": 2e-5, "b2": 1e-9})})
    t = known.prefill_time
    assert known.shortest_prefill_s(16, 8192, 100_000) == pytest.approx(t.tok_slope_below + t.b0 + t.b1 + t.b2, rel=1e-9)


def test_a_bound_of_prefill_steps_that_is_none_too_high() -> None:
    base = with_one_knee()
    rng = np.random.default_rng(0)
    for _ in range(50):
        update = {"b1": rng.normal(0, 1e-4), "b2": rng.normal(0, 1e-10), "tok_knee": rng.uniform(0, 9000)}
        table = base.model_copy(update={"prefill_time": base.prefill_time.model_copy(update=update)})
        bound, model = table.shortest_prefill_s(32, 8192, 20_000), table.prefill_time_model()
        for _ in range(50):
            pieces = int(rng.integers(1, 33))
            new = rng.integers(1, 8192 // pieces + 1, pieces)
            cached = rng.integers(0, 20_000 - new.max(), pieces)
            assert float(model(new.sum(), pieces, ((cached + new) ** 2 - cached**2).sum())) >= bound - 1e-12
