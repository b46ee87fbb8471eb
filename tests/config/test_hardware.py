"""Which devices a run gets, with as many GPUs and packages as the test says."""

import importlib.metadata
import importlib.util
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.config import hardware
from tandem.config.hardware import (
    RankInfo,
    cuda_device_count,
    driver_cuda,
    gpu_memory,
    have_own_gpus,
    place_devices,
    process_limit,
    resolve_devices,
    threads_of,
    torch_cuda,
)
from tandem.errors import InputError

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    def make(
        gpus: int,
        pycuda: bool = True,
        torch: str | None = "2.13.0+cu130",
        driver: tuple[int, int] | None = (13, 0),
        limits: Sequence[int | None] = (None, None),
        capabilities: Sequence[tuple[int, int]] = ((9, 0), (7, 5)),
    ) -> None:
        def attribute(number: int, which: int) -> int:
            return capabilities[number][{75: 0, 76: 1}[which]]

        def version(name: str) -> str:
            if torch is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return torch

        def find(name: str) -> Any:
            return object() if pycuda else None

        monkeypatch.setattr(hardware, "cuda_device_count", lambda: gpus)
        monkeypatch.setattr(hardware, "driver_cuda", lambda: driver)
        monkeypatch.setattr(hardware, "torch_cuda", lambda: (13, 0))
        monkeypatch.setattr(hardware, "process_limit", lambda number: limits[number])
        monkeypatch.setattr(hardware, "_attribute", attribute)
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
        ({"gpus": 1, "driver": (12, 8)}, ("cpu",), "driver is made for CUDA 12.8 and older"),
        ({"gpus": 1, "driver": (13, 4)}, ("cuda:0",), "on each GPU"),
        ({"gpus": 1, "driver": None}, ("cuda:0",), "on each GPU"),
        ({"gpus": 2, "limits": [None, 1]}, ("cpu",), "cuda:1 permits one process at a time"),
        ({"gpus": 2, "limits": [0, None]}, ("cpu",), "cuda:0 permits no process"),
        (
            {"gpus": 2, "capabilities": [(9, 0), (7, 0)]},
            ("cpu",),
            "cuda:1 has compute capability 7.0, and PyTorch for CUDA 13 needs 7.5",
        ),
        ({"gpus": 1, "capabilities": [(0, 0)]}, ("cuda:0",), "on each GPU"),
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
        assert resolve_devices("auto", para_load=True) == expected
    (line,) = caplog.messages
    assert reason in line


@pytest.mark.parametrize("names", [["cpu"], ["cpu", "cpu"], ["cuda:0", "cuda:0"], ["cuda:1"]])
def test_a_list_is_taken_as_it_is(machine: Machine, names: list[str]) -> None:
    machine(2, pycuda="cpu" not in names)  # a CPU needs no package
    assert resolve_devices(names, para_load=True) == tuple(names)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"gpus": 0}, "cuda:1 does not exist; no GPU was found"),
        ({"gpus": 1}, "cuda:1 does not exist; found: cuda:0$"),
        ({"gpus": 2, "pycuda": False}, r"PyCUDA is not installed; .*make gpu"),
        ({"gpus": 2, "torch": "2.13.0+cpu"}, "install a build for CUDA"),
        (
            {"gpus": 2, "driver": (12, 8)},
            r"CUDA 12\.8 and older, PyTorch 2\.13\.0\+cu130 for CUDA 13\.0; update the driver",
        ),
        ({"gpus": 2, "limits": [None, 0]}, "cuda:1 permits no process .*PROHIBITED"),
        ({"gpus": 2, "capabilities": [(9, 0), (6, 1)]}, "unusable: cuda:1 has .* 6.1, and"),
        (
            {"gpus": 2, "limits": [None, 1]},
            "EXCLUSIVE_PROCESS.*2 processes, of trainers and their loaders.*para_load: false",
        ),
    ],
)
def test_what_is_missing_is_bad_input(
    machine: Machine, found: dict[str, Any], message: str
) -> None:
    machine(**found)
    with pytest.raises(InputError, match=message):
        resolve_devices(["cuda:1"], para_load=True)


def test_a_gpu_for_one_process_takes_one_trainer_without_a_loader(machine: Machine) -> None:
    machine(2, limits=[1, 1])
    assert resolve_devices("auto", para_load=False) == ("cuda:0", "cuda:1")
    with pytest.raises(InputError, match="and 2 processes would use it"):
        resolve_devices(["cuda:0", "cuda:0"], para_load=False)


class FakeLibrary:
    """The driver's library, with the attributes that a device reports."""

    def __init__(self, attributes: dict[int, int], version: int = 13000) -> None:
        self._attributes, self._version = attributes, version

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self._version
        return 0

    def cuDeviceGet(self, handle: Any, number: int) -> int:
        handle._obj.value = 70 + number
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, handle: Any) -> int:
        if handle.value != 73 or attribute not in self._attributes:
            return 1
        value._obj.value = self._attributes[attribute]
        return 0


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, None),
        ({20: 0}, None),
        ({20: 2}, 0),
        ({20: 3}, 1),
        ({20: 3, 133: 0}, 1),
        ({20: 3, 133: 1}, None),  # MPS
    ],
)
def test_compute_mode_limits_the_processes(
    monkeypatch: pytest.MonkeyPatch, attributes: dict[int, int], expected: int | None
) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: FakeLibrary(attributes))
    assert process_limit(3) == expected


def test_versions_of_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: FakeLibrary({}, version=12080))
    assert driver_cuda() == (12, 8)
    package = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: package)
    assert torch_cuda() is None
    for text, expected in [
        ("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n", (13, 0)),
        ("cuda = '12.8'\nhip = None\n", (12, 8)),
        ("cuda: Optional[str] = None\n", None),
    ]:
        (tmp_path / "version.py").write_text(text)
        assert torch_cuda() == expected


def test_the_installed_pytorch_names_its_cuda() -> None:
    found = torch_cuda()
    assert torch.version.cuda == (found and "{}.{}".format(*found))


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
    setting: Any, ranks: list[RankInfo], expected: str
) -> None:
    found = place_devices(setting, ranks, para_load=True)
    assert " ".join(name.removeprefix("cuda:") for name in found) == expected


@pytest.mark.parametrize(
    ("setting", "ranks", "said"),
    [
        ("auto", [rank(0, 1)] * 2, "rank 1 is number 1 on its machine, which has 1"),
        ("auto", [rank(0, 1), rank(1)], "GPUs on some machines and none on others"),
        (["cuda:2"], [rank(0, 2)], "cuda:2 does not exist; found: cuda:0 to cuda:1"),
    ],
)
def test_ranks_without_a_device_are_refused(setting: Any, ranks: list[RankInfo], said: str) -> None:
    with pytest.raises(InputError, match=said):
        place_devices(setting, ranks, para_load=True)


@pytest.mark.parametrize(
    ("setting", "limit", "para_load", "said"),
    [
        ("auto", 1, False, None),
        ("auto", 0, False, "cpu"),
        ("auto", 1, True, "cpu"),
        (["cuda:0"], 1, True, "cuda:0 permits one process at a time"),
        (["cuda:0"], 1, False, None),
        (["cuda:0", "cuda:0"], 1, False, "and 2 processes would use it"),
        (["cuda:0"], 0, False, "cuda:0 permits no process"),
    ],
)
def test_ranks_obey_the_limits_of_every_machine(
    setting: Any, limit: int, para_load: bool, said: str | None
) -> None:
    free, limited = rank(0, 1), replace(rank(1, 1), limits=(limit,))
    ranks = [free, *[limited] * (1 if setting == "auto" else len(setting))]
    if said in (None, "cpu"):
        found = place_devices(setting, ranks, para_load)
        assert found == ((said or "cuda:0"),) * len(ranks)
    else:
        with pytest.raises(InputError, match=said):
            place_devices(setting, ranks, para_load)


def test_a_rank_describes_its_gpus(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(2, driver=(12, 8), limits=[None, 1])
    monkeypatch.setattr(hardware, "gpu_identity", "GPU {}".format)
    monkeypatch.setattr(hardware, "_gpu_name", "name {}".format)
    here = RankInfo.here(0, "a processor", (), "mpirun")
    assert (here.gpus, here.identities) == (("name 0", "name 1"), ("GPU 0", "GPU 1"))
    assert here.limits == (None, 1)
    assert "update the driver" in (here.missing or "")


def test_what_a_machine_of_the_ranks_lacks_is_named(caplog: pytest.LogCaptureFixture) -> None:
    ranks = [rank(0, 1), replace(rank(1, 1), missing="the driver is too old")]
    with pytest.raises(InputError, match="cuda:0 exists but is unusable: the driver is too old"):
        place_devices(["cuda:0"], ranks, para_load=True)
    with caplog.at_level(logging.INFO):
        assert place_devices("auto", ranks, para_load=True) == ("cpu", "cpu")
    assert "the driver is too old" in caplog.text


def test_cores_are_divided_by_the_ranks_that_share_them() -> None:
    eight = tuple(range(8))
    assert threads_of([rank(0, cores=eight)] * 2) == 4
    assert threads_of([rank(0, cores=eight), rank(1, cores=eight)]) == 8
    assert threads_of([rank(0, cores=(0, 1)), rank(0, cores=(2, 3))]) == 2  # bound by mpirun
    assert threads_of([rank(0, cores=(0,))] * 3) == 1


MEMORY = {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   5000 kB\n"}
VERSION_1 = {
    "proc/self/cgroup": "5:cpu,memory:/job/step\n4:cpu:/other\n",
    "groups/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "groups/memory/memory.usage_in_bytes": "1\n",
    "groups/memory/job/memory.limit_in_bytes": "4000000\n",
    "groups/memory/job/memory.usage_in_bytes": "3000000\n",
    "groups/memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 500000\n",
}
VERSION_2 = {
    "proc/self/cgroup": "0::/job/step\n",
    "groups/job/memory.max": "max\n",
    "groups/job/memory.current": "3000000\n",
    "groups/job/step/memory.max": "2000000\n",
    "groups/job/step/memory.current": "2500000\n",
    "groups/job/step/memory.stat": "inactive_file 700000\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, math.inf),
        (MEMORY, 5_120_000),
        (MEMORY | VERSION_1, 1_500_000),
        (MEMORY | VERSION_2, 200_000),
        ({"proc/self/cgroup": "junk", "proc/meminfo": "junk"}, math.inf),
    ],
)
def test_memory_is_what_the_system_and_each_control_group_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: float
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(hardware, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(hardware, "_GROUPS", tmp_path / "groups")
    assert hardware.available_memory() == expected


def test_memory_is_known() -> None:
    assert 1e6 < hardware.available_memory() < 1e15


@pytest.mark.parametrize(("version", "missing"), [("3.7.1", None), ("none", "a C compiler")])
def test_a_rank_tells_whether_triton_compiles_there(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, version: str, missing: str | None
) -> None:
    machine(gpus=0)
    monkeypatch.setattr(hardware, "triton_version", lambda: version)
    monkeypatch.setattr(hardware, "missing_for_triton", lambda: missing)
    here = RankInfo.here(0, "a processor", (), "mpirun")
    assert (here.triton, here.missing_for_triton) == (version, missing)


class FakeManagement:
    """NVML, of one GPU."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.asked = status, b""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        self.asked = uuid
        return self.status

    def nvmlDeviceGetMemoryInfo(self, handle: Any, found: Any) -> int:
        found._obj[:] = [100, 60, 40]  # all, free, used
        return 0


def test_memory_of_a_gpu_is_that_of_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_memory(0) is None or cuda_device_count()
    library = FakeManagement()
    monkeypatch.setattr(hardware.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(hardware, "gpu_identity", lambda number: f"uuid-{number}")
    assert gpu_memory(3) == (40, 100)
    assert library.asked == b"GPU-uuid-3"
    library.status = 1
    assert gpu_memory(3) is None
