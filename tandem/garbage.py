"""Python's garbage collector, kept from looking in vain."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Context manager: collect no garbage within, nor ever of what there is at the end.

    For the set-up of a process of our own. Importing PyTorch and PyTensor makes 350,000 objects
    that stay, and collections, which come with the number of objects, take a second to go through
    them until the first step.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
