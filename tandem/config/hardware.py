"""Which devices there are, found without loading PyTorch."""

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


@dataclass(frozen=True)
class RankInfo:
    """Where a rank is: what its machine offers it.

    Attributes
    ----------
    machine : int
        The same for the ranks of one machine.
    cores : tuple of int
        On which it may run.
    gpus : tuple of str
        Names of those that it sees.
    identities : tuple of str
        What tells these from all others: each rank may see its own, and each of them number 0.
    processor : str
        CompiledNetwork and vector instructions.
    software : tuple of str
        Packages with their versions.
    starter : "mpirun" or "torchrun"
        What has started it.
    """

    machine: int
    cores: tuple[int, ...]
    gpus: tuple[str, ...]
    identities: tuple[str, ...]
    processor: str
    software: tuple[str, ...]
    starter: Starter

    @classmethod
    def here(
        cls, machine: int, processor: str, software: tuple[str, ...], starter: Starter
    ) -> "RankInfo":
        """This process's."""
        numbers = range(cuda_device_count())
        gpus = tuple(device_names([f"cuda:{number}" for number in numbers]))
        identities = tuple(gpu_identity(number) for number in numbers)
        cores = available_cores()
        return cls(machine, cores, gpus, identities, processor, software, starter)


def available_cores() -> tuple[int, ...]:
    """The numbers of the processor's cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def threads_of(places: Sequence[RankInfo]) -> int:
    """How many threads every rank can have: cores are divided by the ranks that share them."""
    sharing = Counter((place.machine, place.cores) for place in places)
    return max(1, min(len(p.cores) // sharing[p.machine, p.cores] for p in places))


def place_devices(devices: str | Sequence[str], places: Sequence[RankInfo]) -> tuple[str, ...]:
    """Turn the setting ``devices`` into one device per rank, by its number on its machine.

    Parameters
    ----------
    devices : "auto" or sequence of str
        What each machine has for its ranks, in order; "auto" is all GPUs, or the CPU. Ranks that
        see other GPUs than their neighbours count by themselves.
    places : sequence of RankInfo
        By rank.

    Raises
    ------
    InputError
        A machine has more ranks than devices, or a device is not there or can't be used.
    """
    if isinstance(devices, str):
        counts = {len(place.gpus) for place in places}
        if 0 in counts and len(counts) > 1:
            raise InputError("devices: auto finds GPUs on some machines and none on others")
        devices = _automatic(min(counts))
        found = [[f"cuda:{n}" for n in range(len(place.gpus))] for place in places]
    else:
        found = [[*devices] for _ in places]
    if set(devices) == {"cpu"}:
        return ("cpu",) * len(places)
    before: Counter[tuple[int, tuple[str, ...]]] = Counter()
    chosen = []
    for rank, (place, names) in enumerate(zip(places, found, strict=True)):
        number = before[place.machine, place.identities]
        before[place.machine, place.identities] += 1
        if number >= len(names):
            raise InputError(
                f"rank {rank} is number {number} on its machine, which has "
                f"{len(names)} for its ranks: {', '.join(names)}; start fewer ranks on a machine, "
                "or name a device twice in devices"
            )
        _check_gpu(names[number], len(place.gpus))
        chosen.append(names[number])
    return tuple(chosen)


def have_own_gpus(devices: Sequence[str], places: Sequence[RankInfo]) -> bool:
    """Whether each rank has a GPU that no other one has.

    Parameters
    ----------
    devices : sequence of str
        As `place_devices` gives them.
    places : sequence of RankInfo
        By rank.
    """
    if "cpu" in devices:
        return False
    pairs = zip(places, devices, strict=True)
    return len({place.identities[int(name[5:])] for place, name in pairs}) == len(places)


def resolve_devices(devices: str | Sequence[str]) -> tuple[str, ...]:
    """Turn the setting ``devices`` into one device per trainer.

    Parameters
    ----------
    devices : "auto" or sequence of str
        "auto" is one trainer on each GPU, if there are any and the packages that it takes; else one
        on the CPU. A list names each trainer's device; a name that stands twice has two trainers.

    Raises
    ------
    InputError
        A device that isn't there, or a GPU that can't be used for want of a package.
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
        raise InputError(f"devices: {device} is not there; {found}")
    if missing := missing_for_gpus():
        raise InputError(f"devices: {device} is there, but can't be used: {missing}")


def device_names(devices: Sequence[str]) -> list[str]:
    """What each device is, by its maker's name; "cpu" for the CPU."""
    return ["cpu" if device == "cpu" else _gpu_name(int(device[5:])) for device in devices]


def _gpu_name(number: int) -> str:
    driver, name, handle = (
        ctypes.CDLL("libcuda.so.1"),
        ctypes.create_string_buffer(256),
        ctypes.c_int(),
    )
    found = driver.cuDeviceGet(ctypes.byref(handle), number) == 0
    if found and driver.cuDeviceGetName(name, 256, handle) == 0:
        return name.value.decode(errors="replace")
    return "unknown"


def missing_for_gpus() -> str | None:
    """Say which package is missing to train on a GPU; None if all are there."""
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
    """How many CUDA devices the driver offers; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
