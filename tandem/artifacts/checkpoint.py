"""Checkpoints: weights, optimizer states and the state of a run, in one safetensors file.

The tensors are ``conv1.weight`` and so on, in their logical layout (filters: out, in, row, column;
fully connected: in, out), and ``STATE/conv1.weight`` and so on for each state of the optimizer,
such as ``momentum``. Everything else is JSON under the key ``tandem`` of the file's metadata, and
the key ``sha256`` holds a checksum of it all. Reading a file executes nothing in it.
"""

import errno
import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tandem.artifacts.metrics import Pending
from tandem.artifacts.unsupported import describe_unsupported
from tandem.errors import InputError
from tandem.files import free_bytes, replacing
from tandem.layers.network import NetworkDescription
from tandem.layers.parameter import layer_of
from tandem.layers.training_pass import is_below
from tandem.registry import REMOVED, removed
from tandem.validation import shown_size

FORMAT = 1

_KEY = "tandem"
_CHECKSUM = "sha256"
_MOMENTUM = ("momentum",)  # the states of files whose header lists none
_DTYPES: dict[str, np.dtype] = {"F32": np.dtype(np.float32), "F64": np.dtype(np.float64)}


class Damaged(InputError):
    """A checkpoint is damaged; an older one may be sound."""


_Count = Annotated[int, Field(ge=0)]
_Error = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
Shapes = Mapping[str, Sequence[int]]
_Described = dict[str, tuple[np.dtype | str, tuple[int, ...]]]


@dataclass(frozen=True)
class RunState:
    """The position of a run. With the configuration it determines everything that follows."""

    epoch: _Count = 0  # whole epochs done
    step_in_epoch: _Count = 0  # steps done since
    step: _Count = 0  # steps done in all
    # Top-1 error after each whole epoch, as a fraction; lr_policy: auto depends on it.
    validation_errors: tuple[_Error, ...] = ()
    # Pictures per step over all trainers, and of an epoch, compared when an epoch continues; None:
    # unknown.
    global_batch: Annotated[int, Field(ge=1)] | None = None
    train_pictures: Annotated[int, Field(ge=1)] | None = None
    pending: Pending = field(default_factory=Pending)
    # Epoch and number, from 0, of each global minibatch that is passed over: it made the loss or a
    # gradient not finite, and the run went back to a checkpoint.
    skipped: tuple[tuple[_Count, _Count], ...] = ()
    # Updates that the optimizer has made: steps without those that were skipped; 0 in files of
    # before, whose optimizer does not depend on it.
    updates: _Count = 0
    # What `lr_monitor` and `stop_monitor` may name, after each whole epoch. In files of before it
    # is known of the errors alone.
    history: tuple[dict[str, _Error], ...] = ()

    def __post_init__(self) -> None:
        known = [{"top1_error": error} for error in self.validation_errors]
        if len(self.history) < len(known):
            history = (*known[: len(known) - len(self.history)], *self.history)
            object.__setattr__(self, "history", history)


@dataclass(frozen=True)
class CheckpointHeader:
    """Everything in a checkpoint but its tensors."""

    network: NetworkDescription
    state: RunState = RunState()
    config: dict[str, Any] = field(default_factory=dict)  # resolved; empty in converted weights
    conditions: dict[str, str] = field(default_factory=dict)  # what else the bits depend on
    states: tuple[str, ...] = ()  # of the optimizer


@dataclass(frozen=True)
class Checkpoint:
    """Everything in a checkpoint file.

    Weights are float32 or float64, each in its logical layout. Each state of the optimizer has an
    array for each trained weight, of its shape and dtype; without training to continue, as in
    converted weights, there are none.
    """

    weights: dict[str, np.ndarray]
    states: dict[str, dict[str, np.ndarray]]
    network: NetworkDescription
    state: RunState = RunState()
    config: dict[str, Any] = field(default_factory=dict)
    conditions: dict[str, str] = field(default_factory=dict)
    untrained: tuple[str, ...] = ()  # weights without optimizer states, such as running averages

    @property
    def trained(self) -> list[str]:
        """Names of the weights that an optimizer steps."""
        return [name for name in self.weights if name not in self.untrained]


class _Metadata(BaseModel):
    """The JSON beside the tensors, checked when it is read."""

    format: Literal[1]
    momentum: bool  # whether there is a state of that name
    states: tuple[str, ...] | None = None  # as untrained, left out of files that do not need it
    untrained: tuple[str, ...] = ()
    network: NetworkDescription
    state: RunState
    config: dict[str, Any]
    conditions: dict[str, str]

    @property
    def optimizer_states(self) -> tuple[str, ...]:
        return _MOMENTUM * self.momentum if self.states is None else self.states


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to `path`, whole or not at all.

    Raises ValueError if a state does not fit the weights, or a tensor is of another type.
    """
    tensors = dict(checkpoint.weights)
    for state, values in checkpoint.states.items():
        tensors |= {f"{state}/{name}": value for name, value in values.items()}
    described: _Described = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    if fault := _fault(described, tuple(checkpoint.states), checkpoint.untrained):
        raise ValueError(f"this checkpoint cannot be written: {fault}")
    # save_file ignores strides, so a strided view needs a copy; others are not copied.
    laid_out = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    text = _metadata_text(checkpoint)
    metadata = {_KEY: text, _CHECKSUM: _checksum(text, laid_out)}
    try:
        with replacing(path) as partial:
            save_file(laid_out, partial, metadata)
    except (OSError, SafetensorError) as error:
        reason = str(error)
        if os.strerror(errno.ENOSPC) in reason:  # a SafetensorError has no number
            nbytes = sum(array.nbytes for array in laid_out.values())
            reason = (
                f"{os.strerror(errno.ENOSPC)}: found {shown_size(free_bytes(path.parent))} free, "
                f"expected {shown_size(nbytes)}"
            )
        raise InputError(f"{path}: the checkpoint could not be written: {reason}") from error


def read_checkpoint(path: str | Path, shapes: Shapes | None = None) -> Checkpoint:
    """Read a checkpoint; its arrays are copies in memory.

    Raises `InputError` if the file is missing, not a checkpoint, damaged, or of another network
    than that whose parameters have `shapes`.
    """
    path = Path(path)
    with _opened(path) as (file, metadata, described):
        states = metadata.optimizer_states
        names = [name for name in described if "/" not in name]
        if shapes is not None:
            found = {name: described[name][1] for name in names}
            _check_shapes(path, found, metadata.network, shapes)
        tensors = _read_tensors(path, file, described)
    trained = [name for name in names if name not in metadata.untrained]
    return Checkpoint(
        {name: tensors[name] for name in names},
        {state: {name: tensors[f"{state}/{name}"] for name in trained} for state in states},
        metadata.network,
        metadata.state,
        metadata.config,
        metadata.conditions,
        metadata.untrained,
    )


def verify_checkpoint(path: str | Path) -> None:
    """Read a checkpoint to its end and compare it with its checksum."""
    read_checkpoint(path)


def read_header(path: str | Path) -> CheckpointHeader:
    """Read everything in a checkpoint but its tensors, which are not compared with the checksum."""
    with _opened(Path(path)) as (_, metadata, _):
        return CheckpointHeader(
            metadata.network,
            metadata.state,
            metadata.config,
            metadata.conditions,
            metadata.optimizer_states,
        )


def initial_weights(
    path: str | Path,
    shapes: Shapes,
    skip: Sequence[str] = (),
    network: NetworkDescription | None = None,
) -> dict[str, np.ndarray]:
    """Read the initial weights of a run from a checkpoint of a network that may differ.

    `shapes` are those of the network to be trained. All its layers must be in the checkpoint,
    except those of `skip`, which keep their random initial values. A refusal says first which
    settings of the checkpoint's network differ from those of `network`.
    """
    path = Path(path)
    wanted = {n: tuple(shape) for n, shape in shapes.items() if not is_below(n, skip)}
    if not wanted:
        raise InputError("init_weights_skip names every layer: there is nothing left to take")
    with _opened(path) as (file, metadata, described):
        there = {n: described[n][1] if n in described else "missing" for n in wanted}
        if differing := [name for name, shape in wanted.items() if there[name] != shape]:
            name = differing[0]
            layers = list(dict.fromkeys(map(layer_of, differing)))
            verb = "lets that layer" if len(layers) == 1 else "lets these layers"
            settings = metadata.network.differences(network) if network else ()
            hints = [
                f"set {key}: {theirs}, which is {ours} here; "
                for key, theirs, ours in settings
                if key in ("width", "crop_size")
            ]
            raise InputError(
                f"init_weights {path} is of another network ({metadata.network.summary}): "
                f"{''.join(hints)}{name} is {there[name]} there, {wanted[name]} here"
                + (f", and {len(differing) - 1} others differ" if len(differing) > 1 else "")
                + f"; init_weights_skip: [{', '.join(layers)}] {verb} begin at random"
            )
        tensors = _read_tensors(path, file, described)
    return {name: tensors[name] for name in wanted}


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, _Metadata, _Described]]:
    """Open a checkpoint and check its header; the tensors are not yet read."""
    try:
        if not path.is_file():
            state = "is not a file" if path.exists() else "does not exist"
            raise InputError(f"{path}: {state}; expected a checkpoint (.safetensors)")
        with safe_open(path, framework="numpy") as file:
            metadata = _parse_metadata(path, file.metadata())
            described: _Described = {}
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                dtype = _DTYPES.get(part.get_dtype(), part.get_dtype())
                described[name] = dtype, tuple(part.get_shape())
            if fault := _fault(described, metadata.optimizer_states, metadata.untrained):
                raise Damaged(f"{path}: not a whole checkpoint: {fault}")
            yield file, metadata, described
    except (OSError, MemoryError) as error:
        raise InputError(f"{path}: the checkpoint cannot be read: {error}") from error
    except (ValueError, SafetensorError) as error:
        if unsupported := describe_unsupported(path):
            raise InputError(f"{path}: {unsupported}") from error
        raise Damaged(
            f"{path}: not a checkpoint, or damaged; expected a whole safetensors file ({error})"
        ) from error


def _read_tensors(path: Path, file: Any, described: _Described) -> dict[str, np.ndarray]:
    """Read all tensors and compare them with the checksum."""
    tensors = {name: file.get_tensor(name) for name in described}
    metadata = file.metadata()
    if metadata.get(_CHECKSUM) != _checksum(metadata[_KEY], tensors):
        raise Damaged(
            f"{path}: the checkpoint is damaged: its contents do not have the checksum that was "
            "written with them"
        )
    return tensors


def _checksum(text: str, tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over the metadata and, by name, every tensor's type, shape and bytes."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        array = tensors[name]
        digest.update(f"\n{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.asarray(array, order="C").reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _parse_metadata(path: Path, metadata: Mapping[str, str] | None) -> _Metadata:
    text = (metadata or {}).get(_KEY)
    if text is None:
        if unsupported := describe_unsupported(path):
            raise InputError(f"{path}: {unsupported}")
        raise InputError(
            f"{path}: a safetensors file, but not a checkpoint of this program: its metadata has "
            f"no key {_KEY!r}"
        )
    try:
        found = _Metadata.model_validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        newer = f" (this program reads format {FORMAT})" if place == "format" else ""
        # A file of a newer version is whole.
        kind = InputError if place == "format" else Damaged
        raise kind(
            f"{path}: the checkpoint's metadata cannot be used: {place or 'JSON'}: "
            f"{first['msg']}{newer}"
        ) from error
    if found.network.network == REMOVED:
        raise removed(str(path))
    return found


def _metadata_text(checkpoint: Checkpoint) -> str:
    state = asdict(checkpoint.state)
    # JSON has no NaN: the error of an epoch in which the weights were lost.
    state["validation_errors"] = [_finite(error) for error in state["validation_errors"]]
    state["pending"]["sums"] = [sums.as_json() for sums in checkpoint.state.pending.sums]
    state["history"] = [
        {name: _finite(value) for name, value in epoch.items()} for epoch in state["history"]
    ]
    states = tuple(checkpoint.states)
    values = {
        "format": FORMAT,
        "momentum": "momentum" in states,
        "network": checkpoint.network.header(),
        "state": state,
        "config": checkpoint.config,
        "conditions": checkpoint.conditions,
    }
    if states not in ((), _MOMENTUM):
        values["states"] = states
    if checkpoint.untrained:
        values["untrained"] = checkpoint.untrained
    return json.dumps(values, allow_nan=False)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _fault(described: _Described, states: Sequence[str], untrained: Collection[str]) -> str | None:
    """Return what is wrong with the tensors of a checkpoint among themselves."""
    for name, (dtype, _) in described.items():
        if dtype not in _DTYPES.values():
            return f"{name} is of type {dtype}, expected float32 or float64"
    weights = [name for name in described if "/" not in name]
    if not weights:
        return "it has no weights"
    pairs = {
        f"{state}/{name}": (state, name)
        for name in weights
        if name not in untrained
        for state in states
    }
    if missing := sorted({*pairs, *untrained} - described.keys()):
        return f"{missing[0]} is missing"
    if unknown := sorted(described.keys() - {*weights, *pairs}):
        return f"{unknown[0]} has no weight, or the header does not list its state"
    for key, (state, name) in pairs.items():
        if described[key] != described[name]:
            (dtype, shape), (other, other_shape) = described[name], described[key]
            return f"{name} is {dtype} {shape}, its {state} {other} {other_shape}"
    return None


def _check_shapes(path: Path, found: Shapes, network: NetworkDescription, expected: Shapes) -> None:
    whole = f"{path}: this checkpoint is of another network ({network.summary})"
    for name, shape in expected.items():
        if name not in found:
            raise InputError(f"{whole}: {name} is missing, expected {tuple(shape)}")
        if tuple(found[name]) != tuple(shape):
            raise InputError(f"{whole}: {name} is {tuple(found[name])}, expected {tuple(shape)}")
    for name in found:
        if name not in expected:
            raise InputError(f"{whole}: {name} is unknown to the network that is configured")
