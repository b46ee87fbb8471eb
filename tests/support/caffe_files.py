"""Caffe's files, written by the protobuf library from a part of Caffe's schema."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Field = descriptor_pb2.FieldDescriptorProto
TYPES = {
    "int64": Field.TYPE_INT64,
    "float": Field.TYPE_FLOAT,
    "string": Field.TYPE_STRING,
    "bool": Field.TYPE_BOOL,
}

# Of caffe.proto: type, name and number of each field, and whether it is repeated or packed.
SCHEMA = {
    "BlobShape": "int64 dim 1 packed",
    "BlobProto": "int64 num 1, int64 channels 2, int64 height 3, int64 width 4, "
    "float data 5 packed, BlobShape shape 7",
    "ConvolutionParameter": "int64 num_output 1, bool bias_term 2, int64 pad 3 repeated, "
    "int64 kernel_size 4 repeated, int64 group 5, int64 stride 6 repeated",
    "Norm": "int64 local_size 1, float alpha 2, float beta 3, int64 norm_region 4, float k 5",
    "Pool": "int64 pool 1, int64 kernel_size 2, int64 stride 3, int64 pad 4",
    "Dense": "int64 num_output 1",
    # The layer of the oldest format is a message in fact.
    "V1": "string layer 1, string bottom 2 repeated, string top 3 repeated, string name 4, "
    "int64 type 5, BlobProto blobs 6 repeated, ConvolutionParameter Convolution 10, "
    "Dense InnerProduct 17, Norm LRN 18, Pool Pooling 19",
    "V2": "string name 1, string type 2, string bottom 3 repeated, string top 4 repeated, "
    "BlobProto blobs 7 repeated, ConvolutionParameter Convolution 106, "
    "Dense InnerProduct 117, Norm LRN 118, Pool Pooling 121",
    "Net": "string name 1, V1 layers 2 repeated, V2 layer 100 repeated",
}
V1_TYPES = {"Data": 5, "Convolution": 4, "InnerProduct": 14, "LRN": 15, "Pooling": 17, "ReLU": 18}
V1_TYPES |= {"Dropout": 6, "SoftmaxWithLoss": 21}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="caffe_part.proto", package="part")
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        for field in fields.split(", "):
            kind, called, number, *more = field.split()
            label = Field.LABEL_REPEATED if more else Field.LABEL_OPTIONAL
            code = TYPES.get(kind, Field.TYPE_MESSAGE)
            added = message.field.add(name=called, number=int(number), type=code, label=label)
            if kind not in TYPES:
                added.type_name = f".part.{kind}"
            if more == ["packed"]:
                added.options.packed = True
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"part.{name}"))
        for name in SCHEMA
    }


PROTO = _classes()
Blobs = Mapping[str, tuple[np.ndarray, np.ndarray]]
Layers = list[tuple[str, str, dict[str, Any]]]


def fill_blob(blob: Any, array: np.ndarray, modern: bool) -> None:
    """Set a BlobProto; older ones have four axes, the first of length 1."""
    blob.data.extend(array.ravel().tolist())
    if modern:
        blob.shape.dim.extend(array.shape)
    else:
        axes = (1,) * (4 - array.ndim) + array.shape
        blob.num, blob.channels, blob.height, blob.width = axes


def alexnet_layers(norm_before_pool: bool) -> Layers:
    """Names, types and options of the layers of bvlc_alexnet, or of CaffeNet."""
    convolutions = [
        {"kernel_size": [11], "stride": [4]},
        {"kernel_size": [5], "pad": [2], "group": 2},
        {"kernel_size": [3], "pad": [1]},
        {"kernel_size": [3], "pad": [1], "group": 2},
        {"kernel_size": [3], "pad": [1], "group": 2},
    ]
    layers: Layers = [("data", "Data", {})]
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
    layers: Layers | None = None,
) -> Any:
    """A network with its blobs (weight and bias) by the layer's name, as a message.

    It is AlexNet unless other `layers` are given. Layers are of today's kind if `modern`, otherwise
    of that of 2014; `changes` are options of layers to set otherwise, by the layer's name.
    """
    net = PROTO["Net"](name="AlexNet")
    for name, kind, options in layers or alexnet_layers(norm_before_pool):
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
    """Weights and biases of a size at which every layer says something, by our parameters' shapes.

    Fully connected weights get their axes the other way round.
    """
    rng = np.random.default_rng(6)
    blobs = {}
    for name, shape in shapes.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight":
            shape = shape if len(shape) == 4 else shape[::-1]
            std = np.sqrt(2 / np.prod(shape[1:]))
            weight = (std * rng.normal(size=shape)).astype(np.float32)
        else:
            blobs[layer] = (weight, (0.3 * rng.normal(size=shape)).astype(np.float32))
    return blobs
