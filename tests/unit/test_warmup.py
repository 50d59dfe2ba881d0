"""A warm-up leaves out of the metrics what came before it, and changes nothing else."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import jaxserve
from jaxserve.errors import InputError
from jaxserve.running import Results
from jaxserve.scenario import compile
from jaxserve.units import J_PER_KWH
from tests.cli.helpers import write_scenario

RUN = importlib.import_module("jaxserve.running")
WARM_S, HORIZON_S = 7.5, 20.0
BUSY = {
    "horizon_s": HORIZON_S,
    "ledger_s": 2.0,
    "workload.rate_req_per_s": 20.0,
    "slo": {"ttft_s": 0.5, "tpot_s": 0.0165},  # often no DC keeps it, as schedulers see it
    "policies": [
        {"kind": "round_robin"},
        {"kind": "greedy", "alpha": 0.0},
        {"kind": "moer_cap", "cap": 0.75},
        {"kind": "ilp", "solver": "highs"},
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the scenario is; chunks are of eight steps, so that a run has several and the warm-up ends in the midst of one."""
    return tmp_path_factory.mktemp("warm")


def ran(folder: Path, **options: Any) -> Results:
    """The scenario with the warm-up, or as changed."""
    with pytest.MonkeyPatch.context() as short:
        short.setattr(compile, "MAX_CHUNK_STEPS", 8)
        return jaxserve.run(write_scenario(folder, BUSY | options.pop("changes", {"warmup_s": WARM_S})), **options)


@pytest.fixture(scope="module")
def warm(folder: Path) -> Results:
    """Counted from 7.5 s on."""
    return ran(folder)


@pytest.fixture(scope="module")
def cold(folder: Path) -> Results:
    """Counted from the start. Its ledger is cut at 7.5 s too."""
    return ran(folder, changes={"ledger_s": 0.5})


@pytest.mark.parametrize("label", ["round_robin", "greedy-0.0", "moer_cap-0.75", "ilp-highs"])
def test_metrics_by_the_tables(label: str, warm: Results, cold: Results) -> None:
    got, requests, ledger = warm[label].summary["metrics"], warm[label].requests, warm[label].ledger_frame
    pd.testing.assert_frame_equal(requests, cold[label].requests)  # all of them are there, and nothing is served otherwise
    assert ledger["interval_start_s"].min() == 0.0 and WARM_S in set(ledger["interval_start_s"])
    assert ledger["carbon_g"].sum() == pytest.approx(cold[label].ledger_frame["carbon_g"].sum(), rel=1e-12)
    counted, spent = requests[requests["arrival_s"] >= WARM_S], ledger[ledger["interval_start_s"] >= WARM_S]
    assert 0 < len(counted) < len(requests)
    assert (got["requests"], got["finished"], got["warmup_s"], got["horizon_s"]) == (len(counted), len(counted), WARM_S, HORIZON_S)
    assert got["slo_attainment"] == pytest.approx(counted["slo_ok"].mean(), rel=1e-12)
    assert got["ttft_p99_s"] == pytest.approx(np.percentile(counted["ttft_s"], 99), rel=1e-12)
    assert got["carbon_g"] == pytest.approx(spent["carbon_g"].sum(), rel=1e-12)
    assert got["facility_energy_j"] == pytest.approx(spent["facility_j"].sum(), rel=1e-12)
    last_ci = ledger["ci_g_per_kwh"].to_numpy()[-2:]
    drain_g, least_g, most_g = (
        got["carbon_with_drain_g"] - got["carbon_g"],
        *(got["drain_energy_j"] * np.array([1.1, 1.2]) * last_ci / J_PER_KWH),
    )
    assert 0 < least_g * (1 - 1e-9) <= drain_g <= most_g * (1 + 1e-9)  # all of it at the clean site, or at the dirty one
    assert got["drain_energy_j"] == pytest.approx(cold[label].summary["metrics"]["drain_energy_j"], rel=1e-12)
    engines = warm[label].engines[["prefill_s", "decode_s", "idle_s"]]
    np.testing.assert_allclose(engines.sum(axis=1), HORIZON_S - WARM_S, rtol=1e-12)
    power = warm.scenario.coefficients.power.idle_w_per_gpu
    assert spent["idle_j"].sum() == pytest.approx(power * engines["idle_s"].sum(), rel=1e-9)
    assert got["idle_share"] == pytest.approx(engines["idle_s"].sum() / (4 * (HORIZON_S - WARM_S)), rel=1e-12)
    assert got["goodput_req_per_s"] == pytest.approx(counted["slo_ok"].sum() / (HORIZON_S - WARM_S), rel=1e-12)


def test_decisions_of_the_warm_up_are_left_out(warm: Results, cold: Results) -> None:
    solves, decisions = warm["ilp-highs"].solves, warm["ilp-highs"].summary["decisions"]
    counted = solves[solves["decided_s"] >= WARM_S]
    assert (decisions["windows"], decisions["solves"]) == (len(counted), counted["solves"].sum())
    both = (decisions["fallback_lowest_carbon"], decisions["fallback_round_robin"])
    assert both == (counted["fallback_lowest_carbon"].sum(), counted["fallback_round_robin"].sum())
    assert 0 < sum(both) < solves["fallback"].sum()
    pd.testing.assert_frame_equal(solves.drop(columns="wall_s"), cold["ilp-highs"].solves.drop(columns="wall_s"))
    mine, theirs = (r["greedy-0.0"].summary["decisions"]["fallback_round_robin"] for r in (warm, cold))
    assert 0 < mine < theirs


def test_told_and_compared(warm: Results, cold: Results) -> None:
    n = len(warm["round_robin"].requests)
    early = int((warm["round_robin"].requests["arrival_s"] < WARM_S).sum())
    told = f"warm-up: what arrives or is spent before 7.5 s is in no metric ({early} of {n} requests)"
    assert any(note.startswith(told) for note in warm.notes)
    assert not any(note.startswith("warm-up") for note in cold.notes)
    base, green = (warm[label].summary["metrics"]["carbon_with_drain_g"] for label in ("round_robin", "greedy-0.0"))
    assert warm.frame.loc["greedy-0.0", "saving_vs_baseline"] == pytest.approx(1 - green / base, rel=1e-12)


def test_resumed_to_the_same_counts(folder: Path, warm: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the chunk in which the warm-up ends, a run goes on with what it knew then."""
    monkeypatch.setattr(RUN, "CHECKPOINT_EVERY_S", 0.0)

    def stop(label: str, share: float) -> None:
        if label == "greedy-0.0" and share >= 0.8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ran(folder, out=tmp_path / "out", progress=stop)
    resumed = ran(folder, out=tmp_path / "out", resume=True)
    for label in warm.runs:
        assert resumed[label].summary["metrics"] == warm[label].summary["metrics"]
        mine, theirs = ({k: v for k, v in r[label].summary["decisions"].items() if not k.startswith("solve_p")} for r in (resumed, warm))
        assert mine == theirs


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"warmup_s": 0.25}, "warmup_s: 0.25 s is not a whole number of windows"),
        ({"warmup_s": 4.0}, "warmup_s: 4 s leaves nothing of horizon_s = 4 s to count"),
        ({"warmup_s": 400.0}, "warmup_s: 400 s leaves nothing"),
        ({"warmup_s": -1.0}, "warmup_s: must be at least 0"),
        ({"warmup_s": 3.9, "workload.rate_req_per_s": 0.5}, "warmup_s: no request arrives at or after 3.9 s, the last at"),
    ],
)
def test_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        jaxserve.run(write_scenario(tmp_path, changes))
