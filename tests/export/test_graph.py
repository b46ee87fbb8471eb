"""Each Op's ONNX nodes, run by onnxruntime, against the Op's own NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from tandem import layers
from tandem.errors import InputError
from tandem.ops import Conv2dInputGrad, MaxPool2d
from tandem.ops.batch_norm_folding import fold_batch_norms
from tests.support.onnx_graphs import by_onnxruntime, translated
from tests.support.op_checks import MODE, plain_python

IMAGES = (None, 6, 9, 9)
ROWS = (None, 5)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def shared(*shape: int) -> Any:
    return pytensor.shared(noise(*shape), name=f"w{shape}", shape=shape)


def norm(channels: int) -> dict[str, Any]:
    """Parameters of a batch normalisation."""
    names = ("weight", "bias", "running_mean", "running_var")
    values = np.random.default_rng(0).uniform(0.5, 2, (4, channels)).astype(np.float32)
    return {f"bn.{n}": pytensor.shared(v, n) for n, v in zip(names, values, strict=True)}


def transposed_convolution(x: Any, stride: int, size: tuple[int, int]) -> Any:
    like = pt.zeros((x.shape[0], 4, *size), dtype="float32")
    return Conv2dInputGrad(stride=(stride, stride))(like, shared(6, 4, 3, 3), x)


def scanned(x: Any) -> Any:
    def step(part: Any, state: Any, scale: Any) -> list[Any]:
        return [pt.tanh(part - state * scale), part * state]

    parts, first = x.dimshuffle(1, 0, 2, 3), x[:, 0]
    loop = pytensor.scan(
        step, parts, [first, None], shared(9), 6, return_list=True, return_updates=False
    )
    return pt.stack(loop)


ACTIVATIONS = (
    layers.elu,
    layers.leaky_relu,
    layers.relu6,
    layers.sigmoid,
    layers.tanh,
    layers.softplus,
    layers.log_sigmoid,
    layers.arctan,
)


@pytest.mark.parametrize(
    ("shape", "build"),
    [
        (IMAGES, lambda x: layers.convolution(x, shared(4, 6, 3, 3), shared(4), 2)),
        (IMAGES, lambda x: layers.convolution(x, shared(4, 3, 5, 5), shared(4), 1, 2, groups=2)),
        (IMAGES, layers.relu),
        (IMAGES, lambda x: layers.max_pool(x, 3, 2)),
        (IMAGES, lambda x: layers.max_pool(x, 2, 3)),
        (IMAGES, lambda x: layers.response_norm(30 * x)),
        (IMAGES, lambda x: layers.flatten(x, 486)),
        (ROWS, lambda x: layers.fully_connected(x, shared(5, 3), shared(3))),
        (IMAGES, lambda x: layers.convolution(x, shared(4, 6, 3, 2), None, (2, 1), (0, 2))),
        (IMAGES, lambda x: layers.convolution(x, shared(6, 1, 3, 3), pad=2, groups=6, dilation=2)),
        (IMAGES, lambda x: layers.max_pool(x, 3, 2, 1)),
        (IMAGES, lambda x: layers.max_pool(x, (2, 3), 2, (1, 0), ceil=True)),
        (IMAGES, lambda x: layers.max_pool(x, 2, 3, 1, ceil=True)),
        (IMAGES, lambda x: layers.average_pool(x, 3, 2)),
        (IMAGES, lambda x: layers.average_pool(x, 2, 2, ceil=True)),
        (IMAGES, lambda x: layers.average_pool(x, 3, 2, 1)),
        (IMAGES, lambda x: layers.average_pool(x, 3, 2, 1, count_pad=False)),
        (IMAGES, lambda x: layers.average_pool(x, (2, 4), (2, 3), (1, 2), ceil=True)),
        (IMAGES, lambda x: layers.average_pool(x, (2, 4), 2, 1, ceil=True, count_pad=False)),
        (IMAGES, layers.global_average_pool),
        (IMAGES, lambda x: layers.pad(x, (0, 1, 2, 3))),
        (IMAGES, lambda x: layers.concatenate([x, layers.relu(x), x])),
        (IMAGES, lambda x: layers.relu(x + layers.convolution(x, shared(6, 6, 1, 1)))),
        (IMAGES, lambda x: layers.response_norm(x, 3, 0.1, 0.6, 1.0)),
        (IMAGES, lambda x: layers.dropout(x, 0.25, 0, None)),
        (IMAGES, lambda x: layers.relu(layers.dropout(x, 0.25, 0, None, inverted=True))),
        (IMAGES, lambda x: layers.batch_norm(x, norm(6), "bn", None)),
        (ROWS, lambda x: layers.batch_norm(x, norm(5), "bn", None)),
        (IMAGES, lambda x: x[:, 1:5, ::2, 1::3]),
        (IMAGES, lambda x: x[:, -2:]),
        (IMAGES, lambda x: pt.inc_subtensor(layers.relu(x)[:, 1:-2], x[:, :3])),
        *((ROWS, lambda x, f=f: f(30 * x)) for f in ACTIVATIONS),
        (ROWS, lambda x: layers.dropout(x, 0.25, 0, None)),
        (ROWS, lambda x: pt.special.softmax(x, axis=1)),
        (ROWS, lambda x: x + x * pt.constant(noise(5))),
        (ROWS, lambda x: pt.switch(pt.gt(x, 0), x, 2)),
        (ROWS, lambda x: pt.switch(pt.gt(x, pt.constant(noise(5))), 0, x) * pt.gt(x, 0)),
        (ROWS, lambda x: x.dimshuffle(1, "x", 0).dimshuffle(2, 0, 1)),
        (IMAGES, lambda x: x.dimshuffle(0, 2, 3, 1).reshape((x.shape[0], 486))),
        (IMAGES, lambda x: pt.specify_shape(x, (None, 6, 9, 9)) + x),
        (ROWS, lambda x: pt.add(x, x, pt.mul(x, x, x))),
        (ROWS, lambda x: pt.switch(pt.gt(x, 0), pt.sqrt(abs(x)) / 2, pt.exp(x) ** 1.5)),
        (ROWS, lambda x: pt.maximum(x, pt.log(x**2))),
        (IMAGES, lambda x: x[:, :1].dimshuffle(3, 0, "x", 2)),
        (IMAGES, lambda x: x[:, ::-1, 7::-2, -3:1:-1]),
        (IMAGES, lambda x: x[:, -1] + x[:, 2]),
        (IMAGES, lambda x: x.max((1, 3)) - x.min(2).prod(1)),
        (IMAGES, lambda x: pt.einsum("abcd,de->aceb", x, shared(9, 2))),
        (IMAGES, lambda x: pt.matmul(x, shared(9, 2))),
        (IMAGES, lambda x: pt.take(x, pt.constant([2, -1, 2]), axis=2)),
        (IMAGES, lambda x: pt.alloc(x[:, :1], x.shape[0], 3, 9, 9) + pt.ones_like(x[:1, :1])),
        (ROWS, lambda x: shared(3, 4)[pt.floor(abs(pt.sin(x)) * 3).astype("int64")]),
        (ROWS, lambda x: pt.any(pt.neq(pt.sign(x), 1), axis=1).astype("float32") * x[:, 0]),
        (ROWS, lambda x: pt.erf(x) + pt.log1p(pt.sqr(x)) + pt.cos(pt.ceil(x))),
        (ROWS, lambda x: pt.switch(pt.ge(x, 0) & ~pt.lt(x, 0.5) | pt.le(x, -1), x, pt.eq(x, x))),
        (IMAGES, lambda x: transposed_convolution(x, 2, (20, 19))),
        (IMAGES, lambda x: transposed_convolution(x, 1, (11, 11))),
        (IMAGES, scanned),
    ],
)
def test_onnx_computes_what_the_op_does(
    shape: tuple[int | None, ...], build: Callable[[Any], Any]
) -> None:
    x = pt.tensor("x", dtype="float32", shape=shape)
    y = build(x)
    for batch in (1, 3):
        value = noise(batch, *(n for n in shape if n))
        with plain_python():
            expected = pytensor.function([x], y, mode=MODE)(value)
        found = by_onnxruntime([x], y, [value])
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("build", [lambda x, y: x // y, lambda x, y: x % y])
def test_quotients_and_rests_are_numpys(build: Callable[[Any, Any], Any]) -> None:
    x, y = pt.fvector("x"), pt.fvector("y")
    pairs = [
        (1, 0.1),
        (-1e-9, 1),
        (7, 3),
        (-7, 3),
        (7, -3),
        (-7, -3),
        (6, -3),
        (1, 0),
        (-1, np.inf),
    ]
    values = np.array(pairs, np.float32).T
    with np.errstate(all="ignore"):
        expected = build(*values)
    np.testing.assert_array_equal(by_onnxruntime([x, y], build(x, y), [*values]), expected)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda x: pt.set_subtensor(layers.relu(x)[:], 2 * x), "no translation; register"),
        (lambda x: pt.gamma(x), "Gamma has no translation; register"),
        (lambda x: pt.sort(x), "Sort.* has no translation; register"),
        (lambda x: pt.special.softmax(x), "only a softmax over a single axis"),
        (lambda x: x + pt.tensor("other", dtype="float32", shape=(5,)), "other, which has no"),
        (lambda x: x.reshape((x.shape[0], -1, x.shape[1] // 2)), "Int_div has no translation"),
        (lambda x: pt.argmax(x), "Argmax.* has no translation"),
        (lambda x: x[x > 0], "AdvancedSubtensor.* has no translation"),
        (lambda x: pt.all(pt.gt(x, 0)), "All.* has no translation"),
        (lambda x: pt.linalg.inv(x), "MatrixInverse.* has no translation"),
        (
            lambda x: pytensor.scan(pt.sin, None, x, n_steps=3, return_updates=False),
            "Scan.* has no translation",
        ),
        (lambda x: x[: x.shape[1]], "Subtensor.* has no translation"),
        (lambda x: pt.set_subtensor(x[:, 1:], 0), "SetSubtensor.* has no translation"),
        (lambda x: pt.inc_subtensor(x[:, 1:], x[:, :-1]), "IncSubtensor.* has no translation"),
    ],
)
def test_what_has_no_translation_is_refused(build: Callable[[Any], Any], reason: str) -> None:
    x = pt.tensor("x", dtype="float32", shape=(None, None))
    with pytest.raises(InputError, match=f"ONNX: .*{reason}"):
        translated(x, build(x))


@pytest.mark.parametrize(
    "added", [lambda x: x[:, :1], lambda x: pt.constant(noise(3)), lambda x: pt.constant(noise())]
)
def test_what_is_repeated_over_a_part_is_refused(added: Callable[[Any], Any]) -> None:
    """Padded with zeros it would be as long as the part only where it is as long already."""
    x = pt.tensor("x", dtype="float32", shape=ROWS)
    with pytest.raises(InputError, match=r"ONNX: IncSubtensor.* has no translation"):
        translated(x, pt.inc_subtensor(layers.relu(x)[:, 1:4], added(x)))


def test_the_places_of_maxima_have_no_translation() -> None:
    x = pt.tensor("x", dtype="float32", shape=IMAGES)
    with pytest.raises(InputError, match="has no translation"):
        translated(x, MaxPool2d(3, 2)(x)[1])


@pytest.mark.parametrize(
    ("shape", "build", "kinds"),
    [
        (IMAGES, lambda x: layers.convolution(x, shared(4, 6, 3, 3), shared(4)), ["Conv"]),
        (IMAGES, lambda x: layers.convolution(x, shared(4, 6, 3, 3)), ["Conv"]),
        (ROWS, lambda x: layers.fully_connected(x, shared(5, 4), shared(4)), ["MatMul", "Add"]),
        (ROWS, lambda x: pt.dot(x, shared(5, 4)), ["MatMul", "Add"]),
    ],
)
def test_batch_normalisation_is_in_the_weights(
    shape: tuple[int | None, ...], build: Callable[[Any], Any], kinds: list[str]
) -> None:
    x = pt.tensor("x", dtype="float32", shape=shape)
    value = noise(3, *(n for n in shape if n))
    y = layers.batch_norm(build(x), norm(4), "bn", None)
    with plain_python():
        expected = pytensor.function([x], y, mode=MODE)(value)
    (y,) = fold_batch_norms([y])
    graph, _ = translated(x, y)
    assert [node.op_type for node in graph.nodes] == kinds
    assert len(graph.constants) == 2
    np.testing.assert_allclose(by_onnxruntime([x], y, [value]), expected, rtol=1e-4, atol=1e-5)


def test_windows_over_the_edge_of_unknown_images_have_no_translation() -> None:
    x = pt.tensor("x", dtype="float32", shape=(None, 6, None, 9))
    with pytest.raises(InputError, match="rows and columns must be known"):
        translated(x, layers.max_pool(x, 3, 2, ceil=True))


def test_a_shared_part_is_added_once() -> None:
    x = pt.tensor("x", dtype="float32", shape=ROWS)
    y = layers.relu(x)
    graph, _ = translated(x, y + y * y)
    assert [node.op_type for node in graph.nodes] == ["Relu", "Mul", "Add"]


def test_a_deep_network_is_no_deep_recursion() -> None:
    x = y = pt.tensor("x", dtype="float32", shape=ROWS)
    for _ in range(3000):
        y = layers.relu(y)
    assert len(translated(x, y)[0].nodes) == 3000
