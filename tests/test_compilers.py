"""What compiles for GPUs is looked for as Triton looks for it."""

import importlib.util
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.compilers import c_compiler, missing_for_triton, python_header, triton_version

Place = Callable[..., Path]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Makes programs, the only ones that are found; CC is not set."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)

    def make(*names: str) -> Path:
        for name in names:
            (tmp_path / name).write_text("#!/bin/sh\n")
            (tmp_path / name).chmod(0o755)
        return tmp_path

    return make


@pytest.fixture
def complete(tmp_path: Path, programs: Place, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All that Triton needs; returns the folder of Python's header."""
    programs("gcc")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton" or None)
    return tmp_path


@pytest.mark.parametrize(
    ("there", "cc", "expected"),
    [
        (["gcc", "clang", "cc"], None, "gcc"),
        (["clang", "cc"], None, "clang"),
        (["cc"], None, None),
        (["gcc", "other"], "other", "other"),
        (["gcc"], "other", None),
        (["gcc"], "", None),
        (["gcc"], "gcc -O1", None),
    ],
)
def test_the_c_compiler_is_the_one_that_triton_would_start(
    programs: Place,
    monkeypatch: pytest.MonkeyPatch,
    there: list[str],
    cc: str | None,
    expected: str | None,
) -> None:
    folder = programs(*there)
    if cc is not None:
        monkeypatch.setenv("CC", cc)
    assert c_compiler() == (expected and str(folder / expected))


def test_the_compiler_is_the_first_word_of_tritons_command(
    programs: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the header's folder is one of those that it includes from."""
    build = pytest.importorskip("triton.runtime.build", reason="pip install .[gpu-compile]")
    started: list[list[str]] = []
    monkeypatch.setattr(
        build.subprocess, "check_call", lambda command, **_: started.append(command)
    )
    folder = programs("gcc", "clang", "other words")
    for cc in (None, "other words"):
        if cc:
            monkeypatch.setenv("CC", cc)
        build._build("name", "source", str(folder), [], [], [], [])
        assert c_compiler() in (started[-1][0], str(folder / started[-1][0]))
        assert f"-I{python_header().parent}" in started[-1]


def test_debians_own_scheme_is_not_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: "posix_local")
    assert python_header() == Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")


def test_nothing_is_missing(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", {"triton": "3.7.1"}.__getitem__)
    assert missing_for_triton() is None
    assert triton_version() == "3.7.1"


def test_each_missing_piece_is_named(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (complete / "Python.h").unlink()
    assert missing_for_triton() == f"Python's header {complete}/Python.h (a package as python3-dev)"
    assert triton_version() == "none"
    (complete / "gcc").unlink()
    assert "a C compiler (gcc or clang), Python's header" in (missing_for_triton() or "")
    monkeypatch.setenv("CC", "icc -fast")
    assert "CC is 'icc -fast', and has to name a program" in (missing_for_triton() or "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert (missing_for_triton() or "").startswith("Triton, which PyTorch's builds for CUDA bring")
