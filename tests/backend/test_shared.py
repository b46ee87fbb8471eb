"""Variables that stay on the device."""

import copy
from collections.abc import Callable

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch
from pytensor.tensor.sharedvar import TensorSharedVariable

from tandem.backend import device_shared
from tests.support.check_function import DEVICE


def test_is_a_shared_variable_of_static_shape() -> None:
    variable = device_shared(np.zeros((2, 3), "float32"), "w")
    assert isinstance(variable, TensorSharedVariable)
    assert variable.type.shape == (2, 3)
    assert variable.type.dtype == "float32"
    assert variable.name == "w"


@pytest.mark.parametrize("shape", [(4,), ()])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32", "float64"])
def test_holds_any_dtype(dtype: str, shape: tuple[int, ...]) -> None:
    value = np.resize(np.arange(4).astype(dtype), shape)
    got = device_shared(value).get_value()
    assert (got.dtype, got.shape) == (value.dtype, shape)
    np.testing.assert_array_equal(got, value)


def test_only_a_borrowed_value_is_the_variables_memory() -> None:
    value = np.zeros(3)
    variable = device_shared(value)
    for independent in (value, variable.get_value()):
        independent[:] = 1
    np.testing.assert_array_equal(variable.get_value(), 0)
    variable.get_value(borrow=True)[:] = 1
    np.testing.assert_array_equal(variable.get_value(), 1)
    assert variable.get_value(borrow=True, return_internal_type=True) is variable.buffer
    copied = variable.get_value(return_internal_type=True)
    assert copied.data_ptr() != variable.buffer.data_ptr()


def test_memory_sees_every_change() -> None:
    block = np.zeros(8, "float32")
    variable = device_shared(np.float32([1, 2, 3]), memory=block[2:5])
    np.testing.assert_array_equal(block, [0, 0, 1, 2, 3, 0, 0, 0])
    variable.set_value(np.float32([4, 5, 6]), borrow=True)
    np.testing.assert_array_equal(block[2:5], [4, 5, 6])
    pytensor.function([], updates=[(variable, variable * 2)], mode=DEVICE)()
    np.testing.assert_array_equal(block[2:5], [8, 10, 12])
    block[2:5] = 7
    for same in (variable, device_shared(None, "kept", memory=block[2:5])):
        np.testing.assert_array_equal(same.get_value(), 7)
        assert same.buffer.data_ptr() == block[2:].ctypes.data
    variable.zero()
    np.testing.assert_array_equal(block, 0)


def test_memory_may_be_a_tensor() -> None:
    block = torch.zeros(6)
    one, other = (
        device_shared(np.ones(3, "float32"), memory=block[:3]),
        device_shared(None, memory=block[3:]),
    )
    np.testing.assert_array_equal(block.numpy(), [1, 1, 1, 0, 0, 0])
    assert one.buffer.untyped_storage().data_ptr() != other.buffer.untyped_storage().data_ptr()


def test_memory_may_be_strided() -> None:
    block = np.zeros((3, 4))
    variable = device_shared(np.arange(3.0), memory=block[:, 1])
    np.testing.assert_array_equal(block[:, 1], [0, 1, 2])
    assert not block[:, 0].any()
    np.testing.assert_array_equal(variable.get_value(), [0, 1, 2])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((3, 2), "float32"), r"w holds float32 of shape \(2, 3\); got.*shape \(3, 2\)"),
        (np.zeros(6, "float32"), r"got float32 of shape \(6,\)"),
        (np.zeros((1, 3), "float32"), r"got float32 of shape \(1, 3\)"),
        (np.zeros((2, 3), "float64"), r"w holds float32.*got float64 of shape \(2, 3\)"),
        (np.zeros((2, 3), "complex64"), "got complex64"),
    ],
)
def test_set_value_refuses_what_does_not_fit(value: np.ndarray, message: str) -> None:
    variable = device_shared(np.ones((2, 3), "float32"), "w")
    with pytest.raises(TypeError, match=message):
        variable.set_value(value)
    np.testing.assert_array_equal(variable.get_value(), 1)


@pytest.mark.parametrize(
    "value",
    [np.int8([1, 2]), [1, 2], np.float64([2, 1])[::-1], np.frombuffer(np.float64([1, 2]).tobytes()),
     torch.tensor([1, 2], dtype=torch.float64)],
)  # fmt: skip
def test_set_value_converts_where_nothing_is_lost(value: object) -> None:
    variable = device_shared(np.zeros(2, "float64"))
    variable.set_value(value)
    np.testing.assert_array_equal(variable.get_value(), [1, 2])
    assert variable.get_value().dtype == "float64"


@pytest.mark.parametrize(
    ("value", "memory", "message"),
    [
        (np.zeros(3), np.zeros(4), r"shape \(3,\); its memory is torch.float64 of shape \(4,\)"),
        (np.zeros(3), np.zeros(3, "float32"), "float64 of shape.*memory is torch.float32"),
        (None, None, "needs a value"),
        (None, np.zeros(3)[::-1], "strides"),
        (None, np.zeros(3, ">f8"), "dtype"),
        (None, np.frombuffer(bytes(24)), "writable"),
        (np.zeros(3, "datetime64[s]"), None, "datetime64"),
    ],
)
def test_bad_memory_is_refused(value: object, memory: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        device_shared(value, memory=memory)


def test_arithmetic_builds_graphs() -> None:
    variable = device_shared(np.arange(3.0))
    assert pytensor.function([], (variable * 2).sum(), mode=DEVICE)() == 6
    (gradient,) = pytensor.grad((variable**2).sum(), [variable])
    np.testing.assert_array_equal(pytensor.function([], gradient, mode=DEVICE)(), [0, 2, 4])


def test_clone_shares_the_value() -> None:
    variable = device_shared(np.zeros(3), "w")
    clone = variable.clone()
    clone.set_value(np.ones(3))
    np.testing.assert_array_equal(variable.get_value(), 1)
    assert copy.copy(variable).container is variable.container


def test_updates_need_the_variable_s_type() -> None:
    variable = device_shared(np.zeros((2, 3), "float32"))
    with pytest.raises(TypeError):
        pytensor.function([], updates=[(variable, pt.zeros((2, 3), "float64"))], mode=DEVICE)


@pytest.mark.parametrize(
    "change", [lambda x: x.T, lambda x: x[::-1], lambda x: x[:, ::-1], lambda x: x, np.copy]
)
def test_set_value_takes_a_view_of_the_variables_own_memory(change: Callable) -> None:
    start = np.arange(9.0).reshape(3, 3)
    a = device_shared(start)
    view = change(a.get_value(borrow=True))
    for value in (view, torch.from_numpy(view) if min(view.strides) > 0 else view):
        a.set_value(start)
        a.set_value(value)
        np.testing.assert_array_equal(a.get_value(), change(start))


def test_set_value_takes_a_view_of_another_variables_overlapping_memory() -> None:
    block = np.arange(6.0)
    first, second = (device_shared(None, memory=part) for part in (block[:5], block[1:]))
    second.set_value(first.get_value(borrow=True))
    np.testing.assert_array_equal(block, [0, 0, 1, 2, 3, 4])


@pytest.mark.parametrize("value", [np.arange(6.0).reshape(2, 3), np.float32(3)])
def test_a_deep_copy_has_memory_of_its_own(value: np.ndarray) -> None:
    a = device_shared(value, "a")
    copied = copy.deepcopy(a)
    assert type(copied) is type(a)
    assert copied.name == "a"
    copied.set_value(value + 1)
    np.testing.assert_array_equal(a.get_value(), value)
    np.testing.assert_array_equal(copied.get_value(), value + 1)


def test_a_deep_copy_of_a_function_updates_variables_of_its_own() -> None:
    """As PyTensor's own shared variables do."""
    for make in (device_shared, pytensor.shared):
        a = make(np.zeros(3), "a")
        step = pytensor.function([], a.sum(), updates=[(a, a + 1)], mode=DEVICE)
        copied = copy.deepcopy(step)
        assert [copied(), copied(), copied(), step()] == [0, 3, 6, 0]
        np.testing.assert_array_equal(a.get_value(), 1)
        both = copy.deepcopy([a, step])
        both[1]()
        np.testing.assert_array_equal(a.get_value(), 1)
