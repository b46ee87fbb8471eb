"""The run folder: its files, which checkpoints are kept, and where a run resumes.

``epoch-0003.safetensors`` was written after three whole epochs,
``epoch-0003-step-000120.safetensors`` 120 steps into the fourth. Beside the checkpoints lie
``record.jsonl``, ``config.yaml`` and event files for TensorBoard. Trainer 0 alone writes here.
"""

import contextlib
import logging
import math
import mmap
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from tandem.artifacts.checkpoint import (
    Checkpoint,
    Damaged,
    RunState,
    save_checkpoint,
    verify_checkpoint,
)
from tandem.artifacts.epochs import write_csv
from tandem.artifacts.metrics_log import (
    MetricsLog,
    Record,
    ValidationRecord,
    read_records,
    truncate_after,
)
from tandem.artifacts.tensorboard import EventLog
from tandem.config.schema import Config, save_config
from tandem.errors import InputError, explained
from tandem.files import make_folder, remove_partials
from tandem.layers.monitored import History, is_better, worst
from tandem.memory import HostBuffer
from tandem.validation import listed

if TYPE_CHECKING:
    from PIL import Image

log = logging.getLogger(__name__)

RECORD = "record.jsonl"
CONFIGURATION = "config.yaml"
DAMAGED = ".damaged"  # appended to the name of a damaged checkpoint

_NAME = re.compile(r"epoch-(\d{4,})(?:-step-(\d{6,}))?\.safetensors")
_ALIGNMENT = 64  # bytes


def checkpoint_name(state: RunState) -> str:
    """The file name of a checkpoint, which sorts in the order of training."""
    part = f"-step-{state.step_in_epoch:06d}" if state.step_in_epoch else ""
    return f"epoch-{state.epoch:04d}{part}.safetensors"


def list_checkpoints(folder: str | Path) -> list[Path]:
    """List the checkpoints in a folder, earliest first; none if there is no folder.

    Raises InputError if the folder cannot be read.
    """
    folder = Path(folder)
    with explained(folder, "the folder cannot be read"):
        paths = [*folder.iterdir()] if folder.is_dir() else []
    found = {position: path for path in paths if (position := _position(path)) is not None}
    return [found[position] for position in sorted(found)]


def find_checkpoint(folder: str | Path, load_epoch: int | Literal["latest"]) -> Path | None:
    """Find the checkpoint to resume from.

    That is the one after `load_epoch` whole epochs, or the latest that is not damaged; damaged ones
    are reported. None is the latest of a run that ended before its first.
    """
    folder = Path(folder)
    found = list_checkpoints(folder)
    if load_epoch == "latest":
        return _newest_sound(folder, found) if found else None
    if not found:
        raise InputError(
            f"{folder}: no checkpoint to resume from; expected files named epoch-0001.safetensors"
        )
    name = checkpoint_name(RunState(epoch=load_epoch))
    names = [path.name for path in found]
    if name in names:
        return folder / name
    raise InputError(
        f"{folder}: no checkpoint {name} (load_epoch {load_epoch}); there are: {listed(names)}"
    )


def chosen_checkpoint(path: Path) -> Path:
    """Find the checkpoint that a path names: a file, or the newest that is not damaged in a folder.

    Raises InputError, with the checkpoints that are there, where there is none.
    """
    if path.is_dir():
        if (found := find_checkpoint(path, "latest")) is not None:
            return found
        raise InputError(
            f"{path}: found a folder without checkpoints, expected a checkpoint or the folder of a"
            f" run{_beside(path)}"
        )
    if not path.exists() and (names := [p.name for p in list_checkpoints(path.parent)]):
        raise InputError(
            f"{path}: does not exist; expected a checkpoint: {path.parent} has {listed(names)}"
        )
    return path


def neighbouring_runs(folder: Path) -> list[str]:
    """Name the folders with checkpoints beside a folder, sorted."""
    parent, runs = folder.absolute().parent, []
    with contextlib.suppress(OSError):
        for path in parent.iterdir():
            with contextlib.suppress(InputError):
                if path.name != folder.name and list_checkpoints(path):
                    runs.append(str(folder.parent / path.name))
    return sorted(runs)


def _beside(folder: Path) -> str:
    runs = neighbouring_runs(folder)
    return f"; runs are in {listed(runs)}" if runs else ""


def best_of(paths: Sequence[Path], config: Config, history: History) -> Path | None:
    """Select the best checkpoint by `keep_monitor`; None if none has a value.

    That is, of those written after a whole epoch, the first with the best value. Where
    `stop_patience` looks at the same value, it is the one that its epochs are counted from: each
    is better by `stop_delta` than the one before, and the first are left out. Where targets are no
    classes there is no top-1 error, and the validation's loss decides in its place.

    Parameters
    ----------
    paths
        All checkpoints, earliest first.
    history
        What was monitored after each whole epoch.
    """
    name, delta, first = config.keep_monitor, 0.0, 1
    if config.stop_patience and config.stop_monitor == name:
        delta, first = config.stop_delta, config.stop_from_epoch + 1
    if name == "top1_error" and all(math.isnan(e.get(name, math.nan)) for e in history):
        name = "validation_loss"
    best, value = None, worst(name)
    for path in paths:
        epoch, step = _position(path) or (0, 0)
        if step == 0 and first <= epoch <= len(history):
            found = history[epoch - 1].get(name, math.nan)
            if is_better(found, value, name, delta=delta):
                best, value = path, found
    return best


def superseded(paths: Sequence[Path], keep: int | Literal["all"], best: Path | None) -> list[Path]:
    """Select the checkpoints to remove: all but the last `keep` and the `best`."""
    return [] if keep == "all" else [path for path in paths[:-keep] if path != best]


class RunFolder:
    """Files that trainer 0 writes. A thread writes checkpoints during training.

    Creating an instance starts a run in a folder that exists: the configuration is saved, the
    damaged checkpoints after `resumed` are renamed, and lines of the record after `state` removed.
    """

    def __init__(self, config: Config, state: RunState, resumed: Path | None) -> None:
        self._config, self._folder = config, config.weights_path
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[Path] | None = None
        self._reserved: Future[HostBuffer] | None = None
        path = self._folder / RECORD
        with explained(f"weights_dir {self._folder}", "cannot be written"):
            remove_partials(self._folder)
            save_config(config, self._folder)
            self._rename_damaged(resumed)
            if path.exists():
                truncate_after(path, state)
        self._record = MetricsLog(path)
        self._write_csv()
        self._events: EventLog | None = None
        if config.tensorboard:
            events = Path(config.tensorboard_dir or self._folder)
            make_folder(events)
            self._events = EventLog(events, state.step)

    @property
    def busy(self) -> bool:
        """Return whether a checkpoint is still being written."""
        return self._writing is not None and not self._writing.done()

    def prepare(self, nbytes: int) -> bool:
        """Allocate memory for the copy that `save` makes, in the thread; whether it is ready.

        `nbytes` is that of all arrays, each starting on a 64-byte boundary.
        """
        if self._reserved is None and not self.busy:
            self._reserved = self._writer.submit(_reserve, nbytes)
        return self._reserved is not None and self._reserved.done()

    def append(self, record: Record) -> None:
        self._record.append(record)
        if isinstance(record, ValidationRecord):
            self._write_csv()
        if self._events is not None:
            self._events.add(record)

    def show(self, name: str, step: int, draw: Callable[[], "Image.Image"]) -> None:
        """Add a picture to the event file, drawn in a thread. Returns at once."""
        if self._events is not None:
            self._events.add_picture(name, step, draw)

    def take_trouble(self) -> str | None:
        """Why nothing more is written to the event file; returned once."""
        return None if self._events is None else self._events.take_trouble()

    def save(self, checkpoint: Checkpoint) -> Future[Path]:
        """Start writing a checkpoint; return its path to come when its arrays have been copied.

        Without memory from `prepare`, page faults take longer than the copy. The previous one must
        have been collected by `written`.
        """
        if self._writing is not None:
            raise RuntimeError("a checkpoint is to be written while another one is")
        reserved, self._reserved = self._reserved, None
        copy = _copied(checkpoint, None if reserved is None else reserved.result())
        self._writing = self._writer.submit(self._write, copy)
        return self._writing

    def written(self, wait: bool = False) -> Path | None:
        """Collect the checkpoint that has been written since the last call, if any.

        With `wait`, wait for one that is being written. Raises InputError if writing failed.
        """
        if self._writing is None or not (wait or self._writing.done()):
            return None
        done, self._writing = self._writing, None
        return done.result()

    def close(self) -> None:
        """Finish writing and close the record."""
        self._writer.shutdown(wait=True)
        if self._events is not None:
            self._events.close()
        self._record.close()

    def _write(self, checkpoint: Checkpoint) -> Path:
        # Once a checkpoint exists, so do the lines before it, also after a power failure.
        self._record.sync()
        path = self._folder / checkpoint_name(checkpoint.state)
        save_checkpoint(path, checkpoint)
        present = list_checkpoints(self._folder)
        best = best_of(present, self._config, checkpoint.state.history)
        for old in superseded(present, self._config.keep_snapshots, best):
            # Removal is tried again next time.
            with contextlib.suppress(OSError):
                old.unlink()
        if self._events is not None:
            self._events.add_checkpoint(checkpoint)
        return path

    def _write_csv(self) -> None:
        """Write the table of the epochs anew, so that a resumed run continues it."""
        if self._config.csv_file is None:
            return
        path = Path(self._config.csv_file)
        with explained(f"csv_file {path}", "cannot be written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_csv(path, read_records(self._folder / RECORD))

    def _rename_damaged(self, resumed: Path | None) -> None:
        """Rename the checkpoints after `resumed`, which are damaged.

        Under their own names they would be taken for the latest, and supersede sound ones.
        """
        found = list_checkpoints(self._folder)
        begin = found.index(resumed) + 1 if resumed in found else 0
        for path in found[begin:]:
            path.replace(path.with_name(path.name + DAMAGED))


def rescue(
    folder: Path, checkpoint: Checkpoint, latest: Callable[[], Sequence[Record]]
) -> Path | None:
    """Write a checkpoint where trainer 0 may be gone, unless another trainer has.

    `latest` returns the last lines of the record, which may be missing. Several processes may call
    this at once; the lock, of the record, ends with its holder. Returns the path of what it has
    written.
    """
    path = folder / checkpoint_name(checkpoint.state)
    with MetricsLog(folder / RECORD) as record, record.locked():
        if path.exists():
            return None
        record.complete(latest())
        record.sync()
        save_checkpoint(path, checkpoint)
    return path


def _newest_sound(folder: Path, found: Sequence[Path]) -> Path:
    reasons = []
    for path in reversed(found):
        try:
            verify_checkpoint(path)
        except Damaged as error:
            reasons.append(str(error))
            log.warning("%s; trying the one before it", error)
            continue
        return path
    raise InputError(f"{folder}: every checkpoint is damaged; the newest: {reasons[0]}")


def _position(path: Path) -> tuple[int, int] | None:
    """Whole epochs and further steps before a checkpoint, by its name."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def _reserve(nbytes: int) -> HostBuffer:
    """Allocate memory and touch each of its pages."""
    buffer = HostBuffer.create(nbytes, "checkpoint")
    buffer.array(nbytes, np.uint8)[:: mmap.PAGESIZE] = 0
    return buffer


def _copied(checkpoint: Checkpoint, reserved: HostBuffer | None) -> Checkpoint:
    """Copy the arrays, into `reserved` if it is large enough."""
    groups = [checkpoint.weights, *checkpoint.states.values()]
    size = sum(_aligned(array.nbytes) for group in groups for array in group.values())
    if reserved is None or reserved.nbytes < size:
        reserved = HostBuffer.create(size, "checkpoint")
    offset = 0
    copies: list[dict[str, np.ndarray]] = []
    for group in groups:
        copies.append({})
        for name, array in group.items():
            copies[-1][name] = copy = reserved.array(array.shape, array.dtype, offset)
            copy[...] = array
            offset += _aligned(array.nbytes)
    reserved.close()
    states = dict(zip(checkpoint.states, copies[1:], strict=True))
    return replace(checkpoint, weights=copies[0], states=states)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
