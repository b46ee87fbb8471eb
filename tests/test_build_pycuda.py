"""Building PyCUDA for `make gpu`: each missing piece is named, and a compiler suffices."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import ROOT

SCRIPT = ROOT / "gpu" / "build_pycuda.py"


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("build_pycuda", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    """A folder of headers that name functions of the driver."""
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "cuda.h").write_text("#define cuMemAlloc cuMemAlloc_v2\nCUresult cuInit(int);\n")
    (folder / "cudaProfiler.h").write_text("CUresult cuProfilerStart(void);\n")
    return folder


def test_each_missing_piece_is_named(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path / "python")})
    with pytest.raises(SystemExit) as end:
        script.main(["--headers", str(tmp_path)])
    first, *pieces = str(end.value).splitlines()
    assert first == "error: PyCUDA can't be built here; it needs"
    compiler, python, cuda, profiler = pieces
    assert "C++ compiler" in compiler
    assert "Python.h" in python
    assert "cuda.h, of the package nvidia-cuda-runtime" in cuda
    assert "cudaProfiler.h, of the package nvidia-cuda-profiler-api" in profiler


def test_headers_that_cannot_be_fetched_are_named(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "pip", lambda *arguments, **variables: False)
    with pytest.raises(SystemExit, match=r"nvidia-cuda-runtime.*--headers"):
        script.main([])


def test_a_compiler_that_can_link_nothing_is_named(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, headers: Path
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'cannot find -lc' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    said = "a libcuda to be linked with, which .*compiler can't make: cannot find -lc"
    with pytest.raises(SystemExit, match=said):
        script.main(["--headers", str(headers)])


def test_the_stub_has_every_name_of_the_headers(script: Any, tmp_path: Path, headers: Path) -> None:
    compiler = script.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    assert script.link_stub(compiler, headers, tmp_path) is None
    library = (tmp_path / "libcuda.so").read_bytes()
    for name in (b"cuInit", b"cuMemAlloc_v2", b"cuProfilerStart", b"libcuda.so.1"):
        assert b"\0" + name + b"\0" in library


def without_toolkit() -> dict[str, str]:
    """This process's environment, with no nvcc on the path."""
    folders = os.environ["PATH"].split(os.pathsep)
    path = os.pathsep.join(f for f in folders if not (Path(f) / "nvcc").exists())
    return {**os.environ, "PATH": path}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_pycuda_is_built_without_a_cuda_toolkit(tmp_path: Path) -> None:
    probe = ["-m", "pip", "download", "--quiet", "--no-deps", "-d", str(tmp_path), "wheel"]
    if subprocess.run([sys.executable, *probe], check=False).returncode:
        pytest.skip("no package index can be reached")
    target, environment = tmp_path / "packages", without_toolkit()
    command = [sys.executable, str(SCRIPT), "--target", str(target)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    environment["PYTHONPATH"] = str(target)
    load = "import pycuda.driver as driver; print(driver.__file__, hasattr(driver, 'Context'))"
    found = subprocess.run(
        [sys.executable, "-c", load], env=environment, capture_output=True, text=True, check=False
    )
    # Without a driver here it gets as far as the driver's library.
    assert f"{target}/pycuda/driver.py True" in found.stdout or (
        "ImportError: libcuda.so.1: cannot open shared object file" in found.stderr
    ), found.stderr
