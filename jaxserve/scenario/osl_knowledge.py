"""What schedulers know of a request's output length (OSL) when they decide; the engine always serves the true one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from jaxserve.errors import InputError
from jaxserve.osl.buckets import Score, score
from jaxserve.osl.files import load
from jaxserve.osl.model import OTHER
from jaxserve.osl.noise import GREENSERVE_BUCKET_ACCURACY, GREENSERVE_MAPE, Noise, calibrate
from jaxserve.osl.predictor import codes
from jaxserve.scenario.rawfile import resolve
from jaxserve.scenario.trace_formats import TimeUnit
from jaxserve.scenario.traces import read_trace
from jaxserve.scenario.workload import STREAM_BELIEF_ERROR, STREAM_BELIEF_EXACT, Requests, random_stream
from jaxserve.scenario.workload_spec import FilePath


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class OracleKnowledge(_Spec):
    """Schedulers know every OSL."""

    kind: Literal["oracle"] = "oracle"


class MeanKnowledge(_Spec):
    """Schedulers believe that every OSL is the mean of the workload's requests."""

    kind: Literal["mean"]


class PredictedKnowledge(_Spec):
    """Schedulers believe the median that a predictor gives from ISL and, where the trace says them, model and application."""

    kind: Literal["predicted"]
    model: FilePath
    """A file of `jaxserve osl-train`."""


class NoiseKnowledge(_Spec):
    """Schedulers believe the true OSL times lognormal noise, as wrong as its figures say (see `jaxserve.osl.noise`).

    The figures: one or both of the two below; those of a predictor on its held-out requests; or, with nothing given, GreenServe's.
    """

    kind: Literal["noise"]
    bucket_accuracy: float | None = Field(default=None, gt=0, lt=1)
    """Share of the beliefs in the right one of six buckets that hold equally many of the workload's requests."""
    mape: float | None = Field(default=None, gt=0, le=10)
    """Mean of |believed - true| / true; 0.273 is 27.3 %."""
    model: FilePath | None = None
    """A file of `jaxserve osl-train`, to be as wrong as it: in bucket accuracy and MAPE, or in one of them where no noise has both."""

    @model_validator(mode="after")
    def _one_source(self) -> "NoiseKnowledge":
        if self.model is not None and (self.bucket_accuracy is not None or self.mape is not None):
            raise ValueError("model brings its own figures; give either it or bucket_accuracy and mape")
        return self


OslKnowledge = Annotated[OracleKnowledge | MeanKnowledge | PredictedKnowledge | NoiseKnowledge, Field(discriminator="kind")]


@dataclass(frozen=True)
class Belief:
    """What the schedulers take for the OSL of R requests."""

    osl: NDArray[np.float64]  # [R] tokens; >= 1, not always whole
    notes: tuple[str, ...]  # sentences for the log


def believed_osl(
    knowledge: OracleKnowledge | MeanKnowledge | PredictedKnowledge | NoiseKnowledge, requests: Requests, *, seed: int, base_dir: Path
) -> Belief:
    """The belief about all of `requests`: a pure function of its arguments and of the file it may name.

    The random numbers of a request depend on `seed` and its place alone, as its lengths do. Relative paths start at `base_dir`. Raises
    `InputError` for a file that is no predictor and for figures that no noise has on this workload.
    """
    true = requests.osl.astype(np.float64)
    if isinstance(knowledge, OracleKnowledge):
        return Belief(true, ())
    if isinstance(knowledge, MeanKnowledge):
        believed = np.full(len(true), true.mean())
        return Belief(believed, (f"schedulers believe every OSL to be the mean, {true.mean():.1f} tokens: {_error(true, believed)}",))
    if isinstance(knowledge, PredictedKnowledge):
        return _predicted(knowledge, requests, true, base_dir)
    return _noisy(knowledge, true, seed, base_dir)


def training_requests(
    path: Path, *, time_unit: TimeUnit | None = None, invalid_rows: Literal["error", "drop"], where: Mapping[str, str]
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The requests of a trace as `jaxserve.osl.train.train` takes them, in order of arrival, and sentences on how the file was read.

    `where` keeps those of one model or application: `{"model": "GPT-4"}`. Raises `InputError` where that names no column or no request.
    """
    trace = read_trace(path, time_unit=time_unit, invalid_rows=invalid_rows)
    labels = {name: column for name, column in (("model", trace.model), ("application", trace.application)) if column is not None}
    requests = pd.DataFrame({"isl": trace.isl, "osl": trace.osl, **labels})
    for name, value in where.items():
        if name not in labels:
            known = f"it can be split by {' and '.join(labels)}" if labels else "it has neither model nor application"
            raise InputError(f"--where {name}={value}: {path} has no column for it; {known}")
        requests = requests.loc[requests[name] == value]
        if not len(requests):
            held = ", ".join(map(str, labels[name].categories))
            raise InputError(f"--where {name}={value}: {path} has no such request; its values of {name} are {held[:200]}")
    return requests, trace.notes


def _predicted(knowledge: PredictedKnowledge, requests: Requests, true: NDArray[np.float64], base_dir: Path) -> Belief:
    path = resolve(base_dir, knowledge.model, "osl_knowledge.model")
    predictor = load(path)
    encoding = predictor.facts.encoding
    believed = predictor.predict(requests.isl, requests.model, requests.application).median
    right = score(np.array(encoding.bucket_edges), true, believed).bucket_accuracy
    notes = [f"schedulers believe the OSL that {path.name} predicts: {_error(true, believed)}, the right bucket for {right:.1%}"]
    for what, labels, known in (
        ("model", requests.model, encoding.models),
        ("application", requests.application, encoding.applications),
    ):
        unknown = float((codes(labels, known, len(true)) == OTHER).mean())
        if known and unknown:
            notes.append(f"{unknown:.1%} of the requests are of no {what} that {path.name} knows, and are taken for others")
    return Belief(believed, tuple(notes))


def _noisy(knowledge: NoiseKnowledge, true: NDArray[np.float64], seed: int, base_dir: Path) -> Belief:
    accuracy, mape, whose = knowledge.bucket_accuracy, knowledge.mape, ""
    if knowledge.model is not None:
        path = resolve(base_dir, knowledge.model, "osl_knowledge.model")
        noise, figures = _like(true, load(path).facts.held_out.predictor)
        whose = f", with {figures} of {path.name}"
    else:
        if accuracy is None and mape is None:
            accuracy, mape, whose = GREENSERVE_BUCKET_ACCURACY, GREENSERVE_MAPE, ", with the figures of GreenServe's predictor"
        noise = calibrate(true, accuracy, mape, "osl_knowledge")
    normal = random_stream(seed, STREAM_BELIEF_ERROR).standard_normal(len(true))
    believed = noise.believed(true, normal, random_stream(seed, STREAM_BELIEF_EXACT).random(len(true)))
    note = f"schedulers believe the OSL with an error{whose}: lognormal, sigma {noise.sigma:.3f}"
    note += f", for {1 - noise.exact:.1%} of the requests" if noise.exact else ""
    return Belief(believed, (f"{note}; {_error(true, believed)}",))


def _like(true: NDArray[np.float64], figures: Score) -> tuple[Noise, str]:
    """The noise nearest to a predictor, and which of its figures it has.

    A predictor misses most in the outer buckets, noise about the truth does not: for its MAPE it may be right too often to have both.
    """
    accuracy, mape = figures.bucket_accuracy, figures.mape
    for named, wanted in (("bucket accuracy and MAPE", (accuracy, mape)), ("the bucket accuracy, but not the MAPE,", (accuracy, None))):
        try:
            return calibrate(true, *wanted, "osl_knowledge"), named
        except InputError:
            continue
    return calibrate(true, None, mape, "osl_knowledge"), "the MAPE, but not the bucket accuracy,"


def _error(true: NDArray[Any], believed: NDArray[np.float64]) -> str:
    return f"MAPE {np.mean(np.abs(believed - true) / true):.1%}"
