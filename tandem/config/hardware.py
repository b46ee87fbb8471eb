"""Devices of this machine and of ranks, found without loading PyTorch."""

import ctypes
import importlib.metadata
import importlib.util
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.distributed.group import Starter
from tandem.errors import InputError
from tandem.memory.cuda import INSTALL, gpu_identity

log = logging.getLogger(__name__)

_CAPABILITY_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR


@dataclass(frozen=True)
class RankInfo:
    """A rank's machine, and what it offers the rank."""

    machine: int  # the same for the ranks of one machine
    cores: tuple[int, ...]  # on which the rank may run
    gpus: tuple[str, ...]  # names of those that it sees
    identities: tuple[str, ...]  # unique to each of these: each rank may see its own, as number 0
    processor: str  # model and vector instructions
    software: tuple[str, ...]  # packages with their versions
    starter: Starter
    bfloat16: tuple[bool, ...] = ()  # whether each of the GPUs multiplies in it

    @classmethod
    def here(
        cls, machine: int, processor: str, software: tuple[str, ...], starter: Starter
    ) -> "RankInfo":
        """Describe this process."""
        numbers = range(cuda_device_count())
        gpus = tuple(device_names([f"cuda:{number}" for number in numbers]))
        identities = tuple(gpu_identity(number) for number in numbers)
        cores = available_cores()
        bfloat16 = tuple(has_bfloat16(number) for number in numbers)
        return cls(machine, cores, gpus, identities, processor, software, starter, bfloat16)


def available_cores() -> tuple[int, ...]:
    """Return the numbers of the cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def threads_of(ranks: Sequence[RankInfo]) -> int:
    """Divide cores by the ranks that share them: threads that every rank can have."""
    sharing = Counter((rank.machine, rank.cores) for rank in ranks)
    return max(1, min(len(r.cores) // sharing[r.machine, r.cores] for r in ranks))


def place_devices(devices: str | Sequence[str], ranks: Sequence[RankInfo]) -> tuple[str, ...]:
    """Turn the setting ``devices`` into one device per rank, by its number on its machine.

    The setting lists the devices of each machine for its ranks, in order; "auto" is all GPUs, or
    the CPU. Ranks that see other GPUs than their neighbours are counted separately.
    """
    if isinstance(devices, str):
        counts = {len(rank.gpus) for rank in ranks}
        if 0 in counts and len(counts) > 1:
            raise InputError("devices: auto finds GPUs on some machines and none on others")
        devices = _automatic(min(counts))
        found = [[f"cuda:{n}" for n in range(len(rank.gpus))] for rank in ranks]
    else:
        found = [[*devices] for _ in ranks]
    if set(devices) == {"cpu"}:
        return ("cpu",) * len(ranks)
    before: Counter[tuple[int, tuple[str, ...]]] = Counter()
    chosen = []
    for number, (rank, names) in enumerate(zip(ranks, found, strict=True)):
        here = before[rank.machine, rank.identities]
        before[rank.machine, rank.identities] += 1
        if here >= len(names):
            raise InputError(
                f"rank {number} is number {here} on its machine, which has "
                f"{len(names)} for its ranks: {', '.join(names)}; start fewer ranks on a machine, "
                "or name a device twice in devices"
            )
        _check_gpu(names[here], len(rank.gpus))
        chosen.append(names[here])
    return tuple(chosen)


def have_own_gpus(devices: Sequence[str], ranks: Sequence[RankInfo]) -> bool:
    """Whether each rank has a GPU to itself, with devices as `place_devices` gives them."""
    if "cpu" in devices:
        return False
    pairs = zip(ranks, devices, strict=True)
    return len({rank.identities[int(name[5:])] for rank, name in pairs}) == len(ranks)


def resolve_devices(devices: str | Sequence[str]) -> tuple[str, ...]:
    """Turn the setting ``devices`` into one device per trainer.

    "auto" is one trainer on each GPU, if there are GPUs and the packages that they need; else one
    on the CPU. A device that a list names twice has two trainers.
    """
    gpus = cuda_device_count()
    if isinstance(devices, str):
        return _automatic(gpus)
    for device in devices:
        if device != "cpu":
            _check_gpu(device, gpus)
    return tuple(devices)


def _automatic(gpus: int) -> tuple[str, ...]:
    if not gpus:
        log.info("devices: auto is the CPU: no GPU was found")
        return ("cpu",)
    if missing := missing_for_gpus():
        log.info("devices: auto is the CPU, though there are GPUs (%d found): %s", gpus, missing)
        return ("cpu",)
    names = tuple(f"cuda:{number}" for number in range(gpus))
    log.info("devices: auto is a trainer on each GPU: %s", ", ".join(names))
    return names


def _check_gpu(device: str, gpus: int) -> None:
    if int(device.partition(":")[2]) >= gpus:
        there = {0: "no GPU was found", 1: "found: cuda:0"}
        found = there.get(gpus, f"found: cuda:0 to cuda:{gpus - 1}")
        raise InputError(f"devices: {device} does not exist; {found}")
    if missing := missing_for_gpus():
        raise InputError(f"devices: {device} exists but is unusable: {missing}")


def device_names(devices: Sequence[str]) -> list[str]:
    """Name each device as its maker does; "cpu" is the CPU."""
    return ["cpu" if device == "cpu" else _gpu_name(int(device[5:])) for device in devices]


def _gpu_name(number: int) -> str:
    driver = ctypes.CDLL("libcuda.so.1")
    name, handle = ctypes.create_string_buffer(256), ctypes.c_int()
    found = driver.cuDeviceGet(ctypes.byref(handle), number) == 0
    if found and driver.cuDeviceGetName(name, 256, handle) == 0:
        return name.value.decode(errors="replace")
    return "unknown"


def has_bfloat16(number: int) -> bool:
    """Whether a GPU multiplies in bfloat16: from compute capability 8.0 on."""
    driver, handle, major = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
    if driver.cuDeviceGet(ctypes.byref(handle), number):
        return False
    status = driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, handle)
    return status == 0 and major.value >= 8


def missing_for_gpus() -> str | None:
    """Name the package that is missing for training on a GPU; None if none is."""
    if importlib.util.find_spec("pycuda") is None:
        return f"PyCUDA is not installed; {INSTALL}"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "PyTorch is not installed"
    if version.endswith("+cpu"):
        return f"PyTorch {version} is built for the CPU only; install a build for CUDA"
    return None


def cuda_device_count() -> int:
    """Count the CUDA devices of the driver; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
