"""The policies that a scenario can name: kind -> parameters and how to build it."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from jaxserve.engine.control import AbstractPolicy
from jaxserve.engine.hosted import AbstractHostPolicy
from jaxserve.errors import InputError, explain
from jaxserve.policies.code import PATTERN, load_code, refuse_code
from jaxserve.policies.formulations import AbstractFormulation, FacilityMilp, GreenLlm, IdleShare, Ilp, IterativeIlp, Variant
from jaxserve.policies.greedy import Greedy, Latency, Signal
from jaxserve.policies.optimise import OnDevice, OnHost
from jaxserve.policies.plans import Outlook, freesh, green_llm_lp
from jaxserve.policies.simple import LeastLoaded, RoundRobin
from jaxserve.policies.weighted import MoerCap, MoerSoft
from jaxserve.solvers.problem import GAP

RESERVED = ("code", "figures", "inputs", "lock", "scenario", "summary")
"""Stems of what stands beside the policies in a run folder."""

Policy = AbstractPolicy | AbstractHostPolicy


class _Parameters(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    label: str | None = Field(default=None, min_length=1, max_length=60, pattern=r"^[^/\\\x00-\x1f]+$")
    """Name in tables and folders; made from kind and parameters when not given."""


class RoundRobinParameters(_Parameters):
    """Every DC in turn."""

    kind: Literal["round_robin"]


class LeastLoadedParameters(_Parameters):
    """The DC with the fewest requests an engine."""

    kind: Literal["least_loaded"]


class GreedyParameters(_Parameters):
    """Latency against carbon intensity, weighted by alpha, over the DCs that keep the SLO."""

    kind: Literal["greedy"]
    alpha: float = Field(default=0.5, ge=0, le=1)
    """1 looks at latency alone, 0 at carbon alone."""
    latency: Latency = "e2e"
    signal: Signal = "ci"


class MoerParameters(_Parameters):
    """The cleanest DC that keeps the SLO, whatever its latency: greedy with alpha = 0."""

    kind: Literal["moer"]


class MoerSoftParameters(_Parameters):
    """Weighted turns: free places times 1 - w * carbon intensity (scaled to [0, 1])."""

    kind: Literal["moer_soft"]
    w: float = Field(default=0.5, ge=0, le=1)
    """0.25, 0.5 and 1 are the published eco-low, eco-med and eco-high; 0 is the router without carbon."""


class MoerCapParameters(_Parameters):
    """Fills the cleanest DCs, each with a share of every window; knows no SLO."""

    kind: Literal["moer_cap"]
    cap: float = Field(default=0.5, ge=0.01, le=1)


class FreeshParameters(_Parameters):
    """Every half hour the cleanest engines that carry 1.1 times the load, then shares in proportion."""

    kind: Literal["freesh"]


class GreenLlmLpParameters(_Parameters):
    """Every hour a linear program of shares: carbon, then delay, then energy."""

    kind: Literal["green_llm_lp"]


class _Optimising(_Parameters):
    solver: Literal["device", "highs", "cvxpy"] = "device"
    gap: float = Field(default=GAP, ge=0, lt=1)
    """Relative gap at which a solve counts as proven."""
    time_limit_s: float = Field(default=0.25, gt=0, le=3600)
    """Of a solve on the host; then the best assignment so far is used."""
    constraints: str | None = None
    """`module:function` that adds constraints to the cvxpy model: code, which runs only where the user allows it."""

    @model_validator(mode="after")
    def _constraints_of_cvxpy(self) -> "_Optimising":
        if self.constraints is not None and not PATTERN.fullmatch(self.constraints):
            raise ValueError(f'constraints = "{self.constraints}": name a function as module:function, the module on the Python path')
        if self.constraints is not None and self.solver != "cvxpy":
            raise ValueError(f'constraints = "{self.constraints}" are added to the cvxpy model; set solver = "cvxpy"')
        return self


class IlpParameters(_Optimising):
    """Each window's requests to DCs at the least carbon, within SLO estimates and headroom."""

    kind: Literal["ilp"]


class IterativeIlpParameters(_Optimising):
    """The ILP, solved again with its own assignment in the estimates."""

    kind: Literal["iterative_ilp"]
    t_max: int = Field(default=3, ge=1, le=50)
    """Most solves a window."""


class FacilityMilpParameters(_Optimising):
    """The ILP with a fixed cost for every DC whose idle engines it wakes."""

    kind: Literal["facility_milp"]
    variant: Variant = "default"
    idle_share: IdleShare = "linear"


class GreenLlmParameters(_Optimising):
    """The ILP with energies that know no load and a deadline of 5 s in place of the SLO estimates."""

    kind: Literal["green_llm"]


def _optimising(formulation: Callable[..., AbstractFormulation]) -> Callable[..., Policy]:
    def build(
        outlook: Outlook, *, solver: str, gap: float, time_limit_s: float, constraints: str | None = None, **parameters: Any
    ) -> Policy:
        asked = formulation(**parameters)
        if solver == "device":
            if outlook.measured:
                raise InputError('decision_latency.kind = "measured" needs a solver on the host; set solver = "highs" or "cvxpy"')
            return OnDevice(asked, np.float64(gap))
        if solver == "highs":
            from jaxserve.solvers.highs import HighsSolver

            return OnHost(asked, HighsSolver(gap=gap, time_limit_s=time_limit_s), measured=outlook.measured)
        from jaxserve.solvers.cvxpy_model import CvxpySolver  # takes a second to load

        added = None if constraints is None else load_code(constraints)
        back_end = CvxpySolver(gap=gap, time_limit_s=time_limit_s, constraints=added, names=outlook.sites)
        return OnHost(asked, back_end, measured=outlook.measured)

    return build


def _plain(build: Callable[..., Policy]) -> Callable[..., Policy]:
    return lambda outlook, **parameters: build(**parameters)


REGISTRY: dict[str, tuple[type[_Parameters], Callable[..., Policy]]] = {
    "round_robin": (RoundRobinParameters, _plain(RoundRobin)),
    "least_loaded": (LeastLoadedParameters, _plain(LeastLoaded)),
    "greedy": (GreedyParameters, _plain(Greedy.of)),
    "moer": (MoerParameters, _plain(lambda: Greedy.of(alpha=0.0))),
    "moer_soft": (MoerSoftParameters, _plain(lambda w: MoerSoft(np.float64(w)))),
    "moer_cap": (MoerCapParameters, _plain(lambda cap: MoerCap(np.float64(cap)))),
    "freesh": (FreeshParameters, freesh),
    "green_llm_lp": (GreenLlmLpParameters, green_llm_lp),
    "green_llm": (GreenLlmParameters, _optimising(GreenLlm)),
    "ilp": (IlpParameters, _optimising(Ilp)),
    "iterative_ilp": (IterativeIlpParameters, _optimising(lambda t_max: IterativeIlp(solves=t_max))),
    "facility_milp": (FacilityMilpParameters, _optimising(FacilityMilp.of)),
}


def resolve_policies(tables: list[dict[str, Any]], first: int = 0) -> list[dict[str, Any]]:
    """The policies of a scenario with every default filled in and a label each; raises `InputError` naming the field.

    `first` is the number in the scenario of the first of `tables`.
    """
    resolved = []
    for i, table in enumerate(tables, start=first):
        kind = table.get("kind")
        if kind is None:
            raise InputError(f"policies.{i}.kind: this field is missing; known are {', '.join(REGISTRY)}")
        if not isinstance(kind, str) or kind not in REGISTRY:
            raise InputError(f"policies.{i}.kind: there is no policy {kind!r}; known are {', '.join(REGISTRY)}")
        model = REGISTRY[kind][0]
        try:
            parameters = model.model_validate(table)
        except ValidationError as error:
            raise InputError(f"{explain(error, table, model, f'policies.{i}')}; {kind} takes {', '.join(model.model_fields)}") from None
        values = parameters.model_dump(exclude_none=True)
        resolved.append({"label": _label(parameters), **values})
    seen: set[str] = set()
    for i, policy in enumerate(resolved, start=first):
        # Labels name folders, and on some disks A and a are one folder.
        label = policy["label"].casefold()
        if label in seen:
            raise InputError(f"policies.{i}.label: two policies are called {policy['label']!r}; give one of them another label")
        if label.startswith(".") or label.partition(".")[0] in RESERVED:
            raise InputError(f"policies.{i}.label: {policy['label']!r} would clash with other names in the run folder; choose another")
        seen.add(label)
    return resolved


def _label(parameters: _Parameters) -> str:
    """Kind, with the parameters that differ from their defaults (and always alpha, which tells greedies apart)."""
    values = parameters.model_dump(exclude={"kind", "label"})
    defaults = {name: field.default for name, field in type(parameters).model_fields.items()}
    told = [str(value) for name, value in values.items() if name == "alpha" or value != defaults[name]]
    return "-".join([parameters.model_dump()["kind"], *told])


def build_policy(table: dict[str, Any], outlook: Outlook, *, allow_code: bool = False) -> Policy:
    """The policy that a resolved table names; `outlook` is what a plan may know of the run.

    Code that the table names runs only if `allow_code`. Raises `InputError`.
    """
    values = {name: value for name, value in table.items() if name not in ("kind", "label")}
    try:
        if not allow_code:
            refuse_code(table)
        return REGISTRY[table["kind"]][1](outlook, **values)
    except InputError as error:
        raise InputError(f"policy {table['label']}: {error}") from None
