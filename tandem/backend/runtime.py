"""Which devices there are, and how many threads work on a CPU."""

import contextlib
import ctypes
import gc
import os
import shutil
from typing import Any

import numpy as np
import torch

from tandem.errors import InputError


def as_device(device: str | torch.device) -> torch.device:
    """Give the PyTorch device of that name, if it is there.

    Parameters
    ----------
    device : str or torch.device
        "cpu" or "cuda:0", "cuda:1" ...; "cuda" is "cuda:0".

    Raises
    ------
    InputError
        If there is no such device; the message says which there are.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device {device!r} is unknown; {_what_is_there()}") from error
    if found.type == "cpu" and found.index in (None, 0):
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found.type != "cuda" or (found.index or 0) >= count:
        raise InputError(f"device {str(device)!r} is not there; {_what_is_there()}")
    return torch.device("cuda", found.index or 0)


def as_tensor(memory: Any, device: str | torch.device) -> torch.Tensor:
    """Give a tensor over memory, without a copy.

    Parameters
    ----------
    memory : ndarray, or object with ``__cuda_array_interface__``
        Which must live as long as the tensor is used.
    device : str or torch.device
        Where it is.

    Raises
    ------
    TypeError
        It is not there.
    """
    place = as_device(device)
    if isinstance(memory, np.ndarray) != (place.type == "cpu"):
        raise TypeError(f"memory of {type(memory).__name__} does not lie on {place}")
    return torch.as_tensor(memory, device=place)


def too_little_memory(error: torch.OutOfMemoryError) -> InputError:
    """What the user is to be told when a device's memory is used up."""
    return InputError(
        f"cuda:{torch.cuda.current_device()} has too little memory; a smaller batch_size or width "
        f"needs less ({' '.join(str(error).split())})"
    )


def _what_is_there() -> str:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ["cpu", *(f"cuda:{index}" for index in range(count))]
    return f"this machine has {', '.join(names)}"


def give_back_memory() -> None:
    """Let a GPU have what PyTorch keeps of it for later, and what nobody refers to any more.

    A trainer that follows another one in its process has use for it, outside PyTorch too.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def set_threads(count: int) -> None:
    """Set how many threads a PyTorch kernel uses on the CPU.

    Kernels are not run side by side: the threads that PyTorch keeps for that are set to one,
    where it is not too late (PyTorch takes that number only before its first use).

    Parameters
    ----------
    count : int
        Threads of one kernel, at least 1.

    Raises
    ------
    InputError
        If `count` is below 1.
    """
    if count < 1:
        raise InputError(f"threads must be at least 1, not {count}")
    torch.set_num_threads(count)
    with contextlib.suppress(RuntimeError):
        torch.set_num_interop_threads(1)


def keep_freed_memory() -> bool:
    """Tell the C library to keep memory that was freed, for this process, until it ends.

    A kernel's result on a CPU is memory fresh from the C library. glibc asks the system for a large
    block each time and gives it back when it is freed, and the system clears each page when it is
    first touched: for the passes of a training step this takes longer than many of the kernels do.
    Kept, the same memory serves the next step. The process stays as large as it was at its largest.

    Returns
    -------
    bool
        Whether the C library is one that can be told; elsewhere nothing changes.
    """
    trim_threshold, mmap_max = -1, -4  # numbers of the parameters in glibc's malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, -1))


def cpp_compiler() -> str | None:
    """Find the C++ compiler that ``torch.compile`` would use on a CPU; None if there is none."""
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def require_compiler(device: torch.device) -> None:
    """Refuse to compile for the CPU where no C++ compiler is found.

    Raises
    ------
    InputError
        Naming what was looked for.
    """
    if device.type == "cpu" and cpp_compiler() is None:
        raise InputError(
            "compile: true needs a C++ compiler for the CPU, and none of $CXX, g++, clang++ and "
            "c++ is found; install one, or set compile: false"
        )
