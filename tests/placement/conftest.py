"""PyTensor's own functions, which Ops of graphs compile within, are interpreted, not compiled."""

from collections.abc import Iterator

import pytest

from tests.support.op_checks import plain_python


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> Iterator[None]:
    with plain_python():
        yield
