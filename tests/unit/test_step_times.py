"""The forms of step times beside the study's: against numpy's interpolation and sums written out, and what a file of them may hold."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tomli_w

from jaxserve.errors import InputError
from jaxserve.perf.coefficients import Coefficients, load_coefficients, parse_coefficients
from jaxserve.perf.latency import DecodeTimeTable, PiecewiseDecodeTime, PiecewisePrefillTime, PrefillTimeTable
from tests.request_logs import COEFFICIENTS

ROUNDED = 1e-12
TOKENS, LENGTHS = [1.0, 64.0, 300.0, 4096.0], [16.0, 512.0, 2048.0]
BATCH, CONTEXTS = [1.0, 8.0, 64.0], [100.0, 1000.0]
PREFILL_S = [[0.01, 0.011, 0.013], [0.012, 0.013, 0.02], [0.02, 0.021, 0.03], [0.2, 0.22, 0.4]]
DECODE_S = [[0.01, 0.011], [0.012, 0.02], [0.02, 0.05]]
PREFILL_GRID = {"form": "table", "n_tokens": TOKENS, "seq_len": LENGTHS, "time_s": PREFILL_S}
DECODE_GRID = {"form": "table", "batch": BATCH, "mean_ctx": CONTEXTS, "time_s": DECODE_S}
PREFILL_PIECES = {"form": "piecewise", "tok_slopes": [4e-5, 0.0, 9e-5, 5e-5], "tok_knots": [128.0, 256.0, 300.0], "b0": 9e-3, "b1": 1e-5}
DECODE_PIECES = {"form": "piecewise", "alpha0": 0.012, "batch_slopes": [1e-3, 0.0, 1e-4], "batch_knots": [8, 32.5], "beta1": 1e-7}


def with_times(prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None) -> Coefficients:
    """A coefficients file with these tables in place of the study's."""
    table = COEFFICIENTS.model_dump(mode="json", exclude_none=True)
    return parse_coefficients(table | ({"prefill_time": prefill} if prefill else {}) | ({"decode_time": decode} if decode else {}), "mine")


def test_a_table_over_one_quantity_is_numpys_interpolation() -> None:
    times = [row[0] for row in PREFILL_S]
    model = with_times({"form": "table", "n_tokens": TOKENS, "time_s": times}).prefill_time_model()
    n = np.linspace(1.0, 4096.0, 501)
    np.testing.assert_allclose(model(n, 3.0, 77.0 * n), np.interp(n, TOKENS, times), rtol=ROUNDED)
    decode = with_times(decode={"form": "table", "batch": BATCH, "time_s": [row[1] for row in DECODE_S]}).decode_time_model()
    b = np.linspace(1.0, 64.0, 501)
    np.testing.assert_allclose(decode(b, b * 5.0), np.interp(b, BATCH, [row[1] for row in DECODE_S]), rtol=ROUNDED)


def test_a_table_over_two_is_interpolated_along_one_and_then_the_other() -> None:
    prefill, decode = with_times(PREFILL_GRID, DECODE_GRID).prefill_time_model(), with_times(PREFILL_GRID, DECODE_GRID).decode_time_model()
    assert isinstance(prefill, PrefillTimeTable) and isinstance(decode, DecodeTimeTable)
    rng = np.random.default_rng(0)
    for n, y in zip(rng.uniform(1, 4096, 50), rng.uniform(16, 2048, 50), strict=True):
        rows = [np.interp(n, TOKENS, column) for column in np.transpose(PREFILL_S)]
        assert float(prefill(n, 1.0, n * y)) == pytest.approx(np.interp(y, LENGTHS, rows), rel=ROUNDED)
    for b, y in zip(rng.uniform(1, 64, 50), rng.uniform(100, 1000, 50), strict=True):
        rows = [np.interp(b, BATCH, column) for column in np.transpose(DECODE_S)]
        assert float(decode(b, b * y)) == pytest.approx(np.interp(y, CONTEXTS, rows), rel=ROUNDED)
    # What was measured comes back as it was.
    for i, n in enumerate(TOKENS):
        np.testing.assert_allclose(prefill(n, 1.0, n * np.array(LENGTHS)), PREFILL_S[i], rtol=ROUNDED)


def test_outside_its_grid_a_table_goes_on_with_its_last_slope() -> None:
    prefill, decode = with_times(PREFILL_GRID, DECODE_GRID).prefill_time_model(), with_times(PREFILL_GRID, DECODE_GRID).decode_time_model()
    # 0.2 + (0.2 - 0.02) * 904/3796 at 5000 tokens of 16; far beyond the points that fill the grid up as well.
    for n in (5000.0, 1e6):
        assert float(prefill(n, 1.0, n * 16.0)) == pytest.approx(0.2 + 0.18 * (n - 4096) / 3796, rel=ROUNDED)
    assert float(prefill(64.0, 1.0, 64.0 * 4096)) == pytest.approx(0.02 + 0.007 * 2048 / 1536, rel=ROUNDED)
    assert float(prefill(64.0, 1.0, 64.0)) == pytest.approx(0.012 - 0.001 * 15 / 496, rel=ROUNDED)
    assert float(decode(8.0, 8.0 * 2000)) == pytest.approx(0.02 + 0.008 * 1000 / 900, rel=ROUNDED)
    # In both: (128, 1900) lies 64/56 cells beyond B = 64 and one beyond context 1000.
    low, high = 0.02 + 0.008 * 64 / 56, 0.05 + 0.03 * 64 / 56
    assert float(decode(128.0, 128.0 * 1900)) == pytest.approx(high + (high - low), rel=ROUNDED)


def test_piecewise_times_are_the_sum_of_their_pieces_and_never_fall() -> None:
    prefill, decode = (
        with_times(PREFILL_PIECES, DECODE_PIECES).prefill_time_model(),
        with_times(PREFILL_PIECES, DECODE_PIECES).decode_time_model(),
    )
    assert isinstance(prefill, PiecewisePrefillTime) and isinstance(decode, PiecewiseDecodeTime)
    # At 1000 tokens: 128 * 4e-5 + 128 * 0 + 44 * 9e-5 + 700 * 5e-5.
    assert float(prefill(1000.0, 2.0, 1e6)) == pytest.approx(9e-3 + 5.12e-3 + 3.96e-3 + 35e-3 + 2e-5, rel=ROUNDED)
    assert float(prefill(200.0, 1.0, 1.0)) == pytest.approx(9e-3 + 5.12e-3 + 1e-5, rel=ROUNDED)
    # At B = 40: 8 * 1e-3 + 0 + 7.5 * 1e-4.
    assert float(decode(40.0, 4000.0)) == pytest.approx(0.012 + 8e-3 + 0.75e-3 + 1e-7 * 4000, rel=ROUNDED)
    n, b = np.linspace(0.0, 2000.0, 3001), np.linspace(1.0, 100.0, 1001)
    assert np.min(np.diff(prefill(n, 1.0, 100 * n))) >= -1e-16
    assert np.min(np.diff(decode(b, 300 * b))) >= -1e-16
    with pytest.raises(InputError, match=r"tok_slopes\.1: must be at least 0"):
        with_times(PREFILL_PIECES | {"tok_slopes": [4e-5, -1e-9, 9e-5, 5e-5]})


def test_one_knot_is_the_studys_prefill() -> None:
    study = COEFFICIENTS.prefill_time_model()
    same = {"form": "piecewise", "tok_slopes": [42e-6, 57e-6], "tok_knots": [300.0], "b0": 9e-3, "b1": 28e-6, "b2": 1.5e-9}
    n = np.linspace(1.0, 8192.0, 100)
    np.testing.assert_allclose(with_times(same).prefill_time_model()(n, 3.0, n * n), study(n, 3.0, n * n), rtol=ROUNDED)


@pytest.mark.parametrize(("prefill", "decode"), [(PREFILL_PIECES, DECODE_PIECES), (PREFILL_GRID, DECODE_GRID)])
def test_files_of_one_form_share_shapes_and_lanes(prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    """Arguments of any shape; coefficients of several files side by side, with other numbers of knots or points."""
    if prefill["form"] == "table":
        fewer = (
            {"n_tokens": TOKENS[:2], "seq_len": None, "time_s": [0.01, 0.02]},
            {"batch": BATCH[:2], "mean_ctx": None, "time_s": [0.01, 0.02]},
        )
    else:
        fewer = {"tok_slopes": [5e-5], "tok_knots": []}, {"batch_slopes": [1e-4], "batch_knots": []}
    files = with_times(prefill, decode), with_times(prefill | fewer[0], decode | fewer[1])
    for times in ([c.prefill_time_model() for c in files], [c.decode_time_model() for c in files]):
        assert jax.tree.map(np.shape, times[0]) == jax.tree.map(np.shape, times[1])
        x = jnp.array([[1.0, 5.0, 77.0], [8.0, 300.0, 5000.0]])
        more = (x * 50,) if "Decode" in type(times[0]).__name__ else (1.0, x * 50)
        lanes = jax.tree.map(lambda *leaves: jnp.stack(leaves), *times)
        together = jax.jit(jax.vmap(lambda time, x=x, more=more: time(x, *more)))(lanes)
        assert together.shape == (2, 2, 3)
        for lane, time in enumerate(times):
            np.testing.assert_allclose(together[lane], time(x, *more), rtol=ROUNDED)
            one = [float(time(float(a), *(m if isinstance(m, float) else float(a) * 50 for m in more))) for a in np.ravel(x)]
            np.testing.assert_allclose(np.ravel(together[lane]), one, rtol=ROUNDED)


# Id: (table, what is changed, what the sentence must hold).
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown form": ("prefill_time", {"form": "spline"}, "prefill_time.form: must be one of 'study', 'piecewise', 'table' (got 'spline')"),
    "NaN": ("prefill_time", {"time_s": [[0.01, 0.011, float("nan")], *PREFILL_S[1:]]}, "prefill_time.time_s.0.2: must be a finite number"),
    "text": ("decode_time", {"batch": [1.0, "8", 64.0]}, "decode_time.batch.1: must be a number"),
    "one point": ("decode_time", {"batch": [1.0], "time_s": DECODE_S[:1]}, "batch must have at least 2 points"),
    "one context": ("decode_time", {"mean_ctx": [9.0], "time_s": [[0.1], [0.2], [0.3]]}, "mean_ctx must have at least 2 points"),
    "axis falls": (
        "prefill_time",
        {"n_tokens": [1.0, 300.0, 64.0, 4096.0]},
        "n_tokens.2 must be above the entry before it (got 64 after 300)",
    ),
    "axis repeats": ("prefill_time", {"seq_len": [16.0, 16.0, 32.0]}, "seq_len.1 must be above the entry before it"),
    "a row too few": ("decode_time", {"time_s": DECODE_S[:2]}, "time_s must have a row for each of batch (got 2 rows, 3 points)"),
    "a gap": ("decode_time", {"time_s": [[0.01], *DECODE_S[1:]]}, "time_s.0 must have 2 entries, one for each of mean_ctx (got 1)"),
    "no second axis": ("decode_time", {"mean_ctx": None}, "time_s.0 must have 1 entry, there is no mean_ctx to tell them apart (got 2)"),
    "no time": ("decode_time", {"time_s": [[0.0, 0.011], *DECODE_S[1:]]}, "time_s.0.0 must be above 0 s (got 0)"),
    "falls along the batch": (
        "decode_time",
        {"time_s": [[0.01, 0.011], [0.009, 0.02], [0.02, 0.05]]},
        "time_s falls from 0.01 s at batch = 1 to 0.009 s at 8 (row 1, column 0)",
    ),
    "falls along the context": (
        "decode_time",
        {"time_s": [[0.01, 0.011], [0.012, 0.02], [0.06, 0.05]]},
        "time_s falls from 0.06 s at mean_ctx = 100 to 0.05 s at 1000 (row 2, column 1)",
    ),
    "beyond use": ("prefill_time", {"time_s": [*PREFILL_S[:3], [1e13] * 3]}, "prefill_time.time_s = 1e+13 is beyond 1e+12"),
    "slopes and knots": (
        "prefill_time",
        PREFILL_PIECES | {"tok_knots": [9.0]},
        "tok_slopes must have one entry more than tok_knots (got 4 and 1)",
    ),
    "knots fall": ("decode_time", DECODE_PIECES | {"batch_knots": [8.0, 8.0]}, "batch_knots.1 must be above the entry before it"),
    "a knot at 0": ("decode_time", DECODE_PIECES | {"batch_knots": [0.0, 8.0]}, "batch_knots.0 must be above 0"),
    "no fixed part": ("decode_time", DECODE_PIECES | {"alpha0": 0.0}, "decode_time.alpha0 must be above 0 s"),
    "a field of another form": ("prefill_time", {"tok_knee": 9.0}, "prefill_time.tok_knee: there is no such field"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_file_may_not_hold(case: str, tmp_path: Path) -> None:
    name, change, part = WRONG[case]
    base = PREFILL_GRID if name == "prefill_time" else DECODE_GRID
    table = COEFFICIENTS.model_dump(mode="json", exclude_none=True)
    table[name] = {k: v for k, v in ((base if change.get("form") != "piecewise" else {}) | change).items() if v is not None}
    path = tmp_path / "c.toml"
    path.write_text(tomli_w.dumps(table))
    with pytest.raises(InputError) as told:
        load_coefficients(str(path))
    assert str(path) in str(told.value) and part in str(told.value)


def test_forms_survive_a_file(tmp_path: Path) -> None:
    for times in ((PREFILL_PIECES, DECODE_PIECES), (PREFILL_GRID, DECODE_GRID)):
        c = with_times(*times)
        (tmp_path / "c.toml").write_text(tomli_w.dumps(c.model_dump(mode="json", exclude_none=True)))
        assert load_coefficients(str(tmp_path / "c.toml")) == c


@pytest.mark.parametrize(("prefill", "decode"), [(PREFILL_PIECES, DECODE_PIECES), (PREFILL_GRID, DECODE_GRID)])
def test_the_shortest_step_is_found(prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    """By brute force over the batches and contexts, or the packings, of an engine; grids that start late are carried back below 0."""
    late = with_times(prefill, decode | ({"batch": [8.0, 9.0, 64.0]} if decode["form"] == "table" else {}))
    for c in (with_times(prefill, decode), late):
        model, found = c.decode_time_model(), c.shortest_decode_s(16, 5000)
        steps = [float(model(float(b), float(k))) for b in range(1, 17) for k in np.linspace(0.0, 5000.0, 41)]
        assert min(steps) - 1e-4 <= found <= min(steps) + 1e-15
    times, bound = late.prefill_time_model(), late.shortest_prefill_s(8, 2048, 5000)
    rng, least = np.random.default_rng(0), np.inf
    for _ in range(200):
        pieces = int(rng.integers(1, 9))
        new = rng.integers(1, 2048 // pieces + 1, pieces)
        cached = rng.integers(0, 5000 - new.max(), pieces) * rng.integers(0, 2)
        least = min(least, float(times(float(new.sum()), float(pieces), float(((cached + new) ** 2 - cached**2).sum()))))
    assert bound <= least + 1e-15
    assert bound == pytest.approx(float(times(1.0, 1.0, 1.0)), rel=1e-6)
