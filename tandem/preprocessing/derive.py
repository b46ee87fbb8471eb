"""Text and label files for other programs, written from the manifest."""

import logging

from tandem.data.manifest import SPLITS, read_manifest
from tandem.files import make_folder, write_array, write_text
from tandem.preprocessing.settings import Settings

log = logging.getLogger(__name__)


def write_txt(settings: Settings) -> None:
    """Write train.txt and val.txt in Caffe's style, ``folder/name label``, in dataset order."""
    folder = settings.tar_root_dir
    manifest = read_manifest(folder / "manifest.json")
    for name in SPLITS:
        split = manifest.splits[name]
        pairs = zip(split.pictures, split.labels.tolist(), strict=True)
        write_text(folder / f"{name}.txt", "".join(f"{p} {label}\n" for p, label in pairs))
    log.info("%s and val.txt: written", folder / "train.txt")


def write_labels(settings: Settings) -> None:
    """Write train_labels.npy and val_labels.npy: int64 (pictures,), in dataset order."""
    manifest = read_manifest(settings.tar_root_dir / "manifest.json")
    folder = settings.label_folder
    make_folder(folder)
    for name in SPLITS:
        write_array(folder / f"{name}_labels.npy", manifest.splits[name].labels)
    log.info("%s and val_labels.npy: written", folder / "train_labels.npy")
