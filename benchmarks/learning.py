"""How do exchanges between trainers, and numbers of trainers, learn from equal pictures?

    tandem datasets cifar10 --out data/cifar10 --pad 4
    python -m benchmarks.learning data/cifar10 runs/learning
    python -m benchmarks.learning data/cifar10 runs/learning --epochs 2 --only average gosgd

Trains AlexNet for CIFAR-10 (`CifarAlexNet`) once for each case, one after another, every trainer
with one thread: each exchange of a launcher's trainers, and some of ranks of MPI, by four trainers,
and `average` by one and two. With `sum_rows` one, two and four trainers have to end with equal
bits. The global minibatch, the rate and its schedule are those of all cases. Whatever was ended is
continued by the same command. Draws `learning.png` into the folder: errors of validation against
pictures seen, and against the bytes that a trainer receives, which are counted; prints JSON lines,
then a table.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pytensor.tensor.variable import TensorVariable

from benchmarks.measure import parser_of
from examples.le_net import CONTRAST
from tandem.artifacts.checkpoint import read_checkpoint
from tandem.artifacts.run_folder import RECORD, find_checkpoint
from tandem.distributed.mpi import find_mpirun
from tandem.errors import InputError
from tandem.layers import Builder, LayeredNetwork, max_pool, relu
from tandem.plot import STYLES, TYPE, Run, read_run
from tandem.text_table import aligned

BATCH = 128  # pictures of a step, of all trainers together
RANKS = 4
SETTINGS = (
    *("--network", "benchmarks.learning:CifarAlexNet", "--crop_size", "32"),
    *("--shuffle", "images"),
    *("--threads", "1", "--learning_rate", "0.05", "--lr_policy", "cosine"),
    *("--warmup_epochs", "0.2", "--weight_decay", "0.0005", "--print_freq", "50"),
    *("--tensorboard", "false", "--live_view", "false", "--keep_snapshots", "1"),
    *("--resume_train", "true"),
)


class CifarAlexNet(LayeredNetwork):
    """AlexNet for pictures of 32 pixels, as `examples.keras_cifar` has it for Keras.

    Parameters are those of every `LayeredNetwork`: crop_size, classes, width, dtype.
    """

    def build(self, net: Builder, x: TensorVariable) -> TensorVariable:
        first = net.convolution("conv1", x, self.scaled(64), 3, 2, 1, bias=0.0, input_std=CONTRAST)
        x = max_pool(relu(first), 2, 2)
        x = max_pool(relu(net.convolution("conv2", x, self.scaled(192), 3, bias=0.0)), 2, 2)
        for number, filters in ((3, 384), (4, 256), (5, 256)):
            x = relu(net.convolution(f"conv{number}", x, self.scaled(filters), 3, bias=0.0))
        x = max_pool(x, 2, 2)
        for name in ("fc6", "fc7"):
            x = net.dropout(relu(net.fully_connected(name, x, self.scaled(4096))), 0.5)
        return net.fully_connected("fc8", x, self.classes)


@dataclass(frozen=True)
class Case:
    """A way to train, by some trainers."""

    name: str
    settings: tuple[str, ...]
    trainers: int = RANKS
    # Numbers that a trainer receives in a step, as multiples of the parameters.
    received: float = 0.0
    by_mpi: bool = False

    @property
    def is_summed(self) -> bool:
        return "--sum_rows" in self.settings

    def command(self, data: Path, folder: Path, epochs: int, width: float) -> list[str]:
        """Return the command that begins or continues the run."""
        files = ["--data_folder", str(data), "--weights_dir", str(folder)]
        each = ("--batch_size", str(BATCH // self.trainers))
        rows = ("--global_batch", str(BATCH)) if self.is_summed else each
        devices = ["cpu"] * (1 if self.by_mpi else self.trainers)
        mpirun = [find_mpirun() or "mpirun", "-n", str(self.trainers)]
        return [
            *(mpirun if self.by_mpi else []),
            *(sys.executable, "train.py", *SETTINGS, *files, "--n_epochs", str(epochs)),
            *("--width", str(width), *rows),
            *("--devices", *devices, *self.settings),
        ]


def cases() -> Iterator[Case]:
    """Give every case; sums of shares, and copies of these, are 2 (N - 1) / N numbers."""
    every = 2 * (RANKS - 1) / RANKS
    for trainers in (1, 2, RANKS):
        received = 2 * 2 * (trainers - 1) / trainers  # weights and momenta
        name = "average" if trainers == RANKS else f"average-{trainers}"
        yield Case(name, ("--exchange", "average"), trainers, received)
    yield Case("gradients", ("--exchange", "gradients"), received=every)
    yield Case("shared", ("--exchange", "shared"), received=every)
    halves = ("--exchange", "gradients", "--collective", "asa16")
    yield Case("asa16", halves, received=every / 2, by_mpi=True)
    # N alpha is 0.9, as in Zhang, Choromanska, LeCun 2015, section 5.
    elastic = ("--rule", "easgd", "--easgd_alpha", str(0.9 / RANKS), "--easgd_tau")
    for tau in (1, 8):
        name = f"easgd-{tau}" if tau > 1 else "easgd"
        yield Case(name, (*elastic, str(tau)), received=1 / tau, by_mpi=True)
    yield Case("gosgd", ("--rule", "gosgd", "--gosgd_p", "0.1"), received=0.1, by_mpi=True)
    for trainers in (1, 2, RANKS):
        summed = ("--exchange", "gradients", "--sum_rows", str(BATCH // RANKS))
        received = 2 * (trainers - 1) / trainers
        yield Case(f"sum_rows-{trainers}", summed, trainers, received)


def train(case: Case, data: Path, folder: Path, epochs: int, width: float) -> None:
    """Begin or continue a run, unless it is done."""
    if (folder / RECORD).exists():
        done = {record.epoch for record in read_run(folder, case.name).validation}
        if epochs in done:
            return
    command = case.command(data, folder, epochs, width)
    folder.mkdir(parents=True, exist_ok=True)
    sys.stderr.write(f"{' '.join(command)}\n")
    with (folder / "output.txt").open("a") as output:
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    if status.returncode:
        raise InputError(f"{case.name} ended with {status.returncode}: see {output.name}")


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Read the newest weights of a run."""
    path = find_checkpoint(folder, "latest")
    if path is None:
        raise InputError(f"{folder}: found no checkpoint")
    return dict(read_checkpoint(path).weights)


def are_equal(runs: Sequence[dict[str, np.ndarray]]) -> bool:
    """Return whether all runs have the same weights, bit for bit."""
    return all(
        np.array_equal(runs[0][name], array) for other in runs[1:] for name, array in other.items()
    )


def row(case: Case, run: Run, parameters: int) -> dict[str, object]:
    """State what a run came to."""
    last = run.validation[-1]
    return {
        "question": "learning",
        "name": case.name,
        "trainers": case.trainers,
        "epochs": last.epoch,
        "top1_error": last.top1_error,
        "validation_loss": last.loss,
        "received_bytes": round(case.received * 4 * parameters * last.step),
    }


def draw(runs: Sequence[tuple[Case, Run]], parameters: int, path: Path) -> None:
    """Draw errors of validation against pictures, of numbers and of exchanges, and bytes."""
    import matplotlib as mpl

    from benchmarks.draw import picture

    numbers = [(c, r) for c, r in runs if c.is_summed or "average" in c.name]
    exchanges = [(c, r) for c, r in runs if c.trainers == RANKS and not c.is_summed]
    panels = (
        (f"1, 2 and {RANKS} trainers", numbers, False),
        (f"Exchanges of {RANKS} trainers", exchanges, False),
        ("The same, against bytes", exchanges, True),
    )
    with mpl.rc_context(TYPE), picture(path, 3, 75, figsize=(11, 3.4), sharey=True) as axes:
        for ax, (title, drawn, by_bytes) in zip(axes, panels, strict=True):
            for style, (case, run) in zip(STYLES, drawn, strict=False):
                steps = np.array([record.step for record in run.validation])
                errors = [100 * record.top1_error for record in run.validation]
                amount = case.received * 4 * parameters / 1e9 if by_bytes else BATCH / 1e3
                line = style.line(len(steps), strong=True, hollow=case.is_summed)
                ax.plot(steps * amount, errors, label=case.name, **line)
            ax.set_title(title)
            ax.set_xlabel("GB that a trainer received" if by_bytes else "thousand pictures")
            if by_bytes:
                ax.set_xscale("log")
            elif drawn:
                ax.legend()
        axes[0].set_ylabel("top-1 error of validation, %")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, compare, draw; return the exit status: 1 where bits differ that must be equal."""
    parser = parser_of(__doc__, prog="python -m benchmarks.learning")
    known = {case.name: case for case in cases()}
    parser.add_argument("data", type=Path, help="prepared pictures of CIFAR-10")
    parser.add_argument("folder", type=Path, help="of the runs")
    parser.add_argument("--epochs", type=int, default=5, help="default 5")
    parser.add_argument("--width", type=float, default=0.25, help="factor on filters and units")
    parser.add_argument("--only", nargs="+", choices=known, default=[*known], metavar="CASE")
    chosen = parser.parse_args(arguments)
    wanted = [known[name] for name in chosen.only]
    folders = {case: chosen.folder / case.name for case in wanted}
    for case, folder in folders.items():
        train(case, chosen.data, folder, chosen.epochs, chosen.width)
    runs = [(case, read_run(folder, case.name)) for case, folder in folders.items()]
    final = {case: weights(folder) for case, folder in folders.items()}
    parameters = sum(array.size for array in final[wanted[0]].values())
    rows = [row(case, run, parameters) for case, run in runs]
    for each in rows:
        print(json.dumps(each))
    shown = [{name: str(value) for name, value in each.items()} for each in rows]
    keys = ("name", "top1_error", "validation_loss", "received_bytes")
    lines = aligned([keys, *([each[key] for key in keys] for each in shown)], left={0})
    sys.stderr.write("\n".join(lines) + "\n")
    draw(runs, parameters, chosen.folder / "learning.png")
    equal = are_equal([arrays for case, arrays in final.items() if case.is_summed])
    if not equal:
        sys.stderr.write("error: weights by sum_rows differ between numbers of trainers\n")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
