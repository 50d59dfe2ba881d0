"""What an engine sustains: requests a second that it finishes when more are offered, whatever the length of the run."""

import math
from dataclasses import dataclass

from jaxserve.errors import InputError
from jaxserve.running import run
from jaxserve.scenario.load import load_scenario

STAYS = 10.0
"""Least length of the measured half of a run, in mean stays of a request in its engine's batch."""
STEADY = 0.02
"""A run of half the length must tell the same but for this share."""
OVERLOADED = 0.8
"""Finishing less than this share of what is offered, an engine is saturated."""
FIRST_HORIZON_S = 20.0
MOST_RUNS = 12


@dataclass(frozen=True)
class Saturation:
    """Measured under overload, dealt round-robin."""

    req_per_s_per_engine: float
    stay_s: float
    """Mean time of a request between admission and last token."""
    horizon_s: float
    """Length of the run that is told."""


def saturation(scenario: str, rate_req_per_s: float) -> Saturation:
    """What an engine of `scenario` sustains; `rate_req_per_s`, of the whole fleet, is where to begin.

    One engine a DC is run: a saturated engine always has requests queued, so that how many others there are does not matter. As long as
    most of what is offered gets done, twice as much is offered; then the run is lengthened until its second half is `STAYS` stays of a
    request long and tells what the second half of its own first half told. Raises `InputError` where that does not come about.
    """
    loaded, _ = load_scenario(scenario)
    tp, sites = loaded.coefficients.setup.tp, len(loaded.sites)
    engines = sum(site.nodes * site.gpus_per_node for site in loaded.sites) // tp
    offered, horizon_s = rate_req_per_s / engines * sites, FIRST_HORIZON_S
    few = ["sites.*.nodes=1", f"sites.*.gpus_per_node={tp}", "warmup_s=0.0", 'policies=[{kind="round_robin"}]']
    for _ in range(MOST_RUNS):
        requests = run(scenario, overrides=[f"workload.rate_req_per_s={offered}", f"horizon_s={horizon_s}", *few])["round_robin"].requests
        finish_s, stay_s = requests["finish_s"].to_numpy(), (requests["finish_s"] - requests["admit_s"]).to_numpy()
        late = (finish_s > horizon_s / 2) & (finish_s <= horizon_s)
        half = (finish_s > horizon_s / 4) & (finish_s <= horizon_s / 2)
        finished, finished_half = late.sum() / (horizon_s / 2), half.sum() / (horizon_s / 4)
        if finished > OVERLOADED * offered:
            offered *= 2.0
            continue
        stay = float(stay_s[late].mean()) if late.any() else horizon_s
        if horizon_s / 2 >= STAYS * stay and abs(finished - finished_half) < STEADY * finished:
            return Saturation(float(finished) / sites, stay, horizon_s)
        horizon_s = float(math.ceil(max(2.0 * horizon_s, 2.5 * STAYS * stay)))
    raise InputError(f"{scenario}: what it sustains is still not steady over {horizon_s:g} s")
