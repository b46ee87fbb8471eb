"""Random functions that update variables over parts of one block of memory.

The parts are strided, transposed, and overlap. Numbers are whole or halves and small, so that every
backend computes the same bits.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from numpy.lib.stride_tricks import as_strided
from pytensor.compile.mode import Mode
from pytensor.compile.ops import deep_copy_op
from pytensor.graph.basic import Variable

from tandem.backend import device_shared
from tandem.ops import momentum_step
from tests.support.check_function import PYTHON, compile_graph

SHAPE = (3, 3)
STRIDES = [(3, 1), (1, 3), (4, 1), (1, 4), (8, 2), (2, 8), (6, 1), (1, 7)]
ROOM = 64  # elements of the block in which parts overlap
OWN = 32  # elements of a part of its own, behind it

Form = Callable[[Any, Any], Any]
FORMS: list[Form] = [
    lambda p, q: p,
    lambda p, q: q.T,
    lambda p, q: p + q,
    lambda p, q: p * 2 - q,
    lambda p, q: p[::-1],
    lambda p, q: p[:, ::-1] + p,
    lambda p, q: pt.alloc(p[0], 3, 3),
    lambda p, q: pt.maximum(p, q.T),
    lambda p, q: pt.switch(p > q, p, -q),
    lambda p, q: pt.dot(p, q),
    lambda p, q: p - q.sum(axis=0),
    lambda p, q: pt.set_subtensor(p[:], q),
    lambda p, q: pt.set_subtensor(p[0], q[:, 1]),
    lambda p, q: pt.inc_subtensor(p[1], q[2]),
    lambda p, q: pt.set_subtensor(p[[2, 0, 2]], q),
    lambda p, q: pt.inc_subtensor(p[:, [1, 1, 0]], q),
    lambda p, q: p[[2, 2, 0]],
    lambda p, q: pt.join(0, p[1:], q[:1]),
    lambda p, q: p.flatten()[::-1].reshape((3, 3)),
    lambda p, q: pt.roll(p, 1, axis=1) + 1,
    lambda p, q: deep_copy_op(p),
]
CERTAIN = [FORMS[number] for number in (0, 1, 2, 3, 7, 8, 9, 10)]
"""Forms that cannot fail: behind them, updates are written before the end."""

STEPS: list[Form] = [
    lambda w, v, m=m, nesterov=nesterov: momentum_step(
        w, v, w - v, np.asarray(0.5, w.dtype), m, 0.25, nesterov
    )
    for m, nesterov in ((0.5, False), (0.5, True), (0.0, False))
]
"""Forms of two values at once."""


@dataclass(frozen=True)
class Plan:
    """What a random function computes, to be built on variables of several kinds."""

    forms: list[tuple[Form, int, int]]  # with the positions of two operands
    step: tuple[Form, int, int] | None  # new values of two variables at once
    updated: list[tuple[int, int]]  # variables, with the positions of their new values
    returned: list[int]

    def terms(self, variables: list[Any]) -> list[Any]:
        """All values: the variables, then what is made of them."""
        made = list(variables)
        if self.step is not None:
            form, p, q = self.step
            made += form(made[p], made[q])
        for form, p, q in self.forms:
            made.append(form(made[p % len(made)], made[q % len(made)]))
        return made


class RandomUpdates:
    """A random function over a block of memory, and what it must do.

    With `cut` it reports its updates in random groups. Each variable must then have its new value,
    and what is written to it is the caller's.
    """

    def __init__(self, seed: int, cut: bool = False) -> None:
        self.seed, self.cut = seed, cut
        rng = self.rng = np.random.default_rng(seed)
        self.dtype = ["float32", "float64", "int64"][rng.integers(3)]
        count = int(rng.integers(3, 8) if cut else rng.integers(2, 6))
        self.size = ROOM + count * OWN
        self.block, self.expected = (np.zeros(self.size, self.dtype) for _ in range(2))
        self.layouts = [self._layout(place) for place in range(count)]
        self.plan = self._plan(count)

    def _layout(self, place: int) -> tuple[int, tuple[int, int]]:
        usual = STRIDES[self.seed % len(STRIDES)]
        strides = usual if self.rng.random() < 0.6 else STRIDES[self.rng.integers(len(STRIDES))]
        if self.rng.random() < (0.9 if self.cut else 0.5):
            return ROOM + place * OWN, strides
        return int(self.rng.integers(0, ROOM - 2 * sum(strides))), strides

    def parts(self, block: np.ndarray) -> list[np.ndarray]:
        """The variables' parts of a block."""
        size = block.itemsize
        return [
            as_strided(block[first:], SHAPE, tuple(stride * size for stride in strides))
            for first, strides in self.layouts
        ]

    def _plan(self, count: int) -> Plan:
        rng = self.rng
        # Of variables that overlap one is updated: the order of updates is nobody's promise.
        free, chosen = np.ones(self.size, bool), []
        for place in rng.permutation(count).tolist():
            (part,) = [self.parts(free)[place]]
            if part.all() and rng.random() < 0.8:
                part[:] = False
                chosen.append(place)
        made = count
        step, updated = None, []
        if len(chosen) >= 2 and self.dtype != "int64" and rng.random() < 0.5:
            step = (STEPS[rng.integers(len(STEPS))], chosen[0], chosen[1])
            updated = [(chosen[0], made), (chosen[1], made + 1)]
            chosen, made = chosen[2:], made + 2
        usual = CERTAIN if self.cut and rng.random() < 0.8 else FORMS
        forms = [
            (usual[rng.integers(len(usual))], *rng.integers(0, 99, 2).tolist())
            for _ in range(rng.integers(*((4, 14) if self.cut else (1, 7))))
        ]
        total = made + len(forms)
        first = made if self.cut else 0
        updated += [(place, int(rng.integers(first, total))) for place in chosen]
        returned = rng.integers(0, total, rng.integers(0, 4)).tolist()
        return Plan(forms, step, updated, returned)

    def check(self, mode: Mode) -> int:
        """Call the function a few times, compare memory and results, and count its segments."""
        if self.cut:
            mode = self._cut_mode(mode)
        kind: dict[str, Any] = {"dtype": self.dtype, "shape": SHAPE}
        inputs: list[Variable] = [pt.tensor(**kind) for _ in self.layouts]
        values = self.plan.terms(inputs)
        wanted = [values[at] for _, at in self.plan.updated]
        results = [values[at] for at in self.plan.returned]
        reference = compile_graph(inputs, wanted + results, PYTHON)
        variables = [
            device_shared(None, str(place), memory=part)
            for place, part in enumerate(self.parts(self.block))
        ]
        values = self.plan.terms(variables)
        updates = [(variables[place], values[at]) for place, at in self.plan.updated]
        outputs = [values[at] for at in self.plan.returned]
        function = compile_graph([], outputs, mode, updates=updates)
        returned: list[tuple[np.ndarray, np.ndarray]] = []
        for _ in range(3):
            self.block[:] = self.expected[:] = self.rng.integers(-4, 5, self.size)
            parts = self.parts(self.expected)
            computed = [np.array(x) for x in reference(*(part.copy() for part in parts))]
            for (place, _), new in zip(self.plan.updated, computed, strict=False):
                parts[place][:] = new
            what = self.explained(outputs, updates)
            self.new = {str(place): np.array(parts[place]) for place, _ in self.plan.updated}
            returned += zip(function(), computed[len(updates) :], strict=True)
            if self.cut:
                assert not self.new, f"not reported: {self.new}\n{what}"
            np.testing.assert_array_equal(self.block, self.expected, what)
        # Results of earlier calls are not overwritten by later ones.
        for got, expected in returned:
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(got, expected, what)
        return len(getattr(function.vm.jit_fn, "segments", "1"))

    def _cut_mode(self, mode: Mode) -> Mode:
        linker = copy.copy(mode.linker)
        linker.target = replace(
            linker.target, on_gradient_ready=self._check_report, buckets=self._buckets()
        )
        return Mode(linker, mode.provided_optimizer)

    def _buckets(self) -> tuple[frozenset[str], ...]:
        """Divide a part of the updated variables into groups; by none, each is one by itself."""
        rng = np.random.default_rng([self.seed, 1])
        groups: list[list[str]] = [[] for _ in range(rng.choice((0, 0, 1, 2, 3)))]
        for place, _ in self.plan.updated:
            if (number := rng.integers(0, len(groups) + 1)) < len(groups):
                groups[number].append(str(place))
        return tuple(frozenset(group) for group in groups)

    def _check_report(self, name: str) -> None:
        """Check the variable that a function reports, and overwrite it."""
        part, expected = (self.parts(block)[int(name)] for block in (self.block, self.expected))
        np.testing.assert_array_equal(part, self.new.pop(name), f"seed {self.seed}: {name}")
        part[:] = expected[:] = 99

    def explained(self, outputs: list[Variable], updates: list[tuple[Any, Variable]]) -> str:
        """Describe the function."""
        text = pytensor.dprint([*(new for _, new in updates), *outputs], file="str")
        return f"seed {self.seed}: {self.layouts}, updated {self.plan.updated}\n{text}"
