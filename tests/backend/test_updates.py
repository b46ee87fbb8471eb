"""Updates: in place on the device, as if all had been computed before the first was written."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch
from pytensor.compile.io import Out
from pytensor.tensor.sharedvar import TensorSharedVariable

from tandem.backend import device_shared
from tandem.backend.lowering import updates
from tandem.ops import adam_step, momentum_step
from tests.support.check_function import DEVICE

START = np.arange(6.0).reshape(2, 3)
OTHER = START + 10


def ordinary(value: np.ndarray, name: str) -> TensorSharedVariable:
    return pytensor.shared(value, name, shape=value.shape)


PLACES: list[Callable[[np.ndarray, str], TensorSharedVariable]] = [device_shared, ordinary]


def address(variable: TensorSharedVariable) -> int:
    return variable.container.storage[0].data_ptr()


@pytest.fixture(params=PLACES, ids=["device", "ordinary"])
def a(request: pytest.FixtureRequest) -> TensorSharedVariable:
    return request.param(START, "a")


@pytest.fixture(params=PLACES, ids=["device", "ordinary"])
def b(request: pytest.FixtureRequest) -> TensorSharedVariable:
    return request.param(OTHER, "b")


def test_update_keeps_the_address_and_counts() -> None:
    a = device_shared(START, "a")
    before = address(a)
    step = pytensor.function([], updates=[(a, a + 1)], mode=DEVICE)
    for _ in range(3):
        assert step() in (None, [])
    assert address(a) == before
    np.testing.assert_array_equal(a.get_value(), START + 3)


def test_elementwise_update_is_computed_where_it_belongs() -> None:
    a, g = device_shared(START, "a"), device_shared(OTHER, "g")
    x, y = (pt.tensor(shape=shape, dtype="float64") for shape in ((3, 3), (2, 3)))
    step = pytensor.function([x, y], updates=[(a, a * 2 - y), (g, g + pt.dot(y, x))], mode=DEVICE)
    source = step.vm.program.source
    assert ".copy_(" not in source
    assert ".clone()" not in source
    step(np.eye(3), START)
    np.testing.assert_array_equal(a.get_value(), START)
    np.testing.assert_array_equal(g.get_value(), OTHER + START)


def test_product_is_written_to_a_variable_that_is_not_read() -> None:
    a = device_shared(np.zeros((2, 2)), "a")
    x = pt.tensor("x", shape=(2, 3), dtype="float64")
    gradient = pytensor.function([x], updates=[(a, pt.dot(x, x.T))], mode=DEVICE)
    assert ".copy_(" not in gradient.vm.program.source
    gradient(START)
    np.testing.assert_array_equal(a.get_value(), START @ START.T)
    for other, expected in (
        (pt.dot(a, a), START @ START.T @ START @ START.T),
        (pt.special.softmax(a, axis=1), [[0, 1], [0, 1]]),
    ):
        step = pytensor.function([], updates=[(a, other)], mode=DEVICE)
        assert step.vm.program.source.count(".copy_(") == 1
        assert ".clone()" not in step.vm.program.source
        step()
        np.testing.assert_allclose(a.get_value(), expected, atol=1e-12)


def test_result_that_views_an_update_is_independent() -> None:
    a, b = device_shared(START, "a"), device_shared(OTHER.T, "b")
    new = a * 2
    step = pytensor.function([], [new.T, new[0]], updates=[(a, new), (b, new.T)], mode=DEVICE)
    transposed, row = step()
    a.zero()
    np.testing.assert_array_equal(transposed, 2 * START.T)
    np.testing.assert_array_equal(row, 2 * START[0])
    np.testing.assert_array_equal(b.get_value(), 2 * START.T)


def test_swap(a: TensorSharedVariable, b: TensorSharedVariable) -> None:
    swap = pytensor.function([], updates=[(a, b), (b, a)], mode=DEVICE)
    for of_a, of_b in ((OTHER, START), (START, OTHER)):
        swap()
        np.testing.assert_array_equal(a.get_value(), of_a)
        np.testing.assert_array_equal(b.get_value(), of_b)


def test_rotation_of_three() -> None:
    variables = [device_shared(START + 10 * k, f"v{k}") for k in range(3)]
    rotated = variables[1:] + variables[:1]
    pytensor.function([], updates=list(zip(variables, rotated, strict=True)), mode=DEVICE)()
    for k, variable in enumerate(variables):
        np.testing.assert_array_equal(variable.get_value(), START + 10 * ((k + 1) % 3))


def test_one_expression_to_two_variables(a: TensorSharedVariable, b: TensorSharedVariable) -> None:
    value = a * 2
    step = pytensor.function([], value, updates=[(a, value), (b, value)], mode=DEVICE)
    returned = step()
    for result in (returned, a.get_value(), b.get_value()):
        np.testing.assert_array_equal(result, START * 2)
    a.set_value(OTHER)
    np.testing.assert_array_equal(b.get_value(), START * 2)
    np.testing.assert_array_equal(returned, START * 2)


def test_old_value_is_returned_and_does_not_follow_updates(a: TensorSharedVariable) -> None:
    outputs = [Out(value, borrow=True) for value in (a, a.T, a[0])]
    step = pytensor.function([], outputs, updates=[(a, a + 1)], mode=DEVICE)
    whole, transposed, row = step()
    np.testing.assert_array_equal(a.get_value(), START + 1)
    step()
    np.testing.assert_array_equal(whole, START)
    np.testing.assert_array_equal(transposed, START.T)
    np.testing.assert_array_equal(row, START[0])


def test_old_value_is_read_by_another_update(
    a: TensorSharedVariable, b: TensorSharedVariable
) -> None:
    c = device_shared(np.zeros((3, 2)), "c")
    pytensor.function([], updates=[(a, a - 0.1 * a * a.sum()), (b, b + a), (c, a.T)], mode=DEVICE)()
    np.testing.assert_allclose(a.get_value(), START - 0.1 * START * START.sum())
    np.testing.assert_array_equal(b.get_value(), OTHER + START)
    np.testing.assert_array_equal(c.get_value(), START.T)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a[::-1], lambda a: a[:, ::-1], lambda a: a.T, lambda a: a, lambda a: a.T[::-1],
        lambda a: pt.roll(a, 1, axis=0), lambda a: pt.fill(a, a[0]),
        lambda a: pt.alloc(a[:, :1], 3, 3), lambda a: a.reshape((9,)).reshape((3, 3)),
        lambda a: pt.set_subtensor(a[0], a[1]), lambda a: pt.cast(a, "float64"),
    ],
)  # fmt: skip
def test_update_that_views_itself(change: Callable) -> None:
    start = np.arange(9.0).reshape(3, 3)
    a = device_shared(start, "a")
    expected = pytensor.function([], change(pt.constant(start)), mode="FAST_COMPILE")()
    pytensor.function([], updates=[(a, change(a))], mode=DEVICE)()
    np.testing.assert_array_equal(a.get_value(), expected)


def test_update_to_itself_moves_nothing() -> None:
    a, b = device_shared(START, "a"), device_shared(OTHER, "b")
    step = pytensor.function([], updates=[(a, a), (b, b + a)], mode=DEVICE)
    assert ".copy_(" not in step.vm.program.source
    step()
    np.testing.assert_array_equal(a.get_value(), START)
    np.testing.assert_array_equal(b.get_value(), START + OTHER)


def test_variables_side_by_side_in_one_block() -> None:
    block = np.zeros(16, "float32")
    a = device_shared(np.float32([1, 2, 3, 4]), "a", memory=block[:4])
    b = device_shared(np.full((2, 4), 5, "float32"), "b", memory=block[8:].reshape(2, 4))
    step = pytensor.function(
        [], [a.sum(), b[0]], updates=[(a, b.sum(axis=0)), (b, b + a)], mode=DEVICE
    )
    total, row = step()
    assert total == 10
    np.testing.assert_array_equal(row, [5, 5, 5, 5])
    np.testing.assert_array_equal(block[:4], [10, 10, 10, 10])
    np.testing.assert_array_equal(block[4:8], 0)
    np.testing.assert_array_equal(block[8:].reshape(2, 4), [[6, 7, 8, 9]] * 2)


def test_a_variable_over_another_ones_memory_is_copied_before_the_write() -> None:
    block = np.arange(6.0)
    whole, part = (
        device_shared(None, "whole", memory=block),
        device_shared(None, "part", memory=block[2:4]),
    )
    apart = device_shared(np.zeros(6), "apart")
    step = pytensor.function([], part, updates=[(whole, whole + 1), (apart, whole)], mode=DEVICE)
    np.testing.assert_array_equal(step(), [2, 3])
    np.testing.assert_array_equal(apart.get_value(), np.arange(6.0))
    np.testing.assert_array_equal(part.get_value(), [3, 4])


def test_givens_put_a_device_variable_for_an_ordinary_one() -> None:
    p = pytensor.shared(START, "p")
    placed = device_shared(START, "placed")
    x = pt.dmatrix("x")
    cost = ((p - x) ** 2).sum()
    before = address(placed)
    step = pytensor.function(
        [x],
        cost,
        updates=[(placed, p - 0.5 * pytensor.grad(cost, p))],
        givens={p: placed},
        mode=DEVICE,
    )
    assert step(OTHER) == ((START - OTHER) ** 2).sum()
    np.testing.assert_array_equal(placed.get_value(), OTHER)
    np.testing.assert_array_equal(p.get_value(), START)
    assert address(placed) == before


def test_ordinary_shared_variable_gets_an_array_of_its_own() -> None:
    a = pytensor.shared(START, "a")
    step = pytensor.function([], a * 3, updates=[(a, a * 3)], mode=DEVICE)
    returned = step()
    assert isinstance(a.get_value(borrow=True), np.ndarray)
    assert not np.shares_memory(returned, a.get_value(borrow=True))


def test_update_of_another_shape_is_refused() -> None:
    a = device_shared(np.zeros(3), "a")
    x = pt.dvector("x")
    step = pytensor.function([x], updates=[(a, x * 2)], mode=DEVICE)
    with pytest.raises(Exception, match="shape"):
        step(np.ones(1))
    np.testing.assert_array_equal(a.get_value(), 0)


def test_nothing_is_written_when_an_update_fails() -> None:
    a, b = device_shared(np.zeros(3), "a"), device_shared(np.zeros(3), "b")
    i = pt.lscalar("i")
    step = pytensor.function([i], updates=[(a, a + 1), (b, b[i] + b)], mode=DEVICE)
    with pytest.raises(IndexError):
        step(5)
    np.testing.assert_array_equal(a.get_value(), 0)
    step(1)
    np.testing.assert_array_equal(a.get_value(), 1)


def test_copies_with_a_swapped_variable_and_without_updates() -> None:
    a, b = device_shared(START, "a"), device_shared(OTHER, "b")
    rate = device_shared(np.float64(2), "rate")
    step = pytensor.function([], a.sum(), updates=[(a, a * rate)], mode=DEVICE)
    other = step.copy(swap={a: b})
    before = address(b), address(rate)
    assert other() == OTHER.sum()
    np.testing.assert_array_equal(b.get_value(), OTHER * 2)
    np.testing.assert_array_equal(a.get_value(), START)
    assert (address(b), address(rate)) == before
    rate.set_value(3)
    other()
    step()
    np.testing.assert_array_equal(b.get_value(), OTHER * 6)
    np.testing.assert_array_equal(a.get_value(), START * 3)
    look = step.copy(delete_updates=True)
    assert look() == look() == 3 * START.sum()


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "whole": lambda block: block[:3].reshape(-1)[:12].reshape(3, 4),
    "columns": lambda block: block[:3, ::2],
    "rows": lambda block: block[::2, :4],
    "transposed": lambda block: block.reshape(-1)[:12].reshape(4, 3).T,
    "transposed columns": lambda block: block[:4, :3].T,
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_momentum_step_on_parts_of_memory(layout: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    blocks = [rng.normal(size=(6, 8)).astype(dtype) for _ in range(3)]
    before = [block.copy() for block in blocks]
    w, v, g = (device_shared(None, memory=LAYOUTS[layout](block)) for block in blocks)
    rate = np.dtype(dtype).type(0.1)
    new_w, new_v = momentum_step(w, v, g, rate, 0.9, 0.01, False)
    pytensor.function([], updates=[(w, new_w), (v, new_v)], mode=DEVICE)()
    weight, velocity, gradient = (LAYOUTS[layout](block) for block in before)
    velocity[:] = 0.9 * velocity - 0.1 * (gradient + 0.01 * weight)
    weight += velocity
    for block, expected in zip(blocks, before, strict=True):
        np.testing.assert_allclose(block, expected, rtol=1e-5)
        outside = np.ones((6, 8), bool)
        LAYOUTS[layout](outside)[:] = False
        np.testing.assert_array_equal(block[outside], expected[outside])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rate", [0.0, 1e-12, 1e-10, 1.5e-9, 1e-3, 3.0])
def test_momentum_step_keeps_every_bit_of_the_rate(rate: float, dtype: str) -> None:
    rate = np.dtype(dtype).type(rate)
    w, v = (device_shared(np.zeros(4, dtype)) for _ in range(2))
    new_w, new_v = momentum_step(w, v, np.ones(4, dtype), rate, 0.9, 0.0, False)
    pytensor.function([], updates=[(w, new_w), (v, new_v)], mode=DEVICE)()
    np.testing.assert_array_equal(v.get_value(), -rate)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adam_step_on_parts_of_memory(
    layout: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By PyTorch's kernel, in one pass, where the parts fill their memory."""
    called: list[float] = []

    def fused(*tensors: Any, **settings: Any) -> None:
        called.append(settings["lr"])
        torch.ops.aten._fused_adamw_(*tensors, **settings)

    monkeypatch.setattr(updates, "aten", SimpleNamespace(_fused_adamw_=fused))
    rng = np.random.default_rng(0)
    blocks = [rng.random((6, 8)).astype(dtype) for _ in range(4)]
    before = [block.copy() for block in blocks]
    w, m, v, g = (device_shared(None, memory=LAYOUTS[layout](block)) for block in blocks)
    rate, factor, epsilon = (np.dtype(dtype).type(number) for number in (0.1, 0.5, 1e-3))
    new = adam_step(
        w, (m, v), g, rate, factor, epsilon, betas=(0.9, 0.99), decay=0.2, is_decoupled=True
    )
    pytensor.function([], updates=list(zip((w, m, v), new, strict=True)), mode=DEVICE)()
    assert len(called) == ("columns" not in layout and layout != "rows")
    weight, first, second, gradient = (LAYOUTS[layout](block) for block in before)
    first[:] = 0.9 * first + 0.1 * gradient
    second[:] = 0.99 * second + 0.01 * gradient**2
    weight *= 1 - 0.1 * 0.2
    weight -= 0.05 * first / (np.sqrt(second) + 1e-3)
    for block, expected in zip(blocks, before, strict=True):
        np.testing.assert_allclose(block, expected, rtol=1e-5)
        outside = np.ones((6, 8), bool)
        LAYOUTS[layout](outside)[:] = False
        np.testing.assert_array_equal(block[outside], expected[outside])
