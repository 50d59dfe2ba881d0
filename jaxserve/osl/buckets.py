"""Six buckets of OSL, and how good a belief is by them.

The study (arXiv 2610.14571) learns six buckets and does not say where they end. Ours hold equally many requests of the OSL they are made
for (sextiles), so that no constant belief is right more often than about one time in six.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from jaxserve.errors import InputError

BUCKETS = 6


class Score(BaseModel):
    """How good the beliefs of N requests are."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    bucket_accuracy: float = Field(ge=0, le=1)
    """Share in the right bucket."""
    adjacent_accuracy: float = Field(ge=0, le=1)
    """Share in the right bucket or one next to it."""
    mape: float = Field(ge=0)
    """Mean of |believed - true| / true; 1 is 100 %."""


def bucket_edges(osl: NDArray[Any], what: str, remedy: str) -> NDArray[np.float64]:
    """The five upper ends [5] of all buckets but the last, in tokens, as near to the sextiles of `osl` [N] as its values allow.

    They lie half a token above a value that occurs, so no whole OSL is ever on an edge, and every bucket holds one at least. Raises
    `InputError`, from `what` to `remedy`, where `osl` has fewer than six values.
    """
    values, counts = np.unique(osl, return_counts=True)
    if len(values) < BUCKETS:
        raise InputError(f"{what}: the OSL has {len(values)} different value(s), fewer than the {BUCKETS} buckets; {remedy}")
    upto = np.cumsum(counts)
    last = -1
    edges = np.empty(BUCKETS - 1)
    for k in range(BUCKETS - 1):
        left = BUCKETS - k  # buckets still to be cut off, this one included
        start = upto[last] if last >= 0 else 0
        wanted = start + (upto[-1] - start) / left
        choices = np.arange(last + 1, len(values) - left + 1)  # each later bucket must get a value, too
        last = int(choices[np.argmin(np.abs(upto[choices] - wanted))])
        edges[k] = values[last] + 0.5
    return edges


def bucket_of(edges: NDArray[np.float64], osl: NDArray[Any]) -> NDArray[np.int64]:
    """Bucket [N], 0 to 5, of OSL [N]."""
    return np.searchsorted(edges, osl, side="right")


def names(edges: Sequence[float]) -> list[str]:
    """The buckets as people write them: `1-13`, ..., `401+` tokens."""
    first = [1, *(int(edge + 0.5) for edge in edges)]
    return [*(f"{a}-{b - 1}" if b - 1 > a else f"{a}" for a, b in pairwise(first)), f"{first[-1]}+"]


def score(edges: NDArray[np.float64], true: NDArray[Any], believed: NDArray[Any], bucket: NDArray[Any] | None = None) -> Score:
    """The score of `believed` [N] tokens against `true` [N]; `bucket` [N] where the bucket is believed apart from the length."""
    off = np.abs((bucket_of(edges, believed) if bucket is None else bucket) - bucket_of(edges, true))
    return Score(
        bucket_accuracy=float((off == 0).mean()),
        adjacent_accuracy=float((off <= 1).mean()),
        mape=float((np.abs(believed - true) / true).mean()),
    )
