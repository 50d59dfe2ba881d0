"""What every registered policy must keep to, and what each of them must choose."""

import dataclasses
import itertools
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.control import AbstractPolicy, AbstractRequestPolicy, StepRequests, View
from jaxserve.engine.model import Arrivals, Fleet
from jaxserve.engine.state import Schedulers, Snapshot
from jaxserve.perf.latency import DecodeTime, PrefillTime
from jaxserve.policies.estimate import estimate
from jaxserve.policies.greedy import LATENCIES, Greedy
from jaxserve.policies.registry import REGISTRY, build_policy, resolve_policies
from jaxserve.policies.simple import LeastLoaded, RoundRobin
from tests.parity.bridge import fleet_of
from tests.parity.worlds import world

# A dozen float64 operations, in the same order but for products and sums that XLA contracts.
ROUNDED = 1e-12
EVERY = list(REGISTRY)
WORLDS = (2, 3, 5, 6, 7)  # 3, 4, 6, 5 and 1 DCs; 2, 4, 3, 4 and 1 schedulers
ROOM = 96  # places of a step, more than are used


@dataclass(frozen=True)
class Moment:
    """All that a policy is given in one step."""

    fleet: Fleet
    arrivals: Arrivals
    snapshot: Snapshot
    schedulers: Schedulers
    requests: StepRequests


def default_policy(kind: str) -> AbstractPolicy:
    """The policy as a scenario that names no parameter gets it."""
    return build_policy(resolve_policies([{"kind": kind}])[0])


def random_moment(policy: AbstractPolicy, seed: int, world_seed: int) -> Moment:
    """A step of a fleet of the random worlds in the middle of a run, with up to `ROOM - 16` requests of all schedulers."""
    rng = np.random.default_rng(seed)
    fleet = fleet_of(world(world_seed))
    d, g = fleet.n_dc, fleet.n_schedulers
    n = int(rng.integers(1, ROOM - 16))
    scheduler = np.sort(rng.integers(0, g, n))
    start = np.searchsorted(scheduler, np.arange(g + 1))
    pad = ROOM - n
    arrivals = Arrivals(
        decision_s=jnp.asarray(np.append(np.sort(rng.uniform(0, 1, n)), np.full(pad + 1, np.inf))),
        isl=jnp.asarray(np.append(rng.integers(1, 2000, n), np.zeros(pad + 1)).astype(float)),
        osl=jnp.asarray(np.append(rng.integers(1, 400, n), np.zeros(pad + 1)).astype(np.int32)),
        scheduler=jnp.asarray(np.append(scheduler, np.zeros(pad + 1)).astype(np.int32)),
        by_scheduler=jnp.arange(ROOM, dtype=jnp.int32),
    )
    requests = StepRequests(
        request=jnp.asarray(np.append(np.arange(n), np.full(pad, ROOM)).astype(np.int32)),
        start=jnp.asarray(start.astype(np.int32)),
        scheduler=arrivals.scheduler[:ROOM],
        rank=jnp.asarray((np.arange(ROOM) - start[np.append(scheduler, np.zeros(pad, int))]).astype(np.int32)),
    )
    busy = rng.random() < 0.8
    snapshot = Snapshot(
        batch=jnp.asarray(busy * rng.uniform(0, 20, d)),
        queued_tokens=jnp.asarray(busy * rng.integers(0, 2, d) * rng.uniform(0, 5000, d)),
        cached=jnp.asarray(busy * rng.uniform(0, 20000, d)),
        duty=jnp.asarray(busy * rng.uniform(0, 1, d)),
        ci=jnp.asarray(rng.uniform(0, 600, d) * rng.integers(0, 2)),
        prefill_s=jnp.zeros(d),
    )
    decided = rng.integers(0, 3, g) * rng.integers(1, 50, g)
    schedulers = Schedulers(
        sent=jnp.asarray(rng.integers(0, 5, (g, d)).astype(float)),
        sent_tokens=jnp.asarray(rng.integers(0, 2000, (g, d)).astype(float)),
        decided=jnp.asarray(decided.astype(float)),
        isl_sum=jnp.asarray(decided * 300.0),
        isl2_sum=jnp.asarray(decided * 150000.0),
        osl_sum=jnp.asarray(decided * 90.0),
        memory=jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * g), policy.init()),
    )
    return Moment(fleet, arrivals, snapshot, schedulers, requests)


def _route(policy: AbstractPolicy, *moment: Any) -> tuple[jax.Array, Schedulers]:
    return policy.route(*moment)


_route_once = eqx.filter_jit(_route)
_route_lanes = eqx.filter_jit(eqx.filter_vmap(_route, in_axes=(None, 0, 0, 0, 0, 0)))


def as_arrays(tree: Any) -> Any:
    """Every number as an array: a Python number would be compiled in, and compile again for the next."""
    return jax.tree.map(jnp.asarray, tree)


def parts(moment: Moment) -> list[Any]:
    """The arguments of `route`."""
    return [as_arrays(part) for part in vars(moment).values()]


def route(policy: AbstractPolicy, moment: Moment) -> tuple[np.ndarray, Schedulers]:
    """Places of the step's requests (those of the empty places cut off), and the schedulers after it."""
    place, after = _route_once(as_arrays(policy), *parts(moment))
    assert place.shape == (ROOM,)
    assert jnp.issubdtype(place.dtype, jnp.integer)
    return np.asarray(place)[: int(moment.requests.start[-1])], after


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees have one structure and the same bits."""
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in leaves)


@cache
def moments(kind: str, world_seed: int) -> list[Moment]:
    """Random moments of one fleet, the same for every test."""
    return [random_moment(default_policy(kind), seed, world_seed) for seed in range(6)]


@pytest.mark.parametrize("world_seed", WORLDS)
@pytest.mark.parametrize("kind", EVERY)
class TestEveryPolicy:
    """The contract."""

    def test_places_exist(self, kind: str, world_seed: int):
        for moment in moments(kind, world_seed):
            place, _ = route(default_policy(kind), moment)
            assert np.all((place >= 0) & (place < moment.fleet.n_dc))

    def test_deterministic(self, kind: str, world_seed: int):
        moment = moments(kind, world_seed)[0]
        assert same_bits(route(default_policy(kind), moment), route(default_policy(kind), moment))

    def test_memory_keeps_its_form(self, kind: str, world_seed: int):
        """What goes round a scan: same structure, shapes and types after as before."""
        moment = moments(kind, world_seed)[0]
        before, after = moment.schedulers, route(default_policy(kind), moment)[1]
        assert jax.tree.structure(before) == jax.tree.structure(after)
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            assert (old.shape, old.dtype) == (new.shape, new.dtype)

    def test_maps_over_lanes(self, kind: str, world_seed: int):
        policy, three = default_policy(kind), moments(kind, world_seed)[:3]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(parts(moment) for moment in three))
        place, after = _route_lanes(as_arrays(policy), *stacked)
        for i, moment in enumerate(three):
            alone, memory = route(policy, moment)
            np.testing.assert_array_equal(place[i][: len(alone)], alone)
            for mine, theirs in zip(jax.tree.leaves(after), jax.tree.leaves(memory), strict=True):
                np.testing.assert_allclose(mine[i], theirs, rtol=ROUNDED)

    def test_names_of_dcs_do_not_matter(self, kind: str, world_seed: int):
        """A scheduler's order of DCs is cyclic, so a fleet with its DCs renumbered cyclically is the same fleet."""
        for moment in moments(kind, world_seed):
            fleet, by = moment.fleet, 1
            engines = fleet.n_engines
            members = np.roll(np.asarray(fleet.dc_members), by, axis=0)
            renumbered = dataclasses.replace(
                moment,
                fleet=dataclasses.replace(
                    fleet,
                    dc_members=members,
                    dc_first_engine=np.where(members[:, 0] < engines, members[:, 0], 0).astype(np.int32),
                    dc_engines=np.roll(np.asarray(fleet.dc_engines), by),
                    pue=np.roll(np.asarray(fleet.pue), by),
                    rtt_s=np.roll(np.asarray(fleet.rtt_s), by, axis=1),
                    poll_offset=np.roll(np.asarray(fleet.poll_offset), by),
                    first_dc=((np.asarray(fleet.first_dc) + by) % fleet.n_dc).astype(np.int32),
                ),
                snapshot=jax.tree.map(lambda leaf: jnp.roll(leaf, 1), moment.snapshot),
            )
            place, after = route(default_policy(kind), moment)
            place_renumbered, after_renumbered = route(default_policy(kind), renumbered)
            np.testing.assert_array_equal(place_renumbered, place)
            assert same_bits(after, after_renumbered)

    def test_step_by_step_as_all_at_once(self, kind: str, world_seed: int):
        """Requests of one step or of two in a row, with no poll between: the same places."""
        policy = default_policy(kind)
        for moment in moments(kind, world_seed):
            together, _ = route(policy, moment)
            start = np.asarray(moment.requests.start)
            cut = start[:-1] + np.diff(start) // 2  # each scheduler's first half, then its second
            schedulers, halves = moment.schedulers, np.full(len(together), -1)
            for first, last in ((start[:-1], cut), (cut, start[1:])):
                ids = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)]).astype(np.int32)
                count = last - first
                begin = np.concatenate([[0], np.cumsum(count)]).astype(np.int32)
                request = np.append(ids, np.full(ROOM - len(ids), ROOM)).astype(np.int32)
                scheduler = np.asarray(moment.arrivals.scheduler)[request]
                rank = (np.arange(ROOM) - begin[scheduler]).astype(np.int32)
                requests = StepRequests(*(jnp.asarray(x) for x in (request, begin, scheduler, rank)))
                place, schedulers = route(policy, dataclasses.replace(moment, schedulers=schedulers, requests=requests))
                halves[ids] = place
            np.testing.assert_array_equal(halves, together)

    def test_equal_dcs_share_the_load(self, kind: str, world_seed: int):
        """Where all DCs are alike and empty, the first choice is the scheduler's own DC, and its memory of it moves on from there."""
        policy, moment = default_policy(kind), moments(kind, world_seed)[0]
        fleet = moment.fleet
        alike = jnp.ones(fleet.n_dc)
        level = dataclasses.replace(
            moment,
            fleet=dataclasses.replace(fleet, rtt_s=np.zeros_like(fleet.rtt_s), pue=np.ones(fleet.n_dc)),
            snapshot=Snapshot(batch=0 * alike, queued_tokens=0 * alike, cached=0 * alike, duty=0 * alike, ci=alike, prefill_s=0 * alike),
            schedulers=dataclasses.replace(moment.schedulers, sent=0 * moment.schedulers.sent, sent_tokens=0 * moment.schedulers.sent),
        )
        place, _ = route(policy, level)
        start = np.asarray(moment.requests.start)
        assert np.all(place[start[:-1][np.diff(start) > 0]] == 0)


@pytest.mark.parametrize("kind", EVERY)
def test_registry(kind: str):
    table = resolve_policies([{"kind": kind}])[0]
    assert table["kind"] == kind
    assert table["label"].startswith(kind)
    policy = default_policy(kind)
    assert isinstance(policy, AbstractPolicy)
    assert isinstance(policy.observes, bool)


@pytest.mark.parametrize("world_seed", WORLDS)
def test_round_robin_deals_evenly(world_seed: int):
    policy = RoundRobin()
    for moment in moments("round_robin", world_seed):
        place, after = route(policy, moment)
        n_dc, start = moment.fleet.n_dc, np.asarray(moment.requests.start)
        for g, (a, b) in enumerate(itertools.pairwise(start)):
            np.testing.assert_array_equal(place[a:b], np.arange(b - a) % n_dc)
            dealt = np.bincount(place[a:b], minlength=n_dc)
            assert dealt.max() - dealt.min() <= 1
            assert int(after.memory[g]) == (b - a) % n_dc


# --- the estimator, and what greedy and least-loaded make of it ---

PRE = {"tok_slope_below": 1e-3, "tok_slope_above": 2e-3, "tok_knee": 100.0, "b0": 0.01, "b1": 1e-3, "b2": 1e-6}
DEC = {"alpha0": 0.01, "alpha1": 2e-3, "alpha2": 1e-4, "beta0": 1e-5, "beta1": 1e-6, "beta2": 0.0}


def fleet_with(**changes: Any) -> Fleet:
    """A fleet whose step times are round numbers, believed to hold 4 requests an engine."""
    fleet = fleet_of(world(2))
    usual = {"kv_capacity": 1e5, "batch_capacity": 4.0, "slo_ttft_s": 1.0, "slo_tpot_s": 1.0}
    return dataclasses.replace(fleet, prefill_time=PrefillTime(**PRE), decode_time=DecodeTime(**DEC), **usual | changes)


def view_of(fleet: Fleet, rows: list[dict[str, float]], means: tuple[float, float, float] = (50.0, 3000.0, 10.0)) -> View:
    """A view with one row of numbers a DC; what a row leaves out is an empty DC with PUE 1 at 100 g/kWh."""
    usual = {"batch": 0.0, "queued_tokens": 0.0, "queued_seen": 0.0, "cached": 0.0, "duty": 0.0, "ci": 100.0, "pue": 1.0, "rtt_s": 0.0}
    columns = {name: jnp.array([row.get(name, value) for row in rows]) for name, value in usual.items()}
    isl_mean, isl2_mean, osl_mean = (jnp.float64(mean) for mean in means)
    return View(**columns, isl_mean=isl_mean, isl2_mean=isl2_mean, osl_mean=osl_mean, fleet=fleet)


def t_pre(n: float, pieces: float, squares: float) -> float:
    """Prefill time by the letter of the page."""
    return 1e-3 * min(n, 100.0) + 2e-3 * max(n - 100.0, 0.0) + 0.01 + 1e-3 * pieces + 1e-6 * squares


def t_dec(b: float, k: float) -> float:
    """Decode time by the letter of the page."""
    return (0.01 + 1e-5 * (k / b)) + (2e-3 + 1e-6 * (k / b)) * b + 1e-4 * b * b


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
    return choose(policy, view, isl, osl, policy.init())[0]


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
    """Shares of the largest among the feasible; with none feasible, in turn."""
    fell_back = 0
    for view, isl, osl in random_views(40, 3, slo_ttft_s=1.0, slo_tpot_s=0.2):
        expected = by_the_page(view, isl, osl)
        feasible = [d for d, (ttft, tpot) in enumerate(expected) if ttft <= 1.0 and tpot <= 0.2]
        latency = [ttft + osl * tpot for ttft, tpot in expected]
        place, turn = choose(Greedy.of(alpha), view, isl, osl, jnp.int32(2))
        if feasible:
            longest, dirtiest = max(latency[d] for d in feasible), max(float(view.ci[d]) for d in feasible)
            score = {d: alpha * latency[d] / longest + (1 - alpha) * float(view.ci[d]) / dirtiest for d in feasible}
            assert (place, int(turn)) == (min(score, key=score.__getitem__), 2)
        else:
            fell_back += 1
            assert (place, int(turn)) == (2, 0)  # the last of three, and round again
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
