"""Sums in a fixed binary tree: their bits do not depend on who has added which terms."""

from typing import Any, Generic, TypeVar

Term = TypeVar("Term", bound=Any)


class TreeSum(Generic[Term]):
    """The sum of numbered terms that are pushed in order, where each pair of nodes is added first.

    Node i of a level is the sum of nodes 2i and 2i + 1 of the level below, level 0 being the terms;
    a node without a second half is its first. A part of the terms leaves the nodes that it has
    whole, up to two of a level; pushed in order, the nodes of all parts give the bits of one.
    """

    def __init__(self) -> None:
        self.nodes: list[tuple[int, int]] = []  # level and number
        self.terms: list[Term] = []

    def push(self, term: Term, level: int, number: int) -> None:
        """Add the term of a node; those that it completes become one."""
        while self.nodes and number % 2 and self.nodes[-1] == (level, number - 1):
            self.nodes.pop()
            term = self._added(self.terms.pop(), term)
            level, number = level + 1, number // 2
        self.nodes.append((level, number))
        self.terms.append(term)

    def total(self) -> Term:
        """Return the sum of all terms."""
        total = self.terms[-1]
        for term in reversed(self.terms[:-1]):
            total = self._added(term, total)
        return total

    def _added(self, first: Term, second: Term) -> Term:
        return first + second
