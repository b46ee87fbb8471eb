"""Progress of a run on the terminal or in the log, and its list of skipped pictures."""

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from tandem.data.manifest import SPLITS
from tandem.errors import InputError
from tandem.files import write_text
from tandem.preprocessing.listing import Listing
from tandem.preprocessing.progress import Progress, Skipped
from tandem.preprocessing.settings import Settings
from tandem.progress_bar import progress_bar
from tandem.validation import printable

log = logging.getLogger(__name__)

SKIPPED_NAME = "skipped.txt"
_SECONDS_BETWEEN_LINES = 10.0


class Report:
    """Shows the progress of a run, and stops it when too many pictures are bad."""

    def __init__(self, settings: Settings, listing: Listing, progress: Progress) -> None:
        self._path = settings.misc_folder / SKIPPED_NAME
        self._max_bad = settings.max_bad
        self._listing = listing
        self._skipped = {split: list(progress.splits[split].skipped) for split in SPLITS}
        self._total = sum(len(listed.pictures) for listed in listing.splits.values())
        self._before = sum(split.cursor for split in progress.splits.values())
        self._done = self._before
        self._started = self._last_line = time.monotonic()
        self._advance_bar: Callable[[float], None] | None = None
        self._interrupted = False
        for split, skipped in self._skipped.items():
            if skipped:
                self._check_bad(split)

    @property
    def bad(self) -> int:
        return sum(map(len, self._skipped.values()))

    def skipped_positions(self, split: str) -> set[int]:
        """Positions in the list of `split` of the pictures left out."""
        return {skipped.position for skipped in self._skipped[split]}

    def write_skipped(self) -> None:
        """Write skipped.txt: a line for each picture left out, its `line_name`, tab, reason."""
        lines = [
            f"{self._name(split, bad)}\t{bad.reason}\n"
            for split in SPLITS
            for bad in sorted(self._skipped[split], key=lambda bad: bad.position)
        ]
        write_text(self._path, "".join(lines))

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show a progress bar on a terminal; elsewhere, lines in the log."""
        if self._before:
            log.info("continuing after %d of %d pictures", self._before, self._total)
        former = signal.signal(signal.SIGINT, self._interrupt)
        try:
            with progress_bar("pictures", self._total, self._before) as self._advance_bar:
                yield
        finally:
            signal.signal(signal.SIGINT, former)

    def advance(self, count: int) -> None:
        """Count pictures that are in a batch file or skipped."""
        if self._interrupted:
            raise KeyboardInterrupt
        self._done += count
        if self._advance_bar is not None:
            self._advance_bar(count)
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            rate = (self._done - self._before) / (self._last_line - self._started)
            left = (self._total - self._done) / rate
            text = "%d of %d pictures, %.0f pictures/s, %.0f s left"
            log.info(text, self._done, self._total, rate, left)

    def skip(self, split: str, skipped: Skipped) -> None:
        """Note a picture that is left out; raises InputError when there are too many."""
        self._skipped[split].append(skipped)
        log.warning("left out %s: %s", self._name(split, skipped), skipped.reason)
        self._check_bad(split)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        # Python drops an exception that is raised in a finalizer, so a flag is set as well.
        self._interrupted = True
        raise KeyboardInterrupt

    def _check_bad(self, split: str) -> None:
        if self.bad > self._max_bad:
            self.write_skipped()
            last = self._skipped[split][-1]
            raise InputError(
                f"{self._path}: found {self.bad} pictures that cannot be decoded, expected at most"
                f" {self._max_bad} (max_bad); the last is {self._name(split, last)}: {last.reason}."
                " With a larger max_bad the same command goes on; without the pictures it would"
                " start over"
            )

    def _name(self, split: str, skipped: Skipped) -> str:
        return line_name(split, self._listing.splits[split].pictures[skipped.position])


def line_name(split: str, picture: str) -> str:
    """The name of a picture in a line: ``split/picture``, escaped where it is not printable."""
    return printable(f"{split}/{picture}")


def read_skipped(path: Path) -> dict[str, str]:
    """Reasons by `line_name`, from skipped.txt; empty when there is none."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {name: reason for name, _, reason in (line.partition("\t") for line in lines)}
