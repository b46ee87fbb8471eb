"""One rank's part of a data-parallel function: taking rows, computing, folding slices."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Variable

from tandem.parallel.description import Description, Update
from tandem.parallel.fold import Fold, op_weights
from tandem.parallel.gpu import RankGpu
from tandem.parallel.graphs import replace_sliceables
from tandem.parallel.selection import Selection
from tandem.split import edges

Selector = Literal["all", "slice", "index"]
"""The parts that are read of sliceable variables."""

Weights = tuple[tuple[tuple[float, ...], ...], float]
"""A fold of partial results, by rank, then by slice; and what their sum is divided by."""


@dataclass(frozen=True)
class Share:
    """The part of a call that one rank computes."""

    rank: int
    ranks: int
    rows: Sequence[Selection]  # of each scattered input, those of all ranks
    counts: tuple[int, ...] | None  # rows of each rank; None: nothing is divided
    local: Selection | None  # of this rank's sliceable variables; None: all of them
    slices: int
    outputs: tuple[int, ...]  # numbers of those that are computed

    @property
    def has_rows(self) -> bool:
        return self.counts is None or self.counts[self.rank] > 0

    def pieces(self) -> list[tuple[int, int]]:
        """First and last of this rank's rows in each slice that has any."""
        if self.counts is None:
            return [(0, 0)]
        bounds = edges(self.counts[self.rank], self.slices)
        return [(lo, hi) for lo, hi in pairwise(bounds) if hi > lo]

    def weights(self, op: str | None) -> Sequence[float]:
        """Weigh this rank's slices among those of all ranks, for an output."""
        counts = self.counts or (1,) * self.ranks
        return partial_weights(counts, self.slices, op)[0][self.rank]

    def own_weights(self, op: str | None) -> tuple[Sequence[float], float]:
        """Weigh this rank's slices among themselves, for a variable; and the divisor."""
        weights, divisor = partial_weights(
            (self.counts[self.rank] if self.counts else 1,), self.slices, op
        )
        return weights[0], divisor


@lru_cache(maxsize=256)
def partial_weights(counts: tuple[int, ...], slices: int, op: str | None) -> Weights:
    """Weigh partial results by their rows, as `op` uses them.

    Slices without rows have no partial result.
    """
    parts = [[hi - lo for lo, hi in pairwise(edges(n, slices)) if hi > lo] for n in counts]
    weights, divisor = op_weights(op, [size for part in parts for size in part])
    remaining = iter(weights)
    return tuple(tuple(next(remaining) for _ in part) for part in parts), divisor


class LocalFunction:
    """A function as one rank computes it; a variant of it is compiled when it is first needed.

    Variants differ in the outputs that are asked for, in what is read of sliceable variables, and
    in whether new values of shared variables are written or returned: slices are all computed from
    the values before the call.
    """

    def __init__(
        self, description: Description, make_mode: Callable[[], Mode], gpu: RankGpu | None = None
    ) -> None:
        self.description, self._make_mode = description, make_mode
        self._variants: dict[tuple[tuple[int, ...], Selector, bool], Callable[..., Any]] = {}
        self.forget(gpu)
        self.excerpt = self.function = 0.0  # seconds of the last call

    def compile(self) -> None:
        """Compile the variant of a plain call."""
        self._variant(tuple(range(len(self.description.outputs))), "all", True)

    def forget(self, gpu: RankGpu | None) -> None:
        """Have variants compiled again, for another device or precision."""
        self._variants.clear()
        self._rowless: LocalFunction | None = None
        # In a mode of the user's own a function takes and returns arrays.
        self._gpu = None if self.description.options.get("mode") else gpu

    def whole(self, inputs: Sequence[np.ndarray]) -> list[Any]:
        """Compute on all rows of all inputs and variables, as one PyTensor function does."""
        about = self.description
        numbers: list[np.ndarray] = []
        if about.row_numbers:
            variables: Sequence[Any] = about.sliceables
            rows = inputs if about.scattered else [v.get_value(borrow=True) for v in variables[:1]]
            numbers = [np.arange(len(rows[0]) if rows else 0)] * len(about.row_numbers)
        outputs = tuple(range(len(self.description.outputs)))
        return list(self._variant(outputs, "all", True)(*inputs, *numbers))

    def run(self, inputs: Sequence[np.ndarray], share: Share) -> list[Fold] | None:
        """Compute a rank's part; return what each output adds up to, or None without rows.

        Without rows only the updates that are computed from none are made.
        """
        began, self.excerpt, self.function = time.perf_counter(), 0.0, 0.0
        if not share.has_rows:
            self._run_without_rows(inputs[len(share.rows) :], share)
            return None
        is_sliced = share.slices > 1
        writes = not (is_sliced and self.description.updates)
        local = share.local
        if is_sliced and local is None and self.description.sliceables and share.counts:
            local = Selection(share.counts[share.rank], 0, 1, None)
        selector = _selector(local)
        function = self._variant(share.outputs, selector, writes)
        ops = [self.description.output_ops[number] for number in share.outputs]
        weights = [share.weights(op) for op in ops]
        updates = (
            [] if writes else [(u, *share.own_weights(u.op)) for u in self.description.updates]
        )
        folded = [Fold(op, widens=True) for op in ops]
        new = [
            Fold("sum" if update.op == "inc" else update.op, divisor)
            for update, _, divisor in updates
        ]
        weights += [own for _, own, _ in updates]
        whole = self._whole(inputs[len(share.rows) :])
        for number, (lo, hi) in enumerate(share.pieces()):
            arguments = self._arguments(inputs, whole, share, (lo, hi), local)
            results = function(*arguments)
            for fold, result, own in zip([*folded, *new], results, weights, strict=True):
                fold.add(result, own[number])
        for (update, *_), fold in zip(updates, new, strict=True):
            _write(update, fold.value())
        if self._gpu is not None:
            # Nobody is told of a call whose inputs are still being read.
            self._gpu.wait()
        self.function = time.perf_counter() - began - self.excerpt
        return folded

    def _run_without_rows(self, inputs: Sequence[np.ndarray], share: Share) -> None:
        """Make the updates that are computed from no rows; `inputs` are those broadcast."""
        if self._rowless is None:
            about = self.description.without_rows()
            self._rowless = LocalFunction(about, self._make_mode, self._gpu)
        if self._rowless.description.updates:
            undivided = replace(share, rows=(), counts=None, local=None, slices=1, outputs=())
            self._rowless.run(inputs, undivided)

    def _whole(self, inputs: Sequence[np.ndarray]) -> list[Any]:
        """Take what all slices get."""
        if not inputs:
            return []
        began, about = time.perf_counter(), self.description
        pairs = zip(inputs, about.broadcast, strict=True)
        if self._gpu is None:
            found = [array.astype(v.type.dtype, copy=False) for array, v in pairs]
        else:
            first = len(about.scattered)
            found = [
                self._gpu.upload(position, array, v.type.dtype)
                for position, (array, v) in enumerate(pairs, first)
            ]
        self.excerpt += time.perf_counter() - began
        return found

    def _arguments(
        self,
        inputs: Sequence[np.ndarray],
        whole: Sequence[Any],
        share: Share,
        piece: tuple[int, int],
        local: Selection | None,
    ) -> list[Any]:
        """Take the rows of one slice."""
        began = time.perf_counter()
        first = sum(share.counts[: share.rank]) if share.counts else 0
        lo, hi = first + piece[0], first + piece[1]
        taken = zip(inputs, share.rows, self.description.scattered, strict=False)
        if self._gpu is None:
            scattered = [
                array[rows.part(lo, hi)].astype(variable.type.dtype, copy=False)
                for array, rows, variable in taken
            ]
        else:
            scattered = [
                self._gpu.upload_rows(position, array, rows, (lo, hi), variable.type.dtype)
                for position, (array, rows, variable) in enumerate(taken)
            ]
        numbers = [np.arange(lo, hi)] * len(self.description.row_numbers)
        arguments = [*scattered, *whole, *numbers]
        if local is not None:
            if _selector(local) == "slice":
                arguments += [np.asarray(local.start + edge) for edge in piece]
            else:
                arguments.append(_numbers(local, *piece))
        self.excerpt += time.perf_counter() - began
        return arguments

    def _variant(
        self, outputs: tuple[int, ...], selector: Selector, writes: bool
    ) -> Callable[..., Any]:
        key = outputs, selector, writes
        if key not in self._variants:
            self._variants[key] = self._compile(outputs, selector, writes)
        return self._variants[key]

    def _compile(
        self, outputs: tuple[int, ...], selector: Selector, writes: bool
    ) -> Callable[..., Any]:
        about = self.description
        results = [about.outputs[number] for number in outputs]
        new = [_returned(update, writes) for update in about.updates]
        selectors: list[Variable] = []
        if selector != "all":
            read: Any
            if selector == "slice":
                selectors = [pt.lscalar("start"), pt.lscalar("stop")]
                read = slice(*selectors)
            else:
                selectors = [pt.lvector("rows")]
                read = selectors[0]
            replaced = replace_sliceables(
                [*results, *new], {variable: _read(variable, read) for variable in about.sliceables}
            )
            results, new = replaced[: len(results)], replaced[len(results) :]
        variables = [update.variable for update in about.updates]
        options = dict(about.options)
        if about.has_default_updates:
            options["no_default_updates"] = True
        return pytensor.function(
            [*about.inputs, *selectors],
            results if writes else [*results, *new],
            updates=list(zip(variables, new, strict=True)) if writes else [],
            mode=options.pop("mode", None) or self._make_mode(),
            trust_input=True,
            on_unused_input="ignore",
            **options,
        )


def _read(variable: Any, rows: Any) -> Variable:
    """The rows of a variable that are read, symbolically."""
    read: Variable = variable[rows]
    return read


def _selector(local: Selection | None) -> Selector:
    if local is None:
        return "all"
    return "slice" if local.indices is None and local.step == 1 else "index"


def _numbers(rows: Selection, lo: int, hi: int) -> np.ndarray:
    """Rows ``lo:hi`` of a selection as numbers of rows, int64 (hi - lo,)."""
    part = rows.part(lo, hi)
    if isinstance(part, slice):
        return rows.start + rows.step * np.arange(lo, hi)
    return part


def _returned(update: Update, writes: bool) -> Variable:
    """The new value of a variable, or what is added to it where slices are added up."""
    if update.op == "inc" and not writes:
        return pt.sub(update.new, update.variable)
    return update.new


def _write(update: Update, value: Any) -> None:
    """Set a variable to what its slices have added up to."""
    variable: Any = update.variable
    if hasattr(value, "detach") and not hasattr(variable, "buffer"):
        value = value.cpu().numpy()
    if hasattr(value, "detach"):  # a tensor, which stays on its device
        variable.buffer.copy_(variable.buffer + value if update.op == "inc" else value)
        return
    if update.op == "inc":
        value = variable.get_value(borrow=True) + value
    variable.set_value(np.asarray(value))
