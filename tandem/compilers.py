"""Compilers that ``torch.compile`` and the kernels for GPUs need, found without loading PyTorch."""

import importlib.util
import os
import shutil


def cpp_compiler() -> str | None:
    """Find the C++ compiler that ``torch.compile`` would use on a CPU; None if there is none."""
    return _first(os.environ.get("CXX", ""), "g++", "clang++", "c++")


def has_triton() -> bool:
    """Whether Triton can compile for a GPU here: it needs a C compiler for the host's side."""
    compiler = _first(os.environ.get("CC", ""), "gcc", "clang", "cc")
    return importlib.util.find_spec("triton") is not None and compiler is not None


def _first(*names: str) -> str | None:
    return next((path for name in names if name and (path := shutil.which(name))), None)
