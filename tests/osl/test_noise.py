"""The noise is as wrong as it is told to be, by counting on random requests and by integrating numerically."""

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from jaxserve.errors import InputError
from jaxserve.osl.buckets import bucket_edges, score
from jaxserve.osl.noise import GREENSERVE_BUCKET_ACCURACY, GREENSERVE_MAPE, Noise, calibrate

N = 200_000
OSL = np.maximum(np.rint(np.random.default_rng(0).lognormal(4.5, 0.9, N)), 1)
SHORT = np.random.default_rng(1).integers(1, 9, N).astype(np.float64)
"""Where one token is the floor of many beliefs and every bucket is one or two tokens wide."""
STANDARD_ERRORS = 4.5


def believed(noise: Noise, osl: np.ndarray, seed: int = 2) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return noise.believed(osl, rng.standard_normal(len(osl)), rng.random(len(osl)))


FIGURES = {
    "GreenServe, both": (OSL, GREENSERVE_BUCKET_ACCURACY, GREENSERVE_MAPE),
    "MAPE alone": (OSL, None, 0.273),
    "large MAPE": (OSL, None, 2.0),
    "accuracy alone": (OSL, 0.82, None),
    "low accuracy": (OSL, 0.25, None),
    "poor predictor": (OSL, 0.45, 0.9),
    "short answers, MAPE": (SHORT, None, 0.5),
    "short answers, accuracy": (SHORT, 0.6, None),
    "short answers, both": (SHORT, 0.8, 0.3),
}


@pytest.mark.parametrize("case", FIGURES)
def test_beliefs_are_as_wrong_as_told(case: str):
    osl, accuracy, mape = FIGURES[case]
    noise = calibrate(osl, accuracy, mape, "x")
    belief = believed(noise, osl)
    assert (belief >= 1).all()
    reached = score(bucket_edges(osl, "", ""), osl, belief)
    if accuracy is not None:
        assert reached.bucket_accuracy == pytest.approx(accuracy, abs=STANDARD_ERRORS * np.sqrt(accuracy * (1 - accuracy) / N))
    if mape is not None:
        error = np.abs(belief - osl) / osl
        assert reached.mape == pytest.approx(mape, abs=STANDARD_ERRORS * error.std() / np.sqrt(N))
    if accuracy is None or mape is None:
        assert noise.exact == 0


def test_mape_of_plain_noise_has_its_closed_form():
    # Far above one token the floor does not matter, and E|exp(sz) - 1| = exp(s^2/2) (2 Phi(s) - 1).
    sigma = calibrate(np.full(10, 10_000), None, 0.273, "x").sigma
    assert np.exp(sigma**2 / 2) * (2 * norm.cdf(sigma) - 1) == pytest.approx(0.273, rel=1e-9)


@pytest.mark.parametrize("osl", [1, 2, 7, 300])
def test_mape_with_the_floor_is_the_integral(osl: int):
    noise = calibrate(np.array([osl]), None, 0.4, "x")

    def error(z: float) -> float:
        return abs(max(osl * np.exp(noise.sigma * z), 1.0) - osl) / osl * norm.pdf(z)

    kinks = [0.0, -np.log(osl) / noise.sigma]
    assert quad(error, -12, 12, points=kinks, limit=200)[0] == pytest.approx(0.4, rel=1e-6)


def test_a_belief_is_of_the_request_alone():
    noise = calibrate(OSL, 0.82, 0.273, "x")
    assert np.array_equal(believed(noise, OSL), believed(noise, OSL))
    assert not np.array_equal(believed(noise, OSL), believed(noise, OSL, seed=3))
    share = np.mean(believed(noise, OSL) == OSL)
    assert share == pytest.approx(noise.exact, abs=0.005) and 0 < noise.exact < 1


IMPOSSIBLE = {
    "one length": (np.full(50, 20), 0.82, None, "x.bucket_accuracy: the OSL has 1 different value(s), fewer than the 6 buckets; give mape"),
    "blinder than blind": (OSL, 0.1, None, "x.bucket_accuracy: 0.1 is less than the 0.1"),
    "less accurate than its MAPE": (OSL, 0.3, 0.1, "x: on this workload lognormal noise of MAPE 0.1 is in the right bucket"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_figures_that_no_noise_has(case: str):
    osl, accuracy, mape, sentence = IMPOSSIBLE[case]
    with pytest.raises(InputError) as error:
        calibrate(osl, accuracy, mape, "x")
    assert str(error.value).startswith(sentence)
