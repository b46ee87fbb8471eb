"""Pools of one, two and three ranks, each shared by all tests of this folder that need values."""

from collections.abc import Iterator

import pytest

from tandem.parallel import Pool
from tests.support.op_checks import plain_python


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> Iterator[None]:
    """What PyTensor computes for comparison."""
    with plain_python():
        yield


@pytest.fixture(scope="session")
def one() -> Iterator[Pool]:
    with Pool(1, use_gpu=False, threads=1) as pool:
        yield pool


@pytest.fixture(scope="session")
def two() -> Iterator[Pool]:
    with Pool(2, use_gpu=False, threads=1) as pool:
        yield pool


@pytest.fixture(scope="session")
def three() -> Iterator[Pool]:
    """The master is not the first rank."""
    with Pool(3, use_gpu=False, threads=1, master_rank=1) as pool:
        yield pool


@pytest.fixture(params=["one", "two", pytest.param("three", marks=pytest.mark.slow)])
def pool(request: pytest.FixtureRequest) -> Pool:
    found: Pool = request.getfixturevalue(request.param)
    return found
