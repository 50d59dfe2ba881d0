"""Bad input: one clear sentence with file and row."""

from pathlib import Path

import numpy as np
import pytest

from calibration_fit.fit import fit
from calibration_fit.forms import DECODE_TIME, PREFILL_TIME
from calibration_fit.measurements import one_setup, read_measurements
from calibration_fit.rows import check_rows, make_rows
from jaxserve.errors import InputError
from tests.calibration.helpers import synthetic

HEAD = "model,tp,gpu,phase,batch,mean_ctx,time_s"
GOOD = [f"m,1,A100,decode,{b},{c},{0.01 + 1e-5 * b + 1e-8 * b * c}" for b in (1, 2, 4, 8) for c in (128, 512, 1024)]


def written(tmp_path: Path, lines: list[str], head: str = HEAD) -> Path:
    path = tmp_path / "steps.csv"
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


def test_good_table_is_read(tmp_path: Path):
    (m,) = read_measurements(written(tmp_path, GOOD))
    assert len(m) == len(GOOD)
    assert (m.cached_tokens == m.batch * m.length).all()
    assert list(m.row[:2]) == [2, 3]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("m,1,A100,decode,4,100,nan", ("row 14", "time_s is nan")),
        ("m,1,A100,decode,4,100,", ("row 14", "time_s is empty")),
        ("m,1,A100,decode,4,100,0", ("row 14", "time_s is 0", "above 0")),
        ("m,1,A100,decode,4,100,-0.01", ("row 14", "time_s is -0.01")),
        ("m,1,A100,decode,4,100,fast", ("row 14", "time_s is fast")),
        ("m,1,A100,decode,4,100,inf", ("row 14", "time_s is inf")),
        ("m,1,A100,decode,0,100,0.01", ("row 14", "batch is 0")),
        ("m,1,A100,decode,4,-5,0.01", ("row 14", "mean_ctx is -5")),
        ("m,1.5,A100,decode,4,100,0.01", ("row 14", "tp is 1.5", "whole number")),
        ("m,1,A100,chunked,4,100,0.01", ("row 14", "'chunked'")),
        ("m,1,,decode,4,100,0.01", ("row 14", "gpu")),
        ("m,1,A100,decode,4,100,0.00000001", ("row 14", "seconds?")),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, words: tuple[str, ...]):
    path = written(tmp_path, [*GOOD, line])
    with pytest.raises(InputError) as error:
        read_measurements(path)
    for word in (str(path), *words):
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("head", "lines", "words"),
    [
        ("model,tp,gpu,phase,batch,mean_ctx,time_ms", GOOD, ("unknown column 'time_ms'", "did you mean time_s (s)?")),
        ("model,tp,gpu,phase,batch,mean_ctx", ["m,1,A100,decode,4,100"], ("column 'time_s' is missing",)),
        ("model,tp,gpu,phase,batch,time_s", ["m,1,A100,decode,4,0.01"], ("row 2", "needs column 'mean_ctx'")),
        ("model,tp,gpu,phase,batch,time_s", ["m,1,A100,prefill,4,0.01"], ("row 2", "needs column 'seq_len'")),
        (HEAD, ["m,1,A100,decode,1,128,11.7", "m,1,A100,decode,2,128,11.9"], ("milliseconds",)),
        (HEAD.replace("mean_ctx", "seq_len"), ["m,1,A100,prefill,1,128,13.8", "m,1,A100,prefill,2,128,20.1"], ("milliseconds",)),
        (HEAD + ",energy_j", ["m,1,A100,decode,1,128,0.0117,0.0033"], ("row 2", "W a GPU")),
        (HEAD, [], ("no row left",)),
        (HEAD.replace("mean_ctx", "lengths"), ["m,1,A100,prefill,3,100 200,0.02"], ("row 2", "batch is 3 but lengths holds 2")),
        (HEAD.replace("mean_ctx", "lengths"), ["m,1,A100,prefill,2,100 x,0.02"], ("row 2", "lengths is '100 x'")),
    ],
)
def test_a_bad_table_is_explained(tmp_path: Path, head: str, lines: list[str], words: tuple[str, ...]):
    with pytest.raises(InputError) as error:
        read_measurements(written(tmp_path, lines, head))
    for word in ("steps.csv", *words):
        assert word in str(error.value)


def test_mixed_gpus_are_named_with_the_row(tmp_path: Path):
    found = read_measurements(written(tmp_path, [*GOOD, "m,1,H100,decode,4,100,0.01"]))
    with pytest.raises(InputError, match=r"row 14: mixed GPUs: .*H100 after .*A100"):
        one_setup(found)


def refused(m) -> str:
    with pytest.raises(InputError) as error:
        fit([m], DECODE_TIME)
    assert "rows " in str(error.value)
    return str(error.value)


def test_too_few_rows_are_refused():
    assert "4 decode_time rows of m TP1 A100 are too few for 6 coefficients; give at least 8" in refused(synthetic("decode", 0.01, n=4))


def test_one_batch_size_is_refused():
    m = synthetic("decode", 0.01)
    assert "one batch size only (8)" in refused(m.select(np.repeat(np.flatnonzero(m.batch == 8), 2)))


def test_constant_times_are_refused():
    m = synthetic("decode")
    m.time_s[:] = 0.01
    with pytest.raises(InputError, match=r"is constant \(0\.01\)"):
        check_rows(make_rows([m], DECODE_TIME), DECODE_TIME, 6)


def test_one_token_count_is_refused():
    m = synthetic("prefill")
    m.n_tokens[:] = 512
    with pytest.raises(InputError, match="fewer than 4 different token counts"):
        fit([m], PREFILL_TIME)


def test_end_to_end_without_prefill_says_why(tmp_path: Path):
    path = written(tmp_path, ["m,1,A100,end_to_end,4,128,64,1.0"], "model,tp,gpu,phase,batch,isl,osl,time_s")
    with pytest.raises(InputError, match="need prefill_time"):
        make_rows(read_measurements(path), DECODE_TIME)


def test_per_request_lengths_give_the_sum_of_squares(tmp_path: Path):
    path = written(tmp_path, ["m,1,A100,prefill,2,100 300,0.02"], HEAD.replace("mean_ctx", "lengths"))
    (m,) = read_measurements(path)
    assert (m.n_tokens[0], m.sum_sq[0]) == (400.0, 100000.0)


def test_mean_power_becomes_energy_of_all_gpus(tmp_path: Path):
    (m,) = read_measurements(written(tmp_path, ["m,2,A100,decode,4,128,0.01,300"], HEAD + ",avg_power_w_per_gpu"))
    assert m.energy_j[0] == pytest.approx(0.01 * 300 * 2)


@pytest.mark.parametrize("missing", ["", "nan", "NaN"])
def test_an_energy_that_is_missing_may_be_nan(tmp_path: Path, missing: str):
    (m,) = read_measurements(
        written(tmp_path, ["m,1,A100,decode,4,128,0.01,3.0", f"m,1,A100,decode,8,128,0.01,{missing}"], HEAD + ",energy_j")
    )
    np.testing.assert_array_equal(m.energy_j, [3.0, np.nan])
    with pytest.raises(InputError, match="row 2: energy_j is inf"):
        read_measurements(written(tmp_path, ["m,1,A100,decode,4,128,0.01,inf"], HEAD + ",energy_j"))
