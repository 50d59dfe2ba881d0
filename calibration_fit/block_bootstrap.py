"""Bootstrap of a request log: whole blocks of time are redrawn, since what runs at once shares its errors.

Rows of a log are not designed, so they are redrawn with their errors (Davison & Hinkley 1997, section 8.2.3), as counts that weigh the
loss of a refit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from calibration_fit.fit import FitResult, make_problem, solve_starts
from calibration_fit.transforms import Bound
from calibration_fit.uncertainty import Bootstrap, small_sample

FEWEST_BLOCKS, MOST_BLOCKS = 8, 40
"""Fewer blocks than these tell no spread; where the log is too short for so many that are independent, that is said."""
STAYS_PER_BLOCK = 3.0
"""Length of a block in typical stays of a request: those that ran at once, and so share errors, are mostly in one block."""
LEVEL = 0.95
INSIDE = 0.02
"""Refits start with every coefficient at this share of its size at least: from a bound they would hardly move."""


def time_blocks(at: np.ndarray, stay_s: float) -> np.ndarray:
    """Block number [R] of times `at`: blocks of equal counts, each some times as long as `stay_s`, the typical stay of a request."""
    n = int(np.clip((at.max() - at.min()) / max(STAYS_PER_BLOCK * stay_s, 1e-9), FEWEST_BLOCKS, MOST_BLOCKS))
    return equal_parts(at, min(n, len(at)))


def equal_parts(at: np.ndarray, n: int) -> np.ndarray:
    """Part number [R], 0 to n - 1, of times `at`: parts of equal counts, in order of time."""
    rank = np.argsort(np.argsort(at, kind="stable"), kind="stable")
    return rank * n // len(at)


def drawn_counts(block: np.ndarray, samples: int, seed: int = 0) -> np.ndarray:
    """How often each row [K, R] is in each of `samples` logs made of as many blocks as there are, drawn with replacement."""
    n = int(block.max()) + 1
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1.0 / n), samples).astype(float)[:, block]


def block_interval(bounds: Sequence[Bound], theta: np.ndarray, size: np.ndarray, redrawn: np.ndarray, blocks: int) -> Bootstrap:
    """Percentile intervals of refits `redrawn` [K, C] about `theta` [C], widened for the few blocks (t for normal, and the share of the
    spread that the fitted coefficients take up), and not below 0 where the `bounds` are.

    An end below a millionth of the coefficient's `size` [C] is 0: the optimiser only comes near to a bound.
    """
    tail = 50.0 * (1.0 - LEVEL)
    free = int((redrawn.max(axis=0) > redrawn.min(axis=0)).sum())
    left = max(blocks - free, 1)
    low, high = theta + small_sample(left) * np.sqrt(blocks / left) * (np.percentile(redrawn, [tail, 100.0 - tail], axis=0) - theta)
    bounded = np.array([bound is not Bound.FREE for bound in bounds])
    low, high = (np.where(bounded & (end < 1e-6 * size), 0.0, end) for end in (low, high))
    return Bootstrap(redrawn, low, high, LEVEL)


def bootstrap_blocks(result: FitResult, block: np.ndarray, samples: int) -> Bootstrap:
    """Block bootstrap of a fit whose rows [R] lie in `block` [R]; all refits in one vmapped solve."""
    problem = make_problem([result.rows], result.form, [result.fixed_values])
    weight = np.zeros((samples, problem.weight.shape[1]))
    weight[:, : len(block)] = drawn_counts(block, samples)
    which = np.zeros(samples, int)
    inside = [INSIDE * s if bound is Bound.NONNEGATIVE else -np.inf for s, bound in zip(problem.scale[0], problem.bounds, strict=True)]
    near = np.repeat(np.maximum(result.theta, inside)[None], samples, axis=0)
    redrawn, *_ = solve_starts(problem, which, weight, problem.measured[which], result.delta, near)
    return block_interval(problem.bounds, result.theta, problem.scale[0], redrawn, int(block.max()) + 1)
