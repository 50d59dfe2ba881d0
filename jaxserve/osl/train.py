"""Training of the OSL predictor from the requests of a trace, and its scores on requests that came later."""

import hashlib
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from jax import Array
from numpy.typing import NDArray
from pandas.util import hash_pandas_object

from jaxserve.errors import InputError
from jaxserve.osl.buckets import bucket_edges, bucket_of, score
from jaxserve.osl.model import OTHER, Network, loss
from jaxserve.osl.predictor import LONGEST_LABEL, MOST_CATEGORIES, Encoding, Facts, HeldOut, Predictor, Scale, Training, codes, predict

NUMBERS, LABELS = ("isl", "osl"), ("model", "application")
MOST_TOKENS = 2**31 - 1
LEAST_ROWS = 200
LEAST_CATEGORY_ROWS = 50
"""Training rows of a model or application of its own; one with fewer is part of `OTHER`."""

BATCH, STEPS, ROUNDS = 512, 150, 20
"""Rows a step, steps a round, rounds: fixed, so that a long trace takes no longer. The best round by the check rows is kept."""
CHECK_SHARE, CHECK_ROWS = 10, 4096
"""One training row in so many is kept from the steps to choose the round by (that many of them, or repeated to be that many); the
held-out rows have no say in it."""
FORGET = 0.05
"""Share of a step's rows whose model, and whose application, is called `OTHER`: the network must learn what to say of unknown ones."""
# OSL can hang on ISL by jumps (prompts from templates): a third of this rate leaves them smoothed over after as many steps.
OPTIMISER = optax.adamw(optax.cosine_decay_schedule(1e-2, STEPS * ROUNDS), weight_decay=1e-4)


class _Rows(NamedTuple):
    """N rows as the network takes them."""

    isl: Any  # float32[N], standardised logarithm
    model: Any  # int32[N]
    application: Any  # int32[N]
    osl: Any  # float32[N], standardised logarithm
    bucket: Any  # int32[N]


def train(requests: pd.DataFrame, *, seed: int = 0, source: str = "requests") -> Predictor:
    """A predictor from `requests`, a row each in order of arrival: columns isl, osl (tokens) and perhaps model, application (text).

    It learns from the first four fifths of the rows and is scored on the rest. The same rows and seed give the same predictor on the
    same machine. Raises `InputError`, beginning with `source`, for other columns, lengths that are no whole numbers of tokens >= 1, fewer
    than 200 rows, or training rows of fewer than six OSL values.
    """
    requests = _checked(requests, source)
    n = len(requests) * 4 // 5
    isl, osl = (requests[name].to_numpy() for name in NUMBERS)
    labels = [pd.Categorical(requests[name]) if name in requests else None for name in LABELS]
    known = [_known(column, n) for column in labels]
    encoding = Encoding(
        models=known[0],
        applications=known[1],
        isl=Scale.of(isl[:n]),
        osl=Scale.of(osl[:n]),
        bucket_edges=tuple(bucket_edges(osl[:n], f"{source}, first {n} requests", "give requests of more varied OSL").tolist()),
    )
    edges = np.array(encoding.bucket_edges)
    rows = _Rows(
        isl=encoding.isl.standard(isl),
        model=codes(labels[0], known[0], len(isl)),
        application=codes(labels[1], known[1], len(isl)),
        osl=encoding.osl.standard(osl),
        bucket=bucket_of(edges, osl).astype(np.int32),
    )
    network = Network(*(OTHER + 1 + len(names) for names in known), key=jax.random.key(seed))
    network = _fit(network, _Rows(*(column[:n] for column in rows)), np.random.default_rng(seed))

    later = predict(network, encoding, isl[n:], *(None if column is None else column[n:] for column in labels))
    median, mean, seen = np.median(osl[:n]), osl[:n].mean(), osl[n:]
    commonest = np.bincount(rows.bucket[:n]).argmax()
    constant = np.ones(len(seen))
    held_out = HeldOut(
        predictor=score(edges, seen, later.median, later.bucket),
        constant_median=score(edges, seen, median * constant, commonest * constant),
        constant_mean=score(edges, seen, mean * constant),
        below_quantile=tuple((seen[:, None] <= later.quantiles).mean(axis=0).tolist()),
    )
    digest = hashlib.sha256(np.asarray(cast(Any, hash_pandas_object)(requests, index=False)).tobytes()).hexdigest()
    training = Training(source=source, sha256=digest, train_rows=n, held_out_rows=len(seen), seed=seed)
    return Predictor(Facts(encoding=encoding, training=training, held_out=held_out), network)


def _checked(requests: pd.DataFrame, source: str) -> pd.DataFrame:
    """The columns that count, lengths as int64."""
    unknown = [str(name) for name in requests if name not in (*NUMBERS, *LABELS)]
    if unknown:
        raise InputError(f"{source}: there is no use for a column {unknown[0]!r}; the columns are {', '.join((*NUMBERS, *LABELS))}")
    for name in NUMBERS:
        if name not in requests:
            raise InputError(f"{source}: has no column {name}; give isl and osl, in tokens")
        tokens = np.asarray(pd.to_numeric(requests[name], errors="coerce"), np.float64)
        bad = ~((tokens >= 1) & (tokens <= MOST_TOKENS) & (np.rint(tokens) == tokens))
        if bad.any():
            row = int(np.argmax(bad))
            raise InputError(f"{source}, request {row}, {name}: {requests[name].iloc[row]} is no whole number of tokens >= 1; drop it")
        requests = requests.assign(**{name: tokens.astype(np.int64)})
    if len(requests) < LEAST_ROWS:
        raise InputError(f"{source}: {len(requests)} requests are too few to learn from; give at least {LEAST_ROWS}")
    return requests


def _known(labels: pd.Categorical | None, n: int) -> tuple[str, ...]:
    """The categories of the first `n` rows that are frequent enough to be told apart, the commonest if there are too many."""
    if labels is None:
        return ()
    counts = np.bincount(labels.codes[:n] + 1, minlength=1 + len(labels.categories))[1:]  # a missing label has code -1
    frequent = sorted((-count, str(name)) for count, name in zip(counts, labels.categories) if count >= LEAST_CATEGORY_ROWS)
    return tuple(sorted([name for _, name in frequent if 1 <= len(name) <= LONGEST_LABEL][:MOST_CATEGORIES]))


def _fit(network: Network, rows: _Rows, rng: np.random.Generator) -> Network:
    """The network after the round with the least loss on the check rows. Shapes, and so compiled code, do not depend on N."""
    check, learn = np.split(rng.permutation(len(rows.isl)), [len(rows.isl) // CHECK_SHARE])
    checked = _Rows(*(column[np.resize(check, CHECK_ROWS)] for column in rows))
    state = OPTIMISER.init(eqx.filter(network, eqx.is_array))
    best, least = network, np.inf
    for _ in range(ROUNDS):
        network, state = _round(network, state, _drawn(rows, learn, rng))
        value = float(_loss(network, checked))
        if value < least:
            best, least = network, value
    return best


def _drawn(rows: _Rows, learn: NDArray[np.integer], rng: np.random.Generator) -> _Rows:
    """The rows [STEPS, BATCH] of a round."""
    chosen = learn[rng.integers(len(learn), size=(STEPS, BATCH))]
    drawn = _Rows(*(column[chosen] for column in rows))
    model, application = (np.where(rng.random(chosen.shape) < FORGET, OTHER, known) for known in (drawn.model, drawn.application))
    return drawn._replace(model=model, application=application)


@eqx.filter_jit
def _loss(network: Network, rows: _Rows) -> Array:
    return loss(network, *rows)


@eqx.filter_jit
def _round(network: Network, state: optax.OptState, rows: _Rows) -> tuple[Network, optax.OptState]:
    weights, shape = eqx.partition(network, eqx.is_array)

    def step(carry: tuple[Any, optax.OptState], batch: _Rows) -> tuple[tuple[Any, optax.OptState], None]:
        weights, state = carry
        gradient = jax.grad(lambda w: loss(eqx.combine(w, shape), *batch))(weights)
        updates, state = OPTIMISER.update(gradient, state, weights)
        return (eqx.apply_updates(weights, updates), state), None

    (weights, state), _ = jax.lax.scan(step, (weights, state), _Rows(*map(jnp.asarray, rows)))
    return eqx.combine(weights, shape), state
