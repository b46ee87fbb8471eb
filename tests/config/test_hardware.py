"""Which devices a run gets, with as many GPUs and packages as the test says."""

import importlib.metadata
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import pytest

from tandem.config import hardware
from tandem.config.hardware import (
    RankInfo,
    have_own_gpus,
    place_devices,
    resolve_devices,
    threads_of,
)
from tandem.errors import InputError

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

        monkeypatch.setattr(hardware, "cuda_device_count", lambda: gpus)
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
    machine(2, pycuda="cpu" not in names)  # a CPU needs no package
    assert resolve_devices(names) == tuple(names)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"gpus": 0}, "cuda:1 does not exist; no GPU was found"),
        ({"gpus": 1}, "cuda:1 does not exist; found: cuda:0$"),
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


@pytest.mark.parametrize(("major", "expected"), [(7, False), (8, True), (9, True), (None, False)])
def test_gpus_multiply_in_bfloat16_from_compute_capability_8_on(
    monkeypatch: pytest.MonkeyPatch, major: int | None, expected: bool
) -> None:
    class Driver:
        """Of a machine on which number 3 has that capability."""

        def cuDeviceGet(self, handle: Any, number: int) -> int:
            handle._obj.value = number + 40
            return 0

        def cuDeviceGetAttribute(self, found: Any, attribute: int, handle: Any) -> int:
            if major is None:
                return 101
            assert (attribute, handle.value) == (75, 43)
            found._obj.value = major
            return 0

    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver())
    assert hardware.has_bfloat16(3) is expected


# Ranks


def rank(machine: int, gpus: int = 0, first: int = 0, cores: tuple[int, ...] = (0, 1)) -> RankInfo:
    """A rank that is shown so many GPUs of its machine, from one of them on."""
    identities = tuple(f"GPU {machine}.{first + number}" for number in range(gpus))
    return RankInfo(machine, cores, ("A GPU",) * gpus, identities, "a processor", (), "mpirun")


@pytest.mark.parametrize(
    ("devices", "ranks", "expected"),
    [
        (("cpu", "cpu"), [rank(0), rank(0)], False),
        (("cuda:0", "cuda:1"), [rank(0, 2), rank(0, 2)], True),
        (("cuda:0", "cuda:0"), [rank(0, 1), rank(0, 1)], False),
        (("cuda:0", "cuda:0"), [rank(0, 1), rank(1, 1)], True),
        (("cuda:0", "cuda:0"), [rank(0, 1, 3), rank(0, 1, 4)], True),
    ],
)
def test_ranks_that_share_a_gpu_are_known(
    devices: tuple[str, ...], ranks: list[RankInfo], expected: bool
) -> None:
    assert have_own_gpus(devices, ranks) is expected


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all that GPUs need were installed."""
    monkeypatch.setattr("tandem.config.hardware.missing_for_gpus", lambda: None)


@pytest.mark.parametrize(
    ("setting", "ranks", "expected"),
    [
        ("auto", [rank(0), rank(0), rank(2)], "cpu cpu cpu"),
        (["cpu"], [rank(0)] * 3, "cpu cpu cpu"),
        ("auto", [rank(0, 2), rank(0, 2), rank(2, 2), rank(2, 2)], "0 1 0 1"),
        # As mpirun may deal ranks out in turn.
        ("auto", [rank(0, 2), rank(1, 2), rank(0, 2), rank(1, 2)], "0 0 1 1"),
        (["cuda:1", "cuda:0"], [rank(0, 2)] * 2, "1 0"),
        (["cuda:0", "cuda:0"], [rank(0, 1)] * 2, "0 0"),
        # As Slurm may give each task a GPU of its own.
        ("auto", [rank(0, 1, 3), rank(0, 1, 5)], "0 0"),
    ],
)
def test_ranks_get_devices_by_their_number_on_their_machine(
    packages: None, setting: Any, ranks: list[RankInfo], expected: str
) -> None:
    found = place_devices(setting, ranks)
    assert " ".join(name.removeprefix("cuda:") for name in found) == expected


@pytest.mark.parametrize(
    ("setting", "ranks", "said"),
    [
        ("auto", [rank(0, 1)] * 2, "rank 1 is number 1 on its machine, which has 1"),
        ("auto", [rank(0, 1), rank(1)], "GPUs on some machines and none on others"),
        (["cuda:2"], [rank(0, 2)], "cuda:2 does not exist; found: cuda:0 to cuda:1"),
    ],
)
def test_ranks_without_a_device_are_refused(
    packages: None, setting: Any, ranks: list[RankInfo], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        place_devices(setting, ranks)


def test_cores_are_divided_by_the_ranks_that_share_them() -> None:
    eight = tuple(range(8))
    assert threads_of([rank(0, cores=eight)] * 2) == 4
    assert threads_of([rank(0, cores=eight), rank(1, cores=eight)]) == 8
    assert threads_of([rank(0, cores=(0, 1)), rank(0, cores=(2, 3))]) == 2  # bound by mpirun
    assert threads_of([rank(0, cores=(0,))] * 3) == 1
