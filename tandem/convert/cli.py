"""Convert the weights of other programs, or ours for the original.

The original's folder:   tandem convert weights_folder alexnet.safetensors --epoch 65
Back to such a folder:   tandem convert alexnet.safetensors weights_folder
Its published archive:   tandem convert parameters_releasing.zip alexnet.safetensors
Caffe's network:         tandem convert bvlc_googlenet.caffemodel googlenet.safetensors
torchvision's names:     tandem convert torchvision_resnet50.safetensors resnet50.safetensors
Caffe's mean image:      tandem convert imagenet_mean.binaryproto caffe_mean.npy
A model of Keras:        tandem convert model.keras model.safetensors
A run's, for Keras:      tandem convert runs/fashion/epoch-0012.safetensors fashion.keras
"""

import importlib.util
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tandem.artifacts.checkpoint import (
    Checkpoint,
    RunState,
    read_checkpoint,
    read_header,
    save_checkpoint,
)
from tandem.artifacts.run_folder import list_checkpoints
from tandem.artifacts.unsupported import describe_unsupported
from tandem.cli import CommandLine, Options, PathOption, option, run_program
from tandem.convert.caffe import alexnet, read_layers, read_mean_proto
from tandem.convert.caffe_networks import convert_network
from tandem.convert.fetch import EPOCH, FILE, download, unpacked, verify
from tandem.convert.published import Converted
from tandem.convert.theano_folder import (
    LibConv,
    find_classes,
    find_epoch,
    read_folder,
    write_folder,
)
from tandem.convert.torchvision import read_state_dict
from tandem.data.class_names import imagenet_names
from tandem.errors import InputError, explained
from tandem.files import write_array
from tandem.layers.network import ALEXNET, NetworkDescription, build_network

log = logging.getLogger(__name__)

_OF_FOLDER = "epoch", "lib_conv", "crop_size", "width"  # settings that its conversion reads
CROP_SIZE = 227  # pixels, of AlexNet


class Settings(Options):
    """The facts that the files themselves do not hold."""

    epoch: int | None = option(
        None,
        "number at the end of the original's file names (default: the only one there; of a "
        "checkpoint, its own)",
        "a whole number of at least 0",
        ge=0,
    )
    lib_conv: LibConv = option(
        "cudnn",
        "of the original's configuration in training: cudnn or cudaconvnet",
        "cudnn or cudaconvnet",
    )
    crop_size: int | None = option(
        None, "of the network (default: 227 of AlexNet, 224 of others)", "a whole number of pixels"
    )
    width: float = option(1.0, "of the network", "a number")
    network: str | None = option(
        None,
        "class of the network of a state dict, as module:class (default: by its names)",
        "a module and a class, such as tandem.models.resnet:ResNet50",
    )

    def describe(self, classes: int, norm_before_pool: bool = False) -> NetworkDescription:
        names = tuple(imagenet_names())
        wnids = names if classes == len(names) else None
        crop_size = CROP_SIZE if self.crop_size is None else self.crop_size
        return NetworkDescription(crop_size, classes, self.width, wnids, norm_before_pool)

    def check(self, source: Path, *read: str) -> None:
        """Refuse settings that are given and that the conversion of a source does not read."""
        if ignored := sorted(self.model_fields_set & Settings.model_fields.keys() - {*read}):
            raise InputError(
                f"--{ignored[0]}: the conversion of {source} does not read it; leave it out"
            )


class ConvertOptions(Settings):
    """Options of ``pretrained/convert.py``."""

    source: PathOption = option(..., "file or folder to read", "a path", "argument")
    target: PathOption = option(..., "file or folder to write", "a path", "argument")


class FetchOptions(Options):
    """Options of ``pretrained/fetch.py``."""

    file: PathOption | None = option(
        None, f"{FILE}, where it has been downloaded already", "a file", "text"
    )
    address: str | None = option(
        None, f"where to download {FILE} (default: it is looked up)", "an address", "text"
    )
    output: PathOption = option(
        Path("pretrained/alexnet.safetensors"), "checkpoint to write", "a file", "text"
    )


def run_conversion(
    arguments: Sequence[str] | None, description: str | None, program: str | None = None
) -> int:
    """Convert weights from one kind of file to another; return the exit status."""
    line = CommandLine(arguments, description, program)
    return run_program(ConvertOptions, lambda o: convert(o.source, o.target, o), line)


def run_fetch(arguments: Sequence[str] | None, description: str | None) -> int:
    """Download the original's published weights and convert them; return the exit status."""
    line = CommandLine(arguments, description)
    return run_program(FetchOptions, lambda o: fetch(o.output, o.file, o.address), line)


def convert(source: Path, target: Path, settings: Settings) -> None:
    """Convert a file or folder, by its kind: see ``pretrained/convert.py --help``.

    Raises InputError if the source is missing, damaged, of an unknown kind or of another network,
    or if the target cannot be written.
    """
    kinds: dict[str, Callable[[Path, Path, Settings], None]] = {
        ".zip": _convert_archive,
        ".safetensors": _convert_safetensors,
        ".caffemodel": _convert_caffe,
        ".binaryproto": _convert_mean,
        ".keras": _convert_keras,
    }
    if source.is_dir() and (checkpoints := list_checkpoints(source)):  # of a run
        source = checkpoints[-1]
    if source.is_dir():
        _convert_folder(source, target, settings)
    elif not source.exists():
        raise InputError(f"{source}: does not exist")
    elif source.suffix in kinds:
        kinds[source.suffix](source, target, settings)
    else:
        if unsupported := describe_unsupported(source):
            raise InputError(f"{source}: {unsupported}")
        raise InputError(
            f"{source}: of no kind that can be converted; expected a folder, or a file "
            f"{', '.join(kinds)}"
        )


def fetch(output: Path, file: Path | None = None, address: str | None = None) -> None:
    """Download the original's published weights and write them as a checkpoint.

    The archive is kept beside it, unless `file` is that already; its address is looked up by
    default. Raises InputError if it cannot be downloaded or is another file, or if the output
    cannot be written.
    """
    _check_suffix(output, ".safetensors")
    if file is None:
        file = download(output.parent, address)
    else:
        verify(file)
    _convert_archive(file, output, Settings(epoch=EPOCH))


def _convert_folder(folder: Path, target: Path, settings: Settings) -> None:
    _check_suffix(target, ".safetensors")
    settings.check(folder, *_OF_FOLDER)
    epoch = find_epoch(folder) if settings.epoch is None else settings.epoch
    description = settings.describe(find_classes(folder, epoch))
    network = build_network(description)
    weights = read_folder(folder, epoch, network, settings.lib_conv)
    _save(target, weights, description, RunState(epoch))


def _convert_archive(archive: Path, target: Path, settings: Settings) -> None:
    settings.check(archive, *_OF_FOLDER)
    with unpacked(archive) as folder:
        _convert_folder(folder, target, settings)


def _convert_safetensors(path: Path, target: Path, settings: Settings) -> None:
    """A state dict to a checkpoint; a checkpoint to the original's folder, or to Keras's file."""
    if target.suffix == ".keras":
        settings.check(path)
        _keras_loading().write_keras(path, target)
    elif target.suffix != ".safetensors":
        settings.check(path, "epoch", "lib_conv")
        _convert_checkpoint(path, target, settings)
    else:
        settings.check(path, "network", "crop_size", "width")
        found = read_state_dict(path, settings.network, settings.crop_size, settings.width)
        _save_converted(target, found)


def _convert_checkpoint(path: Path, folder: Path, settings: Settings) -> None:
    description = read_header(path).network
    if description.network != ALEXNET:
        raise InputError(f"{path}: the original has AlexNet alone, not {description.network}")
    if description.norm_before_pool:
        raise InputError(
            f"{path}: the original's network normalises after pooling, this one before it"
        )
    network = build_network(description)
    shapes = {name: variable.type.shape for name, variable in network.parameters.items()}
    checkpoint = read_checkpoint(path, shapes)
    epoch = checkpoint.state.epoch if settings.epoch is None else settings.epoch
    write_folder(folder, epoch, checkpoint.weights, network, settings.lib_conv)
    log.info("wrote %s: weights of epoch %d as the original's files", folder, epoch)


def _convert_caffe(path: Path, target: Path, settings: Settings) -> None:
    _check_suffix(target, ".safetensors")
    settings.check(path, "crop_size", "width")
    layers = read_layers(path)
    if found := convert_network(path, layers, settings.crop_size, settings.width):
        _save_converted(target, found)
        return
    caffe = alexnet(path, layers)
    description = settings.describe(caffe.classes, caffe.norm_before_pool)
    _save(target, caffe.weights(build_network(description)), description, RunState())


def _convert_keras(path: Path, target: Path, settings: Settings) -> None:
    _check_suffix(target, ".safetensors")
    settings.check(path)
    _keras_loading().write_checkpoint(str(path), target, {})


def _keras_loading() -> Any:
    """The module that imports Keras; InputError where there is none."""
    if importlib.util.find_spec("keras") is None:
        raise InputError("a .keras file needs Keras: pip install 'tandem-train[keras]'")
    importlib.import_module("tandem.keras")  # which chooses Keras's backend
    return importlib.import_module("tandem.keras.loading")


def _convert_mean(path: Path, target: Path, settings: Settings) -> None:
    _check_suffix(target, ".npy")
    settings.check(path)
    _write_mean(target, read_mean_proto(path))


def _write_mean(target: Path, mean: np.ndarray) -> None:
    with explained(target, "cannot be written"):
        write_array(target, mean)
    log.info("wrote %s: a mean image of %d pixels a side", target, mean.shape[-1])


def _save(
    target: Path, weights: dict[str, np.ndarray], network: NetworkDescription, state: RunState
) -> None:
    save_checkpoint(target, Checkpoint(weights, {}, network, state))
    order = " (norm_before_pool: true)" if network.norm_before_pool else ""
    log.info("wrote %s: AlexNet of %d classes%s", target, network.classes, order)


def _save_converted(target: Path, found: Converted) -> None:
    """Write a network of `tandem.models`, and its mean colour as a mean image beside it."""
    network = found.description
    checkpoint = Checkpoint(found.weights, {}, network, untrained=found.untrained)
    save_checkpoint(target, checkpoint)
    log.info("wrote %s: %s", target, network.summary)
    if found.mean is not None:
        _write_mean(target.with_name(f"{target.stem}_mean.npy"), found.mean)


def _check_suffix(target: Path, suffix: str) -> None:
    if target.suffix != suffix:
        raise InputError(f"{target}: the name of the file to write must end in {suffix}")
