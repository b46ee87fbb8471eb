"""Fixtures of tests of processes."""

import contextlib
from collections.abc import Iterator
from multiprocessing.forkserver import ForkServer

import pytest

from tandem.processes import fork_server


@pytest.fixture(scope="module")
def own_server() -> Iterator[None]:
    """A server that begins in the test's environment: libraries change it, as JAX's import does."""
    former = fork_server._server, fork_server._begun
    fork_server._server, fork_server._begun = ForkServer(), None
    yield
    with contextlib.suppress(FileNotFoundError):  # the server has removed its socket
        fork_server._server._stop()  # type: ignore[attr-defined]
    fork_server._server, fork_server._begun = former
