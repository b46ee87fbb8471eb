"""Graphs that are sent to another process, the Ops that they need, and what that process does."""

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.mode import Mode
from pytensor.compile.ops import wrap_py
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.ifelse import ifelse
from pytensor.scan.utils import until
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.linalg import Cholesky

from tandem import layers
from tandem.layers import Training
from tandem.parallel.graph_transfer import FlatGraph, decode, encode
from tests.support.op_checks import plain_python

Built = tuple[list[Variable], list[Variable], list[Any]]
"""Inputs, outputs and the inputs' values."""


@wrap_py([pt.dvector], [pt.dvector])
def backwards(x: np.ndarray) -> np.ndarray:
    return x[::-1].copy()


def cubed(x: np.ndarray) -> np.ndarray:
    return x**3


class Applies(Op):
    """Applies a function that it holds."""

    __props__ = ("function",)

    def __init__(self, function: Callable[[np.ndarray], np.ndarray]) -> None:
        self.function = function

    def make_node(self, x: Variable) -> Apply:
        return Apply(self, [x], [x.type()])

    def perform(self, node: Apply, inputs: Sequence[Any], output_storage: Any) -> None:
        output_storage[0][0] = self.function(inputs[0])


class Counts(Op):
    """Is equal to no other of its kind, so that uses of one must stay uses of one."""

    make_node = Applies.make_node

    def perform(self, node: Apply, inputs: Sequence[Any], output_storage: Any) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        output_storage[0][0] = inputs[0] + self.calls


def chain(length: int) -> tuple[Variable, Variable]:
    """A chain of Ops, each computed from the one before."""
    x = y = pt.dvector("x")
    for _ in range(length):
        y = pt.sin(y)
    return x, y


def _own_ops() -> Built:
    x = pt.dvector("x")
    count = Counts()
    return [x], [backwards(x), Applies(cubed)(x), count(count(x))], [np.array([1.5, -2.0, 3.0])]


def _loop() -> Built:
    """A Scan of a long graph over sequences, with its gradient."""
    x, w = pt.dmatrix("x"), pt.dvector("w")

    def step(row: Any, before: Any, w: Any) -> Any:
        for _ in range(10):
            before = pt.tanh(before * w + row)
        return before

    h = pytensor.scan(
        step, sequences=[x], outputs_info=[pt.zeros(3)], non_sequences=[w], return_updates=False
    )
    cost = (h[-1] ** 2).sum()
    values = [np.linspace(-1, 1, 12).reshape(4, 3), np.array([0.5, 1.1, 0.9])]
    return [x, w], [h, pytensor.grad(cost, w)], values


def _nested_loops() -> Built:
    x, w = pt.dvector("x"), pt.dscalar("w")

    def inner(a: Any, b: Any, w: Any) -> Any:
        return pt.cos(a * w) + b

    def outer(a: Any, b: Any, w: Any) -> Any:
        rows = pytensor.scan(
            inner, sequences=[pt.arange(3.0) * a], outputs_info=[b], non_sequences=[w],
            return_updates=False,
        )  # fmt: skip
        return rows[-1]

    y = pytensor.scan(
        outer, sequences=[x], outputs_info=[pt.as_tensor(0.1)], non_sequences=[w],
        return_updates=False,
    )  # fmt: skip
    return [x, w], [y, pytensor.grad(y[-1], w)], [np.array([0.3, -1.0]), np.array(0.7)]


def _while_loop() -> Built:
    x = pt.dscalar("x")
    y = pytensor.scan(
        lambda a: (a * 2, until(a > 50)),
        outputs_info=[x], n_steps=20, return_updates=False,
    )  # fmt: skip
    return [x], [y], [np.array(1.5)]


def _graph_in_an_op() -> Built:
    """An OpFromGraph, which keeps the graph of its gradient once that was taken."""
    x, y, s = pt.dvector("x"), pt.dvector("y"), pytensor.shared(np.array([2.0, 3.0]), name="s")
    op = OpFromGraph([x, y], [pt.tanh(x * y) * s, x.sum()])
    first, second = op(x, y)
    gradient = pytensor.grad((first * second).sum(), x)
    return [x, y], [first, second, gradient], [np.array([0.5, 1.0]), np.array([-1.0, 2.0])]


def _linear_algebra() -> Built:
    x = pt.dtensor3("x")
    factors = Blockwise(Cholesky(lower=True))(x)
    values = np.stack([np.eye(2) * 2, [[2.0, 1.0], [1.0, 3.0]]])
    return [x], [factors, pytensor.grad(factors.sum(), x), pt.special.softmax(x, axis=1)], [values]


def _branches() -> Built:
    x, yes = pt.dvector("x"), pt.bscalar("yes")
    return [yes, x], [ifelse(yes, x * 2, x - 1)], [np.int8(1), np.array([1.0, 2.0])]


def _constants() -> Built:
    large = np.random.default_rng(0).normal(size=(70, 80))
    table = pt.constant(large, name="table")
    x, rows = pt.dvector("x"), pt.lvector("rows")
    nan = np.frombuffer(np.uint64(0x7FF8_0000_0000_1234).tobytes(), "float64")
    values = [np.arange(80.0), np.array([3, 3, 0])]
    columns = pt.constant(np.asfortranarray(large[:, ::2]))
    return [x, rows], [table[rows] * x, table.sum(), columns[::2, 3], pt.constant(nan)], values


def _shared() -> Built:
    w = pytensor.shared(np.arange(6.0).reshape(2, 3), name="w")
    b = pytensor.shared(np.array([1.0, -1.0, 0.5]), name="b")
    x = pt.dmatrix("x")
    y = pt.tanh(x @ w + b)
    gradients = pytensor.grad(y.sum(), [w, b])
    return [x], [y, *gradients, w, x], [np.array([[1.0, 2.0], [0.1, 0.2]])]


def _network() -> Built:
    """Layers as AlexNet has them, with their gradients."""
    epoch, indices = pt.lscalar("epoch"), pt.lvector("indices")
    x = pt.tensor("x", dtype="float64", shape=(None, 3, 9, 9))
    rng = np.random.default_rng(0)
    filters = pytensor.shared(rng.normal(size=(4, 3, 3, 3)), name="filters", shape=(4, 3, 3, 3))
    weights = pytensor.shared(rng.normal(size=(36, 5)), name="weights", shape=(36, 5))
    training = Training(seed=pt.constant(np.int64(7)), epoch=epoch, indices=indices)
    y = layers.relu(layers.convolution(x, filters, pad=1))
    y = layers.max_pool(layers.response_norm(y), 3, 3)
    y = layers.dropout(layers.flatten(y, 36), 0.5, 0, training) @ weights
    gradients = pytensor.grad((y**2).sum(), [filters, weights])
    return [x, epoch, indices], [y, *gradients], [
        rng.normal(size=(2, 3, 9, 9)), np.int64(3), np.array([11, 5]),
    ]  # fmt: skip


GRAPHS: dict[str, Callable[[], Built]] = {
    "own Ops": _own_ops,
    "loop": _loop,
    "nested loops": _nested_loops,
    "while loop": _while_loop,
    "graph in an Op": _graph_in_an_op,
    "linear algebra": _linear_algebra,
    "branches": _branches,
    "constants": _constants,
    "shared": _shared,
    "network": _network,
}


class Numbers:
    """Numbers of shared variables, in the order in which they are asked for."""

    def __init__(self) -> None:
        self.variables: list[SharedVariable] = []

    def __call__(self, variable: SharedVariable) -> int:
        if variable not in self.variables:
            self.variables.append(variable)
        return self.variables.index(variable)


def sent(inputs: list[Variable], outputs: list[Variable]) -> tuple[FlatGraph, Numbers]:
    """Encode a graph."""
    numbers = Numbers()
    return encode(inputs, outputs, numbers), numbers


def results(inputs: list[Variable], outputs: list[Variable], values: list[Any]) -> list[Any]:
    """Compute a graph at its plainest, without PyTorch, which `check_function` imports."""
    mode = Mode(linker="py", optimizer=None)
    with plain_python():
        return pytensor.function(inputs, outputs, mode=mode, on_unused_input="ignore")(*values)


def answer(connection: Connection) -> None:
    """Decode and compute each graph that comes, until None does."""
    while (received := connection.recv()) is not None:
        flat, shared, values = received
        try:
            inputs, outputs = decode(flat, [pytensor.shared(value) for value in shared])
            connection.send(results(inputs, outputs, values))
        except Exception as error:
            connection.send(error)
