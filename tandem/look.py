"""A contact sheet of pictures of the batch files as the network gets them, and counts by class.

The first minibatches:    tandem look --config demo/config.yaml
Pictures of validation:   tandem look --split validation --count 64 --output validation.png
Another epoch's crops:    tandem look --epoch 2 --output epoch-2.png
All counts, for programs: tandem look --json

Pictures have the order, crops and mirroring of a run with these settings. The mean image is
subtracted, and its mean colour added again, so that the pictures can be seen.
"""

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tandem.cli import CommandLine, PathOption, configure_logging, exit_status, option
from tandem.config.command_line import ANSWERS, DEFAULT_FILE, RECIPES
from tandem.config.schema import Config
from tandem.data.class_names import short_names
from tandem.data.colour import read_basis
from tandem.data.dataset import open_split
from tandem.data.manifest import Manifest, read_manifest
from tandem.data.mean_image import read_mean
from tandem.data.minibatch import MinibatchRequest
from tandem.data.order import epoch_order, global_minibatch, minibatch_count
from tandem.errors import InputError, explained
from tandem.files import replacing
from tandem.launch.prepare import check_crop_size
from tandem.memory import HostBuffer, Slot
from tandem.text_table import aligned
from tandem.training.run_spec import RunSpec
from tandem.validation import listed

log = logging.getLogger(__name__)

ACROSS = 8  # pictures in a row
MOST = 1024  # pictures on a sheet
_EXTREMES = 5  # classes that are listed with the fewest pictures, and with the most
_TEXTS = (1, 2)  # columns of the table
_SPLITS = ("training", "validation")
_FRAME = "#DDDDDD"

Images = npt.NDArray[np.float32]
Crops = npt.NDArray[np.uint8]


class LookOptions(Config):
    """Options of ``tandem look``, beside all settings of a run."""

    split: Literal["train", "validation"] = option(
        "train", "which pictures", "train or validation", "text"
    )
    count: int = option(
        32, "pictures on the sheet", f"a whole number from 1 to {MOST}", ge=1, le=MOST
    )
    epoch: int = option(1, "epoch whose order and crops are shown", "at least 1", ge=1)
    output: PathOption = option(Path("look.png"), "the contact sheet", "a file, .png", "text")
    as_json: bool = option(False, "print all counts as JSON", "true or false", alias="json")

    @property
    def configuration(self) -> Config:
        """The settings of a run alone, with loaders that crop, and without GPUs."""
        trainers = 1 if self.devices == "auto" else len(self.devices)
        own = self.model_dump(include=set(Config.model_fields))
        changes = {"devices": ("cpu",) * trainers, "use_data_layer": False, "loader_threads": 1}
        changes |= {"sum_rows": "auto", "norm_rows": "auto"}
        if self.global_batch is not None:  # by one trainer the same order and crops
            changes |= {"devices": ("cpu",), "batch_size": self.global_batch, "global_batch": None}
        return Config(**own | changes)


def run_look(
    arguments: Sequence[str] | None, description: str | None, program: str | None = None
) -> int:
    """Draw pictures and count classes by the settings of a command line; return the exit status."""
    configure_logging()
    line = CommandLine(arguments, description, program, ANSWERS, once=True, recipes=RECIPES)
    return exit_status(lambda: look(line.read(LookOptions, DEFAULT_FILE)))


def look(options: LookOptions) -> None:
    """Write the contact sheet and print the counts that the options ask for."""
    from tandem.artifacts.visualize import contact_sheet  # which imports Pillow

    if options.output.suffix.lower() != ".png":
        raise InputError(f"--output: found {options.output}, expected a file whose name ends .png")
    manifest = read_manifest(options.manifest_path)
    batch = read_pictures(options, manifest)
    names = class_names(manifest)
    pictures = manifest.splits["train" if options.split == "train" else "val"].pictures
    captions = [
        (names[label], pictures[index].rpartition("/")[2])
        for label, index in zip(batch.labels, batch.indices, strict=True)
    ]
    frames = [_FRAME] * len(captions)
    sheet = contact_sheet(batch.crops, captions, 2, frames, min(ACROSS, len(captions)))
    with explained(options.output, "cannot be written"), replacing(options.output) as partial:
        sheet.save(partial, format="png")
    counts = count_classes(manifest)
    sys.stdout.write(counts_as_json(counts) if options.as_json else describe_counts(counts))
    log.info("wrote %d pictures of %s to %s", len(captions), options.split, options.output)


@dataclass(frozen=True)
class Pictures:
    """Pictures to be shown."""

    crops: Crops  # (n, S, S, RGB)
    labels: list[int]
    indices: list[int]  # in the data set


def read_pictures(options: LookOptions, manifest: Manifest) -> Pictures:
    """Read the first pictures of an epoch, or of the validation, as loaders and network do.

    Raises InputError if a batch file, the labels or the mean image cannot be used, or the crop is
    larger than the pictures.
    """
    config = options.configuration
    check_crop_size(config, manifest)
    name, folder = ("train", config.train_path)
    if options.split == "validation":
        name, folder = "val", config.val_path
    dataset = open_split(manifest, config.data_path, name, config.label_path, folder)
    mean = read_mean(config.mean_path, manifest.image_size)
    colours = read_basis(config.covariance_path, config.rand_colour if name == "train" else 0)
    spec = RunSpec("train", config, manifest.wnids, dataset, dataset, {}, colour_basis=colours)
    builder, layout = spec.minibatch_builder(), spec.slot_layout
    slot = Slot.on(HostBuffer.create(layout.nbytes, "look"), layout)
    crops: list[Crops] = []
    labels: list[int] = []
    indices: list[int] = []
    for request in requests(spec, options.split, options.epoch - 1):
        builder.fill(slot, request)
        crops += [*displayed(network_input(slot, mean), mean)]
        labels += slot.labels[: slot.valid].tolist()
        indices += slot.indices[: slot.valid].tolist()
        if len(labels) >= options.count:
            break
    builder.close()
    if not crops:
        raise InputError(
            f"--split: found no {options.split} pictures in {config.manifest_path}, expected some"
        )
    most = options.count
    return Pictures(np.stack(crops[:most]), labels[:most], indices[:most])


def requests(
    spec: RunSpec, mode: Literal["train", "validation"], epoch: int
) -> Iterator[MinibatchRequest]:
    """The minibatches of all trainers, in order, of one epoch or of the validation."""
    config, size = spec.config, spec.train.size
    order = np.arange(size)
    if mode == "train":
        order = epoch_order(spec.train.counts, config.shuffle, config.seed, epoch)
    for k in range(minibatch_count(size, spec.global_batch)):
        minibatch = global_minibatch(order, k, spec.global_batch)
        for own in spec.shares:
            if len(rows := minibatch[own]):
                yield MinibatchRequest(0, mode, epoch, k, rows)


def network_input(slot: Slot, mean: Images) -> Images:
    """The images that a network gets from a slot of crops: float32 (n, row, column, RGB).

    From each crop the mean image, (RGB, row, column), is subtracted at the crop's own window,
    mirrored where the crop is; then the crop's colour noise is added, if the slot has any.
    """
    side = slot.pictures.shape[1]
    images = slot.pictures[: slot.valid].astype(np.float32)
    by_pixel = mean.transpose(1, 2, 0)
    for image, (top, left), mirrored in zip(images, slot.origins, slot.mirrored, strict=False):
        window = by_pixel[top : top + side, left : left + side]
        image -= window[:, ::-1] if mirrored else window
    if len(slot.colours):
        images += slot.colours[: slot.valid, np.newaxis, np.newaxis]
    return images


def displayed(images: Images, mean: Images) -> Crops:
    """Add the mean colour to images that have none: uint8 (n, row, column, RGB)."""
    return np.clip(np.rint(images + mean.mean(axis=(1, 2))), 0, 255).astype(np.uint8)


# Counts


@dataclass(frozen=True)
class ClassCount:
    """A class and the number of its pictures."""

    number: int  # from 0
    wnid: str
    name: str
    training: int
    validation: int

    def of(self, split: str) -> int:
        """The pictures of one of `_SPLITS`."""
        return self.training if split == "training" else self.validation


def class_names(manifest: Manifest) -> list[str]:
    """The first of ImageNet's names of each class, or else the name of its folder."""
    return short_names(manifest.wnids)


def count_classes(manifest: Manifest) -> list[ClassCount]:
    """Count the pictures of each class, in order."""
    training, validation = (
        np.bincount(manifest.splits[split].labels, minlength=manifest.classes).tolist()
        for split in ("train", "val")
    )
    columns = zip(manifest.wnids, class_names(manifest), training, validation, strict=True)
    return [ClassCount(number, *column) for number, column in enumerate(columns)]


def describe_counts(counts: Sequence[ClassCount]) -> str:
    """A table of the classes, of many those with the fewest and most pictures, and the totals."""
    ordered = sorted(counts, key=lambda c: (c.training, c.validation, c.number))
    rows = [("class", "folder", "name", "training", "validation")]
    if len(counts) <= 2 * _EXTREMES + 2:
        rows += map(_row, counts)
    else:
        rows += map(_row, ordered[:_EXTREMES])
        rows.append(("...", "", "", "", ""))
        rows += map(_row, ordered[-_EXTREMES:])
    training, validation = (sum(count.of(split) for count in counts) for split in _SPLITS)
    rows.append(("all", "", f"{len(counts):,} classes", f"{training:,}", f"{validation:,}"))
    lines = aligned(rows, left=_TEXTS)
    for split in _SPLITS:
        if empty := [count.name for count in counts if not count.of(split)]:
            lines.append(f"classes without {split} pictures ({len(empty):,}): {listed(empty)}")
    return "\n".join(lines) + "\n"


def _row(count: ClassCount) -> tuple[str, str, str, str, str]:
    amounts = f"{count.training:,}", f"{count.validation:,}"
    return str(count.number), count.wnid, count.name, *amounts


def counts_as_json(counts: Sequence[ClassCount]) -> str:
    """One JSON object with the counts of all classes and the totals."""
    classes: list[dict[str, Any]] = [
        {
            "class": count.number,
            "folder": count.wnid,
            "name": count.name,
            "training": count.training,
            "validation": count.validation,
        }
        for count in counts
    ]
    totals = {split: sum(count.of(split) for count in counts) for split in _SPLITS}
    return json.dumps({**totals, "classes": classes}) + "\n"
