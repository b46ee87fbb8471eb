"""Which of PyTensor's Ops run by a kernel, and which by `perform`, as a table in Markdown.

``python -m tandem.backend.coverage`` prints what ``docs/from-theano.md`` contains.
"""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterable
from typing import Any

from pytensor.graph.op import Op, _NoPythonOp
from pytensor.link.c.op import _NoPythonCOp, _NoPythonExternalCOp
from pytensor.scalar.basic import ScalarOp
from pytensor.tensor.random.op import RandomVariable

from tandem.backend.lowering import covered_ops

# With one Op for each distribution, statistic or special function.
_MODULES = ("breakpoint", "ifelse", "printing", "raise_op", "scan.op", "typed_list.basic")
_PACKAGES = ("compile", "scalar", "tensor")
# What no user's graph has: made by rewrites for other backends, or by PyTensor's debugging.
_INTERNAL = ("compile.debug", "tensor.blas_c", "tensor.rewriting")
_WITHOUT_CODE = (_NoPythonOp, _NoPythonCOp, _NoPythonExternalCOp)


def coverage() -> dict[str, tuple[list[str], list[str]]]:
    """Return, for each module, the names of its Ops with a kernel and of those without.

    Random variables are left out, of which none has a kernel.
    """
    covered = covered_ops()
    found: dict[str, tuple[list[str], list[str]]] = {}
    for op in sorted(_all_ops(), key=lambda op: (op.__module__, op.__name__)):
        module = op.__module__.removeprefix("pytensor.")
        has_kernel = any(base in covered for base in op.__mro__)
        if module.startswith(_INTERNAL):
            continue
        if issubclass(op, (RandomVariable, *_WITHOUT_CODE)) and not has_kernel:
            continue
        found.setdefault(module, ([], []))[not has_kernel].append(op.__name__)
    return found


def _all_ops() -> set[type[Op]]:
    """Import PyTensor's modules and return the Ops of its user's interface."""
    for module in _MODULES:
        importlib.import_module(f"pytensor.{module}")
    for package in _PACKAGES:
        parent = importlib.import_module(f"pytensor.{package}")
        for info in pkgutil.walk_packages(parent.__path__, f"{parent.__name__}."):
            importlib.import_module(info.name)
    prefixes = tuple(f"pytensor.{name}" for name in (*_MODULES, *_PACKAGES))
    return {
        op for op in _subclasses(Op) if op.__module__.startswith(prefixes) and not _is_abstract(op)
    }


def _is_abstract(op: type[Op]) -> bool:
    return inspect.isabstract(op) or getattr(op, "impl", None) is ScalarOp.impl


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
