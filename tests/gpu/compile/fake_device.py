"""A simulated H200 and a trainer's functions on fake CUDA tensors, for code generation alone.

`REPLACED` lists what is patched in the library. Call `simulate` before anything else.
"""

import ctypes
import itertools
import subprocess
import tempfile
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

REPLACED = (
    "tandem.backend.shared._wrap",
    "tandem.backend.aliasing._span",
    "tandem.backend.codegen._constant_tensor",
    "tandem.training.functions.capture",
    "tandem.memory.cuda.CudaBuffer.create",
)
H200: dict[str, Any] = {
    "name": "NVIDIA H200",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "warp_size": 32,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "total_memory": 150 << 30,
    "L2_cache_size": 60 << 20,
    "gcnArchName": "",
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472,
    "clock_rate": 1980000,
    "memory_clock_rate": 3201000,
    "memory_bus_width": 6144,
}


def simulate() -> None:
    """Make PyTorch and Triton believe in an H200; irrevocable.

    A CPU build of PyTorch lacks a guard of devices, which is compiled by g++.
    """
    if torch.version.cuda is None:
        with tempfile.TemporaryDirectory() as folder:
            ctypes.CDLL(str(_build_guard(Path(folder))))
    torch.set_num_threads(1)
    properties = types.SimpleNamespace(**H200)
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "get_device_name": "NVIDIA H200",
        "_lazy_init": None,
        "synchronize": None,
        "set_rng_state": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, _always(answer))
    torch.cuda.get_rng_state = lambda *_: torch.empty(16, dtype=torch.uint8)
    low_level = {
        "_cuda_getDevice": 0,
        "_cuda_getCurrentRawStream": 0,
        "_cuda_setDevice": None,
        "_cuda_exchangeDevice": 0,
        "_cuda_maybeExchangeDevice": 0,
        "_cuda_getDeviceCount": 1,
        "_select_conv_backend": torch._C._ConvBackend.Cudnn,
    }
    for name, answer in low_level.items():
        setattr(torch._C, name, _always(answer))
    torch._C._conv_determine_backend_memory_format = _memory_format
    torch.version.cuda = "13.0"
    torch.backends.cuda.is_built = _always(True)
    torch.accelerator.is_available = _always(False)

    import torch._subclasses.fake_tensor as fake_tensor

    fake_tensor.init_gpu_context = _always(None)


def simulate_triton() -> None:
    """Make Triton compile for sm_90 without a driver."""
    import triton
    from triton.backends.compiler import GPUTarget

    utilities = {"max_shared_mem": 232448, "multiprocessor_count": 132}
    utilities |= {"warpSize": 32, "max_num_regs": 65536}
    triton.runtime.driver.set_active(
        types.SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=_always(0),
            get_device_capability=_always((9, 0)),
            get_device_interface=lambda: torch.cuda,
            get_active_torch_device=lambda: torch.device("cuda", 0),
            utils=types.SimpleNamespace(get_device_properties=_always(utilities)),
            is_active=lambda: True,
        )
    )


def _build_guard(folder: Path) -> Path:
    site, library = Path(torch.__file__).parent, folder / "fakeguard.so"
    command = ["g++", "-shared", "-fPIC", "-O1", "-std=c++20", f"-I{site / 'include'}"]
    command += [str(Path(__file__).with_name("fakeguard.cpp")), f"-L{site / 'lib'}", "-lc10"]
    subprocess.run([*command, "-o", str(library)], check=True)
    return library


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def _memory_format(images: torch.Tensor, weight: torch.Tensor, _: Any) -> torch.memory_format:
    """cuDNN's choice: channels last where an operand lies so, one of 1 x 1 pixels excepted."""

    def is_last(tensor: torch.Tensor) -> bool:
        return (
            tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
        )

    if images.dim() == 4 and images.dtype != torch.float64 and (is_last(images) or is_last(weight)):
        return torch.channels_last
    return torch.contiguous_format


class FakeBuffer:
    """A `tandem.memory.Buffer` whose arrays are fake CUDA tensors."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def array(self, shape: Any, dtype: Any, offset: int = 0) -> torch.Tensor:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        kind = getattr(torch, str(np.dtype(dtype)))
        return torch.empty(shape, dtype=kind, device="cuda:0")


FUNCTIONS = ("gradients", "update", "step", "validation", "crop")


def build(
    precision: str,
    batch: int,
    names: Sequence[str],
    crop: int = 227,
    stored: int = 256,
    kept: int = 0,
    rand_colour: float = 0.0,
    width: float = 1.0,
) -> dict[str, Any]:
    """Build functions of a trainer on the simulated GPU, for ``torch.compile``.

    Parameters
    ----------
    names : sequence of str
        Of `FUNCTIONS`.
    kept : int
        Pictures of each split that the GPU keeps; with 0, slots hold the minibatch's.
    rand_colour : float
        Not 0 for steps with colour noise.

    Returns
    -------
    dict of str to Function
        Call within a ``FakeTensorMode``.
    """
    from alex_net import AlexNet
    from tandem.backend.lowering.registry import torch_dtype
    from tandem.config.schema import Config
    from tandem.memory.cuda import CudaSlots
    from tandem.memory.slot import SlotLayout
    from tandem.optim import SGD
    from tandem.training.compiled_network import CompiledNetwork
    from tandem.training.setup import parameter_layout

    spans: dict[int, tuple[int, Any]] = {}
    numbers = itertools.count(1)

    def span(buffer: Any) -> tuple[int, int]:
        """Each buffer at an address of its own."""
        number, _ = spans.setdefault(id(buffer), (next(numbers), buffer))
        return number << 40, (number << 40) + 256

    def constant(variable: Any, _: Any) -> Any:
        if not hasattr(variable.type, "dtype"):
            return variable.data
        kind = torch_dtype(variable)
        return torch.empty(np.shape(variable.data), dtype=kind, device="cuda:0")

    plain = torch.Tensor.transpose

    def transpose(tensor: torch.Tensor, *axes: Any) -> torch.Tensor:
        """As NumPy's where there are four axes: the flat layout transposes filters so."""
        return tensor.permute(*axes) if len(axes) == 4 else plain(tensor, *axes)

    replacements = (
        lambda memory, device: memory,
        span,
        constant,
        lambda functions, *_, **__: functions,
        lambda _, nbytes, *__: FakeBuffer(nbytes),
    )
    config = Config(
        precision=precision,
        batch_size=batch,
        crop_size=crop,
        width=width,
        devices=["cuda:0"],
        compile=True,
        use_data_layer=True,
        rand_colour=rand_colour,
    )
    net = AlexNet(crop, 1000, width, config.dtype)
    layout = parameter_layout(net, SGD(), channels_last=True)
    slots = SlotLayout.of_pictures(batch, 0 if kept else stored, rand_colour > 0)
    with ExitStack() as stack:
        for target, replacement in zip(REPLACED, replacements, strict=True):
            stack.enter_context(mock.patch(target, replacement))
        stack.enter_context(mock.patch.object(torch.Tensor, "transpose", transpose))
        memory = CudaSlots(0, slots, True).trainer_memory(
            layout, mock.MagicMock(), lambda stream: nullcontext()
        )
        for split in ("train", "validation") if kept else ():
            memory.keep_pictures(split, (kept, stored, stored, 3))
        mean = np.zeros((3, stored, stored), np.float32)
        network = CompiledNetwork(net, config, SGD(), mean, memory)
        slot = memory.slots[0]
        return {
            name: network.functions.record(name, slot if name != "update" else None)[0]
            for name in names
        }
