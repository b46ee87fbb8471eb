"""Sections of settings, and sections that take words and settings from registered choices."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator

from tandem.config.fields import Float, Section, flag, key, with_choices
from tandem.errors import InputError
from tandem.registry import Choice, Registry, setting
from tandem.validation import declared, validated

COLOURS: Registry[Choice] = Registry("colour")


def short(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(names) > 2:
        raise ValueError("two are enough")
    return names


@COLOURS.register("red")
@dataclass(frozen=True)
class Red(Choice):
    depth: float = setting(0.5, "red: depth", "a number below 1", lt=1)


@COLOURS.register("blue")
@dataclass(frozen=True)
class Blue(Choice):
    names: Annotated[tuple[str, ...], AfterValidator(short)] = setting((), "blue: names", "names")


@with_choices(COLOURS)
class Paint(Section):
    heading = "Paint"

    brush: Literal["none", "fine"] = key("none", "which brush", affects_bits=True)
    colour: str = key("red", "colour: {words}", omit_default=True)


class Wall(Section):
    heading = "Wall"

    height: int = key(2, "metres", unit="metres", ge=1)
    slope: Float = key(0.0, "a fraction", ge=0, lt=1)
    dry: bool | Literal["auto"] = key("auto", "whether it is dry")


class House(Wall, Paint):
    """Fields of the last base come first."""


def house(**values: Any) -> House:
    return validated(House, values)


def test_settings_of_choices_follow_the_key_that_chooses() -> None:
    assert [*House.model_fields] == ["brush", "colour", "depth", "names", "height", "slope", "dry"]
    sections = [declared(field, "section") for field in House.model_fields.values()]
    assert sections == ["Paint"] * 4 + ["Wall"] * 3


def test_the_words_are_those_that_are_registered() -> None:
    assert House.model_fields["colour"].description == "colour: red or blue"
    with pytest.raises(InputError, match='colour is "blu"; it must be red or blue; did you mean b'):
        house(colour="blu")


def test_settings_of_choices_are_read_and_checked_as_all_others() -> None:
    found = house(depth="5e-2", names=["a", "b"])
    assert COLOURS.make("red", dict(found)) == Red(0.05)
    assert COLOURS.chosen({**dict(found), "colour": "blue"}) == Blue(("a", "b"))
    for values, expected in (
        ({"depth": 1}, "depth is 1; it must be a number below 1"),
        ({"names": ["a"] * 3}, "two are enough"),
        ({"dept": 0.1}, "did you mean depth?"),
    ):
        with pytest.raises(InputError) as caught:
            house(**values)
        assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("name", "allowed", "form"),
    [
        ("brush", "none or fine", "value"),
        ("names", "names", "list"),
        ("height", "a whole number of metres of at least 1", "value"),
        ("slope", "a number of at least 0 and below 1", "value"),
        ("dry", "true, false or auto", "value"),
    ],
)
def test_what_is_allowed_follows_from_type_and_bounds(name: str, allowed: str, form: str) -> None:
    field = House.model_fields[name]
    assert (declared(field, "allowed"), declared(field, "form")) == (allowed, form)


def test_a_default_may_be_omitted_where_settings_are_saved() -> None:
    assert "colour" not in house().model_dump()
    assert house(colour="blue").model_dump()["colour"] == "blue"
    assert house().model_dump()["depth"] == 0.5


def test_flags_are_kept() -> None:
    fields = House.model_fields.items()
    assert [name for name, field in fields if flag(field, "affects_bits")] == ["brush"]


def test_a_setting_of_two_choices_comes_from_a_common_base() -> None:
    shapes: Registry[Choice] = Registry("shape")

    @dataclass(frozen=True)
    class Round(Choice):
        size: int = setting(1, "size", "a whole number")

    @shapes.register("ball")
    @dataclass(frozen=True)
    class Ball(Round): ...

    @shapes.register("disc")
    @dataclass(frozen=True)
    class Disc(Round): ...

    assert "size" in with_choices(shapes)(Wall).model_fields

    @shapes.register("cube")
    @dataclass(frozen=True)
    class Cube(Choice):
        size: int = setting(2, "size", "a whole number")

    with pytest.raises(TypeError, match="size is declared by two choices"):
        with_choices(shapes)(Wall)
