"""Nested plain values, as JSON and YAML have them: their check, and where two differ."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator

from tandem.validation import shown

MOST_DEPTH = 64  # lists and mappings inside one another

_ABSENT = "nothing"


def plain(value: Any, depth: int = 0) -> Any:
    """A copy of a value of nothing but mappings, lists, text, finite numbers, booleans and null.

    A tuple becomes a list. Raises ValueError for other types, keys that are not text, and more than
    `MOST_DEPTH` mappings and lists inside one another.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a finite number")
        return value
    if depth == MOST_DEPTH:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
    if isinstance(value, list | tuple):
        return [plain(part, depth + 1) for part in value]
    if not isinstance(value, Mapping):
        raise ValueError(
            f"found a {type(value).__name__}, expected text, a number, true, false, null, a list "
            "or a mapping"
        )
    for key in value:
        if not isinstance(key, str):
            raise ValueError(f"found the key {shown(key)}, expected text in quotes")
    return {key: plain(part, depth + 1) for key, part in value.items()}


PlainMapping = Annotated[dict[str, Any], AfterValidator(plain)]
"""A mapping whose values may be nested, checked and copied by `plain`."""


def difference(place: str, first: Any, second: Any) -> tuple[str, Any, Any]:
    """The place of the first difference in two unequal values, and what stands there in each.

    `place` is that of the values themselves. A place inside has keys after dots; an entry of a list
    is named by its ``name``, or else by its number from 0.
    """
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in (*first, *second):
            one, other = first.get(key, _ABSENT), second.get(key, _ABSENT)
            if one != other:
                return difference(f"{place}.{key}", one, other)
    elif _is_list(first) and _is_list(second):
        names, others = _names(first), _names(second)
        if names != others:
            return place, ", ".join(names) or _ABSENT, ", ".join(others) or _ABSENT
        for name, one, other in zip(names, first, second, strict=True):
            if one != other and isinstance(one, list | Mapping):
                return difference(f"{place}.{name}", one, other)
    return place, first, second


def _is_list(value: Any) -> bool:
    """Return whether a value is a list of lists and mappings, as a graph's layers are."""
    return isinstance(value, list) and all(isinstance(part, list | Mapping) for part in value)


def _names(parts: Sequence[Any]) -> list[str]:
    names = [part.get("name") if isinstance(part, Mapping) else None for part in parts]
    return [name if isinstance(name, str) else str(i) for i, name in enumerate(names)]
