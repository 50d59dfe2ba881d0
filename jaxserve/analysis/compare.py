"""Policies side by side on one trace, as a frame and as a table for the terminal.

A saving names its baseline, stands beside its SLO attainment, and credits nothing that was not served. Carbon, saving, its share of the
possible and goodput all count the same carbon: that of `carbon_with_drain_g`.
"""

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from rich import box
from rich.table import Table
from rich.text import Text

from jaxserve.analysis.fields import COMPARISON, METRICS, PERCENTILES, RUN_METRICS
from jaxserve.errors import InputError
from jaxserve.units import MS_PER_S

SAME_TRACE = ("requests", "input_tokens_asked", "output_tokens_asked", "warmup_s", "horizon_s")
SAME_JUDGE = ("slo_ttft_s", "slo_tpot_s")
SERVED = ("finished", "input_tokens_served", "output_tokens_served")

DRAIN_SHARE = 0.1
"""A saving that work left for after the horizon could change by more than this share of it gets a note."""
ROUNDING = 1e-6
"""Where less than this share of the baseline's carbon could be saved at most, no share of it is told: rounding would be part of it."""

Scales = Sequence[tuple[float, str]]
CARBON: Scales = ((1.0, "g"), (1e-3, "kg"), (1e-6, "t"))
PER_J: Scales = ((1.0, "J"), (1e3, "kJ"), (1e6, "MJ"), (1e9, "GJ"))
PER_G: Scales = ((1.0, "g"), (1e3, "kg"), (1e6, "t"))
MS_UP_TO_S = 10.0
"""Latencies are shown in ms unless some percentile is longer than this."""
HEADER_WIDTH = 14
"""Characters of the baseline's name on a line of the header."""
MISSING = "–"


def compare(summaries: Mapping[str, Mapping[str, Any]], baseline: str | None = None, bound_g: float | None = None) -> pd.DataFrame:
    """One row a policy, in the order given; `baseline` (default: the first) is what savings are measured against.

    Columns: carbon_with_drain_g, baseline, saving_vs_baseline (a fraction), with `bound_g` (the carbon_with_drain_g that no policy beats)
    share_of_possible_saving, then slo_attainment, drain_vs_baseline, note and every other metric; `attrs["units"]` has their units.
    The saving is on carbon for the same served tokens: where a policy served other than the baseline it is NaN, and `note` says why.
    Summaries of another trace, warm-up, horizon or budget are refused.
    """
    if not summaries:
        raise InputError("Nothing to compare: give the summary of at least one policy.")
    name = next(iter(summaries)) if baseline is None else baseline
    if name not in summaries:
        raise InputError(f"Baseline {name!r} is not among the policies compared: {', '.join(summaries)}.")
    base = summaries[name]
    rows = []
    for policy, summary in summaries.items():
        _refuse_other_trace(policy, summary, name, base)
        saving, drain, note = _saving(summary, name, base)
        row = {"carbon_with_drain_g": summary["carbon_with_drain_g"], "baseline": name, "saving_vs_baseline": saving}
        if bound_g is not None:
            row["share_of_possible_saving"] = None if saving is None else _share_of_possible(summary, base, bound_g)
        row |= {"slo_attainment": summary["slo_attainment"], "drain_vs_baseline": drain, "note": note}
        rows.append(row | {metric: summary.get(metric) for metric in METRICS | RUN_METRICS if metric not in row})
    frame = pd.DataFrame(rows, index=pd.Index(list(summaries), name="policy", dtype=object))
    # None in a numeric column would make it a column of objects, which neither plots nor sorts.
    numeric = [column for column in frame.columns if column not in ("baseline", "note")]
    frame = frame.astype({column: float for column in numeric if any(row[column] is None for row in rows)})
    known = METRICS | RUN_METRICS | COMPARISON
    frame.attrs["units"] = {column: known[column].unit for column in numeric}
    return frame


def table(frame: pd.DataFrame) -> Table:
    """A `compare` frame for a terminal of 120 columns: carbon, saving and service above; latency, idle share and speed below; notes."""
    policies = [str(policy) for policy in frame.index]
    baseline = str(frame["baseline"].iloc[0])
    column = {name: np.asarray(frame[name], dtype=np.float64) for name in METRICS | RUN_METRICS | COMPARISON if name in frame}

    carbon, carbon_unit = _scaled(column["carbon_with_drain_g"], CARBON, by_largest=True)
    per_j, j_unit = _scaled(column["goodput_req_per_j"], PER_J)
    per_g, g_unit = _scaled(column["goodput_req_per_g"], PER_G)
    savings = zip(policies, column["saving_vs_baseline"])
    above = [
        ("policy", policies),
        (f"carbon\n{carbon_unit} CO2e", _cells(carbon, _digits)),
        (
            "saving vs\n" + textwrap.fill(baseline, HEADER_WIDTH),
            ["baseline" if policy == baseline else _percent(saving, sign="+") for policy, saving in savings],
        ),
        *([("of all\npossible", _cells(column[possible], _percent))] if (possible := "share_of_possible_saving") in column else []),
        ("SLO\nattained", _cells(column["slo_attainment"], _percent)),
        ("violated\nTTFT", _cells(column["ttft_violation"], _percent)),
        ("TPOT", _cells(column["tpot_violation"], _percent)),
    ]
    if np.any(column["rejected"] > 0):
        above.append(("rejected", _cells(column["rejected_share"], _percent)))
    above += [(f"goodput\nreq/{j_unit}", _cells(per_j, _digits)), (f"req/{g_unit}CO2e", _cells(per_g, _digits))]

    below = [("policy", policies)]
    for stem in ("ttft", "tpot"):
        names = [f"{stem}_p{p}_s" for p in PERCENTILES]
        in_s = any(np.any(column[name] > MS_UP_TO_S) for name in names)
        for p, name in zip(PERCENTILES, names):
            title = f"{stem.upper()} {'s' if in_s else 'ms'}\n" if p == PERCENTILES[0] else ""
            below.append((f"{title}p{p}", _cells(column[name] * (1.0 if in_s else MS_PER_S), _digits)))
    below.append(("engines\nidle", _cells(column["idle_share"], _percent)))
    if np.any(np.isfinite(column["simulated_req_per_wall_s"])):
        below.append(("simulated\nreq/s", _cells(column["simulated_req_per_wall_s"], _digits)))

    whole = Table.grid()
    whole.add_row(_block(above))
    whole.add_row("")
    whole.add_row(_block(below))
    whole.add_row("")
    for policy, note in zip(policies, frame["note"]):
        if note:
            whole.add_row(Text(f"{policy}: {note}", style="dim"))
    return whole


def _refuse_other_trace(policy: str, summary: Mapping[str, Any], name: str, base: Mapping[str, Any]) -> None:
    for metric in (*SAME_TRACE, *SAME_JUDGE, *SERVED, "carbon_with_drain_g", "slo_attainment"):
        if metric not in summary:
            raise InputError(f"The summary of policy {policy!r} has no {metric}.")
    for metric in (*SAME_TRACE, *SAME_JUDGE):
        if summary[metric] != base[metric]:
            what = "the same trace" if metric in SAME_TRACE else "the same SLO"
            raise InputError(
                f"Policies {policy!r} and {name!r} did not run on {what}: {metric} is {summary[metric]} and {base[metric]};"
                " run both on one scenario and seed."
            )
    # Equal totals may hide other arrivals (the same lengths at other times): the mean tells, where both summaries have it.
    mean, base_mean = summary.get("arrival_mean_s"), base.get("arrival_mean_s")
    if mean is not None and base_mean is not None and mean != base_mean:
        raise InputError(
            f"Policies {policy!r} and {name!r} did not run on the same trace: the mean arrival is {mean} s and {base_mean} s;"
            " run both on one scenario and seed."
        )


def _saving(summary: Mapping[str, Any], name: str, base: Mapping[str, Any]) -> tuple[float | None, float | None, str]:
    """Saving, difference in drain (both fractions, None where undefined) and the sentence to show with them."""
    engine_j = sum(base.get(f"{part}_energy_j") or 0.0 for part in ("prefill", "decode", "idle", "host"))
    more_drain_j = (summary.get("drain_energy_j") or 0.0) - (base.get("drain_energy_j") or 0.0)
    drain = more_drain_j / engine_j if engine_j > 0 else None
    for metric in SERVED:
        if summary[metric] != base[metric]:
            return None, drain, f"no saving: {metric} is {summary[metric]:,}, with {name} {base[metric]:,}"
    if not summary["finished"]:
        return None, drain, "no saving: nothing was served"
    theirs_g = base["carbon_with_drain_g"]
    if not theirs_g > 0:
        return None, drain, f"no saving: the carbon of {name} is {theirs_g:g} g"
    saving = 1.0 - summary["carbon_with_drain_g"] / theirs_g
    note = ""
    if drain is not None and saving > 0 and drain > DRAIN_SHARE * saving:
        note = (
            f"saving in doubt: beside {_significant(saving)} saved, work worth {_significant(drain)} of {name}'s energy was left for "
            "after the horizon, counted at the last carbon intensity and without idle engines and hosts"
        )
    return saving, drain, note


def _share_of_possible(summary: Mapping[str, Any], base: Mapping[str, Any], bound_g: float) -> float | None:
    mine, theirs = summary["carbon_with_drain_g"], base["carbon_with_drain_g"]
    return None if theirs - bound_g <= ROUNDING * abs(theirs) else (theirs - mine) / (theirs - bound_g)


def _significant(share: float) -> str:
    """A share in percent with two significant digits, however small."""
    percent = 100 * share
    digits = 0 if percent >= 10 else 1 - math.floor(math.log10(percent))
    return f"{percent:.{digits}f} %"


def _block(columns: list[tuple[str, list[str]]]) -> Table:
    """Columns of (header, cells). Text throughout, so that brackets in a policy's name are not read as markup."""
    block = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for place, (header, _) in enumerate(columns):
        block.add_column(
            Text(header),
            justify="right" if place else "left",
            vertical="bottom",
            overflow="fold",
            no_wrap=place > 0,
            min_width=None if place else 11,
        )
    for cells in zip(*(cells for _, cells in columns)):
        block.add_row(*(Text(cell) for cell in cells))
    return block


def _cells(values: Iterable[float], show: Callable[[float], str]) -> list[str]:
    return [show(float(value)) for value in values]


def _scaled(values: np.ndarray, scales: Scales, by_largest: bool = False) -> tuple[np.ndarray, str]:
    """All rows in one unit: the first that makes the smallest number at least 1, or the last that leaves the largest at least 1."""
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    decisive = 1.0 if not sizes.size else float(sizes.max() if by_largest else sizes.min())
    fits = [scale for scale in scales if decisive * scale[0] >= 1]
    factor, unit = scales[0 if by_largest else -1] if not fits else fits[-1 if by_largest else 0]
    return values * factor, unit


def _digits(value: float) -> str:
    """Three significant digits without exponent, thousands apart."""
    if not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    size = abs(value)
    return f"{value:,.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3}f}"


def _percent(share: float, sign: str = "") -> str:
    """A share in percent; a few requests among many show as <0.1 % or >99.9 %, not as none or all."""
    if not math.isfinite(share):
        return MISSING
    if not sign and 0 < share < 5e-4:
        return "<0.1 %"
    if not sign and 1 - 5e-4 < share < 1:
        return ">99.9 %"
    return f"{100 * share:{sign}.1f} %"
