"""Callbacks for tests."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.callbacks import Callback


class Log(Callback):
    """Writes every call as a line of JSON into the file that the environment names."""

    def _write(self, *call: object) -> None:
        with Path(os.environ["TANDEM_TEST_CALLS"]).open("a") as file:
            file.write(json.dumps(call) + "\n")

    def on_train_begin(self, config: Mapping[str, Any]) -> None:
        self._write("on_train_begin", dict(config))

    def on_epoch_begin(self, epoch: int) -> None:
        self._write("on_epoch_begin", epoch)

    def on_epoch_end(self, epoch: int, record: Mapping[str, Any]) -> None:
        self._write("on_epoch_end", epoch, dict(record))

    def on_train_end(self, result: Mapping[str, Any]) -> None:
        self._write("on_train_end", dict(result))


class Broken:
    """Fails at the end of the first epoch."""

    def on_epoch_end(self, epoch: int, record: Mapping[str, Any]) -> None:
        raise OSError("no connection")


class BrokenBegin:
    """Fails before training."""

    def on_train_begin(self, config: Mapping[str, Any]) -> None:
        raise OSError("no connection")


class BrokenEpoch:
    """Fails when the processes have been started."""

    def on_epoch_begin(self, epoch: int) -> None:
        raise OSError("no connection")


class BrokenEnd:
    """Fails after training."""

    def on_train_end(self, result: Mapping[str, Any]) -> None:
        raise OSError("no connection")


class WithArgument(Callback):
    """Cannot be made without an argument."""

    def __init__(self, project: str) -> None:
        self.project = project


class NoCallback:
    """Has no method of a callback."""

    def on_epoch_finish(self, epoch: int) -> None:
        """Do nothing."""
