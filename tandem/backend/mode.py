"""The PyTensor mode of a device."""

from collections.abc import Callable, Iterable
from typing import get_args

import torch
from pytensor.compile.mode import Mode

from tandem.backend.channel import Channel
from tandem.backend.gpu_rewrites import GPU, TRITON
from tandem.backend.inner_graphs import REWRITES
from tandem.backend.linker import DeviceLinker
from tandem.backend.norm_rewrites import BY_LOOPS
from tandem.backend.precision import Precision, ProductPrecision, set_tf32
from tandem.backend.regions import REGIONS
from tandem.backend.runtime import as_device, require_compiler
from tandem.backend.schedule import Observe, Results
from tandem.compilers import missing_for_triton
from tandem.errors import InputError
from tandem.processor import Convolutions, describe_processor, prefers_winograd


def device_mode(
    device: str | torch.device = "cpu",
    compile: bool = False,
    precision: Precision = "float32",
    *,
    channels_last: bool = True,
    convolutions: Convolutions = "auto",
    tune: bool = False,
    on_gradient_ready: Callable[[str], None] | None = None,
    buckets: Iterable[Iterable[str]] = (),
    strict: bool = False,
    results: Results = "host",
    channel: Channel | None = None,
    observe: Observe | None = None,
    regions: bool = False,
) -> Mode:
    """Return a PyTensor mode whose functions run PyTorch's kernels on a device.

    It is used as any other: ``pytensor.function(inputs, outputs, updates=..., givens=...,
    mode=device_mode("cpu"))``. Arguments and results are NumPy arrays; an argument may also be a
    tensor on the device, where the function is made with `trust_input`. Variables made by
    `device_shared` stay on the device and are updated in place, as if after everything else had
    been computed; ordinary shared variables are copied to the device in every call.

    Parameters
    ----------
    device : str or torch.device
        "cpu", or a CUDA device as "cuda:0".
    compile : bool
        Compile functions with ``torch.compile``, which fuses elementwise calls. The first call of a
        function then takes from seconds to minutes.
    precision : "float32", "tf32", "bfloat16" or "float64"
        Of the operands of convolutions and matrix products of float32; "float64" is for graphs of
        float64, which no word narrows. Whether float32 means tf32 on CUDA is PyTorch's setting for
        the whole process, and this sets it.
    channels_last : bool
        Whether convolutions take the channels of a pixel side by side.
    convolutions : "auto", "direct" or "winograd"
        On a CPU, "winograd": by Winograd's products where they are expected to be faster;
        "auto" decides by the processor.
    tune : bool
        With `compile`, try several kernels for each convolution and product, which takes minutes.
    on_gradient_ready : callable, optional
        Called in the middle of a function with the name of each variable of `device_shared` that
        it updates, when the new value is in place and the function no longer reads it, so that
        gradients can be sent while those of earlier layers are being computed. On a GPU it is
        called when the work has been put on the stream, not when it is done. The function is cut
        into segments for it, which are compiled and captured one by one.
    buckets : iterable of iterables of str
        With `on_gradient_ready`, disjoint groups of names of variables that are reported together,
        each as early as possible. The function is cut behind each group but the last; variables of
        no group are reported at its end. By default each variable is a group.
    strict : bool
        Refuse an Op that has no kernel here, with NotImplementedError. By default it is computed by
        its own `perform` on the host: on a CPU without a copy, on a CUDA device with one and a
        warning. ``torch.compile`` breaks the function there.
    results : "host" or "device"
        "device": results are tensors on the device, for which the host does not wait. Numbers that
        are computed on the host, such as lengths of axes, remain arrays.
    channel : Channel, optional
        By which the Ops of `tandem.ops.collective` reach the functions of other ranks, such as
        `tandem.distributed.make_channel` makes. All ranks then call their functions in the same
        order. Without it such an Op is refused, with NotImplementedError. ``torch.compile`` breaks
        a function at each, and it can't be recorded by `capture`.
    observe : callable, optional
        ``observe(node, call) -> call`` wraps each call of a function's program when it is made: the
        kernel of a node, and beside it a conversion of an operand or a copy of its result. So their
        times can be measured. What is inside of a loop or a branch belongs to its node.
    regions : bool
        On a CPU, compute loops, and other parts of a graph whose arrays are small, by machine code
        of PyTensor's Numba backend: one call where there would be one for each Op. Whether arrays
        are small is decided by the shapes of each call, so equal calls give equal bits. The first
        such call of a function compiles for seconds, or loads what a former process compiled.

    Raises
    ------
    InputError
        The device does not exist, a word is unknown, `compile` is set and a compiler is missing, it
        is set with `observe`, or `regions` with it, a GPU or products of half precision.
    """
    target = as_device(device)
    if convolutions not in get_args(Convolutions):
        allowed = ", ".join(get_args(Convolutions))
        raise InputError(f"convolutions is {convolutions!r}; allowed are {allowed}")
    if convolutions == "auto":
        convolutions = "winograd" if prefers_winograd(describe_processor()) else "direct"
    by_winograd = convolutions == "winograd" and target.type == "cpu"
    products = ProductPrecision(precision, channels_last, by_winograd)
    if results not in get_args(Results):
        raise InputError(f"results is {results!r}; allowed are {', '.join(get_args(Results))}")
    if compile:
        if observe is not None:
            raise InputError("with compile the calls of a program are fused, so none is observed")
        require_compiler(target)
    set_tf32(precision == "tf32")
    linker = DeviceLinker(
        target,
        compile,
        products,
        tune,
        on_gradient_ready,
        strict,
        buckets,
        results,
        channel,
        observe,
    )
    if regions and (compile or target.type != "cpu" or precision not in ("float32", "float64")):
        raise InputError(
            f"regions: found it with device {device}, compile {compile} and precision {precision},"
            " expected the CPU, without compile, and float32 or float64"
        )
    rewrites = REWRITES.including(REGIONS) if regions else REWRITES
    if target.type == "cuda":
        rewrites = rewrites.including(GPU, *([] if missing_for_triton() else [TRITON]))
    elif not compile:
        rewrites = rewrites.including(BY_LOOPS)
    return Mode(linker, rewrites)
