"""The arrays of a run as files in its folder."""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tandem.artifacts.metrics_log import read_records
from tandem.artifacts.run_folder import RECORD, list_checkpoints
from tandem.data.manifest import ArrayManifest, Manifest, read_any_manifest
from tandem.errors import InputError
from tandem.nn.arrays import Rows
from tandem.preprocessing.arrays import checksum, matches, write_arrays, write_pictures
from tandem.validation import listed

if TYPE_CHECKING:
    from tandem.nn.model import Model


def check_stored(folder: Path, manifest: Manifest | ArrayManifest, model: "Model") -> None:
    """Refuse stored data that do not fit a model, by an InputError."""
    if manifest.classes != model.units:
        raise InputError(
            f"{folder}: found {manifest.classes} classes or values of a target, expected "
            f"{model.units}, as the model has outputs"
        )
    shape = model.graph.input_shape
    if isinstance(manifest, ArrayManifest):
        if manifest.pixels.shape != shape:
            raise InputError(
                f"{folder}: found rows of shape {manifest.pixels.shape}, expected {shape}, as the "
                "model's input"
            )
    elif shape not in ((shape[0], shape[0], 1), (shape[0], shape[0], 3)):
        raise InputError(
            f"{folder}: found pictures, expected a model of square pictures: its input has the "
            f"shape {shape}"
        )


def store(
    folder: Path, splits: Sequence[Rows], model: "Model", class_names: Sequence[str] | None
) -> bool:
    """Write training and perhaps validation rows, unless the folder has them.

    Returns whether they were written. Raises InputError if the folder has others.
    """
    names = None if class_names is None else tuple(class_names)
    if names is not None and len(names) != model.units:
        raise InputError(f"class_names: found {len(names)}, expected {model.units}, as outputs")
    train = splits[0].x, splits[0].y
    validation = (splits[1].x, splits[1].y) if len(splits) == 2 else None
    if matches(folder, checksum(*train, *(validation or (None, None)))):
        found = read_any_manifest(folder)
        check_stored(folder, found, model)
        if names is not None and names != found.wnids:
            raise InputError(
                f"class_names: found {listed(names)}, expected {listed(found.wnids)}, as in "
                f"{folder}"
            )
        return False
    if splits[0].y.dtype == np.int64 and names is None:
        names = tuple(map(str, range(model.units)))
    write = write_pictures if splits[0].are_pictures else write_arrays
    write(folder, train, validation, names)
    return True


def remove_unbegun(folder: Path, made: Iterable[Path]) -> None:
    """Remove what was made for a run that failed before it recorded anything.

    So the corrected call finds the folder as this one did.
    """
    if list_checkpoints(folder) or ((folder / RECORD).exists() and read_records(folder / RECORD)):
        return
    for path in made:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
