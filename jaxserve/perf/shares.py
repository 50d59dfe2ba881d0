"""The least that work can cost as its share of engine steps, whatever else those steps hold: what a bound over all policies counts.

A step costs g_per_j * energy + g_per_s * time, with factors that differ by time slice and data centre (DC): arrays [T, 2, D], where the
pair holds the ends of a range in which both may vary together (least costs are concave in them, so the ends suffice). They may be negative.
Steps are those of `jaxserve/engine/SEMANTICS.md`. L prompt lengths, C contexts. Of step times only a form below and one above them is used
(`jaxserve/perf/brackets.py`): a second that costs counts by the one, a second that pays (it takes the place of idling) by the other.

A step's energy is its form E, held between idling and board power. Where energy costs something, min(E, board power * time) is the least it
can be; where it earns something, max(E, idle power * time) the most. Both are of E or of the time, and a sum of such shares is no more
(the other way round: no less) than that of the sums, so each request's share of E and of the time is taken by itself.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.perf.brackets import decode_bracket, prefill_bracket
from jaxserve.perf.latency import DecodeForm, PrefillForm
from jaxserve.perf.power import DecodeEnergy, PrefillEnergy
from jaxserve.types import Real, on_host

CONTEXTS = 48
"""Contexts at which a decode token's cost is worked out: it is concave in the context, so chords between them lie below it."""
BATCHES = 512
"""Batch sizes worked out at a time."""

Floats, Ints = NDArray[np.float64], NDArray[np.integer[Any]]
Between = Callable[[int, int], Floats]
"""Of (first slice, slice after the last): the least cost in these slices, by DC. [D, L] or [D, C]"""


Spread = tuple[Floats, Floats]
"""Least and most seconds; one and the same array where they are known."""


class Watts(NamedTuple):
    """Of an engine: what it draws idle, and the most that its boards draw."""

    idle: float
    most: float

    def least_cost(self, per_j: Floats, per_s: Floats, joules: Floats, seconds: Spread) -> Floats:
        """The least that shares of steps can cost, in the shape to which all arguments broadcast."""
        below, above = seconds
        bounded = np.where(per_j > 0, np.minimum(joules, self.most * below), np.maximum(joules, self.idle * above))
        time = per_s * below if above is below else np.maximum(per_s, 0.0) * below + np.minimum(per_s, 0.0) * above
        return per_j * bounded + time


def _ends(lengths: Floats) -> tuple[float, float]:
    return (float(lengths[0]), float(lengths[-1])) if len(lengths) else (1.0, 1.0)


def known(seconds: Real) -> Spread:
    """Seconds without a spread."""
    exact = np.asarray(seconds)
    return exact, exact


def _scaled(seconds: Spread, by: Floats, more: Floats) -> Spread:
    """by * seconds + more."""
    below = by * seconds[0] + more
    return below, below if seconds[1] is seconds[0] else by * seconds[1] + more


class _Shared:
    """What all tokens of a prefill step share: its cost without what single pieces and squares add."""

    def __init__(
        self, seconds: PrefillForm, joules: PrefillEnergy, watts: Watts, tokens: tuple[float, float], lengths: tuple[float, float]
    ) -> None:
        self.below, self.above = prefill_bracket(seconds, tokens, lengths)
        self.energy, self.watts = joules, watts
        self.knots = np.unique([np.asarray(form.tok_knots) for form in (self.below, self.above)])
        self.knots = self.knots[np.isfinite(self.knots)]

    def seconds(self, tokens: Floats) -> Spread:
        """Of steps of so many tokens."""
        below = np.asarray(self.below(on_host(tokens), 0.0, 0.0))
        return below, below if self.above is self.below else np.asarray(self.above(on_host(tokens), 0.0, 0.0))

    def joules(self, tokens: Floats) -> Floats:
        """Joules of steps of so many tokens."""
        return np.asarray(self.energy(on_host(tokens), 0.0))

    def cost(self, g_per_j: Floats, g_per_s: Floats, tokens: float) -> Floats:
        """Of one step, in every slice [T, 2, D]."""
        at = np.array(tokens)
        return self.watts.least_cost(g_per_j, g_per_s, self.joules(at), self.seconds(at))

    def sizes(self, alone: Floats, full: float) -> Floats:
        """Sizes [K, L] of a step one of which is best for prompts that make up `alone` [L] of its tokens.

        Per token, what is shared is monotone in the number of tokens between knots: so the best step holds the prompt alone, is as long
        as a knot, or is full.
        """
        knots = [np.clip(knot, alone, full) for knot in self.knots]
        return np.stack([alone, *knots, np.full_like(alone, full)])

    def square(self, g_per_j: Floats, g_per_s: Floats) -> Floats:
        """Cost of a token^2 [T, 2, D]; both forms have the same seconds."""
        return self.watts.least_cost(g_per_j, g_per_s, np.asarray(self.energy.e_pre_sq), known(self.below.b2))

    def piece(self, g_per_j: Floats, g_per_s: Floats) -> Floats:
        """Cost of a piece [T, 2, D]; likewise."""
        return self.watts.least_cost(g_per_j, g_per_s, np.asarray(0.0), known(self.below.b1))


class PrefillShares:
    """Prompts that are packed into steps of at most `step_tokens`. `isl` [n] are all prompts there are, `watts` holds steps.

    `seconds`, `joules` [K, L]: what a prompt of each of the `lengths` has of a step of each of K sizes that takes it whole (or of full
    steps, if it is too long for one); of seconds the least.
    """

    def __init__(
        self, seconds: PrefillForm, joules: PrefillEnergy, watts: Watts, isl: Ints, step_tokens: float, prefill_first: bool
    ) -> None:
        self.lengths = np.unique(isl).astype(np.float64)
        total = float(isl.sum(dtype=np.int64))
        self.full = max(1.0, min(step_tokens, total))
        self.too_long = self.lengths > step_tokens
        # With `prefill_first` several prompts are never admitted for more than one step.
        self.split = self.too_long if prefill_first else np.full(len(self.lengths), total > step_tokens)
        # Of a prompt in pieces, (c + n)^2 - c^2 over n lies between 1 and twice its length.
        shortest, longest = _ends(self.lengths)
        ends = (1.0, 2.0 * longest) if self.split.any() else (shortest, longest)
        self._shared = shared = _Shared(seconds, joules, watts, (1.0, self.full), ends)
        sizes = shared.sizes(np.minimum(self.lengths, self.full), self.full)
        share, pieces, below = self.lengths / sizes, np.ceil(self.lengths / self.full), shared.below
        self._spread = _scaled(shared.seconds(sizes), share, float(below.b1) * pieces + float(below.b2) * self.lengths**2)
        self.joules, self.seconds = share * shared.joules(sizes) + joules.e_pre_sq * self.lengths**2, self._spread[0]

    def least(self, g_per_j: Floats, g_per_s: Floats) -> Between:
        """A prompt's least cost [D, L] in a DC, whole or in pieces."""
        whole = np.empty((len(g_per_j), g_per_j.shape[2], len(self.lengths)))
        for row, j, s in zip(whole, g_per_j[..., None, None], g_per_s[..., None, None], strict=True):
            np.min(self._shared.watts.least_cost(j, s, self.joules, self._spread), axis=(0, 2), out=row)
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
        tokens of a full one; that gain, the largest at R = 0 or at a knot, is shared by all tokens of the iteration, more than a step's.
        """
        shared = self._shared
        token, gain = shared.cost(g_per_j, g_per_s, self.full) / self.full, np.zeros_like(g_per_j)
        for size in (0.0, *np.minimum(shared.knots, self.full)):
            np.maximum(gain, (size * token - shared.cost(g_per_j, g_per_s, size)) / self.full, out=gain)
        square, piece = shared.square(g_per_j, g_per_s), shared.piece(g_per_j, g_per_s)
        return token.min(axis=1), square.min(axis=1), piece.min(axis=1), gain.max(axis=1)


class PaddedPrefillShares:
    """The same where a step takes its prompts padded to the longest of them.

    A prompt has at least its length, at most the longest of all, of a step's tokens: whichever costs less. One that is too long for a
    step fills some by itself, and its rest, of which the same holds, goes on from there.
    """

    def __init__(self, seconds: PrefillForm, joules: PrefillEnergy, watts: Watts, isl: Ints, step_tokens: float) -> None:
        self.lengths = np.unique(isl).astype(np.float64)
        self.full = step_tokens
        self._alone = np.floor(self.lengths / step_tokens)  # full steps of a prompt; a step that it just fills is one
        self._rest = self.lengths - self._alone * step_tokens
        shortest, longest = _ends(self.lengths)
        # Of a rest that is padded, (c + n)^2 - c^2 over n is below three times the longest.
        ends = (1.0, 3.0 * longest) if self._alone.any() else (shortest, longest)
        self._shared = shared = _Shared(seconds, joules, watts, (1.0, step_tokens), ends)
        longest = min(longest, step_tokens)
        sizes = shared.sizes(np.maximum(self._rest, 1.0), step_tokens)
        share, full = self._rest / sizes, np.array(step_tokens)
        self._spread = _scaled(shared.seconds(sizes), share, np.asarray(0.0))
        self._joules, self._stretch = share * shared.joules(sizes), longest / np.maximum(self._rest, 1.0)
        before, rests = self._alone * step_tokens, self._rest > 0
        self._squares = self._rest**2 + 2 * before * self._rest, np.where(rests, longest**2 + 2 * before * longest, 0.0)
        whole, pieces = self._alone * shared.seconds(full)[0], self._alone + rests
        self.seconds = self._spread[0] + whole + shared.below.b1 * pieces + shared.below.b2 * self.lengths**2
        self.joules = self._joules + self._alone * shared.joules(full) + joules.e_pre_sq * self.lengths**2

    def least(self, g_per_j: Floats, g_per_s: Floats) -> Between:
        """A prompt's least cost [D, L] in a DC."""
        square, piece = self._shared.square(g_per_j, g_per_s), self._shared.piece(g_per_j, g_per_s)
        full = (self._shared.cost(g_per_j, g_per_s, self.full) + piece).min(axis=1)
        rest = np.empty((len(g_per_j), g_per_j.shape[2], len(self.lengths)))
        each = (g_per_j, g_per_s, square, piece)
        for row, j, s, q, p in zip(rest, *(x[..., None, None] for x in each), strict=True):
            linear = self._shared.watts.least_cost(j, s, self._joules, self._spread)
            padded = np.where(linear < 0, linear * self._stretch, linear) + np.maximum(q, 0.0) * self._squares[0]
            np.min(padded + np.minimum(q, 0.0) * self._squares[1] + p * (self._rest > 0), axis=(0, 2), out=row)
        low_square = square.min(axis=1)

        def between(first: int, end: int) -> Floats:
            alone, squares = full[first:end].min(axis=0)[:, None], low_square[first:end].min(axis=0)[:, None]
            return rest[first:end].min(axis=0) + self._alone * alone + squares * (self._alone * self.full) ** 2

        return between


class DecodeShares:
    """Tokens after the first of n requests, generated in batches of 1 to `max_num_seqs`, as the KV cache allows.

    `contexts` [C] span the cached tokens that a request may have in a decode step; `context` is the mean over tokens. `batch` [B] are all
    batch sizes, `fitting` of which are filled by requests of the mean context; `mean_s`, `mean_j` [B] are the shares of such a token.
    """

    def __init__(
        self,
        seconds: DecodeForm,
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
        self._times, self._energy, self._watts = decode_bracket(seconds, (1.0, self.batch[-1]), (low, high)), joules, watts
        self._s, self._j = self.share(self.contexts)
        (mean_s, _), mean_j = self.share(np.array([self.context]))
        self.mean_s, self.mean_j = mean_s[:, 0], mean_j[:, 0]

    def share(self, contexts: Floats) -> tuple[Spread, Floats]:
        """Seconds and joules of the energy form [B, C], of a token in a step all of whose requests have its context.

        A batch given, both are linear in the cached tokens K, so this is the token's share whatever the others' contexts are.
        """
        batch = self.batch[:, None]
        step = on_host(batch), on_host(batch * contexts)
        below, above = self._times
        seconds = np.asarray(below(*step)) / batch
        return (seconds, seconds if above is below else np.asarray(above(*step)) / batch), np.asarray(self._energy(*step)) / batch

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
                below = self._s[0][some]
                seconds = below, below if self._s[1] is self._s[0] else self._s[1][some]
                share = self._watts.least_cost(per_j, per_s, self._j[some], seconds)
                np.minimum(row, (share + price * over[some]).min(axis=(0, 2)), out=row)
        return lambda first, end: cost[first:end].min(axis=0)
