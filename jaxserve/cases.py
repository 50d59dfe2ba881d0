"""One scenario under one of its policies, as the engine takes it."""

from dataclasses import replace
from typing import Any

from jaxserve.engine.hosted import AbstractHostPolicy
from jaxserve.engine.lane import Case
from jaxserve.engine.model import Sizes
from jaxserve.errors import InputError
from jaxserve.policies.plans import Outlook
from jaxserve.policies.registry import build_policy
from jaxserve.scenario.compile import Compiled
from jaxserve.scenario.spec import MeasuredLatency

HELD_STEPS = 16
"""Steps whose requests the arrays of a step-by-step run have room for from the start."""


def build_case(compiled: Compiled, table: dict[str, Any], *, allow_code: bool = False) -> Case:
    """The case of a resolved policy `table`; raises `InputError` where the policy does not go with the scenario.

    Code that the policy names runs only if `allow_code`.
    """
    s = compiled.scenario
    outlook = Outlook(
        sites=tuple(site.name for site in s.sites),
        fleet=compiled.fleet,
        requests=compiled.engine_requests,
        ci=compiled.ci,
        horizon_s=s.horizon_s,
        measured=isinstance(s.decision_latency, MeasuredLatency),
    )
    policy = build_policy(table, outlook, allow_code=allow_code)
    if compiled.fleet.forward_owner and isinstance(policy, AbstractHostPolicy):
        raise InputError(f'dispatch.forwarding = "owner": policy {table["label"]} plans on the host; set its solver = "device"')
    return Case(compiled.fleet, policy, compiled.requests_for(policy.batched), compiled.ci)


def check_policies(compiled: Compiled, tables: list[dict[str, Any]], *, allow_code: bool = False) -> tuple[str, ...]:
    """Raise `InputError` for a policy that does not go with the scenario: better told before the first run than after it.

    Returns sentences on what does not concern some of them.
    """
    hosted = [isinstance(build_case(compiled, table, allow_code=allow_code).policy, AbstractHostPolicy) for table in tables]
    if isinstance(compiled.scenario.decision_latency, MeasuredLatency) and not all(hosted):
        others = ", ".join(table["label"] for table, host in zip(tables, hosted, strict=True) if not host)
        return (f"measured decision latency is that of solvers on the host; these have none and decide at once: {others}",)
    return ()


def first_sizes(compiled: Compiled, case: Case, step_windows: int) -> Sizes:
    """First guesses of the static shapes for a run of this case."""
    if isinstance(case.policy, AbstractHostPolicy):
        return replace(compiled.sizes(step_windows, HELD_STEPS), steps=1)
    return compiled.sizes(step_windows)
