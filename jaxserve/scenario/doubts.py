"""What a scenario says that is likelier a slip than a wish: it is done as written, and told."""

from collections.abc import Iterator
from datetime import datetime

from jaxserve.scenario.signals import stamp_text
from jaxserve.scenario.spec import ASSUMED_UTC, Scenario

CLOCK_TOLERANCE_S = 60.0
"""How far a trace's clock may be from the run's without a word: carbon intensity steps every 5 minutes at the finest."""
LONGEST_TTFT_S = 120.0
LONGEST_TPOT_S = 1.0
"""Budgets beyond these are no promise to anyone who waits for an answer."""


def doubts(scenario: Scenario, trace_zero: datetime | None) -> tuple[str, ...]:
    """Sentences on the clocks, the budgets and the round trips of a scenario; `trace_zero` is the instant of time 0 by the trace."""
    return (*_clocks(scenario, trace_zero), *_budgets(scenario), *_far_sites(scenario))


def _clocks(scenario: Scenario, trace_zero: datetime | None) -> Iterator[str]:
    start = scenario.start_time
    if start.tzinfo is ASSUMED_UTC:
        yield f"start_time has no offset, read as UTC: {stamp_text(start)}"
    if trace_zero is not None and abs((trace_zero - start).total_seconds()) > CLOCK_TOLERANCE_S:
        yield (
            f"warning: by the trace's own stamps the run begins at {stamp_text(trace_zero)}, but start_time, which the grid goes by, is "
            f"{stamp_text(start)}; start_time = {stamp_text(trace_zero)} would put both on one clock"
        )


def _budgets(scenario: Scenario) -> Iterator[str]:
    ttft_s, tpot_s = scenario.slo.ttft_s, scenario.slo.tpot_s
    if ttft_s > LONGEST_TTFT_S:
        yield f"warning: slo.ttft_s = {ttft_s:g} s is more than anyone waits ({LONGEST_TTFT_S:g} s); it is in seconds"
    elif ttft_s > scenario.horizon_s:
        yield f"slo.ttft_s = {ttft_s:g} s is longer than the horizon of {scenario.horizon_s:g} s"
    if tpot_s > LONGEST_TPOT_S:
        yield f"warning: slo.tpot_s = {tpot_s:g} s for each token is more than anyone waits ({LONGEST_TPOT_S:g} s); it is in seconds"


def _far_sites(scenario: Scenario) -> Iterator[str]:
    region = {site.name: site.region for site in scenario.sites}
    for scheduler in scenario.schedulers:
        far = [name for name in scheduler.sites if region[name] != scheduler.region]
        if far:
            yield (
                f"warning: scheduler {scheduler.name} ({scheduler.region}) owns sites of other regions, and a round trip to its own site "
                f"counts as 0 whatever network.rtt_ms says: {', '.join(f'{name} ({region[name]})' for name in far)}"
            )
