"""What `jaxserve osl-train` says of a predictor."""

import time

import numpy as np

from jaxserve.osl.buckets import names
from jaxserve.osl.model import QUANTILES
from jaxserve.osl.predictor import BATCH, Predictor

TIMED_BATCHES = 8


def lines(predictor: Predictor) -> list[str]:
    """Rows, buckets and held-out scores, the constant beliefs beside the predictor's."""
    facts = predictor.facts
    training, held, encoding = facts.training, facts.held_out, facts.encoding
    models, applications = (", ".join(labels) or "none" for labels in (encoding.models, encoding.applications))
    rows = {
        "predictor": held.predictor,
        "constant: commonest bucket, median": held.constant_median,
        "constant: mean": held.constant_mean,
    }
    shares = ", ".join(f"{share:.1%} at or below the {q:.0%} quantile" for share, q in zip(held.below_quantile, QUANTILES, strict=True))
    return [
        f"{training.train_rows} requests learned from (the first 80 % by time), the last {training.held_out_rows} held out",
        f"known models: {models}; applications: {applications}",
        f"OSL buckets (tokens): {', '.join(names(encoding.bucket_edges))}",
        f"{'held out':36}{'right bucket':>13}{'or next to it':>15}{'MAPE of OSL':>13}",
        *(f"{name:36}{s.bucket_accuracy:13.1%}{s.adjacent_accuracy:15.1%}{s.mape:13.1%}" for name, s in rows.items()),
        f"held-out OSL: {shares}",
        f"{milliseconds(predictor):.2g} ms a request in batches of {BATCH}",
    ]


def milliseconds(predictor: Predictor) -> float:
    """Wall time a request of a batched prediction, once compiled."""
    scale = predictor.facts.encoding.isl
    isl = np.random.default_rng(0).integers(int(scale.least), int(scale.most) + 1, TIMED_BATCHES * BATCH)
    predictor.predict(isl[:1], None, None)  # compiles
    began = time.perf_counter()
    predictor.predict(isl, None, None)
    return (time.perf_counter() - began) / len(isl) * 1e3
