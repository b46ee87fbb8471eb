"""Theano-MPI's session: a rule that starts a run on several devices, and waits for it::

    from tandem.session import BSP

    rule = BSP()
    rule.init(devices=["cpu", "cpu"], modelfile="tandem.models.resnet", modelclass="ResNet20")
    result = rule.wait()

The run is one of ``tandem train``, over ranks of ``mpirun`` where the rule is asynchronous. Its
lines are printed here, also in a notebook.
"""

import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Self

import yaml

from tandem.artifacts.metrics_log import read_records
from tandem.artifacts.run_folder import CONFIGURATION, RECORD, list_checkpoints
from tandem.config.command_line import RECIPES
from tandem.config.schema import Config
from tandem.distributed.mpi import find_mpirun
from tandem.errors import InputError, RunError
from tandem.launch.api import Result, Settings, checked, given_values
from tandem.validation import listed

_NETWORKS = {  # of Theano-MPI, by class: ours, and the recipe of its settings
    "AlexNet": ("alex_net:AlexNet", "alexnet"),
    "GoogLeNet": ("tandem.models.googlenet:GoogLeNet", "googlenet"),
    "VGG16": ("tandem.models.vgg:VGG16", "vgg16"),
    "ResNet50": ("tandem.models.resnet:ResNet50", "resnet50"),
    "ResNet152": ("tandem.models.resnet:ResNet152", "resnet50"),
    "Wide_ResNet": ("tandem.models.wide_resnet:WideResNet", "wide_resnet"),
}
_EXCHANGES = {"avg": "average", "cdd": "gradients"}  # by Theano-MPI's names
_DEVICE = re.compile(r"^(?:cuda|gpu)(\d+)$")


class _Rule:
    """A way in which trainers agree on weights (Ma, Mao, Taylor 2016, section 3).

    Parameters
    ----------
    config : Config, mapping or path, optional
        Settings of its runs, as for `tandem.train`.
    """

    name: ClassVar[str]  # in the settings
    sync_type: ClassVar[str | None] = None  # of Theano-MPI: avg or cdd

    def __init__(self, config: Settings | None = None) -> None:
        self._config = config
        self._process: subprocess.Popen[str] | None = None

    def init(
        self,
        devices: Sequence[str],
        modelfile: str | None = None,
        modelclass: str | None = None,
        **settings: Any,
    ) -> Self:
        """Start a run, with a trainer on each device.

        Parameters
        ----------
        devices : sequence of str
            Such as ``["cpu", "cpu"]`` or ``["cuda:0", "cuda:1"]``; ``cuda0`` is ``cuda:0``.
        modelfile, modelclass : str
            Module and class of the network; by default that of the configuration. One of
            Theano-MPI's, such as ``theanompi.models`` and ``AlexNet``, is ours of that name, with
            the settings of its recipe.
        **settings
            Further settings of ``config.yaml``, such as ``n_epochs=3``.

        Raises
        ------
        InputError
            A setting cannot be used, an asynchronous rule lacks ``mpirun``, or the run before has
            not ended; nothing has been started.
        """
        if self._process is not None:
            raise InputError("the run before has not ended; expected wait or stop before init")
        base = self._config or {}
        devices = [_DEVICE.sub(r"cuda:\1", device) for device in devices]
        own: dict[str, Any] = {"devices": devices, "rule": self.name}
        if modelfile is not None or modelclass is not None:
            module, name = modelfile or "alex_net", modelclass or "AlexNet"
            own["network"] = f"{module}:{name}"
            if module.partition(".")[0] == "theanompi":
                own["network"], recipe = _ours(name)
                if isinstance(base, Config):
                    base = base.model_dump(exclude_defaults=True)
                base = given_values(RECIPES / f"{recipe}.yaml", given_values(base, {}))
        if self.sync_type is not None:
            own["exchange"] = _EXCHANGES.get(self.sync_type, self.sync_type)
        own |= settings
        self._weights = checked(base, own).weights_path
        starter = _starter(len(devices)) if self.name != "bsp" else []
        self._folder = TemporaryDirectory()
        file = Path(self._folder.name) / CONFIGURATION
        file.write_text(yaml.safe_dump(given_values(base, own)))
        command = [*starter, sys.executable, "-m", "tandem", "train", "--config", str(file)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for `wait`
        )
        self._last = ""
        self._printer = threading.Thread(target=self._print, args=[self._process], daemon=True)
        self._printer.start()
        return self

    def wait(self) -> Result:
        """Wait until the run ends.

        Returns
        -------
        Result
            The newest checkpoint, and the records of the whole training.

        Raises
        ------
        InputError
            There is no run.
        RunError
            The run has failed, or was stopped.
        KeyboardInterrupt
            After Ctrl-C; a checkpoint was written first.
        """
        if self._process is None:
            raise InputError("there is no run to wait for; expected init before wait")
        try:
            status = self._process.wait()
        except KeyboardInterrupt:
            self.stop()
            raise
        self._end()
        if status:
            raise RunError(f"the run has ended with status {status}: {self._last}")
        records = tuple(read_records(self._weights / RECORD))
        return Result(list_checkpoints(self._weights)[-1], records)

    def stop(self) -> None:
        """End the run after its current step, with a checkpoint."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._end()

    def _end(self) -> None:
        self._process = None
        self._printer.join()
        self._folder.cleanup()

    def _print(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            sys.stdout.write(line)
            self._last = line.strip() or self._last


class BSP(_Rule):
    """Synchronous training: trainers average after every step."""

    name = "bsp"


class EASGD(_Rule):
    """Elastic averaging: trainers and a server's weights attract each other."""

    name = "easgd"


class GOSGD(_Rule):
    """Gossip: trainers send weights to each other at random."""

    name = "gosgd"


def _ours(name: str) -> tuple[str, str]:
    """The network and the recipe of a class of Theano-MPI."""
    if name not in _NETWORKS:
        raise InputError(
            f"modelclass: found {name} of Theano-MPI, expected {listed([*_NETWORKS])}; its LSTM, "
            "WGAN and LSGAN are examples.keras_lstm and examples.parallel_gan"
        )
    return _NETWORKS[name]


def _starter(ranks: int) -> list[str]:
    """Return the command that starts ranks: this Python's mpirun, or the system's."""
    found = find_mpirun()
    if found is None:
        raise InputError(
            "there is no mpirun, by which this rule's trainers are started: install "
            "tandem-train[mpi], or use BSP"
        )
    return [found, "-n", str(ranks)]
