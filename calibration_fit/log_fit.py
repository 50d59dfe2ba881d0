"""The fit of step-time coefficients to a server's request log, through a surrogate of the engine.

The surrogate follows the engine contract along the *measured* times, so that it is exact for a log that the engine itself wrote:

- Prefill. Requests admitted together (or whose prefill overlaps) are packed into steps, which last from admission to the last first token.
- Decode. Between two events (a first token, a finish) the batch B is known, and the cached tokens K are those of the running requests,
  each making its tokens evenly over the time that is free of prefill. B requests then make free time / t_dec(B, K) tokens each, and over
  the life of a request these must add up to osl - 1.

A log without queue waits does not say when a request was admitted; `log_admission` says for which it can be told all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from calibration_fit.block_bootstrap import FEWEST_BLOCKS, bootstrap_blocks, equal_parts, time_blocks
from calibration_fit.checks import check_fit, not_converged, rows_below_floor
from calibration_fit.fit import FitResult, fit_all
from calibration_fit.forms import PREFILL_TIME
from calibration_fit.holdout import HoldOut, hold_out
from calibration_fit.log_admission import decode_steps, filled_in, inferred_runs
from calibration_fit.log_decode import DELTA, REDUCED, Lives, decode_bootstrap, decode_held, decode_identity, decode_result, life_rows
from calibration_fit.log_timeline import Run, Timeline, join, lively, prefill_rows, prefill_runs, timeline
from calibration_fit.measurements import Setup, Source
from calibration_fit.results import SetupFit, TableFit
from calibration_fit.rows import concatenated
from calibration_fit.uncertainty import BOOTSTRAP_SAMPLES, Bootstrap, Identifiability, identify
from jaxserve.errors import InputError
from jaxserve.perf.request_log import RequestLog

FEWEST_REQUESTS, FEWEST_RUNS = 20, 10
"""What a fit of decode steps, and one of prefill whose beginnings are inferred, need."""
TOKEN_BUDGET = 8192
NARROW = 2.0
"""Batches that spread by less than this factor leave the terms of the decode form confounded."""
BLOCKS = 10
"""Parts of the log, in time; every second is held out when the decode form is chosen."""
PREFER_WHOLE = 0.9
"""The whole decode form is taken when its held-out error is below this share of the smaller one's: it has three more terms."""
LOOSE = 0.25
"""A run of prefill whose beginning is uncertain by more than this share of its length tells too little of its length."""


@dataclass(frozen=True)
class LogFit:
    """Fitted tables of a log; `waits` says how admissions were known, if not from the log."""

    fit: SetupFit
    waits: str


@dataclass(frozen=True)
class Engine:
    """The requests of one engine, which of them to fit to [R], its runs of prefill, and how long these are expected to last [runs], s."""

    log: RequestLog
    fit: np.ndarray
    runs: list[Run]
    seconds: np.ndarray

    @property
    def used(self) -> list[Run]:
        """The runs to fit to. What is expected chooses them, not what was measured: that would pick out errors of one sign."""
        near = [run.slack_s <= LOOSE * s for run, s in zip(self.runs, self.seconds, strict=True)]
        return [run for run, known in zip(self.runs, near, strict=True) if known and run.end > run.start and self.fit[run.members].all()]


def fit_log(
    log: RequestLog, setup: Setup, source: Source, *, fit: np.ndarray, budget: int = TOKEN_BUDGET, samples: int = BOOTSTRAP_SAMPLES
) -> LogFit:
    """Fit both step times to the requests where `fit` [R] is true; the others are only there as company.

    Raises `InputError` when the log holds too few requests to fit to. Engines of a log are treated one by one.
    """
    _enough(log.name, int(fit.sum()), "requests are")
    names = np.array(log.engine if log.engine is not None else [""] * len(log))
    logs = [(log.select(names == name), fit[names == name]) for name in dict.fromkeys(names)]
    if log.queue_wait_s is not None:
        runs = [prefill_runs(e.admit_s, e.first_token_s) for e, _ in logs if e.admit_s is not None]
        engines = [Engine(e, f, r, _lengths(r)) for (e, f), r in zip(logs, runs, strict=True)]
        pre, waits = _prefill(engines, setup, source, budget), ""
    else:
        engines, pre = _inferred(log.name, logs, setup, source, budget)
        told = sum(len(run.members) for e in engines for run in e.used)
        waits = f"no queue_wait_s: prefill rests on the {told} of {len(log)} requests whose admission can be told"
    stay_s = float(np.median((log.finish_s - log.arrival_s)[fit]))
    tables = {
        "prefill_time": _prefill_table(pre, np.sort(_began_s(engines)), stay_s, samples),
        "decode_time": _decode_table(log, engines, stay_s, setup, source, samples),
    }
    return LogFit(SetupFit(setup, tables), waits)


def _enough(name: str, found: int, what: str) -> None:
    if found < FEWEST_REQUESTS:
        raise InputError(f"{name}: {found} {what} too few to fit coefficients to; give at least {FEWEST_REQUESTS}")


def _lengths(runs: list[Run]) -> np.ndarray:
    return np.array([run.end - run.start for run in runs])


def _prefill(engines: list[Engine], setup: Setup, source: Source, budget: int) -> FitResult:
    """The fit to the runs that may be used, in order of time."""
    parts = [prefill_rows(e.log, e.used, setup, source, budget) for e in engines if e.used]
    if not parts:
        raise InputError(
            f"{source.path}: no stretch of prefill lies wholly within the requests to fit to, so nothing tells how long prefill takes: "
            "the server prefills without a pause, or queue_wait_s is not the time until admission"
        )
    rows = concatenated(parts).select(np.argsort(_began_s(engines), kind="stable"))
    return fit_all([rows], PREFILL_TIME, delta=DELTA)[0]


def _began_s(engines: list[Engine]) -> np.ndarray:
    """When each used run began, engine by engine."""
    return np.array([run.start for e in engines for run in e.used])


def _inferred(
    name: str, logs: list[tuple[RequestLog, np.ndarray]], setup: Setup, source: Source, budget: int
) -> tuple[list[Engine], FitResult]:
    """Engines of logs without waits, and the fit to the runs of prefill whose beginning can be told."""

    def step(runs: list[list[Run]], lengths: list[np.ndarray]) -> tuple[list[Engine], FitResult]:
        """Fit to what can be told of the runs, and fill in the rest."""
        engines = [Engine(log, fit, r, s) for (log, fit), r, s in zip(logs, runs, lengths, strict=True)]
        if (known := sum(len(e.used) for e in engines)) < FEWEST_RUNS:
            raise InputError(
                f"{name}, row 1: there is no column queue_wait_s, and without it only {known} stretches of prefill tell when they began, "
                f"too few to fit to (at least {FEWEST_RUNS}): log the waits, or a lighter load"
            )
        pre = _prefill(engines, setup, source, budget)
        return [replace(e, runs=filled_in(e.log, r, s)) for e, r, s in zip(engines, runs, expected(pre, runs), strict=True)], pre

    def expected(pre: FitResult, runs: list[list[Run]]) -> list[np.ndarray]:
        return [prefill_rows(log, r, setup, source, budget).predict(pre.module) for (log, _), r in zip(logs, runs, strict=True)]

    runs = [inferred_runs(log, log.tpot_s) for log, _ in logs]
    engines, pre = step(runs, [_lengths(r) for r in runs])
    # Once more: with prefill taken out of the lives of requests, their decode steps are known, and with them what was left of a step.
    runs = [inferred_runs(e.log, decode_steps(e.log, e.runs)) for e in engines]
    return step(runs, expected(pre, runs))


def _prefill_table(pre: FitResult, began_s: np.ndarray, stay_s: float, samples: int) -> TableFit:
    block = time_blocks(began_s, stay_s)
    warnings = [f"prefill_time: pushed to 0 by the data: {', '.join(pre.at_bound)}"] if pre.at_bound else []
    warnings += short_log("prefill_time", began_s, stay_s)
    return _table(pre, hold_out([pre], ("time",))[0], bootstrap_blocks(pre, block, samples), identify(pre, block), warnings)


def _decode_table(log: RequestLog, engines: list[Engine], stay_s: float, setup: Setup, source: Source, samples: int) -> TableFit:
    """The decode form that predicts held-out stretches of time best, fitted to all requests."""
    lived = [e.log.select(e.log.osl > 1) for e in engines]
    t = join([timeline(r.first_token_s, r.finish_s, r.isl, r.osl, e.runs) for r, e in zip(lived, engines, strict=True)])
    arrival, osl, line = (np.concatenate([getattr(r, k) for r in lived]) for k in ("arrival_s", "osl", "line"))
    keep = np.concatenate([e.fit[e.log.osl > 1] for e in engines]) & lively(t)
    _enough(log.name, int(keep.sum()), "requests made more than one token and are")
    lives = Lives(t, osl - 1.0, keep, time_blocks(arrival[keep], stay_s))
    rows = life_rows(lives, line[keep], setup, source)
    part = np.zeros(len(keep), int)
    part[keep] = equal_parts(arrival[keep], BLOCKS) % 2
    tried = [decode_held(lives, rows, held, part) for held in (REDUCED, {})]
    whole = tried[1].mape_all < PREFER_WHOLE * tried[0].mape_all
    result = decode_result(lives, rows, {} if whole else REDUCED)
    table = _table(
        result,
        {"time": tried[whole]},
        decode_bootstrap(lives, result, samples),
        decode_identity(lives, result),
        [*_decode_warnings(t, result), *short_log("decode_time", arrival[keep], stay_s)],
    )
    return replace(table, alternatives={"study, smaller": tried[0].mape_all, "study": tried[1].mape_all})


def _table(result: FitResult, held: dict[str, HoldOut], intervals: Bootstrap, identity: Identifiability, warnings: list[str]) -> TableFit:
    warnings = [*warnings, *not_converged(result), *rows_below_floor(result.rows, result.form.table), *check_fit(result)]
    return TableFit(result, held, intervals, identity, tuple(warnings))


def short_log(table: str, at: np.ndarray, stay_s: float) -> list[str]:
    """Whether the rows, at times `at` [R], span too few stays of a request for blocks that do not err together."""
    stays = (at.max() - at.min()) / stay_s
    if stays >= FEWEST_BLOCKS:
        return []
    return [f"{table}: what was fitted spans only {stays:.1f} stays of a request, which share their errors: the intervals are too narrow"]


def _decode_warnings(t: Timeline, result: FitResult) -> list[str]:
    """What the log does not pin down, in words."""
    out = []
    order = np.argsort(t.batch)
    share = np.cumsum(t.free_s[order] * (t.batch[order] > 0))
    low, high = (float(t.batch[order][np.searchsorted(share, q * share[-1])]) for q in (0.1, 0.9))
    if high < NARROW * low:
        out.append(
            f"decode_time: 80 % of the measured time had {low:.0f} to {high:.0f} requests running, so the log does not tell what a step "
            "costs at all from what each request adds: do not use it at other batch sizes"
        )
    if result.theta[0] < 1e-4:
        out.append("decode_time: alpha0 ended at 0, though no step is free: the log does not identify it")
    return out
