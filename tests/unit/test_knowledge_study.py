"""The study of what schedulers know: what it runs, and its tables on runs made up by hand."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from jaxserve.errors import InputError
from jaxserve.scenario.compile import compile_scenario
from jaxserve.scenario.load import load_scenario
from jaxserve.studies import knowledge
from jaxserve.studies.knowledge import KNOWN, PLAIN, groups, report
from jaxserve.studies.setups import BASELINE
from jaxserve.studies.unlike import WORLDS, as_trace

UNEVEN = 0.45 ** np.arange(4) / sum(0.45 ** np.arange(4))


@pytest.mark.parametrize(
    ("world", "early", "late"),
    [
        (0, UNEVEN, UNEVEN),
        (1, [0.25] * 4, [0, 1 / 3, 1 / 3, 1 / 3]),
        (2, [0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]),
    ],
    ids=["uneven", "one stops", "swings"],
)
def test_who_is_dealt_what_where_schedulers_are_unlike(world: int, early, late, tmp_path: Path):
    """In the first and the second ten of twenty seconds; the requests themselves are those of the scenario."""
    values = {"seed": 3, "horizon_s": 20.0, "warmup_s": 0.0, "workload.rate_req_per_s": 400.0}
    of_scenario, _ = load_scenario("study-llama", values=values)
    wanted = compile_scenario(of_scenario, tmp_path).requests
    workload = as_trace(WORLDS[world], "study-llama", values, tmp_path)
    loaded, base = load_scenario("study-llama", values={"horizon_s": 20.0, "warmup_s": 0.0, "workload": workload})
    got = compile_scenario(loaded, base).requests
    np.testing.assert_array_equal(np.stack([got.isl, got.osl]), np.stack([wanted.isl, wanted.osl]))
    np.testing.assert_allclose(got.arrival_s, wanted.arrival_s, rtol=0, atol=1e-9)  # text holds a double to its last bit
    for part, shares in ((got.arrival_s < 10, early), (got.arrival_s >= 10, late)):
        counts = np.bincount(got.scheduler[part], minlength=4)
        # Multinomial: five standard deviations of 4000 draws are 0.04 at most.
        np.testing.assert_allclose(counts / counts.sum(), shares, rtol=0, atol=0.04)


def test_every_run_is_a_scenario_that_loads_and_says_what_it_is_called(tmp_path: Path):
    (base, *found) = groups(["Qwen2.5-7B"], [0], 20.0, tmp_path)
    found, unlike = found[:-3], found[-3:]
    assert base.policy == BASELINE and len(found) == len(knowledge.POLICIES) * len(knowledge.SCHEDULERS)
    assert [len(group.runs) for group in unlike] == [len(WORLDS), *2 * [len(WORLDS) * len(KNOWN) * len(knowledge.UNLIKE_POLLS_S)]]
    assert sum(len(g.runs) for g in found) == 4 * (3 * len(KNOWN) * len(knowledge.LOW_POLLS_S) + 2 * len(KNOWN) * 3)
    for group in found:
        for _, variant in group.runs[:: len(group.runs) // 3]:
            s, _ = load_scenario(group.scenario, values=variant.values)
            assert variant.setting == f"{len(s.schedulers)} schedulers | {s.provisioner.poll_s:g} s | {s.dispatch.peers}, {s.dispatch.view}"
            assert {name for scheduler in s.schedulers for name in scheduler.sites} == {site.name for site in s.sites}
            assert (s.horizon_s, s.warmup_s) == (20.0, 5.0)


def test_unknown_model(tmp_path: Path):
    with pytest.raises(InputError, match="there is no model 'GPT'"):
        list(groups(["GPT"], [0], 60.0, tmp_path))


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
