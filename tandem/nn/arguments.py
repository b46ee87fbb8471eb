"""Arguments of layers and initializers: what is allowed is declared beside each field."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem import nested
from tandem.errors import InputError
from tandem.validation import shown, suggestion

Pair = tuple[int, int]
"""A number for rows and one for columns."""

Sizes = int | Pair
"""A `Pair`, or a number for both."""

LARGEST = 2**24
"""The largest number of units, pixels or rows that an argument may be."""


@dataclass(frozen=True)
class Argument:
    """The values of a field: `convert` returns the value to keep, or raises ValueError."""

    expected: str  # completes "expected ..."
    convert: Callable[[Any], Any]


def argument(kind: Argument, default: Any = dataclasses.MISSING) -> Any:
    """Field of a frozen dataclass whose value `check_arguments` converts."""
    return dataclasses.field(default=default, metadata={"argument": kind})


def check_arguments(owner: Any, label: str) -> None:
    """Convert the fields of a dataclass that are arguments; InputError if one is not allowed."""
    for field in dataclasses.fields(owner):
        kind = field.metadata.get("argument")
        if kind is None:
            continue
        value = getattr(owner, field.name)
        try:
            converted = kind.convert(value)
        except InputError as error:
            raise InputError(f"{label}: {field.name}: {error}") from error
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(
                f"{label}: {field.name}: found {shown(value)}, expected {kind.expected}"
            ) from error
        object.__setattr__(owner, field.name, converted)


def plain(value: Any) -> Any:
    """A field's value as JSON holds it, an initializer by class and arguments.

    Raises ValueError if there is no such.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        value = {"class": type(value).__name__, **fields}
    return nested.plain(value)


def integer(least: int, most: int = LARGEST) -> Argument:
    """A whole number in a range."""
    return Argument(f"a whole number from {least} to {most}", lambda v: _integer(v, least, most))


def integers(count: int, least: int) -> Argument:
    """Several whole numbers; one stands for equal ones."""

    def convert(value: Any) -> tuple[int, ...]:
        values = value if isinstance(value, tuple | list) else (value,) * count
        if len(values) != count:
            raise ValueError(f"{len(values)} numbers")
        return tuple(_integer(number, least, LARGEST) for number in values)

    return Argument(f"a whole number from {least} to {LARGEST}, or {count} of them", convert)


def number(
    allowed: str = "a finite number", holds: Callable[[float], bool] = lambda v: True
) -> Argument:
    """A finite number for which a condition holds."""

    def convert(value: Any) -> float:
        if isinstance(value, bool | str) or not math.isfinite(value := float(value)):
            raise ValueError("no finite number")
        if not holds(value):
            raise ValueError("out of range")
        return value

    return Argument(allowed, convert)


def word(*words: str) -> Argument:
    """One of a few words, in any case."""

    def convert(value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in words:
            raise ValueError("another word")
        return value.lower()

    return Argument(" or ".join(words), convert)


def known_name(names: Sequence[str]) -> Callable[[Any], str]:
    """Function that returns a name that is known, and raises InputError for others."""

    def convert(value: Any) -> str:
        if isinstance(value, str) and value in names:
            return value
        hint = suggestion(value, names) if isinstance(value, str) else ""
        if callable(value):
            value = getattr(value, "__name__", "a function")
        raise InputError(f"found {shown(value)}, expected one of {', '.join(names)}{hint}")

    return convert


def pair(sizes: Sizes) -> Pair:
    """Both numbers of sizes."""
    return sizes if isinstance(sizes, tuple) else (sizes, sizes)


def optional(kind: Argument) -> Argument:
    """An argument that may be None."""
    return Argument(
        f"{kind.expected}, or None", lambda value: None if value is None else kind.convert(value)
    )


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("no flag")
    return value


def _integer(value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError("no whole number")
    if not least <= (value := int(value)) <= most:
        raise ValueError("out of range")
    return value


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def _name(value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError("no name")
    return value


def _channels_last(value: Any) -> str:
    if value != "channels_last":
        raise ValueError("another order")
    return "channels_last"


COUNT = integer(1)
FLAG = Argument("True or False", _flag)
NAME = Argument("at most 100 letters, digits, underscores, dots and hyphens", _name)
PAIR = integers(2, 1)
PADDING = word("valid", "same")
DATA_FORMAT = optional(
    Argument("channels_last: rows are (row, column, channel) here", _channels_last)
)
