"""Data-parallel functions for any PyTensor program, with the interface of Synkhronos.

    import tandem.parallel as synk

    synk.fork()
    f = synk.function([x], outputs=[loss, (scores, "gather")], updates=updates)
    synk.distribute()
    loss, scores = f(pictures)

A serial program is written as for one process; `function` takes the place of `pytensor.function`.
The rows of inputs are divided over worker processes, each with its own copy of the shared
variables, and outputs are reduced (Stooke and Abbeel 2017, arXiv 1710.04162).

The functions of this module are the methods of one `Pool`, which `fork` makes, and starts again
after it was closed. A program may also make pools of its own.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from tandem.parallel.data import Data, data
from tandem.parallel.description import row_index
from tandem.parallel.function import Function, Times
from tandem.parallel.pool import FlatShared, Pool
from tandem.parallel.team import WorkerLost

__all__ = [
    "Data",
    "FlatShared",
    "Function",
    "Pool",
    "Times",
    "WorkerLost",
    "all_gather",
    "all_reduce",
    "broadcast",
    "close",
    "data",
    "distribute",
    "flat",
    "fork",
    "function",
    "gather",
    "get_lengths",
    "get_n_gpu",
    "get_shapes",
    "get_value",
    "reduce",
    "row_index",
    "scatter",
    "set_value",
    "shared",
]

P = ParamSpec("P")
R = TypeVar("R")

_default: Pool | None = None  # the one state that a module of this library has


def __dir__() -> list[str]:
    return __all__


def fork(*args: Any, **named: Any) -> int:
    """Start the module's pool; return the number of ranks.

    After `close`, or after a worker was lost, the same pool is started again: functions and shared
    variables are kept, and the workers begin with the master's values.

    Parameters
    ----------
    *args, **named
        As of `Pool`: ``fork()``, ``fork(4, threads=2)``, ``fork(devices=["cuda:0", "cuda:0"])``.

    Raises
    ------
    InputError, TypeError, ValueError
        As of `Pool`.
    RuntimeError
        It has been started, and not closed; or this is a worker process.
    """
    global _default
    if _default is None:
        _default = Pool(*args, **named)
    else:
        _default.start(*args, **named)
    return _default.ranks


_of_pool = inspect.signature(Pool).replace(return_annotation=int)
fork.__signature__ = _of_pool  # type: ignore[attr-defined]


def close() -> None:
    """End the workers of the module's pool, if there are any."""
    if _default is not None:
        _default.close()


def _of_default(method: Callable[Concatenate[Pool, P], R]) -> Callable[P, R]:
    """Make a function of the module from a method of its pool."""

    @functools.wraps(method)
    def call(*args: P.args, **named: P.kwargs) -> R:
        if _default is None:
            raise RuntimeError(f"{method.__name__}: fork() comes first")
        return method(_default, *args, **named)

    signature = inspect.signature(method)
    _, *others = signature.parameters.values()
    call.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    return call


function = _of_default(Pool.function)
shared = _of_default(Pool.shared)
flat = _of_default(Pool.flat)
distribute = _of_default(Pool.distribute)
get_n_gpu = _of_default(Pool.get_n_gpu)
broadcast = _of_default(Pool.broadcast)
scatter = _of_default(Pool.scatter)
gather = _of_default(Pool.gather)
all_gather = _of_default(Pool.all_gather)
reduce = _of_default(Pool.reduce)
all_reduce = _of_default(Pool.all_reduce)
set_value = _of_default(Pool.set_value)
get_value = _of_default(Pool.get_value)
get_lengths = _of_default(Pool.get_lengths)
get_shapes = _of_default(Pool.get_shapes)
