"""A device's mode is a PyTensor mode like any other."""

import gc
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch
from pytensor.compile.mode import Mode
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.backend import as_device, as_tensor, device_mode, device_shared, set_threads
from tandem.errors import InputError
from tests.support.check_function import DEVICE, PLAIN_DEVICE


def test_is_a_mode() -> None:
    assert isinstance(DEVICE, Mode)
    assert "cpu" in repr(DEVICE.linker)
    assert "cpu" in repr(DEVICE.excluding("fusion").linker)


def test_outputs_are_arrays_of_the_right_dtype() -> None:
    x = pt.fvector("x")
    function = pytensor.function(
        [x], [x * 2, x.sum(), x > 1, pt.argmax(x), x.shape[0]], mode=DEVICE
    )
    outputs = function(np.float32([1, 2]))
    assert all(type(output) is np.ndarray for output in outputs)
    assert [output.dtype.name for output in outputs] == [
        "float32", "float32", "bool", "int64", "int64",
    ]  # fmt: skip
    assert [output.shape for output in outputs] == [(2,), (), (2,), (), ()]


def test_outputs_are_independent() -> None:
    x = pt.dmatrix("x")
    y = x * 2
    function = pytensor.function([x], [y, y, y.T, y[0], x, x.T, pt.alloc(y[0], 4, 3)], mode=DEVICE)
    value = np.arange(6.0).reshape(2, 3)
    outputs = function(value)
    expected = [output.copy() for output in outputs]
    for place, output in enumerate(outputs):
        assert not np.shares_memory(output, value)
        output += 100
        for other in range(place + 1, len(outputs)):
            np.testing.assert_array_equal(outputs[other], expected[other])
    np.testing.assert_array_equal(value, np.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(outputs[-1], expected[-1] + 100)


def test_fresh_outputs_are_not_copied_and_intermediates_are_freed() -> None:
    x = pt.dmatrix("x")
    y = pt.dot(x, x)
    function = pytensor.function([x], [pt.dot(y, y).sum(), y.sum(), pt.exp(x)], mode=DEVICE)
    source = function.vm.program.source
    assert ".clone()" not in source
    assert source.count("del ") >= 2
    assert source.index("del ") < source.index("return")


def test_inputs_and_outputs_are_those_of_any_mode() -> None:
    x, n = pt.dscalar("x"), pt.lscalar("n")
    function = pytensor.function([x, n], [x * n, x], mode=DEVICE)
    product, same = function(n=3, x=2.5)
    assert (product, same) == (7.5, 2.5)
    assert product.shape == same.shape == ()
    assert isinstance(pytensor.function([x], x + 1, mode=DEVICE)(1.0), np.ndarray)
    assert isinstance(pytensor.function([x], [x + 1], mode=DEVICE)(1.0), list)
    assert pytensor.function([], mode=DEVICE)() in (None, [])
    assert pytensor.function([], [], mode=DEVICE)() == []


def test_constants_as_outputs() -> None:
    function = pytensor.function([], [pt.constant([1.0, 2.0]), pt.constant(3)], mode=DEVICE)
    vector, number = function()
    vector[:] = 0
    np.testing.assert_array_equal(function()[0], [1, 2])
    assert number == 3
    assert number.dtype == "int8"


def test_inputs_are_checked_unless_trusted() -> None:
    x = pt.fmatrix("x")
    checked, trusting = (
        pytensor.function([x], (x * 2).sum(), mode=DEVICE, trust_input=trust)
        for trust in (False, True)
    )
    for wrong in (np.ones(3, "float32"), np.ones((3, 3), "float64")):
        with pytest.raises(TypeError):
            checked(wrong)
    assert trusting(np.ones((2, 2), "float32")) == 8
    assert trusting(torch.ones(3, 2)) == 12


def test_inputs_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    x = pt.dvector("x")
    function = pytensor.function([x], x[0], mode=DEVICE)
    seen, original = [], torch.from_numpy
    monkeypatch.setattr(
        torch, "from_numpy", lambda array: seen.append(array.ctypes.data) or original(array)
    )
    value = np.ones(3)
    function(value)
    assert seen == [value.ctypes.data]


@pytest.mark.parametrize(
    "value",
    [np.arange(6.0)[::-1], np.arange(12.0)[::2], np.arange(6.0).astype(">f8"), np.zeros(6),
     np.broadcast_to(np.float64(3), 6)],
)  # fmt: skip
def test_unusual_arrays(value: np.ndarray) -> None:
    x = pt.dvector("x")
    function = pytensor.function([x], x * 2, mode=DEVICE, trust_input=True)
    np.testing.assert_array_equal(function(value), value * 2)


def test_read_only_input_is_read_without_a_warning() -> None:
    x = pt.dvector("x")
    a = device_shared(np.zeros(3))
    function = pytensor.function([x], [x, x + 1, -x], updates=[(a, x)], mode=DEVICE)
    value = np.frombuffer(np.arange(3.0).tobytes())
    assert not value.flags.writeable
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs = function(value)
    for output in outputs:
        output += 1
    a.set_value(np.ones(3))
    np.testing.assert_array_equal(value, [0, 1, 2])


def test_no_input_is_written() -> None:
    """Intermediates are written over once they are dead; inputs and constants never are."""
    x = pt.tensor("x", shape=(2, 3), dtype="float64")
    c = pt.constant(np.ones((2, 3)))
    y = pt.exp(x) + c
    function = pytensor.function([x], [pt.tanh(y * 2 - x) / y, y + c], mode=DEVICE)
    value = np.arange(6.0).reshape(2, 3)
    first = function(value)
    np.testing.assert_array_equal(value, np.arange(6.0).reshape(2, 3))
    for one, other in zip(first, function(value), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_number_on_the_host_is_not_written_over() -> None:
    """It becomes a tensor once, and a view of that is no memory of its own."""
    x, y = pt.dmatrices("x", "y")
    outputs = [x.sum() / x.shape[0], y * (x.shape[0] + 1)]
    for mode in (DEVICE, PLAIN_DEVICE):
        mean, scaled = pytensor.function([x, y], outputs, mode=mode)(
            np.ones((3, 4)), np.ones((2, 2))
        )
        assert mean == 4
        np.testing.assert_array_equal(scaled, [[4, 4], [4, 4]])


def test_shapes_that_do_not_fit_are_a_value_error() -> None:
    x, y = pt.dmatrix("x"), pt.dmatrix("y")
    for z in (x @ y, pt.join(0, x, y), x + y):
        function = pytensor.function([x, y], z, mode=DEVICE)
        with pytest.raises(ValueError, match=r"(?i)size|shape") as error:
            function(np.ones((2, 3)), np.ones((2, 4)))
        assert any("PyTorch computed" in note for note in error.value.__notes__)


def test_dead_intermediates_are_written_over() -> None:
    x = pt.tensor("x", shape=(2, 3), dtype="float64")
    y = pt.cos(x)
    function = pytensor.function([x], [pt.exp(pt.sin(y * 2) + 1), y], mode=DEVICE)
    results = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, call, types, arguments=(), keywords=None):
            result = call(*arguments, **(keywords or {}))
            results.append((str(call).split(".")[1], result.data_ptr()))
            return result

    with Recorder():
        function(np.zeros((2, 3)))
    addresses = dict(results)
    assert addresses["mul"] == addresses["sin"] == addresses["add"] == addresses["exp"]
    assert addresses["mul"] != addresses["cos"]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_is_flat() -> None:
    x = pt.fmatrix("x")
    a = device_shared(np.zeros((256, 256), "float32"))
    b = pytensor.shared(np.zeros((256, 256), "float32"))
    function = pytensor.function(
        [x], pt.dot(x, a) + b, updates=[(a, a + x), (b, b * 0.5 + x)], mode=DEVICE
    )
    value = np.ones((256, 256), "float32")
    for _ in range(20):
        function(value)
    gc.collect()
    before = resident_bytes()
    for _ in range(200):
        function(value)
    # One array left behind in each call would be 52 MB.
    assert resident_bytes() - before < 16e6


def test_functions_are_forgotten() -> None:
    """A function's source goes when the function does."""
    import linecache

    x = pt.dvector("x")
    function = pytensor.function([x], x * 3, mode=DEVICE)
    file = function.vm.program.file
    assert file in linecache.cache
    del function
    gc.collect()
    assert file not in linecache.cache


def test_every_node_is_computed_once_after_its_inputs() -> None:
    x = pt.tensor("x", shape=(3, 3), dtype="float64")
    a = device_shared(np.zeros((3, 3)))
    y = pt.dot(x, x)
    function = pytensor.function([x], y[x.argmax() // 9].sum(), updates=[(a, a + y)], mode=DEVICE)
    computed = list(function.vm.program.nodes.values())
    assert sorted(map(id, computed)) == sorted(map(id, function.maker.fgraph.apply_nodes))
    known: set = set()
    for node in computed:
        assert all(v.owner is None or v in known for v in node.inputs)
        known.update(node.outputs)


@pytest.mark.parametrize("name", ["cuda:97", "tpu", "gpu0", "meta", "cpu:3"])
def test_unknown_device_is_named_with_those_there_are(name: str) -> None:
    with pytest.raises(InputError, match=f"'{name}'.*this machine has cpu"):
        device_mode(name)
    with pytest.raises(InputError, match=name):
        device_shared(np.zeros(2), device=name)
    assert as_device("cpu") == as_device(torch.device("cpu")) == torch.device("cpu")


def test_a_tensor_over_memory_is_the_same_memory() -> None:
    memory = np.zeros(3, np.float32)
    as_tensor(memory, "cpu")[1] = 2
    assert memory.tolist() == [0, 2, 0]
    with pytest.raises(TypeError, match="memory of list does not lie on cpu"):
        as_tensor([1.0], "cpu")


def test_threads() -> None:
    code = (
        "from tandem.backend import set_threads; import torch; set_threads(1);"
        "assert torch.get_num_threads() == 1; set_threads(2); assert torch.get_num_threads() == 2;"
        "assert torch.get_num_interop_threads() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with pytest.raises(InputError, match="at least 1, not 0"):
        set_threads(0)


@pytest.mark.slow
def test_freed_memory_is_kept() -> None:
    """Large results lie in pages that the system has given once, not anew for each."""
    code = """
import resource, sys
from tandem.backend import keep_freed_memory
import torch
if not keep_freed_memory():
    sys.exit(3)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
x = torch.ones(1 << 24)
pages = x.nbytes // resource.getpagesize()
y = x * 2; del y
before = faults()
for _ in range(20):
    y = x * 2; del y
# A block that something small has nibbled at is given out anew, which may happen a few times.
assert faults() - before < 10 * pages, (faults() - before) / pages
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=120)
    if done.returncode == 3:
        pytest.skip("needs glibc, whose malloc can be told")
    assert done.returncode == 0


def test_autograd_records_nothing() -> None:
    a = device_shared(np.ones(3))
    a.buffer.requires_grad_(True)
    output = pytensor.function([], a * 2, updates=[(a, a + 1)], mode=DEVICE)()
    a.buffer.requires_grad_(False)
    np.testing.assert_array_equal(output, 2)
    np.testing.assert_array_equal(a.get_value(), 2)
