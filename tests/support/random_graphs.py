"""Random graphs of PyTensor Ops, with values on which they can be computed.

A graph grows from its inputs: a form takes some of the terms that are there and makes a new one,
which is computed at once by the Ops' own `perform`. What fails there is left out. The forms are
those of `graph_forms`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import toposort
from pytensor.tensor.variable import TensorVariable

from tests.support.op_checks import plain_python

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "float32", "float64", "int64"),
)
LARGEST = 300  # elements

# Relative errors of functions and sums, whose last bits differ between PyTorch and NumPy.
ROUNDING = {"float16": 4e-3, "float32": 8e-6, "float64": 2e-12}

REFUSED = (ValueError, TypeError, IndexError, OverflowError, ZeroDivisionError, AssertionError,
           NotImplementedError)  # fmt: skip
"""What building or computing a form may raise; the form is then left out."""


@dataclass(frozen=True)
class Term:
    """A variable, its value, and how far the value may be from another backend's."""

    variable: TensorVariable
    value: np.ndarray
    error: float = 0.0  # absolute; not 0 where rounding may differ
    leaf: bool = False  # no other term may be made of it: it may differ by more than rounding

    @property
    def exact(self) -> bool:
        return self.error == 0

    @property
    def kind(self) -> str:
        return self.value.dtype.kind


@dataclass
class RandomGraph:
    """A graph with values for its inputs."""

    seed: int
    inputs: list[Variable]
    values: list[np.ndarray]
    outputs: list[Term]


@dataclass
class Grower:
    """The terms of a graph that grows, and the random choices of its growth."""

    rng: np.random.Generator
    terms: list[Term] = field(default_factory=list)
    used: list[Term] = field(default_factory=list)  # by the form that is being made

    def pick(self, accept: Callable[[Term], bool] = lambda t: True, exact: bool = True) -> Term:
        """Choose a term; with `exact` one whose value is the same on any backend."""
        fitting = [t for t in self.terms if (t.exact or not exact) and accept(t)]
        if not fitting:
            raise ValueError("no term fits")
        # Later terms are more often chosen, so that graphs become deep.
        place = int(len(fitting) * np.sqrt(self.rng.random()))
        self.used.append(fitting[place])
        return fitting[place]

    def choose(self, options: Sequence[Any]) -> Any:
        return options[self.rng.integers(len(options))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def integers(self, low: int, high: int, size: Any = None) -> Any:
        return self.rng.integers(low, high, size)

    def length(self) -> int:
        return int(self.choose((0, 1, 1, 2, 3, 3, 4, 5)))

    def input_like(self, value: np.ndarray) -> Term:
        """Add an input whose type knows all, some or none of the value's lengths."""
        known = self.choose((0.0, 0.5, 1.0))
        shape = tuple(n if self.chance(known) else None for n in value.shape)
        term = Term(pt.tensor(dtype=value.dtype.name, shape=shape), value)
        self.terms.append(term)
        return term

    def values(self, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        """Draw small numbers and, in some arrays, extremes."""
        kind = np.dtype(dtype).kind
        if kind == "b":
            return self.rng.random(shape) < 0.5
        small = self.rng.integers(0 if kind == "u" else -4, 6, shape).astype(dtype)
        if kind == "f":
            small += self.rng.choice([0, 0.5, 0.25], shape).astype(dtype)
            info: Any = np.finfo(dtype)
            extremes = [np.nan, np.inf, -np.inf, -0.0, info.max, info.min, info.tiny, info.eps]
        else:
            info = np.iinfo(dtype)
            extremes = [info.max, info.min, info.max - 1, info.max // 2 + 1]
        drawn = np.array(extremes, dtype)[self.rng.integers(0, len(extremes), shape)]
        share = self.choose((0, 0, 0.1, 0.5))
        return np.where(self.rng.random(shape) < share, drawn, small).astype(dtype)


def compute(variables: Sequence[Variable], known: dict[Variable, Any]) -> list[Any]:
    """Compute variables by the `perform` of their Ops; `known` takes in what is computed."""
    for node in toposort(variables, blockers=known):
        storage = {v: [v.data if isinstance(v, Constant) else known.get(v)] for v in node.inputs}
        storage |= {v: [None] for v in node.outputs}
        done = {v: [v in node.inputs] for v in storage}
        node.op.make_py_thunk(node, storage, done, [])()
        known.update({v: storage[v][0] for v in node.outputs})
    return [v.data if isinstance(v, Constant) else known[v] for v in variables]


def grow(seed: int, forms: "Mapping[str, Form]", steps: int = 12) -> RandomGraph:
    """Make the random graph of a seed, of up to `steps` forms."""
    grower = Grower(np.random.default_rng(seed))
    base = tuple(grower.length() for _ in range(grower.integers(0, 4)))
    for _ in range(grower.integers(2, 5)):
        shape = base if grower.chance(0.7) else tuple(grower.length() for _ in range(2))
        grower.input_like(grower.values(grower.choose(DTYPES), shape))
    count = len(grower.terms)
    inputs = grower.terms[:count]
    known: dict[Variable, Any] = {t.variable: t.value for t in inputs}
    names = list(forms)
    weights = np.array([forms[name].weight for name in names], float)
    with np.errstate(all="ignore"), plain_python():
        for _ in range(steps):
            form = forms[names[grower.rng.choice(len(names), p=weights / weights.sum())]]
            _add(grower, form, known)
    made = grower.terms[count:]
    kept = [t for t in made if t.leaf or grower.chance(0.6)] or made[-1:]
    return RandomGraph(seed, [t.variable for t in inputs], [t.value for t in inputs], kept)


def _add(grower: Grower, form: "Form", known: dict[Variable, Any]) -> None:
    grower.used = []
    try:
        made = form.make(grower)
        variables = list(made) if isinstance(made, list | tuple) else [made]
        values = compute(variables, known)
    except REFUSED:
        return
    inherited = max((t.error for t in grower.used), default=0.0)
    for variable, value in zip(variables, values, strict=True):
        value = np.asarray(value)
        if value.size > LARGEST or value.ndim > 4:
            continue
        if not variable.type.is_valid_value(value):
            # PyTensor's own backend does not give what its type declares.
            continue
        error = inherited
        if not form.exact and value.dtype.kind == "f":
            error += _rounding(grower, value) * form.scale(grower, value)
        grower.terms.append(Term(variable, value, error))


def _rounding(grower: Grower, value: np.ndarray) -> float:
    # NumPy computes some functions of bools and of 8 bits in half precision.
    narrow = any(t.value.dtype.itemsize == 1 or t.value.dtype == "float16" for t in grower.used)
    return ROUNDING["float16" if narrow else value.dtype.name]


def largest(x: np.ndarray) -> float:
    finite = np.abs(x.astype("float64"))
    return float(finite[np.isfinite(finite)].max(initial=1.0))


@dataclass(frozen=True)
class Form:
    """A way to make new terms."""

    make: Callable[[Grower], Any]
    weight: float = 1.0
    exact: bool = True  # the same bits on any backend
    # What the rounding errors of a result are relative to.
    scale: Callable[[Grower, np.ndarray], float] = lambda grower, value: largest(value)
