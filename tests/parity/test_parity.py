"""The vectorised engine against the event-driven reference, request by request, entry by entry, poll by poll; and laws that hold whatever
the reference says: nothing is lost, served twice or overfull, and time and tokens add up.

All in one file, so that one process runs the worlds.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from jaxserve.collect import EnergyLedger
from jaxserve.engine import simulate
from jaxserve.engine.lane import Advance
from jaxserve.errors import InputError
from jaxserve.scenario.compile import Compiled
from jaxserve.units import J_PER_KWH
from tests.oracle.energy import interval_windows
from tests.oracle.equations import e_dec, t_dec
from tests.oracle.model import OracleScenario
from tests.oracle.random_scenarios import KINDS
from tests.parity.bridge import EngineResult, by_interval, fleet_of, policy_of, run_engine, run_lanes, sizes_of, step_windows_of
from tests.parity.worlds import OTHERS, PADDED, PIECEWISE, SEEDS, Group, group_step_windows, groups, reference, result, run_batch, world

# The engine and the reference add the same few thousand float64 terms in another order; either is some 1e-13 off at most,
# while a step, a token or an admission too many shows at 1e-5 of the scale or more.
EXACT = 1e-9
# One program or another, the engine does the same operations; XLA may contract a product and a sum in one of them.
SAME_ENGINE = 1e-12
# Sums of some thousand shares of float64 steps cut at interval edges.
SUMMED = 1e-9

TIMES = ("dc_arrival_s", "admit_s", "first_token_s", "finish_s")
PLACES = ("dc", "node", "engine")
ALL = [seed for seeds in groups().values() for seed in seeds]
# Alone, in their own policy and their own longest steps: three programs, the first of which test_invariance uses too.
# Kind 2: greedy, steps of 2 windows; kind 6: least loaded, steps of 9; and round-robin, steps of 45.
SINGLES = (9, 30, 37, 128, 184, 191, 104, 125, 202, 6, 90)


def test_every_seed_is_compared_once():
    assert sorted(ALL) == [*SEEDS, *OTHERS]
    assert len(SEEDS) >= 200
    assert {seed % len(KINDS) for seed in ALL} == set(range(len(KINDS)))
    forms = [world(seed).t_pre.get("form") for seed in OTHERS]
    assert forms.count("piecewise") + forms.count("table") >= 20 and forms.count(None) >= 20


def test_steps_are_padded_where_it_matters():
    """In most worlds that pad, steps hold prompts of several lengths: some requests end at another time."""
    changed = [reference(seed).finish_s != reference(seed - PADDED).finish_s for seed in OTHERS if seed < PIECEWISE]
    assert sum(changed) > len(changed) / 2


@pytest.mark.parametrize("seed", ALL)
def test_requests(seed: int):
    expected, got = reference(seed), result(seed)
    for name in PLACES:
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)
    for name in TIMES:
        wanted = np.array(getattr(expected, name))
        worst = np.max(np.abs(getattr(got, name) - wanted) / np.maximum(1.0, np.abs(wanted)))
        assert worst < EXACT, name


@pytest.mark.parametrize("seed", ALL)
def test_energy_ledger(seed: int):
    s, expected, got = world(seed), reference(seed), result(seed)
    kept = s.horizon_windows // got.step_windows
    first = np.arange(0, kept, s.ledger_windows // got.step_windows)
    idle_j = got.idle_s * s.idle_w_per_gpu * s.tp
    for name, per_step in (("prefill_j", got.prefill_j), ("decode_j", got.decode_j), ("idle_j", idle_j)):
        entries = np.add.reduceat(per_step[:kept], first, axis=0)
        wanted = by_interval(s, expected, name)
        assert np.max(np.abs(entries - wanted)) <= EXACT * np.max(wanted), name
    assert got.above_board == expected.above_board
    drain_j = got.prefill_j[kept:].sum() + got.decode_j[kept:].sum()
    assert drain_j == pytest.approx(expected.drain_energy_j, rel=EXACT, abs=EXACT)


def ledger_of(s: OracleScenario, got: EngineResult) -> EnergyLedger:
    """The ledger of a run, as `jaxserve run` makes it."""
    scenario = SimpleNamespace(
        coefficients=SimpleNamespace(
            power=SimpleNamespace(idle_w_per_gpu=s.idle_w_per_gpu, host_w=s.host_w), setup=SimpleNamespace(tp=s.tp)
        ),
        sites=[SimpleNamespace(name=f"site {d}", nodes=nodes, pue=pue) for d, (nodes, pue) in enumerate(zip(s.nodes, s.pue, strict=True))],
        dispatch=SimpleNamespace(window_s=s.window_s),
    )
    compiled = SimpleNamespace(
        scenario=scenario,
        fleet=fleet_of(s),
        interval_windows=np.array(interval_windows(s)),
        ci=lambda times_s: np.array([s.ci(round(t / s.window_s)) for t in times_s]),
    )
    ledger = EnergyLedger(cast(Compiled, compiled), got.step_windows)
    chunks = np.array_split(np.arange(len(got.idle_s)), 3)
    for steps in chunks:
        columns = {name: getattr(got, name)[steps] for name in ("prefill_j", "decode_j", "idle_s")}
        ledger.add(cast(Advance, SimpleNamespace(first_step=steps[0], **columns)))
    return ledger


def test_carbon():
    """Wherever all changes of carbon intensity fall on the edges of a group's steps, within ledger intervals too."""
    compared = 0
    for seed in ALL:
        s, expected, got = world(seed), reference(seed), result(seed)
        windows = interval_windows(s)
        if any(k % got.step_windows for k in windows):
            continue
        ledger = ledger_of(s, got)
        frame = ledger.frame()
        assert frame["interval_start_s"].tolist() == [k * s.window_s for k in windows[:-1] for _ in s.nodes]
        wanted = np.array([[dc["carbon_g"] for dc in interval] for interval in expected.ledger])
        assert np.max(np.abs(frame["carbon_g"].to_numpy() - wanted.ravel())) <= EXACT * np.max(wanted), seed
        last_ci = frame["ci_g_per_kwh"].to_numpy()[-len(s.nodes) :]
        drain_g = float((np.array(s.pue) * last_ci * ledger.drain_j).sum()) / J_PER_KWH
        assert drain_g == pytest.approx(expected.drain_carbon_g, rel=EXACT, abs=EXACT)
        compared += any(k % s.ledger_windows for k in windows[:-1])
    assert compared >= 30


def test_boards_hold_some_steps_and_idling_others():
    """Both bounds of step energy bind in these worlds, each on many steps and in many worlds, and neither on all."""
    above = [reference(seed).above_board for seed in ALL]
    assert sum(n > 0 for n in above) > 30 < sum(n == 0 for n in above)
    held = 0
    for seed in ALL:
        s = world(seed)
        least_w = s.idle_w_per_gpu * s.tp
        asked = [e_dec(s.e_dec, b, b * min(s.isl)) / t_dec(s.t_dec, b, b * min(s.isl)) for b in range(1, s.max_num_seqs + 1)]
        held += min(asked) < least_w
    assert held > 40


@pytest.mark.parametrize("seed", ALL)
def test_engine_seconds(seed: int):
    s, expected = world(seed), reference(seed)
    wanted = np.array([expected.prefill_s, expected.decode_s, expected.idle_s])
    assert np.max(np.abs(result(seed).engine_s - wanted)) <= EXACT * s.horizon_windows * s.window_s


@pytest.mark.parametrize("seed", ALL)
def test_polls(seed: int):
    expected, got = reference(seed), result(seed)
    window, dc, *wanted = (np.array(column) for column in zip(*expected.polls, strict=True))
    assert not np.any(window % got.step_windows)
    seen = got.seen[window // got.step_windows, :, dc]
    for name, column, truth in zip(("B", "Q", "K", "duty"), seen.T, wanted, strict=True):
        assert np.max(np.abs(column - truth)) <= EXACT * max(1.0, np.max(truth)), name


@pytest.mark.parametrize("seed", SINGLES)
def test_alone_as_among_others(seed: int):
    """A run by itself is another program than a lane (other policy class, other steps), and must not be another engine."""
    alone, lane = run_engine(world(seed)), result(seed)
    for name in PLACES:
        np.testing.assert_array_equal(getattr(alone, name), getattr(lane, name), err_msg=name)
    for name in TIMES:
        np.testing.assert_allclose(getattr(alone, name), getattr(lane, name), rtol=SAME_ENGINE, atol=SAME_ENGINE, err_msg=name)
    for name in ("prefill_j", "decode_j"):
        total = _total(lane, name)
        np.testing.assert_allclose(_total(alone, name), total, rtol=0, atol=SAME_ENGINE * max(1.0, total.max()), err_msg=name)


def _total(run: EngineResult, name: str) -> np.ndarray:
    """Sum by DC over the whole run; the last of the lanes goes on, idle, until all have finished."""
    return getattr(run, name).sum(axis=0)


def engine_number(run: EngineResult) -> np.ndarray:
    """One number for each engine, the same for requests that share one."""
    return np.unique(np.stack([run.dc, run.node, run.engine]), axis=1, return_inverse=True)[1].ravel()


@pytest.mark.parametrize("seed", ALL)
def test_each_request_ends_once_and_in_order(seed: int):
    s, run = world(seed), result(seed)
    # `collect` has checked that the requests come out as 0, 1, ..., each once.
    osl = np.array(s.osl)
    assert len(run.finish_s) == len(osl)
    assert np.all(np.isfinite(run.finish_s))
    assert np.all(np.array(s.arrival_s) <= run.dc_arrival_s)
    assert np.all(run.dc_arrival_s <= run.admit_s)
    assert np.all(run.admit_s < run.first_token_s)
    np.testing.assert_array_equal(run.first_token_s == run.finish_s, osl == 1)
    assert np.all(run.first_token_s <= run.finish_s)


@pytest.mark.parametrize("seed", ALL)
def test_queues_are_fair_and_limits_hold(seed: int):
    s, run = world(seed), result(seed)
    order = np.lexsort((np.arange(len(run.dc)), run.dc_arrival_s))
    for dc, (nodes, per_node) in enumerate(zip(s.nodes, s.engines_per_node, strict=True)):
        here = order[run.dc[order] == dc]
        turn = np.arange(len(here))
        np.testing.assert_array_equal(run.node[here], turn % nodes)
        np.testing.assert_array_equal(run.engine[here], turn // nodes % per_node)
    number, footprint = engine_number(run), np.array(s.isl) + np.array(s.osl)
    for engine in range(number.max() + 1):
        mine = order[number[order] == engine]
        admit_s, finish_s = run.admit_s[mine], run.finish_s[mine]
        assert np.all(np.diff(admit_s) >= 0)  # first come, first served
        held = (admit_s[None, :] <= admit_s[:, None]) & (finish_s[None, :] > admit_s[:, None])
        assert held.sum(axis=1).max() <= s.max_num_seqs
        assert (held @ footprint[mine]).max() <= s.kv_capacity_tokens


@pytest.mark.parametrize("seed", ALL)
def test_nothing_is_lost_between_arrival_and_end(seed: int):
    s, run = world(seed), result(seed)
    end_s = (np.arange(1, len(run.under_way) + 1) * run.step_windows) * s.window_s
    arrived = np.searchsorted(s.arrival_s, end_s, side="left")  # who arrives on an edge belongs to the step that begins there
    finished = np.searchsorted(np.sort(run.finish_s), end_s, side="right")
    inside = run.running.sum(axis=1) + run.queued.sum(axis=1) + run.under_way
    np.testing.assert_array_equal(inside + finished, arrived)
    for dc in range(len(s.nodes)):
        reached, admitted, gone = (
            np.searchsorted(np.sort(times[run.dc == dc]), end_s, side=side)
            for times, side in ((run.dc_arrival_s, "left"), (run.admit_s, "left"), (run.finish_s, "right"))
        )
        np.testing.assert_array_equal(run.queued[:, dc], reached - admitted)
        np.testing.assert_array_equal(run.running[:, dc], admitted - gone)


@pytest.mark.parametrize("seed", ALL)
def test_engines_account_for_all_their_time(seed: int):
    s, run = world(seed), result(seed)
    horizon_s = s.horizon_windows * s.window_s
    assert np.all(run.engine_s >= 0)
    np.testing.assert_allclose(run.engine_s.sum(axis=0), horizon_s, rtol=SUMMED)
    engines = np.array(s.nodes) * np.array(s.engines_per_node)
    idle_s = run.idle_s[: s.horizon_windows // run.step_windows].sum(axis=0)
    np.testing.assert_allclose(idle_s.sum(), run.engine_s[2].sum(), rtol=SUMMED, atol=SUMMED)
    assert np.all(idle_s <= engines * horizon_s * (1 + SUMMED))


@pytest.mark.parametrize("group", [group for group in groups() if group[-1] == "sum"])  # padding is served, and nobody asked for it
def test_tokens_served_are_tokens_asked(group: Group):
    """With 1 J a token the energy counts tokens: the same world as two lanes, whose joules count two things each.

    Prefill: prompt tokens, and their squares, which a prompt keeps however it is split. Decode: tokens after the first,
    and the cached tokens that each of them reads.
    """
    seeds = groups()[group]
    decoding = [seed for seed in seeds if max(world(seed).osl) > 1]
    by_end = sorted(decoding, key=lambda seed: max(reference(seed).finish_s) / world(seed).window_s)
    s = world(by_end[len(by_end) // 2])
    s = replace(s, idle_w_per_gpu=0.0, max_w_per_gpu=1e9)  # which hold no step
    none_pre, none_dec = dict.fromkeys(s.e_pre, 0.0), dict.fromkeys(s.e_dec, 0.0)
    tokens = replace(s, e_pre=none_pre | {"e_pre_tok": 1.0}, e_dec=none_dec | {"e_dec_req": 1.0})
    context = replace(s, e_pre=none_pre | {"e_pre_sq": 1.0}, e_dec=none_dec | {"e_dec_kv": 1.0})
    isl, osl = np.array(s.isl), np.array(s.osl)
    asked = (
        (isl.sum(), (osl - 1).sum()),
        ((isl**2).sum(), sum(a + j for a, b in zip(s.isl, s.osl, strict=True) for j in range(1, b))),
    )
    for run, (prefill, decode) in zip(run_batch([tokens, context], group_step_windows(seeds)), asked, strict=True):
        assert run.prefill_j.sum() == pytest.approx(prefill, rel=SUMMED)
        assert run.decode_j.sum() == pytest.approx(decode, rel=SUMMED)


def test_engines_whose_steps_last_no_time_are_refused(monkeypatch: pytest.MonkeyPatch):
    """Buffers must not grow for ever: with a limit below what the run needs, it ends in a sentence."""
    monkeypatch.setattr(simulate, "MOST_PASSES", 2)
    s = world(0)
    policy = policy_of(s)
    with pytest.raises(InputError, match="last \\(nearly\\) no time"):
        run_lanes([s], [policy], sizes_of(s, step_windows_of(s, policy.observes), passes=3))
