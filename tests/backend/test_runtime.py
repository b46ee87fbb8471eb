"""What a process's PyTorch keeps, and what is said where memory ends."""

import weakref

import pytest
import scipy.linalg  # noqa: F401 (loads its OpenBLAS)
import torch
from threadpoolctl import threadpool_info, threadpool_limits  # of scikit-learn

from tandem.backend import give_back_memory
from tandem.backend.runtime import limit_openblas, out_of_memory


def test_what_nobody_refers_to_is_given_back() -> None:
    circle: list[object] = [torch.zeros(3)]
    circle.append(circle)
    seen = weakref.ref(circle[0])
    del circle
    give_back_memory()
    assert seen() is None


def test_a_shortage_names_what_needs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert str(out_of_memory(torch.OutOfMemoryError("CUDA\n out of memory"))) == (
        "cuda:1 has too little memory; a smaller batch_size or width, or data_on_gpu: false, needs "
        "less (CUDA out of memory)"
    )


def test_products_of_numpy_and_scipy_take_no_more_threads_than_pytorchs() -> None:
    with threadpool_limits(2, user_api="blas"):
        limit_openblas()
        found = {pool["filepath"]: pool["num_threads"] for pool in threadpool_info()}
    threads = torch.get_num_threads()
    for package in ("numpy.libs", "scipy.libs"):
        assert [n for path, n in found.items() if package in path] == [threads]
