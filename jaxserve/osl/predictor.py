"""A trained predictor: the network with everything that turns requests into its inputs and its outputs into tokens."""

from dataclasses import dataclass
from typing import Annotated, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax import Array
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from jaxserve.osl.buckets import BUCKETS, Score
from jaxserve.osl.model import MEDIAN, OTHER, QUANTILES, Network

BATCH = 4096
"""Requests a call of the network, always: one compiled shape, and what is predicted of a request never depends on how many follow it."""

MOST_CATEGORIES, LONGEST_LABEL = 64, 100
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AtLeastOne = Annotated[float, Field(ge=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Label = Annotated[str, Field(min_length=1, max_length=LONGEST_LABEL)]
Labels = Annotated[tuple[Label, ...], Field(max_length=MOST_CATEGORIES, strict=False)]  # JSON has lists only


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Scale(_Strict):
    """How tokens become inputs: (log(tokens) - mean) / std; `least` and `most` are what the training rows span."""

    mean: Finite
    std: Positive
    least: AtLeastOne
    most: AtLeastOne

    @model_validator(mode="after")
    def _rises(self) -> "Scale":
        if self.least > self.most:
            raise ValueError("least must not be above most")
        return self

    @classmethod
    def of(cls, tokens: NDArray[np.int64]) -> "Scale":
        """The scale of training rows [N]."""
        log = np.log(tokens)
        # A trace may hold prompts of one length only.
        return cls(mean=float(log.mean()), std=float(log.std()) or 1.0, least=float(tokens.min()), most=float(tokens.max()))

    def standard(self, tokens: NDArray[np.number]) -> NDArray[np.float32]:
        """Beyond what was seen in training the network would extrapolate, so there its inputs end."""
        return ((np.log(np.clip(tokens, self.least, self.most)) - self.mean) / self.std).astype(np.float32)

    def tokens(self, standard: NDArray[np.float32]) -> NDArray[np.float64]:
        """And back, within what was seen in training."""
        log = np.clip(standard.astype(np.float64) * self.std + self.mean, np.log(self.least), np.log(self.most))
        return np.exp(log)


class Encoding(_Strict):
    """How requests become the network's inputs, and its outputs tokens."""

    models: Labels
    """Those it knows, numbered from 1; 0 is `OTHER`."""
    applications: Labels
    isl: Scale
    osl: Scale
    bucket_edges: tuple[Positive, ...] = Field(min_length=BUCKETS - 1, max_length=BUCKETS - 1, strict=False)
    """Tokens; see `jaxserve.osl.buckets`."""

    @model_validator(mode="after")
    def _rises(self) -> "Encoding":
        if list(self.bucket_edges) != sorted(set(self.bucket_edges)):
            raise ValueError("bucket_edges: must rise")
        return self


class Training(_Strict):
    """What the predictor learned from, for people."""

    source: str
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Of all rows, the held-out ones included."""
    train_rows: Count
    held_out_rows: Count
    """The last fifth of the rows by time."""
    seed: int = Field(ge=0)


class HeldOut(_Strict):
    """Scores on the rows that the training did not see."""

    predictor: Score
    """Bucket by the bucket head, MAPE of the median."""
    constant_median: Score
    """Everyone gets the median of the training rows, and their commonest bucket."""
    constant_mean: Score
    """Everyone gets the mean of the training rows, and the bucket it lies in."""
    below_quantile: tuple[float, float, float] = Field(strict=False)  # JSON has lists only
    """Share of the OSL at or below each predicted quantile (0.1, 0.5, 0.9); equal to it when calibrated."""


class Facts(_Strict):
    """The header of a predictor's file."""

    format: Literal["jaxserve OSL predictor"] = "jaxserve OSL predictor"
    schema_version: Literal[1] = 1
    encoding: Encoding
    training: Training
    held_out: HeldOut


@dataclass(frozen=True)
class Prediction:
    """Of N requests."""

    bucket: NDArray[np.int64]  # [N], the likeliest one, 0 to 5
    quantiles: NDArray[np.float64]  # [N, 3] tokens, never falling along the second axis

    @property
    def median(self) -> NDArray[np.float64]:
        """[N] tokens: what schedulers are told."""
        return self.quantiles[:, MEDIAN]


@dataclass(frozen=True)
class Predictor:
    """What `train` makes and a file holds."""

    facts: Facts
    network: Network

    def predict(self, isl: NDArray[np.integer], model: pd.Categorical | None, application: pd.Categorical | None) -> Prediction:
        """Bucket and quantiles of N requests; a model or application that is absent (None) or was not trained on is `OTHER`."""
        return predict(self.network, self.facts.encoding, isl, model, application)


def predict(
    network: Network, encoding: Encoding, isl: NDArray[np.integer], model: pd.Categorical | None, application: pd.Categorical | None
) -> Prediction:
    """See `Predictor.predict`."""
    n = len(isl)
    inputs = (encoding.isl.standard(isl), codes(model, encoding.models, n), codes(application, encoding.applications, n))
    bucket, quantiles = np.empty(n, np.int64), np.empty((n, len(QUANTILES)))
    for start in range(0, n, BATCH):
        stop = min(start + BATCH, n)
        filled = (jnp.asarray(np.pad(values[start:stop], (0, BATCH - (stop - start)))) for values in inputs)
        best, standard = _apply(network, *filled)
        bucket[start:stop] = np.asarray(best)[: stop - start]
        quantiles[start:stop] = encoding.osl.tokens(np.asarray(standard)[: stop - start])
    return Prediction(bucket, quantiles)


@eqx.filter_jit
def _apply(network: Network, isl: Array, model: Array, application: Array) -> tuple[Array, Array]:
    logits, quantiles = jax.vmap(network)(isl, model, application)
    return jnp.argmax(logits, axis=-1), quantiles


def codes(labels: pd.Categorical | None, known: tuple[str, ...], n: int) -> NDArray[np.int32]:
    """Code [n] of each request's label: 1 and up in the order of `known`, else `OTHER`."""
    if labels is None:
        return np.full(n, OTHER, np.int32)
    code = {name: i for i, name in enumerate(known, start=OTHER + 1)}
    by_category = np.array([*(code.get(str(name), OTHER) for name in labels.categories), OTHER], np.int32)
    return by_category[labels.codes]  # a missing label has code -1: the last entry
