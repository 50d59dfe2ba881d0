"""A policy that names a DC that does not exist is refused, whichever kind of policy it is."""

from pathlib import Path
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.typing import ArrayLike

from jaxserve.engine.batch import AbstractBatchPolicy, Batch
from jaxserve.engine.control import AbstractRequestPolicy, View
from jaxserve.engine.hosted import AbstractHostPolicy
from jaxserve.errors import InputError
from jaxserve.policies.registry import REGISTRY, RoundRobinParameters
from tests.cli.helpers import call, refused, write_scenario
from tests.oracle.small_worlds import two_dcs
from tests.parity.bridge import run_lanes, sizes_of


class Astray(AbstractRequestPolicy):
    """Sends its seventh request to `place`, the others home."""

    place: ArrayLike
    observes: ClassVar[bool] = False

    def init(self, n_dc: int) -> Array:
        """Requests so far."""
        return jnp.int32(0)

    def choose(self, view: View, isl: Array, osl: Array, memory: Array) -> tuple[Array, Array]:
        """Home, but for one."""
        return jnp.where(memory == 6, self.place, 0).astype(jnp.int32), memory + 1


@pytest.mark.parametrize("place", [2, -1, 1000])
def test_a_request_policy(place: int) -> None:
    """Three scenarios side by side, the second of which goes astray; arrivals at 0.25, 0.5, ... s."""
    s = two_dcs([(0.25 * i, 4, 1) for i in range(1, 13)])
    lanes = [Astray(np.int32(p)) for p in (1, place, 0)]
    said = rf"^policy Astray: sends request 6 \(arrival 1.75 s\) to place {place}, which does not exist; there are 2 DCs, places 0 to 1 of"
    with pytest.raises(InputError, match=said):
        run_lanes([s] * 3, lanes, sizes_of(s, 1, requests=32, steps=8, passes=32))


def test_places_that_exist() -> None:
    s = two_dcs([(0.25 * i, 4, 1) for i in range(1, 13)])
    runs = run_lanes([s] * 3, [Astray(np.int32(p)) for p in (1, 1, 0)], sizes_of(s, 1, requests=32, steps=8, passes=32))
    assert [run.dc.tolist() for run in runs] == [[0] * 6 + [1] + [0] * 5, [0] * 6 + [1] + [0] * 5, [0] * 12]


class BatchAstray(AbstractBatchPolicy):
    """Sends all to the DC after the last."""

    def init(self, n_dc: int) -> tuple[()]:
        """Remembers nothing."""
        return ()

    def decide(self, view: View, batch: Batch, memory: tuple[()]) -> tuple[Array, tuple[()], tuple[()]]:
        """One too far; so are blank places, which send nothing."""
        return jnp.full(batch.isl.shape, view.ci.shape[0], jnp.int32), (), ()


class HostAstray(AbstractHostPolicy):
    """The same on the host."""

    measured = False

    def init(self, n_dc: int) -> tuple[()]:
        """Remembers nothing."""
        return ()

    def plan(self, fleet: Any, arrivals: Any, snapshot: Any, schedulers: Any, requests: Any) -> Any:
        """One too far."""
        return np.full(requests.request.shape, fleet.n_dc, np.int32), schedulers, (), np.zeros(requests.batch_end.shape)

    def fallbacks(self, memory: tuple[()]) -> Array:
        """None."""
        return jnp.zeros(2, jnp.int32)


@pytest.mark.parametrize("policy", [BatchAstray, pytest.param(HostAstray, marks=pytest.mark.slow)])
def test_from_the_command_line(policy: type, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One's own policy in the registry."""

    class Parameters(RoundRobinParameters):
        kind: Literal["astray"]  # type: ignore[assignment]

    monkeypatch.setitem(REGISTRY, "astray", (Parameters, lambda outlook: policy()))
    scenario = write_scenario(tmp_path, {"policies": [{"kind": "astray"}]})
    outcome = call(capsys, monkeypatch, "run", scenario, "--out", tmp_path / "out")
    refused(
        outcome,
        tmp_path / "out",
        f"policy {policy.__name__}: sends request 0 (arrival ",
        "to place 2, which does not exist; there are 2 DCs",
    )
