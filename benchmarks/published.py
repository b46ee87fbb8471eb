"""Theano-MPI's published figures, and a model of its machine that is fitted to them.

Predictions beside them:  python -m benchmarks.published [--network-bw BITS]

Two sets. A report (Ma, Mao, Taylor 2016, arXiv 1605.08325) has seconds of communication and
speed-ups of eight GPUs by three all-reduces. The README of github.com/uoguelph-mlrg/Theano-MPI has
seconds of computing and of communication on 1, 2, 4 and 8 GPUs, Tesla K80 by NCCL in float32. With
them speed-ups can be predicted from the computing of one GPU, or that by counted work and a rate
and a bandwidth that are fitted to it, and an exchange by the fitted model.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tandem.config.schema import make_config
from tandem.cost.exchange import Layout, Load, Rates, fit, load, seconds, speedup
from tandem.cost.machine import ASSUMED_BITS, ASSUMED_LATENCY, DEFAULT, Speed
from tandem.text_table import aligned

if TYPE_CHECKING:
    from tandem.cost.steps import TrainerStep

IMAGES = 5120  # to which all published seconds refer
_SOCKET = 4  # GPUs of one processor; eight have two, between which bytes go slowly
_NODE = 8


PARAMETERS = {
    "AlexNet": 60_965_224,
    # With the auxiliary classifiers; the report does not state if it trained them.
    "GoogLeNet": 13_378_280,
    "VGG-16": 138_357_544,
    "ResNet-50": 25_557_032,
}


@dataclass(frozen=True)
class PublishedNetwork:
    """A network trained by Theano-MPI on eight GPUs, in the report."""

    name: str
    batch: int  # images per rank and step
    exchange: dict[str, float]  # seconds of communication for 5,120 images, by all-reduce
    speedup: float  # of the slowest all-reduce over one GPU

    @property
    def parameters(self) -> int:
        return PARAMETERS[self.name]

    @property
    def steps(self) -> float:
        """Number of steps of eight ranks for 5,120 images."""
        return IMAGES / (8 * self.batch)

    @property
    def compute(self) -> float:
        """Seconds of one GPU for a step.

        From the slowest all-reduce, whose rounded value is the most precise: with T for 5,120
        images on one GPU, ``T / speedup = T / 8 + exchange``.
        """
        alone = max(self.exchange.values()) / (1 / self.speedup - 1 / 8)
        return alone / 8 / self.steps


THEANO_MPI = (
    PublishedNetwork("AlexNet", 128, {"ar": 2.01, "asa": 0.75, "asa16": 0.47}, 5.3),
    PublishedNetwork("GoogLeNet", 32, {"ar": 2.07, "asa": 1.96, "asa16": 1.76}, 7.1),
    PublishedNetwork("VGG-16", 32, {"ar": 41.4, "asa": 8.6, "asa16": 4.84}, 4.3),
)


GPUS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Timed:
    """A network trained by Theano-MPI on 1 to 8 GPUs, in its README."""

    name: str
    batch: int  # images per rank and step
    computing: tuple[float, ...]  # seconds for 5,120 images on each of `GPUS`
    communication: tuple[float, ...]  # likewise, beside it

    @property
    def parameters(self) -> int:
        return PARAMETERS[self.name]

    def steps(self, ranks: int) -> float:
        """Number of steps of so many ranks for 5,120 images."""
        return IMAGES / (ranks * self.batch)

    @property
    def compute(self) -> float:
        """Seconds of one GPU for a step."""
        return self.computing[0] / self.steps(1)

    @property
    def exchange(self) -> dict[int, float]:
        """Seconds of communication in a step, by number of GPUs."""
        pairs = zip(GPUS[1:], self.communication[1:], strict=True)
        return {ranks: spent / self.steps(ranks) for ranks, spent in pairs}

    @property
    def speedups(self) -> dict[int, float]:
        """The published speed-ups over one GPU, by number of GPUs."""
        rows = [*zip(GPUS, self.computing, self.communication, strict=True)][1:]
        return {ranks: self.computing[0] / (spent + sent) for ranks, spent, sent in rows}

    @property
    def step(self) -> "TrainerStep":
        """Return what one GPU computes in a step."""
        from tandem.cost.steps import trainer_step  # it imports PyTensor and PyTorch

        network, crop = _NETWORKS[self.name]
        settings = {"network": network, "crop_size": crop, "batch_size": self.batch}
        return trainer_step(make_config({**settings, "exchange": "gradients"}), classes=1000)


_NETWORKS = {  # class, crop size
    "AlexNet": ("alex_net:AlexNet", 227),
    "GoogLeNet": ("tandem.models.googlenet:GoogLeNet", 224),
    "VGG-16": ("tandem.models.vgg:VGG16", 224),
    "ResNet-50": ("tandem.models.resnet:ResNet50", 224),
}


def settings_of(network: "Timed", crop: int | None = None) -> list[str]:
    """Return a network and its crop, or another, for the command line of train.py."""
    name, published = _NETWORKS[network.name]
    return ["--network", name, "--crop_size", str(crop or published)]


TIMED = (
    Timed("AlexNet", 128, (20.50, 10.35, 5.13, 2.63), (0, 0.78, 0.54, 0.61)),
    Timed("GoogLeNet", 32, (63.89, 31.40, 15.51, 7.69), (0, 1.00, 0.71, 0.80)),
    Timed("VGG-16", 32, (343.37, 169.12, 86.97, 43.29), (0, 7.14, 4.80, 5.41)),
    Timed("VGG-16", 16, (358.29, 176.08, 90.44, 55.12), (0, 13.90, 9.28, 12.59)),
    Timed("ResNet-50", 64, (163.15, 80.09, 40.25, 20.12), (0, 0.81, 0.56, 0.57)),
)


def node_load(parameters: int, ranks: int) -> Load:
    """Return the load of averaging a vector over GPUs of one node, by a ring of NCCL.

    Up to four are on one processor. Eight are as two machines of four: the ring passes from one
    processor to the other. It adds while it passes on, so additions are no load of their own.
    """
    where = Layout(max(1, ranks // _SOCKET), min(ranks, _SOCKET))
    return replace(load("ar", parameters, where), added=0)


def node_rates(networks: Sequence[Timed] = TIMED) -> Rates:
    """Fit four rates to the communication of networks on 2, 4 and 8 GPUs."""
    loads = [node_load(network.parameters, ranks) for network in networks for ranks in GPUS[1:]]
    return fit(loads, [spent for network in networks for spent in network.exchange.values()])


def exchange_seconds(parameters: int, ranks: int, rates: Rates, bits: float) -> float:
    """Return the seconds of an exchange: within nodes, and between their leaders by ASA.

    Nodes are of eight GPUs, with a cable of `bits` per second between them.
    """
    if ranks == 1:
        return 0.0
    within = seconds(rates, node_load(parameters, min(ranks, _NODE)))
    if ranks <= _NODE:
        return within
    cable = Rates(steps_between=ASSUMED_LATENCY, bytes_between=8 / bits, added=0.0)
    return within + seconds(cable, load("asa", parameters, Layout(ranks // _NODE, 1)))


def gpu_speed(steps: "Sequence[TrainerStep]", measured: Sequence[float]) -> Speed:
    """Fit one rate and one bandwidth to the seconds of computing of networks."""

    def speed(logs: np.ndarray) -> Speed:
        rate, bandwidth = np.exp(logs).tolist()
        return Speed(trainers=1, threads=1, bandwidth=bandwidth, rates={DEFAULT: rate})

    def errors(logs: np.ndarray) -> np.ndarray:
        found = [sum(step.seconds(speed(logs))) for step in steps]
        return np.log(np.array(found) / np.array(measured))

    from scipy.optimize import least_squares  # slow to import

    # The steps of numerical derivatives are wide: a line's seconds are the larger of two.
    return speed(least_squares(errors, np.log([1e12, 1e11]), diff_step=1e-3).x)


RANKS = tuple(2**k for k in range(10))


@dataclass(frozen=True)
class Row:
    """Speed-ups of a network that are predicted, and the published one where there is one."""

    network: Timed
    ranks: int
    predicted: float  # from the published computing of one GPU
    counted: float  # from computing by counted work
    published: float | None = None


def rows(
    speed: Speed, steps: "Sequence[TrainerStep]", bits: float, ranks: Sequence[int] = RANKS
) -> Iterator[Row]:
    """Predict the speed-ups of every network of the README."""
    rates = node_rates()
    for network, step in zip(TIMED, steps, strict=True):
        counted = sum(step.seconds(speed))
        for number in ranks:
            exchange = exchange_seconds(network.parameters, number, rates, bits)
            yield Row(
                network,
                number,
                speedup(number, network.compute, exchange),
                speedup(number, counted, exchange),
                network.speedups.get(number),
            )


def report(bits: float = ASSUMED_BITS, ranks: Sequence[int] = RANKS) -> str:
    """Tables of computing and of speed-ups, beside the published ones.

    Above eight ranks the cables between nodes have `bits` per second.
    """
    steps = [network.step for network in TIMED]
    speed = gpu_speed(steps, [network.compute for network in TIMED])
    lines = [*_computing(speed, steps), "", *_speedups(speed, steps, bits, ranks)]
    return "\n".join(lines) + "\n"


def _computing(speed: Speed, steps: "Sequence[TrainerStep]") -> Iterator[str]:
    yield (
        f"computing of one GPU by counted work: {speed.rates[DEFAULT] / 1e12:.2f} TFLOP/s and "
        f"{speed.bandwidth / 1e9:.0f} GB/s, fitted"
    )
    cells = [("network", "predicted", "", "Theano-MPI")]
    for network, step in zip(TIMED, steps, strict=True):
        found, measured = sum(step.seconds(speed)), network.compute
        error = f"{found / measured - 1:+.1%}"
        cells.append((_title(network), f"{found:.3f} s", error, f"{measured:.3f} s"))
    yield from aligned(cells, left=range(1))


def _speedups(
    speed: Speed, steps: "Sequence[TrainerStep]", bits: float, ranks: Sequence[int]
) -> Iterator[str]:
    rates = node_rates()
    yield (
        "speed-up: exchange by four rates, fitted to the published communication "
        f"({1e-9 / rates.bytes_within:.2g} GB/s on a processor, {1e-9 / rates.bytes_between:.2g} "
        "GB/s between two); computing as published, and by counted work"
    )
    yield f"above eight ranks: nodes of eight GPUs, {bits / 1e9:g} Gbit/s between them, assumed"
    cells = [("network", "ranks", "predicted", "", "Theano-MPI", "counted", "")]
    near: list[bool] = []
    for row in rows(speed, steps, bits, ranks):
        error = published = counted = ""
        if row.published is not None:
            off, off_counted = (x / row.published - 1 for x in (row.predicted, row.counted))
            near += [abs(off) <= _NEAR, abs(off_counted) <= _NEAR]
            error, published, counted = f"{off:+.1%}", f"{row.published:.2f}", f"{off_counted:+.1%}"
        found = f"{row.predicted:.2f}", error, published, f"{row.counted:.2f}", counted
        cells.append((_title(row.network), f"{row.ranks}", *found))
    yield from aligned(cells, left=range(1))
    yield (
        f"{sum(near[::2])} of {len(near) // 2} are within {_NEAR:.0%} of the published ones, by "
        f"counted work {sum(near[1::2])}"
    )


_NEAR = 0.1


def _title(network: Timed) -> str:
    return f"{network.name}, {network.batch}"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--network-bw", type=float, default=ASSUMED_BITS, help="bit/s between machines"
    )
    print(report(parser.parse_args(words).network_bw), end="")


if __name__ == "__main__":
    main()
