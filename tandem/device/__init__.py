"""A PyTensor mode that runs a graph with PyTorch's kernels, and variables that stay on a device.

PyTensor builds the graph and its gradients; PyTorch is a library of kernels here (oneDNN on a CPU,
cuDNN on CUDA). ``lowering/`` says what each Op becomes, ``program.py`` writes a graph as a Python
function of such calls, ``aliasing.py`` knows what shares memory, ``linker.py`` and ``mode.py`` make
it a PyTensor mode, ``shared.py`` holds the variables.
"""

from tandem.device.devices import as_device, cpp_compiler, keep_freed_memory, set_threads
from tandem.device.linker import DeviceLinker
from tandem.device.lowering import Lowering, lower
from tandem.device.mode import device_mode
from tandem.device.shared import DeviceSharedVariable, device_shared

__all__ = [
    "DeviceLinker",
    "DeviceSharedVariable",
    "Lowering",
    "as_device",
    "cpp_compiler",
    "device_mode",
    "device_shared",
    "keep_freed_memory",
    "lower",
    "set_threads",
]
