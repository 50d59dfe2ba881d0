"""The predictor finds a law that is there, knows how sure it is, and says what is wrong with requests it cannot learn from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

import jaxserve.osl.train as training
from jaxserve.errors import InputError
from jaxserve.osl.buckets import bucket_of
from jaxserve.osl.model import HIDDEN, QUANTILES, Network, pinball
from jaxserve.osl.predictor import BATCH, Predictor, _apply
from jaxserve.osl.report import milliseconds
from jaxserve.osl.train import train
from tests.osl.synthetic import APPLICATIONS, best_accuracy, law_of, requests

SHORT_OF_BEST = 0.02
"""What 12,000 requests may fall short of the best accuracy by; five standard errors of 20,000 fresh ones are 0.018."""
CALIBRATION = 0.03
"""How far the share below a quantile may be from it, in any application."""


@pytest.fixture(scope="module")
def fresh() -> pd.DataFrame:
    return requests(20_000, seed=99)


def predict(predictor: Predictor, frame: pd.DataFrame, **changed: Any):
    labels = {name: frame[name].array for name in ("model", "application")} | changed
    return predictor.predict(frame["isl"].to_numpy(), labels["model"], labels["application"])


def right(predictor: Predictor, frame: pd.DataFrame, bucket: np.ndarray) -> float:
    edges = np.array(predictor.facts.encoding.bucket_edges)
    return float((bucket == bucket_of(edges, frame["osl"].to_numpy())).mean())


def test_accuracy_is_near_the_best_possible(predictor: Predictor, fresh: pd.DataFrame):
    edges = np.array(predictor.facts.encoding.bucket_edges)
    best = best_accuracy(edges, fresh, application_known=True)
    assert best > 0.4  # against one in six
    assert right(predictor, fresh, predict(predictor, fresh).bucket) > best - SHORT_OF_BEST
    # What the training said of its own held-out rows is true of others, too.
    assert predictor.facts.held_out.predictor.bucket_accuracy == pytest.approx(best, abs=0.04)


def test_an_unknown_application_costs_what_its_absence_must(predictor: Predictor, fresh: pd.DataFrame):
    edges = np.array(predictor.facts.encoding.bucket_edges)
    best = best_accuracy(edges, fresh, application_known=False)
    assert best < best_accuracy(edges, fresh, application_known=True) - 0.05
    unknown = pd.Categorical(["translation"] * len(fresh))
    strange = predict(predictor, fresh, application=unknown)
    assert right(predictor, fresh, strange.bucket) > best - 2 * SHORT_OF_BEST  # one row in twenty taught it
    for absent in (None, pd.Categorical([""] * len(fresh)), pd.Categorical([None] * len(fresh), categories=["chat"])):
        assert np.array_equal(predict(predictor, fresh, application=absent).quantiles, strange.quantiles)


def test_median_and_quantiles_are_those_of_the_law(predictor: Predictor, fresh: pd.DataFrame):
    quantiles = predict(predictor, fresh).quantiles
    mean, std = law_of(fresh, fresh["application"].to_numpy(str))
    assert np.mean(np.abs(np.log(quantiles[:, 1]) - mean)) < 0.1
    below = norm.cdf((np.log(quantiles) - mean[:, None]) / std[:, None])
    for name in APPLICATIONS:
        assert np.allclose(below[fresh["application"] == name].mean(axis=0), QUANTILES, atol=CALIBRATION)
    assert np.allclose(predictor.facts.held_out.below_quantile, QUANTILES, atol=2 * CALIBRATION)  # whole tokens: ties count as below
    # A normal law has its 0.1 and 0.9 quantiles 1.28 standard deviations from the median.
    assert np.mean(np.log(quantiles[:, 2] / quantiles[:, 0]) / std) == pytest.approx(2.563, rel=0.1)


def test_constants_are_scored_beside_it(predictor: Predictor):
    frame, held = requests(12_000, seed=0), predictor.facts.held_out
    early, late = frame["osl"][:9600].to_numpy(), frame["osl"][9600:].to_numpy()
    assert (predictor.facts.training.train_rows, predictor.facts.training.held_out_rows) == (9600, 2400)
    assert held.constant_median.mape == pytest.approx(np.mean(np.abs(np.median(early) - late) / late))
    assert held.constant_mean.mape == pytest.approx(np.mean(np.abs(early.mean() - late) / late))
    assert held.constant_median.bucket_accuracy == pytest.approx(1 / 6, abs=0.03)
    assert held.predictor.mape < held.constant_median.mape < held.constant_mean.mape


def test_quantiles_never_cross_whatever_the_weights():
    isl, none = np.linspace(-50.0, 50.0, BATCH), np.zeros(BATCH, np.int32)
    for seed in range(10):
        network = jax.tree.map(lambda w: 30 * w, Network(3, 4, key=jax.random.key(seed)))
        bucket, quantiles = _apply(network, isl, none, none)  # the shapes of the fixture: nothing to compile
        assert set(np.unique(bucket)) <= set(range(6))
        assert (np.diff(quantiles, axis=1) >= 0).all()


def test_the_network_is_the_published_one():
    network = Network(3, 4, key=jax.random.key(0))
    assert [layer.weight.shape for layer in network.layers] == [(HIDDEN, 1 + 3 + 4), (HIDDEN, HIDDEN)] and HIDDEN == 128


def test_pinball_loss_is_least_at_the_quantile():
    osl = np.random.default_rng(1).lognormal(size=4001)
    exact = np.quantile(osl, QUANTILES)

    def mean(quantiles: np.ndarray) -> float:
        return float(pinball(jnp.asarray(np.tile(quantiles, (len(osl), 1))), jnp.asarray(osl)).mean())

    for i in range(3):
        for factor in (0.9, 1.1):
            off = exact.copy()
            off[i] *= factor
            assert mean(off) > mean(exact)


def test_a_request_is_predicted_alike_whatever_follows_and_outside_what_was_seen(predictor: Predictor):
    isl = np.arange(1, 2 * BATCH + 100)
    whole = predictor.predict(isl, None, None)
    for n in (1, BATCH, BATCH + 1):
        assert np.array_equal(predictor.predict(isl[:n], None, None).quantiles, whole.quantiles[:n])
    scale = predictor.facts.encoding.isl
    ends = predictor.predict(np.array([1, scale.least, scale.most, 2**31 - 1]), None, None).median
    assert ends[0] == ends[1] and ends[2] == ends[3]
    assert predictor.predict(np.empty(0, np.int64), None, None).quantiles.shape == (0, 3)


def test_a_batched_prediction_takes_less_than_a_tenth_of_a_millisecond_a_request(predictor: Predictor):
    assert milliseconds(predictor) < 0.1


def test_seeds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training, "ROUNDS", 1)
    frame = requests(600, seed=5)
    one, same, other = (train(frame, seed=seed) for seed in (3, 3, 4))

    def weights(predictor: Predictor) -> np.ndarray:
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(predictor.network)])

    assert np.array_equal(weights(one), weights(same)) and one.facts == same.facts
    assert not np.array_equal(weights(one), weights(other))
    assert one.facts.training.sha256 == other.facts.training.sha256
    changed = frame.assign(osl=frame["osl"].where(frame.index != 599, frame["osl"] + 1))
    assert train(changed, seed=3).facts.training.sha256 != one.facts.training.sha256


def test_rare_and_empty_labels_are_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training, "ROUNDS", 1)
    frame = requests(600, seed=5)
    names = ["rare"] * 20 + [""] * 50 + ["long" * 30] * 50 + ["second"] * 200 + ["first"] * 280
    labelled = frame.assign(application=pd.Categorical(names), model=pd.Categorical([None] * 600, categories=["never"]))
    encoding = train(labelled).facts.encoding
    assert (encoding.models, encoding.applications) == ((), ("first", "second"))


def test_prompts_of_one_length_are_no_obstacle(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training, "ROUNDS", 1)
    predictor = train(requests(300, seed=5).assign(isl=7)[["isl", "osl"]])
    assert np.isfinite(predictor.predict(np.array([7]), None, None).median).all()


GOOD = requests(300, seed=7)
WRONG: dict[str, tuple[pd.DataFrame, str]] = {
    "unknown column": (GOOD.assign(prompt="x"), "log: there is no use for a column 'prompt'; the columns are isl, osl, model, application"),
    "no OSL": (GOOD.drop(columns="osl"), "log: has no column osl"),
    "no ISL": (GOOD[["osl"]], "log: has no column isl"),
    "too few": (GOOD[:199], "log: 199 requests are too few to learn from; give at least 200"),
    "none": (GOOD[:0], "log: 0 requests are too few"),
    "OSL zero": (GOOD.assign(osl=GOOD["osl"].where(GOOD.index != 4, 0)), "log, request 4, osl: 0 is no whole number of tokens >= 1"),
    "ISL negative": (GOOD.assign(isl=-GOOD["isl"]), "log, request 0, isl: -"),
    "OSL NaN": (GOOD.assign(osl=GOOD["osl"].where(GOOD.index != 9)), "log, request 9, osl: nan is no whole number"),
    "OSL infinite": (GOOD.assign(osl=np.inf), "log, request 0, osl: inf is no whole number"),
    "OSL broken": (GOOD.assign(osl=1.5), "log, request 0, osl: 1.5 is no whole number"),
    "OSL huge": (GOOD.assign(osl=10**12), "log, request 0, osl: 1000000000000 is no whole number"),
    "OSL text": (GOOD.assign(osl="many"), "log, request 0, osl: many is no whole number"),
    "one bucket": (GOOD.assign(osl=20), "log, first 240 requests: the OSL has 1 different value"),
    "five lengths": (GOOD.assign(osl=1 + np.arange(300) % 5), "log, first 240 requests: the OSL has 5 different value"),
}


@pytest.mark.parametrize("case", WRONG)
def test_requests_that_cannot_be_learned_from(case: str):
    frame, sentence = WRONG[case]
    with pytest.raises(InputError) as error:
        train(frame, source="log")
    assert str(error.value).startswith(sentence)
