"""How far the coefficients can be trusted: bootstrap intervals, and which of them the data pin down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from calibration_fit.fit import FitResult, coefficient_scale, make_problem, solve_starts
from calibration_fit.losses import pseudo_huber_slopes

BOOTSTRAP_SAMPLES = 200
LOOSE_SHARE = 0.5
"""A coefficient whose standard error exceeds this share of its value is called loose: its size, even its sign, is open."""

SPECTRUM_FLOOR = 1e-14
"""Of the greatest eigenvalue: smaller ones are rounding."""

PINNED = "Every coefficient is pinned down by these data."


@dataclass(frozen=True)
class Bootstrap:
    """Refits to resampled measurements: `samples` [K, C] and percentile intervals `low`, `high` [C] at `level`."""

    samples: np.ndarray
    low: np.ndarray
    high: np.ndarray
    level: float


@dataclass(frozen=True)
class Identifiability:
    """What the curvature of the loss says.

    `spectrum` [C'] eigenvalues, largest first, of the Hessian in coefficients scaled to carry the whole measured value each (1 = the
    coefficient alone moves every prediction by its full size); `standard_error` [C'] in the coefficients' units; `names` the free ones;
    `sentences` the same in words.
    """

    names: tuple[str, ...]
    spectrum: np.ndarray
    standard_error: np.ndarray
    sentences: tuple[str, ...]


def bootstrap(results: Sequence[FitResult], samples: int = BOOTSTRAP_SAMPLES, level: float = 0.95, seed: int = 0) -> list[Bootstrap]:
    """Residual bootstrap of every fit, all resamples of all setups in one vmapped solve.

    The grid of a measurement is designed, so rows stay and their errors are redrawn: each measured value becomes the prediction times one
    plus a relative error drawn from those of all rows, each widened by 1/sqrt(1 - leverage), since a fit bends towards its rows
    (Davison & Hinkley 1997, section 6.2.3). Drawing from all rows fits the loss, which takes relative errors to be alike everywhere.
    The interval speaks of noise, not of a form that does not fit: that is what the held-out error is for.
    """
    first = results[0]
    problem = make_problem([r.rows for r in results], first.form, [r.fixed_values for r in results])
    rng = np.random.default_rng(seed)
    n = problem.weight.shape[1]
    setup = np.repeat(np.arange(len(results)), samples)
    measured = np.ones((len(setup), n))
    for p, r in enumerate(results):
        error = np.clip((r.rows.measured / r.predicted - 1.0) / np.sqrt(1.0 - _leverage(r)), -0.9, 9.0)
        error *= small_sample(len(r.rows) - len(free_places(r)))
        drawn = rng.choice(error - error.mean(), (samples, len(r.rows)))
        measured[setup == p, : len(r.rows)] = r.predicted * (1.0 + drawn)
    near = np.stack([r.theta for r in results])[setup]
    theta, *_ = solve_starts(problem, setup, problem.weight[setup], measured, first.delta, near)
    tail = 50.0 * (1.0 - level)
    out = []
    for p in range(len(results)):
        mine = theta[setup == p]
        low, high = np.percentile(mine, [tail, 100.0 - tail], axis=0)
        out.append(Bootstrap(mine, low, high, level))
    return out


def small_sample(free: int) -> float:
    """Student's t over the normal at 95 % (its first Cornish-Fisher term): a spread is itself estimated, from `free` + 1 values."""
    return 1.0 + (1.96**2 + 1.0) / (4.0 * max(free, 1))


def identify(result: FitResult, block: np.ndarray | None = None) -> Identifiability:
    """Standard errors and weak directions from the Hessian of the loss at the optimum; rows of one `block` [R] err together."""
    residual = result.predicted / result.rows.measured - 1.0
    return curvature(result, sensitivity(result), residual, _scale(result), np.arange(len(residual)) if block is None else block)


def curvature(result: FitResult, slopes: np.ndarray, residual: np.ndarray, scale: np.ndarray, block: np.ndarray) -> Identifiability:
    """`identify` for given relative errors [R], their derivatives by the free coefficients [R, C'], the sizes of these [C'], and what errs
    together [R].

    The Hessian is its Gauss-Newton part, so never negative.
    """
    index = free_places(result)
    names = tuple(result.form.coefficients[j] for j in index)
    slope, bend = pseudo_huber_slopes(residual, result.delta)
    scaled = slopes * scale
    n, c = scaled.shape
    hessian = (scaled * bend[:, None]).T @ scaled / n
    values, vectors = np.linalg.eigh(hessian)
    # Sandwich variance of a robust estimate (Huber 1967): H^-1 (sum of psi J over a block, squared) H^-1, on a spectrum cut where it is
    # only rounding. Rows that err together enter as their sum (Liang & Zeger 1986).
    score = np.zeros((int(block.max()) + 1, c))
    np.add.at(score, block, scaled * slope[:, None])
    meat = score.T @ score / n
    usable = np.maximum(values, SPECTRUM_FLOOR * values.max())
    inverse = (vectors / usable) @ vectors.T
    covariance = inverse @ meat @ inverse / max(n - c, 1)
    error = np.sqrt(np.maximum(np.diag(covariance), 0.0)) * scale
    theta = result.theta[index]
    sentences = _words(result, names, theta, error, values, vectors)
    return Identifiability(names, values[::-1], error, sentences)


def classical_covariance(result: FitResult) -> np.ndarray:
    """Covariance [C', C'] of the free coefficients if errors are alike and independent (Huber 1981, section 7.6).

    Unlike the sandwich in `curvature` it is large along a direction that the rows do not see at all.
    """
    scale = _scale(result)
    scaled = sensitivity(result) * scale
    residual = result.predicted / result.rows.measured - 1.0
    slope, bend = pseudo_huber_slopes(residual, result.delta)
    values, vectors = np.linalg.eigh(scaled.T @ scaled)
    inverse = (vectors / np.maximum(values, SPECTRUM_FLOOR * values.max())) @ vectors.T
    variance = (slope**2).sum() / max(len(residual) - len(scale), 1) / bend.mean() ** 2
    return variance * inverse * np.outer(scale, scale)


def _words(result, names, theta, error, values, vectors) -> tuple[str, ...]:
    """What the data do not pin down, said plainly."""
    out = []
    unit = result.form.units
    loose = [j for j in range(len(names)) if error[j] > LOOSE_SHARE * abs(theta[j])]
    for j in loose:
        size = (
            "the data push it to 0" if names[j] in result.at_bound else f"{theta[j]:.3g} +- {error[j]:.2g} {unit.get(names[j], '')}".strip()
        )
        out.append(f"{names[j]} is not pinned down by these data ({size}).")
    flattest = max(values.min(), SPECTRUM_FLOOR * values.max())
    condition, bound = values.max() / flattest, "at least " if values.min() < flattest else ""
    weak = vectors[:, 0]
    order = np.argsort(-np.abs(weak))
    together = [names[j] for j in order if abs(weak[j]) > 0.35]
    if condition > 1e4 and len(together) > 1:
        trade = " and ".join([", ".join(together[:-1]), together[-1]])
        out.append(
            f"{trade} trade off against each other: the loss is {bound}{condition:.1g} times flatter along them than along "
            "the best known direction."
        )
    if not out:
        out.append(PINNED)
    return tuple(out)


def sensitivity(result: FitResult) -> np.ndarray:
    """d(predicted / measured) / d(free coefficients), [R, C']."""
    return result.rows.sensitivity(result.form, result.theta)[:, free_places(result)]


def free_places(result: FitResult) -> list[int]:
    """Places of the coefficients that are not held."""
    return [j for j, k in enumerate(result.form.coefficients) if k not in result.fixed]


def _scale(result: FitResult) -> np.ndarray:
    """Size of each free coefficient [C'] that matters: what it would be alone, the knee's own value."""
    scale = coefficient_scale(result.form, result.rows, result.held)
    if result.form.knee is not None:
        j = result.form.coefficients.index(result.form.knee)
        scale[j] = max(abs(result.theta[j]), 1.0)
    return scale[free_places(result)]


def _leverage(result: FitResult) -> np.ndarray:
    """Share [R] of each row in its own prediction: the diagonal of the hat matrix of the scaled sensitivities."""
    left, size, _ = np.linalg.svd(sensitivity(result) * _scale(result), full_matrices=False)
    used = left[:, size > 1e-10 * size.max()]
    return np.clip((used**2).sum(axis=1), 0.0, 0.9)
