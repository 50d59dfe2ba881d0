"""One predictor for all tests: its training is what takes time."""

import pytest

from jaxserve.osl.predictor import Predictor
from jaxserve.osl.train import train
from tests.osl.synthetic import requests


@pytest.fixture(scope="session")
def predictor() -> Predictor:
    """Trained on 12,000 synthetic requests."""
    return train(requests(12_000, seed=0), source="synthetic")
