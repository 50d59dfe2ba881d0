"""Every shipped file draws what a GPU can: between idle and board power, more the more it works, and no less for more load."""

from pathlib import Path

import numpy as np
import pytest

from calibration_fit.power_table import decode_w, power_table, prefill_w
from jaxserve.perf.coefficients import Coefficients, load_coefficients, shipped_names

FILES = shipped_names()
BATCH = np.unique(np.round(np.geomspace(1, 512, 60)))
CONTEXT = np.array([1.0, 64.0, 300.0, 900.0, 4000.0, 32_000.0])
ROUNDING = 1e-6  # coefficients have seven digits
LOADS = {"dense": (843.0, 71.0), "Mixtral-8x7B": (195.0, 211.0)}
"""Mean prompt and output tokens of the study's traces."""


@pytest.fixture(params=FILES)
def c(request: pytest.FixtureRequest) -> Coefficients:
    return load_coefficients(request.param)


def steps(c: Coefficients) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """W a GPU that the energy forms ask for, and that runs charge, over dense grids far beyond what was measured."""
    batch, context = (x.ravel() for x in np.meshgrid(BATCH, CONTEXT))
    tokens, length = (x.ravel() for x in np.meshgrid(np.geomspace(1, 1e5, 80), np.geomspace(1, 3e4, 40)))
    tokens, length = tokens[tokens >= length], length[tokens >= length]
    cached, square = batch * context, tokens * length
    decode = np.asarray(c.decode_energy_model()(batch, cached) / c.decode_time_model()(batch, cached)) / c.setup.tp
    prefill_s = np.asarray(c.prefill_time_model()(tokens, tokens / length, square))
    prefill = np.asarray(c.prefill_energy_model()(tokens, square)) / prefill_s / c.setup.tp
    return {"decode": (decode, decode_w(c, batch, context)), "prefill": (prefill, prefill_w(c, tokens, length))}


def test_no_step_draws_less_than_idling_or_more_than_the_board(c: Coefficients):
    idle, board = c.power.idle_w_per_gpu, c.power.max_w_per_gpu
    for phase, (asked, charged) in steps(c).items():
        assert asked.max() <= board * (1 + ROUNDING), phase  # by the coefficients themselves: there is nothing to cap
        assert idle * (1 - ROUNDING) <= charged.min() <= charged.max() <= board * (1 + ROUNDING), phase
    decode, _ = steps(c)["decode"]
    assert decode.min() >= idle * (1 - ROUNDING)


def test_decode_power_never_falls_with_the_batch(c: Coefficients):
    watts = decode_w(c, *(x.ravel() for x in np.meshgrid(BATCH, CONTEXT, indexing="ij"))).reshape(len(BATCH), len(CONTEXT))
    assert np.all(np.diff(watts, axis=0) >= -ROUNDING * watts[1:])


def test_prefill_comes_near_board_power_once_it_is_saturated(c: Coefficients):
    tokens = np.geomspace(32.0, 8192.0, 100)
    watts = prefill_w(c, tokens, np.minimum(tokens, 2048.0))
    assert watts.max() > 0.93 * c.power.max_w_per_gpu


def test_round_robin_spends_no_less_at_a_higher_load(c: Coefficients):
    """Watts of an engine that is dealt requests evenly, by Little's law: prefill takes its share of the time, decode the rest with the
    batch that keeps up with the arrivals, or one request at a time with idling between.
    """
    isl, osl = LOADS.get(c.setup.model, LOADS["dense"])
    context, generated = isl + osl / 2, osl - 1
    prompt_s = float(c.prefill_time_model()(isl, 1.0, isl * isl))
    prompt_w = float(prefill_w(c, np.array([isl]), np.array([isl]))[0])
    batch = np.linspace(1.0, 256.0, 2000)
    step_s = np.asarray(c.decode_time_model()(batch, batch * context))
    step_w = decode_w(c, batch, np.full_like(batch, context))
    # Requests a second with a batch of B: B tokens a step in the time that prefill leaves.
    full = batch / step_s / generated
    rate = full / (1.0 + full * prompt_s)
    watts = rate * prompt_s * prompt_w + (1.0 - rate * prompt_s) * step_w
    light = np.linspace(0.0, 1.0, 50)[:-1] * rate[0]
    decoding = light * generated * step_s[0]
    idle = 1.0 - decoding - light * prompt_s
    watts = np.concatenate([light * prompt_s * prompt_w + decoding * step_w[0] + idle * c.power.idle_w_per_gpu, watts])
    rate = np.concatenate([light, rate])
    assert np.all(np.diff(rate) > 0) and idle.min() > 0
    assert np.all(np.diff(watts) >= -ROUNDING * watts[1:])
    assert watts[0] == pytest.approx(c.power.idle_w_per_gpu)


def test_what_is_taken_over_from_another_setup_comes_in_two_ways():
    """Every file with decode energy of other runs than its times has a second, and both say how."""
    twins = [name for name in FILES if f"{name}_same-power" in FILES]
    for name in FILES:
        c = load_coefficients(name.removesuffix("_same-power"))
        (source,) = (s for s in c.source if s.table == "decode_energy")
        assert source.extrapolated == (name.removesuffix("_same-power") in twins)
        if name in twins:
            other = load_coefficients(f"{name}_same-power")
            assert (other.prefill_time, other.decode_time, other.power) == (c.prefill_time, c.decode_time, c.power)
            assert other.decode_energy != c.decode_energy
            (said,) = (s.text for s in other.source if s.table == "decode_energy")
            assert "power of a GPU" in said and "above idle" in source.text
    assert {"mixtral-8x7b_tp4_a100", "qwen2.5-7b_tp1_a100"} <= set(twins)


def test_the_page_holds_the_table_of_the_files_that_ship():
    page = Path(__file__).parents[2] / "notebooks" / "validation.md"
    assert power_table() in page.read_text(encoding="utf-8")
