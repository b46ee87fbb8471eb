"""Nested plain values: what they may hold, and where two differ."""

import datetime
import json
from typing import Any

import pytest

from tandem.nested import MOST_DEPTH, difference, plain

GRAPH = {
    "layers": [
        {"name": "conv2d", "filters": 32, "kernel_size": [3, 3]},
        {"name": "dense", "units": 10, "activation": None},
    ],
    "inputs": ["input"],
}


def changed(layer: int, **values: Any) -> dict[str, Any]:
    graph = json.loads(json.dumps(GRAPH))
    graph["layers"][layer] |= values
    return graph


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def test_a_copy_is_equal_and_shares_nothing() -> None:
    shape = [3, 3]
    value = {"a": shape, "b": shape, "c": (1, 2.5, "x", True, None)}
    found = plain(value)
    assert found == {"a": [3, 3], "b": [3, 3], "c": [1, 2.5, "x", True, None]}
    assert found["a"] is not found["b"]
    assert type(found["c"][3]) is bool
    assert plain(nested(MOST_DEPTH)) == nested(MOST_DEPTH)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"a": [float("nan")]}, "nan is not a finite number"),
        ({"a": {1: 2}}, "found the key 1, expected text"),
        ({"a": datetime.date(2020, 1, 1)}, "found a date, expected text, a number"),
        ({"a": {1, 2}}, "found a set"),
        (nested(MOST_DEPTH + 1), f"nested more than {MOST_DEPTH} deep"),
    ],
)
def test_other_values_are_refused(value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        plain(value)


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueError, match="deep"):
        plain(value)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (changed(0, filters=64), ("graph.layers.conv2d.filters", 32, 64)),
        (changed(0, kernel_size=[5, 5]), ("graph.layers.conv2d.kernel_size", [3, 3], [5, 5])),
        (changed(1, activation="relu"), ("graph.layers.dense.activation", None, "relu")),
        (changed(1, use_bias=False), ("graph.layers.dense.use_bias", "nothing", False)),
        (changed(1, name="dense_1"), ("graph.layers", "conv2d, dense", "conv2d, dense_1")),
        ({**GRAPH, "layers": []}, ("graph.layers", "conv2d, dense", "nothing")),
        ({**GRAPH, "inputs": ["input", "b"]}, ("graph.inputs", ["input"], ["input", "b"])),
        ({"layers": GRAPH["layers"]}, ("graph.inputs", ["input"], "nothing")),
        ({**GRAPH, "layers": {}}, ("graph.layers", GRAPH["layers"], {})),
        ("at its default", ("graph", GRAPH, "at its default")),
    ],
)
def test_the_first_difference_is_found(other: Any, expected: tuple[str, Any, Any]) -> None:
    assert difference("graph", GRAPH, other) == expected
    place, ours, theirs = difference("graph", other, GRAPH)
    assert (place, theirs, ours) == expected


def test_entries_without_a_name_are_counted() -> None:
    assert difference("a", [[1], [[2], {"b": 3}]], [[1], [[2], {"b": 4}]]) == ("a.1.1.b", 3, 4)
