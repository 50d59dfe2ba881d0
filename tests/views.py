"""What a scheduler sees, made from a few round numbers, for policies worked by hand."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.engine.batch import Batch
from jaxserve.engine.control import View
from jaxserve.engine.model import Arrivals, Fleet
from jaxserve.engine.observe import belief_at
from jaxserve.engine.requests import StepRequests
from jaxserve.engine.state import Schedulers, Snapshot
from jaxserve.perf.latency import DecodeTime, PrefillTime
from jaxserve.perf.power import DecodeEnergy, PrefillEnergy
from tests.parity.bridge import fleet_of
from tests.parity.worlds import world

# A dozen float64 operations, in the same order but for products and sums that XLA contracts.
ROUNDED = 1e-12

# Little is computed in these tests, and a lot compiled.
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0}

PRE = {"tok_slope_below": 1e-3, "tok_slope_above": 2e-3, "tok_knee": 100.0, "b0": 0.01, "b1": 1e-3, "b2": 1e-6}
DEC = {"alpha0": 0.01, "alpha1": 2e-3, "alpha2": 1e-4, "beta0": 1e-5, "beta1": 1e-6, "beta2": 0.0}
E_PRE = {"e_pre0": 8.0, "e_pre_tok": 0.5, "e_pre_sq": 0.25}
E_DEC = {"e_dec0": 4.0, "e_dec_req": 1.0, "e_dec_kv": 0.5}
J_PER_KWH = 3.6e6


def t_pre(n: float, pieces: float, squares: float) -> float:
    """Prefill time by the letter of the page."""
    return 1e-3 * min(n, 100.0) + 2e-3 * max(n - 100.0, 0.0) + 0.01 + 1e-3 * pieces + 1e-6 * squares


def t_dec(b: float, k: float) -> float:
    """Decode time by the letter of the page."""
    return (0.01 + 1e-5 * (k / b)) + (2e-3 + 1e-6 * (k / b)) * b + 1e-4 * b * b


def fleet_with(**changes: Any) -> Fleet:
    """A fleet whose steps take and cost round numbers, believed to hold 4 requests an engine: 3 DCs, 2 schedulers."""
    usual = {"kv_capacity": 1e5, "batch_capacity": 4.0, "slo_ttft_s": 1.0, "slo_tpot_s": 1.0, "idle_w": 0.0, "max_w": 1e6}
    steps = {"prefill_time": PrefillTime(**PRE), "decode_time": DecodeTime(**DEC)}
    joules = {"prefill_energy": PrefillEnergy(**E_PRE), "decode_energy": DecodeEnergy(**E_DEC)}
    return dataclasses.replace(fleet_of(world(2)), **steps, **joules | usual | changes)


def view_of(fleet: Fleet, rows: list[dict[str, float]], means: tuple[float, float, float] = (50.0, 3000.0, 10.0)) -> View:
    """A view with one row of numbers a DC; what a row leaves out is an empty DC of one engine with PUE 1 at 100 g/kWh."""
    usual = {"batch": 0.0, "queued_tokens": 0.0, "queued_seen": 0.0, "spread": 0.0, "cached": 0.0, "duty": 0.0}
    usual |= {"ci": 100.0, "pue": 1.0, "rtt_s": 0.0, "engines": 1.0}
    assert all(set(row) <= set(usual) for row in rows)
    columns = {name: jnp.array([row.get(name, value) for row in rows]) for name, value in usual.items()}
    isl_mean, isl2_mean, osl_mean = (jnp.float64(mean) for mean in means)
    own = {"scheduler": jnp.int32(0), "now_s": jnp.float64(0.0), "fleet": fleet}
    return View(**columns, isl_mean=isl_mean, isl2_mean=isl2_mean, osl_mean=osl_mean, **own)


def batch_of(isl: list[float], osl: list[float] | float = 1.0, *, room: int = 6, dcs: int = 3) -> Batch:
    """A batch of these requests, with blank places up to `room`, that may go to any of `dcs` DCs."""
    pad, n = room - len(isl), len(isl)
    lengths = (np.broadcast_to(np.asarray(values, float), n) for values in (isl, osl))
    isl_, osl_ = (jnp.asarray(np.append(values, np.zeros(pad))) for values in lengths)
    here = jnp.arange(room) < n
    return Batch(isl=isl_, osl=osl_, here=here, now_s=jnp.where(here, 0.0, jnp.inf), window=jnp.int32(0), open=jnp.ones(dcs, bool))


def snapshot_of(rows: list[dict[str, float]]) -> Snapshot:
    """Polls with one row of numbers a DC; what a row leaves out is an empty DC at 100 g/kWh."""
    usual = {"batch": 0.0, "queued_tokens": 0.0, "cached": 0.0, "duty": 0.0, "ci": 100.0, "prefill_s": 0.0}
    assert all(set(row) <= set(usual) for row in rows)
    return Snapshot(**{name: jnp.array([row.get(name, value) for row in rows]) for name, value in usual.items()})


def schedulers_of(fleet: Fleet, memory: Any, snapshot: Snapshot, **changes: Any) -> Schedulers:
    """Schedulers that know the `snapshot` and have decided nothing yet; `memory` is that of one."""
    g, d = fleet.n_schedulers, fleet.n_dc
    pairs, each = jnp.zeros((g, d)), jnp.zeros(g)
    stacked = jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * g), memory)
    schedulers = Schedulers(
        belief=belief_at(fleet, snapshot, jnp.int32(0), pairs),
        weight=jnp.ones(g),
        others=pairs,
        reached=pairs,
        seen_own=pairs,
        seen_others=pairs,
        sent=pairs,
        sent_tokens=pairs,
        decided=each,
        isl_sum=each,
        isl2_sum=each,
        osl_sum=each,
        osl2_sum=each,
        memory=stacked,
    )
    return dataclasses.replace(schedulers, **changes)


def step_of(requests: list[list[tuple[float, float]]], *, room: int = 6) -> tuple[Arrivals, StepRequests]:
    """A step in which each scheduler decides one batch of requests (isl, osl) of at most `room`, one more batch being blank."""
    count = [len(mine) for mine in requests]
    start = np.concatenate([[0], np.cumsum(count)]).astype(np.int32)
    n, w = int(start[-1]), room * len(requests)
    isl, osl = (np.array([request[i] for mine in requests for request in mine] + [0.0] * (w + 1 - n)) for i in (0, 1))
    scheduler = np.append(np.repeat(np.arange(len(requests)), count), np.zeros(w + 1 - n)).astype(np.int32)
    ids = np.where(np.arange(w) < n, np.arange(w), w).astype(np.int32)
    arrivals = Arrivals(
        decision_s=jnp.asarray(np.where(np.arange(w + 1) < n, 0.0, np.inf)),
        isl=jnp.asarray(isl),
        osl=jnp.asarray(osl.astype(np.int32)),
        osl_believed=jnp.asarray(osl),
        scheduler=jnp.asarray(scheduler),
        window=jnp.asarray(np.where(np.arange(w + 1) < n, 0, -1).astype(np.int32)),
        by_scheduler=jnp.asarray(ids),
    )
    rank = (np.arange(w) - start[scheduler[:w]]).astype(np.int32)
    ends = np.stack([start[1:], start[1:]])
    own = (jnp.asarray(x) for x in (ids, start, ends, scheduler[:w], rank, arrivals.decision_s[ids], arrivals.window[ids]))
    return arrivals, StepRequests(*own, batch_requests=room)


def as_arrays(tree: Any) -> Any:
    """Every number as an array: a Python number would be compiled in, and compile again for the next."""
    return jax.tree.map(jnp.asarray, tree)
