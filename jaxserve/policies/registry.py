"""The policies that a scenario can name: kind -> parameters and how to build it."""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jaxserve.engine.control import AbstractPolicy
from jaxserve.errors import InputError
from jaxserve.policies.greedy import Greedy, Latency, Signal
from jaxserve.policies.simple import LeastLoaded, RoundRobin


class _Parameters(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    label: str | None = Field(default=None, min_length=1, pattern=r"^[^/\\\x00-\x1f]+$")
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


def resolve_policies(tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The policies of a scenario with every default filled in and a label each; raises `InputError` naming the field."""
    resolved = []
    for i, table in enumerate(tables):
        kind = table.get("kind")
        if kind not in REGISTRY:
            raise InputError(f"policies.{i}.kind: there is no policy {kind!r}; known are {', '.join(REGISTRY)}")
        try:
            parameters = REGISTRY[kind][0].model_validate(table)
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(str(part) for part in ("policies", i, *first["loc"]))
            known = ", ".join(REGISTRY[kind][0].model_fields)
            message = f"there is no such parameter; {kind} takes {known}" if first["type"] == "extra_forbidden" else first["msg"]
            raise InputError(f"{path}: {message}") from None
        values = parameters.model_dump(exclude_none=True)
        resolved.append({"label": _label(parameters), **values})
    labels = [policy["label"] for policy in resolved]
    for label in labels:
        if labels.count(label) > 1:
            raise InputError(f"policies: two are called {label!r}; give one of them another label")
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
