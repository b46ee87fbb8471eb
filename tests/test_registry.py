"""Choices by name, and the one checker of what they require."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from tandem.errors import InputError
from tandem.registry import Choice, Registry, Requirement, check, setting

COLOURS: Registry[Choice] = Registry("colour")


@COLOURS.register("red")
@dataclass(frozen=True)
class Red(Choice):
    shade: float = setting(0.5, "how dark", "a number from 0 to 1", affects_bits=True, ge=0, le=1)

    requires = (
        Requirement(lambda run: run.paint, "is painted: bring paint"),
        Requirement(lambda run: run.walls < 4, "covers 3 walls, there are {walls}"),
    )


def test_a_choice_takes_the_settings_that_it_declares() -> None:
    assert list(COLOURS) == ["red"]
    assert COLOURS.make("red", {"shade": 0.25, "other": 3}) == Red(0.25)
    assert Red.name == "red"


@pytest.mark.parametrize(
    ("paint", "walls", "message"),
    [
        (False, 9, "colour: red is painted: bring paint"),
        (True, 4, "colour: red covers 3 walls, there are 4"),
    ],
)
def test_the_first_requirement_that_does_not_hold_is_reported(
    paint: bool, walls: int, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        check("colour", Red(), SimpleNamespace(paint=paint, walls=walls))
    assert str(caught.value) == message
    check("colour", Red(), SimpleNamespace(paint=True, walls=3))


def test_a_name_stands_for_one_choice() -> None:
    with pytest.raises(ValueError, match="red is registered twice"):
        COLOURS.register("red")(Red)
    with pytest.raises(TypeError, match="not a dataclass"):
        COLOURS.register("blue")(Choice)
