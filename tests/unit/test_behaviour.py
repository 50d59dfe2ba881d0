"""The behaviour command: intervals, verdicts, tables; and that it measures what a run says."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import jaxserve
from jaxserve import behaviour
from jaxserve.analysis.behaviour_report import COLUMNS, report, write
from jaxserve.analysis.directions import Direction, interval, judge
from jaxserve.behaviour import (
    GROUPS,
    STUDIED,
    behave,
    load_directions,
    measure,
    saturation_req_per_s,
    sensitivities,
    setting_directions,
)
from jaxserve.cli import app
from jaxserve.errors import InputError
from jaxserve.perf.coefficients import load_coefficients
from tests.cli.helpers import write_scenario

SAME_RUN = 1e-12  # a lane of a sweep and a run by itself: the same sums


def test_interval_by_hand():
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.303 / math.sqrt(3), rel=1e-12)  # s = 1, two degrees of freedom
    assert interval([5.0])[0] == 5.0 and math.isnan(interval([5.0])[1])


def frame(**violation: list[float]) -> pd.DataFrame:
    """Violations of policies under one setting, by seed."""
    rows = [
        {"policy": policy, "setting": "s", "seed": seed, "slo_violation": value}
        for policy, values in violation.items()
        for seed, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("more", "less", "verdict"),
    [
        ([0.5, 0.6, 0.7], [0.1, 0.2, 0.3], "holds"),
        ([0.1, 0.2, 0.3], [0.5, 0.6, 0.7], "does not hold"),
        ([0.5, 0.1, 0.3], [0.4, 0.2, 0.3], "no difference"),  # within its interval
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], "no difference"),
        ([0.0005, 0.0005, 0.0005], [0.0, 0.0, 0.0], "no difference"),  # certain, and too small to matter
    ],
)
def test_verdicts(more: list[float], less: list[float], verdict: str):
    judged = judge(frame(a=more, b=less), Direction("claim", "here", "slo_violation", ("a", "s"), ("b", "s")))
    assert judged["verdict"] == verdict
    assert judged["difference"] == pytest.approx(np.mean(more) - np.mean(less), abs=1e-15)


def test_every_direction_names_what_is_measured():
    labels = {"round_robin", "ilp", "iterative_ilp", "facility_milp", "greedy-0.0", "greedy-0.25", "greedy-0.5", "greedy-0.9"}
    loads = ["low", "high"]
    for d in load_directions("m", loads, labels):
        assert {d.more[0], d.less[0]} <= labels and {d.more[1], d.less[1]} <= set(loads)
    assert sum(map(len, GROUPS)) > len(labels) and sum(map(len, STUDIED)) == 3
    known = sensitivities("study-llama")
    for d in setting_directions("m"):
        assert {d.more[1], d.less[1]} <= set(known)


def test_measures_what_a_run_says(tmp_path: Path):
    settings = {"light": ["workload.rate_req_per_s=20.0"], "heavy": ["workload.rate_req_per_s=60.0"]}
    told: list[str] = []
    groups = (['{kind="round_robin"}'], ['{kind="greedy"}'])
    runs = measure("two-region", groups, settings, [0, 1], 3.0, told.append)
    assert len(told) == len(groups) and len(runs) == 2 * 2 * 2
    assert (runs.loc[runs["policy"] == "round_robin", "saving"] == 0).all()
    alone = jaxserve.run(
        "two-region",
        overrides=["horizon_s=3.0", "seed=1", "workload.rate_req_per_s=60.0", 'policies=[{kind="round_robin"}, {kind="greedy"}]'],
    )
    mine = runs[(runs["policy"] == "greedy-0.5") & (runs["setting"] == "heavy") & (runs["seed"] == 1)].iloc[0]
    assert mine["carbon_g"] == pytest.approx(alone.frame.loc["greedy-0.5", "carbon_g"], rel=SAME_RUN)
    assert mine["saving_in_horizon"] == pytest.approx(alone.frame.loc["greedy-0.5", "saving_vs_baseline"], rel=1e-9)

    loaded = runs.assign(model="M", part="load", saturation_req_per_s=80.0, of_saturation=0.5)
    runs = pd.concat([loaded, runs.assign(model="M", part="setting")], ignore_index=True)
    d = Direction("heavier saves less", "M", "saving", ("greedy-0.5", "light"), ("greedy-0.5", "heavy"))
    verdicts = pd.DataFrame([judge(runs[runs["part"] == "load"], d)])
    text = report(runs, verdicts, "the command", 3.0)
    assert (
        "sustains 80 req/s" in text
        and "### heavy, 50 % of saturation" in text
        and "| greedy-0.5 | " in text
        and "the command" in text
        and "heavier saves less" in text
    )
    folder = tmp_path / "new" / "out"
    write(runs, verdicts, folder, "the command", 3.0)
    assert {path.name for path in folder.iterdir()} == {"behaviour.md", "behaviour.csv", "behaviour.png"}
    assert len(pd.read_csv(folder / "behaviour.csv")) == len(runs)


def test_saturation_lies_between_its_bounds(tmp_path: Path):
    """Four engines of 16 slots, prompts of 200 tokens and 20 of output: all 16 prefilled at once, or each by itself.

    A request decodes in 19 iterations, the one of its prefill being the first (study batching).
    """
    path = write_scenario(tmp_path, {"horizon_s": 40.0})
    found = saturation_req_per_s(str(path), 30.0, 40.0)
    c = load_coefficients("llama-3.1-8b_tp1_a100")
    decode_s = sum(float(c.decode_time_model()(16.0, 16.0 * (201 + i))) for i in range(19))
    together = float(c.prefill_time_model()(16 * 200.0, 16.0, 16 * 200.0**2))
    apart = 16 * float(c.prefill_time_model()(200.0, 1.0, 200.0**2))
    assert 4 * 16 / (decode_s + apart) * 0.99 < found < 4 * 16 / (decode_s + together) * 1.01


def test_unknown_model():
    with pytest.raises(InputError, match="no model 'GPT'; known are Llama"):
        next(behave(["GPT"], [0], 1.0, print))


def test_what_is_measured_is_kept_when_a_later_model_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Measurements are made up; the second model's end in an error."""

    def made_up(scenario: str, groups: Iterable[Sequence[str]], settings: dict[str, list[str]], seeds: Sequence[int], *_: object):
        if scenario == "study-qwen":
            raise InputError("out of luck")
        labels = [behaviour._label(policy) for policies in groups for policy in policies]
        rows = [{"policy": p, "setting": s, "seed": seed} | dict.fromkeys(COLUMNS, 0.1) for p in labels for s in settings for seed in seeds]
        return pd.DataFrame(rows)

    monkeypatch.setattr(behaviour, "measure", made_up)
    monkeypatch.setattr(behaviour, "saturation_req_per_s", lambda *_: 6000.0)
    command = ["behaviour", "--out", str(tmp_path / "out"), "--model", "Llama-3.1-8B", "--model", "Qwen2.5-7B", "--seeds", "2"]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, InputError)
    text = (tmp_path / "out" / "behaviour.md").read_text()
    assert "## Llama-3.1-8B" in text and "## Qwen2.5-7B" not in text
    assert set(pd.read_csv(tmp_path / "out" / "behaviour.csv")["model"]) == {"Llama-3.1-8B"}
