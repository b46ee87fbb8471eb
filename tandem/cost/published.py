"""Theano-MPI's published figures (Ma, Mao, Taylor 2016, arXiv 1605.08325)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedNetwork:
    """A network trained by Theano-MPI on eight GPUs."""

    name: str
    # GoogLeNet's include the auxiliary classifiers; the paper does not state if it trained them.
    parameters: int
    batch: int  # images per rank and step
    exchange: dict[str, float]  # seconds of communication for 5,120 images, by all-reduce
    speedup: float  # of the slowest all-reduce over one GPU

    @property
    def steps(self) -> float:
        """Number of steps of eight ranks for 5,120 images."""
        return 5120 / (8 * self.batch)

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
