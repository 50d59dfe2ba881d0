"""What is likelier a slip than a wish is done as written, and told."""

from datetime import UTC, datetime
from typing import Any

import pytest

from jaxserve.scenario.doubts import doubts
from jaxserve.scenario.load import load_scenario, parse_scenario, shipped_scenarios, to_toml
from jaxserve.scenario.spec import Scenario
from jaxserve.tomlfile import parse_toml
from tests.cli.helpers import changed

START = datetime(2022, 1, 4, 11, tzinfo=UTC)


def scenario(changes: dict[str, Any] | None = None, tmp_path: Any = None) -> Scenario:
    return parse_scenario(changed(changes or {}), "small", tmp_path)


@pytest.mark.parametrize("given", ["2022-01-04T11:00:00", datetime(2022, 1, 4, 11)])
def test_a_start_without_an_offset_is_utc_and_told(given):
    s = scenario({"start_time": given})
    assert s.start_time == START
    assert doubts(s, None) == ("start_time has no offset, read as UTC: 2022-01-04T11:00:00Z",)
    again = parse_scenario(parse_toml(to_toml(s), "again"), "again", None)
    assert again == s and doubts(again, None) == ()  # what a run folder keeps says +00:00


@pytest.mark.parametrize("given", ["2022-01-04T11:00:00Z", "2022-01-04T12:00:00+01:00", START])
def test_a_start_with_an_offset_needs_no_word(given):
    s = scenario({"start_time": given})
    assert s.start_time == START and doubts(s, None) == ()


def test_a_trace_on_another_clock_is_told_with_both_instants():
    s = scenario()
    (told,) = doubts(s, datetime(2024, 5, 10, tzinfo=UTC))
    assert told.startswith("warning: ") and "begins at 2024-05-10T00:00:00Z" in told and "is 2022-01-04T11:00:00Z" in told
    moved = scenario({"start_time": told.split("start_time = ")[1].split()[0]})  # the advice works as it stands
    assert doubts(moved, datetime(2024, 5, 10, tzinfo=UTC)) == ()
    assert doubts(s, START.replace(second=59)) == () and len(doubts(s, START.replace(minute=1, second=1))) == 1


@pytest.mark.parametrize(
    ("slo", "told"),
    [
        ({"ttft_s": 1000.0, "tpot_s": 0.05}, ["warning: slo.ttft_s = 1000 s is more than anyone waits (120 s)"]),
        ({"ttft_s": 1.0, "tpot_s": 50.0}, ["warning: slo.tpot_s = 50 s for each token is more than anyone waits (1 s)"]),
        ({"ttft_s": 5.0, "tpot_s": 0.05}, ["slo.ttft_s = 5 s is longer than the horizon of 4 s"]),
        ({"ttft_s": 4.0, "tpot_s": 1.0}, []),
    ],
)
def test_budgets_that_promise_nothing(slo, told):
    notes = doubts(scenario({"slo": slo}), None)
    assert len(notes) == len(told) and all(note.startswith(start) for note, start in zip(notes, told, strict=True))


def test_sites_of_another_region_are_told_by_scheduler():
    (told,) = doubts(scenario({"schedulers": [{"name": "one", "region": "here", "sites": ["clean", "dirty"]}]}), None)
    assert told.startswith("warning: scheduler one (here) owns sites of other regions") and told.endswith(": dirty (there)")


@pytest.mark.parametrize("name", shipped_scenarios())
def test_what_ships_raises_no_doubt(name):
    assert doubts(load_scenario(name)[0], None) == ()
