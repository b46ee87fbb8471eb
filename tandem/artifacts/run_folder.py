"""The run folder: what a run leaves there, what is kept of it, and where a later run goes on.

``epoch-0003.safetensors`` was written after three whole epochs,
``epoch-0003-step-000120.safetensors`` 120 steps into the fourth. Beside the checkpoints lie
``record.jsonl``, ``config.yaml`` and event files for TensorBoard. Trainer 0 alone writes here.
"""

import contextlib
import logging
import math
import mmap
import re
from collections.abc import Callable, Mapping, Sequence
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
from tandem.artifacts.metrics_log import MetricsLog, Record, truncate_after
from tandem.artifacts.tensorboard import EventLog
from tandem.config.schema import Config, save_config
from tandem.errors import InputError
from tandem.files import remove_partials
from tandem.memory import HostBuffer

if TYPE_CHECKING:
    from PIL import Image

log = logging.getLogger(__name__)

RECORD = "record.jsonl"
CONFIGURATION = "config.yaml"
DAMAGED = ".damaged"  # appended to the name of a checkpoint that can't be used

_NAME = re.compile(r"epoch-(\d{4,})(?:-step-(\d{6,}))?\.safetensors")
_ALIGNMENT = 64  # bytes


def checkpoint_name(state: RunState) -> str:
    """The file name of a checkpoint, which sorts in the order of training."""
    part = f"-step-{state.step_in_epoch:06d}" if state.step_in_epoch else ""
    return f"epoch-{state.epoch:04d}{part}.safetensors"


def list_checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints in a folder by their names, earliest first; none if there is no folder."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    found = {
        position: path for path in folder.iterdir() if (position := _position(path)) is not None
    }
    return [found[position] for position in sorted(found)]


def find_checkpoint(folder: str | Path, load_epoch: int | Literal["latest"]) -> Path | None:
    """Find the checkpoint to resume from.

    Parameters
    ----------
    folder : Path
        Where the run left its checkpoints.
    load_epoch : int or "latest"
        How many whole epochs it was written after, or whichever is furthest and not damaged; one
        that is damaged is reported.

    Returns
    -------
    Path or None
        None where the latest is wanted and there is none: a run that ended before its first.

    Raises
    ------
    InputError
        It is not there, and the message lists those that are; or all are damaged.
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
    for path in found:
        if path.name == name:
            return path
    raise InputError(
        f"{folder}: no checkpoint {name} (load_epoch {load_epoch}); there are: {_listing(found)}"
    )


def superseded(
    paths: Sequence[Path], keep: int | Literal["all"], validation_errors: Sequence[float]
) -> list[Path]:
    """Which checkpoints need not be kept.

    Parameters
    ----------
    paths : sequence of Path
        Those that are there, earliest first.
    keep : int or "all"
        How many of the last are kept, beside the best.
    validation_errors : sequence of float
        Top-1 error after each whole epoch.

    Returns
    -------
    list of Path
        All but the last `keep` and the first of those, written after a whole epoch, whose error was
        the smallest.
    """
    if keep == "all":
        return []
    errors: dict[Path, float] = {}
    for path in paths:
        epoch, step = _position(path) or (0, 0)
        if step == 0 and 1 <= epoch <= len(validation_errors):
            errors[path] = validation_errors[epoch - 1]
    finite = {path: error for path, error in errors.items() if math.isfinite(error)}
    best = min(finite, key=lambda path: finite[path], default=None)
    return [path for path in paths[:-keep] if path != best]


class RunFolder:
    """What trainer 0 writes. Checkpoints are written beside the training, by a thread.

    Creating one is the beginning of a run: the configuration is saved, checkpoints that proved
    damaged are set aside, and the record loses what lies after `state`.

    Parameters
    ----------
    config : Config
        Resolved. Its ``weights_dir`` is the folder, which exists.
    state : RunState
        Where the run begins.
    resumed : Path or None
        The checkpoint that it continues.

    Raises
    ------
    InputError
        The folder can't be written, or its record can't be read.
    """

    def __init__(self, config: Config, state: RunState, resumed: Path | None) -> None:
        self._folder, self._keep = config.weights_path, config.keep_snapshots
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[Path] | None = None
        self._room: Future[HostBuffer] | None = None
        path = self._folder / RECORD
        try:
            remove_partials(self._folder)
            save_config(config, self._folder)
            self._set_damaged_aside(resumed)
            if path.exists():
                truncate_after(path, state)
        except OSError as error:
            raise InputError(f"weights_dir {self._folder}: {error.strerror}") from error
        self._record = MetricsLog(path)
        self._events = EventLog(self._folder, state.step) if config.tensorboard else None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is still being written."""
        return self._writing is not None and not self._writing.done()

    def prepare(self, nbytes: int) -> bool:
        """Have memory made ready, beside the training, for the copy that `save` makes.

        Parameters
        ----------
        nbytes : int
            Of all arrays, each begun on a 64-byte boundary.

        Returns
        -------
        bool
            Whether it is ready. Ask again later.
        """
        if self._room is None and not self.busy:
            self._room = self._writer.submit(_room, nbytes)
        return self._room is not None and self._room.done()

    def append(self, record: Record) -> None:
        """Append a line to the record.

        Raises
        ------
        InputError
            It can't be written.
        """
        self._record.append(record)
        if self._events is not None:
            self._events.add(record)

    def show(self, name: str, step: int, draw: Callable[[], "Image.Image"]) -> None:
        """Show a picture to those who look on, drawn beside the training. Returns at once."""
        if self._events is not None:
            self._events.add_picture(name, step, draw)

    def take_trouble(self) -> str | None:
        """Why those who look on see nothing more, said once."""
        return None if self._events is None else self._events.take_trouble()

    def save(self, checkpoint: Checkpoint) -> None:
        """Begin to write a checkpoint; return when its arrays have been copied.

        Memory that was not made ready before has to be found page by page, which takes longer than
        the copy.

        Raises
        ------
        RuntimeError
            Nobody has asked yet what became of the one before it, see `written`.
        """
        if self._writing is not None:
            raise RuntimeError("a checkpoint is to be written while another one is")
        room, self._room = self._room, None
        copy = _copied(checkpoint, None if room is None else room.result())
        self._writing = self._writer.submit(self._write, copy)

    def written(self, wait: bool = False) -> Path | None:
        """The checkpoint that has been written since the last call, if one has.

        Parameters
        ----------
        wait : bool
            Whether to wait for one that is being written.

        Raises
        ------
        InputError
            It could not be written.
        """
        if self._writing is None or not (wait or self._writing.done()):
            return None
        done, self._writing = self._writing, None
        return done.result()

    def close(self) -> None:
        """Finish what is being written, and close the record."""
        self._writer.shutdown(wait=True)
        if self._events is not None:
            self._events.close()
        self._record.close()

    def _write(self, checkpoint: Checkpoint) -> Path:
        # The lines up to a checkpoint must be there when it is, also after a power failure.
        self._record.sync()
        path = self._folder / checkpoint_name(checkpoint.state)
        save_checkpoint(path, checkpoint)
        there = list_checkpoints(self._folder)
        for old in superseded(there, self._keep, checkpoint.state.validation_errors):
            # One that can't be removed is tried again next time.
            with contextlib.suppress(OSError):
                old.unlink()
        if self._events is not None:
            self._events.add_checkpoint(checkpoint)
        return path

    def _set_damaged_aside(self, resumed: Path | None) -> None:
        """Rename what is later than where the run begins: it was found damaged.

        Kept under its name it would pass for the latest, and supersede sound ones.
        """
        found = list_checkpoints(self._folder)
        begin = found.index(resumed) + 1 if resumed in found else 0
        for path in found[begin:]:
            path.replace(path.with_name(path.name + DAMAGED))


def _newest_sound(folder: Path, found: Sequence[Path]) -> Path:
    reasons = []
    for path in reversed(found):
        try:
            verify_checkpoint(path)
        except Damaged as error:
            reasons.append(str(error))
            log.warning("%s; looking for the one before it", error)
            continue
        return path
    raise InputError(f"{folder}: every checkpoint is damaged; the newest: {reasons[0]}")


def _position(path: Path) -> tuple[int, int] | None:
    """Whole epochs and further steps after which a checkpoint was written, by its name."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def _listing(paths: Sequence[Path]) -> str:
    names = [path.name for path in paths]
    return ", ".join(names if len(names) <= 8 else [*names[:3], "...", *names[-4:]])


def _room(nbytes: int) -> HostBuffer:
    """Memory that the system has given already, and takes back when it is no more needed."""
    buffer = HostBuffer.create(nbytes, "checkpoint")
    buffer.array(nbytes, np.uint8)[:: mmap.PAGESIZE] = 0
    return buffer


def _copied(checkpoint: Checkpoint, room: HostBuffer | None) -> Checkpoint:
    """A copy in memory of its own; in `room`, if there is enough."""
    groups = [checkpoint.weights, *checkpoint.states.values()]
    size = sum(_aligned(array.nbytes) for group in groups for array in group.values())
    fits = room is not None and room.nbytes >= size
    memory = room if room is not None and fits else HostBuffer.create(size, "checkpoint")
    offset = 0

    def copy(group: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        nonlocal offset
        copies = {}
        for name, array in group.items():
            copies[name] = memory.array(array.shape, array.dtype, offset)
            copies[name][...] = array
            offset += _aligned(array.nbytes)
        return copies

    weights, *states = (copy(group) for group in groups)
    memory.close()
    return replace(
        checkpoint, weights=weights, states=dict(zip(checkpoint.states, states, strict=True))
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
