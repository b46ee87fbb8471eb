"""Which devices a run gets, with as many GPUs and packages as the test says."""

import importlib.metadata
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import pytest

from tandem.errors import InputError
from tandem.run import devices
from tandem.run.devices import resolve_devices

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    def make(gpus: int, pycuda: bool = True, torch: str | None = "2.13.0+cu130") -> None:
        def version(name: str) -> str:
            if torch is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return torch

        def find(name: str) -> Any:
            return object() if pycuda else None

        monkeypatch.setattr(devices, "cuda_device_count", lambda: gpus)
        monkeypatch.setattr(importlib.util, "find_spec", find)
        monkeypatch.setattr(importlib.metadata, "version", version)

    return make


@pytest.mark.parametrize(
    ("found", "expected", "reason"),
    [
        ({"gpus": 0}, ("cpu",), "no GPU was found"),
        ({"gpus": 1}, ("cuda:0",), "on each GPU: cuda:0"),
        ({"gpus": 2}, ("cuda:0", "cuda:1"), "on each GPU: cuda:0, cuda:1"),
        ({"gpus": 2, "torch": "2.9.0a0+nv25.10"}, ("cuda:0", "cuda:1"), "on each GPU"),
        ({"gpus": 2, "pycuda": False}, ("cpu",), "(2 found): PyCUDA is not installed"),
        ({"gpus": 1, "torch": "2.13.0+cpu"}, ("cpu",), "2.13.0+cpu is built for the CPU only"),
        ({"gpus": 1, "torch": None}, ("cpu",), "PyTorch is not installed"),
    ],
)
def test_auto_takes_the_gpus_if_it_can_and_says_why_not(
    machine: Machine,
    caplog: pytest.LogCaptureFixture,
    found: dict[str, Any],
    expected: tuple[str, ...],
    reason: str,
) -> None:
    machine(**found)
    with caplog.at_level(logging.INFO):
        assert resolve_devices("auto") == expected
    (line,) = caplog.messages
    assert reason in line


@pytest.mark.parametrize("names", [["cpu"], ["cpu", "cpu"], ["cuda:0", "cuda:0"], ["cuda:1"]])
def test_a_list_is_taken_as_it_is(machine: Machine, names: list[str]) -> None:
    machine(2)
    assert resolve_devices(names) == tuple(names)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"gpus": 0}, "cuda:1 is not there; no GPU was found"),
        ({"gpus": 1}, "cuda:1 is not there; found: cuda:0$"),
        ({"gpus": 2, "pycuda": False}, r"PyCUDA is not installed; .*pip install \.\[gpu\]"),
        ({"gpus": 2, "torch": "2.13.0+cpu"}, "install a build for CUDA"),
    ],
)
def test_what_is_missing_is_bad_input(
    machine: Machine, found: dict[str, Any], message: str
) -> None:
    machine(**found)
    with pytest.raises(InputError, match=message):
        resolve_devices(["cuda:1"])


def test_a_cpu_needs_no_package(machine: Machine) -> None:
    machine(1, pycuda=False, torch="2.13.0+cpu")
    assert resolve_devices(["cpu"]) == ("cpu",)
