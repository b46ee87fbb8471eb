"""Devices of this machine and of ranks, found without loading PyTorch."""

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.compilers import missing_for_triton, triton_version
from tandem.distributed.group import Starter
from tandem.errors import InputError
from tandem.memory.cuda import INSTALL, gpu_identity

log = logging.getLogger(__name__)

# Of cuda.h: attributes of a device, and values of its compute mode.
_COMPUTE_MODE, _CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MPS_ENABLED = 20, 75, 76, 133
_OLDEST = (7, 5)  # compute capability for which PyTorch for CUDA 13 has kernels
_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Files of a control group: its limit, its usage, and the line of its statistics on unused cache.
_CGROUP_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_CGROUP_2 = ("memory.max", "memory.current", "inactive_file")
_PROHIBITED, _EXCLUSIVE_PROCESS = 2, 3


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
    missing: str | None = None  # what its GPUs can't be used without
    limits: tuple[int | None, ...] = ()  # of each GPU, see `process_limit`; empty: none has one
    bfloat16: tuple[bool, ...] = ()  # whether each of the GPUs multiplies in it
    triton: str = "none"  # version that compiles for GPUs
    missing_for_triton: str | None = None  # what it can't compile without

    @classmethod
    def here(
        cls, machine: int, processor: str, software: tuple[str, ...], starter: Starter
    ) -> "RankInfo":
        """Describe this process."""
        numbers = range(cuda_device_count())
        gpus = tuple(device_names([f"cuda:{number}" for number in numbers]))
        identities = tuple(gpu_identity(number) for number in numbers)
        cores, missing = available_cores(), missing_for_gpus()
        limits = tuple(process_limit(number) for number in numbers)
        bfloat16 = tuple(has_bfloat16(number) for number in numbers)
        return cls(
            machine,
            cores,
            gpus,
            identities,
            processor,
            software,
            starter,
            missing=missing,
            limits=limits,
            bfloat16=bfloat16,
            triton=triton_version(),
            missing_for_triton=missing_for_triton(),
        )


def available_cores() -> tuple[int, ...]:
    """Return the numbers of the cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def available_memory() -> float:
    """Return the bytes that processes here can have without swapping; infinite where unknown.

    The system has them (Linux's MemAvailable), and so has each control group of this process, of
    version 1 or 2.
    """
    found = [math.inf]
    with contextlib.suppress(OSError, ValueError):
        line = re.search(r"^MemAvailable: +(\d+) kB", (_PROC / "meminfo").read_text(), re.M)
        found += [int(line[1]) * 1024] if line else []
    with contextlib.suppress(OSError, ValueError):
        for group in (_PROC / "self/cgroup").read_text().splitlines():
            _, controllers, path = group.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            names = _CGROUP_1 if controllers else _CGROUP_2
            folder = _GROUPS / "memory" if controllers else _GROUPS
            for part in (".", *Path(path.lstrip("/")).parts):
                folder = folder / part
                found.append(_unused(folder, *names))
    return min(found)


def _unused(group: Path, limit: str, usage: str, cache: str) -> float:
    """Bytes that a control group may still take, what it could drop from its cache included."""
    with contextlib.suppress(OSError, ValueError):
        dropped = re.search(rf"^{cache} (\d+)", (group / "memory.stat").read_text(), re.M)
        used = int((group / usage).read_text()) - (int(dropped[1]) if dropped else 0)
        return max(0, int((group / limit).read_text()) - used)
    return math.inf  # also where the limit is "max"


def threads_of(ranks: Sequence[RankInfo]) -> int:
    """Divide cores by the ranks that share them: threads that every rank can have."""
    sharing = Counter((rank.machine, rank.cores) for rank in ranks)
    return max(1, min(len(r.cores) // sharing[r.machine, r.cores] for r in ranks))


def place_devices(
    devices: str | Sequence[str], ranks: Sequence[RankInfo], para_load: bool
) -> tuple[str, ...]:
    """Turn the setting ``devices`` into one device per rank, by its number on its machine.

    The setting lists the devices of each machine for its ranks, in order; "auto" is all GPUs, or
    the CPU. Ranks that see other GPUs than their neighbours are counted separately. With
    `para_load` a process of each rank's loader uses its device too.
    """
    if isinstance(devices, str):
        counts = {len(rank.gpus) for rank in ranks}
        if 0 in counts and len(counts) > 1:
            raise InputError("devices: auto finds GPUs on some machines and none on others")
        reasons = (_unusable(rank.missing, rank.limits, para_load) for rank in ranks)
        devices = _automatic(min(counts), next(filter(None, reasons), None))
        found = [[f"cuda:{n}" for n in range(len(rank.gpus))] for rank in ranks]
    else:
        found = [[*devices] for _ in ranks]
    if set(devices) == {"cpu"}:
        return ("cpu",) * len(ranks)
    before: Counter[tuple[int, tuple[str, ...]]] = Counter()
    sharing: Counter[str] = Counter()
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
        name, gpu = names[here], int(names[here][5:])
        _check_gpu(name, len(rank.gpus), rank.missing)
        sharing[rank.identities[gpu]] += 1
        limit = rank.limits[gpu] if rank.limits else None
        _check_limit(name, limit, sharing[rank.identities[gpu]], para_load)
        chosen.append(name)
    return tuple(chosen)


def have_own_gpus(devices: Sequence[str], ranks: Sequence[RankInfo]) -> bool:
    """Return whether each rank has a GPU to itself, with devices as `place_devices` gives them."""
    if "cpu" in devices:
        return False
    pairs = zip(ranks, devices, strict=True)
    return len({rank.identities[int(name[5:])] for rank, name in pairs}) == len(ranks)


def resolve_devices(devices: str | Sequence[str], para_load: bool) -> tuple[str, ...]:
    """Turn the setting ``devices`` into one device per trainer.

    "auto" is one trainer on each GPU, if there are GPUs and they can be used; else one on the CPU.
    A device that a list names twice has two trainers. With `para_load` a process of each trainer's
    loader uses its device too.
    """
    gpus = cuda_device_count()
    missing = missing_for_gpus() if gpus else None
    limits = [process_limit(number) for number in range(gpus)]
    if isinstance(devices, str):
        return _automatic(gpus, _unusable(missing, limits, para_load))
    for device, trainers in Counter(devices).items():
        if device != "cpu":
            _check_gpu(device, gpus, missing or _too_old(int(device[5:])))
            _check_limit(device, limits[int(device[5:])], trainers, para_load)
    return tuple(devices)


def _automatic(gpus: int, unusable: str | None) -> tuple[str, ...]:
    if not gpus:
        log.info("devices: auto is the CPU: no GPU was found")
        return ("cpu",)
    if unusable:
        log.info("devices: auto is the CPU, though there are GPUs (%d found): %s", gpus, unusable)
        return ("cpu",)
    names = tuple(f"cuda:{number}" for number in range(gpus))
    log.info("devices: auto is a trainer on each GPU: %s", ", ".join(names))
    return names


def _unusable(missing: str | None, limits: Sequence[int | None], para_load: bool) -> str | None:
    """Say why there can't be a trainer on each GPU; None if there can."""
    refusals = (_refusal(f"cuda:{n}", limit, 1, para_load) for n, limit in enumerate(limits))
    too_old = map(_too_old, range(len(limits)))
    return missing or next(filter(None, (*too_old, *refusals)), None)


def _too_old(number: int) -> str | None:
    """Say that PyTorch has no kernels for a GPU; None if it has, or nothing is known."""
    found = tuple(_attribute(number, which) for which in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR))
    if found[0] == 0 or found >= _OLDEST:
        return None
    return (
        f"cuda:{number} has compute capability {found[0]}.{found[1]}, and PyTorch for CUDA 13 needs"
        " 7.5 or later (Turing); name the others, if there are any, in devices"
    )


def _check_gpu(device: str, gpus: int, missing: str | None) -> None:
    if int(device.partition(":")[2]) >= gpus:
        there = {0: "no GPU was found", 1: "found: cuda:0"}
        found = there.get(gpus, f"found: cuda:0 to cuda:{gpus - 1}")
        raise InputError(f"devices: {device} does not exist; {found}")
    if missing:
        raise InputError(f"devices: {device} exists but is unusable: {missing}")


def _check_limit(device: str, limit: int | None, trainers: int, para_load: bool) -> None:
    if refusal := _refusal(device, limit, trainers, para_load):
        raise InputError(f"devices: {refusal}")


def _refusal(device: str, limit: int | None, trainers: int, para_load: bool) -> str | None:
    """Say why a GPU's compute mode refuses a run's processes; None if it does not."""
    processes = trainers * (2 if para_load else 1)
    if limit is None or processes <= limit:
        return None
    if limit == 0:
        return (
            f"{device} permits no process to use it (compute mode PROHIBITED); `nvidia-smi -c 0` "
            "permits all"
        )
    loaders = ", of trainers and their loaders," if para_load else ""
    return (
        f"{device} permits one process at a time (compute mode EXCLUSIVE_PROCESS), and "
        f"{processes} processes{loaders} would use it; `nvidia-smi -c 0` permits all, and one "
        "trainer with para_load: false is one process"
    )


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
    """Return whether a GPU multiplies in bfloat16: from compute capability 8.0 on."""
    return _attribute(number, _CAPABILITY_MAJOR) >= 8


def missing_for_gpus() -> str | None:
    """Name what is missing, of packages and driver, for training on a GPU; None if nothing is."""
    if importlib.util.find_spec("pycuda") is None:
        return f"PyCUDA is not installed; {INSTALL}"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "PyTorch is not installed"
    if version.endswith("+cpu"):
        return f"PyTorch {version} is built for the CPU only; install a build for CUDA"
    driver, needed = driver_cuda(), torch_cuda()
    # A driver serves every CUDA of its own major version and of those before.
    if driver and needed and driver[0] < needed[0]:
        return (
            f"the NVIDIA driver is made for CUDA {driver[0]}.{driver[1]} and older, PyTorch "
            f"{version} for CUDA {needed[0]}.{needed[1]}; update the driver, or install a PyTorch "
            f"for CUDA {driver[0]}"
        )
    return None


def torch_cuda() -> tuple[int, int] | None:
    """Return the CUDA version that the installed PyTorch is built for; None if it names none."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    try:
        text = Path(torch.origin).with_name("version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=\n]*= *['\"](\d+)\.(\d+)", text, re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None


def driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver supports; None without a driver."""
    driver, version = _driver(), ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def process_limit(number: int) -> int | None:
    """Return how many processes may use a GPU at a time: 0, 1, or None for any number."""
    mode = _attribute(number, _COMPUTE_MODE)
    if mode == _PROHIBITED:
        return 0
    # Through NVIDIA's Multi-Process Service processes share a GPU in exclusive mode.
    return 1 if mode == _EXCLUSIVE_PROCESS and not _attribute(number, _MPS_ENABLED) else None


def gpu_memory(number: int) -> tuple[int, int] | None:
    """Return the used and all bytes of a GPU's memory, of all programs; None if not reported.

    NVIDIA's management library (NVML) reports them, without a context on the GPU.
    """
    handle, found = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # all, free, used
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = f"GPU-{gpu_identity(number)}".encode()
    except (OSError, InputError):
        return None
    failed = (
        library.nvmlInit_v2()
        or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle))
        or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(found))
    )
    return None if failed else (found[2], found[0])


def _attribute(number: int, attribute: int) -> int:
    """Return an attribute of a GPU; 0 where the driver does not report it."""
    driver, handle, value = _driver(), ctypes.c_int(), ctypes.c_int()
    if driver is None or driver.cuDeviceGet(ctypes.byref(handle), number) != 0:
        return 0
    found = driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle) == 0
    return value.value if found else 0


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def cuda_device_count() -> int:
    """Count the CUDA devices of the driver; 0 without a driver."""
    driver, count = _driver(), ctypes.c_int(0)
    if driver is None or driver.cuInit(0) != 0:
        return 0
    return count.value if driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0
