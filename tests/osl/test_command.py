"""`jaxserve osl-train` from a trace to a file that a scenario can name."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

import jaxserve.osl.train as training
from jaxserve.osl.files import load
from tests.cli.helpers import Outcome, call, refused
from tests.osl.synthetic import requests

DATA = Path(os.environ.get("JAXSERVE_SHARED_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
real_data = pytest.mark.skipif(not (DATA / "traces").is_dir(), reason=f"no real traces at {DATA} (set JAXSERVE_SHARED_DATA)")


@pytest.fixture
def osl_train(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def run(*arguments: str | Path) -> Outcome:
        return call(capsys, monkeypatch, "osl-train", *arguments)

    return run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """3,000 synthetic requests, out of order, one of them failed."""
    frame = requests(3_000, seed=11)
    frame["arrival_s"] = np.arange(3_000) * 0.5
    frame.loc[7, "osl"] = 0
    path = tmp_path / "trace.csv"
    frame.sample(frac=1.0, random_state=0).to_csv(path, index=False)
    return path


def test_a_predictor_from_a_trace(osl_train, trace: Path, tmp_path: Path):
    out = tmp_path / "predictor.npz"
    outcome = osl_train(trace, "--out", out, "--invalid-rows", "drop", "--seed", "5")
    assert outcome.code == 0, outcome.err
    said = outcome.out
    for part in (
        "2399 requests learned from (the first 80 % by time), the last 600 held out",
        "known models: large, small; applications: chat, code, summary",
        "OSL buckets (tokens): 1-",
        "held-out OSL: ",
        "ms a request in batches of 4096",
        "1 rows with fewer than 1 token dropped",
        "rows were out of order; sorted by time",
        f"Predictor: {out}",
    ):
        assert part in said.replace("\n", " ") or part in said
    facts = load(out).facts
    assert (facts.training.source, facts.training.seed) == ("trace.csv", 5)
    for name in ("predictor", "constant: commonest bucket, median", "constant: mean"):
        assert len(re.findall(r"[\d.]+%", next(line for line in said.splitlines() if line.startswith(name)))) == 3
    assert f"{facts.held_out.predictor.bucket_accuracy:.1%}" in said
    assert facts.held_out.predictor.bucket_accuracy > facts.held_out.constant_median.bucket_accuracy + 0.15

    before = out.read_bytes()
    refused(osl_train(trace, "--out", out), None, "predictor.npz: exists already and is left as it is; choose another --out")
    assert out.read_bytes() == before


def test_one_application_alone(osl_train, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training, "ROUNDS", 1)
    outcome = osl_train(trace, "--out", tmp_path / "p", "--invalid-rows", "drop", "--where", "application=code", "--where", "model=small")
    assert "known models: small; applications: code" in outcome.out


def test_bad_input_leaves_nothing(osl_train, trace: Path, tmp_path: Path):
    out = tmp_path / "p.npz"
    few, same, late = tmp_path / "few.csv", tmp_path / "same.csv", tmp_path / "late.csv"
    late.write_text("arrival_s,isl,osl\n" + "".join(f"{1_700_000_000_000 + t},5,{t + 1}\n" for t in range(50)))
    few.write_text("arrival_s,isl,osl\n" + "".join(f"{t},5,{t + 1}\n" for t in range(50)))
    same.write_text("arrival_s,isl,osl\n" + "".join(f"{t},5,3\n" for t in range(500)))
    (tmp_path / "nan.csv").write_text("arrival_s,isl,osl\n0,5,nan\n")
    (tmp_path / "columns.csv").write_text("time,prompt,answer\n0,5,3\n")
    for arguments, parts in (
        ((tmp_path / "absent.csv",), ("absent.csv: no such file",)),
        ((trace,), ("column osl: 0 tokens, at least 1 needed", "--invalid-rows drop")),
        ((trace, "--invalid-rows", "skip"), ("--invalid-rows 'skip': must be error or drop",)),
        ((trace, "--time-unit", "min"), ("--time-unit 'min': must be s, ms, us or ns",)),
        ((late,), ("row 2, column arrival_s: 1700000000000 cannot be a time in s", "--time-unit ms")),
        ((late, "--time-unit", "ms"), ("late.csv: 50 requests are too few to learn from",)),  # the advice works
        ((trace, "--invalid-rows", "drop", "--where", "model"), ("--where 'model': must be COLUMN=VALUE",)),
        ((trace, "--invalid-rows", "drop", "--where", "model=huge"), ("--where model=huge: ", "its values of model are")),
        ((few,), ("few.csv: 50 requests are too few to learn from; give at least 200",)),
        ((same,), ("same.csv, first 400 requests: the OSL has 1 different value(s), fewer than the 6 buckets",)),
        ((tmp_path / "nan.csv",), ("nan.csv, row 2, column osl: nan is not a whole number of tokens",)),
        ((tmp_path / "columns.csv",), ("the header 'time,prompt,answer' is of no known trace format",)),
    ):
        refused(osl_train(*arguments, "--out", out), out, *parts)
    refused(osl_train(trace, "--out", tmp_path / "no" / "p.npz"), None, "there is no folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["columns.csv", "few.csv", "late.csv", "nan.csv", "same.csv", "trace.csv"]


@real_data
def test_isl_alone_says_something_of_conversations_and_nothing_of_code(osl_train, tmp_path: Path):
    """Azure 2023, against the better constant. Measured: 47 % against 23 % of the buckets right, and 18 % against 18 %."""
    for name, least, most in (("conv", 0.15, 1.0), ("code", -0.05, 0.06)):
        assert osl_train(DATA / "traces" / f"azure2023_{name}.csv.gz", "--out", tmp_path / name).code == 0
        held = load(tmp_path / name).facts.held_out
        constant = max(held.constant_mean.bucket_accuracy, held.constant_median.bucket_accuracy)
        assert least < held.predictor.bucket_accuracy - constant < most
