"""The least that work can cost as its share of engine steps, whatever else those steps hold: what a bound over all policies counts.

A step costs g_per_j * energy + g_per_s * time, with factors that differ by time slice and data centre (DC): arrays [T, 2, D], where the
pair holds the ends of a range in which both may vary together (least costs are concave in them, so the ends suffice). They may be negative.
Steps are those of `jaxserve/engine/SEMANTICS.md`. L prompt lengths, C contexts.

A step's energy is its form E, held between idling and board power. Where energy costs something, min(E, board power * time) is the least it
can be; where it earns something, max(E, idle power * time) the most. Both are of E or of the time, and a sum of such shares is no more
(the other way round: no less) than that of the sums, so each request's share of E and of the time is taken by itself.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.perf.latency import DecodeTime, PrefillTime, TwoPieceDecodeTime
from jaxserve.perf.power import DecodeEnergy, PrefillEnergy
from jaxserve.types import on_host

CONTEXTS = 48
"""Contexts at which a decode token's cost is worked out: it is concave in the context, so chords between them lie below it."""
BATCHES = 512
"""Batch sizes worked out at a time."""

Floats, Ints = NDArray[np.float64], NDArray[np.integer[Any]]
Between = Callable[[int, int], Floats]
"""Of (first slice, slice after the last): the least cost in these slices, by DC. [D, L] or [D, C]"""


class Watts(NamedTuple):
    """Of an engine: what it draws idle, and the most that its boards draw."""

    idle: float
    most: float

    def least_cost(self, per_j: Floats, per_s: Floats, joules: Floats, seconds: Floats) -> Floats:
        """The least that shares of steps can cost, in the shape to which all arguments broadcast."""
        bounded = np.where(per_j > 0, np.minimum(joules, self.most * seconds), np.maximum(joules, self.idle * seconds))
        return per_j * bounded + per_s * seconds


class PrefillShares:
    """Prompts that are packed into steps of at most `step_tokens`. `isl` [n] are all prompts there are, `watts` holds steps.

    `seconds`, `joules` [3, L]: what a prompt of each of the `lengths` has of a step that takes it whole (or of full steps, if it is too
    long for one). What all tokens of a step share is, per token, monotone in their number on both sides of the knee, so the best step
    holds the prompt alone, is as long as the knee, or is full.
    """

    def __init__(
        self, seconds: PrefillTime, joules: PrefillEnergy, watts: Watts, isl: Ints, step_tokens: float, prefill_first: bool
    ) -> None:
        self.lengths = np.unique(isl).astype(np.float64)
        total = float(isl.sum(dtype=np.int64))
        self.full = max(1.0, min(step_tokens, total))
        self.too_long = self.lengths > step_tokens
        # With `prefill_first` several prompts are never admitted for more than one step.
        self.split = self.too_long if prefill_first else np.full(len(self.lengths), total > step_tokens)
        self._time, self._energy, self._watts = seconds, joules, watts
        alone = np.minimum(self.lengths, self.full)
        sizes = np.stack([alone, np.clip(seconds.tok_knee, alone, self.full), np.full_like(alone, self.full)])
        share, tokens = self.lengths / sizes, on_host(sizes)
        pieces = np.ceil(self.lengths / self.full)
        self.seconds = share * np.asarray(seconds(tokens, 0.0, 0.0)) + seconds.b1 * pieces + seconds.b2 * self.lengths**2
        self.joules = share * np.asarray(joules(tokens, 0.0)) + joules.e_pre_sq * self.lengths**2

    def least(self, g_per_j: Floats, g_per_s: Floats) -> Between:
        """A prompt's least cost [D, L] in a DC, whole or in pieces."""
        whole = np.empty((len(g_per_j), g_per_j.shape[2], len(self.lengths)))
        for row, j, s in zip(whole, g_per_j[..., None, None], g_per_s[..., None, None], strict=True):
            np.min(self._watts.least_cost(j, s, self.joules, self.seconds), axis=(0, 2), out=row)
        whole[..., self.too_long] = np.inf
        token, square, piece, gain = self._in_pieces(g_per_j, g_per_s)
        fewest = np.ceil(self.lengths / self.full)
        most = np.where(self.lengths > 1, np.ceil((self.lengths - 1) / self.full) + 1, 1)

        def between(first: int, end: int) -> Floats:
            cost = whole[first:end].min(axis=0)
            if self.split.any():
                t, q, p = (each[first:end].min(axis=0)[:, None] for each in (token, square, piece))
                t = t - gain[first:].max(axis=0)[:, None]  # the last step of the iteration may come after these slices
                cut = t * self.lengths + q * self.lengths**2 + np.minimum(p * fewest, p * most)
                cost = np.where(self.split, np.minimum(cost, cut), cost)
            return cost

        return between

    def _in_pieces(self, g_per_j: Floats, g_per_s: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """Of a prompt in an iteration of several steps, least cost per token, token^2 and piece, and what may go off a token's: [T, D].

        All steps but the last are full, so a token costs what it does in a full step. The last, of R < full tokens, may cost less than R
        tokens of a full one; that gain, the largest at R = 0 or at the knee, is shared by all tokens of the iteration, more than a step's.
        """

        def least(joules: float, seconds: float) -> Floats:
            return self._watts.least_cost(g_per_j, g_per_s, np.asarray(joules), np.asarray(seconds)).min(axis=1)

        def shared(tokens: float) -> Floats:
            return least(float(self._energy(tokens, 0.0)), float(self._time(tokens, 0.0, 0.0)))

        token, knee = shared(self.full) / self.full, min(float(self._time.tok_knee), self.full)
        gain = np.maximum(np.maximum(-shared(0.0), knee * token - shared(knee)), 0.0) / self.full
        return token, least(float(self._energy.e_pre_sq), float(self._time.b2)), least(0.0, float(self._time.b1)), gain


class DecodeShares:
    """Tokens after the first of n requests, generated in batches of 1 to `max_num_seqs`, as the KV cache allows.

    `contexts` [C] span the cached tokens that a request may have in a decode step; `context` is the mean over tokens. `batch` [B] are all
    batch sizes, `fitting` of which are filled by requests of the mean context; `mean_s`, `mean_j` [B] are the shares of such a token.
    """

    def __init__(
        self,
        seconds: DecodeTime | TwoPieceDecodeTime,
        joules: DecodeEnergy,
        watts: Watts,
        isl: Ints,
        osl: Ints,
        max_num_seqs: int,
        kv_tokens: float,
    ) -> None:
        generated, some = osl - 1.0, osl > 1
        self.tokens = float(generated.sum())
        self.context = float((generated * (isl + osl / 2)).sum()) / self.tokens if self.tokens else 2.0
        low, high = (float(isl[some].min()) + 1, float((isl + generated)[some].max())) if self.tokens else (2.0, 2.0)
        self.contexts = np.unique(np.clip(np.geomspace(low, high, CONTEXTS), low, high))
        self.batch = np.arange(1.0, max(1, min(max_num_seqs, int(kv_tokens // (low + 1)), int(some.sum()))) + 1)
        self.fitting = int(np.clip(kv_tokens // (self.context + 1), 1, len(self.batch)))
        self.kv_tokens = kv_tokens
        self._time, self._energy, self._watts = seconds, joules, watts
        self._s, self._j = self.share(self.contexts)
        self.mean_s, self.mean_j = (each[:, 0] for each in self.share(np.array([self.context])))

    def share(self, contexts: Floats) -> tuple[Floats, Floats]:
        """Seconds and joules of the energy form [B, C], of a token in a step all of whose requests have its context.

        A batch given, both are linear in the cached tokens K, so this is the token's share whatever the others' contexts are.
        """
        batch = self.batch[:, None]
        step = on_host(batch), on_host(batch * contexts)
        return np.asarray(self._time(*step)) / batch, np.asarray(self._energy(*step)) / batch

    def least(self, g_per_j: Floats, g_per_s: Floats) -> Between:
        """A token's least cost [D, C] in a DC, by context.

        The KV cache enters by a price: each request has its cached tokens and the one in the making reserved, so K + B <= capacity, and a
        step costs no less than with price * (K + B - capacity) added. Any price >= 0 will do; this one makes the largest batch of
        mean requests that fits the best one for them.
        """
        cost = np.full((len(g_per_j), g_per_j.shape[2], len(self.contexts)), np.inf)
        over = self.contexts + 1 - (self.kv_tokens / self.batch)[:, None]
        b, s, j = self.fitting, self.mean_s, self.mean_j
        for row, per_j, per_s in zip(cost, g_per_j[..., None, None], g_per_s[..., None, None], strict=True):
            price = np.zeros_like(per_j)
            if b < len(self.batch):
                dearer = per_j * (j[b - 1] - j[b]) + per_s * (s[b - 1] - s[b])
                price = np.maximum(dearer, 0.0) * (b * (b + 1) / self.kv_tokens)
            for at in range(0, len(self.batch), BATCHES):
                some = slice(at, at + BATCHES)
                spent = self._watts.least_cost(per_j, per_s, self._j[some], self._s[some])
                np.minimum(row, (spent + price * over[some]).min(axis=(0, 2)), out=row)
        return lambda first, end: cost[first:end].min(axis=0)
