"""Weighted sums of many vectors, as they are added after they have been received."""

import numpy as np
import pytest

from tandem.exchange.collective import add_weighted


@pytest.mark.parametrize("terms", [1, 2, 8, 9, 20])
def test_terms_are_added_one_after_another(terms: int) -> None:
    rng = np.random.default_rng(terms)
    vectors = rng.normal(size=(terms, 1001)).astype(np.float32)
    shares = rng.dirichlet(np.ones(terms))
    shares[terms // 2] *= terms == 1
    expected = np.zeros(1001, np.float32)
    for vector, share in zip(vectors, shares, strict=True):
        expected = expected + vector * np.float32(share)
    vectors[shares == 0] = np.nan
    add_weighted(vectors[0], vectors, shares.tolist())  # into one of them
    assert vectors[0].tobytes() == expected.tobytes()


def test_no_terms_are_nothing() -> None:
    target = np.full(3, np.nan)
    add_weighted(target, np.full((2, 3), np.nan), [0.0, 0.0])
    assert (target == 0).all()
