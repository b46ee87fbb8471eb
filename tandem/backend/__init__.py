"""A PyTensor mode that runs a graph with PyTorch's kernels, and variables that stay on a device.

PyTensor builds the graph and its gradients; PyTorch is a library of kernels here (oneDNN and MKL
on a CPU, cuDNN on CUDA). ``pooling_rewrites.py`` moves work behind pooling, ``norm_rewrites.py``
batch normalisation into weights or together with ReLU, ``gpu_rewrites.py`` suits a graph to GPUs,
``inner_graphs.py`` prepares the graphs of loops and branches, ``lowering/`` maps each Op to a call,
``winograd_loops.py``, ``filter_loops.py``, ``image_loops.py``, ``norm_loops.py`` and
``dropout_loops.py`` have kernels of our own for a CPU on the memory that ``channels_last.py`` lays
out, by ``vectors.py`` where numba's language does not suffice, ``pool_norm_kernels.py`` for a GPU,
``perform.py`` computes an Op without a kernel by its own NumPy code, ``aliasing.py`` finds what
shares memory, ``schedule.py`` decides the order and the memory of results, ``codegen.py`` writes a
graph as a Python function, ``segments.py`` cuts it where the host is told of results, ``linker.py``
and ``mode.py`` make it a PyTensor mode, ``plan.py`` schedules a function without making it,
``shared.py`` holds the variables, ``precision.py`` chooses precision, layout and algorithm,
``channel.py`` is how functions of several ranks meet, ``capture.py`` records a step for a GPU,
``transfer.py`` copies between it and the host, and ``runtime.py`` sets devices, streams, threads
and memory.
"""

import sys

from tandem.processor import limit_spinning

if "torch" not in sys.modules:  # with which OpenMP reads it
    limit_spinning()

from tandem.backend.capture import Captured, capture, check_capturable
from tandem.backend.channel import Channel
from tandem.backend.linker import DeviceLinker
from tandem.backend.lowering import Lowering, lower
from tandem.backend.mode import device_mode
from tandem.backend.precision import Precision, ProductPrecision, deterministic
from tandem.backend.runtime import (
    as_device,
    as_tensor,
    give_back_memory,
    keep_freed_memory,
    on_stream,
    set_threads,
    use_device,
)
from tandem.backend.shared import DeviceSharedVariable, device_shared
from tandem.backend.transfer import download, upload

__all__ = [
    "Captured",
    "Channel",
    "DeviceLinker",
    "DeviceSharedVariable",
    "Lowering",
    "Precision",
    "ProductPrecision",
    "as_device",
    "as_tensor",
    "capture",
    "check_capturable",
    "deterministic",
    "device_mode",
    "device_shared",
    "download",
    "give_back_memory",
    "keep_freed_memory",
    "lower",
    "on_stream",
    "set_threads",
    "upload",
    "use_device",
]
