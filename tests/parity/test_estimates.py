"""The estimator, and what greedy and least-loaded make of it: numbers worked by hand, and brute force over random views."""

import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.control import AbstractRequestPolicy, View
from jaxserve.policies.estimate import estimate
from jaxserve.policies.greedy import LATENCIES, Greedy
from jaxserve.policies.simple import LeastLoaded
from tests.views import ROUNDED, as_arrays, fleet_with, t_dec, t_pre, view_of


def by_the_page(view: View, isl: float, osl: float) -> list[tuple[float, float]]:
    """(TTFT, TPOT) of each DC, one number after another, as SEMANTICS.md writes them."""
    found = []
    fleet = view.fleet
    isl_mean, isl2_mean, osl_mean = float(view.isl_mean), float(view.isl2_mean), float(view.osl_mean)
    for d in range(len(view.batch)):
        b, q_tokens, k = float(view.batch[d]), float(view.queued_tokens[d]), float(view.cached[d])
        q, duty = float(view.queued_seen[d]) / isl_mean, min(float(view.duty[d]), 0.95)
        m = max(1, min(float(fleet.batch_capacity), math.floor(float(fleet.kv_capacity) / (isl_mean + osl_mean))))
        t_res = osl_mean * t_dec(max(b, 1.0), k) / (1.0 - duty)
        wait = max(0.0, b + q + 1.0 - m) * t_res / m
        ttft = float(view.rtt_s[d]) + wait + t_pre(isl + q_tokens, 1.0 + q, isl**2 + q * isl2_mean)
        others = 0.0 if q_tokens == 0.0 else t_pre(q_tokens, q, q * isl2_mean) / osl
        found.append((ttft, (t_dec(b + 1.0, k + isl) + others) / (1.0 - duty)))
    return found


_estimate = eqx.filter_jit(estimate)


def estimate_of(view: View, isl: float, osl: float) -> Any:
    """Compiled, as the engine runs it."""
    return _estimate(*as_arrays((view, isl, osl)))


def test_estimates_worked_by_hand():
    """isl 40, osl 5. The first DC is busy:

    q = 100/50 = 2, m = 4; T_res = 10 * (0.012 + 0.0022*3 + 0.0001*9) / 0.5 = 0.39; W = (3 + 2 + 1 - 4) * 0.39/4 = 0.195;
    TTFT = 0.1 + 0.195 + t_pre(240, 3, 7600) = 0.295 + 0.1 + 0.28 + 0.01 + 0.003 + 0.0076 = 0.6956;
    T_pre = t_pre(200, 2, 6000)/5 = 0.318/5; TPOT = (0.0116 + 0.00216*4 + 0.0001*16 + 0.0636) / 0.5 = 0.17088.
    The second is empty but for a duty of 1, which counts as 0.95; of the third only the scheduler's own dispatch is known:
    it lengthens the prefill, and is no queue.
    """
    busy = {"batch": 3.0, "queued_tokens": 200.0, "queued_seen": 100.0, "cached": 600.0, "duty": 0.5, "rtt_s": 0.1}
    view = view_of(fleet_with(), [busy, {"duty": 1.0}, {"batch": 1.0, "queued_tokens": 60.0}])
    got = estimate_of(view, 40.0, 5.0)
    ttft = [0.6956, 0.04 + 0.01 + 0.001 + 0.0016, 0.1 + 0.01 + 0.001 + 0.0016]
    tpot = [0.17088, 0.01254 / 0.05, (0.01 + 2e-4) + (2e-3 + 2e-5) * 2 + 4e-4 + (0.06 + 0.01) / 5]
    np.testing.assert_allclose(got.ttft_s, ttft, rtol=ROUNDED)
    np.testing.assert_allclose(got.tpot_s, tpot, rtol=ROUNDED)
    np.testing.assert_array_equal(got.feasible, [True, True, True])
    assert not np.any(estimate_of(view_of(fleet_with(slo_tpot_s=0.01), [busy]), 40.0, 5.0).feasible)


def test_feasible_up_to_the_budget_itself():
    rows = [{"batch": 1.5, "queued_tokens": 70.0, "queued_seen": 20.0, "cached": 333.0, "duty": 0.3, "rtt_s": 0.07}]
    got = estimate_of(view_of(fleet_with(), rows), 40.0, 5.0)
    ttft_s, tpot_s = float(got.ttft_s[0]), float(got.tpot_s[0])
    for ttft_budget, tpot_budget, feasible in (
        (ttft_s, tpot_s, True),
        (np.nextafter(ttft_s, 0.0), tpot_s, False),
        (ttft_s, np.nextafter(tpot_s, 0.0), False),
    ):
        fleet = fleet_with(slo_ttft_s=float(ttft_budget), slo_tpot_s=float(tpot_budget))
        assert bool(estimate_of(view_of(fleet, rows), 40.0, 5.0).feasible[0]) is feasible


def test_too_little_cache_for_one_request_still_counts_as_room_for_one():
    """m = max(1, floor(30/60)) = 1, so W = (1 + 0 + 1 - 1) * T_res, T_res = 10 * (0.01 + 0.002 + 0.0001)."""
    got = estimate_of(view_of(fleet_with(kv_capacity=30.0), [{"batch": 1.0}]), 40.0, 5.0)
    np.testing.assert_allclose(got.ttft_s, [0.121 + 0.0526], rtol=ROUNDED)


def random_views(n: int, n_dc: int, **fleet: float) -> list[tuple[View, float, float]]:
    """Views with busy and empty DCs, with a request each."""
    rng = np.random.default_rng(11)
    found = []
    for _ in range(n):
        rows = [
            {
                "batch": rng.choice([0.0, rng.uniform(0, 12)]),
                "queued_tokens": (seen := rng.choice([0.0, rng.uniform(1, 900)])) + rng.choice([0.0, rng.uniform(1, 300)]),
                "queued_seen": seen,
                "cached": rng.choice([0.0, rng.uniform(0, 9000)]),
                "duty": rng.choice([0.0, rng.uniform(0, 1), 1.0]),
                "ci": rng.uniform(1, 600),
                "pue": rng.uniform(1, 2),
                "rtt_s": rng.choice([0.0, rng.uniform(0, 0.2)]),
            }
            for _ in range(n_dc)
        ]
        means = (rng.uniform(1, 500), rng.uniform(1e4, 1e6), rng.uniform(1, 90))
        kv = rng.choice([100.0, 2000.0, 1e6])
        view = view_of(fleet_with(kv_capacity=kv, **fleet), rows, means)
        found.append((view, float(rng.integers(1, 2000)), float(rng.integers(1, 300))))
    return found


def test_estimates_by_brute_force():
    for view, isl, osl in random_views(60, 5):
        got = estimate_of(view, isl, osl)
        wanted = np.array(by_the_page(view, isl, osl))
        np.testing.assert_allclose(np.stack([got.ttft_s, got.tpot_s], axis=1), wanted, rtol=ROUNDED)
        np.testing.assert_array_equal(got.feasible, (wanted[:, 0] <= 1.0) & (wanted[:, 1] <= 1.0))


@eqx.filter_jit
def _choose(policy: Any, view: View, isl: Any, osl: Any, memory: Any) -> Any:
    return policy.choose(view, isl, osl, memory)


def choose(policy: AbstractRequestPolicy, view: View, isl: float, osl: float, memory: Any) -> tuple[int, Any]:
    """Place that a policy chooses, and its memory after it."""
    place, after = _choose(*as_arrays((policy, view, isl, osl, memory)))
    return int(place), after


def choice(policy: AbstractRequestPolicy, view: View, isl: float, osl: float) -> int:
    """Place that a policy chooses for its first request."""
    return choose(policy, view, isl, osl, policy.init(view.ci.shape[0]))[0]


@pytest.mark.parametrize("signal", ["ci", "pue_ci"])
def test_alpha_0_goes_to_the_cleanest(signal: str):
    for view, isl, osl in random_views(20, 3, slo_ttft_s=1e9, slo_tpot_s=1e9):
        carbon = view.ci if signal == "ci" else view.ci * view.pue
        assert choice(Greedy.of(0.0, signal=signal), view, isl, osl) == int(np.argmin(carbon))


@pytest.mark.parametrize("latency", LATENCIES)
def test_alpha_1_goes_to_the_quickest(latency: str):
    for view, isl, osl in random_views(20, 3, slo_ttft_s=1e9, slo_tpot_s=5e8):
        ttft, tpot = np.array(by_the_page(view, isl, osl)).T
        read = {"e2e": ttft + osl * tpot, "slo": ttft / 1e9 + tpot / 5e8, "ttft": ttft}[latency]
        assert choice(Greedy.of(1.0, latency), view, isl, osl) == int(np.argmin(read))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7, 1.0])
def test_greedy_by_brute_force(alpha: float):
    """Shares of the largest among the feasible; with none feasible, in turn, and that is counted."""
    fell_back = 0
    for view, isl, osl in random_views(40, 3, slo_ttft_s=1.0, slo_tpot_s=0.2):
        expected = by_the_page(view, isl, osl)
        feasible = [d for d, (ttft, tpot) in enumerate(expected) if ttft <= 1.0 and tpot <= 0.2]
        latency = [ttft + osl * tpot for ttft, tpot in expected]
        place, turn = choose(Greedy.of(alpha), view, isl, osl, jnp.int32(5))
        if feasible:
            longest, dirtiest = max(latency[d] for d in feasible), max(float(view.ci[d]) for d in feasible)
            score = {d: alpha * latency[d] / longest + (1 - alpha) * float(view.ci[d]) / dirtiest for d in feasible}
            assert (place, int(turn)) == (min(score, key=score.__getitem__), 5)
        else:
            fell_back += 1
            assert (place, int(turn)) == (2, 6)  # the sixth turn of three is the last DC's
            assert Greedy.of(alpha).fallbacks(turn).tolist() == [0, 6]
    assert 0 < fell_back < 40


def test_carbon_of_zero_is_a_value():
    view = view_of(fleet_with(), [{"ci": 0.0, "rtt_s": 0.2}, {"ci": 0.0}])
    assert choice(Greedy.of(0.0), view, 40.0, 5.0) == 0  # all alike: the first in the scheduler's order
    assert choice(Greedy.of(0.1), view, 40.0, 5.0) == 1  # carbon tells nothing, latency decides


def test_least_loaded_counts_running_and_queued():
    """B + q with q = Q_snap / E[isl]: 3 + 0, 1 + 100/50, 2 + 40/50; own dispatches count in B, not in Q again."""
    rows = [{"batch": 3.0}, {"batch": 1.0, "queued_seen": 100.0}, {"batch": 2.0, "queued_seen": 40.0, "queued_tokens": 4000.0}]
    assert choice(LeastLoaded(), view_of(fleet_with(), rows), 40.0, 5.0) == 2
    assert choice(LeastLoaded(), view_of(fleet_with(), rows[:2]), 40.0, 5.0) == 0  # 3 and 3: the first
