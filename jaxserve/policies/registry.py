"""The policies that a scenario can name: kind -> parameters and how to build it."""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jaxserve.engine.control import AbstractPolicy
from jaxserve.errors import InputError, explain
from jaxserve.policies.greedy import Greedy, Latency, Signal
from jaxserve.policies.simple import LeastLoaded, RoundRobin

RESERVED = ("figures", "scenario", "summary")
"""Stems of what stands beside the policies in a run folder."""


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


REGISTRY: dict[str, tuple[type[_Parameters], Callable[..., AbstractPolicy]]] = {
    "round_robin": (RoundRobinParameters, RoundRobin),
    "least_loaded": (LeastLoadedParameters, LeastLoaded),
    "greedy": (GreedyParameters, Greedy.of),
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


def build_policy(table: dict[str, Any]) -> AbstractPolicy:
    """The policy that a resolved table names."""
    values = {name: value for name, value in table.items() if name not in ("kind", "label")}
    return REGISTRY[table["kind"]][1](**values)
