"""Buckets of OSL and scores by them, against plain counting."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import InputError
from jaxserve.osl.buckets import BUCKETS, bucket_edges, bucket_of, names, score


def test_buckets_of_varied_lengths_are_sextiles():
    osl = np.random.default_rng(0).permutation(6000) + 1
    edges = bucket_edges(osl, "x", "y")
    assert edges.tolist() == [1000.5, 2000.5, 3000.5, 4000.5, 5000.5]
    assert names(edges.tolist()) == ["1-1000", "1001-2000", "2001-3000", "3001-4000", "4001-5000", "5001+"]
    assert bucket_of(edges, np.array([1, 1000, 1001, 5000, 5001, 10**6])).tolist() == [0, 0, 1, 4, 5, 5]


@given(st.lists(st.integers(1, 12), min_size=BUCKETS, max_size=60).filter(lambda values: len(set(values)) >= BUCKETS))
@settings(deadline=None)
def test_every_bucket_holds_a_request_and_no_length_lies_on_an_edge(values: list[int]):
    edges = bucket_edges(np.array(values), "x", "y")
    assert (np.diff(edges) > 0).all()
    assert not set(edges.tolist()) & set(values)
    assert set(bucket_of(edges, np.array(values)).tolist()) == set(range(BUCKETS))


def test_a_length_that_most_requests_have_fills_one_bucket():
    osl = np.array([1, 2, 3, 4, 5, *[7] * 100, 8, 9])
    counts = np.bincount(bucket_of(bucket_edges(osl, "x", "y"), osl))
    assert len(counts) == BUCKETS and counts.min() >= 1 and counts.max() >= 100


def test_too_few_lengths_are_told():
    with pytest.raises(InputError, match=r"^here: the OSL has 5 different value.*6 buckets; do that$"):
        bucket_edges(np.array([1, 2, 3, 4, 5, 5, 5]), "here", "do that")


def test_names_of_narrow_buckets():
    assert names([1.5, 2.5, 3.5, 6.5, 7.5]) == ["1", "2", "3", "4-6", "7", "8+"]


def test_score_counts():
    edges = np.array([10.5, 20.5, 30.5, 40.5, 50.5])
    true, believed = np.array([5, 15, 25, 100]), np.array([10.0, 21.0, 25.0, 12.0])
    by_length = score(edges, true, believed)
    assert (by_length.bucket_accuracy, by_length.adjacent_accuracy) == (0.5, 0.75)
    assert by_length.mape == pytest.approx((1.0 + 0.4 + 0.0 + 0.88) / 4)
    assert score(edges, true, believed, np.array([0, 1, 2, 4])).bucket_accuracy == 0.75
