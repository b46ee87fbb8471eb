"""Which devices there are, found without loading PyTorch."""

import ctypes
import importlib.metadata
import importlib.util
import logging
from collections.abc import Sequence

from tandem.errors import InputError
from tandem.memory.cuda import INSTALL

log = logging.getLogger(__name__)


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
