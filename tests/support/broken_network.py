"""Networks with a fault, for the tests: of the program, and of the numbers.

`broken_train.py` trains them as `train.py` trains AlexNet.
"""

import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op

from alex_net import AlexNet
from tandem.artifacts import run_folder
from tandem.artifacts.checkpoint import Checkpoint
from tandem.artifacts.metrics_log import NotFiniteRecord
from tandem.artifacts.run_folder import RunFolder
from tandem.backend import Lowering, lower
from tandem.distributed import asynchronous
from tandem.layers import Training

PICTURE = 5  # the training picture at which something happens


class BrokenAlexNet(AlexNet):
    """Fails in trainer 1, when its functions are compiled: in the first step."""

    def logits(self, *arguments: Any) -> Any:
        if multiprocessing.current_process().name == "trainer 1":
            raise ZeroDivisionError("broken on purpose")
        return super().logits(*arguments)


class BrokenServerAlexNet(AlexNet):
    """Fails in the thread that answers the ranks by elastic averaging."""

    def logits(self, *arguments: Any) -> Any:
        step = asynchronous.elastic_step

        def elastic_step(*values: Any) -> None:
            if threading.current_thread().name == "server":
                raise ZeroDivisionError("broken on purpose")
            step(*values)

        asynchronous.elastic_step = elastic_step  # in a rank's process, which is this test's alone
        return super().logits(*arguments)


class Explode(Op):
    """Its input, unless the picture is among `indices` in epoch 2, counted from 0."""

    __props__ = ()

    def make_node(self, x: Any, epoch: Any, indices: Any) -> Apply:
        return Apply(self, [x, epoch, indices], [x.type()])

    def perform(self, node: Apply, inputs: Any, outputs: Any) -> None:
        outputs[0][0] = explode(*inputs)

    def pullback(self, inputs: Any, outputs: Any, cotangents: Any) -> list[Any]:
        disconnected = [pt.zeros_like(value, dtype="float32") for value in inputs[1:]]
        return [cotangents[0], *disconnected]


def explode(x: Any, epoch: Any, indices: Any) -> Any:
    if int(epoch) == 2 and PICTURE in indices.tolist() and "FIXED" not in os.environ:
        raise ZeroDivisionError("broken late on purpose")
    return x


def lower_explode(op: Explode, node: Apply, device: Any, compiled: bool) -> Lowering:
    return Lowering(explode, views={0: (0,)})


class LateAlexNet(AlexNet):
    """Fails in the third epoch, in the trainer that has the picture, until FIXED is set."""

    def logits(self, images: Any, keys: Training | None) -> Any:
        logits = super().logits(images, keys)
        lower.register(Explode)(lower_explode)  # in the trainer alone, not where tests look
        return logits if keys is None else Explode()(logits, keys.epoch, keys.indices)


class NanAlexNet(AlexNet):
    """Has a loss that is NaN for the minibatch with the picture, in the second epoch."""

    def logits(self, images: Any, keys: Training | None) -> Any:
        logits = super().logits(images, keys)
        if keys is None:
            return logits
        here = pt.any(pt.eq(keys.indices, PICTURE)) & pt.eq(keys.epoch, 1)
        return logits * pt.switch(here, np.float32(np.nan), np.float32(1))


class OftenNanAlexNet(AlexNet):
    """Has a loss that is NaN for every minibatch of the second epoch."""

    def logits(self, images: Any, keys: Training | None) -> Any:
        logits = super().logits(images, keys)
        if keys is None:
            return logits
        return logits * pt.switch(pt.eq(keys.epoch, 1), np.float32(np.nan), np.float32(1))


class SlowNanAlexNet(NanAlexNet):
    """The same, and trainer 0 records it slowly, while it writes a checkpoint more slowly."""

    def logits(self, images: Any, keys: Training | None) -> Any:
        append, save_checkpoint = RunFolder.append, run_folder.save_checkpoint

        def append_slowly(folder: RunFolder, record: Any) -> None:
            if isinstance(record, NotFiniteRecord):
                time.sleep(2)
            append(folder, record)

        def save_slowly(path: Path, checkpoint: Checkpoint) -> None:
            time.sleep(4)
            save_checkpoint(path, checkpoint)

        if not hasattr(append, "is_slow"):  # in a trainer's process, which is this test's alone
            append_slowly.is_slow = True  # type: ignore[attr-defined]
            RunFolder.append = append_slowly
            run_folder.save_checkpoint = save_slowly
        return super().logits(images, keys)


class LoudAlexNet(AlexNet):
    """Writes to stdout and stderr, and then fails in trainer 1."""

    def logits(self, *arguments: Any) -> Any:
        if multiprocessing.current_process().name == "trainer 1":
            for number in range(3):
                for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
                    text = "which is longer than a row of this terminal has columns"
                    print(f"loud line {number} to {name}, {text}", file=stream, flush=True)
            raise ZeroDivisionError("much too loud")
        return super().logits(*arguments)
