"""Ops on rows that fail, or end their process, where a value of their input asks for it.

They are in a module of their own, for workers don't run the module of a test. What they do depends
on whether the process is a worker.
"""

import gc
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op

from tandem.parallel.local_function import LocalFunction
from tandem.parallel.rank_team import RankTeam

FAULT = 13.0
"""The value at which the Ops of this module fail."""


def is_worker() -> bool:
    return bool(multiprocessing.current_process().daemon) or RankTeam.is_worker


class NotPicklable(Exception):
    """An exception that pickle can make of its bytes no more."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


class RowOp(Op):
    """Returns its input, a matrix, unless `fail` is called for a value of it."""

    __props__: tuple[str, ...] = ()

    def make_node(self, rows: Variable) -> Apply:
        rows = pt.as_tensor(rows)
        return Apply(self, [rows], [rows.type()])

    def perform(self, node: Apply, inputs: Any, output_storage: Any) -> None:
        (rows,) = inputs
        if not len(rows):
            raise AssertionError("called without a row")
        if np.any(rows == FAULT):
            self.fail(rows)
        output_storage[0][0] = rows.copy()

    def infer_shape(self, fgraph: Any, node: Apply, shapes: Any) -> Any:
        return shapes

    def fail(self, rows: np.ndarray) -> None:
        raise NotImplementedError


class Raise(RowOp):
    """Raises an exception of a type, by its name, or nothing, after so many seconds of work.

    With `at_compile`, "worker", it raises ValueError where a worker compiles it.
    """

    __props__ = ("kind", "at_compile", "seconds")

    def __init__(self, kind: str, at_compile: str = "", seconds: float = 0.0) -> None:
        self.kind, self.at_compile, self.seconds = kind, at_compile, seconds

    def prepare_node(self, *args: Any, **named: Any) -> None:
        if self.at_compile and is_worker():
            raise ValueError("it can't be compiled")

    def fail(self, rows: np.ndarray) -> None:
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            pass
        if self.kind == "NotPicklable":
            raise NotPicklable("one", "two")
        kinds = {error.__name__: error for error in (ValueError, KeyError, OSError, SystemExit)}
        if self.kind in kinds:
            raise kinds[self.kind](f"row of {FAULT}")


class Signal(RowOp):
    """Sends its own process a signal, if that is a worker; also when it is compiled."""

    __props__ = ("number", "at_compile")

    def __init__(self, number: int, at_compile: bool = False) -> None:
        self.number, self.at_compile = number, at_compile

    def prepare_node(self, *args: Any, **named: Any) -> None:
        if self.at_compile and is_worker():
            os.kill(os.getpid(), self.number)

    def fail(self, rows: np.ndarray) -> None:
        if is_worker():
            os.kill(os.getpid(), self.number)
            time.sleep(0.1)


class Wait(RowOp):
    """Makes a file, then waits, in a worker or in the master."""

    __props__ = ("path", "in_worker")

    def __init__(self, path: str, in_worker: bool) -> None:
        self.path, self.in_worker = path, in_worker

    def fail(self, rows: np.ndarray) -> None:
        if is_worker() == self.in_worker:
            Path(self.path).touch()
            time.sleep(60)
        elif not self.in_worker:
            Path(f"{self.path}.worker").touch()


class CountFunctions(RowOp):
    """Returns, for each value, the number of functions that a worker has; in the master zeros."""

    def perform(self, node: Apply, inputs: Any, output_storage: Any) -> None:
        made = [each for each in gc.get_objects() if type(each) is LocalFunction]
        output_storage[0][0] = np.full_like(inputs[0], len(made) if is_worker() else 0)


class CallPool(RowOp):
    """Calls what only the user's program may call; raises what that raises."""

    __props__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def fail(self, rows: np.ndarray) -> None:
        import tandem.parallel as synk

        if is_worker():
            getattr(synk, self.name)()


CALLBACKS: list[Any] = []


class CallBack(RowOp):
    """Calls the last of `CALLBACKS`, which a test has put there, in the master."""

    def fail(self, rows: np.ndarray) -> None:
        if CALLBACKS:
            CALLBACKS[-1]()
