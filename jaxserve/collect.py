"""From what the engine brings, chunk by chunk, to the tables of a run folder."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from jaxserve.analysis.metrics import Summary, summarise
from jaxserve.engine.lane import Advance, Finished, Told
from jaxserve.policies.optimise import Solved
from jaxserve.scenario.compile import Compiled
from jaxserve.solvers.problem import STATUSES, relative_gap
from jaxserve.units import J_PER_KWH


class EnergyLedger:
    """Energy by interval and DC, added up step by step in order, so that the cut into chunks changes no bit."""

    def __init__(self, compiled: Compiled, step_windows: int) -> None:
        self.c = compiled
        self.first_step = compiled.interval_windows // step_windows  # [I+1] of each interval, then the horizon's
        self.sums = np.zeros((3, len(self.first_step) - 1, compiled.fleet.n_dc))  # prefill J, decode J, idle engine-seconds
        self.drain_j = np.zeros(compiled.fleet.n_dc)  # of steps after the horizon

    def add(self, advance: Advance) -> None:
        """Take in one chunk."""
        step = advance.first_step + np.arange(len(advance.prefill_j))
        inside = step < self.first_step[-1]
        interval = np.searchsorted(self.first_step, step[inside], side="right") - 1
        for total, steps in zip(self.sums, (advance.prefill_j, advance.decode_j, advance.idle_s), strict=True):
            np.add.at(total, interval, steps[inside])
        for joules in (advance.prefill_j + advance.decode_j)[~inside]:
            self.drain_j += joules

    def frame(self) -> pd.DataFrame:
        """`ledger.parquet`: facility_j and carbon_g include PUE."""
        c, s = self.c, self.c.scenario
        power, tp = s.coefficients.power, s.coefficients.setup.tp
        edges = np.asarray(c.interval_windows * s.dispatch.window_s, np.float64)
        start, seconds = edges[:-1], np.diff(edges)
        prefill_j, decode_j, idle_s = self.sums
        idle_j = idle_s * (power.idle_w_per_gpu * tp)
        host_j = seconds[:, None] * (power.host_w * np.array([site.nodes for site in s.sites]))
        ci = c.ci(start)
        facility_j = np.array([site.pue for site in s.sites]) * (prefill_j + decode_j + idle_j + host_j)
        n_intervals, n_dc = ci.shape
        names = [site.name for site in s.sites]
        return pd.DataFrame(
            {
                "interval_start_s": np.repeat(start, n_dc),
                "interval_s": np.repeat(seconds, n_dc),
                "dc": pd.Categorical.from_codes(np.tile(np.arange(n_dc), n_intervals), names),
                "prefill_j": prefill_j.ravel(),
                "decode_j": decode_j.ravel(),
                "idle_j": idle_j.ravel(),
                "host_j": host_j.ravel(),
                "facility_j": facility_j.ravel(),
                "ci_g_per_kwh": ci.ravel(),
                "carbon_g": (facility_j * ci / J_PER_KWH).ravel(),
            }
        )


TIMES = ("decision_s", "dc_arrival_s", "admit_s", "first_token_s", "finish_s")


class RequestRows:
    """Rows of `requests.parquet`, in order of `request_id`; rejected requests take their place among the others."""

    schema = pa.schema(
        [("request_id", pa.int64()), ("arrival_s", pa.float64()), ("scheduler", pa.dictionary(pa.int32(), pa.string()))]
        + [
            ("isl", pa.int32()),
            ("osl", pa.int32()),
            ("dc", pa.dictionary(pa.int32(), pa.string())),
            ("node", pa.int32()),
            ("engine", pa.int32()),
        ]
        + [(f"{name}_s", pa.float64()) for name in ("decision", "dc_arrival", "admit", "first_token", "finish", "ttft", "tpot")]
        + [("slo_ok", pa.bool_()), ("status", pa.dictionary(pa.int32(), pa.string()))]
    )

    def __init__(self, compiled: Compiled) -> None:
        self.c = compiled
        self.written = 0  # requests, rejected ones included

    def table(self, finished: Finished) -> pa.Table:
        """The rows of requests that came out of the engine, and of the rejected ones among them."""
        n = len(finished.engine)
        upto = int(self.c.accepted[finished.first + n - 1]) + 1 if n else self.written
        return self._rows(upto, finished.first, n, finished.engine, {name: getattr(finished, name) for name in TIMES})

    def rest(self) -> pa.Table:
        """The rejected requests after the last finished one."""
        total = len(self.c.requests.arrival_s)
        return self._rows(total, len(self.c.accepted), 0, np.empty(0, np.int32), dict.fromkeys(TIMES, np.empty(0)))

    def _rows(self, upto: int, first: int, n: int, engine: NDArray[Any], times: dict[str, NDArray[Any]]) -> pa.Table:
        c, s, ids = self.c, self.c.scenario, np.arange(self.written, upto)
        self.written = upto
        r = c.requests
        at = c.accepted[first : first + n] - ids[0] if len(ids) else np.empty(0, np.int64)
        served = np.zeros(len(ids), bool)
        served[at] = True

        def spread(values: NDArray[Any], blank: float) -> NDArray[Any]:
            column = np.full(len(ids), blank, values.dtype)
            column[at] = values
            return column

        dc, node, in_node = _locate(c, engine)
        t = {name: spread(values, np.nan) for name, values in times.items()}
        osl, arrival = r.osl[ids], r.arrival_s[ids]
        ttft = t["first_token_s"] - arrival
        tpot = np.where(osl > 1, (t["finish_s"] - t["first_token_s"]) / np.maximum(osl - 1, 1), np.nan)
        ok = (ttft <= s.slo.ttft_s) & ((osl == 1) | (tpot <= s.slo.tpot_s))

        def named(codes: NDArray[Any], names: list[str], mask: NDArray[Any] | None = None) -> pa.DictionaryArray:
            return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32), mask=mask), pa.array(names, pa.string()))

        columns = [
            pa.array(ids),
            pa.array(arrival),
            named(r.scheduler[ids], [g.name for g in s.schedulers]),
            pa.array(r.isl[ids].astype(np.int32)),
            pa.array(osl.astype(np.int32)),
            named(spread(dc, 0), [site.name for site in s.sites], ~served),
            pa.array(spread(node, 0), mask=~served),
            pa.array(spread(in_node, 0), mask=~served),
            *(pa.array(column, from_pandas=True) for column in (*t.values(), ttft, tpot)),
            pa.array(ok),
            named((~served).astype(np.int32), ["finished", "rejected"]),
        ]
        return pa.Table.from_arrays(columns, schema=self.schema)


SOLVE_SCHEMA = pa.schema(
    [("window", pa.int64()), ("scheduler", pa.dictionary(pa.int32(), pa.string())), ("decided_s", pa.float64()), ("requests", pa.int32())]
    + [("status", pa.dictionary(pa.int32(), pa.string())), ("solves", pa.int32())]
    + [(name, pa.float64()) for name in ("objective", "bound", "gap", "wall_s")]
    + [(name, pa.int32()) for name in ("fallback", "fallback_lowest_carbon", "fallback_round_robin")]
)
"""Rows of `solves.parquet`, one a batch; objective and bound in g CO2e as the scheduler estimates it, `fallback` in both kinds together."""


def solve_table(compiled: Compiled, told: Told) -> pa.Table:
    """The rows of the batches that a chunk has decided."""
    a: Solved = told.answer

    def known(values: NDArray[np.float64]) -> pa.Array:
        return pa.array(values, mask=~np.isfinite(values))

    def named(codes: NDArray[Any], names: Iterable[str]) -> pa.DictionaryArray:
        return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(list(names), pa.string()))

    objective, bound, lowest, dealt = (np.asarray(column) for column in (a.objective, a.bound, a.lowest, a.dealt))
    columns = {
        "window": pa.array(told.window),
        "scheduler": named(told.scheduler, [s.name for s in compiled.scenario.schedulers]),
        "decided_s": pa.array(told.decided_s),
        "requests": pa.array(told.requests.astype(np.int32)),
        "status": named(np.asarray(a.status), STATUSES),
        "solves": pa.array(np.asarray(a.solves)),
        "objective": known(objective),
        "bound": known(bound),
        "gap": known(relative_gap(objective, bound)),
        "wall_s": known(told.wall_s),
        "fallback": pa.array(lowest + dealt),
        "fallback_lowest_carbon": pa.array(lowest),
        "fallback_round_robin": pa.array(dealt),
    }
    return pa.Table.from_arrays(list(columns.values()), schema=SOLVE_SCHEMA)


def decision_counts(fallbacks: tuple[int, int], solves: Path, counted_from_s: float) -> dict[str, Any]:
    """How often the fallbacks decided, and how the solves made at or after `counted_from_s` ended, for the summary of a run."""
    counts: dict[str, Any] = {"fallback_lowest_carbon": fallbacks[0], "fallback_round_robin": fallbacks[1]}
    if solves.exists():
        frame = pd.read_parquet(solves, columns=["decided_s", "status", "solves", "gap", "wall_s"])
        frame = pd.DataFrame(frame[frame["decided_s"].to_numpy() >= counted_from_s])
        counts["windows"] = len(frame)
        counts["solves"] = int(frame["solves"].to_numpy().sum())
        counts["status"] = {name: n for name in STATUSES if (n := int((frame["status"] == name).to_numpy().sum()))}
        counts["largest_gap"] = _quantile(frame["gap"].to_numpy(), 1.0)
        counts["solve_p50_s"], counts["solve_p99_s"] = (_quantile(frame["wall_s"].to_numpy(), q) for q in (0.5, 0.99))
    return counts


def _quantile(values: NDArray[np.float64], q: float) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.quantile(known, q)) if len(known) else None


def decision_notes(counts: dict[str, Any]) -> list[str]:
    """Sentences for people on what did not go the policy's own way."""
    notes = []
    lowest, dealt = counts["fallback_lowest_carbon"], counts["fallback_round_robin"]
    if lowest or dealt:
        notes.append(f"the fallback placed {lowest} requests by lowest carbon and {dealt} in turn")
    unproven = {name: n for name, n in counts.get("status", {}).items() if name not in ("optimal", "empty")}
    if unproven:
        told = ", ".join(f"{n} {name}" for name, n in unproven.items())
        gap = counts["largest_gap"]
        notes.append(
            f"of {counts['windows']} windows not solved to proven optimum: {told}" + ("" if gap is None else f" (largest gap {gap:.2g})")
        )
    return notes


def engine_frame(compiled: Compiled, engine_s: NDArray[np.float64]) -> pd.DataFrame:
    """Seconds of prefill, decode and idling [3, E], between the warm-up and the horizon, as a row an engine."""
    dc, node, engine = _locate(compiled, np.arange(engine_s.shape[1]))
    frame = {"dc": pd.Categorical.from_codes(dc, [site.name for site in compiled.scenario.sites]), "node": node, "engine": engine}
    return pd.DataFrame(frame | dict(zip(("prefill_s", "decode_s", "idle_s"), engine_s, strict=True)))


def _locate(compiled: Compiled, engine: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int32], NDArray[np.int32]]:
    """DC, node and engine in the node of each of the fleet's engines: inside a DC they are numbered as its round-robin visits them."""
    starts = np.asarray(compiled.fleet.dc_first_engine)
    dc = np.searchsorted(starts, engine, side="right") - 1
    nodes = np.array([site.nodes for site in compiled.scenario.sites])[dc]
    within = engine - starts[dc]
    return dc, (within % nodes).astype(np.int32), (within // nodes).astype(np.int32)


def metrics(
    compiled: Compiled, requests: Iterable[pd.DataFrame], ledger: pd.DataFrame, engines: pd.DataFrame, drain_j: NDArray[np.float64]
) -> Summary:
    """The headline metrics of a run from its tables and its drain [D], judged by the scenario's own budgets, warm-up and horizon."""
    s = compiled.scenario
    pue = np.asarray(compiled.fleet.pue)
    last_ci = ledger["ci_g_per_kwh"].to_numpy()[-compiled.fleet.n_dc :]
    return summarise(
        requests,
        ledger,
        engines,
        slo_ttft_s=s.slo.ttft_s,
        slo_tpot_s=s.slo.tpot_s,
        warmup_s=s.counted_from_s,
        horizon_s=s.horizon_s,
        drain_energy_j=float(drain_j.sum()),
        drain_facility_j=float((pue * drain_j).sum()),
        drain_carbon_g=float((pue * last_ci * drain_j).sum()) / J_PER_KWH,
    )
