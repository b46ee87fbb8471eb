"""What a person sees of a run: log lines and progress bars."""

import logging
import sys
from typing import Protocol

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from tandem.run.messages import CheckpointWritten, Progress, Remark
from tandem.run.record import TrainRecord, ValidationRecord

log = logging.getLogger(__name__)


def configure_logging(prefix: str = "") -> None:
    """Log to stderr, in the form that all programs share."""
    logging.basicConfig(level=logging.WARNING, format=f"{prefix}%(message)s", force=True)
    logging.getLogger("tandem").setLevel(logging.INFO)


class Observer(Protocol):
    """Told by the launcher what trainer 0 reports."""

    def tell(self, message: object) -> None:
        """A report has come."""

    def close(self) -> None:
        """The run is over, however it ended."""


class Watch:
    """Progress on a terminal, where there is one."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._key: tuple[str, int] | None = None
        self._figures: dict[str, str] = {}
        self._redirect = logging_redirect_tqdm()
        self._redirect.__enter__()

    def show(self, progress: Progress) -> None:
        """Move the bar of this epoch, or begin it."""
        key = (progress.mode, progress.epoch)
        if key != self._key:
            self.close_bar()
            self._key = key
            self._bar = tqdm(
                total=progress.steps,
                desc=f"epoch {progress.epoch} {progress.mode}",
                unit="step",
                leave=False,
                dynamic_ncols=True,
                disable=not sys.stderr.isatty(),
            )
            self._bar.set_postfix(self._figures)
        if self._bar is not None:
            self._bar.update(progress.step - self._bar.n)

    def note(self, **figures: str) -> None:
        """Show figures at the end of the bar, and of the next ones."""
        self._figures = figures
        if self._bar is not None:
            self._bar.set_postfix(figures)

    def close_bar(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def close(self) -> None:
        """Take everything away."""
        self.close_bar()
        self._redirect.__exit__(None, None, None)


class TrainingObserver:
    """Tells the user how a training run goes."""

    def __init__(self) -> None:
        self._watch = Watch()

    def tell(self, message: object) -> None:
        """Show a report."""
        if isinstance(message, Progress):
            self._watch.show(message)
        elif isinstance(message, TrainRecord):
            self._tell_training(message)
        elif isinstance(message, ValidationRecord):
            log.info("%s", describe_validation(message))
        elif isinstance(message, CheckpointWritten):
            log.info("wrote %s", message.path)
        elif isinstance(message, Remark):
            log.info("%s", message.text)

    def close(self) -> None:
        """Take the progress bar away."""
        self._watch.close()

    def _tell_training(self, record: TrainRecord) -> None:
        figures = {
            "loss": f"{record.loss:.4f}",
            "images/s": f"{record.images_per_second:.1f}",
        }
        if record.top1_error is not None:
            figures["error"] = f"{100 * record.top1_error:.1f}%"
        self._watch.note(**figures)
        if not sys.stderr.isatty():
            log.info(
                "epoch %d step %d: %s, rate %.3g; seconds: compute %.2f, load %.2f, exchange %.2f",
                record.epoch,
                record.step,
                ", ".join(f"{name} {value}" for name, value in figures.items()),
                record.learning_rate,
                record.compute_seconds,
                record.load_wait_seconds,
                record.exchange_seconds,
            )


class SilentObserver:
    """Tells nobody: trainer 0 reports elsewhere."""

    def tell(self, message: object) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class ValidationObserver:
    """Keeps the one result of a validation run."""

    def __init__(self) -> None:
        self.records: list[ValidationRecord] = []
        self._watch = Watch()

    def tell(self, message: object) -> None:
        """Show progress; keep the result."""
        if isinstance(message, Progress):
            self._watch.show(message)
        elif isinstance(message, ValidationRecord):
            self.records.append(message)

    def close(self) -> None:
        """Take the progress bar away."""
        self._watch.close()


def describe_validation(record: ValidationRecord) -> str:
    """One line that says how good the network is."""
    return (
        f"epoch {record.epoch} validation: loss {record.loss:.4f}, "
        f"top-1 error {100 * record.top1_error:.2f} %, top-5 error {100 * record.top5_error:.2f} % "
        f"of {record.images} images"
    )
