"""Does a long run keep its memory, and do its trainers stay equal?

    python -m benchmarks.long_run data/fashion runs/long

Trains LeNet on Fashion-MNIST by two trainers' averages, 101,250 steps. Every 250 steps each trainer
notes how far the trainers are apart before the average, in its part of the vectors, whether all
bits are equal after it, its memory, and its open files. The same command continues a run that was
stopped, and draws what was noted so far as ``long-run.png`` in the folder of the run.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pytensor.tensor.variable import TensorVariable

from benchmarks.measure import parser_of
from examples.le_net import LeNet
from tandem.distributed.allreduce import SharedMemoryAllReduce
from tandem.layers import Builder

EVERY = 250  # steps
NOTES = "TANDEM_LONG_RUN_NOTES"  # variable of the environment: the folder of the notes
SETTINGS = (
    *("--network", "benchmarks.long_run:WatchedLeNet", "--crop_size", "28", "--shuffle", "images"),
    *("--devices", "cpu", "cpu", "--threads", "1", "--batch_size", "16", "--n_epochs", "54"),
    *("--lr_policy", "cosine", "--learning_rate", "0.01"),
)


class WatchedLeNet(LeNet):
    """LeNet, whose trainers watch their averages."""

    def build(self, net: Builder, x: TensorVariable) -> TensorVariable:
        SharedMemoryAllReduce.average = _average  # type: ignore[method-assign]
        return super().build(net, x)


_plain_average = SharedMemoryAllReduce.average
_count = 0


def _average(self: SharedMemoryAllReduce, vector: np.ndarray, shares: Sequence[float]) -> None:
    global _count
    _count += 1
    if _count % EVERY:
        _plain_average(self, vector, shares)
        return
    first, second = self._parts
    self._group.barrier()
    apart = float(np.abs(first - second).max())
    _plain_average(self, vector, shares)
    equal = np.array_equal(*(_bytes_around(part) for part in self._parts))
    self._group.barrier()
    files = len([*Path("/proc/self/fd").iterdir()])
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    megabytes = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    with Path(os.environ[NOTES], f"{self._group.rank}.txt").open("a") as notes:
        notes.write(f"{EVERY} {apart} {equal:d} {megabytes:.1f} {files}\n")


def _bytes_around(part: np.ndarray) -> np.ndarray:
    """The whole vector of which an array is a part."""
    assert isinstance(part.base, np.ndarray)
    return part.base.view(np.uint8)


def draw(notes: Sequence[np.ndarray], path: Path) -> None:
    """Draw the notes of each trainer."""
    from benchmarks.draw import picture  # imports Matplotlib

    titles = "largest difference before an average", "memory of a trainer, MB", "its open files"
    with picture(path, 3, dpi=75, figsize=(11, 2.8)) as axes:
        for rank, rows in enumerate(notes):
            steps = np.cumsum(rows[:, 0]) / 1000
            for ax, title, column in zip(axes, titles, (1, 3, 4), strict=True):
                ax.plot(steps, rows[:, column], label=f"trainer {rank}", lw=1.2)
                ax.set_title(title)
                ax.set_xlabel("thousand steps")
        for ax in axes:
            ax.set_ylim(bottom=0)
        axes[1].legend(loc="lower right")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and draw; return the exit status: 1 where trainers were not equal after an average."""
    parser = parser_of(__doc__, prog="python -m benchmarks.long_run")
    parser.add_argument("data", type=Path, help="prepared pictures of Fashion-MNIST")
    parser.add_argument("folder", type=Path, help="of the run")
    chosen = parser.parse_args(arguments)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    files = ["--data_folder", str(chosen.data), "--weights_dir", str(chosen.folder)]
    environment = os.environ | {NOTES: str(chosen.folder.resolve())}
    if any(chosen.folder.glob("*.safetensors")):
        files += ["--resume_train", "true"]
    subprocess.run([sys.executable, "train.py", *SETTINGS, *files], env=environment, check=False)
    notes: list[Any] = [np.loadtxt(chosen.folder / f"{rank}.txt", ndmin=2) for rank in (0, 1)]
    for rank, rows in enumerate(notes):
        later = rows[len(rows) // 20 :]
        print(
            f"trainer {rank}: {rows[:, 0].sum():.0f} steps, equal after {rows[:, 2].mean():.1%} of"
            f" {len(rows)} averages; before them apart by {np.median(rows[:, 1]):.2g}, at most"
            f" {rows[:, 1].max():.2g}; memory grew by {later[-1, 3] - later[0, 3]:.1f} MB and"
            f" {later[-1, 4] - later[0, 4]:.0f} files after a twentieth of them"
        )
    draw(notes, chosen.folder / "long-run.png")
    return 0 if all(rows[:, 2].all() for rows in notes) else 1


if __name__ == "__main__":
    sys.exit(main())
