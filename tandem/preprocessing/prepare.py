"""From the list of pictures to batch files, mean image and manifest: all of make_hkl.py."""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from PIL import features

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
from tandem.files import write_array, write_text
from tandem.preprocessing.batches import BatchWriter, SplitMaker, batch_name
from tandem.preprocessing.listing import Listed, Listing, list_pictures
from tandem.preprocessing.pool import SquashPool, slots_needed
from tandem.preprocessing.progress import (
    PROGRESS_NAME,
    Progress,
    Skipped,
    load_progress,
    save_progress,
)
from tandem.preprocessing.settings import Settings

log = logging.getLogger(__name__)

MEAN_NAME = "img_mean.npy"
SKIPPED_NAME = "skipped.txt"
_SECONDS_BETWEEN_LINES = 10.0
_REMEDY = "choose another tar_root_dir, or delete what this one holds to begin afresh"


def prepare(settings: Settings) -> None:
    """Make the batch files, the mean image, the list of skipped pictures and the manifest.

    A run that was stopped goes on where it was; one that is finished is checked and left alone.
    The manifest is written last: where there is one, everything it names is there.

    Raises
    ------
    InputError
        The pictures, the settings or the folders cannot be used, or belong to another run.
    """
    listing = list_pictures(settings)
    root = settings.tar_root_dir
    spec = _plan(settings, listing)
    _make_folder(root)
    with _locked(root):
        progress = load_progress(root)
        if progress is None and (root / MANIFEST_NAME).exists():
            _check_finished(settings, listing)
            log.info("%s: all is there already", root / MANIFEST_NAME)
            return
        if progress is None:
            _check_unused(settings)
        else:
            _check_same(root / PROGRESS_NAME, progress.spec, spec)
        _make_all(settings, listing, spec, progress)


def mean_of(sums: np.ndarray, count: int) -> np.ndarray:
    """The mean image of `count` pictures: every picture weighs the same.

    Parameters
    ----------
    sums : int64 (S, S, 3)
        Exact sum of the pictures: (row, column, RGB).
    count : int
        Number of pictures.

    Returns
    -------
    float32 (3, S, S)
        (channel, row, column), divided in float64.
    """
    return (sums.transpose(2, 0, 1) / np.float64(count)).astype(np.float32)


def read_skipped(path: Path) -> dict[str, str]:
    """Reasons by ``split/picture``, from skipped.txt; empty when there is none."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {name: reason for name, _, reason in (line.partition("\t") for line in lines)}


def _make_all(
    settings: Settings, listing: Listing, spec: dict[str, Any], progress: Progress | None
) -> None:
    for split in SPLITS:
        _make_folder((settings.tar_root_dir / batch_name(split, 0)).parent)
    _make_folder(settings.misc_folder)
    _remove_partials(settings)
    if progress is None:
        side = settings.image_size
        progress = Progress(spec, np.zeros((side, side, 3), np.int64))
        save_progress(settings.tar_root_dir, progress)
    report = _Report(settings, listing, progress)
    workers = settings.processes
    longest = max(len(listed.pictures) for listed in listing.splits.values())
    slots = min(longest, slots_needed(settings.batch_size, workers))
    with (
        report.shown(),
        SquashPool(workers, slots, settings.image_size) as pool,
        BatchWriter(settings.tar_root_dir, settings.layout, progress) as writer,
    ):
        for split in SPLITS:
            listed = listing.splits[split]
            SplitMaker(split, listed, settings.batch_size, pool, writer, report).run()
        writer.flush()
        progress = writer.progress
    _finish(settings, listing, progress, report)


def _finish(settings: Settings, listing: Listing, progress: Progress, report: "_Report") -> None:
    kept = {name: _kept(listing.splits[name], report.skipped_positions(name)) for name in SPLITS}
    for listed in kept.values():
        if not listed.pictures:
            raise InputError(f"{listed.folder}: none of its pictures can be decoded")
    mean = mean_of(progress.sums, len(kept["train"].pictures))
    write_array(settings.misc_folder / MEAN_NAME, mean)
    report.write_skipped()
    manifest = Manifest(
        image_size=settings.image_size,
        layout=settings.layout,
        pictures_per_file=settings.batch_size,
        wnids=listing.wnids,
        seed=settings.seed,
        versions=progress.spec["versions"],
        splits={
            name: Split(_file_names(name, progress), listed.pictures, listed.labels)
            for name, listed in kept.items()
        },
    )
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


def _kept(listed: Listed, skipped: set[int]) -> Listed:
    return listed.take([i for i in range(len(listed.pictures)) if i not in skipped])


def _file_names(split: str, progress: Progress) -> tuple[str, ...]:
    return tuple(batch_name(split, number) for number in range(progress.splits[split].files))


def _plan(settings: Settings, listing: Listing) -> dict[str, Any]:
    """Everything that the outputs depend on."""
    return {
        "image_size": settings.image_size,
        "layout": settings.layout,
        "batch_size": settings.batch_size,
        "seed": settings.seed,
        "versions": _versions(),
        "pictures": {name: _digest(listing, listing.splits[name]) for name in SPLITS},
    }


def _versions() -> dict[str, str]:
    packages = ("tandem", "numpy", "pillow", "hickle", "h5py")
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "libjpeg": str(features.version("libjpeg_turbo") or features.version("jpg")),
    }


def _digest(listing: Listing, listed: Listed) -> str:
    content = json.dumps([listing.wnids, listed.pictures, listed.labels.tolist()])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _check_same(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    before, now = _flat(found), _flat(wanted)
    for key in now:
        if before.get(key) != now[key]:
            raise InputError(
                f"{path}: found a stopped run with {key} {before.get(key)}, expected {now[key]} as"
                f" in this run; {_REMEDY}"
            )


def _flat(spec: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in spec.items():
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat


def _check_unused(settings: Settings) -> None:
    """Refuse to overwrite what another program, or a run with another manifest, has made."""
    root = settings.tar_root_dir
    folders = [(root / batch_name(split, 0)).parent for split in SPLITS]
    foreign = [path for folder in folders if folder.is_dir() for path in sorted(folder.glob("*"))]
    foreign += [path for path in [settings.misc_folder / MEAN_NAME] if path.exists()]
    if foreign:
        raise InputError(
            f"{foreign[0]}: found a file that no run recorded in {root}, expected none; {_REMEDY}"
        )


def _check_finished(settings: Settings, listing: Listing) -> None:
    """Refuse to pass for this run's outputs those of a run with other settings or pictures."""
    path = settings.tar_root_dir / MANIFEST_NAME
    manifest = read_manifest(path)
    for key, found, wanted in (
        ("image_size", manifest.image_size, settings.image_size),
        ("layout", manifest.layout, settings.layout),
        ("batch_size", manifest.pictures_per_file, settings.batch_size),
        ("seed", manifest.seed, settings.seed),
    ):
        if found != wanted:
            raise InputError(
                f"{path}: found a finished run with {key} {found}, expected {wanted} as in this"
                f" run; {_REMEDY}"
            )
    skipped = read_skipped(settings.misc_folder / SKIPPED_NAME)
    for name in SPLITS:
        listed = listing.splits[name]
        bad = {i for i, p in enumerate(listed.pictures) if f"{name}/{p}" in skipped}
        kept, found_split = _kept(listed, bad), manifest.splits[name]
        if kept.pictures != found_split.pictures or (kept.labels != found_split.labels).any():
            raise InputError(
                f"{path}: found a finished run of {len(found_split.pictures)} other {name}"
                f" pictures, expected the {len(kept.pictures)} of {listed.folder}; {_REMEDY}"
            )
        locate_split(manifest, settings.tar_root_dir, name)
    mean_file = settings.misc_folder / MEAN_NAME
    if not mean_file.exists():
        raise InputError(f"{mean_file}: there is no mean image, though {path} is there; {_REMEDY}")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: the folder cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{folder}: found a folder that is not writable, expected one that is")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second run out of `folder`; the lock ends with the process, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{folder}: another run is at work in this folder") from None
        yield
    finally:
        os.close(descriptor)


def _remove_partials(settings: Settings) -> None:
    """Remove the temporary files that a killed run could not."""
    root, misc = settings.tar_root_dir, settings.misc_folder
    written = [root / PROGRESS_NAME, root / MANIFEST_NAME, misc / MEAN_NAME, misc / SKIPPED_NAME]
    patterns = [(path.parent, f".{path.stem}.*.partial{path.suffix}") for path in written]
    patterns += [((root / batch_name(split, 0)).parent, ".*.partial.hkl") for split in SPLITS]
    for folder, pattern in patterns:
        for partial in folder.glob(pattern):
            partial.unlink()


@dataclass(frozen=True)
class _Bad:
    split: str
    skipped: Skipped


class _Report:
    """Shows how a run goes on, and stops it when too many pictures are bad."""

    def __init__(self, settings: Settings, listing: Listing, progress: Progress) -> None:
        self._settings = settings
        self._listing = listing
        self._bad = [_Bad(s, k) for s in SPLITS for k in progress.splits[s].skipped]
        self._total = sum(len(listed.pictures) for listed in listing.splits.values())
        self._before = sum(split.cursor for split in progress.splits.values())
        self._done = self._before
        self._started = self._last_line = time.monotonic()
        self._bar: Any = None
        self._interrupted = False
        self._check_bad()

    @property
    def bad(self) -> int:
        """Number of pictures left out."""
        return len(self._bad)

    def skipped_positions(self, split: str) -> set[int]:
        """Positions in the list of `split` of the pictures left out."""
        return {bad.skipped.position for bad in self._bad if bad.split == split}

    def write_skipped(self) -> None:
        """Write skipped.txt: a line for each picture left out, ``split/picture``, tab, reason."""
        # A run that went on meets the end of one split again after it has begun the next.
        ordered = sorted(self._bad, key=lambda b: (SPLITS.index(b.split), b.skipped.position))
        lines = [f"{self._name(bad)}\t{bad.skipped.reason}\n" for bad in ordered]
        write_text(self._settings.misc_folder / SKIPPED_NAME, "".join(lines))

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show a progress bar on a terminal; elsewhere, lines in the log."""
        if self._before:
            log.info("going on after %d of %d pictures", self._before, self._total)
        former = signal.signal(signal.SIGINT, self._interrupt)
        try:
            if not sys.stderr.isatty():
                yield
                return
            # Only here: importing it is a tenth of the program's start.
            from tqdm import tqdm
            from tqdm.contrib.logging import logging_redirect_tqdm

            with (
                tqdm(total=self._total, initial=self._before, unit="pictures") as self._bar,
                logging_redirect_tqdm(),
            ):
                yield
        finally:
            signal.signal(signal.SIGINT, former)

    def advance(self, count: int) -> None:
        """`count` more pictures are dealt with."""
        if self._interrupted:
            raise KeyboardInterrupt
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            rate = (self._done - self._before) / (self._last_line - self._started)
            left = (self._total - self._done) / rate
            log.info(
                "%d of %d pictures, %.0f pictures/s, %.0f s left",
                self._done,
                self._total,
                rate,
                left,
            )

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        # Python drops an exception that comes while it runs a finalizer, so it is noted as well.
        self._interrupted = True
        raise KeyboardInterrupt

    def skip(self, split: str, skipped: Skipped) -> None:
        """Note a picture that is left out; raises InputError when they are too many."""
        self._bad.append(_Bad(split, skipped))
        log.warning("left out %s: %s", self._name(self._bad[-1]), skipped.reason)
        self._check_bad()

    def _check_bad(self) -> None:
        if self.bad > self._settings.max_bad:
            self.write_skipped()
            path = self._settings.misc_folder / SKIPPED_NAME
            raise InputError(
                f"{path}: found {self.bad} pictures that cannot be decoded, expected at most"
                f" {self._settings.max_bad} (max_bad); the last is {self._name(self._bad[-1])}:"
                f" {self._bad[-1].skipped.reason}"
            )

    def _name(self, bad: _Bad) -> str:
        return f"{bad.split}/{self._listing.splits[bad.split].pictures[bad.skipped.position]}"
