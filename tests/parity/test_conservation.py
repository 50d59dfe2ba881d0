"""Laws that hold whatever the reference says: nothing is lost, served twice or overfull, and time and tokens add up."""

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.engine import simulate
from jaxserve.errors import InputError
from tests.parity.bridge import EngineResult, policy_of, run_lanes, sizes_of, step_windows_of
from tests.parity.worlds import Group, group_step_windows, groups, reference, result, run_batch, world

# Sums of some thousand shares of float64 steps cut at interval edges.
SUMMED = 1e-9
ALL = [seed for seeds in groups().values() for seed in seeds]


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
    none_pre, none_dec = dict.fromkeys(s.e_pre, 0.0), dict.fromkeys(s.e_dec, 0.0)
    s = replace(s, idle_w_per_gpu=0.0, max_w_per_gpu=1e9)  # which hold no step
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
