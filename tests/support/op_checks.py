"""How the tests of Ops build, compile and look at graphs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.mode import Mode
from pytensor.gradient import verify_grad
from pytensor.graph.rewriting.db import RewriteDatabaseQuery

# PyTensor's default mode compiles with numba, which takes seconds for each function and then runs
# an Op it does not know through `perform` anyway; so the tests run Python, after the same rewrites.
MODE = Mode("py", RewriteDatabaseQuery(include=["fast_run"]))


def plain_python() -> Any:
    """A context in which also the graph inside an Op such as Softmax runs Python.

    PyTensor runs it in its default mode, whatever the mode of the graph around it.
    """
    return pytensor.config.change_flags(mode="FAST_COMPILE", cxx="")


def symbols(arrays: tuple[np.ndarray, ...], static: bool = True) -> list[Any]:
    """An input variable for each array, of its shape, or of unknown lengths."""
    return [
        pt.tensor(dtype=a.dtype, shape=a.shape if static else (None,) * a.ndim)
        for a in map(np.asarray, arrays)
    ]


def evaluate(build: Callable[..., Any], *arrays: np.ndarray, static: bool = True) -> Any:
    """Compile what `build` makes of symbols and run it on `arrays`."""
    inputs = symbols(arrays, static)
    return pytensor.function(inputs, build(*inputs), mode=MODE, on_unused_input="ignore")(*arrays)


def check_gradient(build: Callable[..., Any], *arrays: np.ndarray) -> None:
    """Compare the graph's gradient with finite differences, in every direction."""
    # Without rewrites: they take longer than the differences, and what they do is not in question.
    mode = Mode("py", None)
    verify_grad(build, list(arrays), n_tests=1, rng=np.random.default_rng(1), mode=mode)


def check_shapes(build: Callable[..., Any], *arrays: np.ndarray) -> None:
    """Check what is said of the outputs' shapes against the outputs.

    With static inputs the outputs' types must hold the shape; with unknown lengths it must be found
    without computing the Op.
    """
    inputs = symbols(arrays)
    outputs = _list(build(*inputs))
    for output, value in zip(outputs, _list(evaluate(build, *arrays)), strict=True):
        assert output.type.shape == value.shape
        assert output.type.dtype == value.dtype
    inputs = symbols(arrays, static=False)
    outputs = _list(build(*inputs))
    op = outputs[0].owner.op
    shapes = pytensor.function(
        inputs, [output.shape for output in outputs], mode=MODE, on_unused_input="ignore"
    )
    assert not any(node.op == op for node in shapes.maker.fgraph.apply_nodes)
    for shape, value in zip(shapes(*arrays), _list(evaluate(build, *arrays)), strict=True):
        assert tuple(shape) == value.shape


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
