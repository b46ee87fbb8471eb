"""Messages between the ranks of a pool that mpirun or torchrun has started.

They are pickles, since graphs are among them, and a pickle may execute anything. The messages of
MPI stay within a job, and are trusted, as mpi4py's own are. gloo's ranks find each other at a store
that anybody who reaches it may write to; so there each pickle is signed with a key that only
this user can read, and one with another signature is not opened. Large arrays are not signed.
"""

import contextlib
import hashlib
import hmac
import os
import pickle
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tandem.distributed import PeerLost
from tandem.distributed.group import RankGroup
from tandem.errors import InputError
from tandem.parallel.buffers import SharedBuffers
from tandem.parallel.messages import (
    ArrayLocation,
    Call,
    Define,
    Publish,
    Put,
    Rows,
    Task,
)
from tandem.parallel.selection import Selection
from tandem.split import edges

_LEAST_BYTES = 1 << 16  # arrays of fewer travel in the pickle
_COUNT_BYTES, _KEY_BYTES, _SIGNATURE_BYTES = 4, 32, 32


class Messenger:
    """Sends objects to ranks, one after another, and receives theirs. Made by all ranks at once."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._key = b"" if group.starter == "mpirun" else session_key(group)
        self._sent, self._received = [0] * group.size, [0] * group.size
        # The last message of each rank, and its bytes: one without arrays may come again.
        self._last: dict[int, tuple[Any, bytes]] = {}  # sent to a rank
        self._came: dict[int, tuple[Any, bytes]] = {}

    def send(self, messages: Mapping[int, Any]) -> None:
        """Send an object to each of some ranks."""
        vectors = []
        for rank, message in messages.items():
            large: list[memoryview] = []
            last, data = self._last.get(rank, (None, b""))
            if not (_may_repeat(message) and message == last):
                data = _pickled(message, large)
                self._last[rank] = (message, data) if _may_repeat(message) else (None, b"")
            signed = self._signature(data, self._group.rank, rank, self._sent[rank]) + data
            self._sent[rank] += 1
            vectors += [(rank, _vector(each)) for each in [memoryview(signed), *large]]
        self._group.send_bytes(vectors)

    def receive(self, rank: int) -> Any:
        """Receive the next object of a rank; raises PeerLost if another has made it."""
        data = self._group.receive_bytes(rank).data
        size = len(self._signature(b"", 0, 0, 0))
        found, data = bytes(data[:size]), data[size:]
        expected = self._signature(data, rank, self._group.rank, self._received[rank])
        if not hmac.compare_digest(found, expected):
            raise PeerLost(
                f"a message of rank {rank} was not signed with the key of this user's ranks"
            )
        self._received[rank] += 1
        last, before = self._came.get(rank, (None, b""))
        if data == before:
            return last
        count = int.from_bytes(data[:_COUNT_BYTES], "little")
        large = [self._group.receive_bytes(rank) for _ in range(count)]
        message = pickle.loads(data[_COUNT_BYTES:], buffers=large)
        self._came[rank] = (message, bytes(data)) if _may_repeat(message) else (None, b"")
        return message

    def _signature(self, data: Any, sender: int, receiver: int, number: int) -> bytes:
        if not self._key:
            return b""
        made = hmac.new(self._key, f"{sender} {receiver} {number} ".encode(), hashlib.sha256)
        made.update(data)
        return made.digest()


def _may_repeat(message: Any) -> bool:
    """Return whether a message is a task without arrays, which are its caller's."""
    return type(message) is tuple and not message[1]


def _pickled(message: Any, large: list[memoryview]) -> bytes:
    """Return the bytes of a message, but those of large arrays, which are added to a list."""

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes >= _LEAST_BYTES:
            large.append(buffer.raw())
            return False
        return True

    data = pickle.dumps(message, 5, buffer_callback=is_small)
    return len(large).to_bytes(_COUNT_BYTES, "little") + data


def _vector(data: memoryview) -> np.ndarray:
    # PyTorch takes no memory that may not be written.
    vector = np.frombuffer(data, np.uint8)
    return vector if vector.flags.writeable else vector.copy()


def session_key(group: RankGroup) -> bytes:
    """Agree on a key that nobody can know who can't read this user's files. Collective.

    It is made of the user's key and new numbers of all ranks: old messages are worth nothing.

    Raises InputError at all ranks where one can't read the key, or another user can.
    """
    key, refused = b"", ""
    for turn in (0, 1):  # the first rank makes the file, which others may see too
        if (group.rank > 0) == turn:
            try:
                key = _user_key(key_path())
            except (OSError, InputError) as error:
                refused = str(error)
        group.barrier()
    every = group.all_gather_object((refused, secrets.token_bytes(_KEY_BYTES)))
    for rank, (reason, _) in enumerate(every):
        if reason:
            raise InputError(f"rank {rank} has no key for the messages of ranks: {reason}")
    made = hmac.digest(key, b"".join(number for _, number in every), "sha256")
    for rank, proof in enumerate(group.all_gather_object(_proof(made, group.rank))):
        if not hmac.compare_digest(proof, _proof(made, rank)):
            raise InputError(
                f"rank {rank} has another key for the messages of ranks: copy {key_path()} of one "
                "machine to all"
            )
    return made


def _proof(key: bytes, rank: int) -> bytes:
    return hmac.digest(key, f"rank {rank}".encode(), "sha256")


def key_path() -> Path:
    """Return the file of the user's key."""
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder) / "tandem" / "ranks.key"


def _user_key(path: Path) -> bytes:
    """Read the user's key, made at its first use."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        made = path.with_name(f"{path.name}.{secrets.token_hex(8)}")  # machines share a home
        with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123
            file.write(secrets.token_bytes(_KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(made)
        made.unlink()
    with path.open("rb") as file:
        about, key = os.fstat(file.fileno()), file.read()
    if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise InputError(f"{path} can be read by others: chmod 600 {path}, if it is yours")
    if len(key) != _KEY_BYTES:
        raise InputError(f"{path} has {len(key)} bytes, expected {_KEY_BYTES}: remove it")
    return key


def part_of(
    task: Task, rank: int, ranks: int, buffers: SharedBuffers
) -> tuple[Task, list[np.ndarray]]:
    """Make of a task that of one rank, and the arrays for it, by which it names their places."""
    arrays: list[np.ndarray] = []

    def add(array: np.ndarray) -> ArrayLocation:
        arrays.append(np.ascontiguousarray(array).reshape(array.shape))
        return ArrayLocation(len(arrays) - 1, array.dtype.str, array.shape)

    def moved(place: ArrayLocation) -> ArrayLocation:
        return add(buffers.array(place))

    match task:
        case Define():
            variables = tuple(
                each._replace(value=None if each.value is None else moved(each.value))
                for each in task.variables
            )
            functions = tuple(
                each._replace(constants=tuple(map(moved, each.constants)))
                for each in task.functions
            )
            task = task._replace(variables=variables, functions=functions)
        case Call():
            task = _call_of(task, rank, buffers, add)
        case Put():
            if task.rank not in (None, rank):
                return task._replace(variables=(), values=()), arrays
            values = [buffers.array(place) for place in task.values]
            if task.scattered:
                values = [v[slice(*edges(len(v), ranks)[rank : rank + 2])] for v in values]
            task = task._replace(values=tuple(map(add, values)), scattered=False)
        case Publish():
            task = task._replace(places=())
    return task, arrays


def _call_of(task: Call, rank: int, buffers: SharedBuffers, add: Any) -> Call:
    """Make of a call that of one rank, whose rows of each input become an array of their own."""
    if task.counts is not None and not task.counts[rank]:
        task = task._replace(inputs=task.inputs[len(task.rows) :], rows=(), local=None)
    first = sum(task.counts[:rank]) if task.counts else 0
    inputs, rows = [], []
    for number, place in enumerate(task.inputs):
        array = buffers.array(place)
        if number < len(task.rows):
            assert task.counts is not None
            every = task.rows[number]
            indices = None if every.indices is None else buffers.array(every.indices)
            selection = Selection(every.number, every.start, every.step, indices)
            array = selection.take(array, first, first + task.counts[rank])
            rows.append(Rows(every.number, -first))
        inputs.append(add(array))
    local = task.local
    if local is not None:
        own = local[rank]
        if own.indices is not None:
            own = own._replace(indices=add(buffers.array(own.indices)))
        local = tuple(own if r == rank else Rows(0) for r in range(len(local)))
    return task._replace(inputs=tuple(inputs), rows=tuple(rows), local=local)
