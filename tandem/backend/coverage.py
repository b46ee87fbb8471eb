"""A table in Markdown of PyTensor's Ops: those that run by a kernel, and those by `perform`.

``python -m tandem.backend.coverage`` prints what is built into ``docs/from-theano.md``.
"""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from pytensor.graph.op import Op
from pytensor.scalar.basic import ScalarOp
from pytensor.tensor.random.op import RandomVariable

from tandem.backend.lowering import covered_ops
from tandem.backend.perform import WITHOUT_PERFORM

# With one Op for each distribution, statistic or special function.
_MODULES = ("breakpoint", "ifelse", "printing", "raise_op", "scan.op", "typed_list.basic")
_PACKAGES = ("compile", "scalar", "tensor")
# What no user's graph has: made by rewrites for other backends, or by PyTensor's debugging.
_INTERNAL = ("compile.debug", "tensor.blas_c", "tensor.rewriting")


def coverage() -> dict[str, tuple[list[str], list[str]]]:
    """Return, for each module, the names of its Ops with a kernel and of those without.

    Random variables are left out, of which none has a kernel.
    """
    covered = covered_ops()
    found: dict[str, tuple[list[str], list[str]]] = {}
    for op in sorted(_all_ops(), key=lambda op: (op.__module__, op.__name__)):
        module = op.__module__.removeprefix("pytensor.")
        has_kernel = any(base in covered for base in op.__mro__)
        if issubclass(op, (RandomVariable, *WITHOUT_PERFORM)) and not has_kernel:
            continue
        found.setdefault(module, ([], []))[not has_kernel].append(op.__name__)
    return found


def _all_ops() -> set[type[Op]]:
    """Import PyTensor's modules and return the Ops of its user's interface."""
    for module in _MODULES:
        importlib.import_module(f"pytensor.{module}")
    for package in _PACKAGES:
        _import_below(importlib.import_module(f"pytensor.{package}"))
    public, internal = (
        tuple(f"pytensor.{name}" for name in names)
        for names in ((*_MODULES, *_PACKAGES), _INTERNAL)
    )
    found = {
        op
        for op in _subclasses(Op)
        if op.__module__.startswith(public)
        and not op.__module__.startswith(internal)
        and not _is_abstract(op)
    }
    # One between two others is only a common base of the lower ones.
    return {
        op
        for op in found
        if found.isdisjoint(op.__bases__) or found.isdisjoint(op.__subclasses__())
    }


def _is_abstract(op: type[Op]) -> bool:
    named = op.__name__.startswith("Abstract") or op.__name__.endswith("Base")
    return named or inspect.isabstract(op) or getattr(op, "impl", None) is ScalarOp.impl


def _import_below(package: ModuleType) -> None:
    """Import all modules of a package but those that would hide a function of their name."""
    for info in pkgutil.iter_modules(package.__path__):
        if isinstance(getattr(package, info.name, package), ModuleType):
            module = importlib.import_module(f"{package.__name__}.{info.name}")
            if info.ispkg:
                _import_below(module)


def _subclasses(op: Any) -> Iterable[Any]:
    for below in op.__subclasses__():
        yield below
        yield from _subclasses(below)


def table() -> str:
    """Return the coverage as a table in Markdown."""
    rows = ["| module of PyTensor | by a kernel | by `perform` |", "|---|---|---|"]
    for module, (kernels, others) in coverage().items():
        rows.append(f"| `{module}` | {', '.join(kernels) or '-'} | {', '.join(others) or '-'} |")
    rows.append("| `tensor.random` | - | all random variables |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
