"""Caffe's files, written by the protobuf library from a part of Caffe's schema."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Field = descriptor_pb2.FieldDescriptorProto
INT, FLOAT, TEXT, BOOL, MESSAGE = (
    Field.TYPE_INT64,
    Field.TYPE_FLOAT,
    Field.TYPE_STRING,
    Field.TYPE_BOOL,
    Field.TYPE_MESSAGE,
)

# Of caffe.proto: name, number, type, whether repeated ("packed": so), and the message's type.
SCHEMA: dict[str, list[tuple[Any, ...]]] = {
    "BlobShape": [("dim", 1, INT, "packed")],
    "BlobProto": [
        ("num", 1, INT),
        ("channels", 2, INT),
        ("height", 3, INT),
        ("width", 4, INT),
        ("data", 5, FLOAT, "packed"),
        ("shape", 7, MESSAGE, None, "BlobShape"),
    ],
    "Convolution": [
        ("num_output", 1, INT),
        ("bias_term", 2, BOOL),
        ("pad", 3, INT, "repeated"),
        ("kernel_size", 4, INT, "repeated"),
        ("group", 5, INT),
        ("stride", 6, INT, "repeated"),
    ],
    "Norm": [
        ("local_size", 1, INT),
        ("alpha", 2, FLOAT),
        ("beta", 3, FLOAT),
        ("norm_region", 4, INT),
        ("k", 5, FLOAT),
    ],
    "Pool": [("pool", 1, INT), ("kernel_size", 2, INT), ("stride", 3, INT), ("pad", 4, INT)],
    "Dense": [("num_output", 1, INT)],
    "V1": [
        ("layer", 1, TEXT),  # a message in fact, of whatever
        ("bottom", 2, TEXT, "repeated"),
        ("top", 3, TEXT, "repeated"),
        ("name", 4, TEXT),
        ("type", 5, INT),
        ("blobs", 6, MESSAGE, "repeated", "BlobProto"),
        ("Convolution", 10, MESSAGE, None, "Convolution"),
        ("InnerProduct", 17, MESSAGE, None, "Dense"),
        ("LRN", 18, MESSAGE, None, "Norm"),
        ("Pooling", 19, MESSAGE, None, "Pool"),
    ],
    "V2": [
        ("name", 1, TEXT),
        ("type", 2, TEXT),
        ("bottom", 3, TEXT, "repeated"),
        ("top", 4, TEXT, "repeated"),
        ("blobs", 7, MESSAGE, "repeated", "BlobProto"),
        ("Convolution", 106, MESSAGE, None, "Convolution"),
        ("InnerProduct", 117, MESSAGE, None, "Dense"),
        ("LRN", 118, MESSAGE, None, "Norm"),
        ("Pooling", 121, MESSAGE, None, "Pool"),
    ],
    "Net": [
        ("name", 1, TEXT),
        ("layers", 2, MESSAGE, "repeated", "V1"),
        ("layer", 100, MESSAGE, "repeated", "V2"),
    ],
}
V1_TYPES = {"Data": 5, "Convolution": 4, "InnerProduct": 14, "LRN": 15, "Pooling": 17, "ReLU": 18}
V1_TYPES |= {"Dropout": 6, "SoftmaxWithLoss": 21}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="caffe_part.proto", package="part")
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        for field, number, kind, *more in fields:
            label = Field.LABEL_REPEATED if more and more[0] else Field.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, type=kind, label=label)
            if kind == MESSAGE:
                added.type_name = f".part.{more[1]}"
            if more and more[0] == "packed":
                added.options.packed = True
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"part.{name}"))
        for name in SCHEMA
    }


PROTO = _classes()
Blobs = Mapping[str, tuple[np.ndarray, np.ndarray]]


def fill_blob(blob: Any, array: np.ndarray, modern: bool) -> None:
    """Set a BlobProto; older ones have four axes, the first of length 1."""
    blob.data.extend(array.ravel().tolist())
    if modern:
        blob.shape.dim.extend(array.shape)
    else:
        axes = (1,) * (4 - array.ndim) + array.shape
        blob.num, blob.channels, blob.height, blob.width = axes


def alexnet_layers(norm_before_pool: bool) -> list[tuple[str, str, dict[str, Any]]]:
    """Names, types and options of the layers of bvlc_alexnet, or of CaffeNet."""
    convolutions = [
        {"kernel_size": [11], "stride": [4]},
        {"kernel_size": [5], "pad": [2], "group": 2},
        {"kernel_size": [3], "pad": [1]},
        {"kernel_size": [3], "pad": [1], "group": 2},
        {"kernel_size": [3], "pad": [1], "group": 2},
    ]
    layers: list[tuple[str, str, dict[str, Any]]] = [("data", "Data", {})]
    for number, options in enumerate(convolutions, 1):
        layers += [(f"conv{number}", "Convolution", options), (f"relu{number}", "ReLU", {})]
        pool = (f"pool{number}", "Pooling", {"pool": 0, "kernel_size": 3, "stride": 2})
        norm = (f"norm{number}", "LRN", {"local_size": 5, "alpha": 1e-4, "beta": 0.75})
        if number <= 2:
            layers += [norm, pool] if norm_before_pool else [pool, norm]
        elif number == 5:
            layers.append(pool)
    for number in (6, 7):
        layers += [(f"fc{number}", "InnerProduct", {}), (f"relu{number}", "ReLU", {})]
        layers.append((f"drop{number}", "Dropout", {}))
    return [*layers, ("fc8", "InnerProduct", {}), ("loss", "SoftmaxWithLoss", {})]


def caffemodel(
    blobs: Blobs,
    norm_before_pool: bool = True,
    modern: bool = False,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> Any:
    """A network with its blobs, as a message.

    Parameters
    ----------
    blobs : mapping of str to pair of ndarray
        Weight and bias by the layer's name.
    norm_before_pool : bool
        The order of bvlc_alexnet, or that of CaffeNet.
    modern : bool
        Whether layers are of today's kind, or of that of 2014.
    changes : mapping, optional
        Options of layers to set otherwise, by the layer's name.
    """
    net = PROTO["Net"](name="AlexNet")
    for name, kind, options in alexnet_layers(norm_before_pool):
        layer = (net.layer if modern else net.layers).add(name=name)
        layer.type = kind if modern else V1_TYPES[kind]
        for option, value in {**options, **(changes or {}).get(name, {})}.items():
            if isinstance(value, list):
                del getattr(getattr(layer, kind), option)[:]
                getattr(getattr(layer, kind), option).extend(value)
            else:
                setattr(getattr(layer, kind), option, value)
        for array in blobs.get(name, ()):
            fill_blob(layer.blobs.add(), array, modern)
    return net


def random_blobs(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Weights and biases of a size at which every layer says something.

    Parameters
    ----------
    shapes : mapping of str to tuple of int
        Of our parameters; fully connected weights get their axes the other way round.
    """
    rng = np.random.default_rng(6)
    blobs = {}
    for name, shape in shapes.items():
        layer, kind = name.split(".")
        if kind == "weight":
            shape = shape if len(shape) == 4 else shape[::-1]
            std = np.sqrt(2 / np.prod(shape[1:]))
            weight = (std * rng.normal(size=shape)).astype(np.float32)
        else:
            blobs[layer] = (weight, (0.3 * rng.normal(size=shape)).astype(np.float32))
    return blobs
