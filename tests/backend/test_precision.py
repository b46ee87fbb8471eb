"""Precision and layout of the heavy kernels, against float32 in the plain layout."""

from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch

from examples.resident_step import ResidentStep, Sizes
from tandem.backend import deterministic, device_mode, device_shared
from tandem.backend.precision import Precision
from tandem.compilers import cpp_compiler
from tandem.config.schema import Config
from tandem.errors import InputError
from tandem.ops.conv import conv2d
from tests.support.check_function import DEVICE

BFLOAT16 = 2.0**-8  # the largest relative error of rounding to it

Array = np.ndarray


@pytest.fixture(autouse=True)
def former_settings() -> Iterator[None]:
    """These settings are the whole process's."""
    names = ("allow_tf32", "deterministic", "benchmark")
    places: list[tuple[Any, str]] = [(torch.backends.cudnn, name) for name in names]
    places.append((torch.backends.cuda.matmul, "allow_tf32"))
    before = [getattr(*place) for place in places]
    yield
    for place, value in zip(places, before, strict=True):
        setattr(*place, value)
    torch.use_deterministic_algorithms(False)


def convolution(mode: Any, groups: int = 2) -> list[Array]:
    """A convolution and its gradients, of random float32 operands."""
    rng = np.random.default_rng(0)
    shapes = [(3, 8, 9, 9), (6, 8 // groups, 3, 3), (6,), (3, 6, 5, 5)]
    values = [rng.normal(size=shape).astype("float32") for shape in shapes]
    x, w, b, g = (
        pt.tensor(n, shape=s, dtype="float32") for n, s in zip("xwbg", shapes, strict=True)
    )
    y = conv2d(x, w, b, stride=2, pad=1, groups=groups)
    outputs = [y, *pytensor.grad((y * g).sum(), [x, w, b])]
    return pytensor.function([x, w, b, g], outputs, mode=mode)(*values)


def products(mode: Any) -> list[Array]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 40, 40)).astype("float32")
    a, b = pt.fmatrix("a"), pt.fmatrix("b")
    return pytensor.function([a, b], [a @ b, a.T @ b], mode=mode)(x, y)


@pytest.mark.parametrize("graph", [convolution, products])
def test_bfloat16_rounds_operands_and_result_and_nothing_else(graph: Any) -> None:
    """Two roundings of each term, of either sign, add up to 2**-8 of the results' usual size or so,
    and the largest of thousands to five times that; the largest result, some five times the usual,
    is rounded once more. Twelve leaves a little room."""
    exact, rounded = graph(DEVICE), graph(device_mode(precision="bfloat16"))
    for one, other in zip(exact, rounded, strict=True):
        assert other.dtype == np.float32
        scale = np.sqrt(np.mean(one**2))
        error = np.abs(other - one).max() / scale
        assert error < 12 * BFLOAT16
        if one.ndim > 1:
            assert error > BFLOAT16 / 16, "nothing was rounded"


def test_a_bias_and_its_gradient_are_not_rounded() -> None:
    x, w = np.zeros((1, 2, 3, 3), "float32"), np.zeros((2, 2, 3, 3), "float32")
    b = np.float32([1 + 2.0**-20, np.pi])
    variables = [pt.tensor(shape=v.shape, dtype="float32") for v in (x, w, b)]
    y = conv2d(*variables)
    outputs = [y, pytensor.grad(y.sum() * np.float32(1 / 3), variables[2])]
    mode = device_mode(precision="bfloat16")
    value, gradient = pytensor.function(variables, outputs, mode=mode)(x, w, b)
    assert (value.ravel() == b).all()
    assert (gradient == np.float32(1 / 3)).all()


def test_the_words_of_the_setting_are_those_of_the_mode() -> None:
    setting = get_args(Config.model_fields["precision"].annotation)
    assert set(setting) == {"auto", *get_args(Precision)}


@pytest.mark.parametrize("precision", get_args(Precision))
def test_tf32_follows_the_precision_and_float64_graphs_are_left_alone(precision: Any) -> None:
    a = pt.dmatrix("a")
    value = np.random.default_rng(0).normal(size=(20, 20))
    function = pytensor.function([a], a @ a, mode=device_mode(precision=precision))
    np.testing.assert_allclose(function(value), value @ value, rtol=1e-12)
    wanted = precision == "tf32"
    assert torch.backends.cuda.matmul.allow_tf32 is wanted
    assert torch.backends.cudnn.allow_tf32 is wanted


def test_an_unknown_precision_is_bad_input() -> None:
    wrong: Any = "float16"
    with pytest.raises(InputError, match="'float16'; allowed are float32, tf32, bfloat16"):
        device_mode(precision=wrong)


def test_an_unknown_algorithm_is_refused() -> None:
    wrong: Any = "fft"
    with pytest.raises(InputError, match="'fft'; allowed are auto, direct, winograd"):
        device_mode(convolutions=wrong)


def test_what_several_nodes_take_is_converted_once() -> None:
    """The forward pass and both gradients of a layer share its pictures, weights and gradients."""
    step = ResidentStep(device_mode(precision="bfloat16"))
    source = step.functions[0].vm.program.source
    names = [line.split(" = ")[0].strip() for line in source.splitlines() if " = " in line]
    made = [name for name in names if name.startswith("p")]
    # For each layer what comes in, the weight and the gradient of what goes out; in the three
    # products also what comes in and the weight transposed, the latter only seen another way.
    assert len(made) == 5 * 3 + 3 * 5
    assert sum(".permute(" in line for line in source.splitlines()) == 3
    assert len(set(made)) == len(made)


def test_images_keep_their_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the crop to the last pooling nothing is converted, but for the filters."""
    converted = []

    def recorded(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        y = convert(x, *rest, **options)
        if y.data_ptr() != x.data_ptr():
            converted.append(tuple(x.shape))
        return y

    convert = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", recorded)
    step = ResidentStep(device_mode(convolutions="direct"), Sizes(4, 131, 140, 5, 0.25))
    converted.clear()
    step.run()
    filters = [v.type.shape for v in step.weights.values() if v.type.ndim == 4]
    assert sorted(shape for shape in converted if len(shape) == 4) == sorted(filters)


def losses(mode: Any, steps: int = 6) -> tuple[list[float], ResidentStep]:
    step = ResidentStep(mode)
    found = []
    for _ in range(steps):
        before = float(step.loss.get_value())
        step.run()
        found.append(float(step.loss.get_value()) - before)
    return found, step


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], ResidentStep]:
    return losses(DEVICE)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"channels_last": False}, 1e-4),
        ({"precision": "tf32"}, 1e-6),  # a CPU has none
        # Eight layers each round operands and results by at most 2**-8, most of it by chance.
        ({"precision": "bfloat16"}, 8 * BFLOAT16),
        ({"precision": "bfloat16", "channels_last": False}, 8 * BFLOAT16),
    ],
)
def test_a_network_trains_alike(
    plain: tuple[list[float], ResidentStep], options: dict[str, Any], tolerance: float
) -> None:
    expected, _ = plain
    found, step = losses(device_mode(**options))
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(found, expected, rtol=tolerance)
    for variable in (*step.weights.values(), *step.momenta.values(), *step.gradients.values()):
        assert variable.dtype == "float32"


@pytest.mark.slow
@pytest.mark.skipif(cpp_compiler() is None, reason="torch.compile needs a C++ compiler")
def test_compiled_it_is_the_same() -> None:
    options: dict[str, Any] = {"precision": "bfloat16", "channels_last": True}
    for graph in (convolution, products):
        plain, compiled = (graph(device_mode(compile=c, **options)) for c in (False, True))
        for one, other in zip(plain, compiled, strict=True):
            scale = np.sqrt(np.mean(one**2))
            assert np.abs(other - one).max() < 12 * BFLOAT16 * scale


@pytest.mark.parametrize("channels_last", [False, True])
def test_filters_of_any_strides_compute_the_same(channels_last: bool) -> None:
    """Values, gradients and checkpoints see the logical layout."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(6, 4, 3, 3)).astype("float32")
    memory = np.zeros((6, 3, 3, 4), "float32").transpose(0, 3, 1, 2)
    turned = device_shared(values, "w", memory=memory)
    straight = device_shared(values, "w")
    x = rng.normal(size=(2, 4, 7, 7)).astype("float32")
    images = pt.tensor("x", shape=x.shape, dtype="float32")
    results = []
    for w in (turned, straight):
        y = conv2d(images, w, np.zeros(6, "float32"))
        update = w - np.float32(0.1) * pytensor.grad((y * y).sum(), w)
        mode = device_mode(channels_last=channels_last)
        output = pytensor.function([images], y, updates=[(w, update)], mode=mode)(x)
        results.append((output, w.get_value()))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(memory, results[0][1])
    assert turned.buffer.stride() == (36, 1, 12, 4)


def test_deterministic_is_set_and_the_step_has_such_kernels() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = True
    for wanted in (False, True):
        deterministic(wanted)
        assert torch.are_deterministic_algorithms_enabled() is wanted
        assert torch.backends.cudnn.deterministic is wanted
        assert torch.backends.cudnn.benchmark is not wanted
        assert torch.utils.deterministic.fill_uninitialized_memory is False
    one, other = losses(DEVICE, 2)[1].state(), losses(DEVICE, 2)[1].state()
    for name, value in one.items():
        np.testing.assert_array_equal(other[name], value)
