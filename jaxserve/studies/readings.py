"""What the text of the study (arXiv 2610.14571) leaves open: each question with its readings, the default and the words behind it.

The defaults stand in the study scenarios (`scenario/data/study-*.toml`); no reading is chosen for landing nearer to a published figure.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.perf.coefficients import shipped_names
from jaxserve.scenario.spec import Scenario

BATCH = ("green_llm", "ilp", "iterative_ilp", "facility_milp")
"""Policies that decide a window of requests together."""

Values = Mapping[str, Any]
Vary = Callable[[Scenario, str], Values | None]
"""From a study scenario and the name of its coefficients, the fields that a reading changes; None where it changes nothing."""


@dataclass(frozen=True)
class Reading:
    """One way to read what is open, other than the default."""

    name: str
    scenario: Vary = lambda _, __: {}
    policy: Values = field(default_factory=dict)
    """What it changes in the policy itself."""
    only: tuple[str, ...] | None = None
    """Kinds of policies that it concerns; None for all that look at anything."""
    blind: bool = False
    """Whether it changes the engines, and so round-robin too."""

    def concerns(self, kind: str) -> bool:
        """Whether a policy of this kind runs otherwise under it."""
        return self.blind if kind == "round_robin" else self.only is None or kind in self.only


@dataclass(frozen=True)
class Question:
    """What is open, and why the default is the default."""

    name: str
    default: str
    evidence: str
    others: tuple[Reading, ...]


def _always(**values: Any) -> Vary:
    """Fields set whatever the scenario; `__` stands for the dot of a path."""
    return lambda _, __: {path.replace("__", "."): value for path, value in values.items()}


def _other_limit(s: Scenario, _: str) -> Values:
    """The engine's limit where both are the batch capacity, or vLLM's default where the default is the capacity already."""
    limit = s.dispatch.batch_capacity
    return {"engine.max_num_seqs": limit if limit != s.engine.max_num_seqs else 256}


def _budget_of_engine(s: Scenario, _: str) -> Values | None:
    limit = s.engine.max_num_seqs
    return {"dispatch.batch_capacity": limit} if limit != s.dispatch.batch_capacity else None


def _other_energy(_: Scenario, coefficients: str) -> Values | None:
    others = [name for name in shipped_names() if name.startswith(f"{coefficients}_")]
    return {"engine.coefficients": others[0]} if others else None


QUESTIONS = (
    Question(
        "the engine's own limit",
        "256 (vLLM's default); Mixtral 400",
        "Table II lists the batch capacity with the schedulers; greedy is 'without a batch capacity constraint' (V-C); an engine has 'a "
        "configurable maximum batch size similar to vLLM's max_num_seqs' (III-C). Mixtral's capacity of 400 is above that default",
        (Reading("engine limit 40 (Mixtral 256)", _other_limit, blind=True),),
    ),
    Question(
        "a scheduler's own dispatches between polls",
        "counted until a poll shows them (in-flight)",
        "'how they project load onto DCs' (IV): policies add what they send to what was polled. Against it: the estimates take their state "
        "'from the provisioner's latest snapshot' (IV)",
        (
            Reading("ledger reset at polls", _always(dispatch__ledger="reset")),
            Reading("ledger off", _always(dispatch__ledger="off")),
        ),
    ),
    Question(
        "other schedulers' dispatches between polls",
        "unknown",
        "'more schedulers concurrently concentrate load on the same green DCs from the same snapshot' (V-C)",
        (Reading("peers alike", _always(dispatch__peers="alike")),),
    ),
    Question(
        "what becomes of a forwarded request",
        "waits for a window of the DC's scheduler",
        "'the remote scheduler admits the request into its scheduling window before placing it on the target DC' (III-C): the DC is chosen",
        (
            Reading("forwarded directly", _always(dispatch__forwarding="direct"), only=BATCH),
            Reading("placed anew by the owner", _always(dispatch__forwarding="owner"), only=("ilp", "facility_milp")),
        ),
    ),
    Question(
        "the latency in greedy's score",
        "TTFT and TPOT over their budgets",
        "the output length is needed 'only in T_pre' and for carbon (IV), so the score has no OSL x TPOT; TTFT and TPOT are estimated",
        (
            Reading("latency end to end", policy={"latency": "e2e"}, only=("greedy",)),
            Reading("latency is TTFT", policy={"latency": "ttft"}, only=("greedy",)),
        ),
    ),
    Question(
        "whose the headroom is",
        "each scheduler counts all of it",
        "the constraint has H_d, not a share of it (2c), and violations double with eight schedulers (V-C)",
        (Reading("headroom divided", _always(dispatch__headroom="divided"), only=BATCH),),
    ),
    Question(
        "Green-LLM's budget",
        "the batch capacity of the schedulers",
        "one bound for all that solve (Table II). Against it: its budget is 'mapped to the engine batch limit' (V-A)",
        (Reading("budget up to the engine's limit", _budget_of_engine, only=("green_llm",)),),
    ),
    Question(
        "the MILP's cost of opening a DC",
        "expected idle engines that the window wakes; requests at marginal cost",
        "'the fixed carbon a DC pays once' is separated 'from the per-request cost' (IV-C)",
        (
            Reading("one engine woken", policy={"variant": "f_const"}, only=("facility_milp",)),
            Reading("fixed energy in both costs", policy={"variant": "c_full"}, only=("facility_milp",)),
        ),
    ),
    Question(
        "the time that a solver takes",
        "none",
        "only its 99th percentile is published, for one machine: up to 0.5 s (figure 6a); 0.25 s is the MILP's limit (Table II)",
        (Reading("solver takes 0.25 s", _always(decision_latency={"kind": "fixed", "seconds": 0.25}), only=BATCH),),
    ),
    Question(
        "the token budget of a prefill step",
        "8192",
        "named (III-C), not given; 2048 is the least that vLLM 0.6 takes by default",
        (Reading("prefill steps of 2048 tokens", _always(engine__max_num_batched_tokens=2048), blind=True),),
    ),
    Question(
        "energy where it was not measured with the times",
        "as shipped",
        "no coefficients are published; ours are fitted to public measurements, and energies come from other runs than times",
        (Reading("the other energy transfer", _other_energy, blind=True),),
    ),
)
AS_SHIPPED = "as shipped"


def readings() -> list[Reading]:
    """All readings other than the defaults."""
    return [reading for question in QUESTIONS for reading in question.others]
