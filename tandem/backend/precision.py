"""How convolutions and matrix products are computed: in what precision, in what layout.

Both are a matter of the kernels alone. The graph's dtypes and shapes, the weights and momenta,
sums, normalisation and softmax stay as they are.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import torch
from pytensor.graph.basic import Apply
from pytensor.tensor.blas import BatchedDot
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.math import Dot

from tandem.backend.lowering import Lowering
from tandem.backend.lowering.registry import torch_dtype
from tandem.errors import InputError
from tandem.ops.conv import Conv2d, Conv2dInputGrad, Conv2dWeightGrad

Tensor = torch.Tensor
Precision = Literal["float32", "tf32", "bfloat16"]

_CONVOLUTIONS = (Conv2d, Conv2dInputGrad, Conv2dWeightGrad)


@dataclass(frozen=True)
class ProductPrecision:
    """How the heavy nodes of a float32 graph are computed.

    Parameters
    ----------
    precision : "float32", "tf32" or "bfloat16"
        Of the operands of convolutions and matrix products. "tf32" keeps 10 bits after the leading
        one, on CUDA devices that can, and "bfloat16" 7; products are added up in float32 either
        way, and what comes out of bfloat16 is rounded to it once. bfloat16 has the exponents of
        float32, so gradients don't vanish as in float16, and the loss needs no scaling.
    channels_last : bool
        Whether convolutions see pictures and filters with the channels of a pixel side by side, as
        the tensor cores of a GPU want them. Values are the same to rounding.
    """

    precision: Precision = "float32"
    channels_last: bool = False

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            allowed = ", ".join(get_args(Precision))
            raise InputError(f"precision is {self.precision!r}; allowed are {allowed}")


def set_tf32(wanted: bool) -> None:
    """Let this process's float32 convolutions and matrix products on CUDA round to tf32, or not.

    Products of bfloat16 are added up in float32 either way, which PyTorch by itself does not ask
    for where a product is computed in parts.
    """
    torch.backends.cuda.matmul.allow_tf32 = wanted
    torch.backends.cudnn.allow_tf32 = wanted
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def deterministic(wanted: bool) -> None:
    """Make this process compute the same bits every time, as an exact resume needs; or as fast.

    To be called before the first work on a GPU and before functions are compiled. An operation that
    has no deterministic kernel then raises RuntimeError.

    Parameters
    ----------
    wanted : bool
        Without it, cuDNN tries its algorithms on the shapes that it meets and takes the fastest,
        which may be another one in the next run.
    """
    # cuBLAS reads it when it starts: with several streams, the same bits need fixed workspaces.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.deterministic = wanted
    torch.backends.cudnn.benchmark = not wanted
    torch.use_deterministic_algorithms(wanted)


def fit(lowering: Lowering, node: Apply, kernels: ProductPrecision) -> Lowering:
    """Give the lowering of a node in the precision and the layout that are wanted.

    Parameters
    ----------
    lowering : Lowering
        What computes the node as the graph says.
    node : Apply
        The node. All but convolutions and matrix products stay as they are.
    kernels : ProductPrecision
        What is wanted.
    """
    narrow = kernels.precision == "bfloat16" and _is_float32(node)
    if isinstance(node.op, _CONVOLUTIONS) and (narrow or kernels.channels_last):
        operands = 2 if isinstance(node.op, Conv2d) else 3  # a bias stays as it is
        convert = _converter(narrow, kernels.channels_last)
    elif narrow and _is_product(node):
        operands, convert = 2, _converter(narrow, False)
    else:
        return lowering
    call = _with_wide_bias(lowering.call) if operands < len(node.inputs) else lowering.call
    return Lowering(
        _with_result(call, torch_dtype(node.outputs[0])),
        prepare=dict.fromkeys(range(operands), convert),
    )


def _is_float32(node: Apply) -> bool:
    return all(v.type.dtype == "float32" for v in (*node.inputs, *node.outputs))


def _is_product(node: Apply) -> bool:
    op = node.op.core_op if isinstance(node.op, Blockwise) else node.op
    return isinstance(op, Dot | BatchedDot)


@cache
def _converter(narrow: bool, channels_last: bool) -> Callable[[Tensor], Tensor]:
    layout = torch.channels_last if channels_last else torch.preserve_format

    def convert(x: Tensor) -> Tensor:
        return x.to(torch.bfloat16 if narrow else x.dtype, memory_format=layout)

    return convert


def _with_result(call: Callable[..., Tensor], dtype: torch.dtype) -> Callable[..., Tensor]:
    return lambda *operands: call(*operands).to(dtype)


def _with_wide_bias(call: Callable[..., Any]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Add a convolution's bias afterwards where it would be rounded as the operands are."""

    def convolve(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        if x.dtype == b.dtype:
            return call(x, w, b)
        # torch.compile fuses it with what follows.
        return call(x, w, None).to(b.dtype) + b[:, None, None]

    return convolve
