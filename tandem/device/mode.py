"""The PyTensor mode of a device."""

import torch
from pytensor.compile.mode import Mode
from pytensor.graph.rewriting.db import RewriteDatabaseQuery

from tandem.device.devices import as_device, require_compiler
from tandem.device.linker import DeviceLinker


def device_mode(device: str | torch.device = "cpu", compile: bool = False) -> Mode:
    """Give a PyTensor mode whose functions run PyTorch's kernels on a device.

    It is used as any other: ``pytensor.function(inputs, outputs, updates=..., givens=...,
    mode=device_mode("cpu"))``. Arguments and results are NumPy arrays. Variables made by
    `device_shared` stay on the device and are updated in place, after everything else has been
    computed; ordinary shared variables work as well, and are copied to the device in every call.

    Parameters
    ----------
    device : str or torch.device
        "cpu", or a CUDA device as "cuda:0".
    compile : bool
        Put functions through ``torch.compile``, which fuses elementwise calls. The first call of
        a function then takes from seconds to minutes.

    Returns
    -------
    Mode

    Raises
    ------
    InputError
        If the device is not there, or `compile` is asked for and no C++ compiler is found.
    """
    place = as_device(device)
    if compile:
        require_compiler(place)
    return Mode(DeviceLinker(place, compile), RewriteDatabaseQuery(include=["fast_run"]))
