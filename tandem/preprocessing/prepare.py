"""All of make_hkl.py: pictures to batch files, mean image and manifest."""

import hashlib
import importlib.metadata
import json
import logging
import platform
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import features

from tandem import __version__
from tandem.data.colour import COVARIANCE_NAME, colour_moments, covariance_of
from tandem.data.dataset import locate_split
from tandem.data.manifest import (
    MANIFEST_NAME,
    SPLITS,
    Manifest,
    Split,
    read_manifest,
    write_manifest,
)
from tandem.errors import InputError
from tandem.files import locked, make_folder, remove_partials, write_array
from tandem.preprocessing.batches import BatchWriter, SplitWriter, batch_name
from tandem.preprocessing.border import fill_borders, inside, mean_colour
from tandem.preprocessing.index import save_index
from tandem.preprocessing.listed import Listed
from tandem.preprocessing.listing import Listing, list_pictures
from tandem.preprocessing.output import batch_bytes, check_space, check_writable
from tandem.preprocessing.pool import CHUNK, DecodePool
from tandem.preprocessing.progress import PROGRESS_NAME, Progress, load_progress, save_progress
from tandem.preprocessing.report import SKIPPED_NAME, Report, line_name, read_skipped
from tandem.preprocessing.settings import Settings

log = logging.getLogger(__name__)

MEAN_NAME = "img_mean.npy"
_COMPARED = ("image_size", "pad", "resize", "layout", "batch_size", "seed")
_MISC = "misc_dir"  # which may change as long as nothing is there that the run did not write
_PIECE = 1 << 14  # pictures whose names are in memory twice
_REMEDY = "choose another tar_root_dir, or delete what this one holds to start over"


def prepare(settings: Settings) -> None:
    """Make the batch files, the mean image, the list of skipped pictures and the manifest.

    A stopped run continues; a finished one is checked and left alone. The manifest is written last:
    once it exists, so does everything it names. Raises InputError if the pictures, the settings or
    the folders cannot be used, or belong to another run.
    """
    root = settings.tar_root_dir
    if not (root / MANIFEST_NAME).exists():
        for folder in (root, settings.misc_folder, settings.label_folder):
            check_writable(folder)
    new = not any((root / name).exists() for name in (PROGRESS_NAME, MANIFEST_NAME))
    if new:
        _check_unused(settings)  # before pictures are copied there
    listing = list_pictures(settings)
    spec = _spec(settings, listing)
    if new:
        _check_space(settings, listing, "the batch files")
    make_folder(root)
    with locked(root):
        progress = load_progress(root)
        if progress is None and (root / MANIFEST_NAME).exists():
            _check_finished(settings, listing)
            _complete(settings)
            log.info("%s: everything is there already", root / MANIFEST_NAME)
            return
        if progress is None:
            _check_unused(settings)
        else:
            _check_same(root / PROGRESS_NAME, "stopped", progress.spec, spec)
            if progress.spec.get(_MISC, spec[_MISC]) != spec[_MISC]:
                _check_unused(settings, ())
                progress = replace(progress, spec=progress.spec | {_MISC: spec[_MISC]})
                save_progress(root, progress)
        try:
            _make_all(settings, listing, spec, progress)
        except InputError:
            _forget(root)
            raise


def mean_of(sums: np.ndarray, count: int) -> np.ndarray:
    """Divide sums of pictures, int64 (row, column, RGB), to float32 (channel, row, column)."""
    return (sums.transpose(2, 0, 1) / np.float64(count)).astype(np.float32)


def _make_all(
    settings: Settings, listing: Listing, spec: dict[str, Any], progress: Progress | None
) -> None:
    root = settings.tar_root_dir
    for folder in (root, *_batch_folders(root), settings.misc_folder):
        make_folder(folder)
        remove_partials(folder)
    if listing.index:
        save_index(root, listing.index, listing.splits)
    if progress is None:
        side = settings.image_size
        progress = Progress(spec, np.zeros((side, side, 3), np.int64))
        save_progress(root, progress)
    else:
        left = "the batch files that are still to be written"
        _check_space(settings, listing, left, progress)
    report = Report(settings, listing, progress)
    workers = settings.processes
    count = sum(len(x.pictures) - progress.splits[s].cursor for s, x in listing.splits.items())
    longest = max(len(listed.pictures) for listed in listing.splits.values())
    # A file being written, one being assembled, and two tasks for each process; more would only be
    # more memory, which costs when it is first touched.
    slots = min(longest, 2 * settings.batch_size + 2 * workers * CHUNK)
    with (
        # Processes are copied before the bar has its thread and stands in for the terminal.
        DecodePool(
            workers, slots, settings.image_size, settings.resize, settings.pad, count
        ) as pool,
        report.shown(),
        BatchWriter(root, settings.layout, progress) as writer,
    ):
        for split in SPLITS:
            listed = listing.splits[split]
            SplitWriter(split, listed, settings.batch_size, pool, writer, report).run()
        writer.flush()
        progress = writer.progress
    _finish(settings, listing, progress, report)


def _forget(root: Path) -> None:
    """Remove what a refused run recorded before its first batch file: it would bind the next."""
    if not any(path for folder in _batch_folders(root) for path in folder.glob("*")):
        (root / PROGRESS_NAME).unlink(missing_ok=True)


def _finish(settings: Settings, listing: Listing, progress: Progress, report: Report) -> None:
    kept = {name: _kept(listing.splits[name], report.skipped_positions(name)) for name in SPLITS}
    for listed in kept.values():
        if not listed.pictures:
            report.write_skipped()
            for folder in _batch_folders(settings.tar_root_dir):  # nothing can continue with them
                shutil.rmtree(folder)
            (settings.tar_root_dir / PROGRESS_NAME).unlink()
            raise InputError(f"{listed.folder}: none of its pictures can be decoded")
    colour = mean_colour(progress.sums, len(kept["train"].pictures))
    mean = np.empty((3, settings.stored_size, settings.stored_size), np.float32)
    mean[...] = colour[:, np.newaxis, np.newaxis]
    inner = mean_of(progress.sums, len(kept["train"].pictures))
    inside(mean.transpose(1, 2, 0), settings.pad)[...] = inner.transpose(1, 2, 0)
    write_array(settings.misc_folder / MEAN_NAME, mean)
    write_array(settings.misc_folder / COVARIANCE_NAME, covariance_of(progress.moments))
    report.write_skipped()
    manifest = Manifest(
        image_size=settings.stored_size,
        layout=settings.layout,
        pictures_per_file=settings.batch_size,
        wnids=listing.wnids,
        seed=settings.seed,
        versions=progress.spec["versions"],
        splits={
            name: Split(
                tuple(batch_name(name, number) for number in range(progress.splits[name].files)),
                listed.pictures,
                listed.labels,
            )
            for name, listed in kept.items()
        },
        resize=settings.resize,
        pad=settings.pad,
    )
    if settings.pad:
        log.info("filling the borders with the mean colour, RGB %s", colour.tolist())
        for name in SPLITS:
            located = locate_split(manifest, settings.tar_root_dir, name)
            fill_borders(located, settings.layout, settings.pad, colour)
    write_manifest(settings.tar_root_dir / MANIFEST_NAME, manifest)
    (settings.tar_root_dir / PROGRESS_NAME).unlink()
    log.info(
        "%s: %d training and %d validation pictures of %d classes; %d left out",
        settings.tar_root_dir / MANIFEST_NAME,
        len(kept["train"].pictures),
        len(kept["val"].pictures),
        manifest.classes,
        report.bad,
    )
    if listing.copies is not None:
        log.info("%s: these copies of the pictures may be deleted now", listing.copies)


def _kept(listed: Listed, skipped: set[int]) -> Listed:
    if not skipped:
        return listed
    return listed.take([i for i in range(len(listed.pictures)) if i not in skipped])


def _batch_folders(root: Path) -> list[Path]:
    return [(root / batch_name(split, 0)).parent for split in SPLITS]


def _spec(settings: Settings, listing: Listing) -> dict[str, Any]:
    """Everything that the output depends on, and where its mean image is written."""
    numbers = {key: getattr(settings, key) for key in _COMPARED}
    pictures = {name: _digest(listing, listing.splits[name]) for name in SPLITS}
    misc = str(settings.misc_folder.resolve())  # noted, but not compared
    return numbers | {"versions": _versions(), "pictures": pictures, _MISC: misc}


def _versions() -> dict[str, str]:
    packages = ("numpy", "pillow", "hickle", "h5py")
    return {
        "python": platform.python_version(),
        "tandem": __version__,  # which a clone has, though it may not be installed
        **{name: importlib.metadata.version(name) for name in packages},
        "libjpeg": str(features.version("libjpeg_turbo") or features.version("jpg")),
    }


def _digest(listing: Listing, listed: Listed) -> str:
    """Digest of JSON, ``[wnids, pictures, labels]``, made piece by piece."""
    digest = hashlib.sha256(f"[{json.dumps(listing.wnids)}".encode())
    for column in (listed.pictures, listed.labels):
        for start in range(0, len(column), _PIECE):
            piece = column[start : start + _PIECE]
            values = piece.tolist() if isinstance(piece, np.ndarray) else piece
            digest.update(f"{', ' if start else ', ['}{json.dumps(values)[1:-1]}".encode())
        digest.update(b"]")
    digest.update(b"]")
    return digest.hexdigest()[:16]


def _check_same(path: Path, state: str, found: dict[str, Any], spec: dict[str, Any]) -> None:
    before, now = {"pad": 0} | _flat(found), _flat(spec)  # older runs had none
    for key in now:
        if key != _MISC and before.get(key) != now[key]:
            raise InputError(
                f"{path}: found a {state} run with {key} {before.get(key)}, expected {now[key]} as"
                f" in this run; {_REMEDY}"
            )


def _flat(spec: dict[str, Any]) -> dict[str, Any]:
    nested = {key: value for key, value in spec.items() if isinstance(value, dict)}
    inner = {f"{key}.{name}": v for key, value in nested.items() for name, v in value.items()}
    return {key: value for key, value in spec.items() if key not in nested} | inner


def _check_unused(settings: Settings, splits: Sequence[str] = SPLITS) -> None:
    """Refuse to overwrite files of another program, or of a run with another manifest.

    Looked at are the batch files of `splits`, and what goes to the folder of the mean image.
    """
    root = settings.tar_root_dir
    folders = [(root / batch_name(split, 0)).parent for split in splits]
    foreign = [path for folder in folders for path in sorted(folder.glob("*"))]
    written = [settings.misc_folder / name for name in (MEAN_NAME, COVARIANCE_NAME)]
    foreign += [path for path in written if path.exists()]
    if foreign:
        raise InputError(
            f"{foreign[0]}: found a file that no run recorded in {root}, expected none; {_REMEDY}"
        )


def _check_space(
    settings: Settings, listing: Listing, purpose: str, progress: Progress | None = None
) -> None:
    """Refuse a disk without room for the batch files of all pictures that are not done."""
    counts = [len(listed.pictures) for listed in listing.splits.values()]
    pictures = sum(counts)
    if progress is not None:
        pictures -= sum(split.cursor for split in progress.splits.values())
    if settings.pad:
        # A file is there twice while its border is filled.
        pictures += min(settings.batch_size, max(counts))
    check_space(settings.tar_root_dir, batch_bytes(pictures, settings.stored_size), purpose)


def _check_finished(settings: Settings, listing: Listing) -> None:
    """Refuse the output of a finished run with other settings or pictures."""
    path = settings.tar_root_dir / MANIFEST_NAME
    manifest = read_manifest(path)
    found = vars(manifest) | {
        "batch_size": manifest.pictures_per_file,
        "image_size": manifest.image_size - 2 * manifest.pad,
    }
    _check_same(path, "finished", found, {key: getattr(settings, key) for key in _COMPARED})
    skipped = read_skipped(settings.misc_folder / SKIPPED_NAME)
    for name in SPLITS:
        listed = listing.splits[name]
        bad = {i for i, p in enumerate(listed.pictures) if line_name(name, p) in skipped}
        kept, found_split = _kept(listed, bad), manifest.splits[name]
        if not _same_pictures(kept, found_split):
            raise InputError(
                f"{path}: found a finished run of {len(found_split.pictures)} other {name}"
                f" pictures, expected the {len(kept.pictures)} of {listed.folder}; {_REMEDY}"
            )
        locate_split(manifest, settings.tar_root_dir, name)
    mean_file = settings.misc_folder / MEAN_NAME
    if not mean_file.exists():
        raise InputError(f"{mean_file}: there is no mean image, although {path} exists; {_REMEDY}")


def _same_pictures(listed: Listed, found: Split) -> bool:
    """Return whether a split holds the pictures of a list, in its order or in that before 0.3.

    Until then ILSVRC's validation pictures in class folders kept the folders in their names, and
    were shuffled.
    """
    if listed.pictures == found.pictures:
        return bool((listed.labels == found.labels).all())
    if not listed.ordered:
        return False
    files = [name.rpartition("/")[2] for name in found.pictures]
    expected = zip(listed.pictures, listed.labels.tolist(), strict=True)
    return sorted(expected) == sorted(zip(files, found.labels.tolist(), strict=True))


def _complete(settings: Settings) -> None:
    """Write the covariance of colours where an older version made the data set without it."""
    path, root = settings.misc_folder / COVARIANCE_NAME, settings.tar_root_dir
    if path.exists():
        return
    log.info("%s: computing it from the batch files, which are read once", path)
    manifest, moments = read_manifest(root), np.zeros((4, 4), np.int64)
    for file, location in locate_split(manifest, root, "train"):
        pixels: np.ndarray = np.memmap(file, np.uint8, "r", location.offset, location.shape)
        if manifest.layout == "c01b":
            pixels = pixels.transpose(3, 1, 2, 0)
        moments += colour_moments(inside(pixels, manifest.pad))
    write_array(path, covariance_of(moments))
