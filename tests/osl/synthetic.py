"""Requests whose OSL follows a known law of ISL, model and application, and the best that anyone could say of it.

log OSL is normal with a mean that is linear in log ISL; OSL is rounded to whole tokens.
"""

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import norm

Floats = NDArray[np.float64]

APPLICATIONS = {"chat": (5.0, 0.1, 0.5, 0.5), "code": (3.2, 0.6, 0.25, 0.3), "summary": (4.4, -0.4, 0.35, 0.2)}
"""Level, slope in log ISL, standard deviation, share of the requests."""
MODELS = {"large": (0.3, 0.4), "small": (-0.2, 0.6)}
"""Shift of the level, share of the requests."""


def requests(n: int, seed: int) -> pd.DataFrame:
    """`n` rows with isl, osl, model and application."""
    rng = np.random.default_rng(seed)
    isl = np.maximum(np.rint(rng.lognormal(6.0, 0.9, n)), 1)
    application = rng.choice(list(APPLICATIONS), n, p=[law[-1] for law in APPLICATIONS.values()])
    model = rng.choice(list(MODELS), n, p=[law[-1] for law in MODELS.values()])
    frame = pd.DataFrame({"isl": isl.astype(np.int64), "model": pd.Categorical(model), "application": pd.Categorical(application)})
    mean, std = law_of(frame, application)
    frame["osl"] = np.maximum(np.rint(np.exp(rng.normal(mean, std))), 1).astype(np.int64)
    return frame


def law_of(frame: pd.DataFrame, application: NDArray[np.str_] | str) -> tuple[Floats, Floats]:
    """Mean and standard deviation [N] of log OSL if the requests were of `application`."""
    level, slope, std, _ = np.array([APPLICATIONS[name] for name in np.broadcast_to(application, len(frame))]).T
    shift = np.array([MODELS[name][0] for name in frame["model"]])
    return level + shift + slope * (np.log(frame["isl"].to_numpy()) - 6.0), std


def best_accuracy(edges: Floats, frame: pd.DataFrame, *, application_known: bool) -> float:
    """Share of the requests whose bucket one guesses who knows the law, and the application or only how frequent each is."""
    cuts = np.log(np.concatenate([[1e-9], edges, [1e12]]))

    def chance(application: NDArray[np.str_] | str) -> Floats:
        mean, std = law_of(frame, application)
        return np.diff(norm.cdf((cuts - mean[:, None]) / std[:, None]), axis=1)

    if application_known:
        shares = chance(frame["application"].to_numpy(str))
    else:
        shares = sum((law[-1] * chance(name) for name, law in APPLICATIONS.items()), np.zeros((len(frame), len(edges) + 1)))
    return float(shares.max(axis=1).mean())
