"""Callbacks: classes of yours that a run calls, named by the setting ``callbacks``."""

from collections.abc import Mapping
from typing import Any

METHODS = ("on_train_begin", "on_epoch_begin", "on_epoch_end", "on_train_end")


class Callback:
    """Base of a callback; all methods are optional, and so is the base.

    The class is called without arguments, once for each start of the program, in the process that
    starts the others; of ranks, on rank 0. The methods are called there as well, in the order of
    the setting. At the end of an epoch all trainers wait until its `on_epoch_end` and the
    `on_epoch_begin` of the next have returned. An exception ends the run: the trainers finish their
    step or epoch and save a checkpoint, the traceback is logged, and the exit status is 1.
    """

    def on_train_begin(self, config: Mapping[str, Any]) -> None:
        """Called once, before the processes start; not again after a restart or rollback.

        Parameters
        ----------
        config : mapping
            Every setting as YAML would hold it, with ``auto`` resolved.
        """

    def on_epoch_begin(self, epoch: int) -> None:
        """Called when an epoch begins, counted from 1, at about its first step.

        It is called again for an epoch that is continued: by ``resume_train``, after a restart, or
        after a rollback. The trainers wait for it, but not for that of the first epoch.
        """

    def on_epoch_end(self, epoch: int, record: Mapping[str, Any]) -> bool | None:
        """Called after the validation of an epoch, when its checkpoint, if one is due, is on disk.

        Parameters
        ----------
        epoch : int
            Counted from 1.
        record : mapping
            Of the validation ``loss`` (nats), ``top1_error`` and ``top5_error`` (fractions) and
            ``images``, and each of the chosen `metrics` under its name; ``step``, the steps of the
            whole run so far; and means of the reports (``print_freq``) of this epoch's training:
            ``train_loss``, ``train_top1_error``, ``images_per_second``, with ``learning_rate``, the
            last. These four are None without a report, ``train_top1_error`` also with
            ``print_train_error: false``. Its attribute ``logs`` has loss and metrics under Keras's
            names, ``loss``, ``val_loss`` and so on (`tandem.artifacts.epochs.logs_of`).

        Returns
        -------
        bool or None
            True ends training: the run ends well, with a checkpoint of this epoch.
        """
        return None

    def on_train_end(self, result: Mapping[str, Any]) -> None:
        """Called once, at the end of the run however it came, but not after a callback failed.

        A rank that fails ends all others at once, and then it is not called either.

        Parameters
        ----------
        result : mapping
            ``status``, the exit status: 0 when all epochs are done, 130 after Ctrl-C, 143 after
            SIGTERM, 129 after SIGHUP, 1 or 2 after a failure; ``weights``, the path of the newest
            checkpoint, or None; ``record``, that of the last epoch, or None.
        """
