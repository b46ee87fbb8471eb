"""What a process's PyTorch keeps."""

import weakref

import torch

from tandem.backend import give_back_memory


def test_what_nobody_refers_to_is_given_back() -> None:
    circle: list[object] = [torch.zeros(3)]
    circle.append(circle)
    seen = weakref.ref(circle[0])
    del circle
    give_back_memory()
    assert seen() is None
