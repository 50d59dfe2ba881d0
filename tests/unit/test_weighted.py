"""Policies that deal in proportion to weights, and MOER's capped fill: exact counts, and numbers worked by hand."""

import dataclasses
import itertools

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.control import AbstractRequestPolicy, View
from jaxserve.policies.weighted import MoerCap, MoerSoft, PlannedShares, deal
from tests.views import ROUNDED, as_arrays, batch_of, fleet_with, view_of

_deal, _decide = eqx.filter_jit(deal), eqx.filter_jit(lambda policy, view, batch: policy.decide(view, batch, ()))
_choose = eqx.filter_jit(lambda policy, view, memory: policy.choose(view, jnp.float64(40.0), jnp.float64(5.0), memory))


def dealt(weight: list[float], n: int) -> list[int]:
    """The first n places by smooth weighted round-robin."""
    credit, places = jnp.zeros(len(weight)), []
    for _ in range(n):
        place, credit = _deal(jnp.array(weight), credit)
        places.append(int(place))
    return places


class TestDealing:
    @pytest.mark.parametrize("weight", [[5, 1, 1], [3, 2, 3], [1, 1, 1], [0, 2, 1], [4, 0, 0], [7, 5, 4]])
    def test_exact_over_a_cycle_and_smooth_within(self, weight: list[int]) -> None:
        """As many each cycle as the weights say, and never more than one request from its share on the way."""
        total = sum(weight)
        places = np.array(dealt([float(x) for x in weight], 3 * total))
        for cycle in places.reshape(3, total):
            assert np.bincount(cycle, minlength=3).tolist() == weight
        for n in range(1, 3 * total + 1):
            behind = np.bincount(places[:n], minlength=3) - n * np.array(weight) / total
            assert np.all(np.abs(behind) < 1.0)

    def test_order_by_hand(self) -> None:
        """Weights 5, 1, 1: the order in which nginx deals them, a a b a c a a."""
        assert dealt([5.0, 1.0, 1.0], 7) == [0, 0, 1, 0, 2, 0, 0]

    @pytest.mark.parametrize("n_dc", [2, 3, 6, 7])
    def test_equals_take_turns(self, n_dc: int) -> None:
        """Ties go to the first: after each round all credits are nought again, whatever 1/3 is rounded to."""
        assert dealt([0.5] * n_dc, 4 * n_dc) == list(range(n_dc)) * 4


def credits_after(policy: AbstractRequestPolicy, view: View) -> tuple[int, list[float]]:
    """The first choice of a scheduler, and the weight shares behind it: the credits after it, the one taken given back."""
    place, credit = _choose(*as_arrays((policy, view)), policy.init(3))
    return int(place), np.asarray(credit.at[place].add(1.0)).tolist()


class TestMoerSoft:
    @pytest.mark.parametrize(
        ("rows", "w", "weights"),
        [
            # I = 0, 1/4 and 1 between 100 and 500 g/kWh; pressure 1.
            ([{}, {"ci": 200.0}, {"ci": 500.0}], 0.5, [1.0, 0.875, 0.5]),
            ([{}, {"ci": 200.0}, {"ci": 500.0}], 1.0, [1.0, 0.75, 0.0]),
            ([{}, {"ci": 200.0}, {"ci": 500.0}], 0.0, [1.0, 1.0, 1.0]),
            # Pressure 1 - (B + q)/4: B = 1; B = 1 and q = 100/50 from the snapshot's Q alone; full, which leaves 0.01.
            ([{"batch": 1.0}, {"batch": 1.0, "queued_seen": 100.0, "queued_tokens": 900.0}, {"batch": 9.0}], 0.5, [0.75, 0.25, 0.01]),
            ([{"batch": 1.0}, {}, {"batch": 9.0, "ci": 500.0}], 0.5, [0.75, 1.0, 0.005]),
            ([{"ci": 0.0}, {"ci": 0.0}, {"ci": 0.0, "batch": 2.0}], 1.0, [1.0, 1.0, 0.5]),  # equal: no carbon term
        ],
    )
    def test_weights(self, rows: list[dict[str, float]], w: float, weights: list[float]) -> None:
        place, shares = credits_after(MoerSoft(np.float64(w)), view_of(fleet_with(), rows))
        assert place == int(np.argmax(weights))
        np.testing.assert_allclose(shares, np.array(weights) / sum(weights), rtol=ROUNDED)


class TestMoerCap:
    @pytest.mark.parametrize(
        ("cap", "n", "ci", "places"),
        [
            (0.5, 5, (2.0, 1.0, 3.0), [1, 1, 1, 0, 0]),
            (0.25, 6, (3.0, 2.0, 1.0), [2, 2, 1, 1, 0, 0]),
            (1.0, 6, (3.0, 2.0, 1.0), [2] * 6),
            (0.5, 4, (1.0, 1.0, 1.0), [0, 0, 1, 1]),  # equals in own order
            (0.2, 6, (1.0, 2.0, 3.0), [0, 0, 1, 1, 2, 2]),  # ceil(1.2) = 2
            (0.1, 6, (1.0, 2.0, 3.0), [0, 1, 2, 2, 2, 2]),  # what the caps leave over stays with the last
            (0.01, 1, (2.0, 1.0, 3.0), [1]),
        ],
    )
    def test_fill(self, cap: float, n: int, ci: tuple[float, ...], places: list[int]) -> None:
        view = view_of(fleet_with(slo_ttft_s=1e-9), [{"ci": grams} for grams in ci])  # an SLO that nothing keeps
        got, _, told = _decide(MoerCap(jnp.float64(cap)), as_arrays(view), batch_of([40.0] * n))
        assert (got[:n].tolist(), told) == (places, ())

    def test_caps_of_whole_numbers(self) -> None:
        """cap * n that is whole on paper makes that many, whatever the product is rounded to."""
        view = as_arrays(view_of(fleet_with(), [{}, {}, {}]))
        above = 0
        for percent, n in itertools.product(range(34, 100), (25, 50, 75, 100)):
            if percent * n % 100 == 0:
                got, _, _ = _decide(MoerCap(jnp.float64(percent / 100)), view, batch_of([40.0] * n, room=100))
                assert int(jnp.sum(got[:n] == 0)) == percent * n // 100, (percent, n)
                above += percent / 100 * n > percent * n // 100
        assert above > 0  # some products are rounded up


def test_planned_shares_by_scheduler_and_period() -> None:
    """Each scheduler deals by its own shares of the period in which its decision is out; after the last the last goes on."""
    shares = jnp.array([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [[0.0, 0.0, 1.0], [0.5, 0.0, 0.5]]])
    policy, view = PlannedShares(shares=shares, period_s=jnp.float64(1800.0)), view_of(fleet_with(), [{}, {}, {}])
    places = {}
    for g, now_s in itertools.product((0, 1), (0.0, 1799.9, 1800.0, 3599.0, 3600.0, 1e6)):
        there = dataclasses.replace(view, scheduler=jnp.int32(g), now_s=jnp.float64(now_s))
        places[g, now_s], _ = credits_after(policy, there)
    assert [places[0, t] for t in (0.0, 1799.9, 1800.0, 3599.0, 3600.0, 1e6)] == [0, 0, 2, 2, 2, 2]
    assert [places[1, t] for t in (0.0, 1799.9, 1800.0, 3599.0, 3600.0, 1e6)] == [1, 1, 0, 0, 0, 0]


def test_credits_outlive_a_period() -> None:
    """What a DC was owed at the end of one period it gets in the next."""
    policy = PlannedShares(shares=jnp.array([[[0.6, 0.4, 0.0]] * 2, [[0.5, 0.5, 0.0]] * 2]), period_s=jnp.float64(10.0))
    view, credit, places = view_of(fleet_with(), [{}, {}, {}]), policy.init(3), []
    for now_s in (9.0, 10.0, 11.0):
        place, credit = _choose(*as_arrays((policy, dataclasses.replace(view, now_s=jnp.float64(now_s)))), credit)
        places.append(int(place))
    assert places == [0, 1, 0]  # credits before each choice: 0.6 and 0.4; 0.1 and 0.9; 0.6 and 0.4
