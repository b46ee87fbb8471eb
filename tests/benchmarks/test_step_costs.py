"""What a training step costs, counted without a clock: copies, and memory that is asked for."""

import json
import math
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.host_model import host_model, noise_slot
from examples.resident_step import Sizes

SIZES = Sizes(batch=8, crop=99, stored=110, classes=10, width=0.25)
COPIES = ("clone", "copy_", "_to_copy", "contiguous", "cat", "stack", "index")


class CountCopies(TorchDispatchMode):
    """Counts the bytes of results of operators that only move numbers about."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in COPIES:
            self.bytes[name] += result.nbytes
            self.sizes.append(result.numel())
        return result


def test_a_step_copies_no_parameter_and_an_update_nothing() -> None:
    model, slot = host_model(SIZES), noise_slot(SIZES)
    parameters = {v.buffer.numel() for v in model.weights.values() if v.type.ndim > 1}
    model.compute_gradients(slot, epoch=0)
    with CountCopies() as gradients:
        model.compute_gradients(slot, epoch=0)
    with CountCopies() as update:
        model.update(0.01)
    assert sum(update.bytes.values()) == 0
    # The gradient of a convolution's filters comes in memory of PyTorch's, and is copied to its
    # place; those of the fully connected layers are computed there, but for one of few columns,
    # whose transpose is computed on some processors.
    copied = [size for size in gradients.sizes if size in parameters]
    filters = {v.buffer.numel() for v in model.weights.values() if v.type.ndim == 4}
    narrow = {math.prod(v.type.shape) for v in model.weights.values() if v.type.shape[1:] == (10,)}
    assert narrow
    assert set(copied) <= filters | narrow
    # Besides, the crops and what goes into and out of pooling and normalisation: no more than that.
    shapes = SIZES.network().shapes
    activations = 4 * SIZES.batch * sum(math.prod(shape) for shape in shapes.values())
    assert sum(gradients.bytes.values()) < 3 * activations


_STEADY = """
import ctypes, json, sys
from benchmarks.host_model import host_model, noise_slot, train_step
from examples.resident_step import Sizes
from tandem.backend import keep_freed_memory, set_threads

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost")]

libc = ctypes.CDLL(None)
if not hasattr(libc, "mallinfo2") or not keep_freed_memory():
    print(json.dumps(None))
    sys.exit()
libc.mallinfo2.restype = Info
set_threads(1)
sizes = Sizes(batch=8, crop=99, stored=110, classes=10, width=0.25)
model, slot = host_model(sizes), noise_slot(sizes)
found = []
for step in range(25):
    train_step(model, slot)
    info = libc.mallinfo2()
    found.append(info.arena + info.hblkhd)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_after_warming_up_no_memory_is_asked_of_the_system() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _STEADY], capture_output=True, text=True, check=True, timeout=200
    )
    sizes = json.loads(result.stdout)
    if sizes is None:
        pytest.skip("this C library doesn't say what it has asked for")
    # The allocator settles by pieces; a step's results alone are some ten megabytes.
    assert sizes[5] > 10_000_000
    assert sizes[-1] - sizes[5] < 1_000_000, sizes
