"""Outside data: what is plain, what is refused, and in which words."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tandem.errors import InputError
from tandem.registry import setting
from tandem.validation import (
    parse_json,
    parse_yaml,
    read_json,
    read_yaml,
    shown,
    suggestion,
    unknown,
    validated,
)


def even(value: int) -> int:
    if value % 2:
        raise ValueError("it is odd")
    return value


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    labels: list[int] = Field(json_schema_extra={"allowed": "a list of whole numbers"})


class Whole(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    size: int = Field(1, ge=1, json_schema_extra={"allowed": "at least 1"})
    order: Literal["files", "images"] = Field(
        "files", json_schema_extra={"allowed": "files or images"}
    )
    pair: Annotated[int, AfterValidator(even)] | Literal["none"] = Field(
        "none", json_schema_extra={"allowed": "an even number, or none"}
    )
    path: str | None = Field(None, json_schema_extra={"allowed": "a path", "form": "text"})
    rates: dict[str, float] = Field({}, json_schema_extra={"allowed": "layers and numbers"})
    plain: int = 0
    parts: dict[str, Part] = Field({}, json_schema_extra={"allowed": "an object"})


def refusal(values: Any, **details: Any) -> str:
    with pytest.raises(InputError) as caught:
        validated(Whole, values, **details)
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 0}, "size is 0; it must be at least 1"),
        ({"order": "image"}, 'order is "image"; it must be files or images; did you mean images?'),
        ({"pair": 3}, "pair is 3: it is odd (allowed: an even number, or none)"),
        ({"pair": "non"}, 'pair is "non"; it must be an even number, or none; did you mean none?'),
        ({"path": 3}, "path is 3; it must be a path; put it in quotes"),
        ({"rates": {"a": "b"}}, 'rates is {"a": "b"}; it must be layers and numbers'),
        ({"plain": "x"}, 'plain is "x": input should be a valid integer'),
        ({"sise": 3}, "unknown key sise; did you mean size?"),
        ({3: 3}, "unknown key 3; known are size, order"),
        ({"parts": {"a": {}}}, "parts.a.labels is missing; it must be a list of whole numbers"),
        ({"parts": {"a": 3}}, "parts.a is 3"),
        (
            {"parts": {"a": {"labels": [], "lable": 1}}},
            "parts.a: unknown key lable; did you mean labels?",
        ),
        (
            {"parts": {"a": {"labels": [*range(99), "x"]}}},
            'parts.a.labels has "x"; it must be a list of whole numbers',
        ),
        ([1], "holds [1]; expected keys and their values"),
    ],
)
def test_what_is_refused(values: Any, message: str) -> None:
    assert refusal(values).startswith(message)
    assert refusal(values, source=Path("a.yaml")).startswith(f"a.yaml: {message}")


def test_each_key_has_a_sentence_and_is_called_by_its_label() -> None:
    message = refusal({"order": 1, "size": 0, "x": 1}, labels={"size": "--size"}, source="a.yaml")
    first, second, third = message.splitlines()
    assert first.startswith("--size is 0")
    assert second.startswith("a.yaml: order is 1")
    assert third.startswith("a.yaml: unknown key x")


def test_what_is_right_becomes_the_model() -> None:
    assert validated(Whole, {"size": 3}) == Whole(size=3)
    assert validated(Whole, {"parts": {"a": {"labels": [1]}}}).parts["a"].labels == [1]


@dataclass(frozen=True)
class Plain:
    step: Annotated[int, Field(strict=True)] = field(metadata={"allowed": "a whole number"})
    rate: Annotated[float, Field(gt=0)] = setting(0.5, "rate", "a number above 0")


def test_a_dataclass_is_a_model_too() -> None:
    assert validated(Plain, {"step": 3}) == Plain(3)
    with pytest.raises(InputError, match=r'^line 3: step is "3"; it must be a whole number$'):
        validated(Plain, {"step": "3"}, source="line 3")
    with pytest.raises(InputError, match="step is missing; it must be a whole number"):
        validated(Plain, {})
    with pytest.raises(InputError, match="rate is 0; it must be a number above 0"):
        validated(Plain, {"step": 1, "rate": 0})


@pytest.mark.parametrize(
    ("key", "kind", "message"),
    [
        ("lr", "key", "unknown key lr; did you mean learning_rate?"),
        ("gpu", "key", "there is no key gpu: use devices"),
        ("--lr", "option", "unknown option --lr; did you mean --learning_rate?"),
        ("--GPU", "option", "there is no option --GPU: use devices"),
        (
            "--learning-rat",
            "option",
            "unknown option --learning-rat; did you mean --learning-rate?",
        ),
        ("-z", "option", "unknown option -z; --help lists all of them"),
        ("z", "key", "unknown key z; known are learning_rate"),
    ],
)
def test_an_unknown_key_is_answered(key: str, kind: str, message: str) -> None:
    answers = {"lr": "learning_rate", "gpu": "use devices"}
    assert unknown(key, ["learning_rate"], answers, kind) == message


def test_the_nearest_word() -> None:
    assert suggestion("Convl", ["conv1", "fc8"]) == "; did you mean conv1?"
    assert suggestion("convl", ["conv1", "fc8"]) == "; did you mean conv1?"
    assert suggestion("zzz", ["conv1"]) == ""
    assert suggestion("regression_mse", ["mae", "mse"]) == "; did you mean mse?"
    losses = ["binary_crossentropy", "categorical_crossentropy", "sparse_categorical_crossentropy"]
    assert suggestion("sparse_crossentropy", losses) == f"; did you mean {losses[2]}?"
    ours = ["cross_entropy", "binary_cross_entropy", "mse"]
    for found, meant in zip(("sparse_categorical_crossentropy", losses[0]), ours, strict=False):
        assert suggestion(found, ours) == f"; did you mean {meant}?"


def test_a_value_is_shown_as_it_stands() -> None:
    assert shown("a b") == '"a b"'
    assert shown("a b", quoted=False) == "a b"
    assert len(shown("x" * 1000)) == 80
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "a list that is nested too deeply"


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text('{"a": 1}')
    assert read_yaml(path) == read_json(path) == {"a": 1}
    assert read_yaml(path, "") == {}
    with pytest.raises(InputError, match="b: cannot be read"):
        read_yaml(tmp_path / "b")
    with pytest.raises(InputError, match=r"a: holds .1.; expected lines of the form 'key: value'"):
        read_yaml(path, "[1]")
    with pytest.raises(InputError, match="a: not JSON: "):
        read_json(path, b"\xff")


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\na: 2",
        "[&a 1, *a]",
        "a: [",
        "!!python/object/apply:os.getcwd []",
        "? [a, b]\n: 1\n",
        "2024-99-99",
        b"\x00\x01",
        "[" * 9999,
    ],
)
def test_yaml_that_is_not_plain(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"^not YAML: [^\n]+$"):
        parse_yaml(text)


@pytest.mark.parametrize("text", ["{", b"\xff", "[" * 100_000, "9" * 5000])
def test_json_that_is_not_plain(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"^not JSON: [^\n]+$"):
        parse_json(text)


def test_values_deep_inside_one_another_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="found values more than 100 deep inside one another"):
        parse_yaml("[" * 20_000)
