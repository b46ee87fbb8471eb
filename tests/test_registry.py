"""Choices by name, and the one checker of what they require."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.errors import InputError
from tandem.registry import Choice, Registry, Requirement, check, check_class, setting

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


def test_a_class_is_looked_for_in_the_source_and_nothing_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "looked_for").mkdir()
    files = {
        "__init__.py": "raise RuntimeError('imported')",
        "plain.py": "from tandem import registry as r\nclass Mine: ...\nOther = Mine",
        "starred.py": "from .plain import *",
        "made.py": "globals()['Mine'] = int",
        "broken.py": "class",
    }
    for name, text in files.items():
        (tmp_path / "looked_for" / name).write_text(text)
    (tmp_path / "spaced" / "inner").mkdir(parents=True)  # a namespace, without __init__.py
    (tmp_path / "spaced" / "inner" / "plain.py").write_text(files["plain.py"])
    check_class("network", "spaced.inner.plain:Mine")
    with pytest.raises(InputError, match=r"plain has no class 'Mie'"):
        check_class("network", "spaced.inner.plain:Mie")
    for name in ("plain:Mine", "plain:Other", "plain:r", "starred:Mine", "made:Mine", "broken:X"):
        check_class("network", f"looked_for.{name}")
    with pytest.raises(InputError, match=r"plain has no class 'Mie'; did you mean .*plain:Mine?"):
        check_class("network", "looked_for.plain:Mie")
    with pytest.raises(InputError, match=r"no module 'looked_for.plan' for looked_for.plan:Mine"):
        check_class("network", "looked_for.plan:Mine")
    with pytest.raises(InputError, match=r"did you mean tandem.registry:Choice?"):
        check_class("network", "tandem.registry:Choce")  # which is imported already
