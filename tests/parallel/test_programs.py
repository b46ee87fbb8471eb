"""Programs as users write them, without a guard for `__main__`, on several numbers of workers."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tandem.parallel as synk
from tests.support.tiny import finish, start

FOLDER = Path(__file__).parent / "programs"
PROGRAMS = sorted(FOLDER.glob("*.py"))
TABLE = (
    *("fork", "function", "shared", "distribute", "close", "get_n_gpu", "data", "row_index"),
    *("broadcast", "scatter", "gather", "all_gather", "reduce", "all_reduce"),
    *("set_value", "get_value", "get_lengths", "get_shapes"),
    *("Function.__call__", "Function.build_inputs", "Function.as_theano"),
    *("Data.set_value", "Data.set_length", "Data.set_shape", "Data.condition_data"),
    "Data.free_memory",
)
FUNCTIONS = ("f", "g", "gradients")  # as the programs call them
OPS_OF_THE_TABLE = {
    *("avg", "uavg", "sum", "prod", "max", "min", "gather", "inc"),
    *("c_avg", "c_sum", "c_prod", "c_max", "c_min", "c_gather"),
}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program(program: Path, workers: int, tmp_path: Path) -> None:
    """It checks itself."""
    command = [sys.executable, "-W", "error::RuntimeWarning", str(program), str(workers)]
    output, _ = finish(start(command, tmp_path, stderr=subprocess.STDOUT), timeout=280)
    assert output.splitlines()[-1].endswith(f": {workers}"), output


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Each call in the programs, with the name of what is called."""
    for program in PROGRAMS:
        for node in ast.walk(ast.parse(program.read_text())):
            if isinstance(node, ast.Call):
                named = node.func
                yield getattr(named, "attr", getattr(named, "id", "")), node


def arguments(called: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(called).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


@pytest.mark.parametrize("name", TABLE)
def test_the_programs_use_every_argument(name: str) -> None:
    """By keyword, or by position."""
    owner, _, method = name.partition(".")
    called = getattr(synk, owner)
    wanted = arguments(getattr(called, method) if method else called)[bool(method) :]
    used: set[str] = set()
    for found, call in calls():
        if found == (method or owner) or (method == "__call__" and found in FUNCTIONS):
            used |= {keyword.arg for keyword in call.keywords if keyword.arg}
            used |= set(wanted[: len(call.args)])
    assert set(wanted) <= used


def test_the_programs_use_every_operation() -> None:
    words = {
        node.value
        for program in PROGRAMS
        for node in ast.walk(ast.parse(program.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert words >= OPS_OF_THE_TABLE
