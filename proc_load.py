"""The loader: a process beside each trainer that keeps its next minibatch ready.

`train.py` and `validate.py` start it with `para_load: true`; it is not run by hand. It waits for a
request, reads the pictures from the batch files into the slot that the request names, crops and
mirrors them unless the device does, answers that the slot is filled, and waits again. The slots lie
in memory that the trainer sees; only requests and answers go through the pipe.

It ends when it is told to, when its trainer or the program that started it is gone, and when
something fails, which it tells that program first.
"""

import contextlib
import multiprocessing
import traceback
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from tandem.data.minibatch import MinibatchBuilder, MinibatchRequest
from tandem.errors import InputError
from tandem.memory import HostSlots, Slot
from tandem.memory.cuda import CudaSlots
from tandem.processes.child import describe
from tandem.processes.heartbeat import Activity, StatusSlot
from tandem.training.messages import Failed, MinibatchReady, Stop

LOOK_SECONDS = 1.0  # the longest wait before looking again at who is still there


def serve(
    filler: MinibatchBuilder,
    connection: Connection,
    slots: HostSlots | CudaSlots,
    sign: StatusSlot,
    launcher: Connection,
) -> None:
    """Fill slots until told to stop; the target of a loader process.

    Parameters
    ----------
    filler : MinibatchBuilder
        What fills a slot.
    connection : Connection
        To the trainer. Its other end must be open in the trainer alone, so that its death shows.
    slots : HostSlots or CudaSlots
        Where minibatches go.
    sign : StatusSlot
        Where it shows what it is doing.
    launcher : Connection
        Where a failure is reported: the launcher hears of it however long the trainer's step is.

    Raises
    ------
    SystemExit
        With status 1, when something failed. The launcher has been told.
    """
    try:
        area = slots.open(connection.recv)
        while (request := _receive(connection)) is not None:
            sign.show(Activity.READING)
            area.fill(request.slot, partial(_fill, filler, request))
            sign.show(Activity.IDLE)
            connection.send(MinibatchReady(request.slot))
        area.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # The trainer is gone, and says why to whom it concerns.
        return
    except Exception as error:
        _report(launcher, error)
        raise SystemExit(1) from None
    finally:
        filler.close()
        connection.close()


def _fill(filler: MinibatchBuilder, request: MinibatchRequest, slot: Slot) -> None:
    filler.fill(slot, request)


def _receive(connection: Connection) -> MinibatchRequest | None:
    """The next request; None when it is time to end."""
    parent = multiprocessing.parent_process()
    watched: list[Any] = [connection] if parent is None else [connection, parent.sentinel]
    while not (ready := wait(watched, LOOK_SECONDS)):
        continue
    if connection not in ready:
        return None
    try:
        message = connection.recv()
    except (EOFError, ConnectionResetError):
        return None
    if isinstance(message, Stop):
        return None
    if not isinstance(message, MinibatchRequest):
        raise TypeError(
            f"a trainer sent {type(message).__name__}, expected MinibatchRequest or Stop"
        )
    return message


def _report(launcher: Connection, error: Exception) -> None:
    failed = Failed(
        who=multiprocessing.current_process().name,
        kind="input" if isinstance(error, InputError) else "fault",
        message=describe(error),
        traceback="".join(traceback.format_exception(error)),
    )
    with contextlib.suppress(OSError):
        launcher.send(failed)
