"""Devices, streams, threads and memory of this process's PyTorch."""

import contextlib
import ctypes
import gc
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.compilers import cpp_compiler, missing_for_triton
from tandem.errors import InputError


def as_device(device: str | torch.device) -> torch.device:
    """Return the PyTorch device of a name: "cpu", "cuda:0" ...; "cuda" is "cuda:0".

    Raises
    ------
    InputError
        There is no such device; the message lists the existing ones.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device {device!r} is unknown; {_existing_devices()}") from error
    if found.type == "cpu" and found.index in (None, 0):
        return torch.device("cpu")
    if found.type != "cuda" or (found.index or 0) >= _gpu_count():
        raise InputError(f"device {str(device)!r} does not exist; {_existing_devices()}")
    return torch.device("cuda", found.index or 0)


def as_tensor(memory: Any, device: str | torch.device) -> torch.Tensor:
    """Return a tensor over memory, without a copy.

    Parameters
    ----------
    memory : ndarray, or object with ``__cuda_array_interface__``
        On `device`. It must live as long as the tensor is used.

    Raises
    ------
    TypeError
        The memory is not on `device`.
    """
    target = as_device(device)
    if isinstance(memory, np.ndarray) != (target.type == "cpu"):
        raise TypeError(f"memory of {type(memory).__name__} does not lie on {target}")
    return torch.as_tensor(memory, device=target)


def use_device(device: str | torch.device) -> None:
    """Make a device the current one of this process's PyTorch, which returns to it after each call.

    To be called before the first work on a GPU, in a process that also uses the device through a
    `tandem.memory.cuda.CudaDriver`, whose calls go to the current device. On "cpu" nothing is done.

    Raises
    ------
    InputError
        The device does not exist.
    """
    target = as_device(device)
    if target.type == "cuda":
        torch.cuda.set_device(target)


def on_stream(device: str | torch.device, handle: int | None) -> AbstractContextManager:
    """Context manager: put PyTorch's work on a stream.

    A captured step and every function of a `device_mode` then run on this stream, in order with
    work that others put on it before and after.

    Parameters
    ----------
    handle : int or None
        The driver's pointer to the stream, which must live as long as work is put on it; None for
        PyTorch's own, and on a CPU, which has none.

    Raises
    ------
    InputError
        The device does not exist.
    """
    target = as_device(device)
    if handle is None or target.type == "cpu":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(handle, device=target))


def out_of_memory(error: torch.OutOfMemoryError) -> InputError:
    """The error for a user whose device has run out of memory."""
    return InputError(
        f"cuda:{torch.cuda.current_device()} has too little memory; a smaller batch_size or "
        f"width, or data_on_gpu: false, needs less ({' '.join(str(error).split())})"
    )


def _gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _existing_devices() -> str:
    names = ["cpu", *(f"cuda:{index}" for index in range(_gpu_count()))]
    return f"this machine has {', '.join(names)}"


def give_back_memory() -> None:
    """Free unreferenced tensors and PyTorch's reserve of GPU memory, for others in this process."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def set_threads(count: int) -> None:
    """Set how many threads, at least 1, a PyTorch kernel uses on the CPU, and a region at most.

    Kernels do not run side by side: PyTorch's threads for that are set to one, if it is not too
    late (PyTorch accepts that number only before its first use).

    Raises
    ------
    InputError
        `count` is below 1.
    """
    if count < 1:
        raise InputError(f"threads must be at least 1, not {count}")
    torch.set_num_threads(count)
    with contextlib.suppress(RuntimeError):
        torch.set_num_interop_threads(1)
    limit_openblas()


def limit_openblas() -> None:
    """Let OpenBLAS, SciPy's of Numba's code and NumPy's, use no more threads than a kernel."""
    count = torch.get_num_threads()
    with contextlib.suppress(OSError):  # a system that is not Linux
        mapped = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        for path in {line.split(maxsplit=5)[5] for line in mapped if "openblas" in line}:
            library = ctypes.CDLL(path)
            for prefix, suffix in product(("scipy_openblas", "openblas"), ("", "64_")):
                threads = getattr(library, f"{prefix}_get_num_threads{suffix}", None)
                if threads is not None and threads() > count:
                    library[f"{prefix}_set_num_threads{suffix}"](count)


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory until this process ends; return whether it can.

    A kernel's result on a CPU is memory fresh from the C library. glibc requests a large block from
    the system each time and returns it when it is freed, and the system clears each page when it is
    first touched: in a training step this takes longer than many of the kernels. Memory that is
    kept serves the next step. The process stays as large as at its peak.
    """
    trim_threshold, mmap_max = -1, -4  # numbers of the parameters in glibc's malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, -1))


def require_compiler(device: torch.device) -> None:
    """Raise InputError, before a compilation, where its compilers are missing."""
    if device.type == "cpu" and cpp_compiler() is None:
        raise InputError(
            "compile: true needs a C++ compiler for the CPU, and none of $CXX, g++, clang++ and "
            "c++ is found; install one, or set compile: false"
        )
    if device.type == "cuda" and (missing := missing_for_triton()):
        raise InputError(
            f"compile: true on a GPU needs what is missing here: {missing}; install it, or set "
            "compile: false"
        )
