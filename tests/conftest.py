"""What holds for all tests.

Those marked `gpu` are skipped, with the reason, where there is no GPU to be used. A program that
was called within a test leaves no handler behind, whose stream pytest closes.

Threads that wait for others sleep, in children too: where tests share a core, OpenMP's busy waiting
takes several times the time of the computing.

What has been imported when tests begin is never garbage, and no collection looks at it.

Bytecode is written whatever the environment says: hundreds of children import the same modules.
Ctrl-C reaches tests and programs also where a shell has started them in the background, and so has
told them to ignore it.
"""

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.config.hardware import cuda_device_count, missing_for_gpus
from tests.support.tiny import prepare

os.environ["OMP_WAIT_POLICY"] = "passive"  # read when PyTorch is imported
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chunk", metavar="K/N", help="of what is selected, the K-th of N parts")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give one worker all files of `tests.parallel`, whose pools are of the session."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "tests/parallel" if file.startswith("tests/parallel/") else file

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)  # after what is not selected has gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if chunk := config.getoption("--chunk"):
        number, parts = (int(word) for word in chunk.split("/"))
        first, last = (k * len(items) // parts for k in (number - 1, number))
        config.hook.pytest_deselected(items=items[:first] + items[last:])
        items[:] = items[first:last]


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    if not cuda_device_count():
        pytest.skip("no GPU was found")
    if missing := missing_for_gpus():
        pytest.skip(missing)


@pytest.fixture(autouse=True)
def former_log_handlers() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny prepared data set, shared by the tests of a file."""
    return prepare(tmp_path_factory.mktemp("data"))
