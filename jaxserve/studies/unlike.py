"""Worlds in which schedulers are unlike: one is dealt most, one stops, the load moves between them. Traces say who is dealt what."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from jaxserve.errors import InputError
from jaxserve.scenario.compile import compile_scenario
from jaxserve.scenario.load import load_scenario

Floats = NDArray[np.float64]

SWING_S = 10.0


@dataclass(frozen=True)
class World:
    """Requests of a scenario, dealt to its schedulers as `shares` says: of arrival times [n] and horizon, in s, [n, G]."""

    name: str
    shares: Callable[[Floats, float, int], Floats]


def _uneven(times_s: Floats, horizon_s: float, n: int) -> Floats:
    return np.tile(np.power(0.45, np.arange(n, dtype=np.float64)), (len(times_s), 1))


def _one_stops(times_s: Floats, horizon_s: float, n: int) -> Floats:
    shares = np.ones((len(times_s), n))
    shares[times_s >= horizon_s / 2, 0] = 0.0
    return shares


def _swings(times_s: Floats, horizon_s: float, n: int) -> Floats:
    shares = np.full((len(times_s), n), 0.3 / (n - 1))
    shares[np.arange(len(times_s)), np.where(times_s // SWING_S % 2 == 0, 0, n - 1)] = 0.7
    return shares


WORLDS = (
    World("each scheduler is dealt 0.45 of what the one before it is", _uneven),
    World("the first scheduler stops half way", _one_stops),
    World(f"70 % of the load swings between two schedulers every {SWING_S:g} s", _swings),
)


def as_trace(world: World, scenario: str, values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write the requests of `scenario` under `values`, dealt as in `world`, to `folder`; returns the workload that reads them.

    Raises `InputError` where that cannot be written.
    """
    loaded, base = load_scenario(scenario, values=values)
    requests, names = compile_scenario(loaded, base).requests, [s.name for s in loaded.schedulers]
    shares = world.shares(requests.arrival_s, loaded.horizon_s, len(names))
    upto = np.cumsum(shares / shares.sum(axis=1, keepdims=True), axis=1)
    drawn = np.random.default_rng(loaded.seed).random((len(upto), 1))
    origin = np.minimum((drawn >= upto).sum(axis=1), len(names) - 1)
    path = folder / f"{scenario}-{WORLDS.index(world)}-{math.floor(loaded.horizon_s)}s-seed{loaded.seed}.csv"
    columns = {"arrival_s": requests.arrival_s, "isl": requests.isl, "osl": requests.osl, "origin": np.array(names)[origin]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(columns).to_csv(path, index=False)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None
    return {"kind": "trace", "path": str(path), "time": "relative", "split": "origin", "origin_column": "origin"}
