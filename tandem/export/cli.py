"""Write saved weights as an ONNX file that classifies resized pictures.

A run's weights:       tandem export runs/alexnet/epoch-0060.safetensors alexnet.onnx
Converted weights:     tandem export caffe.safetensors alexnet.onnx --mean caffe_mean.npy
"""

import importlib.util
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from tandem.artifacts.trained_network import LoadedNetwork, load_network
from tandem.cli import CommandLine, Options, PathOption, launch_commands, option, run_program
from tandem.config.fields import Names
from tandem.data.class_names import imagenet_names
from tandem.errors import InputError, explained
from tandem.files import replacing
from tandem.layers.network import ALEXNET

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto
    from pytensor.tensor.variable import TensorVariable

    from tandem.export.graph import OnnxGraph

log = logging.getLogger(__name__)

_MOST_BYTES = (1 << 31) - (1 << 20)  # protobuf's limit, less what is not weights
_IR_VERSION = 8  # the file format that belongs to the operators
_FLOAT = 1  # TensorProto.FLOAT


class ExportOptions(Options):
    """Options of ``python -m tandem.export``."""

    weights: PathOption = option(..., "checkpoint to read", "a file", "argument")
    target: PathOption = option(..., "file to write, .onnx", "a file", "argument")
    mean: PathOption | None = option(
        None, "mean image, .npy (default: that of the run's data set)", "a file", "text"
    )
    network: str = option(ALEXNET, "network of the checkpoint", "module:class", "text")
    layers: Names = option(
        (), "lowerings of your own layers", "a list such as [my_module:swish]", "list"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program as ``python -m tandem.export``; return its exit status."""
    program = "python -m tandem.export"
    return run_export(arguments, launch_commands(__doc__, "export", program), program)


def run_export(
    arguments: Sequence[str] | None, description: str | None, program: str | None = None
) -> int:
    """Write the ONNX file that the command line names; return the exit status."""

    def work(options: ExportOptions) -> None:
        export(options.weights, options.target, options.mean, options.network, options.layers)
        log.info("wrote %s", options.target)

    return run_program(ExportOptions, work, CommandLine(arguments, description, program))


def export(
    weights: Path,
    target: Path,
    mean: Path | None = None,
    network: str = ALEXNET,
    layers: Sequence[str] = (),
) -> None:
    """Write an ONNX file of a network in validation, from pictures to probabilities.

    Its input ``pictures`` is uint8 (batch, S, S, 3), (row, column, RGB): pictures resized to the
    size of the mean image without its border, as the metadata ``resize`` says, see
    `decode_picture`. The centre crop and the mean image are in the file. Its outputs are
    ``logits`` and ``probabilities``, float32 (batch, class); its metadata name the classes.

    That of a network of arrays has the input ``rows``, float32 (batch, ...), of three axes as
    (row, column, channel), and the outputs ``logits`` and ``predictions``.

    Parameters
    ----------
    mean : Path, optional
        The mean image, .npy; by default the one of the run's data set.
    network : str
        "module:class" of the network, which a graph does not need.
    layers : sequence of str
        "module:function" of the lowering of each layer of the user's own in a graph.

    Raises
    ------
    InputError
        A file is missing or damaged, the network is too large or has an Op that has no
        translation, or `target` cannot be written.
    """
    if importlib.util.find_spec("onnx") is None:
        raise InputError("the package onnx is not installed: pip install onnx")
    if target.suffix != ".onnx":
        raise InputError(f"{target}: the name of an ONNX file must end in .onnx")
    loaded = load_network(weights, mean, network, layers)
    values = loaded.network.parameters.values()
    if (size := sum(value.get_value(borrow=True).nbytes for value in values)) > _MOST_BYTES:
        raise InputError(f"{weights}: {size} bytes of weights are more than one ONNX file holds")
    model = make_model(loaded)
    with explained(target, "cannot be written"), replacing(target) as partial:
        partial.write_bytes(model.SerializeToString())


def make_model(loaded: LoadedNetwork) -> "ModelProto":
    """A checked ONNX model of a network, from resized pictures or rows to what it predicts."""
    import pytensor.tensor as pt
    from onnx import checker, helper

    from tandem.export.graph import OPSET, OnnxGraph
    from tandem.ops.batch_norm_folding import fold_batch_norms

    network, mean, about = loaded.network, loaded.mean, loaded.description
    images = pt.tensor("images", dtype="float32", shape=(None, *network.shapes["input"]))
    (logits,) = fold_batch_norms([network.logits(images, None)])
    graph = OnnxGraph()
    metadata = _class_names(about.wnids)
    if mean is None:
        info, prepared = _rows(graph, network.shapes["input"], network.takes_stored_rows)
    else:
        info, prepared = _pictures(graph, mean, about.pad, network.crop_size)
        metadata["resize"] = json.dumps(about.resize)
    graph.bind(images, prepared)
    found = cast("TensorVariable", logits)
    if mean is None:
        outputs = {"logits": logits, "predictions": network.predictions(found)}
    else:
        outputs = {"logits": logits, "probabilities": network.probabilities(found)}
    for name, variable in outputs.items():
        graph.add("Cast", [graph.translate(variable)], name, to=_FLOAT)
    shape: list[str | int | None] = ["batch", network.classes]
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "network",
            [info],
            [helper.make_tensor_value_info(name, _FLOAT, shape) for name in outputs],
            graph.constants,
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=_IR_VERSION,
        producer_name="tandem",
    )
    helper.set_model_props(model, metadata)
    checker.check_model(model)
    return model


def _rows(
    graph: "OnnxGraph", shape: tuple[int, ...], as_stored: bool
) -> "tuple[ValueInfoProto, str]":
    """The input ``rows``, and the name of what the network takes: of images, channels first."""
    from onnx import helper

    is_image = len(shape) == 3 and not as_stored
    given = (*shape[1:], shape[0]) if is_image else shape
    info = helper.make_tensor_value_info("rows", _FLOAT, ["batch", *given])
    return info, graph.add("Transpose", ["rows"], perm=[0, 3, 1, 2]) if is_image else "rows"


def _pictures(
    graph: "OnnxGraph", mean: np.ndarray, pad: int, crop_size: int
) -> "tuple[ValueInfoProto, str]":
    """The input ``pictures``, and the name of what the network takes.

    The steps between are centre crop, float, channels first, minus mean. A crop that is larger than
    the pictures reaches into their border, which is 0 less the mean.
    """
    from onnx import TensorProto, helper

    side = mean.shape[-1] - 2 * pad
    mean = mean[:, pad : pad + side, pad : pad + side]
    info = helper.make_tensor_value_info("pictures", TensorProto.UINT8, ["batch", side, side, 3])
    before = max(0, -((side - crop_size) // 2))
    after = max(0, crop_size - side - before)
    first = max(0, (side - crop_size) // 2)
    last = min(side, first + crop_size)
    bounds = [graph.constant(np.array([n, n], np.int64)) for n in (first, last)]
    axes = graph.constant(np.array([1, 2], np.int64))
    window = graph.constant(mean[:, first:last, first:last].copy(), "mean")
    cropped = graph.add("Slice", ["pictures", *bounds, axes])
    numbers = graph.add("Cast", [cropped], to=TensorProto.FLOAT)
    images = graph.add("Sub", [graph.add("Transpose", [numbers], perm=[0, 3, 1, 2]), window])
    if crop_size <= side:
        return info, images
    if pad and not mean.any():
        raise InputError(
            f"found a crop_size of {crop_size}, pictures of {side} pixels and no mean image, which "
            "has the colour of their border; expected a crop within the border"
        )
    ends = [0, 0, before, before, 0, 0, after, after]
    return info, graph.add("Pad", [images, graph.constant(np.array(ends, np.int64))])


def _class_names(wnids: Sequence[str] | None) -> dict[str, str]:
    """The metadata on classes."""
    if wnids is None:
        return {}
    names = [imagenet_names().get(wnid, wnid) for wnid in wnids]
    return {"wnids": json.dumps(wnids), "names": json.dumps(names)}
