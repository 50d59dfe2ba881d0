"""`[osl_knowledge]` of a scenario: what may be written, and what the schedulers then believe."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pydantic import TypeAdapter

from jaxserve.errors import InputError
from jaxserve.osl.buckets import Score, bucket_edges, score
from jaxserve.osl.files import save
from jaxserve.osl.predictor import Predictor
from jaxserve.scenario.load import load_scenario, parse_scenario, to_toml
from jaxserve.scenario.osl_knowledge import Belief, OslKnowledge, believed_osl, training_requests
from jaxserve.scenario.workload import Requests
from tests.osl.synthetic import requests

KNOWLEDGE = TypeAdapter(OslKnowledge)
N = 20_000


def as_requests(frame: pd.DataFrame, *, labelled: bool = True) -> Requests:
    n = len(frame)
    model, application = (pd.Categorical(frame[name]) if labelled else None for name in ("model", "application"))
    lengths = frame["isl"].to_numpy(np.int32), frame["osl"].to_numpy(np.int32)  # as the compiled scenario keeps them
    return Requests(np.arange(n) * 1.0, *lengths, np.zeros(n, np.int32), (), {}, model, application)


FRAME = requests(N, seed=42)
REQUESTS = as_requests(FRAME)
TRUE = REQUESTS.osl.astype(np.float64)


@pytest.fixture
def folder(predictor: Predictor, tmp_path: Path) -> Path:
    save(predictor, tmp_path / "p.npz")
    return tmp_path


def believe(base_dir: Path = Path(), seed: int = 7, of: Requests = REQUESTS, **section: Any) -> Belief:
    belief = believed_osl(KNOWLEDGE.validate_python(section), of, seed=seed, base_dir=base_dir)
    assert belief.osl.dtype == np.float64 and belief.osl.shape == of.osl.shape and (belief.osl >= 1).all()
    return belief


def test_an_oracle_knows_and_says_nothing():
    belief = believe(kind="oracle")
    assert np.array_equal(belief.osl, TRUE) and belief.notes == ()


def test_the_mean_is_of_the_workload():
    belief = believe(kind="mean")
    assert (belief.osl == TRUE.mean()).all()
    assert belief.notes[0].startswith(f"schedulers believe every OSL to be the mean, {TRUE.mean():.1f} tokens: MAPE ")


def test_a_predictor_is_asked_for_the_median(predictor: Predictor, folder: Path):
    belief = believe(folder, kind="predicted", model="p.npz")
    assert np.array_equal(belief.osl, predictor.predict(REQUESTS.isl, REQUESTS.model, REQUESTS.application).median)
    error = np.mean(np.abs(belief.osl - TRUE) / TRUE)
    assert len(belief.notes) == 1 and f"p.npz predicts: MAPE {error:.1%}, the right bucket for" in belief.notes[0]
    absolute = believe(Path("/nowhere"), kind="predicted", model=str(folder / "p.npz"))
    assert np.array_equal(absolute.osl, belief.osl)


def test_requests_that_do_not_say_what_they_are_for_are_taken_for_others(folder: Path):
    bare = believe(folder, of=as_requests(FRAME, labelled=False), kind="predicted", model="p.npz")
    strange = believe(folder, of=as_requests(FRAME.assign(application="poem", model="")), kind="predicted", model="p.npz")
    assert np.array_equal(bare.osl, strange.osl)
    assert bare.notes[1:] == (
        "100.0% of the requests are of no model that p.npz knows, and are taken for others",
        "100.0% of the requests are of no application that p.npz knows, and are taken for others",
    )
    half = FRAME.assign(application=np.where(np.arange(N) % 2, FRAME["application"].astype(str), "poem"))
    notes = believe(folder, of=as_requests(half), kind="predicted", model="p.npz").notes
    assert len(notes) == 2 and notes[1].startswith("50.0% of the requests are of no application")


def test_noise_has_the_published_figures_unless_told_others(folder: Path):
    edges = bucket_edges(TRUE, "", "")

    def reached(**section: Any):
        return score(edges, TRUE, believe(folder, kind="noise", **section).osl)

    published = reached()
    assert published.bucket_accuracy == pytest.approx(0.82, abs=0.012) and published.mape == pytest.approx(0.273, abs=0.025)
    assert reached(mape=0.5).mape == pytest.approx(0.5, abs=0.025)
    assert reached(bucket_accuracy=0.6).bucket_accuracy == pytest.approx(0.6, abs=0.015)
    note = believe(kind="noise").notes[0]
    assert note.startswith("schedulers believe the OSL with an error, with the figures of GreenServe's predictor: lognormal, sigma ")
    assert "MAPE 2" in note


STANDS_IN = {
    "both": (0.6, 0.5, "bucket accuracy and MAPE of p.npz"),
    "MAPE too small for so many misses": (0.4, 0.1, "the bucket accuracy, but not the MAPE, of p.npz"),
    "worse than blind": (0.05, 0.5, "the MAPE, but not the bucket accuracy, of p.npz"),
}


@pytest.mark.parametrize("case", STANDS_IN)
def test_noise_stands_in_for_a_predictor(case: str, predictor: Predictor, tmp_path: Path):
    accuracy, mape, sentence = STANDS_IN[case]
    figures = Score(bucket_accuracy=accuracy, adjacent_accuracy=0.9, mape=mape)
    held_out = predictor.facts.held_out.model_copy(update={"predictor": figures})
    save(replace(predictor, facts=predictor.facts.model_copy(update={"held_out": held_out})), tmp_path / "p.npz")
    belief = believe(tmp_path, kind="noise", model="p.npz")
    assert sentence in belief.notes[0]
    reached = score(bucket_edges(TRUE, "", ""), TRUE, belief.osl)
    if "the MAPE, but" not in sentence:
        assert reached.bucket_accuracy == pytest.approx(accuracy, abs=0.015)
    if "the bucket accuracy, but" not in sentence:
        assert reached.mape == pytest.approx(mape, rel=0.05)


def test_noise_depends_on_the_seed_and_on_the_place_of_a_request():
    one = believe(kind="noise", mape=0.3)
    assert np.array_equal(believe(kind="noise", mape=0.3).osl, one.osl)
    assert not np.array_equal(believe(kind="noise", mape=0.3, seed=8).osl, one.osl)
    # A longer horizon changes the calibration a little, but no request's draw.
    short = as_requests(FRAME[:500])
    early = believe(of=short, kind="noise", mape=0.3).osl
    free = (early > 1) & (one.osl[:500] > 1)
    ratio = np.log(early / short.osl)[free] / np.log(one.osl / TRUE)[:500][free]
    assert np.allclose(ratio, ratio[0])


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"kind": "predicted", "model": "absent.npz"}, "absent.npz: there is no such file; give an OSL predictor, or train one"),
        ({"kind": "noise", "model": "absent.npz"}, "absent.npz: there is no such file"),
        ({"kind": "predicted", "model": "a\0b"}, "osl_knowledge.model: the path holds a NUL"),
        ({"kind": "noise", "bucket_accuracy": 0.1}, "osl_knowledge.bucket_accuracy: 0.1 is less than the 0.1"),
        ({"kind": "noise", "bucket_accuracy": 0.2, "mape": 0.05}, "osl_knowledge: on this workload lognormal noise of MAPE 0.05 is in"),
    ],
)
def test_what_cannot_be_believed(section: dict[str, Any], sentence: str, tmp_path: Path):
    with pytest.raises(InputError) as error:
        believe(tmp_path, **section)
    assert sentence in str(error.value)


def test_one_length_has_no_buckets(tmp_path: Path):
    with pytest.raises(InputError, match=r"osl_knowledge.bucket_accuracy: the OSL has 1 different value.*; give mape alone"):
        believe(of=as_requests(FRAME.assign(osl=20)), kind="noise")
    assert believe(of=as_requests(FRAME.assign(osl=20)), kind="noise", mape=0.2).osl.std() > 1


# --- the section


def scenario(tmp_path: Path, text: str):
    table = tomllib.loads(to_toml(load_scenario("two-region")[0])) | {"osl_knowledge": tomllib.loads(text)}
    return parse_scenario(table, "s.toml", tmp_path)


def test_the_default_is_the_oracle():
    assert load_scenario("two-region")[0].osl_knowledge.kind == "oracle"
    assert load_scenario("two-region", ["osl_knowledge.kind=mean"])[0].osl_knowledge.kind == "mean"


def test_paths_become_absolute_and_survive_the_run_folder(tmp_path: Path):
    for kind in ("predicted", "noise"):
        whole = scenario(tmp_path, f'kind = "{kind}"\nmodel = "p.npz"').with_absolute_paths(tmp_path)
        again = parse_scenario(tomllib.loads(to_toml(whole)), "again", Path("/elsewhere"))
        assert again.osl_knowledge == whole.osl_knowledge
        assert getattr(again.osl_knowledge, "model", None) == str(tmp_path.resolve() / "p.npz")
    for text in ('kind = "noise"\nmape = 0.3', 'kind = "mean"'):
        assert scenario(tmp_path, text).with_absolute_paths(tmp_path) == scenario(tmp_path, text).with_absolute_paths(Path("/"))


WRONG = {
    "unknown kind": ('kind = "guess"', "osl_knowledge.kind: must be one of 'oracle', 'mean', 'predicted', 'noise' (got 'guess')"),
    "no kind": ("mape = 0.3", "osl_knowledge.kind: this field is missing"),
    "no file": ('kind = "predicted"', "osl_knowledge.model: this field is missing"),
    "empty file": ('kind = "predicted"\nmodel = ""', "osl_knowledge.model: must not be empty"),
    "percent": ('kind = "noise"\nmape = 27.3', "osl_knowledge.mape: must be at most 10 (got 27.3)"),
    "certain": ('kind = "noise"\nbucket_accuracy = 1.0', "osl_knowledge.bucket_accuracy: must be below 1 (got 1.0)"),
    "no error": ('kind = "noise"\nmape = 0.0', "osl_knowledge.mape: must be above 0 (got 0.0)"),
    "NaN": ('kind = "noise"\nmape = nan', "osl_knowledge.mape: must be a finite number"),
    "two sources": ('kind = "noise"\nmape = 0.3\nmodel = "p.npz"', "osl_knowledge: model brings its own figures; give either it or"),
    "a file for the mean": ('kind = "mean"\nmodel = "p.npz"', "osl_knowledge.model: there is no such field"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_section_is_one_sentence(case: str, tmp_path: Path):
    text, sentence = WRONG[case]
    with pytest.raises(InputError) as error:
        scenario(tmp_path, text)
    assert str(error.value).startswith(f"s.toml: {sentence}")


# --- requests to learn from


def test_requests_of_one_label(tmp_path: Path):
    (tmp_path / "t.csv").write_text("arrival_s,isl,osl,model\n2,3,3,b\n0,1,1,a\n1,2,2,b\n")
    frame, notes = training_requests(tmp_path / "t.csv", invalid_rows="error", where={"model": "b"})
    assert frame[["isl", "osl"]].to_numpy().tolist() == [[2, 2], [3, 3]] and list(frame) == ["isl", "osl", "model"]
    assert any("out of order" in note for note in notes)
    for where, sentence in (
        ({"model": "c"}, "--where model=c: .*t.csv has no such request; its values of model are b, a"),
        ({"gpu": "x"}, "--where gpu=x: .*t.csv has no column for it; it can be split by model$"),
    ):
        with pytest.raises(InputError, match=sentence):
            training_requests(tmp_path / "t.csv", invalid_rows="error", where=where)
    (tmp_path / "bare.csv").write_text("arrival_s,isl,osl\n0,1,1\n")
    with pytest.raises(InputError, match=r"--where model=b: .*bare.csv has no column for it; it has neither model nor application"):
        training_requests(tmp_path / "bare.csv", invalid_rows="error", where={"model": "b"})
