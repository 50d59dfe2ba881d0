"""Many variants as one call give what each gives alone, under names that say which is which."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import jaxserve
from jaxserve.analysis.fields import METRICS
from jaxserve.errors import InputError
from jaxserve.sweep import parse_axes, save_dataset
from tests.cli.helpers import call, write_scenario

pytestmark = pytest.mark.usefixtures("no_figures")

SEEDS, ALPHAS = [1, 2], [0.0, 0.25, 0.5, 1.0]
COUNTS = ("requests", "finished", "rejected", "input_tokens_served", "output_tokens_served", "tpot_undefined")


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten seconds under load, the last eight counted, with a policy that alpha steers."""
    changes = {
        "horizon_s": 10.0,
        "warmup_s": 2.0,
        "workload": {"kind": "poisson", "rate_req_per_s": 12.0, "lengths": {"distribution": "openorca"}},
        "policies": [{"kind": "round_robin"}, {"kind": "greedy", "alpha": 0.5}],
    }
    return write_scenario(tmp_path_factory.mktemp("scenario"), changes)


@pytest.fixture(scope="module")
def grid(scenario: Path) -> xr.Dataset:
    """Two seeds by four alphas in one call."""
    return jaxserve.sweep(scenario, {"seed": SEEDS, "policies.1.alpha": ALPHAS}, policy=1)


def test_axes_have_names_fields_and_units(grid: xr.Dataset) -> None:
    assert dict(grid.sizes) == {"seed": 2, "alpha": 4}
    assert grid["seed"].values.tolist() == SEEDS and grid["alpha"].values.tolist() == ALPHAS
    assert (grid["seed"].attrs["field"], grid["alpha"].attrs["field"]) == ("seed", "policies.1.alpha")
    assert set(METRICS) <= set(grid.data_vars)
    assert grid["carbon_g"].dims == ("seed", "alpha") and grid["carbon_g"].attrs["units"] == "g"


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_point_equals_the_single_run(seed: int, alpha: float, grid: xr.Dataset, scenario: Path) -> None:
    results = jaxserve.run(scenario, overrides=[f"seed={seed}", f"policies=[{{kind='greedy', alpha={alpha}}}]"])
    (run,) = results.runs.values()
    alone, point = run.summary["metrics"], grid.sel(seed=seed, alpha=alpha)
    assert alone["requests"] == (run.requests["arrival_s"] >= 2.0).sum() < len(run.requests)
    assert int(point["fallback_round_robin"]) == run.summary["decisions"]["fallback_round_robin"]
    for name in METRICS:
        among = float(point[name])
        if alone[name] is None:
            assert np.isnan(among), name
        elif name in COUNTS or "_p50_" in name or "_p90_" in name or "_p99_" in name:
            assert among == alone[name], name  # the requests themselves are the same, to the last bit
        else:
            assert among == pytest.approx(alone[name], rel=1e-9), name


def test_the_axes_make_a_difference(grid: xr.Dataset) -> None:
    assert (grid["carbon_g"].sel(alpha=0.0) < 0.9 * grid["carbon_g"].sel(alpha=1.0)).all()
    assert len(set(grid["requests"].sel(alpha=0.5).values.tolist())) > 1


def test_axes_that_do_nothing_are_told(scenario: Path, tmp_path: Path) -> None:
    """An alpha of a policy that is not run, a seed where nothing is drawn, what round-robin does not look at; and one that matters."""
    (tmp_path / "trace.csv").write_text("arrival_s,isl,osl\n" + "".join(f"{0.3 * i:.1f},{100 + 9 * i},{5 + i}\n" for i in range(30)))
    overrides = [f"workload={{kind='trace', path='{tmp_path / 'trace.csv'}'}}"]
    axes = {"seed": [1, 2], "policies.1.alpha": [0.1, 0.9], "provisioner.poll_s": [1.0], "dispatch.ledger": ["off", "reset"]}
    dataset = jaxserve.sweep(scenario, axes | {"sites.0.pue": [1.1, 1.5]}, overrides=overrides)
    notes = [note for note in dataset.attrs["notes"].splitlines() if note.startswith("axis")]
    assert notes == [
        "axis seed: its 2 values gave the same metrics; nothing in these runs is drawn at random",
        "axis policies.1.alpha: its 2 values gave the same metrics; policy number 0 is run, not that one",
        "axis dispatch.ledger: its 2 values gave the same metrics; nothing in these runs depends on it",
    ]
    assert "warm-up: what arrives or is spent before 2 s is in no metric (7 of 30 requests)" in dataset.attrs["notes"]
    assert float(dataset["carbon_g"].isel(pue=0).max()) < float(dataset["carbon_g"].isel(pue=1).min())


def test_what_may_vary(scenario: Path) -> None:
    # Rates, carbon intensity, PUE, RTT, polling and switches share one shape; axes of one name keep their whole path.
    axes: dict[str, list[Any]] = {"sites.0.pue": [1.1, 1.6], "sites.1.pue": [1.2, 1.3], "grid.ci_g_per_kwh.PL": [10.0]}
    dataset = jaxserve.sweep(scenario, axes | {"schedulers.0.sites": [["clean"]]})
    assert dict(dataset.sizes) == {"sites.0.pue": 2, "sites.1.pue": 2, "PL": 1, "sites": 1}
    assert dataset["sites"].values.tolist() == ['["clean"]']
    carbon = dataset["carbon_g"].isel(PL=0, sites=0)
    # Round-robin knows no PUE, so carbon is linear in each of them and their effects add up.
    effects = carbon[1, :] - carbon[0, :]
    np.testing.assert_allclose(effects[1], effects[0], rtol=1e-9)
    # As many lanes as in `grid`, in steps of the same length: the same program.
    axes = {
        "workload.rate_req_per_s": np.array([6.0, 12.0]),
        "provisioner.poll_s": [1.0, 2.0],
        "network.rtt_ms.here.there": [10.0],
        "engine.max_num_seqs": [15, 16],
    }
    dataset = jaxserve.sweep(scenario, axes, policy=1)
    assert dict(dataset.sizes) == {"rate_req_per_s": 2, "poll_s": 2, "there": 1, "max_num_seqs": 2}
    assert (dataset["requests"].sel(rate_req_per_s=6.0) < dataset["requests"].sel(rate_req_per_s=12.0)).all()


@pytest.mark.parametrize(
    ("axes", "what"),
    [
        ({"sites.0.nodes": [1, 2]}, "engines"),
        ({"dispatch.window_s": [0.1, 0.2]}, "dispatch.window_s"),
        ({"ledger_s": [1.0, 2.0]}, "ledger_s"),
        ({"horizon_s": [10.0, 20.0]}, "horizon_s"),
        ({"warmup_s": [1.0, 2.0]}, "warmup_s"),
        ({"policies.0.kind": ["round_robin", "least_loaded"]}, "the kind of policy"),
    ],
)
def test_what_changes_a_shape_is_refused(axes: dict[str, list[Any]], what: str, scenario: Path) -> None:
    with pytest.raises(InputError, match=rf"^sweep: the variant .* differs from the first in .*{what}.*; only variants of one shape"):
        jaxserve.sweep(scenario, axes)


@pytest.mark.parametrize(
    ("axes", "policy", "sentence"),
    [
        ({}, 0, "sweep: give at least one axis"),
        ({"seed": []}, 0, "axis seed: there are no values"),
        ({"seed": [1, 1]}, 0, "axis seed: a value appears twice"),
        ({"seed": np.array([1, 1])}, 0, "axis seed: a value appears twice"),
        ({"seed": [1]}, 2, "policy: there is no policy number 2; the scenario has 2, counted from 0"),
        ({"policies.1.alpha": [0.5, 1.5]}, 1, r"policies.1.alpha: must be at most 1 \(got 1.5\)"),
        ({"policies.0.alpha": [0.5]}, 0, "policies.0.alpha: there is no such field"),
        ({"sede": [1]}, 0, "sede: there is no such field; did you mean seed?"),
        ({"sites.0.pue": [1.1, float("nan")]}, 0, "sites.0.pue: must be"),
    ],
)
def test_axes_that_make_no_sense(axes: dict[str, Any], policy: int, sentence: str, scenario: Path) -> None:
    with pytest.raises(InputError, match=sentence):
        jaxserve.sweep(scenario, axes, policy=policy)


def test_axes_from_the_command_line() -> None:
    assert parse_axes(["seed=1,2", "a.b=0.5", "dispatch.ledger=off,in-flight", "x=true"]) == {
        "seed": [1, 2], "a.b": [0.5], "dispatch.ledger": ["off", "in-flight"], "x": [True],
    }  # fmt: skip


def test_the_command_line_and_the_file(
    scenario: Path, grid: xr.Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = ("--axis", "seed=1,2", "--axis", "policies.1.alpha=0.0,0.25,0.5,1.0", "--policy", "1")
    outcome = call(capsys, monkeypatch, "sweep", scenario, *axes, "--out", tmp_path / "grid.nc")
    assert (outcome.code, outcome.err) == (0, "")
    table, _, notes = outcome.out.partition("\n- ")
    assert "carbon_with_drain_g" in table and table.count("\n") == 9
    assert "warm-up: what arrives or is spent before 2 s is in no metric" not in notes  # their requests differ in number
    assert "grid: average carbon intensity" in notes and "axis" not in notes
    with xr.open_dataset(tmp_path / "grid.nc", engine="h5netcdf") as stored:
        xr.testing.assert_identical(stored.load(), grid)


def test_a_dataset_that_cannot_be_written(grid: xr.Dataset, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write the dataset"):
        save_dataset(grid, tmp_path / "no" / "such" / "folder.nc")
