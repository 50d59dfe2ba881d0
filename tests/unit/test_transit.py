"""The order in which requests are dealt: by group, arrival and number, however close they arrive."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.transit import SPAN_S, in_order

N, DCS, START_S = 60, 4, 1000.0
_in_order = jax.jit(in_order, static_argnames="n_dc")


@pytest.mark.parametrize(
    "spread_s",
    [0.0, 1e-12, 1e-9, 1.0, 10 * SPAN_S],
    ids=["all at once", "closer than a tick", "a few to a tick", "as usual", "beyond what is sorted"],
)
def test_as_by_columns(spread_s: float) -> None:
    rng = np.random.default_rng(7)
    # Steps of one ulp where everything arrives within 1e-12 s: ulp(1000) is 1e-13.
    arrival_s = START_S + np.round(rng.random(N + 1), 1) * spread_s
    for _ in range(20):
        group, request = rng.integers(0, 2 * DCS + 1, N).astype(np.int32), rng.permutation(N).astype(np.int32)
        got = _in_order(jnp.asarray(group), jnp.asarray(request), jnp.asarray(arrival_s), jnp.asarray(START_S), n_dc=DCS)
        order = np.lexsort((request, arrival_s[request], group))
        due = np.sum(group < DCS)
        np.testing.assert_array_equal(got[0], group[order])
        np.testing.assert_array_equal(got[1][:due], request[order][:due])
        assert sorted(zip(*np.asarray(got)[:, due:])) == sorted(zip(group[order][due:], request[order][due:]))


def test_before_the_start() -> None:
    """What arrived earlier goes first, and by its own times."""
    arrival_s = np.array([START_S - 2.0, START_S - 3.0, START_S, START_S - 1.0, 0.0])
    group, request = jnp.zeros(4, jnp.int32), jnp.arange(4, dtype=jnp.int32)
    _, got = _in_order(group, request, jnp.asarray(arrival_s), jnp.asarray(START_S), n_dc=1)
    np.testing.assert_array_equal(got, [1, 0, 3, 2])
