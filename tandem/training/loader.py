"""The loader: a process beside each trainer that keeps its next minibatch ready.

It waits for a request, reads the pictures from the batch files into the requested slot, crops and
mirrors them unless the device does, reports the slot as filled, and waits again. The slots lie in
memory shared with the trainer; only requests and answers cross the pipe.

It ends on request, when its trainer or the launcher is gone, and when it fails, which it reports to
the launcher first.
"""

import contextlib
import multiprocessing
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from tandem.data.minibatch import MinibatchBuilder, MinibatchRequest
from tandem.memory import HostSlots
from tandem.memory.cuda import CudaSlots
from tandem.processes.heartbeat import StatusSlot
from tandem.processes.messages import Failed, Stop
from tandem.training.messages import Activity, MinibatchReady


def serve(
    builder: MinibatchBuilder,
    trainer: Connection,
    slots: HostSlots | CudaSlots,
    status: StatusSlot,
    launcher: Connection,
) -> None:
    """Fill slots until asked to stop; the target of a loader process.

    The other end of `trainer` must be open in the trainer alone, so that the trainer's death shows.
    A failure is reported to the launcher at once, however long the trainer's step is.
    """
    try:
        area = slots.open(trainer.recv)
        while (request := _receive(trainer)) is not None:
            status.show(Activity.READING)
            area.fill(request.slot, partial(builder.fill, request=request))
            status.show(Activity.IDLE)
            trainer.send(MinibatchReady(request.slot))
        area.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the trainer is gone, and reports its failure itself
    except Exception as error:
        with contextlib.suppress(OSError):
            launcher.send(Failed.of(multiprocessing.current_process().name, error))
        raise SystemExit(1) from None
    finally:
        builder.close()
        trainer.close()


def _receive(trainer: Connection) -> MinibatchRequest | None:
    """Return the next request, or None when it is time to end."""
    parent = multiprocessing.parent_process()
    watched: list[Any] = [trainer] if parent is None else [trainer, parent.sentinel]
    if trainer not in wait(watched):
        return None
    try:
        message = trainer.recv()
    except (EOFError, ConnectionResetError):
        return None
    if isinstance(message, Stop):
        return None
    if not isinstance(message, MinibatchRequest):
        raise TypeError(
            f"a trainer sent {type(message).__name__}, expected MinibatchRequest or Stop"
        )
    return message
