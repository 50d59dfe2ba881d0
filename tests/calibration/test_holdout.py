"""Held-out error: what is left out really is, and the published targets are met."""

import numpy as np
import pytest

from calibration_fit.fit import fit, fit_all
from calibration_fit.forms import DECODE_TIME, PREFILL_TIME, TWO_PIECE_DECODE_TIME
from calibration_fit.holdout import grouped_mape, hold_out, regions
from calibration_fit.published import A100, SETUPS, anl_end_to_end, composed
from calibration_fit.rows import make_rows
from tests.calibration.helpers import DATA, needs_data, synthetic

PREFILL_TARGETS = (1.4, 2.1, 1.4, 3.2, 0.8)
DECODE_TARGETS = (1.5, 1.7, 2.3, 2.6)
MIXTRAL_DECODE_TARGET = 4.0
ANL_TARGET = 1.6
"""Held-out MAPE, percent, in the order of `SETUPS` (issue 3)."""


def test_whole_batch_sizes_are_left_out():
    m = synthetic("decode", 0.02)
    held = hold_out([fit([m], DECODE_TIME)], ("batch",))[0]["batch"]
    assert len(held.predicted) == len(m)
    # B = 1 and B = 128 lie outside what their folds were trained on, whatever the deal.
    assert held.outside[held.batch == 1].all()
    assert held.outside[held.batch == 128].all()
    assert not held.outside[(held.batch > 1) & (held.batch < 128)].any()


def test_a_held_out_row_does_not_shape_its_own_prediction():
    m = synthetic("decode", 0.02)
    spoilt = m.select(np.ones(len(m), bool))
    spoilt.time_s[m.batch == 16] *= 3.0
    a, b = (hold_out([fit([x], DECODE_TIME)], ("batch",))[0]["batch"] for x in (m, spoilt))
    at = a.batch == 16
    assert b.predicted[at] == pytest.approx(a.predicted[at], rel=1e-5)


def test_regions_cover_every_row_once():
    held = hold_out([fit([synthetic("decode", 0.02)], DECODE_TIME)], ("length",))[0]["length"]
    assert sum(n for _, _, n, _ in regions(held)) == len(held.predicted)


def test_held_out_error_of_the_right_form_is_the_noise():
    # The mean absolute value of a 2 % normal error is 1.6 %.
    held = hold_out([fit([synthetic("decode", 0.02)], DECODE_TIME)])[0]
    assert 1.2 < grouped_mape(held) < 2.4


@needs_data
def test_prefill_meets_its_targets_however_rows_are_held_out():
    rows = [make_rows([m], PREFILL_TIME) for m in composed(DATA, A100) if m.phase == "prefill"]
    for target, held in zip(PREFILL_TARGETS, hold_out(fit_all(rows, PREFILL_TIME)), strict=True):
        assert grouped_mape(held) <= target
        for scheme in ("batch", "length", "random"):
            assert held[scheme].mape_all <= target, scheme


@needs_data
def test_decode_meets_its_targets():
    """The study's form meets the targets by random rows (how they were set) and by lengths; the better form also over both groupings."""
    measured = [m for m in composed(DATA, A100) if m.phase == "decode"]
    study = hold_out(fit_all([make_rows([m], DECODE_TIME) for m in measured], DECODE_TIME))
    two = hold_out(fit_all([make_rows([m], TWO_PIECE_DECODE_TIME) for m in measured], TWO_PIECE_DECODE_TIME))
    for i, target in enumerate(DECODE_TARGETS):
        assert study[i]["random"].mape_all <= target, SETUPS[i]
        assert study[i]["length"].mape_all <= target, SETUPS[i]
        assert min(grouped_mape(study[i]), grouped_mape(two[i])) <= target, SETUPS[i]
    assert grouped_mape(two[4]) < MIXTRAL_DECODE_TARGET
    assert two[4]["batch"].mape_all < MIXTRAL_DECODE_TARGET
    assert study[4]["batch"].mape_all > 3 * MIXTRAL_DECODE_TARGET


@needs_data
def test_anl_end_to_end_meets_its_target():
    prefill = fit([m for m in composed(DATA, A100) if m.phase == "prefill"][:1], PREFILL_TIME).module
    m = anl_end_to_end(DATA, "Llama-3.1-8B", 1)
    assert len(m) == 19  # B = 64 with 2048 + 2048 tokens does not fit
    result = fit([m], DECODE_TIME, prefill=prefill, fixed={"alpha2": 0.0, "beta0": 0.0, "beta2": 0.0})
    assert hold_out([result], ("one",))[0]["one"].mape_all <= ANL_TARGET
