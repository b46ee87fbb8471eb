"""Classification of pictures by a checkpoint; imports PyTensor and PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

from tandem.artifacts.trained_network import load_network
from tandem.backend import device_mode, device_shared
from tandem.data.augment import Crop, ten_crops
from tandem.data.class_names import imagenet_names
from tandem.data.decode import BadPictureError, decode_picture
from tandem.data.manifest import Resize
from tandem.data.safe_io import read_bytes
from tandem.errors import InputError
from tandem.layers.network import ALEXNET, Network
from tandem.ops import crop_mirror

# The largest pictures of ImageNet have about 20 MB.
MOST_BYTES = 1 << 28


@dataclass(frozen=True)
class Guess:
    """A predicted class."""

    number: int  # from 0
    wnid: str | None  # WordNet ID, or the name of the class's folder of pictures, if known
    name: str  # ImageNet's words for the ID, else the ID, else its number
    probability: float


class Classifier:
    """A trained network that classifies pictures.

    Parameters
    ----------
    network : Network
        With trained values.
    mean : float32 (3, S, S)
        The mean image of the training pictures. Pictures are resized to its size, `image_size`,
        less the border.
    wnids : sequence of str, optional
        The classes by name, in order.
    ten_crops : bool
        Average the predictions over ten crops (the four corners, the centre, and all five
        mirrored) as in Krizhevsky, Sutskever, Hinton 2012, section 4.1; otherwise use the centre
        alone, as in validation.
    device : str
        "cpu" or "cuda:0" and so on.
    resize : str
        How the training pictures were made squares, and how `prepare` makes them so.
    pad : int
        Pixels of the training pictures' border on each side. `prepare` adds it, in the colour that
        it has in the mean image.
    """

    def __init__(
        self,
        network: Network,
        mean: np.ndarray,
        wnids: Sequence[str] | None = None,
        ten_crops: bool = False,
        device: str = "cpu",
        resize: Resize = "squash",
        pad: int = 0,
    ) -> None:
        self.image_size, self.resize, self.pad = mean.shape[-1], resize, pad
        # uint8 (row, column, RGB); its border is that of every picture
        self.mean_picture = np.rint(mean.transpose(1, 2, 0)).astype(np.uint8)
        # (row, column, mirrored) of the windows of each picture
        self.crops = _crops(self.image_size, network.crop_size, ten_crops)
        starts = [row for row, _, _ in self.crops]
        # of rows and columns alike, what is seen of a picture
        self.window = slice(min(starts), max(starts) + int(network.crop_size))
        self._wnids, self._names = wnids, imagenet_names()
        self._function = _compiled(network, mean, device)

    @classmethod
    def load(
        cls,
        weights: str | Path,
        mean: str | Path | None = None,
        ten_crops: bool = False,
        device: str = "cpu",
        network: str = ALEXNET,
        layers: Sequence[str] = (),
    ) -> "Classifier":
        """Load a classifier from a checkpoint.

        `mean` is the mean image, .npy; by default that of the run's data set, if it still exists.
        `network` is "module:class", which a graph does not need, and `layers` are "module:function"
        of the lowering of each layer of the user's own in a graph. Raises InputError if a file is
        missing or damaged, if the mean image is too small or unknown, or if the network's input is
        no pictures.
        """
        loaded = load_network(Path(weights), None if mean is None else Path(mean), network, layers)
        about = loaded.description
        if loaded.mean is None:
            raise InputError(
                f"{weights}: found a network of rows of numbers, expected one of pictures; its "
                "predictions are those of tandem.keras.load_model(path).predict"
            )
        found = cls(
            loaded.network, loaded.mean, about.wnids, ten_crops, device, about.resize, about.pad
        )
        if found.window.start < about.pad and not loaded.mean.any():
            raise InputError(
                f"{weights}: found a border of {about.pad} pixels in its training pictures and no "
                "mean image, which has its colour; expected a classification by the centre alone, "
                "within the border"
            )
        return found

    def classify(
        self, pictures: Sequence[str | Path | bytes], top: int = 5
    ) -> list[tuple[Guess, ...]]:
        """Classify pictures, files or their content, all at once: `top` guesses for each.

        The most probable guess is the first. Raises BadPictureError if a picture cannot be read or
        decoded, and InputError if the network's output is not a number.
        """
        if not pictures:
            return []
        return self.guesses(np.stack([self.prepare(picture) for picture in pictures]), top)

    def prepare(self, picture: str | Path | bytes) -> np.ndarray:
        """Decode and resize a picture as the training pictures were: uint8 (row, column, RGB).

        Raises BadPictureError for a picture that cannot be read or decoded.
        """
        if isinstance(picture, bytes):
            return self._decode(picture)
        try:
            return self._decode(read_bytes(Path(picture), MOST_BYTES))
        except (OSError, ValueError, BadPictureError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadPictureError(f"{picture}: {reason}") from None

    def _decode(self, content: bytes) -> np.ndarray:
        side, pad = self.image_size, self.pad
        square = decode_picture(content, side - 2 * pad, self.resize)
        if not pad:
            return square
        prepared = np.empty((side, side, 3), np.uint8)
        prepared[...] = self.mean_picture[0, 0]
        prepared[pad:-pad, pad:-pad] = square
        return prepared

    def guesses(self, prepared: np.ndarray, top: int = 5) -> list[tuple[Guess, ...]]:
        """Classify pictures from `prepare`, uint8 (picture, row, column, RGB).

        Guesses are the most probable first; on ties the lower class.
        """
        return [
            tuple(self._guess(int(number), row) for number in np.argsort(-row, kind="stable")[:top])
            for row in self.probabilities(prepared)
        ]

    def probabilities(self, prepared: np.ndarray) -> np.ndarray:
        """Compute the probability of every class, averaged over the crops: float32 (n, class).

        `prepared` is uint8 (picture, row, column, RGB). Raises InputError if the output is not
        finite.
        """
        count, crops = len(prepared), len(self.crops)
        origins = np.array([(row, column) for row, column, _ in self.crops], np.int64)
        mirrored = np.array([mirror for _, _, mirror in self.crops], np.uint8)
        found = self._function(
            np.repeat(prepared, crops, axis=0),
            np.tile(origins, (count, 1)),
            np.tile(mirrored, count),
        )
        if not np.isfinite(found).all():
            raise InputError("the network's output is not finite: these weights cannot be used")
        return found.reshape(count, crops, -1).mean(axis=1)

    def _guess(self, number: int, probabilities: np.ndarray) -> Guess:
        wnid = None if self._wnids is None else self._wnids[number]
        name = f"class {number}" if wnid is None else self._names.get(wnid, wnid)
        return Guess(number, wnid, name, float(probabilities[number]))


def _crops(image_size: int, crop_size: int, ten: bool) -> tuple[Crop, ...]:
    centre = (image_size - crop_size) // 2
    return ten_crops(image_size, crop_size) if ten else ((centre, centre, False),)


def _compiled(network: Network, mean: np.ndarray, device: str) -> Any:
    """Compile: pictures, origins and mirror flags (a row for each crop) to probabilities."""
    side = mean.shape[-1]
    pictures = pt.tensor("pictures", dtype="uint8", shape=(None, side, side, 3))
    origins = pt.tensor("origins", dtype="int64", shape=(None, 2))
    mirrored = pt.tensor("mirrored", dtype="uint8", shape=(None,))
    images = crop_mirror(
        pictures,
        device_shared(mean.astype(network.dtype), name="mean", device=device),
        origins,
        mirrored,
        crop_size=network.crop_size,
        dtype=network.dtype,
    )
    # Constants, whose best order in memory is found once.
    values: Any = {v: pt.constant(v.get_value(borrow=True)) for v in network.parameters.values()}
    return pytensor.function(
        [pictures, origins, mirrored],
        network.probabilities(network.logits(images, None)),
        givens=values,
        mode=device_mode(device),
        on_unused_input="ignore",  # what only an auxiliary head has
        name="classify",
    )
