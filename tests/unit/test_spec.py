"""The scenario file: defaults, bounds, overrides, paths, and that what is written back means the same."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from pydantic import ValidationError

from jaxserve.errors import InputError, explain
from jaxserve.perf.coefficients import Coefficients, load_coefficients, shipped_names
from jaxserve.policies.registry import resolve_policies
from jaxserve.scenario.grid import FileGrid
from jaxserve.scenario.load import load_scenario, parse_scenario, shipped_scenarios, to_toml
from jaxserve.scenario.spec import Scenario
from jaxserve.scenario.workload import PoissonWorkload, TraceWorkload
from tests.cli.helpers import ABSENT, changed, write_scenario


def scenario(changes: dict[str, Any] | None = None) -> Scenario:
    """The small scenario, changed as said."""
    return parse_scenario(changed(changes or {}), "small", Path("/base"))


@pytest.mark.parametrize("name", shipped_scenarios())
def test_shipped_scenarios_are_whole(name: str) -> None:
    loaded, base = load_scenario(name)
    assert loaded.name == name and loaded.description and base == Path.cwd()
    assert isinstance(loaded.engine.coefficients, Coefficients)
    assert resolve_policies(loaded.policies)


STUDY = {
    # name: (DCs, schedulers, engines, rate req/s, TTFT s, TPOT s, batch capacity, engine limit): arXiv 2610.14571, Table II
    "study-llama": (16, 4, 512, 2400.0, 3.0, 0.1, 40, 256),
    "study-qwen": (16, 4, 512, 2400.0, 3.0, 0.1, 40, 256),
    "study-mixtral": (16, 4, 128, 1200.0, 3.0, 0.2, 400, 400),
    "study-llama-tp2": (16, 4, 256, 4000.0, 3.0, 0.1, 80, 256),
    "study-llama-8-schedulers": (16, 8, 512, 4000.0, 3.0, 0.1, 40, 256),
    "study-llama-8-dcs": (8, 4, 512, 4000.0, 3.0, 0.1, 40, 256),
    "study-llama-site-pue": (16, 4, 512, 4000.0, 3.0, 0.1, 40, 256),
    "study-mixtral-site-pue": (16, 4, 128, 2000.0, 3.0, 0.2, 400, 400),
    "study-mixtral-long": (16, 4, 128, 50.0, 4.5, 0.2, 16, 400),
    "study-mixtral-mixed": (16, 4, 128, 200.0, 4.5, 0.2, 24, 400),
}


def test_shipped_scenarios_and_coefficients() -> None:
    assert set(shipped_scenarios()) == {*STUDY, "two-region", "validation-node"}
    assert {"llama-3.1-8b_tp1_a100", "qwen2.5-7b_tp1_a100", "mixtral-8x7b_tp4_a100"} <= set(shipped_names())
    for name in shipped_names():
        assert load_coefficients(name).source, "each says where its numbers come from"


@pytest.mark.parametrize("name", STUDY)
def test_the_study_as_published(name: str) -> None:
    s, _ = load_scenario(name)
    engines = sum(site.nodes * site.gpus_per_node for site in s.sites) // s.coefficients.setup.tp
    assert isinstance(s.workload, PoissonWorkload)
    published = (s.slo.ttft_s, s.slo.tpot_s, s.dispatch.batch_capacity, s.engine.max_num_seqs)
    assert (len(s.sites), len(s.schedulers), engines, s.workload.rate_req_per_s, *published) == STUDY[name]
    assert len({site.region for site in s.sites}) == 4 and all(site.gpus_per_node == 8 for site in s.sites)
    if name == "study-mixtral-site-pue":
        assert [site.pue for site in s.sites] == [site.pue for site in load_scenario("study-llama-site-pue")[0].sites]
    assert (s.dispatch.window_s, s.dispatch.window_max_requests, s.provisioner.poll_s) == (0.1, 300, 1.0)
    assert (s.warmup_s, s.horizon_s) == (15.0, 200.0)
    assert (s.engine.gpu_memory_gib, s.coefficients.setup.gpu) == (40.0, "A100")
    assert (s.dispatch.ledger, s.dispatch.peers, s.dispatch.forwarding, s.dispatch.headroom) == ("in-flight", "unknown", "window", "whole")
    pue = {site.pue for site in s.sites}
    assert (min(pue), max(pue)) == (1.08, 1.32) if name.endswith("site-pue") else pue == {1.1}
    rtts = [ms for row in s.network.rtt_ms.values() for ms in row.values()]
    assert len(rtts) == 6 and min(rtts) > 80 and max(rtts) < 280


def test_defaults() -> None:
    s = scenario()
    assert (s.ledger_s, s.dispatch.window_s, s.dispatch.batch_capacity, s.dispatch.ledger) == (1.0, 0.1, 40, "in-flight")
    assert (s.provisioner.poll_s, s.provisioner.mode, s.decision_latency.kind) == (1.0, "sync", "none")
    assert (s.engine.batching, s.engine.oversize, s.engine.max_num_batched_tokens) == ("prefill_first", "error", 8192)
    assert s.engine.gpu_memory_utilization == 0.9


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2022-01-04T11:00:00Z", datetime(2022, 1, 4, 11, tzinfo=UTC)),
        ("2022-01-04T11:00:00", datetime(2022, 1, 4, 11, tzinfo=UTC)),
        ("2022-01-04T11:00:00+09:00", datetime(2022, 1, 4, 2, tzinfo=UTC)),
        (datetime(2022, 1, 4, 11), datetime(2022, 1, 4, 11, tzinfo=UTC)),
    ],
)
def test_start_time_is_utc_or_has_an_offset(text: Any, expected: datetime) -> None:
    assert scenario({"start_time": text}).start_time == expected


def test_whole_numbers_of_windows_bear_decimal_fractions() -> None:
    s = scenario({"dispatch.window_s": 0.1, "horizon_s": 0.7, "ledger_s": 0.3, "provisioner.poll_s": 0.6})  # none is exact in binary
    assert [s.windows(x) for x in (s.horizon_s, s.ledger_s, s.provisioner.poll_s)] == [7, 3, 6]
    with pytest.raises(InputError, match=r"^small: ledger_s: 0.3001 s is not a whole number of windows"):
        scenario({"ledger_s": 0.3001})


# --- A file that builds on another


def built_on(tmp_path: Path, text: str) -> Scenario:
    """The scenario of a file with `text`, beside the small one as `small.toml`."""
    write_scenario(tmp_path).rename(tmp_path / "small.toml")
    (tmp_path / "own.toml").write_text(text)
    return load_scenario(tmp_path / "own.toml")[0]


def test_a_file_builds_on_another(tmp_path: Path) -> None:
    text = """
    base = "small.toml"
    name = "own"
    slo.ttft_s = 2.5
    workload = { kind = "trace", path = "t.csv" }
    policies = [{ kind = "least_loaded" }]
    schedulers.one.weight = 3.0
    [sites]
    "*".nodes = 3
    dirty.pue = 1.4
    0.zone = "SE"
    """
    own, small = built_on(tmp_path, text), scenario()
    assert (own.name, own.slo.ttft_s, own.slo.tpot_s) == ("own", 2.5, small.slo.tpot_s)
    assert isinstance(own.workload, TraceWorkload), "of another kind: nothing of the base's remains"
    assert own.policies == [{"kind": "least_loaded"}]
    assert [s.weight for s in own.schedulers] == [3.0, 1.0]
    assert [(s.nodes, s.pue, s.zone) for s in own.sites] == [(3, 1.1, "SE"), (3, 1.4, "PL")]
    assert own.engine == small.engine and own.grid == small.grid
    (tmp_path / "whole.toml").write_text(to_toml(own))
    assert load_scenario(tmp_path / "whole.toml")[0] == own, "what is written is whole: it needs no base"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('base = "none.toml"', "none.toml: there is no such scenario file; shipped scenarios are study-"),
        ("base = 3", "own.toml: base: must be the name of a shipped scenario"),
        ('base = "own.toml"', "own.toml: base: .*own.toml builds on this file"),
        ('base = "small.toml"\n[sites]\nclaen.pue = 1.2', "own.toml: sites: 'claen' must be a number from 0 to 1, the name of an entry"),
        ('base = "small.toml"\n[slo]\nttft = 1.2', "own.toml: slo.ttft: there is no such field; did you mean ttft_s"),
        ('base = "small.toml"\n[slo]\nttft_s = -1.0', "own.toml: slo.ttft_s: must be above 0"),
    ],
)
def test_what_is_wrong_with_such_a_file_is_told(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        built_on(tmp_path, text)


# --- Overrides


def overridden(tmp_path: Path, *overrides: str) -> Scenario:
    """The small scenario read from its file with `--set` overrides."""
    return load_scenario(write_scenario(tmp_path), list(overrides))[0]


def test_overrides_of_every_kind(tmp_path: Path) -> None:
    s = overridden(
        tmp_path,
        "seed=7",
        "horizon_s = 8",
        "name=of my own",
        'description="quoted, too"',
        "start_time=2023-05-06T07:00:00Z",
        "sites.*.pue=1.5",
        "sites.1.pue=1.25",
        "schedulers.0.weight=3",
        "engine.max_num_seqs=64",
        "provisioner.poll_s=0.5",  # of a table that the file does not have
        "grid={kind = 'table', signal = 'direct'}",
        "workload.lengths={distribution = 'long'}",
        "policies=[{kind = 'greedy', alpha = 0.25}]",
    )
    assert (s.seed, s.horizon_s, s.name, s.description) == (7, 8.0, "of my own", "quoted, too")
    assert s.start_time == datetime(2023, 5, 6, 7, tzinfo=UTC)
    assert [site.pue for site in s.sites] == [1.5, 1.25]
    assert [g.weight for g in s.schedulers] == [3.0, 1.0]
    assert (s.engine.max_num_seqs, s.provisioner.poll_s, s.grid.kind) == (64, 0.5, "table")
    assert isinstance(s.workload, PoissonWorkload) and s.workload.lengths.distribution == "long"
    assert s.policies == [{"kind": "greedy", "alpha": 0.25}]


def test_later_overrides_win_and_entries_stay_apart(tmp_path: Path) -> None:
    assert overridden(tmp_path, "seed=1", "seed=2").seed == 2
    # One value set in every entry is a value of each, not one that they share.
    s = overridden(tmp_path, "schedulers.*.sites=['clean']", "schedulers.0.sites.0='dirty'")
    assert [g.sites for g in s.schedulers] == [["dirty"], ["clean"]]


def test_an_override_of_a_shipped_scenario() -> None:
    assert load_scenario("two-region", ["policies.4.alpha=0.75"])[0].policies[4]["alpha"] == 0.75
    with pytest.raises(InputError, match=r"^two-region: sites.0.pue: must be at least 1 \(got 0.5\)$"):
        load_scenario("two-region", ["sites.0.pue=0.5"])


# --- Paths and the way back


def test_paths_become_absolute(tmp_path: Path) -> None:
    files = {
        "workload": {"kind": "trace", "path": "../traces/a.csv"},
        "grid": {"kind": "file", "path": ["ci/2023.csv", "/elsewhere/2024.csv"]},
    }
    s = scenario(files).with_absolute_paths(tmp_path / "here")
    assert isinstance(s.workload, TraceWorkload) and isinstance(s.grid, FileGrid)
    assert s.workload.path == str(tmp_path.resolve() / "traces" / "a.csv")
    assert s.grid.path == [str(tmp_path.resolve() / "here" / "ci" / "2023.csv"), "/elsewhere/2024.csv"]
    s = scenario({"workload.lengths": {"quantiles_file": "q.csv"}}).with_absolute_paths(tmp_path)
    assert isinstance(s.workload, PoissonWorkload) and s.workload.lengths.quantiles_file == str(tmp_path.resolve() / "q.csv")
    assert scenario().with_absolute_paths(tmp_path) == scenario()  # nothing to do


def test_input_files() -> None:
    """All that is read beside the scenario: a run folder keeps their hashes."""
    assert scenario().input_files() == []
    files = {
        "workload": {"kind": "trace", "path": "a.csv"},
        "grid": {"kind": "file", "path": ["2023.csv", "2024.csv"]},
        "osl_knowledge": {"kind": "predicted", "model": "osl.zip"},
    }
    assert scenario(files).input_files() == ["a.csv", "2023.csv", "2024.csv", "osl.zip"]
    assert scenario({"workload.lengths": {"quantiles_file": "q.csv"}}).input_files() == ["q.csv"]


@pytest.mark.parametrize("name", shipped_scenarios())
def test_what_is_written_back_reads_as_the_same(name: str, tmp_path: Path) -> None:
    first, _ = load_scenario(name)
    (tmp_path / "again.toml").write_text(to_toml(first), encoding="utf-8")
    second, _ = load_scenario(tmp_path / "again.toml")
    assert second == first
    assert to_toml(second) == to_toml(first)
    assert "coefficients = " not in to_toml(first), "coefficients are inlined, not named"


def test_relative_files_start_at_the_scenario_and_coefficients_do_too(tmp_path: Path) -> None:
    table = load_coefficients("qwen2.5-7b_tp1_a100").model_dump(exclude_none=True)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "mine.toml").write_text(tomli_w.dumps(table))
    loaded, base = load_scenario(write_scenario(tmp_path, {"engine.coefficients": "parts/mine.toml"}))
    assert base == tmp_path.resolve()
    assert loaded.engine.coefficients == load_coefficients("qwen2.5-7b_tp1_a100")


# --- How faults are told


def told(changes: dict[str, Any]) -> str:
    """The sentence on a scenario with faults."""
    table = changed(changes)
    with pytest.raises(ValidationError) as caught:
        Scenario.model_validate(table)
    return explain(caught.value, table, Scenario)


def test_the_path_is_the_one_that_was_written() -> None:
    # A region may be called like one of the kinds that unions are told apart by.
    assert told({"network.rtt_ms": {"constant": {"none": -1.0}}}).startswith("network.rtt_ms.constant.none: must be at least 0 (got -1.0)")
    assert told({"grid.ci_g_per_kwh": {"all_zones": -1.0}}).startswith("grid.ci_g_per_kwh.all_zones: must be at least 0")
    assert told({"grid": {"kind": "file", "path": ["a", ""]}}).startswith("grid.path.1: must not be empty")
    assert told({"grid.kind": ABSENT}) == "grid.kind: this field is missing"


def test_a_misspelt_name_is_told_before_what_is_missing_for_it() -> None:
    assert told({"slo": {"ttft": 1.0, "tpot_s": 0.1}}) == "slo.ttft: there is no such field; did you mean ttft_s? (and 1 more fault)"
    assert told({"slo": {}}) == "slo.ttft_s: this field is missing (and 1 more fault)"
    assert told({"slo": {}, "seed": -1}).endswith("(and 2 more faults)")


def test_long_values_are_cut() -> None:
    assert len(told({"seed": "9" * 1000})) < 120
    assert "thousands of digits" in told({"seed": 10**5000})
    assert told({"seed": True}) == "seed: must be a whole number (got true)"
