"""The code that a GPU would run, generated and compiled without one."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from alex_net import AlexNet
from tandem.backend import device_mode, device_shared
from tandem.config.schema import Config
from tandem.ops import dropout_mask
from tandem.optim import SGD
from tandem.training.compiled_network import CompiledNetwork
from tests.support.tiny import ROOT
from tests.support.trainer_memory import host_memory, noise_slot

NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed: pip install .[gpu-compile]",
)


def generate(out: Path, *options: str) -> dict[str, str]:
    """Generate code and compile all of its kernels; return it by function."""
    program = [sys.executable, "-m", "tests.gpu.compile.inductor", "--out", str(out), *options]
    result = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    return {path.stem.rpartition("_")[2]: path.read_text() for path in out.iterdir()}


@NEEDS_TRITON
def test_a_small_step_of_the_main_network_compiles_for_a_gpu(tmp_path: Path) -> None:
    """All of its layers, with few pixels and filters, so that it takes seconds."""
    small = ["--precision", "float32", "--crop", "67", "--width", "0.1", "--batch", "8"]
    step = generate(tmp_path, "--functions", "step", *small)["step"]
    assert len(re.findall(r"torch\.ops\.tandem\.pool_norm(?:_grad)?\.default\(", step)) == 6


@pytest.mark.slow
@NEEDS_TRITON
def test_every_kernel_of_a_step_compiles_for_a_gpu(tmp_path: Path) -> None:
    step = generate(tmp_path, "--functions", "step")["step"]
    calls = step[step.index("def call(") :]
    assert calls.count("torch.ops.tandem.pool_norm.default(") == 3
    assert calls.count("torch.ops.tandem.pool_norm_grad.default(") == 3
    # Pooling by PyTorch's own kernels adds into float32, channels first.
    assert "max_pool" not in step
    # Images pass from kernel to kernel as bfloat16.
    wide = re.findall(r"empty_strided_cuda\(\(256, \d+, (\d+), \d+\), .*torch\.float32\)", calls)
    assert wide == []


@NEEDS_TRITON
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16", "bfloat16 --deterministic"])
def test_every_kernel_of_every_function_compiles_for_a_gpu(precision: str, tmp_path: Path) -> None:
    code = generate(tmp_path, "--precision", *precision.split())
    assert sorted(code) == ["crop", "gradients", "step", "update", "validation"]


@NEEDS_TRITON
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kept", [10_000, 1_300_000])  # the latter need 64-bit addresses
def test_pictures_that_stay_on_the_gpu_are_cropped_where_they_lie(
    tmp_path: Path, kept: int
) -> None:
    for code in generate(
        tmp_path, "--functions", "step", "validation", "--kept", str(kept)
    ).values():
        assert not re.findall(r"empty_strided_cuda\(.*torch\.uint8\)", code)
        (crop,) = re.findall(rf"index out of bounds: 0 <= \w+ < {kept}", code)
        assert crop


@NEEDS_TRITON
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_colour_noise_is_added_where_pictures_are_cropped(tmp_path: Path) -> None:
    """By the same kernel, so that it costs no pass over the images."""
    folders = [tmp_path / name for name in ("plain", "coloured")]
    plain, coloured = (
        generate(folder, "--functions", "step", *options)["step"]
        for folder, options in zip(folders, ([], ["--rand-colour", "0.1"]), strict=True)
    )
    assert coloured.count("@triton.jit") == plain.count("@triton.jit")
    assert coloured.count("(256, 3)") > plain.count("(256, 3)")


def overflowing(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Products of a range with a number that does not fit into 32 bits.

    Inductor computes with ranges as with indices, in int32.
    """
    ranges: set[Any] = set()
    found = []
    for node in graph.nodes:
        arguments = [a for a in node.args if isinstance(a, torch.fx.Node)]
        is_range = "arange" in str(node.target) or "iota" in str(node.target)
        if is_range or (arguments and all(a in ranges for a in arguments)):
            ranges.add(node)
        numbers = [a for a in node.args if isinstance(a, int)]
        large = any(abs(number) >= 2**31 for number in numbers)
        if "mul" in str(node.target) and large and any(a in ranges for a in arguments):
            found.append(node)
    return found


def traced(function: Any) -> torch.fx.Graph:
    """The calls of PyTorch that a function of a mode for ``torch.compile`` makes."""
    program = function.vm.program
    values = [each.value for each in function.maker.inputs]
    inputs = [value.storage[0] if hasattr(value, "storage") else value for value in values]
    inputs = [
        torch.as_tensor(x).view(1) if i in program.as_vectors else torch.as_tensor(x)
        for i, x in enumerate(inputs)
    ]
    with torch.no_grad():
        return make_fx(program.run)(*inputs).graph


@pytest.mark.parametrize(
    "name", [pytest.param("gradients", marks=pytest.mark.slow), "step", "validation"]
)
def test_no_multiple_of_a_range_overflows(name: str) -> None:
    network = AlexNet(67, 6, 0.05)
    memory = host_memory(network, SGD(), 3)
    memory.records = True
    config = Config(crop_size=67, width=0.05, batch_size=3, compile=True, precision="float32")
    mean = np.zeros((3, 67, 67), np.float32)
    functions = CompiledNetwork(network, config, SGD(), mean, memory).functions
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.training.functions.capture", lambda fs, *_, **__: found.extend(fs))
        functions.record(name, noise_slot(network, 3, 3))
    graph = traced(found[0])
    assert not overflowing(graph)
    multiplied = [node for node in graph.nodes if "mul" in str(node.target)]
    assert multiplied


def test_such_a_product_would_be_found() -> None:
    def counters(n: torch.Tensor) -> torch.Tensor:
        return (torch.arange(5).unsqueeze(0) + 1) * 0xD2511F53 + n

    assert overflowing(make_fx(counters)(torch.ones(1)).graph)
    assert not overflowing(make_fx(lambda x: x * 0xD2511F53)(torch.arange(5)).graph)
    assert not overflowing(make_fx(lambda x: torch.arange(5) * 3 + x)(torch.arange(5)).graph)


def test_masks_have_the_same_bits_however_the_counters_are_made() -> None:
    indices = device_shared(np.array([3, 70000]))
    outputs: list[Callable[[], Any]] = [
        pytensor.function(
            [],
            dropout_mask(5, pt.constant(np.int64(2)), indices, rate=0.5, layer=1, units=9),
            mode=mode,
        )
        for mode in (device_mode(), "FAST_COMPILE")
    ]
    np.testing.assert_array_equal(outputs[0](), outputs[1]())
