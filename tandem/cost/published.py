"""Theano-MPI's published figures, and a model of its machine that is fitted to them.

Two sets. A report (Ma, Mao, Taylor 2016, arXiv 1605.08325) has seconds of communication and
speed-ups of eight GPUs by three all-reduces. The README of github.com/uoguelph-mlrg/Theano-MPI has
seconds of computing and of communication on 1, 2, 4 and 8 GPUs, Tesla K80 by NCCL in float32; with
them speed-ups can be predicted: the computing of one GPU, and an exchange by the fitted model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tandem.cost.exchange import Layout, Load, Rates, fit, load, seconds, speedup
from tandem.cost.machine import ASSUMED_BITS, ASSUMED_LATENCY

IMAGES = 5120  # to which all published seconds refer
_SOCKET = 4  # GPUs of one processor; eight have two, between which bytes go slowly
_NODE = 8


@dataclass(frozen=True)
class PublishedNetwork:
    """A network trained by Theano-MPI on eight GPUs, in the report."""

    name: str
    # GoogLeNet's include the auxiliary classifiers; the paper does not state if it trained them.
    parameters: int
    batch: int  # images per rank and step
    exchange: dict[str, float]  # seconds of communication for 5,120 images, by all-reduce
    speedup: float  # of the slowest all-reduce over one GPU

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
    PublishedNetwork("AlexNet", 60_965_224, 128, {"ar": 2.01, "asa": 0.75, "asa16": 0.47}, 5.3),
    PublishedNetwork("GoogLeNet", 13_378_280, 32, {"ar": 2.07, "asa": 1.96, "asa16": 1.76}, 7.1),
    PublishedNetwork("VGG-16", 138_357_544, 32, {"ar": 41.4, "asa": 8.6, "asa16": 4.84}, 4.3),
)


@dataclass(frozen=True)
class Timed:
    """A network trained by Theano-MPI on 1 to 8 GPUs, in its README."""

    name: str
    parameters: int
    batch: int  # images per rank and step
    alone: float  # seconds for 5,120 images on one GPU
    together: dict[int, tuple[float, float]]  # by number of GPUs: computing, communication

    def steps(self, ranks: int) -> float:
        """Number of steps of so many ranks for 5,120 images."""
        return IMAGES / (ranks * self.batch)

    @property
    def compute(self) -> float:
        """Seconds of one GPU for a step."""
        return self.alone / self.steps(1)

    def speedup(self, ranks: int) -> float:
        """The published speed-up over one GPU."""
        return self.alone / sum(self.together[ranks])


TIMED = (
    Timed("AlexNet", 60_965_224, 128, 20.50, {2: (10.35, 0.78), 4: (5.13, 0.54), 8: (2.63, 0.61)}),
    Timed(
        "GoogLeNet", 13_378_280, 32, 63.89, {2: (31.40, 1.00), 4: (15.51, 0.71), 8: (7.69, 0.80)}
    ),
    Timed(
        "VGG-16",
        138_357_544,
        32,
        343.37,
        {2: (169.12, 7.14), 4: (86.97, 4.80), 8: (43.29, 5.41)},
    ),
    Timed(
        "VGG-16",
        138_357_544,
        16,
        358.29,
        {2: (176.08, 13.90), 4: (90.44, 9.28), 8: (55.12, 12.59)},
    ),
    Timed(
        "ResNet-50", 25_557_032, 64, 163.15, {2: (80.09, 0.81), 4: (40.25, 0.56), 8: (20.12, 0.57)}
    ),
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
    points = [(n, ranks, s) for n in networks for ranks, (_, s) in n.together.items()]
    loads = [node_load(network.parameters, ranks) for network, ranks, _ in points]
    return fit(loads, [spent / network.steps(ranks) for network, ranks, spent in points])


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


RANKS = tuple(2**k for k in range(10))


@dataclass(frozen=True)
class Row:
    """A speed-up that is predicted, and the published one where there is one."""

    network: Timed
    ranks: int
    predicted: float
    published: float | None = None

    @property
    def deviation(self) -> float | None:
        """Predicted over published, minus 1."""
        return None if self.published is None else self.predicted / self.published - 1


def rows(bits: float = ASSUMED_BITS, ranks: Sequence[int] = RANKS) -> Iterator[Row]:
    """Predict the speed-ups of every network of the README, by its computing on one GPU."""
    rates = node_rates()
    for network in TIMED:
        for number in ranks:
            exchange = exchange_seconds(network.parameters, number, rates, bits)
            published = network.speedup(number) if number in network.together else None
            predicted = speedup(number, network.compute, exchange)
            yield Row(network, number, predicted, published)


def report(bits: float = ASSUMED_BITS) -> str:
    """A line for each network and number of GPUs, and how far the nearest and farthest are."""
    found = [*rows(bits)]
    lines = [f"{'network':16}{'ranks':>6}{'predicted':>11}{'Theano-MPI':>12}{'deviation':>11}"]
    for row in found:
        name = f"{row.network.name}, {row.network.batch}"
        line = f"{name:16}{row.ranks:6}{row.predicted:11.2f}"
        if row.published is not None and row.deviation is not None:
            line += f"{row.published:12.2f}{row.deviation:+11.1%}"
        lines.append(line)
    rates = node_rates()
    deviations = [abs(row.deviation) for row in found if row.deviation is not None]
    near = sum(deviation <= 0.1 for deviation in deviations)
    lines += [
        f"{near} of {len(deviations)} speed-ups are within 10 % of the published ones",
        "computing: of one GPU, published; exchange: four rates fitted to the published seconds of "
        f"communication ({1e-9 / rates.bytes_within:.2g} GB/s on a processor, "
        f"{1e-9 / rates.bytes_between:.2g} GB/s between two)",
        f"above eight ranks: nodes of eight GPUs, an assumed {bits / 1e9:g} Gbit/s between them",
    ]
    return "\n".join(lines) + "\n"
