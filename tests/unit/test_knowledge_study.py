"""The study of what schedulers know: what it runs, and its tables on runs made up by hand."""

import pandas as pd
import pytest

from jaxserve.errors import InputError
from jaxserve.scenario.load import load_scenario
from jaxserve.studies import knowledge
from jaxserve.studies.knowledge import KNOWN, PLAIN, groups, report
from jaxserve.studies.setups import BASELINE


def test_every_run_is_a_scenario_that_loads_and_says_what_it_is_called():
    (base, *found) = groups(["Qwen2.5-7B"], [0], 60.0)
    assert base.policy == BASELINE and len(found) == len(knowledge.POLICIES) * len(knowledge.SCHEDULERS)
    assert sum(len(g.runs) for g in found) == 4 * (3 * len(KNOWN) * len(knowledge.LOW_POLLS_S) + 2 * len(KNOWN) * 3)
    for group in found:
        for _, variant in group.runs[:: len(group.runs) // 3]:
            s, _ = load_scenario(group.scenario, values=variant.values)
            assert variant.setting == f"{len(s.schedulers)} schedulers | {s.provisioner.poll_s:g} s | {s.dispatch.peers}, {s.dispatch.view}"
            assert {name for scheduler in s.schedulers for name in scheduler.sites} == {site.name for site in s.sites}
            assert (s.horizon_s, s.warmup_s) == (60.0, 15.0)


def test_unknown_model():
    with pytest.raises(InputError, match="there is no model 'GPT'"):
        list(groups(["GPT"], [0], 60.0))


def test_what_holds_by_hand():
    """One world at 1 s, one at 5 s: the aged view keeps 49/50 and 45/50 of the saving, the last with too many violations."""
    plain = {"1 s": (0.50, 0.30), "5 s": (0.50, 0.60)}
    aged = {"1 s": (0.49, 0.009), "5 s": (0.45, 0.03)}
    rows = [
        {"model": "Qwen2.5-7B", "schedulers": "4 schedulers", "load": "high", "policy": "ilp", "poll": poll, "known": known}
        | {"saving": s, "slo_violation": v, "idle_share": 0.5, "ttft_p99_s": 1.0}
        for known, cells in ((PLAIN, plain), ("alike, aged", aged))
        for poll, (s, v) in cells.items()
    ]
    text = report(pd.DataFrame(rows), "command", 60.0, 1)
    assert "| over 0 to 2 s | < 1 %, >= 97 % | ilp | alike, aged | 1 of 1 | 0.90 % | 98 % |" in text
    assert "| over 2 to 5 s | < 2 %, >= 90 % | ilp | alike, aged | 0 of 1 | 3.00 % | 90 % |" in text
    assert "| high | ilp | alike, aged |  | 49.0 / 0.90 |  | 45.0 / 3.00 |  |" in text
