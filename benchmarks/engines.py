"""How fast are inference and a training step against other engines: ONNX Runtime, OpenVINO, JAX?

    python -m benchmarks.engines                     batches of 64, 8 and 1, one and two threads
    python -m benchmarks.engines --only inference    or training

Inference is of the full AlexNet, which the other engines get as `tandem export` writes it. JAX's
training step is jitted, of images that are cropped and converted already. Each contender is a
process of its own. An engine that isn't installed (`pip install 'tandem-train[bench]'`) is left
out. Prints JSON lines, then a table.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.measure import Comparison, Measured, compare, run
from benchmarks.step import instructions
from benchmarks.team import measure_apart
from examples.resident_step import ON_CPU, ResidentStep, Sizes
from tandem.compilers import cpp_compiler

# At least, by vector instructions, for a batch of 64, 8 and 1.
TARGETS = {"AVX512": {64: 1.1, 8: 1.0, 1: 0.9}, "AVX2": {64: 1.2, 8: 1.05, 1: 0.9}}
FROZEN_TARGET = 1.15  # against PyTorch's compiler with frozen weights
JAX_TARGET = 1.3
THREADS = (1, 2)
OURS = "ours"
# Seconds. ONNX Runtime's threads keep a core busy for 60 ms after their work, and others sleep.
SETTLE = 0.1

Call = Callable[[], Any]


def ours(sizes: Sizes, threads: int) -> Call:
    """Make our inference, from stored 8-bit pictures, with weights as constants as theirs are."""
    from tandem.backend import device_mode

    mode = device_mode("cpu")
    return ResidentStep(mode, sizes).inference(mode, fixed=True)


def frozen(sizes: Sizes, threads: int) -> Call:
    """Make inference by PyTorch's compiler with frozen weights, channels last."""
    import torch._inductor.config

    from benchmarks.plain_alexnet import plain_inference

    torch._inductor.config.freezing = True
    return plain_inference(sizes.network(), sizes.batch, "slices", compiled=True)


def onnx_runtime(sizes: Sizes, threads: int) -> Call:
    """Make inference by ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(onnx_file(sizes), options)
    images = {"images": noise(sizes)}
    return lambda: session.run(None, images)


def openvino(sizes: Sizes, threads: int) -> Call:
    """Make inference by OpenVINO."""
    import openvino

    core = openvino.Core()
    # By itself it takes bfloat16 where the processor has instructions for it.
    options = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }
    model = core.read_model(onnx_file(sizes), b"")
    model.reshape([sizes.batch, 3, sizes.crop, sizes.crop])
    compiled = core.compile_model(model, "CPU", options)
    images = noise(sizes)
    return lambda: compiled(images).to_tuple()


def onnx_file(sizes: Sizes) -> bytes:
    """Return the network with its first weights, from images to logits, as an ONNX file."""
    import pytensor.tensor as pt
    from onnx import TensorProto, helper
    from pytensor.graph.replace import clone_replace

    from tandem.export.graph import OPSET, OnnxGraph

    net = sizes.network()
    values = dict(net.initial_values(seed=1))
    images = pt.tensor("images", dtype="float32", shape=(None, *net.shapes["input"]))
    weights = {variable: pt.constant(values[name]) for name, variable in net.parameters.items()}
    graph = OnnxGraph()
    graph.bind(images, "images")
    logits = graph.translate(clone_replace(net.logits(images, None), weights))
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape])
        for name, shape in (("images", net.shapes["input"]), (logits, [net.classes]))
    ]
    model = helper.make_model(
        helper.make_graph(graph.nodes, "network", ends[:1], ends[1:], graph.constants),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=8,
    )
    return model.SerializeToString()


def noise(sizes: Sizes) -> np.ndarray:
    """Return images: float32 (batch, colour, row, column)."""
    shape = sizes.batch, 3, sizes.crop, sizes.crop
    return 60 * np.random.default_rng(0).standard_normal(shape, np.float32)


def our_step(sizes: Sizes, threads: int) -> Call:
    """Make our training step."""
    from tandem.backend import device_mode

    return ResidentStep(device_mode("cpu"), sizes).run


def jax_step(sizes: Sizes, threads: int) -> Call:
    """Make JAX's training step, of as many threads as there are cores.

    Images are channels last, which its convolutions prefer; those of two groups are two
    convolutions, since it has no kernel for groups.
    """
    import jax
    import jax.numpy as jnp
    from jax import lax

    net = sizes.network()
    last = "NHWC", "HWIO", "NHWC"

    def convolve(x: Any, w: Any, stride: int, pad: int, groups: int) -> Any:
        parts = zip(jnp.split(x, groups, -1), jnp.split(w, groups, -1), strict=True)
        window = [(pad, pad)] * 2
        found = [
            lax.conv_general_dilated(x, w, (stride,) * 2, window, dimension_numbers=last)
            for x, w in parts
        ]
        return jnp.concatenate(found, -1)

    def normalize(x: Any) -> Any:
        squares = jnp.pad(x * x, ((0, 0), (0, 0), (0, 0), (2, 2)))
        total = sum(squares[..., i : i + x.shape[-1]] for i in range(5))
        return x * (2 + 1e-4 * total) ** -0.75

    def loss_of(weights: dict[str, Any], images: Any, labels: Any, key: Any) -> Any:
        x = images
        for layer in net.convolutions:
            w, b = weights[f"{layer.name}.weight"], weights[f"{layer.name}.bias"]
            x = jax.nn.relu(convolve(x, w, layer.stride, layer.pad, layer.groups) + b)
            if layer.pool:
                x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID")
            x = normalize(x) if layer.normalize else x
        x = x.reshape(len(x), -1)
        for number, dense in enumerate(net.fully_connected):
            x = x @ weights[f"{dense.name}.weight"] + weights[f"{dense.name}.bias"]
            if dense.dropout is not None:
                kept = jax.random.bernoulli(jax.random.fold_in(key, number), 0.5, x.shape)
                x = jnp.where(kept, 2 * jax.nn.relu(x), 0)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1))

    def update(state: Any, images: Any, labels: Any) -> Any:
        weights, momenta, key = state
        key, own = jax.random.split(key)
        gradients = jax.grad(loss_of)(weights, images, labels, own)
        momenta = jax.tree.map(
            lambda w, m, g: 0.9 * m - 0.01 * (g + 5e-4 * w), weights, momenta, gradients
        )
        return jax.tree.map(jnp.add, weights, momenta), momenta, key

    values = {
        name: jnp.asarray(value.transpose(2, 3, 1, 0) if value.ndim == 4 else value)
        for name, value in net.initial_values(seed=1)
    }
    state = [(values, jax.tree.map(jnp.zeros_like, values), jax.random.key(0))]
    images = jnp.asarray(noise(sizes).transpose(0, 2, 3, 1))
    labels = jnp.asarray(np.random.default_rng(1).integers(0, sizes.classes, sizes.batch))
    step = jax.jit(update, donate_argnums=0)

    def call() -> dict[str, Any]:
        state[0] = jax.block_until_ready(step(state[0], images, labels))
        return state[0][0]

    return call


CONTENDERS: dict[str, tuple[str, Callable[[Sizes, int], Call]]] = {
    OURS: ("torch", ours),
    "PyTorch, compiled, frozen": ("torch", frozen),
    "ONNX Runtime": ("onnxruntime", onnx_runtime),
    "OpenVINO": ("openvino", openvino),
    "ours, a step": ("torch", our_step),
    "JAX": ("jax", jax_step),
}
"""By name, the package that each needs, and the function that makes its call."""


def compared(names: list[str], sizes: Sizes, threads: int, rounds: int) -> dict[str, Measured]:
    """Measure contenders in turn, each in a process of its own."""
    calls = {
        name: partial(CONTENDERS[name][1], sizes, threads)
        for name in names
        if importlib.util.find_spec(CONTENDERS[name][0])
    }
    return {m.name: m for m in measure_apart(calls, threads, rounds, warmups=2, settle=SETTLE)}


def inference(
    rounds: int, sizes: Sizes = ON_CPU, threads: tuple[int, ...] = THREADS
) -> Iterator[Comparison]:
    """Compare inference with each engine, by size of the batch and number of threads."""
    names = [OURS, *(["PyTorch, compiled, frozen"] if cpp_compiler() else [])]
    names += ["ONNX Runtime", "OpenVINO"]
    for batch, target in TARGETS[instructions()].items():
        for count in threads:
            found = compared(names, replace(sizes, batch=batch), count, rounds)
            question = f"inference, batch {batch}, {sizes.crop}, threads: {count}"
            for name, measured in found.items():
                if name != OURS:
                    own = FROZEN_TARGET if "frozen" in name else target
                    yield compare(question, found[OURS], measured, "speed", own)


def training(rounds: int, sizes: Sizes = ON_CPU) -> Iterator[Comparison]:
    """Compare a training step with JAX's, both by all cores."""
    found = compared(["ours, a step", "JAX"], sizes, len(os.sched_getaffinity(0)), rounds)
    if "JAX" in found:
        question = f"training step, batch {sizes.batch}, {sizes.crop}"
        yield compare(question, found["ours, a step"], found["JAX"], "speed", JAX_TARGET)


PARTS = {"inference": inference, "training": training}


def answer(rounds: int, only: str | None = None) -> Iterator[Comparison]:
    """Answer both parts of the question, or one."""
    for name, part in PARTS.items():
        if only in (None, name):
            yield from part(rounds)


if __name__ == "__main__":
    raise SystemExit(run(__doc__, answer, rounds=9, only=[*PARTS]))
