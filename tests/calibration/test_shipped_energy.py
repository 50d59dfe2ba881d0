"""Energies of the shipped files: what comes over from runs to our step times, and powers that stay between idle and board."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from calibration_fit.forms import NO_KNOT
from calibration_fit.regenerate import QWEN, with_host_time
from calibration_fit.shipped_energy import A100, LLAMA, Runs, by_power, by_work, decode_energy, from_llama, prefill_energy
from jaxserve.perf.latency import DecodeTime, PiecewisePrefillTime, PrefillTime, TwoPieceDecodeTime
from jaxserve.perf.power import DecodeEnergy, PrefillEnergy
from tests.calibration.helpers import synthetic

TIME = DecodeTime(14e-3, 1e-4, 0.0, 0.0, 1.2e-7, 0.0)
STEEP = TwoPieceDecodeTime(8e-3, 1.5e-3, 1e-4, 8.0, 0.0, 0.0, 5e-8, 0.0)


def runs_of(time: Any = TIME) -> Runs:
    batch, context = (x.ravel() for x in np.meshgrid([1.0, 8.0, 32.0, 128.0], [100.0, 1000.0, 3000.0]))
    step_s = np.asarray(time(batch, batch * context))
    return Runs(batch, context, step_s, 250.0 * step_s, (), "runs")


def test_work_and_power_come_over_by_hand():
    """A run of 50 ms and 10 J a step; a step here of one request and no context takes 14.1 ms. Idle is 72 W."""
    runs = Runs(np.array([1.0]), np.array([0.0]), np.array([0.05]), np.array([10.0]), (), "")
    assert by_work(runs, TIME, 72.0) == pytest.approx([10.0 - 72.0 * (0.05 - 0.0141)])
    assert by_power(runs, TIME) == pytest.approx([200.0 * 0.0141])


def test_powers_of_parts_are_found():
    runs = runs_of()
    joules = 230.0 * 14e-3 + 380.0 * 1e-4 * runs.batch + 300.0 * 1.2e-7 * runs.cached
    values = decode_energy(runs, joules, TIME, A100, 1, False).values
    assert values == pytest.approx({"e_dec0": 3.22, "e_dec_req": 0.038, "e_dec_kv": 3.6e-5}, rel=1e-4)


@pytest.mark.parametrize("time", [TIME, STEEP], ids=["study", "two_piece"])
@pytest.mark.parametrize("watts", [(20.0, 20.0), (1500.0, 1500.0), (390.0, 150.0), (100.0, 900.0)])
@pytest.mark.parametrize("tp", [1, 4])
def test_powers_keep_their_bounds_whatever_the_runs_drew(time: Any, watts: tuple[float, float], tp: int):
    """Runs below idle, above the board, with power that falls with the batch, and that rises beyond the board."""
    runs = runs_of(time)
    joules = tp * np.interp(np.log(runs.batch), [0.0, np.log(128.0)], watts) * runs.step_s
    found = decode_energy(runs, joules, time, A100, tp, True)
    energy = DecodeEnergy(**found.values)
    batch = np.unique(np.round(np.geomspace(1, 2000, 50)))
    for context in (0.0, 300.0, 50_000.0):
        drawn = np.asarray(energy(batch, batch * context) / time(batch, batch * context)) / tp
        assert 72.0 * (1 - 1e-6) <= drawn.min() <= drawn.max() <= 400.0 * (1 + 1e-6)
        assert np.all(np.diff(drawn) >= -1e-6 * drawn[1:])
    error = np.abs(np.asarray(energy(runs.batch, runs.cached)) / joules - 1).mean() * 100
    assert found.quality["mape_in_sample_percent"] == pytest.approx(error, rel=0.01)
    assert found.quality["rows"] == 12 and found.valid_range["batch"] == [1.0, 128.0]


def test_terms_of_time_that_energy_has_not_are_refused():
    with pytest.raises(ValueError, match="hold them at 0"):
        decode_energy(runs_of(), runs_of().step_j, DecodeTime(14e-3, 1e-4, 1e-7, 0.0, 1.2e-7, 0.0), A100, 1, False)


@pytest.mark.parametrize(
    "time",
    [
        PrefillTime(4e-5, 6e-5, 300.0, 9e-3, 2e-5, 1e-9),
        PrefillTime(1e-5, 2e-5, 4000.0, 3e-3, 0.0, 0.0),  # its upper line is below 0 at no tokens
        PrefillTime(3e-5, 2e-5, 200.0, 5e-3, 0.0, 0.0),  # it bends down
        PiecewisePrefillTime(np.array([4e-5, 9e-5, 1e-5, 6e-5, 0.0]), np.array([300.0, 400.0, 900.0, NO_KNOT]), 9e-3, 2e-5, 1e-9),  # type: ignore[arg-type]
    ],
)
def test_no_prefill_step_draws_more_than_saturated_prefill(time: PrefillTime | PiecewisePrefillTime):
    fitted: Any = SimpleNamespace(result=SimpleNamespace(module=time))
    found = prefill_energy(("Mixtral-8x7B", 4), A100, fitted)
    energy, tokens = PrefillEnergy(**found.values), np.geomspace(1.0, 1e6, 400)
    for length in (16.0, 841.0):
        whole = np.minimum(tokens, length)
        drawn = np.asarray(energy(tokens, tokens * whole)) / np.asarray(time(tokens, tokens / whole, tokens * whole)) / 4
        assert drawn.max() <= 395.0 * (1 + 1e-6)
    knee = getattr(time, "tok_knee", 900.0)
    if not isinstance(time, PrefillTime) or time.tok_slope_above > time.tok_slope_below:
        assert float(energy(knee, 0.0) / time(knee, 0.0, 0.0) / 4) == pytest.approx(395.0)


def test_energies_of_llama_scaled_to_another_setup():
    """Llama's steps draw 230 W; on H200 the other, on two GPUs, takes 0.8 of its time and 0.9 of its energy above idle."""
    llama = synthetic("decode", 0.0)
    i = int(np.flatnonzero((llama.batch == 8) & (llama.length == 512))[0])
    llama.energy_j[:] = 500.0 * llama.time_s
    other = synthetic("decode", 0.0)
    other.time_s[:] = 0.8 * llama.time_s
    other.energy_j[:] = 70.0 * 2 * other.time_s + 0.9 * 430.0 * llama.time_s
    energy = DecodeEnergy(230.0 * 14e-3, 230.0 * 1e-4, 230.0 * 1.2e-7)
    work, power = from_llama(other, (other, llama), TIME, energy, A100, 2)
    at = int(np.flatnonzero((work.batch == llama.batch[i]) & (work.context == llama.length[i]))[0])
    step_s = float(TIME(work.batch[at], work.cached[at]))
    assert by_work(work, TIME, 144.0)[at] == pytest.approx((0.9 * (230.0 - 72.0) + 144.0) * step_s)
    # A GPU of the other draws (140 * 0.8 + 387) / 0.8 / 2 W there, where Llama's draws 500.
    assert by_power(power, TIME)[at] == pytest.approx(2 * 230.0 * (112.0 + 387.0) / 1.6 / 500.0 * step_s)
    plain, same = from_llama(other, None, TIME, energy, A100, 4)
    assert by_power(same, TIME)[at] == pytest.approx(4 * 230.0 * step_s)
    assert len(plain.batch) == len(other)


def test_host_time_is_what_measured_steps_take_beyond_composed_ones():
    """Qwen holds 4/8 of the heads in 28/32 of the layers: 0.4375 of Llama's bytes a cached token."""
    m = synthetic("decode", 0.0, model=QWEN[0])
    hosted = with_host_time(m, DecodeTime(11e-3, 1e-5, 0.0, 0.0, 1e-7, 0.0), TIME)
    extra = 3e-3 + 9e-5 * m.batch + 2e-8 * 0.4375 * m.cached_tokens
    np.testing.assert_allclose(hosted.time_s - m.time_s, extra, rtol=1e-9)
    assert LLAMA != QWEN
