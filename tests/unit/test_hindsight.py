"""No policy emits less than `hindsight` says, nor does any packing of steps; and where the least carbon is known, that is what it says."""

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

import jaxserve.hindsight as module
from jaxserve.analysis.compare import compare
from jaxserve.hindsight import Hindsight, hindsight
from jaxserve.perf.latency import PrefillForm, PrefillTime
from jaxserve.perf.power import DecodeEnergy, PrefillEnergy
from jaxserve.perf.shares import DecodeShares, PaddedPrefillShares, PrefillShares, Watts
from jaxserve.perf.step_times import DecodeTable, PrefillTable
from jaxserve.units import J_PER_KWH
from tests.cli.helpers import call, write_scenario
from tests.oracle.energy import interval_edges, interval_windows, spread
from tests.oracle.engine import Engine, pack_padded, pack_prompts
from tests.oracle.equations import drawn_j, e_dec, e_pre, t_dec, t_pre
from tests.oracle.model import OracleScenario
from tests.oracle.random_scenarios import random_scenario
from tests.oracle.records import Request
from tests.oracle.simulator import Simulation
from tests.parity.bridge import step_times_of
from tests.parity.worlds import OTHERS
from tests.parity.worlds import world as changed_world

POLICIES = (("round_robin",), ("least_loaded",), *(("greedy", alpha, "e2e", "ci") for alpha in (0.0, 0.5, 1.0)))
MET = 1e-7
"""Relative: 1e-9 of the terms, which partly cancel, is taken off the bound for rounding."""

Engines = list[list[Engine]]  # by DC, with the steps they ran


def floats(table: dict[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in table.items()}


def compiled(s: OracleScenario) -> Any:
    """As much of a compiled scenario as the bound reads."""
    engines = np.array(s.nodes) * np.array(s.engines_per_node)
    prefill_time, decode_time = step_times_of(s)
    fleet = SimpleNamespace(
        prefill_time=prefill_time,
        decode_time=decode_time,
        prefill_energy=PrefillEnergy(**floats(s.e_pre)),
        decode_energy=DecodeEnergy(**floats(s.e_dec)),
        max_num_seqs=s.max_num_seqs,
        token_budget=s.max_num_batched_tokens,
        kv_capacity=s.kv_capacity_tokens,
        prefill_first=s.batching == "prefill_first",
        padded=s.token_count == "padded",
        dc_engines=engines,
        pue=s.pue,
        n_dc=len(engines),
    )
    power = SimpleNamespace(idle_w_per_gpu=s.idle_w_per_gpu, max_w_per_gpu=s.max_w_per_gpu, host_w=s.host_w)
    scenario = SimpleNamespace(
        coefficients=SimpleNamespace(power=power, setup=SimpleNamespace(tp=s.tp)),
        sites=[SimpleNamespace(name=f"site {d}", nodes=nodes) for d, nodes in enumerate(s.nodes)],
        dispatch=SimpleNamespace(window_s=s.window_s),
        slo=SimpleNamespace(ttft_s=s.slo_ttft_s, tpot_s=s.slo_tpot_s),
    )
    lengths = {name: np.array(getattr(s, name), np.int32) for name in ("isl", "osl")}
    return SimpleNamespace(
        fleet=fleet,
        scenario=scenario,
        engine_requests=SimpleNamespace(arrival_s=np.array(s.arrival_s), **lengths),
        ci=lambda times_s: np.array([s.ci(round(t / s.window_s)) for t in times_s]),
        horizon_windows=s.horizon_windows,
        interval_windows=np.array(interval_windows(s)),
        warmup_windows=s.warmup_windows,
    )


def bound_of(s: OracleScenario) -> Hindsight:
    return hindsight(compiled(s))


def by_policy(s: OracleScenario, policy: tuple) -> tuple[Engines, list[Request]]:
    """The oracle's run under a policy."""
    simulation = Simulation(replace(s, policy=policy))
    simulation.run()
    return [dc.engines for dc in simulation.dcs], simulation.requests


def at_will(s: OracleScenario, choose: Callable[[Request], tuple[int, float]]) -> tuple[Engines, list[Request]]:
    """A run that knows no windows, network or turns: `choose` gives each request's DC and the delay in s after which it is there."""
    requests = [Request(*row) for row in zip(range(len(s.isl)), s.scheduler, s.arrival_s, s.isl, s.osl, strict=True)]
    engines = [[Engine(s) for _ in range(nodes * each)] for nodes, each in zip(s.nodes, s.engines_per_node, strict=True)]
    sent: dict[int, list[Request]] = {}
    for r in requests:
        r.dc, delay_s = choose(r)
        r.dc_arrival_s = r.arrival_s + delay_s
        sent.setdefault(id(random.Random(r.id).choice(engines[r.dc])), []).append(r)
    for engine in (engine for dc in engines for engine in dc):
        coming, t = sorted(sent.get(id(engine), []), key=lambda r: (r.dc_arrival_s, r.id)), 0.0
        while True:
            while coming and coming[0].dc_arrival_s <= t:
                engine.waiting.append(coming.pop(0))
            end = engine.iterate(t)
            if end is None and not coming:
                break
            t = coming[0].dc_arrival_s if end is None else end
    return engines, requests


def carbon_with_drain(s: OracleScenario, engines: Engines) -> float:
    """g CO2e from the warm-up on, step by step; idle power is counted for all of that time and taken off again for the time of steps."""
    edges, idle_w, grams = interval_edges(s), s.idle_w_per_gpu * s.tp, 0.0
    for d, dc in enumerate(engines):
        g_per_j = [s.pue[d] * s.ci(k)[d] / J_PER_KWH * (k >= s.warmup_windows) for k in interval_windows(s)[:-1]]
        watts = s.host_w * s.nodes[d] + idle_w * len(dc)
        grams += sum(g * (end - begin) * watts for g, (begin, end) in zip(g_per_j, pairwise(edges), strict=True))
        for step in (step for engine in dc for step in engine.steps):
            drawn_w, parts = step.energy_j / (step.end_s - step.start_s), spread(step.start_s, step.end_s, edges)
            grams += sum(g_per_j[i] * seconds * (drawn_w - idle_w) for i, seconds in parts)
            grams += g_per_j[-1] * drawn_w * max(0.0, step.end_s - max(step.start_s, edges[-1]))
    return grams


def world(seed: int) -> OracleScenario:
    """A random scenario; in some, steps take less than idling does, cost nothing as such, or are cheapest in the middle of their range;
    some have a warm-up."""
    rng, s = random.Random(seed), changed_world(seed)
    s = replace(s, idle_w_per_gpu=rng.choice((0.0, 2.0, s.idle_w_per_gpu)))
    if rng.random() < 0.3:
        s = replace(s, e_pre=s.e_pre | {"e_pre0": 0.0, "e_pre_tok": 1e-4}, idle_w_per_gpu=72.5)
    if rng.random() < 0.3:
        s = replace(s, e_dec=s.e_dec | {"e_dec0": 0.0}, idle_w_per_gpu=72.5)
    if rng.random() < 0.3 and "alpha2" in s.t_dec:
        s = replace(s, t_dec=s.t_dec | {"alpha2": s.t_dec["alpha0"] / 10})
    return replace(s, warmup_windows=rng.choice((0, 0, 1, s.horizon_windows // 3, s.horizon_windows // 2)))


@pytest.mark.parametrize("seed", [*range(24), *OTHERS[:6], *OTHERS[24:30], *OTHERS[36:42]])
def test_no_policy_beats_the_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    s, rng = world(seed), random.Random(seed)
    if seed % 4 == 0:
        ci, cheap = s.ci, rng.randrange(len(s.nodes))  # a DC at which energy earns carbon back
        s = replace(s, ci=lambda k: [-0.3 * g if d == cheap else g for d, g in enumerate(ci(k))])
    dcs, horizon_s = range(len(s.nodes)), s.horizon_windows * s.window_s
    last_ci = s.ci(s.horizon_windows - 1)
    greenest = min(dcs, key=lambda d: s.pue[d] * last_ci[d])
    runs = [by_policy(s, policy) for policy in POLICIES]
    runs += [at_will(s, lambda r: (greenest, 0.0)), at_will(s, lambda r: (greenest, horizon_s - r.arrival_s))]
    runs += [at_will(s, lambda r: (rng.choice(dcs), rng.choice((0.0, rng.random() * horizon_s))))]
    carbons = [carbon_with_drain(s, engines) for engines, _ in runs]

    # With the budgets that one of the runs has just kept.
    kept = rng.randrange(len(runs))
    counted = [r for r in runs[kept][1] if r.arrival_s >= s.warmup_windows * s.window_s]
    ttft_s = max((r.token_s[0] - r.arrival_s for r in counted), default=1.0)
    tpot_s = max(((r.finish_s - r.token_s[0]) / (r.osl - 1) for r in counted if r.osl > 1), default=1.0)
    case = compiled(replace(s, slo_ttft_s=ttft_s * (1 + 1e-12), slo_tpot_s=tpot_s * (1 + 1e-12)))
    found = hindsight(case)
    assert found.carbon_with_drain_g <= min(carbons)
    if found.slo_carbon_with_drain_g is not None:
        assert found.carbon_with_drain_g <= found.slo_carbon_with_drain_g <= carbons[kept]

    # Nor with worse prices, or with slices in which carbon intensity changes.
    for most in (module.MOST_SLICES, 2):
        monkeypatch.setattr(module, "MOST_SLICES", most)
        relaxed = module._Relaxation(case)
        price = np.random.default_rng(seed).exponential(np.abs(relaxed.g_per_j).max() * 100.0, relaxed.engine_s.shape)
        for some in (price, price * (price > np.median(price)), 0.0 * price):
            assert relaxed.bound(some, keep_slo=False) <= min(carbons)
            assert relaxed.bound(some, keep_slo=True) <= carbons[kept]


def plain(**changes: Any) -> OracleScenario:
    """One engine at one site, 20 s of two intervals; one request of 300 and 40 tokens."""
    s = random_scenario(0)
    values = {
        "window_s": 0.1, "ledger_windows": 100, "horizon_windows": 200, "arrival_s": [1.0], "isl": [300], "osl": [40], "scheduler": [0],
        "decision": ("none",), "nodes": [1], "engines_per_node": [1], "pue": [1.2], "ci": lambda k: [100.0], "own": [[0]],
        "rtt_s": [[0.0]], "batching": "study", "max_num_seqs": 64, "max_num_batched_tokens": 2048, "kv_capacity_tokens": 100_000, "tp": 2,
        "t_pre": {"tok_slope_below": 4e-5, "tok_slope_above": 6e-5, "tok_knee": 320, "b0": 9e-3, "b1": 3e-5, "b2": 1.6e-9},
        "t_dec": {"alpha0": 14e-3, "alpha1": 1e-4, "alpha2": 0.0, "beta0": 0.0, "beta1": 1.2e-7, "beta2": 0.0},
        "e_pre": {"e_pre0": 0.5, "e_pre_tok": 0.03, "e_pre_sq": 1e-6}, "e_dec": {"e_dec0": 3.0, "e_dec_req": 0.1, "e_dec_kv": 1e-4},
        "idle_w_per_gpu": 60.0, "max_w_per_gpu": 1e6, "host_w": 300.0,
    }  # fmt: skip
    return replace(s, **(values | changes))


@pytest.mark.parametrize("batching", ["study", "prefill_first"])
def test_one_request_alone_is_the_least(batching: str) -> None:
    s = plain(batching=batching)
    found, least = bound_of(s), carbon_with_drain(s, by_policy(s, ("round_robin",))[0])
    assert found.carbon_with_drain_g == pytest.approx(least, rel=MET)
    assert found.slo_carbon_with_drain_g == pytest.approx(least, rel=MET)
    joules = e_pre(s.e_pre, 300, 300**2) + sum(e_dec(s.e_dec, 1, 300 + j) for j in range(1, 40))
    busy_s = t_pre(s.t_pre, 300, 1, 300**2) + sum(t_dec(s.t_dec, 1, 300 + j) for j in range(1, 40))
    assert found.energy_j == pytest.approx(20 * (300 + 120) + joules - 120 * busy_s, rel=MET)
    assert found.fixed_g == pytest.approx(1.2 * 100 * 20 * 420 / J_PER_KWH)
    assert (found.placement, found.drain_energy_j) == ({"site 0": pytest.approx(1.0)}, pytest.approx(0.0, abs=1e-6))


def test_what_could_be_done_in_the_warm_up_costs_nothing() -> None:
    # Each request is alone, the first done at 2 s: with a warm-up of 5 s the least is what the run emits after that.
    two = {"arrival_s": [1.0, 6.0], "isl": [300, 300], "osl": [40, 40], "scheduler": [0, 0], "warmup_windows": 50}
    s = plain(**two, batching="prefill_first", max_num_seqs=1, max_num_batched_tokens=300)  # no step holds both
    found, engines = bound_of(s), by_policy(s, ("round_robin",))[0]
    assert found.carbon_with_drain_g == pytest.approx(carbon_with_drain(s, engines), rel=MET)
    assert found.fixed_g == pytest.approx(1.2 * 100 * 15 * 420 / J_PER_KWH)
    whole = bound_of(replace(s, warmup_windows=0))
    busy_s = sum(step.end_s - step.start_s for step in engines[0][0].steps)
    joules = sum(step.energy_j for step in engines[0][0].steps)
    assert whole.energy_j - found.energy_j == pytest.approx(5 * 420 + joules / 2 - 120 * busy_s / 2, rel=1e-6)
    # A run that left the first for later emits more.
    late = at_will(s, lambda r: (0, 4.5))[0]
    assert found.carbon_with_drain_g < carbon_with_drain(s, late) - 1e-6
    # The first may break its SLO, the second may not; nor could a bound that held the first to its budget exceed such a run.
    budget_s = t_pre(s.t_pre, 300, 1, 300**2) * (1 + 1e-12)
    kept = bound_of(replace(s, slo_ttft_s=budget_s)).slo_carbon_with_drain_g
    assert kept is not None and kept <= carbon_with_drain(s, by_policy(s, ("round_robin",))[0])


def test_where_batches_save_nothing_every_policy_is_the_least() -> None:
    rng, n = random.Random(5), 200
    s = plain(
        arrival_s=sorted(rng.uniform(0, 20) for _ in range(n)),
        isl=[rng.randint(1, 5000) for _ in range(n)],
        osl=[rng.randint(1, 60) for _ in range(n)],
        scheduler=[0] * n,
        e_pre={"e_pre0": 0.0, "e_pre_tok": 0.03, "e_pre_sq": 1e-6},
        e_dec={"e_dec0": 0.0, "e_dec_req": 0.1, "e_dec_kv": 1e-4},
        idle_w_per_gpu=0.0,
    )
    assert bound_of(s).carbon_with_drain_g == pytest.approx(carbon_with_drain(s, by_policy(s, ("round_robin",))[0]), rel=MET)


def one_token(n: int, **changes: Any) -> OracleScenario:
    """n prompts of 1000 tokens at time 0 and at two sites, in which only tokens cost time (100 to the second) and energy (3 J each)."""
    coefficients = {
        "t_pre": {"tok_slope_below": 1e-2, "tok_slope_above": 1e-2, "tok_knee": 1, "b0": 0.0, "b1": 0.0, "b2": 0.0},
        "e_pre": {"e_pre0": 0.0, "e_pre_tok": 3.0, "e_pre_sq": 0.0},
    }
    requests = {"arrival_s": [0.0] * n, "isl": [1000] * n, "osl": [1] * n, "scheduler": [0] * n}
    sites = {"nodes": [1, 1], "engines_per_node": [1, 1], "pue": [1.0, 1.0], "own": [[0, 1]], "rtt_s": [[0.0, 0.0]]}
    return plain(**coefficients, **requests, **sites, **{"idle_w_per_gpu": 0.0, "host_w": 0.0} | changes)


def test_work_goes_to_the_clean_hours_of_the_clean_site_while_there_is_time() -> None:
    # The first site is clean for 10 s, in which its engine takes one prompt; the other two go where it is less clean, whenever.
    s = one_token(3, ci=lambda k: [10.0, 100.0] if k < 100 else [1000.0, 100.0])
    found = bound_of(s)
    assert found.carbon_with_drain_g == pytest.approx((10 + 2 * 100) * 3000 / J_PER_KWH, rel=MET)
    assert found.gap == pytest.approx(0.0, abs=1e-6)
    assert list(found.placement.values()) == pytest.approx([1 / 3, 2 / 3])
    # Within 15 s there is time for two prompts at 10 s each: one there from 0 to 10 s, one here, and half of the third from 10 to 15 s.
    kept = bound_of(replace(s, slo_ttft_s=15.0)).slo_carbon_with_drain_g
    assert kept == pytest.approx((10 + 1.5 * 100 + 0.5 * 1000) * 3000 / J_PER_KWH, rel=MET)
    # Nor is there a way to keep them all within 14 s.
    assert bound_of(replace(s, slo_ttft_s=14.0)).slo_carbon_with_drain_g is None


def test_work_waits_for_its_arrival() -> None:
    s = one_token(3, ci=lambda k: [10.0, 100.0] if k < 100 else [1000.0, 100.0])
    late = replace(s, arrival_s=[5.0, 12.0, 12.0])
    assert bound_of(late).carbon_with_drain_g == pytest.approx((0.5 * 10 + 2.5 * 100) * 3000 / J_PER_KWH, rel=0.02)


def test_what_is_left_for_the_drain_costs_all_its_energy() -> None:
    # Both engines are taken for all of the 20 s, in place of idling at 120 W; the fifth prompt comes after.
    s = one_token(5, ci=lambda k: [100.0, 100.0], idle_w_per_gpu=60.0)
    found = bound_of(s)
    assert found.carbon_with_drain_g == pytest.approx(100 * 5 * 3000 / J_PER_KWH, rel=MET)
    assert found.drain_energy_j == pytest.approx(3000, rel=1e-5)


def test_a_slice_of_many_intervals_takes_the_best_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # A token takes 3 J and 10 ms, in which two GPUs would idle for 0 or 2 J.
    monkeypatch.setattr(module, "MOST_SLICES", 1)
    for idle_w, best, by_interval in ((0.0, 10.0, (500.0, 500.0, 10.0, 1000.0)), (100.0, -20.0, (500.0, -5.0, -20.0, 1000.0))):
        found = bound_of(one_token(1, ci=lambda k, g=by_interval: [g[k // 50]] * 2, idle_w_per_gpu=idle_w, ledger_windows=50))
        assert found.slices == 1
        assert found.carbon_with_drain_g - found.fixed_g == pytest.approx(best * (3000 - 10 * 2 * idle_w) / J_PER_KWH, rel=1e-6)


def test_no_carbon_and_no_requests() -> None:
    s = replace(world(3), ci=lambda k: [0.0] * 4, idle_w_per_gpu=60.0)
    found = bound_of(s)
    assert found.carbon_with_drain_g == found.fixed_g == 0.0
    free = one_token(5, ci=lambda k: [0.0, 100.0], idle_w_per_gpu=60.0)  # all of it can go where it costs nothing
    assert bound_of(free).carbon_with_drain_g == pytest.approx(bound_of(free).fixed_g, rel=MET)
    none = bound_of(replace(s, arrival_s=[], isl=[], osl=[], scheduler=[], ci=lambda k: [9.0] * 4))
    assert none.carbon_with_drain_g == none.slo_carbon_with_drain_g == pytest.approx(none.fixed_g)
    assert none.placement == {}


@pytest.mark.parametrize("seed", [1, 4, 7, 11, 13, 21])
def test_more_room_or_cleaner_power_never_raises_it(seed: int) -> None:
    s = world(seed)
    found = bound_of(s)
    # What the programme places, it could place there too; so no prices whatever could give a higher bound than its carbon.
    least = found.carbon_with_drain_g + max(found.gap, 0.0) * abs(found.carbon_with_drain_g) + MET * found.fixed_g
    room = {"max_num_seqs": 2 * s.max_num_seqs, "max_num_batched_tokens": 3 * s.max_num_batched_tokens, "kv_capacity_tokens": 2_000_000}
    assert bound_of(replace(s, **room)).carbon_with_drain_g <= least
    twice = bound_of(replace(s, engines_per_node=[2 * each for each in s.engines_per_node]))
    assert twice.carbon_with_drain_g - twice.fixed_g <= least - found.fixed_g
    cleaner = bound_of(replace(s, ci=lambda k: [0.5 * ci for ci in s.ci(k)]))
    assert cleaner.carbon_with_drain_g == pytest.approx(0.5 * found.carbon_with_drain_g, rel=1e-5, abs=1e-5 * found.fixed_g)
    if found.carbon_with_drain_g > found.fixed_g:  # all that a step adds costs something
        assert bound_of(replace(s, ci=lambda k: [s.ci(k)[0] / 3, *s.ci(k)[1:]])).carbon_with_drain_g <= least


def held(rng: random.Random) -> Watts:
    """What idling and the boards make of steps: nothing, or much."""
    return rng.choice((Watts(0.0, 1e9), Watts(0.0, 150.0), Watts(90.0, 250.0)))


def prices(rng: random.Random, slices: int) -> tuple[np.ndarray, np.ndarray]:
    """g per joule and per second [slices, 2, 1]: steps may cost less than idling, engine time may be worth much, carbon be negative."""
    g_per_j = np.array([rng.choice((rng.uniform(0.0, 2.0), rng.uniform(0.0, 2.0), -0.5)) for _ in range(slices)])
    g_per_s = rng.choice((0.0, 50.0, 200.0)) * np.array([rng.uniform(0.0, 3.0) for _ in range(slices)]) - rng.choice((0.0, 60.0)) * g_per_j
    return np.repeat(g_per_j[:, None, None], 2, axis=1), np.repeat(g_per_s[:, None, None], 2, axis=1)


def other_prefill(rng: random.Random, form: str, budget: int, longest: int) -> tuple[dict[str, Any], PrefillForm]:
    """Prefill times of a form with bends anywhere, as the reference takes them and as the engine does."""
    if form == "piecewise":
        knots = sorted(rng.uniform(0.5, 1.5 * budget) for _ in range(rng.randint(0, 4)))
        table: dict[str, Any] = {"tok_knots": knots, "tok_slopes": [rng.choice((0.0, 2e-4, 9e-4, 3e-3)) for _ in [*knots, None]]}
        table |= {"b0": rng.choice((1e-4, 9e-3)), "b1": rng.choice((0.0, 3e-3)), "b2": rng.choice((0.0, 1.6e-6))}
    else:
        tokens = sorted(rng.sample(range(1, 3 * budget), 4))
        lengths = rng.choice((None, [1.0, 1.0 + 0.5 * longest], [2.0, 9.0, 40.0, 41.0 + 2.5 * longest]))
        seconds = 9e-3 + np.cumsum(np.cumsum(np.random.default_rng(rng.randrange(99)).exponential(2e-3, (4, len(lengths or [1]))), 0), 1)
        table = {"n_tokens": [float(n) for n in tokens], "seq_len": lengths, "time_s": (seconds if lengths else seconds[:, 0]).tolist()}
    return {"form": form, **table}, TypeAdapter(PrefillTable).validate_python({"form": form, **table}).model()


BATCHINGS, FORMS = ("study", "prefill_first", "study padded", "prefill_first padded"), ("study", "piecewise", "table")
QUICK = (("study", "piecewise"), ("prefill_first", "study"), ("study padded", "study"), ("prefill_first padded", "piecewise"))
"""Each batching and two of the forms; the others take as long as all of these for each."""


@pytest.mark.parametrize(
    ("batching", "form"),
    [pytest.param(*each, marks=[] if each in QUICK else pytest.mark.slow) for each in itertools.product(BATCHINGS, FORMS)],
)
def test_no_packing_of_prompts_beats_its_shares(batching: str, form: str) -> None:
    prefill_first, padded = batching.startswith("prefill_first"), batching.endswith("padded")
    rng = random.Random(f"{batching} {form}" if padded or form != "study" else prefill_first)
    for _ in range(100 if form == "study" else 60):
        budget, slices = rng.choice((7, 60, 300)), rng.randint(1, 4)
        knee = rng.choice((0.0, 4.5, 40.0, 1e4))
        time = {"tok_slope_below": rng.choice((0.0, 4e-4, 9e-4)), "tok_slope_above": 5e-4, "tok_knee": knee, "b0": rng.choice((1e-4, 9e-3))}
        time |= {"b1": rng.choice((0.0, 3e-3, -1e-3)), "b2": rng.choice((0.0, 1.6e-6, -1e-8))}
        energy = {"e_pre0": rng.choice((0.0, 0.5)), "e_pre_tok": rng.choice((0.0, 0.03)), "e_pre_sq": rng.choice((0.0, 1e-5))}
        some = (1, budget, max(1, min(int(knee), 900)), rng.randint(1, budget), rng.randint(1, 3 * budget))
        queue = [Request(i, 0, 0.0, rng.choice(some), 1) for i in range(rng.randint(1, 8))]
        g_per_j, g_per_s = prices(rng, slices)
        isl = np.array([r.isl for r in queue], np.int32)
        watts = held(rng)
        module: PrefillForm = PrefillTime(**time)
        if form != "study":
            time, module = other_prefill(rng, form, budget, int(isl.max()))
        steps = module, PrefillEnergy(**energy), watts, isl, float(budget)
        shares = PaddedPrefillShares(*steps) if padded else PrefillShares(*steps, prefill_first)
        least = shares.least(g_per_j, g_per_s)(0, slices)[0]
        bound = least[np.searchsorted(shares.lengths, isl)].sum()
        costs = []
        for _ in range(20):
            waiting, spent, at = rng.sample(queue, len(queue)), 0.0, 0
            while waiting:
                admitted = [waiting.pop()]
                while waiting and rng.random() < 0.7:
                    together = [r.isl for r in [*admitted, waiting[-1]]]
                    if prefill_first and (len(together) * max(together) if padded else sum(together)) > budget:
                        break
                    admitted.append(waiting.pop())
                for pieces in (pack_padded if padded else pack_prompts)(admitted, budget):
                    longest = max(n for _, _, n in pieces)
                    computed = [(c, longest if padded else n) for _, c, n in pieces]
                    new, squares = sum(n for _, n in computed), sum((c + n) ** 2 - c * c for c, n in computed)
                    at = rng.randint(at, slices - 1)  # steps follow one another
                    seconds = t_pre(time, new, len(pieces), squares)
                    spent += g_per_j[at, 0, 0] * drawn_j(e_pre(energy, new, squares), seconds, *watts) + g_per_s[at, 0, 0] * seconds
            costs.append(spent)
        assert bound <= min(costs) + 1e-9 * np.abs(costs).max()


def test_a_prompt_costs_no_more_than_it_does_alone() -> None:
    rng, isl = random.Random(1), np.array([3, 40, 300, 7], np.int32)
    time, energy = plain().t_pre, plain().e_pre
    shares = PrefillShares(PrefillTime(**floats(time)), PrefillEnergy(**floats(energy)), Watts(0.0, 1e9), isl, 300.0, False)
    for g_per_j, g_per_s in (prices(rng, 3) for _ in range(50)):
        least = shares.least(g_per_j, g_per_s)(0, 3)[0]
        alone = [
            min(j * e_pre(energy, n, n * n) + s * t_pre(time, n, 1, n * n) for j, s in zip(g_per_j[:, 0, 0], g_per_s[:, 0, 0]))
            for n in shares.lengths
        ]
        assert np.all(least <= np.array(alone) + 1e-12)
    # Where time costs nothing and steps nothing as such, there is no better.
    only = PrefillShares(PrefillTime(**floats(time)), PrefillEnergy(0.0, 0.03, 1e-6), Watts(0.0, 1e9), isl, 300.0, False)
    np.testing.assert_allclose(only.least(np.ones((1, 2, 1)), np.zeros((1, 2, 1)))(0, 1)[0], 0.03 * only.lengths + 1e-6 * only.lengths**2)


@pytest.mark.parametrize("form", ["study", "two_piece", "piecewise", "table"])
def test_no_batch_beats_its_shares(form: str) -> None:
    rng, n = random.Random(form), 30
    for _ in range(25):
        most, slices = rng.choice((1, 3, 16, 64)), rng.randint(1, 3)
        isl = np.array([rng.choice((rng.randint(1, 50), rng.randint(1, 2000))) for _ in range(n)], np.int32)
        osl = np.array([rng.choice((1, rng.randint(2, 30), rng.randint(2, 400))) for _ in range(n)], np.int32)
        full = rng.sample(range(n), min(n, rng.randint(1, most)))
        if rng.random() < 0.5:  # the cache just holds `full`, to the last token
            osl[:] = 2
            kv = int((isl + osl)[full].sum())
        else:
            kv, full = rng.choice((int((isl + osl).max()), 2 * int((isl + osl).max()), 10**6)), []
        time = {"alpha0": 14e-3, "alpha1": 1e-4, "alpha2": rng.choice((0.0, 1e-5, 1e-3)), "beta0": rng.choice((0.0, -3e-8)), "beta1": 1e-6}
        time |= {"beta2": rng.choice((0.0, -2e-10))} | ({"alpha1_below": 1e-3, "batch_knee": 7.6} if form == "two_piece" else {})
        energy = {"e_dec0": rng.choice((0.0, 3.0)), "e_dec_req": 0.1, "e_dec_kv": rng.choice((0.0, 1e-4))}
        energy |= {"e_dec_req_below": 0.4, "batch_knee": 7.6} if form == "two_piece" else {}
        watts = held(rng)
        if form == "piecewise":
            knots = sorted(rng.uniform(1.0, 40.0) for _ in range(rng.randint(0, 4)))
            time = {"alpha0": 14e-3, "batch_knots": knots, "batch_slopes": [rng.choice((0.0, 1e-4, 2e-3)) for _ in [*knots, None]]}
            time |= {"beta0": rng.choice((0.0, 3e-8)), "beta1": 1e-6}
        elif form == "table":
            contexts = rng.choice((None, [1.0, 900.0], [5.0, 60.0, 800.0, 2500.0]))
            grid = 14e-3 + np.cumsum(np.cumsum(np.random.default_rng(rng.randrange(99)).exponential(2e-3, (4, len(contexts or [1]))), 0), 1)
            time = {"batch": [1.0, *sorted(rng.sample(range(2, 60), 3))], "mean_ctx": contexts}
            time["time_s"] = (grid if contexts else grid[:, 0]).tolist()
        seconds = TypeAdapter(DecodeTable).validate_python({"form": form, **time}).model()
        joules = DecodeEnergy(**energy)
        g_per_j, g_per_s = prices(rng, slices)
        shares = DecodeShares(seconds, joules, watts, isl, osl, most, float(kv))
        least = shares.least(g_per_j, g_per_s)(0, slices)[0]
        decoding = [r for r in range(n) if 1 < osl[r] <= kv - isl[r]]
        batches = [full]
        for _ in range(20):
            batch: list[int] = []
            for r in rng.sample(decoding, len(decoding)):
                if len(batch) < rng.randint(1, most) and (isl + osl)[[*batch, r]].sum() <= kv:
                    batch.append(r)
            batches.append(batch)
        for batch in filter(None, batches):
            contexts = np.array([isl[r] + rng.randint(1, osl[r] - 1) for r in batch], float)
            at, b, k = rng.randrange(slices), float(len(batch)), contexts.sum()
            step_s = float(seconds(b, k))
            cost = g_per_j[at, 0, 0] * drawn_j(float(joules(b, k)), step_s, *watts) + g_per_s[at, 0, 0] * step_s
            assert np.interp(contexts, shares.contexts, least).sum() <= cost + 1e-9 * (1 + abs(cost))
        # Where the cache holds any batch and idling no step, a token's cost is that of the best batch of its like, by enumeration.
        bounded = form != "table" and watts.idle == 0 and (watts.most > 1e6 or g_per_j[0, 0, 0] > 0)
        if slices == 1 and kv == 10**6 and bounded:
            sizes, contexts = np.arange(1.0, min(most, len(decoding)) + 1)[:, None], shares.contexts
            step_s = np.asarray(seconds(sizes, sizes * contexts))
            drawn = np.minimum(joules(sizes, sizes * contexts), watts.most * step_s)
            each = g_per_j[0, 0, 0] * drawn + g_per_s[0, 0, 0] * step_s
            np.testing.assert_allclose(least, np.min(each / sizes, axis=0), rtol=1e-12, atol=1e-15)


def test_the_tables_say_how_much_of_the_possible_a_policy_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Greedy sends all to the clean site, where more than half is served after the horizon.
    changes = {"workload.rate_req_per_s": 60.0, "slo": {"ttft_s": 1e6, "tpot_s": 1e6}}
    path = write_scenario(tmp_path, changes | {"policies": [{"kind": "round_robin"}, {"kind": "greedy", "alpha": 0.0, "label": "green"}]})
    outcome = call(capsys, monkeypatch, "run", path, "--hindsight", "--out", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    assert "possible" in outcome.out and "hindsight: no policy emits less than" in outcome.out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    bound, base, green = summary["hindsight"]["carbon_with_drain_g"], *summary["policies"].values()
    assert bound <= green["carbon_with_drain_g"] < base["carbon_with_drain_g"]
    assert green["drain_energy_j"] > 0
    assert green["carbon_with_drain_g"] == pytest.approx(green["carbon_g"] + 1.1 * 50 * green["drain_energy_j"] / J_PER_KWH)
    saved = base["carbon_with_drain_g"] - green["carbon_with_drain_g"]
    assert green["share_of_possible_saving"] == pytest.approx(saved / (base["carbon_with_drain_g"] - bound))
    assert base["share_of_possible_saving"] == 0.0
    assert summary["hindsight"]["relaxation"] == module.RELAXATION

    metrics = {label: json.loads((tmp_path / "out" / label / "summary.json").read_text())["metrics"] for label in ("round_robin", "green")}
    assert "share_of_possible_saving" not in compare(metrics)
    less = metrics | {"lazy": metrics["green"] | {"finished": 1}}
    assert np.isnan(compare(less, bound_g=bound)["share_of_possible_saving"]["lazy"])  # no share of a saving that there is not
    assert np.isnan(compare(metrics, bound_g=base["carbon_with_drain_g"])["share_of_possible_saving"]["green"])
