"""Which convolutions are computed by Winograd's products, and what constant filters spare."""

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch

from examples.resident_step import ResidentStep, Sizes
from tandem.backend import device_mode, winograd_loops
from tandem.backend.lowering import lower
from tandem.backend.mode import Convolutions
from tandem.backend.precision import ProductPrecision, fit
from tandem.ops.conv import Conv2dInputGrad, Conv2dWeightGrad, conv2d, winograd_pays
from tests.support.check_function import PYTHON, results
from tests.support.lowering_cases import Case, large_convolutions


@pytest.fixture
def free_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small convolutions are computed by Winograd's products, too."""
    for name in ("_TO_MOVE", "_TO_TRANSFORM_FILTER"):
        monkeypatch.setattr(f"tandem.ops.conv.{name}", (0, 0))


by_free_transforms = pytest.mark.usefixtures("free_transforms")


def by_winograd(function: Any) -> list[str]:
    """The convolutions and gradients of a function that are computed by Winograd's products."""
    program: Any = function.vm
    lines = program.program.source.splitlines()
    found = []
    for number, node in program.program.nodes.items():
        function = re.search(r"= (f\d+)\(", lines[number - 1])
        call = program.program.run.__globals__[function[1]] if function else None
        if "by_winograd" in getattr(call, "__qualname__", ""):
            found.append(type(node.op).__name__)
    return found


def winograd_layers(sizes: Sizes, convolutions: Convolutions) -> list[str]:
    """Those of a training step."""
    step = ResidentStep(device_mode("cpu", convolutions=convolutions), sizes)
    return by_winograd(step.functions[0])


@pytest.mark.slow
def test_the_papers_network_takes_winograd_for_all_but_the_first_layer() -> None:
    paper, demo = Sizes(64, 227, 256, 10, 1.0), Sizes(64, 67, 76, 10, 0.125)
    found = winograd_layers(paper, "winograd")
    kinds = "Conv2d", "Conv2dInputGrad", "Conv2dWeightGrad"
    assert sorted(found) == [kind for kind in kinds for _ in range(4)]
    assert winograd_layers(paper, "direct") == []
    assert winograd_layers(demo, "winograd") == []


@by_free_transforms
@pytest.mark.parametrize("case", large_convolutions(of_filters=True), ids=str)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_winograd_equals_pytensor(case: Case, compiled: bool) -> None:
    inputs, outputs, values = case.build()
    expected = results(inputs, outputs, values, PYTHON)
    node = outputs[0].owner
    found = lower(node.op, node, device=torch.device("cpu"), compiled=compiled)
    assert found.winograd is not None
    mode = device_mode(compile=compiled, convolutions="winograd")
    (got,) = results(inputs, outputs, values, mode)
    np.testing.assert_allclose(got, expected[0], 1e-4, 1e-5 * np.abs(expected[0]).max())


@by_free_transforms
@pytest.mark.parametrize(
    ("options", "window", "length", "dtype", "taken"),
    [
        ({"stride": 2}, (3, 3), 13, "float32", False),
        ({"dilation": 2}, (3, 3), 13, "float32", False),
        ({}, (1, 1), 13, "float32", False),
        ({}, (3, 5), 13, "float32", False),
        ({}, (7, 7), 13, "float32", False),
        ({}, (3, 3), None, "float32", False),
        ({}, (3, 3), 13, "float64", False),
        ({}, (3, 3), 13, "float32", True),
    ],
    ids=["stride", "dilation", "1", "3 x 5", "7", "unknown size", "float64", "it can"],
)
def test_where_winograd_cannot_be_taken_the_sum_is_computed(
    options: dict[str, int], window: tuple[int, int], length: int | None, dtype: str, taken: bool
) -> None:
    x = pt.tensor(dtype=dtype, shape=(64, 32, length, length))
    w = pt.tensor(dtype=dtype, shape=(32, 32, *window))
    node = conv2d(x, w, pad=1, **options).owner
    found = lower(node.op, node, device=torch.device("cpu"), compiled=False).winograd
    assert (found is not None) == taken


@pytest.mark.parametrize(
    ("batch", "channels", "filters", "side", "length", "groups", "expected"),
    [
        (64, 96, 256, 5, 27, 2, (True, True, True)),
        (64, 384, 256, 3, 13, 2, (True, True, True)),
        (64, 96, 256, 5, 7, 2, (True, False, True)),
        (64, 256, 384, 3, 3, 1, (False, False, True)),
        (64, 16, 16, 3, 32, 1, (False, False, False)),
        (64, 32, 32, 3, 16, 1, (True, True, True)),
        (64, 64, 64, 3, 8, 1, (True, True, True)),
        (64, 512, 512, 3, 4, 1, (True, True, True)),
        (64, 512, 512, 3, 2, 1, (False, False, False)),
        (16, 512, 512, 3, 7, 1, (True, True, True)),
        (16, 64, 64, 3, 56, 1, (True, True, True)),
        (64, 3, 64, 3, 32, 1, (False, False, False)),
    ],
)
def test_winograd_pays_where_it_was_measured_to_be_faster(
    batch: int,
    channels: int,
    filters: int,
    side: int,
    length: int,
    groups: int,
    expected: tuple[bool, ...],
) -> None:
    """Layers 2, 5 and 3 of AlexNet, of 227 and 67 pixels, then ResNet-32's, VGG's, ResNet-50's."""
    x = pt.tensor(dtype="float32", shape=(batch, channels, length, length))
    w = pt.tensor(dtype="float32", shape=(filters, channels // groups, side, side))
    pad = side // 2
    y = conv2d(x, w, pad=pad, groups=groups)
    gradients = [kind(1, pad, groups)(x, w, y) for kind in (Conv2dInputGrad, Conv2dWeightGrad)]
    assert [winograd_pays(v.owner) for v in (y, *gradients)] == [*expected]


def test_one_picture_takes_winograd_where_its_filters_are_constant() -> None:
    x = pt.tensor(dtype="float32", shape=(1, 256, 13, 13))
    w = np.zeros((384, 256, 3, 3), "float32")
    variable = pt.tensor(dtype="float32", shape=w.shape)
    outputs = [conv2d(x, filters, pad=1) for filters in (variable, pt.constant(w))]
    outputs.append(Conv2dInputGrad(1, 1)(x, pt.constant(w), outputs[1]))
    taken = []
    for node, compiled in zip(
        [v.owner for v in (*outputs, outputs[1])], (False, False, False, True), strict=True
    ):
        lowering = lower(node.op, node, device=torch.device("cpu"), compiled=compiled)
        taken.append(lowering.winograd is not None)
    assert taken == [False, True, False, False]  # the last two would transform them each time


@by_free_transforms
def test_a_padding_as_wide_as_the_filters_leaves_the_gradient_direct() -> None:
    """The gradient would be a convolution that crops g."""
    x = pt.tensor(dtype="float32", shape=(64, 32, 13, 13))
    w = pt.tensor(dtype="float32", shape=(32, 32, 3, 3))
    found = []
    for pad in (2, 3):
        length = 13 + 2 * pad - 2
        g = pt.tensor(dtype="float32", shape=(64, 32, length, length))
        node = Conv2dInputGrad(1, pad, 1)(x, w, g).owner
        found.append(lower(node.op, node, device=torch.device("cpu"), compiled=False).winograd)
    assert found[0] is not None
    assert found[1] is None
    with pytest.raises(ValueError, match="g has 2 pictures, expected 3"):
        found[0](torch.zeros(3, 32, 13, 13), torch.zeros(32, 32, 3, 3), torch.zeros(2, 32, 15, 15))


@by_free_transforms
def test_winograd_is_for_float32_on_cpus() -> None:
    x = pt.tensor(dtype="float32", shape=(64, 32, 13, 13))
    w = pt.tensor(dtype="float32", shape=(32, 32, 3, 3))
    node = conv2d(x, w, pt.vector(dtype="float32", shape=(32,)), pad=1).owner
    cpu, gpu = (
        lower(node.op, node, device=torch.device(name), compiled=False) for name in ("cpu", "cuda")
    )
    assert gpu.winograd is None
    assert fit(cpu, node, ProductPrecision(by_winograd=True)).call is cpu.winograd
    assert fit(cpu, node, ProductPrecision("bfloat16", by_winograd=True)).call is not cpu.winograd


_STEPS = """
import hashlib
from examples.resident_step import ResidentStep, Sizes
from tandem.backend import device_mode, set_threads
from tandem.ops import conv
conv._TO_MOVE = conv._TO_TRANSFORM_FILTER = 0, 0  # so that small layers take Winograd's
set_threads(2)
for convolutions in ("direct", "winograd"):
    step = ResidentStep(device_mode(convolutions=convolutions), Sizes(16, 227, 256, 10, 0.25))
    for _ in range(2):
        step.run()
    digest = hashlib.sha256()
    for name, value in sorted(step.state().items()):
        digest.update(value.tobytes())
    print(digest.hexdigest())
"""


@pytest.mark.parametrize("bias", [True, False])
def test_constant_filters_are_converted_once_and_change_no_bit(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, calls, kept = np.random.default_rng(0), [], []
    reorder = torch.ops.mkldnn._reorder_convolution_weight
    monkeypatch.setattr(
        torch.ops.mkldnn, "_reorder_convolution_weight", lambda *a: kept.append(a) or reorder(*a)
    )
    filters, offsets = (rng.normal(size=s).astype("float32") for s in ((6, 4, 3, 3), 6))

    def observe(node: Any, call: Any) -> Any:
        return lambda *operands: calls.append(str(node.op)) or call(*operands)

    x = pt.tensor("x", dtype="float32", shape=(None, 8, 9, 9))
    w = pt.tensor("w", dtype="float32", shape=filters.shape)

    def convolved(w: Any) -> Any:
        return conv2d(x, w, pt.constant(offsets) if bias else None, pad=1, stride=2, groups=2)

    direct = device_mode(convolutions="direct", observe=observe)
    varying = pytensor.function([x, w], convolved(w), mode=direct)
    fixed = pytensor.function([x], convolved(pt.constant(filters)), mode=direct)
    exact = pytensor.function([x], convolved(pt.constant(filters)), mode=PYTHON)
    for rows in (2, 5, 0, 1):
        value = rng.normal(size=(rows, 8, 9, 9)).astype("float32")
        calls.clear()
        got = fixed(value)
        assert len(calls) == 2  # a conversion of the images, and the convolution
        np.testing.assert_array_equal(got, varying(value, filters))
        np.testing.assert_allclose(got, exact(value), 1e-5, 1e-5)
    assert len(kept) == 1


def test_constant_filters_are_transformed_once_for_any_number_of_pictures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, transform = [], winograd_loops.transform_filters
    monkeypatch.setattr(
        winograd_loops, "transform_filters", lambda *a, **k: calls.append(a) or transform(*a, **k)
    )
    rng = np.random.default_rng(0)
    filters, value = (
        rng.normal(size=s).astype("float32") for s in ((64, 32, 3, 3), (8, 64, 16, 16))
    )
    offsets = pt.constant(rng.normal(size=64).astype("float32"))
    x = pt.tensor("x", dtype="float32", shape=(None, *value.shape[1:]))
    w = pt.tensor("w", dtype="float32", shape=filters.shape)
    mode = device_mode(convolutions="winograd")

    def convolved(w: Any) -> Any:
        return conv2d(x, w, offsets, pad=1, groups=2)

    varying = pytensor.function([x, w], convolved(w), mode=mode)
    fixed = pytensor.function([x], convolved(pt.constant(filters)), mode=mode)
    expected = varying(value, filters)
    assert len(calls) == 1
    for rows in (8, 3, 0, 1):
        np.testing.assert_array_equal(fixed(value[:rows]), expected[:rows])
    assert len(calls) == 2


def test_constant_filters_of_one_dilated_tap() -> None:
    w, b = np.full((2, 1, 1, 1), 3, "float32"), np.ones(2, "float32")
    x = pt.tensor("x", dtype="float32", shape=(None, 1, None, None))
    options: Any = {"pad": (1, 1), "stride": (1, 2), "dilation": (2, 2)}
    y = conv2d(x, pt.constant(w), pt.constant(b), **options)
    function = pytensor.function([x], y, mode=device_mode(convolutions="direct"))
    for image, area in (((1, 1), (3, 2)), ((6, 13), (8, 8)), ((1, 1), (3, 2))):
        found = function(np.ones((3, 1, *image), "float32"))
        assert found.shape == (3, 2, *area)
        assert {*np.unique(found)} <= {1.0, 4.0}


@pytest.mark.slow
def test_two_processes_compute_the_same_bits() -> None:
    """A step large enough for every kernel, with two threads."""
    command = [sys.executable, "-c", _STEPS]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = [process.communicate(timeout=200)[0].split() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert found[0] == found[1]
    assert len(found[0]) == 2
    assert found[0][0] != found[0][1]


_STEP = """
import sys
from examples.resident_step import ResidentStep, Sizes
from tandem.backend import device_mode, winograd_loops
from tandem.ops import conv
conv._TO_MOVE = conv._TO_TRANSFORM_FILTER = 0, 0
ResidentStep(device_mode(convolutions="winograd"), Sizes(2, 227, 256, 10, 0.25)).run()
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""


def test_a_step_that_is_not_compiled_imports_no_compiler() -> None:
    """The import of PyTorch's takes 3 s, and was made by the first call of each run."""
    command = [sys.executable, "-c", _STEP]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    assert found.stdout.strip() == "[]"
