"""The table of Ops with and without a kernel."""

import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.op import Op
from pytensor.scan.op import Scan
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.linalg.decomposition.schur import Schur
from pytensor.tensor.linalg.solvers.core import SolveBase
from pytensor.tensor.math import Dot, FixedOpCAReduce
from pytensor.tensor.symbolic import TensorSymbolicOp

from docs.pages import built
from tandem.backend import coverage, device_mode
from tests.support.tiny import ROOT


def test_the_page_has_the_table() -> None:
    page = built((ROOT / "docs/from-theano.md").read_text())
    assert coverage.table() in page


def test_every_op_is_in_one_column() -> None:
    found = coverage.coverage()
    kernels = {f"{module}.{name}" for module, (names, _) in found.items() for name in names}
    others = {f"{module}.{name}" for module, (_, names) in found.items() for name in names}
    assert kernels.isdisjoint(others)

    def place(op: type[Op]) -> str:
        return f"{op.__module__}.{op.__name__}".removeprefix("pytensor.")

    assert {place(op) for op in (Dot, Elemwise, Scan)} <= kernels
    assert place(Schur) in others
    assert {place(op) for op in (FixedOpCAReduce, SolveBase, TensorSymbolicOp)}.isdisjoint(
        kernels | others
    )


def test_a_strict_mode_refuses_what_the_table_gives_to_perform() -> None:
    x = pt.dmatrix("x")
    with pytest.raises(NotImplementedError, match="Schur"):
        pytensor.function([x], pt.linalg.schur(x), mode=device_mode(strict=True))
