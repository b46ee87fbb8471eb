"""CUDA graphs without a GPU: kernels of the CPU are recorded with their memory, and replayed.

What a graph leaves for the next one lies where it lay when it was recorded. Unlike in a pool,
memory is used for one value only.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SimulatedGraph(TorchDispatchMode):
    """A `torch.cuda.CUDAGraph`, which is also the context in which it is recorded."""

    made: ClassVar[list["SimulatedGraph"]] = []

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[Callable[..., Any], tuple, dict, list[torch.Tensor]]] = []
        self.pool_of: SimulatedGraph = self
        self.replays = 0
        self.made.append(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.kernels.append((func, args, kwargs, _tensors(result)))
        return result

    def pool(self) -> "SimulatedGraph":
        return self.pool_of

    def replay(self) -> None:
        """Run the kernels again, each with its results in the former place."""
        self.replays += 1
        with torch.no_grad():
            for func, args, kwargs, results in self.kernels:
                for old, new in zip(results, _tensors(func(*args, **kwargs)), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


@contextlib.contextmanager
def _recorded(
    graph: SimulatedGraph, pool: SimulatedGraph | None, capture_error_mode: str
) -> Iterator[None]:
    if pool is not None:
        graph.pool_of = pool
    with graph:
        yield


@pytest.fixture
def simulated_graphs(monkeypatch: pytest.MonkeyPatch) -> list[SimulatedGraph]:
    """Let `capture` record on "cuda:0" what functions do on the CPU; return the graphs."""
    module = importlib.import_module("tandem.backend.capture")
    monkeypatch.setattr(module, "as_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device", mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimulatedGraph)
    monkeypatch.setattr(torch.cuda, "graph", _recorded)
    monkeypatch.setattr(SimulatedGraph, "made", [])
    return SimulatedGraph.made
