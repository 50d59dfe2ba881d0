"""The behaviour command: what it measures, that it measures what a run says, what it keeps, and how it sets ours beside the published."""

import math
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import jaxserve
from jaxserve.analysis.directions import Direction, interval, judge
from jaxserve.cli import app
from jaxserve.errors import InputError
from jaxserve.perf.coefficients import load_coefficients
from jaxserve.scenario.load import load_scenario
from jaxserve.studies import measure as measuring
from jaxserve.studies.behaviour import judged
from jaxserve.studies.comparison import compare, published, with_shares
from jaxserve.studies.expected import load_directions, setting_directions
from jaxserve.studies.measure import NAMED, TAKEN, measure, run_group
from jaxserve.studies.processes import spread
from jaxserve.studies.readings import AS_SHIPPED, readings
from jaxserve.studies.report import write
from jaxserve.studies.saturation import STAYS, saturation
from jaxserve.studies.setups import BASELINE, MODELS, SATURATION, Group, Variant, groups, spread_ci
from tests.cli.helpers import write_scenario

SAME_RUN = 1e-12  # one after another in shared shapes, and a run by itself: the same sums


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


# --- What is measured


@pytest.fixture(scope="module")
def everything() -> list[Group]:
    """All groups of the command as it is called by default."""
    return groups(list(MODELS), range(5), 200.0)


def test_runs_are_as_published(everything: list[Group]):
    by_load = [g for g in everything if g.part == "load"]
    assert {g.policy for g in by_load} > {BASELINE, "least_loaded", "greedy-0.0", "greedy-0.5", "greedy-0.9", "facility_milp", "freesh"}
    for group in by_load:
        assert {(v.values["horizon_s"], v.values["warmup_s"]) for _, v in group.runs} == {(200.0, 15.0)}
        rates = {v.load: v.values["workload.rate_req_per_s"] for _, v in group.runs}
        low, moderate, high = (800.0, 1200.0, 2000.0) if group.model == "Mixtral-8x7B" else (1200.0, 2400.0, 4000.0)
        assert rates == {"low": low, "moderate": moderate, "high": high}
        assert len({v.seed for _, v in group.runs}) == (1 if group.policy == "moer_cap" else 5)
        offered = [v.values["workload.rate_req_per_s"] for _, v in group.runs]
        assert offered == sorted(offered, reverse=True), "shapes are handed on from the heaviest"


def test_every_reading_changes_something_that_a_scenario_has(everything: list[Group]):
    """Each run's scenario loads, and is another than as shipped."""
    seen = set()
    for group in (g for g in everything if g.part == "reading"):
        plain = next((policy, v.values) for policy, v in group.runs if v.setting == AS_SHIPPED and v.load == "high")
        for policy, variant in group.runs:
            if variant.load == "high" and variant.setting not in (AS_SHIPPED, *seen):
                seen.add(variant.setting)
                changed, _ = load_scenario(group.scenario, values=variant.values)
                shipped, _ = load_scenario(group.scenario, values=plain[1])
                assert (changed, policy) != (shipped, plain[0]), variant.setting
    assert seen <= {r.name for r in readings()} and len(seen) >= len(readings()) - 1  # a second energy transfer need not be shipped


def test_every_published_figure_names_what_is_measured(everything: list[Group]):
    known = {(g.model, v.load, v.setting, g.policy) for g in everything for _, v in g.runs}
    for p in published():
        for model in p.models:
            for load in p.loads or [None]:
                for policy in (*p.policies, *p.minus_policies):
                    assert any((model, policy, p.setting or AS_SHIPPED) == (m, pol, s) and load in (None, at) for m, at, s, pol in known), (
                        p,
                        model,
                        load,
                        policy,
                    )
        assert p.low <= p.high and p.statistic in ("each", "max", "mean", "max_abs") and (math.isfinite(p.low) or math.isfinite(p.high))


def test_every_direction_names_what_is_measured(everything: list[Group]):
    measured = {(g.policy, v.load) for g in everything if g.part == "load" for _, v in g.runs}
    for d in load_directions("m", ["low", "moderate", "high"], {policy for policy, _ in measured}):
        assert {d.more, d.less} <= measured
    around = {(g.policy, v.setting) for g in everything if g.part == "setting" for _, v in g.runs if v.load == "moderate"}
    for d in setting_directions("m"):
        assert {d.more, d.less} <= around


def test_spread_of_ci():
    """Its coefficient of variation is as asked, its mean and order stay."""
    even, base = spread_ci("study-llama", 0.0), spread_ci("study-llama", 0.5)
    wide = np.array(list(spread_ci("study-llama", 0.94).values()))
    ci = np.array(list(base.values()))
    assert wide.std() / wide.mean() == pytest.approx(0.94, rel=1e-6) and ci.std() / ci.mean() == pytest.approx(0.5, rel=1e-6)
    assert wide.mean() == pytest.approx(ci.mean(), rel=1e-9) == pytest.approx(np.mean(list(even.values())), rel=1e-9)
    assert (np.argsort(wide) == np.argsort(ci)).all() and np.ptp(list(even.values())) < 1e-9 and wide.min() > 0


def test_unknown_model():
    with pytest.raises(InputError, match="no model 'GPT'; known are Llama"):
        groups(["GPT"], [0], 1.0)


def test_a_model_named_twice_is_measured_once():
    """Else its seeds would count twice, and its intervals be too narrow."""
    assert groups(["Qwen2.5-7B", "Qwen2.5-7B"], [0], 4.0) == groups(["Qwen2.5-7B"], [0], 4.0)


# --- Measuring


RATES = {"heavy": 30.0, "light": 8.0}


def small_group(path: Path, seeds: list[int]) -> Group:
    timing: dict[str, Any] = {"horizon_s": 6.0, "warmup_s": 2.0}
    runs = [
        ({"kind": "round_robin"}, Variant(load, AS_SHIPPED, s, {**timing, "seed": s, "workload.rate_req_per_s": RATES[load]}))
        for load in RATES
        for s in seeds
    ]
    return Group("M", "load", str(path), BASELINE, runs)


def test_measures_what_a_run_says_and_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_scenario(tmp_path)
    told: list[str] = []
    measure([small_group(path, [0])], tmp_path, 1, told.append)
    runs = measure([small_group(path, [0, 1])], tmp_path, 1, told.append)
    assert [text.partition(": ")[2] for text in told] == [f"M, load, {path}, round_robin (2 runs)"] * 2, "those of seed 0 not again"
    assert runs["seed"].tolist() == [0, 1, 0, 1] and runs["load"].tolist() == ["heavy"] * 2 + ["light"] * 2
    for mine in runs.to_dict("records"):
        overrides = [f"seed={mine['seed']}", f"workload.rate_req_per_s={RATES[mine['load']]}", "horizon_s=6.0", "warmup_s=2.0"]
        alone = jaxserve.run(path, overrides=overrides)["round_robin"]
        for name in ("requests", "carbon_with_drain_g", "idle_share", "ttft_p99_s"):
            assert mine[name] == pytest.approx(alone.summary["metrics"][name], rel=SAME_RUN), name
        busy = [max(0.0, min(f, 6.0) - max(a, 2.0)) for a, f in alone.requests[["admit_s", "finish_s"]].itertuples(index=False)]
        assert mine["batch_mean"] == pytest.approx(sum(busy) / (4 * 4.0), rel=1e-9)  # four engines, four seconds

    def none_left(_: Group) -> list[dict[str, Any]]:
        raise AssertionError("run again")

    monkeypatch.setattr(measuring, "run_group", none_left)
    again = measure([small_group(path, [0, 1])], tmp_path, 1, told.append)
    pd.testing.assert_frame_equal(again, runs[again.columns], check_dtype=False, rtol=1e-12)
    monkeypatch.setattr(measuring, "keys", lambda group: [f"other{i}" for i in range(len(group.runs))])
    with pytest.raises(AssertionError, match="run again"):
        measure([small_group(path, [0])], tmp_path, 1, told.append)


def test_what_is_measured_is_kept_when_a_later_group_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, second = small_group(tmp_path / "a.toml", [0]), small_group(tmp_path / "b.toml", [1])
    monkeypatch.setattr(measuring, "keys", lambda group: [f"{group.scenario}{v.load}" for _, v in group.runs])

    def made_up(group: Group) -> list[dict[str, Any]]:
        if group is not first and group.scenario == second.scenario:
            raise InputError("out of luck")
        return [dict.fromkeys([*NAMED, *TAKEN], 1) | {"key": key} for key in measuring.keys(group)]

    monkeypatch.setattr(measuring, "run_group", made_up)
    with pytest.raises(InputError, match="out of luck"):
        measure([first, second], tmp_path, 1, lambda _: None)
    assert pd.read_csv(tmp_path / "runs.csv")["key"].tolist() == measuring.keys(first)
    (tmp_path / "runs.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match=r"runs.csv: is not what this command has written .*choose another --out"):
        measure([first], tmp_path, 1, lambda _: None)


def test_processes_give_each_task_its_result_and_end_with_the_caller():
    before = multiprocessing.active_children()
    assert dict(spread(math.sqrt, [1.0, 4.0, 9.0], 2)) == {1.0: 1.0, 4.0: 2.0, 9.0: 3.0}
    with pytest.raises(ValueError, match=r"math domain|nonnegative"):
        list(spread(math.sqrt, [-1.0, 4.0], 2))
    for child in set(multiprocessing.active_children()) - set(before):
        child.join(30)
        assert not child.is_alive()


def test_saturation_lies_between_its_bounds(tmp_path: Path):
    """Engines of 16 slots, prompts of 200 tokens and 20 of output: all 16 prefilled at once, or each by itself.

    A request decodes in 19 iterations, the one of its prefill being the first (study batching).
    """
    path = write_scenario(tmp_path, {"engine.batching": "study"})
    found = saturation(str(path), 200.0)
    c = load_coefficients("llama-3.1-8b_tp1_a100")
    decode_s = sum(float(c.decode_time_model()(16.0, 16.0 * (201 + i))) for i in range(19))
    together = float(c.prefill_time_model()(16 * 200.0, 16.0, 16 * 200.0**2))
    apart = 16 * float(c.prefill_time_model()(200.0, 1.0, 200.0**2))
    assert 16 / (decode_s + apart) * 0.99 < found.req_per_s_per_engine < 16 / (decode_s + together) * 1.01
    assert found.horizon_s / 2 >= STAYS * found.stay_s
    # Little's law: 16 requests in the batch, nearly always.
    assert found.req_per_s_per_engine * found.stay_s == pytest.approx(16.0, rel=0.05)


# --- Published and ours


def rows(everything: list[Group], changed: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """A made-up run for each that would be measured: no policy saves anything."""
    blank = dict.fromkeys(TAKEN, 0.0) | {"requests": 100, "carbon_with_drain_g": 50.0, "tpot_mean_s": 0.03, "slo_tpot_s": 0.1}
    for g in everything:
        for i, (_, v) in enumerate(g.runs):
            names = (f"{g.scenario}{i}", g.model, g.part, v.load, v.setting, g.policy, v.seed, 40, 512)
            row = dict(zip(NAMED, names, strict=True)) | blank
            row |= {"saturation_per_engine": 10.0, "horizon_s": 200.0, "stay_s": 3.0} if g.part == SATURATION else {}
            yield row | (changed or {}).get((g.model, g.part, v.load, v.setting, g.policy), {})


def test_published_beside_ours(everything: list[Group]):
    key = ("Llama-3.1-8B", "load", "high", AS_SHIPPED, "facility_milp")
    read = ("Llama-3.1-8B", "reading", "high")
    changed = {
        key: {"carbon_with_drain_g": 40.0, "idle_share": 0.70},
        (*read, AS_SHIPPED, "facility_milp"): {"idle_share": 0.70},
        (*read, "peers alike", "facility_milp"): {"idle_share": 0.40},
        (*read, "ledger off", "facility_milp"): {"idle_share": 0.55},
        ("Llama-3.1-8B", "load", "low", AS_SHIPPED, "facility_milp"): {"idle_share": 0.20},
        ("Llama-3.1-8B", "load", "moderate", AS_SHIPPED, "facility_milp"): {"idle_share": 0.20},
        ("Llama-3.1-8B", "reading", "moderate", AS_SHIPPED, "facility_milp"): {"idle_share": 0.57},
    }
    found = compare(with_shares(pd.DataFrame(list(rows(everything, changed)))))

    def row(source: str, figure: str) -> dict[str, Any]:
        (one,) = [r for r in found.to_dict("records") if r["source"] == source and r["figure"] == figure]
        return one

    saving = row("Fig. 5a", "saving: Llama-3.1-8B, high, facility_milp")  # 1 - 40/50
    assert saving["ours"] == pytest.approx(20.0) and saving["difference"] == pytest.approx(20.0 - 29.2) and saving["half_width"] < 1e-9
    assert saving["beyond"] and saving["explained_by"] == "unexplained", "its readings save nothing"
    idle = row("VI", "idle_share: Llama-3.1-8B, high, facility_milp")  # 33 published; 40 is less than half as far as 70, 55 is not
    assert idle["difference"] == pytest.approx(37.0) and idle["explained_by"] == "peers alike (40)"
    length = row("VI", "idle_share: Llama-3.1-8B, moderate, facility_milp")  # 56 published
    assert length["explained_by"] == "the length of the run (57 in one as short as those of the readings)"
    assert row("VI", "idle_share: Llama-3.1-8B, low, facility_milp")["explained_by"] == "unexplained (no readings were measured)"
    bound = row("V-C", "slo_violation: Qwen2.5-7B, low, ilp")
    assert (bound["published"], bound["difference"], bound["beyond"], bound["explained_by"]) == ("<= 1.3", 0.0, False, "")
    rate = row("V-B", "saturation_per_engine: Llama-3.1-8B, round_robin")
    assert rate["ours"] == 10.0 and not rate["beyond"], "within a factor of two of 9.19"
    headroom = row("Fig. 4a", "tpot_headroom: Qwen2.5-7B, high, round_robin")
    assert headroom["ours"] == pytest.approx(70.0)
    most = next(r for r in found.to_dict("records") if r["figure"].startswith("saving: max over Llama") and "high" in r["figure"])
    assert most["ours"] == pytest.approx(20.0), "of Qwen 0, of Llama 20"
    tp2 = row("VI", "carbon_change less as shipped: Llama-3.1-8B, high, facility_milp, TP2")
    assert tp2["ours"] == pytest.approx(25.0), "50 g against 40"


def test_the_report(everything: list[Group], tmp_path: Path):
    runs = pd.DataFrame(list(rows([g for g in everything if g.model == "Llama-3.1-8B"])))
    write(runs, judged(with_shares(runs)), tmp_path, "the command", 200.0)
    assert {path.name for path in tmp_path.iterdir()} == {"behaviour.md", "published.csv", "behaviour.png"}
    text = (tmp_path / "behaviour.md").read_text()
    assert "the command" in text and "the fleet 5120" in text and "### moderate: 2400 req/s, 47 % of saturation" in text
    assert "| published | – / – | – / up to 6.9 |" in text and "| saving rises as alpha falls | 0 | 6 | 0 |" in text
    for reading in readings()[:-1]:
        assert f"\n| {reading.name} |" in text
    assert len(pd.read_csv(tmp_path / "published.csv")) > 50


def test_the_command_measures_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All of it but the simulation."""
    made_up = {row["key"] + row["part"] + row["policy"]: row for row in rows(groups(["Qwen2.5-7B"], range(2), 8.0))}

    def run(group: Group) -> list[dict[str, Any]]:
        mine = [r for r in made_up.values() if (r["part"], r["policy"]) == (group.part, group.policy)]
        return [row | {"key": key} for row, key in zip(mine, measuring.keys(group), strict=True)]

    monkeypatch.setattr(measuring, "run_group", run)
    command = ["behaviour", "--out", str(tmp_path / "out"), "--model", "Qwen2.5-7B", "--seeds", "2", "--horizon", "8", "--jobs", "1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.exception
    text = (tmp_path / "out" / "behaviour.md").read_text()
    assert "## Qwen2.5-7B" in text and "## Llama" not in text and "jaxserve behaviour --model Qwen2.5-7B --seeds 2 --horizon 8" in text
    monkeypatch.setattr(measuring, "run_group", run_group)
    assert CliRunner().invoke(app, command).exit_code == 0, "nothing is left to measure"
