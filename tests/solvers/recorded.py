"""Assignment problems as real runs of the study's scenarios meet them, window by window."""

import jax
import numpy as np

from jaxserve.cases import build_case, first_sizes
from jaxserve.engine.simulate import Simulation
from jaxserve.policies.optimise import OnHost
from jaxserve.policies.registry import resolve_policies
from jaxserve.scenario.compile import compile_scenario
from jaxserve.scenario.load import load_scenario
from jaxserve.solvers.highs import HighsSolver
from jaxserve.solvers.problem import AssignmentProblem, Solution
from tests.solvers.cases import padded


class Recorder:
    """HiGHS, which keeps every problem that has a request to place, and its answer."""

    def __init__(self) -> None:
        self.solver = HighsSolver(time_limit_s=5.0)
        self.problems: list[AssignmentProblem] = []
        self.answers: list[Solution] = []

    def solve(self, problem: AssignmentProblem) -> Solution:
        answer = self.solver.solve(problem)
        if problem.feasible.any():
            self.problems.append(jax.tree.map(np.array, problem))
            self.answers.append(answer)
        return answer


def record(scenario: str, kind: str, *overrides: str) -> Recorder:
    """Run a scenario under an optimising policy; what its schedulers asked and what HiGHS said."""
    loaded, base = load_scenario(scenario, list(overrides))
    compiled = compile_scenario(loaded, base)
    case = build_case(compiled, resolve_policies([{"kind": kind, "solver": "highs"}])[0])
    assert isinstance(case.policy, OnHost)
    case.policy.solver = recorder = Recorder()
    step_windows = compiled.step_windows(case.policy.observes)
    simulation = Simulation(
        [case],
        window_s=loaded.dispatch.window_s,
        horizon_steps=compiled.horizon_windows // step_windows,
        sizes=first_sizes(compiled, case, step_windows),
    )
    while simulation.next_step <= simulation.horizon_steps:  # the last windows close at the horizon
        simulation.advance()
    return recorder


def stacked(problems: list[AssignmentProblem]) -> AssignmentProblem:
    """All as one batch, padded with requests that are no part of any."""
    rows, dcs = max(len(p.cost) for p in problems), problems[0].cost.shape[1]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *(padded(p, rows, dcs) for p in problems))
