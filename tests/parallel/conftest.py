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


def _pool(request: pytest.FixtureRequest, ranks: int, master: int = 0) -> Iterator[Pool]:
    """Make a pool of processes, or take that of `tests.support.rank_pool`."""
    started = next(filter(is_rank_pool, request.config.pluginmanager.get_plugins()), None)
    if started is not None:
        yield started.pool
        return
    with Pool(ranks, use_gpu=False, threads=1, master_rank=master) as pool:
        yield pool


def is_rank_pool(plugin: object) -> bool:
    return type(plugin).__name__ == "RankPool"


@pytest.fixture(scope="session")
def one(request: pytest.FixtureRequest) -> Iterator[Pool]:
    yield from _pool(request, 1)


@pytest.fixture(scope="session")
def two(request: pytest.FixtureRequest) -> Iterator[Pool]:
    yield from _pool(request, 2)


@pytest.fixture(scope="session")
def three(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """The master is not the first rank."""
    yield from _pool(request, 3, master=1)


@pytest.fixture(params=["one", "two", pytest.param("three", marks=pytest.mark.slow)])
def pool(request: pytest.FixtureRequest) -> Pool:
    found: Pool = request.getfixturevalue(request.param)
    return found
