"""Keras models as networks of ours, and both sides' outputs and gradients."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

from tandem.artifacts.checkpoint import Checkpoint, save_checkpoint
from tandem.backend import device_mode
from tandem.keras.network import KerasNetwork, joined
from tandem.keras.weights import read_weights, to_ours, variables
from tandem.layers import Training
from tandem.layers.network import KERAS_NETWORK, NetworkDescription
from tests.support.lazily import Lazily

os.environ.setdefault("KERAS_BACKEND", "torch")
keras: Any = Lazily("keras")
DEVICE = device_mode(strict=True)
BATCH = 3


def json_of(model: Any) -> dict[str, Any]:
    """The configuration of a model as JSON that was written and read."""
    values = keras.saving.serialize_keras_object(model)
    values.pop("compile_config", None)
    return dict(json.loads(json.dumps(values)))


def network_of(model: Any, **options: Any) -> KerasNetwork:
    """The network of a Keras model, with its weights."""
    shapes = options.get("output_shapes") or [tensor.shape[1:] for tensor in model.outputs]
    classes = sum(int(np.prod(shape)) for shape in shapes)
    dtype = options.pop("dtype", "float32")
    network = KerasNetwork(
        options.pop("crop_size", None), classes, 1.0, dtype, model=json_of(model), **options
    )
    set_weights(network, model)
    return network


def set_weights(network: KerasNetwork, model: Any) -> None:
    """Give a network the weights of its model, which have to be all that it has."""
    weights = read_weights(model)
    assert {*weights} == {*network.parameters}
    for name, value in weights.items():
        assert network.parameters[name].get_value(borrow=True).shape == value.shape, name
        network.parameters[name].set_value(value.astype(network.dtype))


def describe_model(model: Any, crop_size: int | None = None, **fields: Any) -> NetworkDescription:
    """The description of a Keras model in a checkpoint."""
    options = {"model": json_of(model), **fields.pop("options", {})}
    classes = sum(int(np.prod(output.shape[1:])) for output in model.outputs)
    return NetworkDescription(
        crop_size, classes, 1.0, network=KERAS_NETWORK, options=options, **fields
    )


def save_model(
    path: Path, model: Any, crop_size: int | None = None, config: Any = None, **fields: Any
) -> Path:
    """Write a checkpoint of a Keras model; return `path`."""
    from tandem.keras.variables import untrained  # imports Keras

    described = describe_model(model, crop_size, **fields)
    weights = read_weights(model)
    save_checkpoint(
        path, Checkpoint(weights, {}, described, config=config or {}, untrained=untrained(model))
    )
    return path


def random_rows(model: Any, batch: int = BATCH, most: int = 4, seed: int = 0) -> list[np.ndarray]:
    """An array for each input, of whole numbers below `most` where the input takes those."""
    rng, rows = np.random.default_rng(seed), []
    for tensor in model.inputs:
        shape = (batch, *tensor.shape[1:])
        if "int" in tensor.dtype:
            rows.append(rng.integers(0, most, shape).astype(np.int32))
        else:
            rows.append(rng.uniform(-2, 2, shape).astype(np.float32))
    return rows


def ravelled(arrays: list[Any]) -> np.ndarray:
    """Arrays behind each other, (batch, numbers)."""
    return np.concatenate([np.asarray(a, np.float32).reshape(len(a), -1) for a in arrays], axis=1)


def training_pass(batch: int = BATCH, rows: int | None = 32) -> Training:
    """A training pass of the rows 0, 1, ... of a data set."""
    seed, epoch = pt.constant(np.int64(1)), pt.constant(np.int64(0))
    return Training(seed, epoch, pt.constant(np.arange(batch)), rows=rows)


def ours(
    network: KerasNetwork, rows: list[np.ndarray], training: Training | None = None, slope: Any = 1
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """All outputs ravelled, and the gradients of their product with a slope, by parameter."""
    images = network.images()
    y = joined(network.outputs(images, training))
    names = [name for name in network.parameters if name not in network.untrained]
    wanted = [network.parameters[name] for name in names]
    cost = (y * pt.constant(np.asarray(slope, np.float32))).sum()
    gradients: Any = pytensor.grad(cost, wanted, disconnected_inputs="ignore") if wanted else []
    function = pytensor.function([images], [y, *gradients], mode=DEVICE)
    given = rows[0].astype(np.float32) if len(rows) == 1 else ravelled(rows)
    found, *slopes = function(given)
    return np.asarray(found), dict(zip(names, slopes, strict=True))


def theirs(
    model: Any, rows: list[np.ndarray], training: bool = False, slope: Any = 1
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """As `ours`, by Keras and PyTorch, in our layout."""
    import torch

    outputs = model(rows if len(rows) > 1 else rows[0], training=training)
    outputs = keras.tree.flatten(outputs)
    y = torch.cat([output.reshape(len(output), -1) for output in outputs], dim=1)
    cost = (y * torch.from_numpy(np.broadcast_to(np.float32(slope), y.shape).copy())).sum()
    model.zero_grad()
    if cost.requires_grad:
        cost.backward()
    slopes = {}
    for name, kind, variable in variables(model):
        if variable.trainable and (found := variable.value.grad) is not None:
            slopes[name] = to_ours(kind, variable, found.numpy())
    return y.detach().numpy(), slopes
