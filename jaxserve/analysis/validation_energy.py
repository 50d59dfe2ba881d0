"""Energy of a replay beside its log: in total, and by load, which needs a rule by which requests share the energy of what ran.

Prefill energy goes to the requests in prefill by their prompt tokens, decode energy to those that decode, in equal parts; idle energy to
all in proportion. A log whose server shares otherwise moves energy between requests that ran together, so hardly between loads.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.perf.request_log import RequestLog

Floats = NDArray[np.float64]


def shared_out(edges_s: Floats, joules: Floats, begin_s: Floats, end_s: Floats, weight: Floats) -> Floats:
    """Joules [R] of each request when the `joules` [T] between `edges_s` [T+1] go to those present, by `weight` [R] and time.

    A request is present from `begin_s` to `end_s`. What was spent while nobody was (rounding) is left out.
    """

    def present(times: Floats) -> Floats:
        """Weight times seconds before each edge of those whose time is past: the integral of max(0, edge - times) [T+1]."""
        order = np.argsort(times)
        total = np.concatenate([[0.0], np.cumsum(weight[order])])
        moment = np.concatenate([[0.0], np.cumsum((weight * times)[order])])
        past = np.searchsorted(times[order], edges_s, side="right")
        return edges_s * total[past] - moment[past]

    share = np.diff(present(begin_s) - present(end_s))
    # Joules per weight and second, summed up to each edge: a request gets its weight times what passes during its presence.
    busy = share > 1e-9 * weight.max() * np.diff(edges_s)
    level = np.concatenate([[0.0], np.cumsum(np.where(busy, joules / np.where(busy, share, 1.0), 0.0) * np.diff(edges_s))])
    return weight * (np.interp(end_s, edges_s, level) - np.interp(begin_s, edges_s, level))


def energy_errors(
    log: RequestLog, request_j: Floats, idle_j: float, counted: NDArray[np.bool_], loads: Mapping[str, NDArray[np.bool_]]
) -> dict[str, dict[str, float]] | None:
    """Measured and predicted joules of `all` that are `counted` [R], and of those in each of `loads`, with the error of the sum.

    None: no energy logged, or none in the coefficients.

    `request_j` [R] are the requests' shares of the steps; `idle_j` the rest of the time from the first arrival to the last finish.
    """
    if log.energy_j is None or log.energy_j[counted].sum() <= 0 or request_j.sum() <= 0:
        return None
    predicted = request_j * (1.0 + idle_j / request_j.sum())
    groups = {"all": counted, **loads}
    out: dict[str, dict[str, float]] = {}
    for name, mask in groups.items():
        measured = float(log.energy_j[mask].sum())
        if measured > 0:
            found = float(predicted[mask].sum())
            error: Any = 100.0 * (found / measured - 1.0)
            out[name] = {"requests": int(mask.sum()), "measured_j": measured, "predicted_j": found, "error_percent": float(error)}
    out["all"]["predicted_idle_j"] = idle_j
    return out
