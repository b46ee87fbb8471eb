"""Which devices there are, found out without importing PyTorch."""

import ctypes
import logging
from collections.abc import Sequence

from tandem.errors import InputError

log = logging.getLogger(__name__)


def resolve_devices(devices: str | Sequence[str]) -> tuple[str, ...]:
    """Turn the setting ``devices`` into one device per trainer.

    Parameters
    ----------
    devices : "auto" or sequence of str
        "auto" is one trainer on the CPU. A list names each trainer's device; a name that stands
        twice has two trainers.

    Raises
    ------
    InputError
        A device that isn't there.
    """
    gpus = cuda_device_count()
    if isinstance(devices, str):
        if gpus:
            log.info(
                "devices: auto is the CPU; this version does not train on GPUs (%d found)", gpus
            )
        return ("cpu",)
    for device in devices:
        if device == "cpu":
            continue
        number = int(device.partition(":")[2])
        if number >= gpus:
            there = "no GPU was found" if gpus == 0 else f"found: cuda:0 to cuda:{gpus - 1}"
            raise InputError(f"devices: {device} is not there; {there}")
        raise InputError(
            f"devices: {device} is there, but this version trains on the CPU only; use cpu"
        )
    return tuple(devices)


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
