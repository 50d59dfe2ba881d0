"""What is expected of the measurements: directions that the study states or that follow from what it describes."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from jaxserve.analysis.directions import Direction
from jaxserve.studies.readings import AS_SHIPPED
from jaxserve.studies.setups import BASELINE

ALPHAS = (0.0, 0.5, 0.9)


def load_directions(model: str, loads: Sequence[str], policies: Iterable[str]) -> list[Direction]:
    """What is expected over alphas and loads; settings are loads here."""
    found = []
    for load in loads:
        for low, high in pairwise(ALPHAS):
            where = f"{model}, {load}, alpha {low:g} against {high:g}"
            pair = (f"greedy-{low}", load), (f"greedy-{high}", load)
            found.append(Direction("saving rises as alpha falls", where, "saving", *pair))
            found.append(Direction("violations rise as alpha falls", where, "slo_violation", *pair))
        for capped in ("ilp", "iterative_ilp", "facility_milp"):
            where = f"{model}, {load}, {capped} against greedy-0.0"
            found.append(Direction("capacity-aware violates less", where, "slo_violation", ("greedy-0.0", load), (capped, load)))
    for policy in policies:
        if policy != BASELINE:
            for lighter, heavier in pairwise(loads):
                where = f"{model}, {policy}, {lighter} against {heavier}"
                found.append(Direction("saving shrinks with load", where, "saving", (policy, lighter), (policy, heavier)))
    return found


def setting_directions(model: str) -> list[Direction]:
    """What is expected around the moderate load."""
    found = []
    spreads = ("CI of CV 0.94", AS_SHIPPED, "CI of CV 0.31", "CI of CV 0")
    polls = ("poll 0.5 s", AS_SHIPPED, "poll 2 s", "poll 5 s")
    for policy in ("greedy-0.0", "facility_milp"):
        for wide, narrow in pairwise(spreads):
            where = f"{model}, {policy}, {wide} against {narrow}"
            found.append(Direction("saving grows with the spread of CI", where, "saving", (policy, wide), (policy, narrow)))
        for fresh, stale in pairwise(polls):
            where = f"{model}, {policy}, {stale} against {fresh}"
            found.append(Direction("staler polls violate more", where, "slo_violation", (policy, stale), (policy, fresh)))
    return found
