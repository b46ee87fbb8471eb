"""Pools of one and of two ranks, each shared by all tests of this folder that only need values."""

from collections.abc import Iterator

import pytest

from tandem.parallel import Pool


@pytest.fixture(scope="session")
def one() -> Iterator[Pool]:
    with Pool(1, use_gpu=False, threads=1) as pool:
        yield pool


@pytest.fixture(scope="session")
def two() -> Iterator[Pool]:
    with Pool(2, use_gpu=False, threads=1) as pool:
        yield pool
