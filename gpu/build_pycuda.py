"""Build and install PyCUDA with a C++ compiler, without a CUDA toolkit: python gpu/build_pycuda.py

PyCUDA is distributed as source. Of CUDA it needs, to be compiled, the headers cuda.h and
cudaProfiler.h, which are fetched from the package index, and a libcuda to be linked with. That one
belongs to the driver, so it is linked with a stub that has every name of the headers and does
nothing; a program loads the driver's own libcuda.so.1. PyCUDA is built without cuRAND, which this
project does not use, and nvcc is not needed.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"
HEADERS = {"cuda.h": "nvidia-cuda-runtime", "cudaProfiler.h": "nvidia-cuda-profiler-api"}
"""Headers of CUDA, each with the package that has it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Build and install; end with a message that names each missing piece."""
    parser = argparse.ArgumentParser(description="Build and install PyCUDA without a CUDA toolkit.")
    parser.add_argument("--headers", type=Path, help="folder of cuda.h and cudaProfiler.h")
    parser.add_argument("--target", type=Path, help="folder to install into; default: this Python")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder, compiler = Path(name), find_compiler()
        headers = given.headers or fetch_headers(folder / "headers")
        missing = missing_files(headers)
        if compiler is None:
            missing.insert(0, "a C++ compiler: g++ or clang++, or the one that CXX names")
        elif not missing and (error := link_stub(compiler, headers, folder)):
            missing.append(f"a libcuda to be linked with, which {compiler[0]} can't make: {error}")
        if compiler is None or missing:
            lines = "".join(f"\n  - {piece}" for piece in missing)
            raise SystemExit(f"error: PyCUDA can't be built here; it needs{lines}")
        install(compiler, headers, folder, given.target)


def find_compiler() -> list[str] | None:
    """Return the command of the C++ compiler; None if there is none."""
    commands = [shlex.split(os.environ["CXX"])] if os.environ.get("CXX") else []
    commands += [] if commands else [["c++"], ["g++"], ["clang++"]]
    return next((command for command in commands if shutil.which(command[0])), None)


def fetch_headers(folder: Path) -> Path:
    """Fetch the packages of CUDA's headers; return the headers' folder."""
    pip("install", "--no-deps", "--target", str(folder), *HEADERS.values())
    return next(folder.glob("nvidia/cu*/include"), folder)


def missing_files(headers: Path) -> list[str]:
    """Name each header that is not there, with what brings it."""
    python = Path(sysconfig.get_paths()["include"]) / "Python.h"
    found = [] if python.exists() else [f"Python's header {python}: a package as python3-dev"]
    return found + [
        f"CUDA's header {header}, of the package {package}, which is not in {headers}; with a CUDA "
        "toolkit give its folder by --headers"
        for header, package in HEADERS.items()
        if not (headers / header).exists()
    ]


def link_stub(compiler: Sequence[str], headers: Path, folder: Path) -> str | None:
    """Make a library with all names of the driver's; return any error."""
    names = {
        name
        for header in HEADERS
        for name in re.findall(r"\bcu[A-Z]\w*", (headers / header).read_text())
    }
    source, library = folder / "libcuda.cpp", folder / "libcuda.so.1"
    functions = "".join(f"void {name}() {{}}\n" for name in sorted(names))
    source.write_text(f'#include <vector>\nextern "C" {{\n{functions}}}\n')
    shared = ["-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library)]
    result = subprocess.run(
        [*compiler, *shared, str(source)], capture_output=True, text=True, check=False
    )
    if result.returncode == 0:
        (folder / "libcuda.so").symlink_to(library.name)
        return None
    return (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[0]


def install(compiler: Sequence[str], headers: Path, libcuda: Path, target: Path | None) -> None:
    """Compile PyCUDA, install it, and load it with the stub."""
    settings = (
        f"CUDA_ENABLE_CURAND = False; CUDA_INC_DIR = [{str(headers.resolve())!r}]; "
        f"CUDADRV_LIB_DIR = [{str(libcuda)!r}]"
    )
    option = f"--global-option={shlex.quote(f'--conf:{settings}')}"
    place = [] if target is None else ["--target", str(target)]
    # Another build of it, for another CUDA, may be in the cache.
    build = ["--no-deps", "--no-cache-dir", "--no-binary", "pycuda", "--config-settings", option]
    command = shlex.join(compiler)
    if not pip("install", *build, *place, "pycuda", CC=command, CXX=command):
        raise SystemExit("error: PyCUDA could not be built; the messages above say why")
    search = {"LD_LIBRARY_PATH": str(libcuda)}
    if target is not None:
        search["PYTHONPATH"] = str(target)
    load = [sys.executable, "-c", "import pycuda._driver"]
    if subprocess.run(load, env={**os.environ, **search}, check=False).returncode:
        raise SystemExit("error: PyCUDA was built and can't be loaded")


def pip(*arguments: str, **variables: str) -> bool:
    """Run pip with this project's versions; return whether it succeeded."""
    # Also for the packages that a build needs:
    constraints = {"PIP_CONSTRAINT": str(CONSTRAINTS), "PIP_BUILD_CONSTRAINT": str(CONSTRAINTS)}
    environment = {**os.environ, **constraints, **variables}
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, env=environment, check=False).returncode == 0


if __name__ == "__main__":
    main()
