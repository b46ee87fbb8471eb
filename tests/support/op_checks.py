"""Checks of Ops: building, compiling and comparing small graphs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.mode import Mode
from pytensor.gradient import verify_grad
from pytensor.graph.rewriting.db import RewriteDatabaseQuery

# PyTensor's default mode compiles with numba, which takes seconds for each function and runs an
# unknown Op through `perform` anyway; so the tests run Python, after the same rewrites.
MODE = Mode("py", RewriteDatabaseQuery(include=["fast_run"]))


def plain_python() -> Any:
    """Context manager: run Python also for the graph inside an Op such as Softmax.

    PyTensor runs it in its default mode, whatever the mode of the outer graph.
    """
    return pytensor.config.change_flags(mode="FAST_COMPILE", cxx="")


def symbols(arrays: tuple[np.ndarray, ...], static: bool = True) -> list[Any]:
    """Make an input variable for each array, of its shape or of unknown lengths."""
    return [
        pt.tensor(dtype=a.dtype, shape=a.shape if static else (None,) * a.ndim)
        for a in map(np.asarray, arrays)
    ]


def evaluate(build: Callable[..., Any], *arrays: np.ndarray, static: bool = True) -> Any:
    """Compile the graph that `build` makes of symbols and run it on `arrays`."""
    inputs = symbols(arrays, static)
    return pytensor.function(inputs, build(*inputs), mode=MODE, on_unused_input="ignore")(*arrays)


def check_gradient(build: Callable[..., Any], *arrays: np.ndarray) -> None:
    """Compare the graph's gradient with finite differences, in every direction."""
    # Without rewrites: they take longer than the differences and are not under test.
    mode = Mode("py", None)
    verify_grad(build, list(arrays), n_tests=1, rng=np.random.default_rng(1), mode=mode)


def check_shapes(build: Callable[..., Any], *arrays: np.ndarray) -> None:
    """Check the outputs' static and inferred shapes against the outputs.

    With static inputs the outputs' types must hold the shape; with unknown lengths it must be
    inferred without computing the Op.
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
