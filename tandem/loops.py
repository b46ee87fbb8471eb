"""Loops in machine code, by numba.

Importing this module imports numba, which takes time and memory: a process does so when it first
computes.
"""

import logging
from collections.abc import Callable
from typing import Any

import numba

log = logging.getLogger(__name__)


def compile_loop(loop: Callable[..., None], *sample: Any, **options: Any) -> Callable[..., None]:
    """Return a loop in machine code, which numba keeps on disk for the next run if it can.

    It is compiled for the types of `sample`, arguments with which it is called once, and runs
    without the interpreter's lock. Numbers are divided as NumPy does it: a check for 0 would let no
    loop be vectorised. `options` are those of ``numba.njit``.
    """
    options |= {"nogil": True, "error_model": "numpy"}
    try:
        compiled = numba.njit(loop, cache=True, **options)
        compiled(*sample)
    except Exception as error:  # no folder, a full disk, or whatever a damaged file leads to
        log.debug("numba's cache can't be used: %s", error)
        compiled = numba.njit(loop, **options)
        compiled(*sample)
    return compiled
