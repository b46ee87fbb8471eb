"""Runs a graph on PyTensor's own backend and on a device, and compares."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytensor
import torch
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Variable

from tandem.backend import DeviceLinker, device_mode

PYTHON = Mode(linker="py", optimizer=None)
"""PyTensor's own backend at its plainest: every Op's `perform`, no rewrites."""

DEVICE = device_mode("cpu")
PLAIN_DEVICE = Mode(DeviceLinker(torch.device("cpu")), optimizer=None)
"""The device without rewrites: every node of the graph is lowered as it was built."""


def assert_same(got: Any, expected: Any, what: str = "") -> None:
    """Compare two arrays: whole numbers exactly, floats to rounding."""
    assert isinstance(got, np.ndarray), what
    assert got.dtype == np.asarray(expected).dtype, what
    assert got.shape == np.shape(expected), what
    if got.dtype.kind in "fc":
        tolerance = {2: 2e-3, 4: 2e-6, 8: 1e-12}[got.real.dtype.itemsize]
        finite = np.abs(np.asarray(expected)[np.isfinite(expected)].astype(got.dtype))
        # A sum's rounding error is relative to its largest terms.
        scale = max(1, finite.max(initial=0))
        np.testing.assert_allclose(got, expected, tolerance, tolerance * scale, err_msg=what)
    else:
        np.testing.assert_array_equal(got, expected, err_msg=what)


def compile_graph(
    inputs: list[Variable], outputs: list[Variable], mode: Mode, **keywords: Any
) -> Callable[..., list[np.ndarray]]:
    """Compile a function, of which some inputs may be unused."""
    # PyTensor runs the graph inside an Op such as Softmax in its default mode, which compiles.
    with pytensor.config.change_flags(mode="FAST_COMPILE", cxx=""):
        return pytensor.function(inputs, outputs, mode=mode, on_unused_input="ignore", **keywords)


def results(
    inputs: list[Variable], outputs: list[Variable], values: list[Any], mode: Mode
) -> list[np.ndarray]:
    """Compile and call."""
    with pytensor.config.change_flags(mode="FAST_COMPILE", cxx=""):
        return compile_graph(inputs, outputs, mode)(*values)


def check_equal(inputs: list[Variable], outputs: list[Variable], *calls: Sequence[Any]) -> None:
    """Compare the device with PyTensor's own backend on the values of each call."""
    reference = compile_graph(inputs, outputs, PYTHON)
    expected = [reference(*values) for values in calls]
    for mode in (PLAIN_DEVICE, DEVICE):
        function = compile_graph(inputs, outputs, mode)
        for values, wanted in zip(calls, expected, strict=True):
            for output, one, other in zip(outputs, function(*values), wanted, strict=True):
                assert_same(one, other, f"{output} of {values}")
