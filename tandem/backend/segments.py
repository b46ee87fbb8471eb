"""Programs in segments, between which the host is told which variables have their new values.

A segment is a function of its own, from the values that are alive at its beginning to those that
later ones need, so each is compiled, and recorded, by itself. No value is copied at a cut.
"""

import ast
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from pytensor.graph.basic import Variable

_HEAD = 2  # lines of the head of a segment's function

Run = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True)
class Segment:
    """A part of a program that runs without the host.

    One that is not compiled takes its values as a list, which it empties: each is then freed after
    its last use. One that is compiled takes them as arguments, and frees none before its end.
    """

    run: Run
    takes: tuple[str, ...]  # names of values in the source
    gives: tuple[str, ...]  # to later segments; the last gives what the program returns
    dying: frozenset[str]  # of those that it takes, what no later one does
    ready: tuple[str, ...]  # names of variables that have their new values after it
    compiled: bool
    as_vectors: frozenset[str]  # numbers that it takes as vectors of one element

    def __call__(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """Run on values by name, and remove those that no later segment takes."""
        taken = [values.pop(n) if n in self.dying else values[n] for n in self.takes]
        if not self.compiled:
            return self.run(taken)
        pairs = zip(self.takes, taken, strict=True)
        return self.run(*(v.view(1) if name in self.as_vectors else v for name, v in pairs))


@dataclass(frozen=True, eq=False)
class SegmentedRun:
    """The segments of a program, called as one function that reports between them."""

    inputs: tuple[str, ...]
    segments: tuple[Segment, ...]
    store_results: Run | None  # what follows the last segment, see `Program`
    report: Callable[[str], None]

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run all segments, and report after each which variables are ready."""
        steps, results = self.steps(*inputs), ()
        for segment in self.segments:
            results = next(steps)
            self.report_all(segment)
        return results

    def report_all(self, segment: Segment) -> None:
        """Report the variables that are ready after a segment."""
        for name in segment.ready:
            self.report(name)

    def steps(self, *inputs: Any) -> Iterator[tuple[Any, ...]]:
        """Run one segment after another, without reports.

        Yields, after each, what the program returns, which is nothing before the last.
        """
        values = dict(zip(self.inputs, inputs, strict=True))
        *others, last = self.segments
        for segment in others:
            with torch.no_grad():
                values.update(zip(segment.gives, segment(values), strict=True))
            yield ()
        with torch.no_grad():
            results = last(values)
            if self.store_results is not None:
                results = self.store_results(*inputs, *results)
        yield results

    def compiled(self, compiler: Callable[[Run], Run]) -> "SegmentedRun":
        """Return the same with each segment compiled by itself."""
        found = tuple(replace(segment, run=compiler(segment.run)) for segment in self.segments)
        return replace(self, segments=found)


@dataclass
class _Part:
    """The lines of a segment in a source that is being written."""

    start: int  # the first, from 0; room is left for the head
    end: int = 0  # behind the last
    ready: tuple[str, ...] = ()


class SegmentWriter:
    """Divides the lines of a source into the functions of segments, while they are written."""

    def __init__(self, lines: list[str]) -> None:
        self._lines, self._parts = lines, [_Part(len(lines))]
        self._lines += [""] * _HEAD

    def cut(self, ready: Iterable[Variable]) -> None:
        """End a segment, after which these variables are ready, and begin the next."""
        self.end(ready)
        self._lines.append("")  # what the segment returns is known when all are written
        self._parts.append(_Part(len(self._lines)))
        self._lines += [""] * _HEAD

    def end(self, ready: Iterable[Variable]) -> None:
        """End the last segment. What is written behind it is none of it."""
        part = self._parts[-1]
        if not part.end:
            part.end, part.ready = len(self._lines), tuple(str(v.name) for v in ready)

    def connect(
        self, inputs: Sequence[str], compiled: bool, as_vectors: Collection[str]
    ) -> Sequence[Callable[[Run], Segment]]:
        """Write what each function takes and returns; return what makes a segment of each.

        A segment takes the values that its lines name and that an input or an earlier segment is.
        """
        bodies = [_names(self._lines[part.start + _HEAD : part.end]) for part in self._parts]
        known, found = list(inputs), []
        for number, (part, (used, made)) in enumerate(zip(self._parts, bodies, strict=True)):
            later = set[str]().union(*(names for names, _ in bodies[number + 1 :]))
            takes = tuple(name for name in known if name in used)
            gives = tuple(name for name in made if name in later)
            known += gives
            vectors = frozenset(as_vectors).intersection(takes)
            head = _head(number, takes, compiled, vectors)
            self._lines[part.start : part.start + _HEAD] = head
            if part is not self._parts[-1]:
                self._lines[part.end] = returning(gives)
            found.append(
                partial(
                    Segment,
                    takes=takes,
                    gives=gives,
                    dying=frozenset(takes) - later,
                    ready=part.ready,
                    compiled=compiled,
                    as_vectors=vectors,
                )
            )
        return found


def _head(
    number: int, takes: Sequence[str], compiled: bool, as_vectors: Collection[str]
) -> tuple[str, str]:
    """Return the first lines of a segment's function."""
    if not compiled:
        unpack = f"{', '.join(takes)}, = taken; " if takes else ""
        return f"def step{number}(taken):", f"    {unpack}taken.clear()"
    unpacked = [f"{name} = {name}.view(())" for name in takes if name in as_vectors]
    return f"def step{number}({', '.join(takes)}):", f"    {'; '.join(unpacked) or 'pass'}"


def _names(lines: Sequence[str]) -> tuple[set[str], list[str]]:
    """Return the names that lines of source use, and those that they assign, in their order."""
    tree = ast.parse(textwrap.dedent("\n".join(lines)))
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    used = {name.id for name in names if not isinstance(name.ctx, ast.Store)}
    return used, list(dict.fromkeys(n.id for n in names if isinstance(n.ctx, ast.Store)))


def returning(names: Iterable[str]) -> str:
    """Return the line that returns a tuple."""
    return f"    return ({''.join(f'{name}, ' for name in names)})"
