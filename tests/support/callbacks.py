"""Callbacks for tests."""

import json
import os
import time
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


class Waits(Callback):
    """Notes what there is at the end of each epoch, and after a while; ends training with one."""

    last = 3

    def on_train_begin(self, config: Mapping[str, Any]) -> None:
        self._run = Path(config["weights_dir"])

    def on_epoch_end(self, epoch: int, record: Mapping[str, Any]) -> bool:
        seen = self._seen()
        time.sleep(0.7)
        line = [epoch, seen, self._seen(), record.logs]  # type: ignore[attr-defined]
        with (self._run / "seen").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return epoch == self.last

    def _seen(self) -> list[Any]:
        names = sorted(path.name for path in self._run.glob("epoch*"))
        return [names, (self._run / "record.jsonl").read_text().count("\n")]


class Hangs(Callback):
    """Shows the first end of an epoch by a file "waiting"; returns when there is one named "go"."""

    def on_train_begin(self, config: Mapping[str, Any]) -> None:
        self._run = Path(config["weights_dir"])

    def on_epoch_end(self, epoch: int, record: Mapping[str, Any]) -> None:
        with (self._run / "waiting").open("a") as file:
            file.write(f"{epoch}\n")
        while not (self._run / "go").exists():
            time.sleep(0.05)
