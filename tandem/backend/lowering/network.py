"""The Ops of `tandem.ops` on PyTorch's kernels."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from pytensor.graph.basic import Apply

from tandem.backend.lowering.registry import Lowering, computed, lower, torch_dtype, unsupported
from tandem.ops.crop import CropMirror
from tandem.ops.dropout import Dropout, DropoutMask
from tandem.ops.lrn import LRN, LRNGrad
from tandem.ops.relu import Relu, ReluGrad
from tandem.philox import philox4x32

Tensor = torch.Tensor
aten = torch.ops.aten


@lower.register(Relu)
def lower_relu(op: Relu, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    return computed(torch.relu, reuse={0: torch.relu_})


@lower.register(ReluGrad)
def lower_relu_grad(op: ReluGrad, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    def over_g(y: Tensor, g: Tensor) -> Tensor:
        return aten.threshold_backward.grad_input(g, y, 0, grad_input=g)

    return computed(lambda y, g: aten.threshold_backward(g, y, 0), reuse={1: over_g})


def _inverse_power(scale: Tensor, beta: float) -> Tensor:
    """Compute ``scale ** -beta``.

    For beta = 0.75 by two square roots, which agrees to rounding and takes a third of the time.
    """
    if beta != 0.75:
        return torch.pow(scale, -beta)
    root = torch.rsqrt(scale)
    return root * torch.sqrt(root)


def _window_sums(x: Tensor, size: int) -> Tensor:
    """Sum over a window of channels, in a form that ``torch.compile`` fuses."""
    half, channels = size // 2, x.shape[1]
    padded = F.pad(x, (0, 0, 0, 0, half, half))
    total = padded[:, :channels]
    for first in range(1, size):
        total = total + padded[:, first : first + channels]
    return total


def _image_loops(device: torch.device, compiled: bool) -> Any:
    """The module of loops for a CPU; None where PyTorch's kernels are used."""
    if compiled or device.type != "cpu":
        return None
    from tandem.backend import image_loops  # imports numba

    return image_loops


@lower.register(LRN)
def lower_lrn(op: LRN, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    size, alpha, beta, k = op.size, op.alpha, op.beta, op.k
    if beta == 0.75 and (loops := _image_loops(device, compiled)):
        return computed(lambda x: loops.lrn(x, size, alpha, k))

    def lrn(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = k + alpha * _window_sums(x * x, size)
        return x * _inverse_power(scale, beta), scale

    return computed(lrn)


@lower.register(LRNGrad)
def lower_lrn_grad(op: LRNGrad, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    size, alpha, beta = op.size, op.alpha, op.beta
    if beta == 0.75 and (loops := _image_loops(device, compiled)):
        return computed(lambda x, scale, g: loops.lrn_gradient(x, scale, g, size, alpha))

    def gradient(x: Tensor, scale: Tensor, g: Tensor) -> Tensor:
        scaled = g * _inverse_power(scale, beta)
        return scaled - 2 * alpha * beta * x * _window_sums(scaled * x / scale, size)

    return computed(gradient)


@lower.register(DropoutMask)
def lower_dropout_mask(
    op: DropoutMask, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    dtype = torch_dtype(node.outputs[0])
    kept = _kept_units(op, op.units, device)
    return computed(lambda *keys: kept(*keys).to(dtype))


@lower.register(Dropout)
def lower_dropout(op: Dropout, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    factor = op.factor
    if device.type == "cpu" and not compiled:
        from tandem.backend import dropout_loops  # imports numba

        numbers = op.purpose, op.threshold, factor, op.first
        return computed(lambda x, *keys: dropout_loops.dropout(x, keys, *numbers))
    shape = node.inputs[0].type.shape[1:]
    if None in shape:
        raise unsupported(node, "the number of units must be known")
    kept = _kept_units(op, math.prod(shape), device)

    def dropout(x: Tensor, seed: Tensor, epoch: Tensor, indices: Tensor) -> Tensor:
        mask = kept(seed, epoch, indices).view(len(x), *shape[1:], shape[0])
        return torch.where(mask.movedim(-1, 1), x * factor, 0)

    return computed(dropout)


def _kept_units(
    op: Dropout | DropoutMask, units: int, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Make the call for which units are kept: (batch, unit), from seed, epoch and indices."""
    last = op.first + units
    # Made outside of `kept`, since torch.compile takes multiples of a range for 32-bit numbers.
    blocks = torch.arange(op.first // 4, -(-last // 4), device=device).unsqueeze(0)
    purpose, threshold, skipped = op.purpose, op.threshold, op.first % 4

    def kept(seed: Tensor, epoch: Tensor, indices: Tensor) -> Tensor:
        counter: tuple[Any, Any, Any, Any] = (blocks, indices.unsqueeze(1), epoch, purpose)
        words = torch.stack(torch.broadcast_tensors(*philox4x32(counter, seed)), dim=-1)
        return (words >= threshold).flatten(1)[:, skipped : skipped + units]

    return kept


@lower.register(CropMirror)
def lower_crop_mirror(
    op: CropMirror, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    dtype = torch_dtype(node.outputs[0])
    crop, cropped = op.crop_size, op.cropped
    on_host = device.type == "cpu" and not compiled

    def check_windows(mean: Tensor, origins: Tensor) -> None:
        for number, (row, column) in enumerate(origins.tolist()):
            if not (0 <= row <= mean.shape[1] - crop and 0 <= column <= mean.shape[2] - crop):
                raise ValueError(
                    f"the window of {crop} x {crop} at {(row, column)} of picture {number} does "
                    f"not lie in a mean image of {mean.shape[1]} x {mean.shape[2]}"
                )

    def by_picture(
        pictures: Tensor, mean: Tensor, origins: Tensor, mirrored: Tensor, *added: Tensor
    ) -> Tensor:
        # The colours of a pixel stay side by side, as in the pictures, which makes the first
        # convolution faster.
        out = torch.empty((len(pictures), crop, crop, 3), dtype=dtype).permute(0, 3, 1, 2)
        mean = mean.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        check_windows(mean, origins)
        places = zip(origins.tolist(), mirrored.tolist(), strict=True)
        for number, ((row, column), mirror) in enumerate(places):
            window = (slice(row, row + crop), slice(column, column + crop))
            picture = pictures[number] if cropped else pictures[number][window]
            part = picture.permute(2, 0, 1)
            mean_part = mean[:, *window]
            if mirror:
                mean_part = mean_part.flip(2)
                part = part if cropped else part.flip(2)
            torch.sub(part, mean_part, out=out[number])
            for colours in added:
                out[number] += colours[number].to(dtype)[:, None, None]
        return out

    block, (channels, side, _) = op.block, op.image_shape

    def by_index(
        pictures: Tensor, mean: Tensor, origins: Tensor, mirrored: Tensor, *added: Tensor
    ) -> Tensor:
        if on_host:  # a GPU would be waited for, and a graph that is compiled has no origins yet
            check_windows(mean, origins)
        # Rows and columns of the crop by square, then within it.
        steps = torch.arange(side * block, device=device).clamp(max=crop - 1).view(side, block)
        backwards = mirrored.to(torch.bool)[:, None, None]
        rows = (origins[:, :1, None] + steps)[:, :, None, :, None]
        columns = origins[:, 1:, None] + torch.where(backwards, crop - 1 - steps, steps)
        columns = columns[:, None, :, None, :]
        if cropped:
            inside = pictures[:, steps[:, None, :, None], steps[:, None]]
        else:
            numbers = torch.arange(len(pictures), device=device)[:, None, None, None, None]
            inside = pictures[numbers, rows, columns]
        images = inside.to(dtype) - mean.permute(1, 2, 0)[rows, columns]
        for colours in added:
            images = images + colours.to(dtype)[:, None, None, None, None]
        return images.reshape(-1, side, side, channels).permute(0, 3, 1, 2)

    # Copying picture by picture is fastest, but the host must know each window: it would wait for a
    # GPU, and torch.compile would break the graph.
    by_gather = not on_host or block > 1
    call = by_index if by_gather else by_picture
    return computed(call, certain=False)
