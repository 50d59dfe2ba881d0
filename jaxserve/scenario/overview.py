"""The tables of `jaxserve check`: what each site's grid does over the run, and how far it is from each scheduler."""

import pandas as pd

from jaxserve.scenario.compile import Compiled
from jaxserve.units import MS_PER_S

LINE_WIDTH = 80
"""Columns of a terminal; a table with more schedulers goes on below."""


def overview(compiled: Compiled) -> str:
    """Carbon intensity by site over the run in g/kWh, and round-trip times in force in ms, as text of at most 80 columns."""
    s = compiled.scenario
    names = [site.name for site in s.sites]
    least, mean, greatest = compiled.grid.over(s.horizon_s)[:, compiled.site_zone]
    ci = pd.DataFrame({"zone": [site.zone for site in s.sites], "least": least, "mean": mean, "greatest": greatest}, index=names)
    rtt_ms = compiled.fleet.rtt_s * MS_PER_S
    rtt = pd.DataFrame(
        {
            scheduler.name: ["own" if name in scheduler.sites else f"{rtt_ms[g, d]:g}" for d, name in enumerate(names)]
            for g, scheduler in enumerate(s.schedulers)
        },
        index=names,
    )
    return (
        "Carbon intensity by site over the run, g/kWh\n"
        f"{ci.to_string(float_format=lambda value: f'{value:.4g}', line_width=LINE_WIDTH)}\n"
        "Round trip from each scheduler to each site, ms (own: its own site, counts as 0)\n"
        f"{rtt.to_string(line_width=LINE_WIDTH)}"
    )
