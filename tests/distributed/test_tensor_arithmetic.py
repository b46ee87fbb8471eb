"""What collectives compute on tensors has the bits of NumPy's vectors."""

import numpy as np
import pytest
import torch

from tandem.distributed.allreduce import add_weighted
from tandem.distributed.tensor_arithmetic import TensorArithmetic


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("terms", [1, 2, 9, 20])
def test_terms_are_added_as_on_the_host(terms: int, dtype: str) -> None:
    rng = np.random.default_rng(terms)
    vectors = rng.normal(size=(terms, 1001)).astype(dtype)
    shares = rng.dirichlet(np.ones(terms)).tolist()
    if terms > 1:
        shares[terms // 2], vectors[terms // 2] = 0.0, np.nan
    expected = np.zeros(1001, dtype)
    add_weighted(expected, vectors, shares)
    found = torch.from_numpy(vectors.copy())
    TensorArithmetic("cpu").add_weighted(found[0], found, shares)  # into one of them
    assert found[0].numpy().tobytes() == expected.tobytes()


def test_no_terms_are_nothing() -> None:
    target = torch.full((3,), float("nan"))
    TensorArithmetic("cpu").add_weighted(target, torch.full((2, 3), float("nan")), [0.0, 0.0])
    assert (target == 0).all()


def test_zeros_are_of_a_named_kind_or_of_another_vectors() -> None:
    arithmetic = TensorArithmetic("cpu")
    assert arithmetic.zeros(3, "uint16").dtype == torch.uint16
    assert arithmetic.zeros((2, 3), torch.float64).shape == (2, 3)
