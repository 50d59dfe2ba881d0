"""Steps in the middle of a run, at random, with all that a policy is given in one: few shapes, so that few programs are compiled."""

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.engine.control import AbstractPolicy
from jaxserve.engine.lane import Requests
from jaxserve.engine.lanes import LANES
from jaxserve.engine.model import Arrivals, Fleet
from jaxserve.engine.requests import StepRequests
from jaxserve.engine.state import Schedulers, Snapshot
from jaxserve.policies.plans import Outlook
from jaxserve.policies.registry import build_policy, resolve_policies
from tests.parity.bridge import fleet_of
from tests.parity.worlds import world
from tests.views import QUICK_TO_COMPILE, as_arrays, schedulers_of

ROOM = 48  # places of a step and of a batch
BATCHES = 2  # of a scheduler in a step
SHAPES = {"four": (3, 10, 17), "one": (7,)}
"""Random worlds of one shape each: 4 DCs, of which one has 4 engines, and 4 schedulers; a single DC and scheduler."""
MOMENTS = {"four": 9, "one": 3}
HORIZON_S = 5400.0  # three half hours


@dataclass(frozen=True)
class Moment:
    """All that a policy is given in one step."""

    fleet: Fleet
    arrivals: Arrivals
    snapshot: Snapshot
    schedulers: Schedulers
    requests: StepRequests

    @property
    def counts(self) -> np.ndarray:
        """Requests of each scheduler."""
        return np.diff(np.asarray(self.requests.start))


@cache
def outlook(world_seed: int) -> Outlook:
    """What plans may know: two hundred requests over an hour and a half, and grids that change."""
    rng, fleet = np.random.default_rng(world_seed), fleet_of(world(world_seed))
    arrival_s = np.sort(rng.uniform(0.0, HORIZON_S, 200))
    isl, osl, base = rng.integers(1, 2000, 200), rng.integers(1, 400, 200), rng.uniform(20.0, 600.0, fleet.n_dc)
    requests = Requests(arrival_s, arrival_s, isl, osl, rng.integers(0, fleet.n_schedulers, 200))
    sites = tuple(f"dc{d}" for d in range(fleet.n_dc))
    return Outlook(sites, fleet, requests, lambda t: np.roll(base, 1) + t[:, None] * base / HORIZON_S, HORIZON_S, False)


@cache
def default_policy(kind: str, world_seed: int) -> AbstractPolicy:
    """The policy as a scenario that names no parameter gets it."""
    policy = build_policy(resolve_policies([{"kind": kind}])[0], outlook(world_seed))
    assert isinstance(policy, AbstractPolicy)
    return policy


def step_requests(arrivals: Arrivals, first: np.ndarray, last: np.ndarray, cut: np.ndarray) -> StepRequests:
    """A step with the requests first..last of each scheduler [G], in one batch or, where there are any after `cut`, two."""
    ids = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)]).astype(np.int32)
    start = np.concatenate([[0], np.cumsum(last - first)]).astype(np.int32)
    request = np.append(ids, np.full(ROOM - len(ids), ROOM)).astype(np.int32)
    scheduler = np.asarray(arrivals.scheduler)[request]
    ends = np.stack([start[:-1] + cut - first, start[1:]]).astype(np.int32)
    rank = (np.arange(ROOM) - start[scheduler]).astype(np.int32)
    columns = (request, start, ends, scheduler, rank, arrivals.decision_s[request], arrivals.window[request])
    return StepRequests(*(jnp.asarray(column) for column in columns), batch_requests=ROOM)


def random_moment(policy: AbstractPolicy, seed: int, world_seed: int) -> Moment:
    """A step of a fleet of the random worlds in the middle of a run, with up to `ROOM` requests of all schedulers.

    Budgets are tight, or nothing is over them; engines are empty, busy or full.
    """
    rng = np.random.default_rng(seed)
    fleet = fleet_of(world(world_seed))
    d, g = fleet.n_dc, fleet.n_schedulers
    loose = rng.random() < 0.5
    budgets = (
        {"slo_ttft_s": 1e9, "slo_tpot_s": 1e9} if loose else {"slo_ttft_s": 4.0 * fleet.slo_ttft_s, "slo_tpot_s": 4.0 * fleet.slo_tpot_s}
    )
    fleet = dataclasses.replace(fleet, **budgets, ledger_kept=np.bool_(rng.random() < 0.7), view_aged=np.bool_(rng.random() < 0.5))
    n = int(rng.integers(1, ROOM + 1))
    scheduler = np.sort(rng.integers(0, g, n))
    pad = ROOM - n
    osl = rng.integers(1, 400, n)
    window = np.sort(rng.integers(0, 3, n))
    arrivals = Arrivals(
        decision_s=jnp.asarray(np.append(np.sort(rng.uniform(0, HORIZON_S, n)), np.full(pad + 1, np.inf))),
        isl=jnp.asarray(np.append(rng.integers(1, 2000, n), np.zeros(pad + 1)).astype(float)),
        osl=jnp.asarray(np.append(osl, np.zeros(pad + 1)).astype(np.int32)),
        osl_believed=jnp.asarray(np.append(osl * rng.uniform(0.5, 2.0, n), np.zeros(pad + 1))),
        scheduler=jnp.asarray(np.append(scheduler, np.zeros(pad + 1)).astype(np.int32)),
        window=jnp.asarray(np.append(window, np.full(pad + 1, -1)).astype(np.int32)),
        by_scheduler=jnp.arange(ROOM, dtype=jnp.int32),
    )
    start = np.searchsorted(scheduler, np.arange(g + 1))
    busy, tokens = rng.random() < 0.8, rng.random() < 0.5
    full = rng.choice([0.6, 1.0, 1.2]) * float(fleet.batch_capacity)
    snapshot = Snapshot(
        batch=jnp.asarray(busy * rng.uniform(0, full, d)),
        queued_tokens=jnp.asarray(busy * tokens * rng.integers(0, 2, d) * rng.uniform(0, 5000, d)),
        cached=jnp.asarray(busy * rng.uniform(0, 20000, d)),
        duty=jnp.asarray(busy * rng.uniform(0, 1, d)),
        ci=jnp.asarray(rng.uniform(0, 600, d) * (rng.random() < 0.8)),
        prefill_s=jnp.zeros(d),
    )
    decided = rng.integers(0, 3, g) * rng.integers(1, 50, g)
    schedulers = schedulers_of(
        fleet,
        policy.init(d),
        snapshot,
        weight=jnp.asarray(rng.uniform(1.0, g, g)),
        others=jnp.asarray(rng.uniform(0.0, 20.0, (g, d))),
        sent=jnp.asarray(rng.integers(0, 3, (g, d)).astype(float)),
        sent_tokens=jnp.asarray(rng.integers(0, 2000, (g, d)).astype(float)),
        decided=jnp.asarray(decided.astype(float)),
        isl_sum=jnp.asarray(decided * 300.0),
        isl2_sum=jnp.asarray(decided * 150000.0),
        osl_sum=jnp.asarray(decided * 90.0),
        osl2_sum=jnp.asarray(decided * 9000.0),
    )
    return Moment(fleet, arrivals, snapshot, schedulers, step_requests(arrivals, start[:-1], start[1:], start[1:]))


def levelled(moment: Moment) -> Moment:
    """The same requests with all DCs alike, near, empty and of one fast engine, within any budget; nothing has been decided yet."""
    fleet, zeros = moment.fleet, jnp.zeros(moment.fleet.n_dc)
    alike = {
        "view_aged": np.bool_(False),
        "rtt_s": np.zeros_like(fleet.rtt_s),
        "pue": np.ones(fleet.n_dc),
        "dc_engines": np.ones(fleet.n_dc, np.int32),
    }
    alike |= {name: jax.tree.map(lambda s: 1e-3 * s, getattr(fleet, name)) for name in ("prefill_time", "decode_time")}
    snapshot = Snapshot(batch=zeros, queued_tokens=zeros, cached=zeros, duty=zeros, ci=zeros + 100.0, prefill_s=zeros)
    return dataclasses.replace(
        moment,
        fleet=dataclasses.replace(fleet, **alike, slo_ttft_s=1e9, slo_tpot_s=1e9, batch_capacity=1000.0),
        snapshot=snapshot,
        schedulers=dataclasses.replace(jax.tree.map(jnp.zeros_like, moment.schedulers), weight=jnp.ones(fleet.n_schedulers)),
    )


@cache
def moments(kind: str, shape: str) -> list[tuple[AbstractPolicy, Moment]]:
    """Random moments of the fleets of one shape, the same for every test."""
    seeds = SHAPES[shape]
    pairs = [(seed, default_policy(kind, seeds[seed % len(seeds)])) for seed in range(MOMENTS[shape])]
    return [(policy, random_moment(policy, seed, seeds[seed % len(seeds)])) for seed, policy in pairs]


def _route(policy: AbstractPolicy, *moment: Any) -> tuple[jax.Array, Schedulers, Any]:
    return policy.route(*moment)


_route_once = jax.jit(_route, compiler_options=QUICK_TO_COMPILE)
route_lanes = jax.jit(jax.vmap(_route, axis_name=LANES), compiler_options=QUICK_TO_COMPILE)


def parts(moment: Moment) -> list[Any]:
    """The arguments of `route`."""
    return [as_arrays(part) for part in vars(moment).values()]


def route(policy: AbstractPolicy, moment: Moment) -> tuple[np.ndarray, Schedulers, Any]:
    """Places of the step's requests (those of the empty places cut off), the schedulers after it, and what is told."""
    place, after, told = _route_once(as_arrays(policy), *parts(moment))
    assert place.shape == (ROOM,)
    assert jnp.issubdtype(place.dtype, jnp.integer)
    return np.asarray(place)[: int(moment.requests.start[-1])], after, told


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees have one structure and the same bits."""
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in leaves)
