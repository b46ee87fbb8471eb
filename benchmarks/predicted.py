"""Are steps as long as `tandem cost` predicts them from a calibration of this machine?

    python -m benchmarks.predicted

The machine is measured once, as by ``tandem cost --calibrate``. Then train.py trains AlexNet,
ResNet-50 and VGG-16 on noise, with one trainer, and with two that exchange parameters or gradients;
the medians of their steps, from ``trace: steps``, are compared with predictions.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Comparison, Figure, Found, Measured, compare, run
from benchmarks.pictures import write_data_folder
from benchmarks.team import run_until
from tandem.config.schema import Config
from tandem.cost.calibrate import calibrate
from tandem.cost.machine import Machine
from tandem.cost.predict import Exchange, Predictor
from tandem.cost.steps import trainer_step
from tandem.trace.chrome import read_trace
from tandem.trace.merge import trace_file
from tandem.trace.spans import STEP, spans_of

LIMIT = 15.0  # percent of the measured step
CLASSES, STORED = 1000, 256  # of the data set; side of its pictures, pixels
_WARMUPS, _TIMEOUT = 3, 600  # steps; seconds


@dataclass(frozen=True)
class Case:
    """A network, with images per trainer and step."""

    name: str
    network: str  # "module:class"
    batch_size: int
    crop_size: int = 224
    width: float = 1.0


CASES = (
    Case("AlexNet", "alex_net:AlexNet", 64, 227),
    Case("ResNet-50", "tandem.models.resnet:ResNet50", 16),
    Case("VGG-16", "tandem.models.vgg:VGG16", 8),
)
RUNS = ((1, "average"), (2, "average"), (2, "gradients"))  # trainers, and what they exchange


def answer(
    rounds: int, cases: Sequence[Case] = CASES, machine: Machine | None = None
) -> Iterator[Found]:
    """Compare the predictions of each run with `rounds` of its steps."""
    machine = machine or calibrate()
    for case in cases:
        for trainers, exchange in RUNS:
            predicted = predicted_step(machine, case, trainers, exchange)
            yield from compared(
                case, trainers, exchange, predicted, steps(case, trainers, exchange, rounds)
            )


def compared(
    case: Case, trainers: int, exchange: str, predicted: float, measured: Sequence[float]
) -> Iterator[Comparison | Figure]:
    """Yield the ratio of a prediction to the median of what was measured, and its error."""
    together = f"{trainers} trainers, exchange: {exchange}" if trainers > 1 else "1 trainer"
    question = f"a step of {case.name}, {case.batch_size} images per trainer"
    peer = Measured("measured", tuple(measured))
    ours = Measured(f"{together}, predicted", (predicted,) * len(measured))
    ratio = compare(question, ours, peer, "time")
    yield ratio
    error = 100 * abs(ratio.ratio - 1)
    yield Figure(question, f"{together}, error", error, "%", LIMIT)


def predicted_step(machine: Machine, case: Case, trainers: int, exchange: str) -> float:
    """Return the seconds of a step, as `tandem cost` predicts them."""
    config = Config(
        network=case.network,
        crop_size=case.crop_size,
        width=case.width,
        batch_size=case.batch_size,
        exchange=exchange,
    )
    step = trainer_step(config, CLASSES)
    return Predictor(step, machine, Exchange(exchange), trainers).predict(trainers).step


def steps(case: Case, trainers: int, exchange: str, rounds: int) -> list[float]:
    """Train on noise until enough steps are traced; return their seconds, of the first trainer."""
    window = (_WARMUPS, _WARMUPS + rounds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = case.batch_size * trainers
        data = write_data_folder(
            folder / "data", images, STORED, CLASSES, repeat=2 * window[1], per_file=images
        )
        traces = [folder / "run" / trace_file(rank) for rank in range(trainers)]
        settings = {
            "network": [case.network],
            "data_folder": [data],
            "weights_dir": [folder / "run"],
            "crop_size": [case.crop_size],
            "width": [case.width],
            "batch_size": [case.batch_size],
            "devices": ["cpu"] * trainers,
            "exchange": [exchange],
            "trace": ["steps"],
            "trace_steps": window,
        }
        words = [str(w) for key, values in settings.items() for w in (f"--{key}", *values)]
        run_until(
            lambda: all(_recorded_steps(path) == rounds for path in traces),
            [sys.executable, "train.py", *words],
            _TIMEOUT,
        )
        found = spans_of(read_trace(traces[0]))
    return [span.seconds for span in found if span.name == STEP]


def _recorded_steps(path: Path) -> int:
    """Count the steps in a trace that may not be there yet; it grows, and is always whole."""
    return read_trace(path).processes[0].recorded_steps if path.exists() else 0


if __name__ == "__main__":
    raise SystemExit(run(__doc__, answer, rounds=10))
