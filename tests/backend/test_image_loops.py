"""Normalisation by compiled loops, against their Ops in float64; pooling; threads."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytensor.tensor as pt
import pytest
import torch

from tandem.backend.image_loops import lrn, lrn_gradient
from tandem.backend.lowering import lower
from tandem.ops import LRN, LRNGrad, MaxPool2d, MaxPool2dGrad

LAYOUTS = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "planes": lambda x: x.contiguous(),
    "every other column": lambda x: x.repeat_interleave(2, dim=3)[:, :, :, ::2],
}


def images(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    values = np.random.default_rng(sum(shape)).normal(size=shape)
    return torch.from_numpy(values).to(dtype)


def by_op(op: Any, *arrays: torch.Tensor) -> list[np.ndarray]:
    """The Op's own results, from floats in float64."""
    values = [x.numpy() if x.dtype == torch.int64 else x.double().numpy() for x in arrays]
    storage: list[list[Any]] = [[None], [None]]
    op.perform(None, values, storage)
    return [cell[0] for cell in storage if cell[0] is not None]


def lowered(op: Any, *arrays: torch.Tensor) -> list[torch.Tensor]:
    """Results of the kernels that a CPU gets."""
    node = op.make_node(*(pt.as_tensor_variable(x.numpy()) for x in arrays))
    found = lower(op, node, device=torch.device("cpu"), compiled=False).call(*arrays)
    return [*found] if isinstance(found, tuple) else [found]


def assert_channels_last(*images: torch.Tensor) -> None:
    for x in images:
        assert not x.numel() or x.is_contiguous(memory_format=torch.channels_last)


def assert_close(got: torch.Tensor, exact: np.ndarray) -> None:
    tolerance = 3e-7 if got.dtype == torch.float32 else 1e-14
    np.testing.assert_allclose(got.double(), exact, 0, tolerance * np.abs(exact).max(initial=0))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("channels", "size"), [(96, 5), (7, 3), (2, 5), (1, 1), (0, 3)])
def test_normalisation_and_its_gradient(
    channels: int, size: int, dtype: torch.dtype, layout: str
) -> None:
    x, g = (LAYOUTS[layout](30 * images(dtype, 3, channels, 5, n)) for n in (7, 7))
    g = g.flip(0)
    y, scale = lrn(x, size, 1e-4, 2.0)
    exact_y, exact_scale = by_op(LRN(size, 1e-4, 0.75, 2.0), x)
    assert_close(y, exact_y)
    assert_close(scale, exact_scale)
    gradient = lrn_gradient(x, scale, g, size, 1e-4)
    assert_close(gradient, *by_op(LRNGrad(size, 1e-4, 0.75, 2.0), x, scale, g))
    assert_channels_last(y, scale, gradient)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("shape", "size", "stride"),
    [
        ((3, 5, 13, 11), 3, 2),
        ((2, 1, 8, 9), 2, 2),
        ((1, 4, 9, 9), 2, 3),
        ((2, 3, 6, 5), 4, 1),
        ((2, 3, 5, 5), 5, 7),
        ((0, 3, 5, 5), 3, 2),
    ],
)
def test_pooling_and_its_gradient_are_exact(
    shape: tuple[int, ...], size: int, stride: int, dtype: torch.dtype, layout: str
) -> None:
    x = LAYOUTS[layout](images(dtype, *shape).mul(3).round())  # with equal maxima
    y, argmax = lowered(MaxPool2d(size, stride), x)
    exact_y, exact_places = by_op(MaxPool2d(size, stride), x)
    np.testing.assert_array_equal(y, exact_y)
    np.testing.assert_array_equal(argmax, exact_places)
    g = LAYOUTS[layout](images(dtype, *y.shape).mul(3).round())
    (gradient,) = lowered(MaxPool2dGrad(size, stride), x, argmax, g)
    np.testing.assert_array_equal(gradient, *by_op(MaxPool2dGrad(size, stride), x, argmax, g))
    assert_channels_last(y, argmax, gradient)


def test_a_nan_is_the_maximum_of_its_windows() -> None:
    x = torch.zeros((1, 1, 5, 5))
    x[0, 0, 1, 2] = torch.nan
    y, argmax = lowered(MaxPool2d(3, 2), x)
    np.testing.assert_array_equal(torch.isnan(y)[0, 0], [[True, True], [False, False]])
    assert argmax[0, 0, 0].tolist() == [7, 7]


def results() -> list[bytes]:
    x, g = images(torch.float32, 8, 96, 13, 13), images(torch.float32, 8, 96, 6, 6)
    y, scale = lrn(x, 5, 1e-4, 2.0)
    pooled, argmax = lowered(MaxPool2d(3, 2), x)
    found = [y, scale, lrn_gradient(x, scale, y, 5, 1e-4), pooled, argmax]
    found += lowered(MaxPool2dGrad(3, 2), x, argmax, g)
    return [tensor.numpy().tobytes() for tensor in found]


_BITS = """
import torch
from tests.backend.test_image_loops import results
found = []
for threads in (1, 2, 3):
    torch.set_num_threads(threads)
    found.append(results())
assert found[0] == found[1] == found[2]
"""

_THREADS = """
import numba, torch
from tandem.backend.image_loops import lrn
for threads in (1, 2, 1):
    torch.set_num_threads(threads)
    for _ in range(2):
        lrn(torch.randn(4, 4, 9, 9), 5, 1e-4, 2.0)
        assert torch.get_num_threads() == threads, (torch.get_num_threads(), threads)
        assert numba.get_num_threads() == threads, (numba.get_num_threads(), threads)
print(numba.threading_layer())
"""


def run_with_threads(program: str, **environment: str) -> str:
    """Run a program in a process of its own, where numba begins with three threads."""
    env = os.environ | {"NUMBA_NUM_THREADS": "3"} | environment
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=env
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_number_of_threads_changes_no_bit() -> None:
    run_with_threads(_BITS)


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_pytorch_keeps_its_number_of_threads_from_the_first_loop_on(layer: str) -> None:
    try:
        assert run_with_threads(_THREADS, NUMBA_THREADING_LAYER=layer) == layer
    except AssertionError as error:
        if "No threading layer could be loaded" in str(error):
            pytest.skip(f"numba finds no library for {layer} here")
        raise


def test_what_does_not_fit_is_refused() -> None:
    """A loop checks no bounds."""
    x = images(torch.float32, 2, 3, 9, 9)
    with pytest.raises(
        ValueError, match=r"scale has shape \(2, 2, 9, 9\), expected \(2, 3, 9, 9\)"
    ):
        lrn_gradient(x, x[:, :2], x, 5, 1e-4)


_AT_ONCE = """
import numba, torch
from concurrent.futures import ThreadPoolExecutor
from tests.backend.test_image_loops import results
torch.set_num_threads(2)
expected = results()
with ThreadPoolExecutor(4) as pool:
    found = list(pool.map(lambda _: results(), range(40)))
assert all(one == expected for one in found)
"""


@pytest.mark.slow
def test_threads_of_a_program_may_call_loops_at_the_same_time() -> None:
    """Also where numba has only its own pool of threads, which aborts when entered twice."""
    run_with_threads(_AT_ONCE, NUMBA_THREADING_LAYER="workqueue")
