"""Precision, layout and algorithm by which convolutions and matrix products are computed.

They concern the kernels alone. The graph's dtypes and shapes, the weights, the optimizer's states
and softmax stay as they are. Sums and normalisation are computed in float32; with "bfloat16" on
a GPU the fused kernel of pooling and normalisation stores its images (y, z) and their gradient (dx)
in bfloat16.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, get_args

import torch
from pytensor.graph.basic import Apply

from tandem.backend.lowering import Lowering
from tandem.backend.lowering.registry import torch_dtype
from tandem.errors import InputError

Tensor = torch.Tensor
Precision = Literal["float32", "tf32", "bfloat16", "float64"]
"""The words of the setting, but for its "auto"."""


@dataclass(frozen=True)
class ProductPrecision:
    """The precision in which the heavy nodes of a float32 graph are computed.

    "tf32" keeps 10 bits after the leading one, on CUDA devices that support it, and "bfloat16" 7;
    products are added up in float32 either way, and a bfloat16 result is rounded once. bfloat16 has
    the exponents of float32, so gradients don't vanish as in float16, and the loss needs no
    scaling. With "float64", as with "float32", each product has the dtype of its operands: it is
    the word for graphs of float64, whose products are never narrowed.
    """

    precision: Precision = "float32"  # of the operands of convolutions and matrix products
    channels_last: bool = False  # of images and filters; values are the same to rounding
    by_winograd: bool = (
        False  # convolutions of float32, where a count of operations predicts a gain
    )

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            allowed = ", ".join(get_args(Precision))
            raise InputError(f"precision is {self.precision!r}; allowed are {allowed}")


def set_tf32(wanted: bool) -> None:
    """Set whether this process's float32 products on CUDA round to tf32.

    Products of bfloat16 are added up in float32 either way, which is not PyTorch's default where a
    product is computed in parts.
    """
    torch.backends.cuda.matmul.allow_tf32 = wanted
    torch.backends.cudnn.allow_tf32 = wanted
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def deterministic(wanted: bool) -> None:
    """Choose between the same bits in every run and the fastest kernels, for this process.

    To be called before the first work on a GPU and before functions are compiled. With `wanted`, as
    an exact resume needs, an operation that has no deterministic kernel raises RuntimeError.
    Otherwise cuDNN tries its algorithms on each shape and takes the fastest, which may differ in
    the next run.
    """
    # cuBLAS reads it at start-up: with several streams, the same bits need fixed workspaces.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.deterministic = wanted
    torch.backends.cudnn.benchmark = not wanted
    torch.use_deterministic_algorithms(wanted)
    # Nothing here reads memory before writing it: filling it first would only take time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def fit(lowering: Lowering, node: Apply, precision: ProductPrecision) -> Lowering:
    """Return the lowering of a node as `precision` has it, if it has factors."""
    narrow = (
        precision.precision == "bfloat16"
        and bool(lowering.factors)
        and all(v.type.dtype != "float64" for v in (*node.inputs, *node.outputs))
        and all(node.inputs[index].type.dtype == "float32" for index in lowering.factors)
    )
    if precision.by_winograd and not narrow and lowering.winograd is not None:
        return replace(lowering, call=lowering.winograd)
    channels_last = precision.channels_last and lowering.images
    if not (narrow or channels_last):
        return lowering
    call = lowering.call
    if narrow:
        call = _with_results(call, [torch_dtype(output) for output in node.outputs])
    return replace(
        lowering,
        call=call,
        prepare=dict.fromkeys(lowering.factors, _converter(narrow, channels_last)),
        into=None,
    )


@cache
def _converter(narrow: bool, channels_last: bool) -> Callable[[Tensor], Tensor]:
    layout = torch.channels_last if channels_last else torch.preserve_format

    def convert(x: Tensor) -> Tensor:
        return x.to(torch.bfloat16 if narrow else x.dtype, memory_format=layout)

    return convert


def _with_results(call: Callable[..., Any], dtypes: Sequence[torch.dtype]) -> Callable[..., Any]:
    if len(dtypes) == 1:
        return lambda *operands: call(*operands).to(dtypes[0])
    return lambda *operands: tuple(
        y.to(dtype) for y, dtype in zip(call(*operands), dtypes, strict=True)
    )
