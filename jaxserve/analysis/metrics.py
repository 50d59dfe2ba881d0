"""The headline metrics of one run. Times are seconds, energies joules before PUE unless named facility, carbon grams of CO2e.

What counts (SEMANTICS.md, "What is counted"): requests that arrive at or after the warm-up, and what is spent between it and the horizon.
What is set against the requests served (saving, carbon a request, goodput a joule or a gram) counts the drain too, at the last CI: requests
that finish after the horizon are served, and a policy that leaves work for later has not saved it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from jaxserve.analysis.fields import METRICS, PERCENTILES
from jaxserve.errors import InputError
from jaxserve.units import J_PER_KWH, US_PER_S

Summary = dict[str, int | float | None]

REQUEST_COLUMNS = ("arrival_s", "isl", "osl", "dc_arrival_s", "admit_s", "finish_s", "ttft_s", "tpot_s", "status")
"""All that `summarise` reads of the requests: what to ask of `read_parquet(columns=...)`."""
LEDGER_COLUMNS = ("interval_start_s", "prefill_j", "decode_j", "idle_j", "host_j", "facility_j", "carbon_g")
ENGINE_COLUMNS = ("prefill_s", "decode_s", "idle_s")

Floats = NDArray[np.float64]


def summarise(
    requests: pd.DataFrame | Iterable[pd.DataFrame],
    ledger: pd.DataFrame,
    engine_s: pd.DataFrame,
    *,
    slo_ttft_s: float,
    slo_tpot_s: float,
    warmup_s: float,
    horizon_s: float,
    drain_energy_j: float,
    drain_facility_j: float,
    drain_carbon_g: float,
) -> Summary:
    """Every metric of `fields.METRICS`, JSON-ready; what is undefined (a percentile of nothing, a ratio over zero) is None, never 0.

    `requests` is one frame or its pieces in order, so that a long run need not be held whole; pieces change no bit of the result.
    The ledger must have an edge at `warmup_s`, and `engine_s` hold the seconds between it and the horizon.
    Requests are judged here from their times against the budgets given, not from `slo_ok`: the split cannot disagree with the sum.
    """
    tally = _Tally(slo_ttft_s, slo_tpot_s, warmup_s, horizon_s)
    for piece in [requests] if isinstance(requests, pd.DataFrame) else requests:
        tally.add(piece)
    if warmup_s > 0:
        ledger = pd.DataFrame(ledger[ledger["interval_start_s"] >= warmup_s])
    energy_j = {name: _total(ledger, name) for name in LEDGER_COLUMNS[1:]}
    facility_j, carbon_g = energy_j["facility_j"], energy_j["carbon_g"]
    for_served_j, for_served_g = facility_j + drain_facility_j, carbon_g + drain_carbon_g
    time_s = {name: _total(engine_s, name) for name in ENGINE_COLUMNS}
    counted_s = horizon_s - warmup_s
    engine_time_s = len(engine_s) * counted_s
    n = tally.requests
    summary: Summary = {
        "requests": n,
        "finished": tally.finished,
        "rejected": tally.rejected,
        "finished_after_horizon": tally.late,
        "warmup_s": warmup_s,
        "horizon_s": horizon_s,
        "arrival_mean_s": _ratio(tally.arrival_us / US_PER_S, n),
        "input_tokens_asked": tally.input_asked,
        "output_tokens_asked": tally.output_asked,
        "input_tokens_served": tally.input_served,
        "output_tokens_served": tally.output_served,
        "slo_ttft_s": slo_ttft_s,
        "slo_tpot_s": slo_tpot_s,
        "slo_attainment": _ratio(tally.good, n),
        "slo_violation": _ratio(n - tally.good, n),
        "ttft_violation": _ratio(tally.over_ttft, n),
        "tpot_violation": _ratio(tally.over_tpot, n),
        "both_violation": _ratio(tally.over_both, n),
        "rejected_share": _ratio(tally.rejected, n),
        **_spread("ttft", tally.joined("ttft_s")),
        **_spread("tpot", tally.joined("tpot_s")),
        "tpot_undefined": tally.tpot_undefined,
        **_spread("queue_wait", tally.joined("queue_wait_s")),
        "carbon_g": carbon_g,
        "energy_kwh": facility_j / J_PER_KWH,
        "facility_energy_j": facility_j,
        "prefill_energy_j": energy_j["prefill_j"],
        "decode_energy_j": energy_j["decode_j"],
        "idle_energy_j": energy_j["idle_j"],
        "host_energy_j": energy_j["host_j"],
        "drain_energy_j": drain_energy_j,
        "carbon_with_drain_g": for_served_g,
        "mean_ci_g_per_kwh": _ratio(carbon_g, facility_j / J_PER_KWH),
        "idle_share": _ratio(time_s["idle_s"], engine_time_s),
        "prefill_share": _ratio(time_s["prefill_s"], engine_time_s),
        "decode_share": _ratio(time_s["decode_s"], engine_time_s),
        "carbon_g_per_request": _ratio(for_served_g, tally.finished),
        "energy_j_per_output_token": _ratio(for_served_j, tally.output_served),
        "goodput_req_per_s": _ratio(tally.good, counted_s),
        "goodput_req_per_j": _ratio(tally.good, for_served_j),
        # At zero or negative carbon (marginal signals) "per gram" orders nothing: more would not be better.
        "goodput_req_per_g": _ratio(tally.good, for_served_g),
        "goodput_tokens_per_j": _ratio(tally.good_tokens, for_served_j),
        "goodput_tokens_per_g": _ratio(tally.good_tokens, for_served_g),
    }
    return {name: _plain(name, summary[name]) for name in METRICS}


@dataclass
class _Tally:
    """Counts over pieces of the requests, and the few columns of which percentiles are taken."""

    slo_ttft_s: float
    slo_tpot_s: float
    warmup_s: float
    horizon_s: float
    rows: int = 0  # seen, those before the warm-up included
    requests: int = 0
    arrival_us: int = 0
    finished: int = 0
    rejected: int = 0
    late: int = 0
    input_asked: int = 0
    output_asked: int = 0
    input_served: int = 0
    output_served: int = 0
    over_ttft: int = 0
    over_tpot: int = 0
    over_both: int = 0
    good: int = 0
    good_tokens: int = 0
    tpot_undefined: int = 0
    kept: dict[str, list[Floats]] = field(default_factory=dict)

    def add(self, piece: pd.DataFrame) -> None:
        """Count one piece; refuse one in which a request neither finished nor was rejected, or finished without its times."""
        finished = (piece["status"] == "finished").to_numpy(dtype=bool)
        rejected = (piece["status"] == "rejected").to_numpy(dtype=bool)
        neither = np.flatnonzero(~(finished | rejected))
        if neither.size:
            status = piece["status"].iloc[neither[0]]
            raise InputError(f"requests, row {self.rows + int(neither[0])}: status is {status!r}; every request ends finished or rejected.")
        isl, osl = piece["isl"].to_numpy(dtype=np.int64), piece["osl"].to_numpy(dtype=np.int64)
        ttft_s, tpot_s, finish_s = _floats(piece, "ttft_s"), _floats(piece, "tpot_s"), _floats(piece, "finish_s")
        arrival_s = _floats(piece, "arrival_s")
        wait_s = _floats(piece, "admit_s") - _floats(piece, "dc_arrival_s")
        # By osl and not by NaN: whatever stands in tpot_s at osl = 1 is no TPOT, and a NaN elsewhere is a fault to be told.
        has_tpot = finished & (osl > 1)
        for name, values, needed in (
            ("arrival_s", arrival_s, finished | rejected),
            ("ttft_s", ttft_s, finished),
            ("tpot_s", tpot_s, has_tpot),
            ("finish_s", finish_s, finished),
            ("admit_s or dc_arrival_s", wait_s, finished),
        ):
            absent = np.flatnonzero(needed & ~np.isfinite(values))
            if absent.size:
                row = int(absent[0])
                raise InputError(f"requests, row {self.rows + row}: {piece['status'].iloc[row]}, but {name} is missing.")
        self.rows += len(piece)
        counted = arrival_s >= self.warmup_s
        finished, rejected, has_tpot = finished & counted, rejected & counted, has_tpot & counted
        over_ttft = finished & (ttft_s > self.slo_ttft_s)
        over_tpot = has_tpot & (tpot_s > self.slo_tpot_s)
        good = finished & ~over_ttft & ~over_tpot
        self.requests += _count(counted)
        # Whole microseconds: a sum of integers is the same over any pieces, and the column need not be kept.
        self.arrival_us += int(np.rint(arrival_s[counted] * US_PER_S).astype(np.int64).sum())
        self.finished += _count(finished)
        self.rejected += _count(rejected)
        self.late += _count(finished & (finish_s > self.horizon_s))
        self.input_asked += int(isl[counted].sum())
        self.output_asked += int(osl[counted].sum())
        self.input_served += int(isl[finished].sum())
        self.output_served += int(osl[finished].sum())
        self.over_ttft += _count(over_ttft)
        self.over_tpot += _count(over_tpot)
        self.over_both += _count(over_ttft & over_tpot)
        self.good += _count(good)
        self.good_tokens += int(osl[good].sum())
        self.tpot_undefined += _count(finished & (osl == 1))
        self._keep("ttft_s", ttft_s[finished])
        self._keep("tpot_s", tpot_s[has_tpot])
        self._keep("queue_wait_s", wait_s[finished])

    def _keep(self, name: str, values: Floats) -> None:
        self.kept.setdefault(name, []).append(values)

    def joined(self, name: str) -> Floats:
        """The kept column in one array, given up by the tally: 8.6 M requests are 69 MB a column."""
        pieces = self.kept.pop(name, [])
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0), *pieces])


def _floats(frame: pd.DataFrame, column: str) -> Floats:
    return frame[column].to_numpy(dtype=np.float64, na_value=np.nan)


def _count(mask: NDArray[np.bool_]) -> int:
    return int(np.count_nonzero(mask))


def _total(frame: pd.DataFrame, column: str) -> float:
    return float(np.sum(_floats(frame, column)))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if values.size else None


def _spread(stem: str, values: Floats) -> Summary:
    """Mean and percentiles (linear between order statistics) of one latency, s; None for nothing."""
    # The mean first and over the whole column: percentiles may reorder it, and a sum over pieces would depend on the pieces.
    spread: Summary = {f"{stem}_mean_s": _mean(values)}
    points = np.percentile(values, PERCENTILES, overwrite_input=True) if values.size else [None] * len(PERCENTILES)
    return spread | {f"{stem}_p{p}_s": point for p, point in zip(PERCENTILES, points)}


def _plain(name: str, value: float | None) -> int | float | None:
    """A Python number that JSON can hold."""
    if value is None or isinstance(value, int):
        return value
    if not math.isfinite(value):
        raise InputError(f"{name} of the run is {value}: a missing or infinite value in the requests, ledger or engine times.")
    return float(value)
