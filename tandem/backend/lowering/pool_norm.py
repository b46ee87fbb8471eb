"""Pooling, ReLU and normalisation in one kernel, on GPUs with Triton."""

from collections.abc import Sequence
from typing import Any

import torch
from pytensor.graph.basic import Apply

from tandem.backend.lowering.registry import Lowering, computed, lower, unsupported
from tandem.ops.pool_norm import Norm, PoolNorm, PoolNormGrad

Tensor = torch.Tensor

# Elements of a row of images that a kernel holds. Above 4096 a thread's registers don't suffice:
# for an H200 the assembler reports 184 bytes of a thread in memory. Their cost was not measured.
_LARGEST_TILE = 8192


def fits(op: PoolNorm, images: Sequence[int | None]) -> bool:
    """Test if the kernels can take images of a static shape (batch, channel, row, column)."""
    _, channels, rows, columns = images
    if channels is None or rows is None or columns is None:
        return False
    blocks = -(-columns // op.stride)
    tile = max(8, _power_of_2(channels)) * _power_of_2(blocks)
    # Windows that begin in more than two blocks would have to be added up.
    overlap = op.stride <= op.size <= 2 * op.stride and op.size**2 < 128
    window = op.norm is None or op.norm[0] <= 9
    return tile <= _LARGEST_TILE and overlap and window


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


@lower.register(PoolNorm)
def lower_pool_norm(op: PoolNorm, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    _require_gpu(node, device)
    size, stride, norm = op.size, op.stride, _numbers(op.norm)

    def forward(x: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y, places, z = _pool_norm(_channels_last(x), b, size, stride, norm)
        return (y, places, z) if norm else (y, places)

    return computed(forward, factors=(0,), images=True)


@lower.register(PoolNormGrad)
def lower_pool_norm_grad(
    op: PoolNormGrad, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    _require_gpu(node, device)
    size, stride, norm, image = op.size, op.stride, _numbers(op.norm), list(op.image)

    def gradient(y: Tensor, places: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        inputs = [_channels_last(x) for x in (y, places, g)]
        return _pool_norm_grad(*inputs, image, size, stride, norm)

    return computed(gradient, factors=(0, 2), images=True)


def _require_gpu(node: Apply, device: torch.device) -> None:
    if device.type == "cpu":
        raise unsupported(node, "its kernel is for GPUs")


def _numbers(norm: Norm | None) -> list[float]:
    """As an operator of PyTorch takes it: empty for None."""
    return [float(number) for number in norm or ()]


def _norm(numbers: Sequence[float]) -> Norm | None:
    if not numbers:
        return None
    window, alpha, beta, k = numbers
    return int(window), alpha, beta, k


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("tandem::pool_norm", mutates_args=())
def _pool_norm(
    x: Tensor, b: Tensor, size: int, stride: int, norm: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    from tandem.backend import pool_norm_kernels

    results = _empty_results(x, b, size, stride, norm)
    pool_norm_kernels.forward(x, b, results, size, stride, _norm(norm))
    return results


@_pool_norm.register_fake
def _empty_results(
    x: Tensor, b: Tensor, size: int, stride: int, norm: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    pooled = [(n - size) // stride + 1 for n in x.shape[2:]]
    shape = [*x.shape[:2], *pooled]
    places = _empty(x, shape, torch.int8)
    return _empty(x, shape, x.dtype), places, _empty(x, shape if norm else [0] * 4, x.dtype)


@torch.library.custom_op("tandem::pool_norm_grad", mutates_args=())
def _pool_norm_grad(
    y: Tensor,
    places: Tensor,
    g: Tensor,
    image: Sequence[int],
    size: int,
    stride: int,
    norm: Sequence[float],
) -> tuple[Tensor, Tensor]:
    from tandem.backend import pool_norm_kernels

    dx = _empty(y, [*y.shape[:2], *image], y.dtype)
    return dx, pool_norm_kernels.backward((y, places, g), dx, size, stride, _norm(norm))


@_pool_norm_grad.register_fake
def _(y: Tensor, places: Tensor, g: Tensor, image: Sequence[int], *_: Any) -> tuple[Tensor, Tensor]:
    dx = _empty(y, [*y.shape[:2], *image], y.dtype)
    return dx, torch.empty(y.shape[1], dtype=torch.float32, device=y.device)


def _empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(
        list(shape), dtype=dtype, device=like.device, memory_format=torch.channels_last
    )
