"""Random graphs of float64 tensors with random placements, and all ways to compute small ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import io_toposort

from tandem.placement import Partial, Placement, Replicate, Shard, Single
from tandem.placement.conversions import find_kind, nbytes
from tandem.placement.rules import OpStrategy, rule
from tandem.placement.static_lengths import with_static_lengths

Form = tuple[Variable, Placement]


@dataclass
class PlacedGraph:
    """A graph with the placements of its inputs and outputs, and values for its inputs."""

    outputs: list[Variable]
    given: dict[Variable, Placement]
    wanted: dict[Variable, Placement]
    values: dict[Variable, np.ndarray]

    def whole(self) -> list[np.ndarray]:
        """The outputs, computed without any placement."""
        function = pytensor.function(
            list(self.values), self.outputs, mode=PYTHON, on_unused_input="ignore"
        )
        return list(function(*self.values.values()))


PYTHON = pytensor.compile.mode.Mode(linker="py", optimizer=None)
"""Every node by its own `perform`, as the graph has them."""


def random_placement(rng: np.random.Generator, ndim: int, ranks: int, partial: bool) -> Placement:
    """Any placement of a tensor."""
    options: list[Placement] = [Replicate(), Single(int(rng.integers(ranks)))]
    options += [Shard(axis) for axis in range(ndim)] * 2
    options += [Partial()] * partial
    return options[rng.integers(len(options))]


def random_graph(seed: int, ranks: int, nodes: int = 9) -> PlacedGraph:
    """A graph of matrices and vectors, with gradients with respect to its inputs."""
    rng = np.random.default_rng(seed)
    rows, columns = (
        int(n) for n in rng.integers(2, 7, 2)
    )  # PyTensor forgets lengths of 1 in places
    shapes = [(rows, columns), (columns, rows), (rows, columns), (columns,), (rows, rows)]
    inputs = [pt.tensor(f"x{n}", dtype="float64", shape=shape) for n, shape in enumerate(shapes)]
    terms: list[Any] = list(inputs)
    while len(terms) < len(inputs) + nodes:
        made = _made(rng, terms)
        if made is not None:
            terms.append(made)
    ends = [t for t in terms[len(inputs) :] if rng.random() < 0.5] or terms[-1:]
    total = sum(pt.tanh(end).sum() for end in ends)
    gradients = pt.grad(total, inputs, disconnected_inputs="ignore")
    outputs = [*ends, total, *gradients]
    given = {x: random_placement(rng, x.type.ndim, ranks, partial=True) for x in inputs}
    wanted = {
        x: random_placement(rng, x.type.ndim, ranks, partial=True)
        for x in outputs
        if rng.random() < 0.7
    }
    values = {x: rng.normal(size=x.type.shape) / 2 for x in inputs}
    return PlacedGraph(outputs, given, wanted, values)


def _made(rng: np.random.Generator, terms: Sequence[Any]) -> Any:
    """A new term of random others; None where they do not fit."""
    a, b = (terms[int(n)] for n in rng.integers(len(terms), size=2))
    axis = int(rng.integers(max(1, a.type.ndim)))
    rows = pt.arange(a.shape[0]) if a.type.ndim else None
    forms: dict[str, Callable[[], Any]] = {
        "add": lambda: a + b,
        "product": lambda: a * b,
        "tanh": lambda: pt.tanh(a),
        "double": lambda: 2 * a - 1,
    }
    if a.type.ndim:
        forms |= {
            "sum": lambda: a.sum(axis=axis),
            "mean": lambda: a.mean(axis=axis),
            "largest": lambda: a.max(axis=axis),
            "first": lambda: a[:2],
        }
    if a.type.ndim == 1:
        forms["some"] = lambda: pt.switch(pt.lt(rows, 2), a, 0.0)
    if a.type.ndim == 2:
        columns = np.arange(a.type.shape[0]) % a.type.shape[1]
        forms |= {
            "turn": lambda: a.T,
            "softmax": lambda: pt.special.log_softmax(a, axis=axis),
            "flat": lambda: a.reshape((int(np.prod(a.type.shape)),)),
            "row": lambda: a[0],
            "choose": lambda: a[rows, columns],
        }
    if a.type.ndim == b.type.ndim == 2:
        if a.type.shape[1] == b.type.shape[0]:
            forms["dot"] = lambda: pt.dot(a, b) / 4
        if a.type.shape[1] == b.type.shape[1]:
            forms["join"] = lambda: pt.concatenate([a, b], axis=0)
    try:
        made = forms[list(forms)[rng.integers(len(forms))]]()
    except ValueError:  # shapes that do not fit
        return None
    return None if None in made.type.shape else made


def joined(parts: Sequence[np.ndarray | None], placement: Placement) -> np.ndarray:
    """The whole of an output, from what each rank has of it; copies must not differ in a bit."""
    found = [part for part in parts if part is not None]
    match placement:
        case Shard(axis):
            return np.concatenate(found, axis)
        case Partial():
            return np.sum(found, axis=0)
        case Single(rank):
            assert [n for n, part in enumerate(parts) if part is not None] == [rank]
        case _:
            assert len(found) == len(parts)
    assert all(np.array_equal(part, found[0]) for part in found)
    return found[0]


def fewest_bytes(
    outputs: Sequence[Variable],
    given: Mapping[Variable, Placement],
    wanted: Mapping[Variable, Placement],
    ranks: int,
    most: float,
) -> float:
    """Bytes that all ranks receive, at least, if that is below `most`: of every choice of nodes.

    A conversion is made from the placement in which a node computes its result, once for each
    placement in which it is needed; no node is computed twice.
    """
    whole = with_static_lengths(outputs)
    forms = [(new, wanted.get(v, Replicate())) for v, new in zip(outputs, whole, strict=True)]
    nodes = list(io_toposort([], whole))

    def search(
        number: int, homes: dict[Variable, Placement], made: set[Form], spent: float, best: float
    ) -> float:
        if spent >= best:
            return best
        if number == len(nodes):
            return min(best, spent + added(forms, homes, made)[0])
        node = nodes[number]
        for choice in _choices(node, ranks):
            pairs = zip(node.inputs, choice.inputs, strict=True)
            needed = [(v, p) for v, p in pairs if p is not None]
            nbytes_added, after = added(needed, homes, made)
            own = homes | dict(zip(node.outputs, choice.outputs, strict=True))
            best = search(number + 1, own, after, spent + nbytes_added, best)
        return best

    def added(
        needed: Sequence[Form], homes: Mapping[Variable, Placement], made: set[Form]
    ) -> tuple[float, set[Form]]:
        new = {form: None for form in needed if form not in made}
        return sum(_bytes(v, homes.get(v, Replicate()), p, ranks) for v, p in new), made | set(new)

    return search(0, dict(given), set(), 0.0, most)


def _choices(node: Any, ranks: int) -> Iterator[OpStrategy]:
    yield from rule(node.op, node, ranks)
    yield OpStrategy((Replicate(),) * len(node.inputs), (Replicate(),) * len(node.outputs))


def _bytes(variable: Variable, source: Placement, target: Placement, ranks: int) -> float:
    if source == target:
        return 0.0
    kind = find_kind(source, target)
    if kind is not None:
        return kind.weight(ranks) * nbytes(variable)
    return _bytes(variable, source, Replicate(), ranks) + _bytes(
        variable, Replicate(), target, ranks
    )
