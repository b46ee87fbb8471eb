"""Python's garbage collector, kept from looking in vain."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Context manager: collect no garbage within, where much is made that stays.

    Importing PyTorch and PyTensor makes 350,000 objects. Collections, which come with their number,
    would go through them again and again: a quarter of the time of these imports.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
