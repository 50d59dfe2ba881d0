"""Window edges, poll windows and overlaps of intervals."""

import math

from tests.oracle.model import OracleScenario


def window_of(t: float, window_s: float) -> int:
    """The largest k with k*window_s <= t. The division only gives a guess: the edges are the float products."""
    k = math.floor(t / window_s)
    while k * window_s > t:
        k -= 1
    while (k + 1) * window_s <= t:
        k += 1
    return k


def overlap(start: float, end: float, low: float, high: float) -> float:
    """Length of the part of [start, end] that lies in [low, high]."""
    return max(0.0, min(end, high) - max(start, low))


def first_poll_window(s: OracleScenario, dc: int) -> int:
    """Offset, in windows, of the polls of a DC."""
    if s.poll_mode == "sync":
        return 0
    if s.poll_mode == "async":
        return dc * s.poll_windows // len(s.nodes)
    raise ValueError(f"unknown poll_mode {s.poll_mode!r}")


def horizon_s(s: OracleScenario) -> float:
    """End of the headline accounting."""
    return s.horizon_windows * s.window_s
