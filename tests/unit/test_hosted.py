"""Policies with a solver on the host: its own time as delay, answers that fail, and the same results as on the device."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cvxpy
import equinox as eqx
import numpy as np
import pandas as pd
import pytest
from jax import Array

import jaxserve
from jaxserve.engine.batch import Batch
from jaxserve.engine.control import View
from jaxserve.errors import InputError
from jaxserve.policies import registry
from jaxserve.policies.formulations import Ilp
from jaxserve.running import Results
from jaxserve.solvers.cvxpy_model import Model
from jaxserve.solvers.highs import HighsSolver
from jaxserve.solvers.problem import BUDGET, FAILED, INFEASIBLE, AssignmentProblem, Solution
from tests.cli.helpers import write_scenario

ILP = {"kind": "ilp", "label": "host", "solver": "highs", "time_limit_s": 60.0}
BUSY: dict[str, Any] = {
    "horizon_s": 4.0,
    "ledger_s": 0.1,  # steps of one window
    "workload": {"kind": "trace", "path": "trace.csv"},
    "dispatch": {"window_max_requests": 3, "batch_capacity": 4},  # some windows have several batches; the clean DC is often full
    "slo": {"ttft_s": 3.0, "tpot_s": 0.2},
    "policies": [ILP],
}
MEASURED = {"decision_latency": {"kind": "measured"}}
TIMES = ["decision_s", "dc_arrival_s", "admit_s", "first_token_s", "finish_s"]


pytestmark = pytest.mark.usefixtures("no_figures")


@pytest.fixture(autouse=True, scope="module")
def _short() -> Iterator[None]:
    """Chunks of eight steps on the device too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxserve.scenario.compile.MAX_CHUNK_STEPS", 8)
        yield


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a solver in the place of HiGHS."""
    return lambda solver: monkeypatch.setattr("jaxserve.solvers.highs.HighsSolver", solver)


def go(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> Results:
    """A run of the busy scenario, changed as said: 40 requests a second of 100 to 500 tokens in and 10 to 40 out."""
    rng = np.random.default_rng(5)
    rows = zip(np.sort(rng.uniform(0.0, 4.0, 160)), rng.integers(100, 500, 160), rng.integers(10, 40, 160), strict=True)
    (folder / "trace.csv").write_text("arrival_s,isl,osl\n" + "\n".join(f"{t:.6f},{isl},{osl}" for t, isl, osl in rows))
    return jaxserve.run(write_scenario(folder, BUSY | (changes or {})), **options)


def batches(results: Results, label: str = "host") -> tuple[pd.DataFrame, list[pd.DataFrame]]:
    """`solves.parquet`, and the requests of each of its rows: each scheduler's in order of arrival, cut where its batches end."""
    solves, requests = results[label].solves, results[label].requests
    mine: list[pd.DataFrame] = [requests.iloc[:0]] * len(solves)
    for name, rows in solves.groupby("scheduler", observed=True):
        waiting = requests[requests["scheduler"] == name]
        assert rows["requests"].sum() == len(waiting)
        ends = rows["requests"].to_numpy().cumsum()
        for i, end, n in zip(rows.index, ends, rows["requests"], strict=True):
            mine[i] = waiting.iloc[end - n : end]
    return solves, mine


class Timed(HighsSolver):
    """HiGHS on a machine whose clock counts requests."""

    first_s, each_s = 0.125, 0.0625

    def solve(self, problem: AssignmentProblem) -> Solution:
        """The honest answer, at a made-up wall time."""
        answer = super().solve(problem)
        rows = int(np.asarray(problem.feasible).any(axis=1).sum())
        return Solution(answer.place, answer.objective, answer.bound, answer.status, self.first_s + self.each_s * rows)


class Quick(Timed):
    """The same, in no time to speak of."""

    first_s, each_s = 1e-3, 0.0


class TestMeasuredLatency:
    def test_decisions_wait_for_the_solver(self, tmp_path: Path, use: Any) -> None:
        """One solver a scheduler, which takes its batches in order; its times stand in `solves.parquet` and in the summary."""
        use(Timed)
        results = go(tmp_path, MEASURED)
        solves, mine = batches(results)
        free = {"one": 0.0, "two": 0.0}
        for row, requests in zip(solves.itertuples(), mine, strict=True):
            free[row.scheduler] = max(row.decided_s, free[row.scheduler]) + row.wall_s
            assert set(requests["decision_s"]) == {free[row.scheduler]}  # to the last bit
            assert 0.125 <= row.wall_s <= 0.125 + 0.0625 * row.requests
        assert results["host"].summary["decisions"]["solve_p50_s"] == float(np.quantile(solves["wall_s"], 0.5))
        # Ten windows a second close, and the solver manages five at the most: whoever comes later waits longer.
        second = results["host"].requests.groupby(results["host"].requests["arrival_s"] // 1.0)
        for wait in ((second["decision_s"].mean() - second["arrival_s"].mean()), second["ttft_s"].mean()):
            assert np.all(np.diff(wait) > 0.5) and wait.iloc[-1] > 3.0

    def test_a_quick_solver_keeps_up(self, tmp_path: Path, use: Any) -> None:
        use(Quick)
        results = go(tmp_path, MEASURED)
        solves, mine = batches(results)
        for row, requests in zip(solves.itertuples(), mine, strict=True):
            np.testing.assert_allclose(requests["decision_s"], row.decided_s + 1e-3, rtol=1e-12)
        assert results["host"].requests["ttft_s"].mean() < 0.5

    def test_other_latencies_know_no_wall_time(self, tmp_path: Path, use: Any) -> None:
        use(Timed)
        for latency, seconds in (({"kind": "none"}, 0.0), ({"kind": "fixed", "seconds": 0.25}, 0.25)):
            solves, mine = batches(go(tmp_path, {"decision_latency": latency}))
            assert (solves["wall_s"] >= 0.125).all()
            for row, requests in zip(solves.itertuples(), mine, strict=True):
                assert set(requests["decision_s"]) == {row.decided_s + seconds}


class Faulty(HighsSolver):
    """Fails, finds nothing, runs out of time with and without an answer, or answers, in turn."""

    turns = 0

    def solve(self, problem: AssignmentProblem) -> Solution:
        """Blank problems are no question."""
        answer, none = super().solve(problem), np.full(len(problem.feasible), -1, np.int32)
        if not np.any(problem.feasible):
            return answer
        Faulty.turns += 1
        return (
            Solution(none, np.float64(np.nan), np.float64(-np.inf), np.int32(FAILED), np.nan),
            Solution(none, np.float64(np.inf), np.float64(np.inf), np.int32(INFEASIBLE), 0.5),
            Solution(answer.place, answer.objective, 0.5 * answer.objective, np.int32(BUDGET), 0.5),
            Solution(none, np.float64(np.inf), np.float64(0.0), np.int32(BUDGET), 0.5),
            answer,
        )[Faulty.turns % 5]


def test_answers_that_fail(tmp_path: Path, use: Any) -> None:
    """Every request is served all the same, by the fallback, and all is counted."""
    use(Faulty)
    results = go(tmp_path, {"dispatch": {"window_max_requests": 3}})  # and many more places than requests
    requests, decisions = results["host"].requests, results["host"].summary["decisions"]
    assert (requests["status"] == "finished").all() and np.isfinite(requests[TIMES].to_numpy()).all()
    solves, mine = batches(results)
    assert decisions["windows"] == len(solves) and sum(decisions["status"].values()) == len(solves)
    assert all(decisions["status"].get(name, 0) > 3 for name in ("optimal", "budget", "infeasible", "failed"))
    assert solves["fallback"].sum() == decisions["fallback_lowest_carbon"] + decisions["fallback_round_robin"]
    assert decisions["fallback_lowest_carbon"] == solves["fallback_lowest_carbon"].sum() > 0
    assert decisions["fallback_round_robin"] == solves["fallback_round_robin"].sum()
    unanswered = solves["objective"].isna()
    assert (solves.loc[unanswered, "fallback"] == solves.loc[unanswered, "requests"]).all()
    assert solves.loc[unanswered, "gap"].isna().all() and unanswered[solves["status"].isin(["failed", "infeasible"])].all()
    halves = solves["status"].eq("budget") & ~unanswered
    np.testing.assert_allclose(solves.loc[halves, "gap"], 0.5, rtol=1e-12)
    assert decisions["largest_gap"] == pytest.approx(0.5)
    assert any("not solved to proven optimum" in note for note in results.notes) and any(
        "fallback placed" in note for note in results.notes
    )
    for i in np.flatnonzero(unanswered & (solves["fallback_round_robin"] == 0)):
        assert set(mine[i]["dc"]) == {"clean"}


class OneRowShort(Ilp):
    """A formulation with a bug: it does not say which DCs can serve the last request."""

    def problem(self, view: View, batch: Batch, placed: Array) -> AssignmentProblem:
        """The ILP's, all but that."""
        return eqx.tree_at(lambda p: p.feasible, super().problem(view, batch, placed), replace_fn=lambda feasible: feasible[:-1])


@pytest.mark.parametrize("solver", ["highs", "cvxpy"])
def test_a_formulation_with_a_bug_ends_the_run(solver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fallback would place every request, and the run would look like one."""
    monkeypatch.setitem(registry.REGISTRY, "ilp", (registry.IlpParameters, registry._optimising(OneRowShort)))
    with pytest.raises(ValueError, match=r"^a formulation with a bug: cost \(\d+, 2\), feasible \(\d+, 2\), capacity"):
        go(tmp_path, {"policies": [ILP | {"solver": solver}]})


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The same policy with each of the solvers."""
    tables = [ILP | {"solver": solver, "label": solver, "gap": 0.0} for solver in ("device", "highs", "cvxpy")]
    return go(tmp_path_factory.mktemp("everywhere"), {"policies": tables})


@pytest.mark.parametrize("solver", ["highs", "cvxpy"])
def test_the_solver_does_not_matter(everywhere: Results, solver: str) -> None:
    device, host = everywhere["device"], everywhere[solver]
    pd.testing.assert_frame_equal(device.requests, host.requests)  # to the last bit
    pd.testing.assert_frame_equal(device.ledger_frame, host.ledger_frame)
    about = ["objective", "bound", "gap", "wall_s"]
    pd.testing.assert_frame_equal(device.solves.drop(columns=about), host.solves.drop(columns=about))
    np.testing.assert_allclose(device.solves["objective"], host.solves["objective"], rtol=1e-9)
    assert device.solves["wall_s"].isna().all() and (host.solves["wall_s"] > 0).all()
    assert device.solves["requests"].max() == 3 and 0.3 < (device.requests["dc"] == "clean").mean() < 0.9
    assert set(device.solves["status"]) >= {"optimal", "infeasible"}


def nothing_to_clean(m: Model) -> list[cvxpy.Constraint]:
    """A constraint of one's own, by the name of a site."""
    return [cvxpy.sum(m.x[:, m.names.index("clean")]) == 0]


HERE = "tests.unit.test_hosted"


def test_constraints_of_ones_own(tmp_path: Path) -> None:
    table = ILP | {"solver": "cvxpy", "constraints": f"{HERE}:nothing_to_clean"}
    results = go(tmp_path, {"policies": [table], "horizon_s": 1.0}, allow_code=True)
    solves, mine = batches(results)
    solved = np.flatnonzero(solves["status"] == "optimal")
    assert len(solved) > 5 and all(set(mine[i]["dc"]) == {"dirty"} for i in solved)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"solver": "device"}, '^policy host: decision_latency.kind = "measured" needs a solver on the host; set solver'),
        ({"constraints": "a.b:c"}, r'^policies.0: constraints = "a.b:c" are added to the cvxpy model; set solver'),
        ({"solver": "device", "constraints": "a.b:c"}, r'^policies.0: constraints = "a.b:c" are added to the cvxpy model'),
        ({"solver": "cvxpy", "constraints": "no.such:thing"}, r'^policy host: constraints = "no.such:thing": No module'),
        ({"solver": "cvxpy", "constraints": f"{HERE}:nothing"}, "has no attribute 'nothing'; name a function as module:function"),
        ({"solver": "cvxpy", "constraints": f"{HERE}:HERE"}, "HERE is not a function; name a function as module:function"),
        ({"solver": "cvxpy", "constraints": "no colon"}, r"^policies.0: constraints = .no colon.: name a function as module:function"),
        ({"solver": "cvxpy", "constraints": ".relative:thing"}, r"^policies.0: constraints = .\.relative:thing.: name a function"),
        ({"solver": "scip"}, r"^policies.0.solver: "),
    ],
)
def test_what_does_not_go_together(table: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=sentence):
        go(tmp_path, MEASURED | {"policies": [ILP | table]}, allow_code=True)


def test_no_sweep_with_a_solver_on_the_host(tmp_path: Path) -> None:
    path = write_scenario(tmp_path, {"policies": [ILP]})
    with pytest.raises(InputError, match=r'^sweep: a policy with a solver on the host cannot run as one call; set solver = "device"'):
        jaxserve.sweep(path, {"seed": [1, 2]})


class Killed(BaseException):
    """In place of SIGKILL: nothing in the package can catch it."""


@pytest.mark.parametrize(
    ("label", "changes"), [("device", {"policies": [ILP | {"solver": "device", "label": "device"}]}), ("host", MEASURED)]
)
def test_killed_and_resumed(label: str, changes: dict[str, Any], tmp_path: Path, use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes as a run that nothing stopped, tables of solves included; the solver on the host has a backlog when it is stopped."""
    use(Timed)
    monkeypatch.setattr(importlib.import_module("jaxserve.running"), "CHECKPOINT_EVERY_S", 0.0)
    go(tmp_path, changes, out=tmp_path / "whole")

    def stop(_: str, done: float) -> None:
        if done >= 0.5 and (tmp_path / "out.partial" / label / "checkpoint.npz").exists():
            raise Killed

    with pytest.raises(Killed):
        go(tmp_path, changes, out=tmp_path / "out", progress=stop)
    go(tmp_path, changes, out=tmp_path / "out", resume=True)
    for name in ("requests.parquet", "ledger.parquet", "engines.parquet", "solves.parquet"):
        assert (tmp_path / "out" / label / name).read_bytes() == (tmp_path / "whole" / label / name).read_bytes(), name
    assert not list(tmp_path.glob("*.partial"))
