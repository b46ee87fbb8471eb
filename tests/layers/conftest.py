from collections.abc import Iterator

import pytest

from tests.support.op_checks import plain_python


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with plain_python():
        yield
