"""Compilers for ``torch.compile`` and for Triton, found without loading PyTorch."""

import importlib.metadata
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path


def cpp_compiler() -> str | None:
    """Find the C++ compiler of ``torch.compile`` on a CPU; None without one."""
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def c_compiler() -> str | None:
    """Find the C compiler that Triton uses; None without one.

    As Triton does it (``triton/runtime/build.py`` of 3.7.1): CC is the name of one program, without
    options, and where it is set there is no other.
    """
    given = os.environ.get("CC")
    return shutil.which("gcc") or shutil.which("clang") if given is None else shutil.which(given)


def python_header() -> Path:
    """Return where Triton includes ``Python.h`` from, whether it is there or not."""
    scheme = sysconfig.get_default_scheme()
    # Triton does not look into the folder of Debian's own scheme.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    return Path(sysconfig.get_path("include", scheme), "Python.h")


def missing_for_triton() -> str | None:
    """Name what Triton lacks to compile for GPUs here; None if nothing.

    Beside a kernel it compiles a module of Python that launches it, with a C compiler.
    """
    missing = []
    if importlib.util.find_spec("triton") is None:
        missing.append("Triton, which PyTorch's builds for CUDA bring")
    if c_compiler() is None:
        given = os.environ.get("CC")
        name = "gcc or clang" if given is None else f"CC is {given!r}, and has to name a program"
        missing.append(f"a C compiler ({name})")
    if not (header := python_header()).exists():
        missing.append(f"Python's header {header} (a package as python3-dev)")
    return ", ".join(missing) or None


def triton_version() -> str:
    """Return the version of the Triton that compiles for GPUs here, or "none"."""
    if missing_for_triton():
        return "none"
    for package in ("triton", "pytorch-triton"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
