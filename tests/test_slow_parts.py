"""The parts of the slow tests have all of them, each once."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests import slow
from tests.conftest import pytest_collection_modifyitems


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_chunks_divide_what_is_selected(parts: int) -> None:
    found: list[int] = []
    for number in range(1, parts + 1):
        deselected: list[int] = []
        config: Any = SimpleNamespace(
            getoption=lambda name, number=number: f"{number}/{parts}",
            hook=SimpleNamespace(pytest_deselected=lambda items, to=deselected: to.extend(items)),
        )
        items: Any = [*range(5)]
        pytest_collection_modifyitems(config, items)
        assert sorted(items + deselected) == [*range(5)]
        found += items
    assert found == [*range(5)]


def test_every_file_is_in_one_part() -> None:
    *named, (last, (parts, everything)) = slow.DIVIDED.items()
    assert everything == ["tests"]
    paths = [path for _, (_, paths) in named for path in paths]
    assert all((slow.ROOT / path).exists() for path in paths)
    assert {f"--ignore={path}" for path in paths} <= {*slow.arguments_of(f"{last}-{parts}")}
    assert "--ignore=tests/backend/test_fuzz.py" in slow.arguments_of("backend-1")
    assert "--ignore=tests/test_ranks.py" not in slow.arguments_of("backend-1")
    assert slow.turn() in slow.PARTS


def test_a_part_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        slow.main(["ranks-0"])
    assert "there is no part ranks-0: there are fuzz-1" in capsys.readouterr().err
