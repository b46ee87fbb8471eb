"""From stored pictures to the network's input: crop, mirror, mean, colour noise, conversion."""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import disconnected_type, grad_not_implemented
from pytensor.graph.basic import Apply
from pytensor.tensor.variable import TensorVariable

from tandem.ops.base import TensorOp, Values, float_dtype, positive_int, same_length, tensor_input

_COLOURS = 3


class CropMirror(TensorOp):
    """Crop, mirror, subtract the mean image and add colours, as `crop_mirror` defines it.

    With `block` above 1 the result is ordered space-to-depth: a square of block x block pixels is
    one pixel, whose channels are, in this order, row and column in the square and colour. Pixels of
    squares that reach beyond the crop repeat its last row or column.
    """

    __props__ = ("crop_size", "cropped", "dtype", "block")

    def __init__(
        self, crop_size: int, cropped: bool = False, dtype: str = "float32", block: int = 1
    ) -> None:
        owner = type(self).__name__
        self.crop_size = positive_int(owner, "crop_size", crop_size)
        self.cropped = bool(cropped)
        self.dtype = float_dtype(owner, dtype)
        self.block = positive_int(owner, "block", block)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, rows and columns of an image."""
        side = -(-self.crop_size // self.block)
        return _COLOURS * self.block**2, side, side

    def make_node(
        self, pictures: Any, mean: Any, origins: Any, mirrored: Any, colours: Any = None
    ) -> Apply:
        pictures = tensor_input(self, "pictures", pictures, 4, ("uint8",))
        mean = tensor_input(self, "mean", mean, 3, (self.dtype,))
        origins = tensor_input(self, "origins", origins, 2, ("int64",))
        mirrored = tensor_input(self, "mirrored", mirrored, 1, ("uint8",))
        batch, picture_rows, picture_columns, picture_colours = pictures.type.shape
        mean_colours, mean_rows, mean_columns = mean.type.shape
        same_length(self, "colours", picture_colours, mean_colours, _COLOURS)
        same_length(self, "lengths of a crop's origin and 2", origins.type.shape[1], 2)
        self._check_sizes((picture_rows, picture_columns), (mean_rows, mean_columns))
        batch = same_length(
            self,
            "numbers of pictures, origins and mirror flags",
            batch,
            origins.type.shape[0],
            *mirrored.type.shape,
        )
        inputs = [pictures, mean, origins, mirrored]
        if colours is not None:
            colours = tensor_input(self, "colours", colours, 2, ("float32",))
            numbers = colours.type.shape
            batch = same_length(self, "numbers of pictures and added colours", batch, numbers[0])
            same_length(self, "lengths of an added colour and 3", numbers[1], _COLOURS)
            inputs.append(colours)
        shape = (batch, *self.image_shape)
        return Apply(self, inputs, [pt.tensor(dtype=self.dtype, shape=shape)])

    def _check_sizes(self, pictures: Sequence[int | None], mean: Sequence[int | None]) -> None:
        """Raise ValueError unless a picture has the size of the crop or of the mean image."""
        for picture_length, mean_length in zip(pictures, mean, strict=True):
            expected = self.crop_size if self.cropped else mean_length
            same_length(
                self,
                f"sides of a picture and of {'the crop' if self.cropped else 'the mean image'}",
                picture_length,
                expected,
            )
            if mean_length is not None and mean_length < self.crop_size:
                raise ValueError(
                    f"{self}: a crop of {self.crop_size} does not fit into a mean image of"
                    f" {mean_length}"
                )

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        pictures, mean, origins, mirrored, *added = inputs
        self._check_sizes(pictures.shape[1:3], mean.shape[1:])
        if (origins < 0).any() or (origins + self.crop_size > mean.shape[1:]).any():
            raise ValueError(
                f"{self}: a crop's origin lies outside [0, side - {self.crop_size}] of a mean image"
                f" of {mean.shape[1]} x {mean.shape[2]}: {origins.tolist()}"
            )
        images = np.empty((len(pictures), _COLOURS, self.crop_size, self.crop_size), self.dtype)
        for image, picture, (row, column), mirror in zip(
            images, pictures, origins, mirrored, strict=True
        ):
            window = np.s_[:, row : row + self.crop_size, column : column + self.crop_size]
            step = -1 if mirror else 1
            pixels = picture.transpose(2, 0, 1)
            if not self.cropped:
                pixels = pixels[window][:, :, ::step]
            np.subtract(pixels.astype(self.dtype), mean[window][:, :, ::step], out=image)
        for colours in added:
            images += colours.astype(self.dtype)[:, :, np.newaxis, np.newaxis]
        output_storage[0][0] = images if self.block == 1 else self._by_block(images)

    def _by_block(self, images: np.ndarray) -> np.ndarray:
        channels, side, _ = self.image_shape
        missing = (0, side * self.block - self.crop_size)
        padded = np.pad(images, ((0, 0), (0, 0), missing, missing), mode="edge")
        squares = padded.reshape(len(images), _COLOURS, side, self.block, side, self.block)
        return squares.transpose(0, 3, 5, 1, 2, 4).reshape(len(images), channels, side, side)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        return [(shapes[0][0], *(pt.constant(n, dtype="int64") for n in self.image_shape))]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[source is node.inputs[1]] for source in node.inputs]

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        no_gradient = grad_not_implemented(self, 1, inputs[1], "the mean image is not learned")
        after = [disconnected_type() for _ in inputs[2:]]
        return [disconnected_type(), no_gradient, *after]


def crop_mirror(
    pictures: Any,
    mean: Any,
    origins: Any,
    mirrored: Any,
    colours: Any = None,
    *,
    crop_size: int,
    cropped: bool = False,
    dtype: str = "float32",
) -> TensorVariable:
    """Take each picture's own window, mirrored if flagged, minus the mean, plus its colour.

    ``image[n, c, i, j] = dtype(pictures[n, r, s, c]) - mean[c, r, s]`` with ``r = row_n + i`` and
    ``s = column_n + j``, or ``s = column_n + crop_size - 1 - j`` where the picture is mirrored. The
    subtraction is done in `dtype`, once, so both ways of cropping give the same bits. Krizhevsky,
    Sutskever, Hinton 2012, sections 2 and 4.1. With `colours`, ``dtype(colours[n, c])`` is then
    added to every pixel.

    Parameters
    ----------
    pictures : uint8 (batch, row, column, RGB)
        Whole pictures; with `cropped`, crops already taken and mirrored by the loader, and only the
        mean's window is taken here.
    mean : dtype (RGB, row, column)
        The mean of whole pictures, in units of a pixel's 0 to 255.
    origins : int64 (batch, 2)
        Row and column of each window's upper left corner in the whole picture.
    mirrored : uint8 (batch,)
        1 where left and right are exchanged, else 0.
    colours : float32 (batch, RGB), optional
        Colour noise, see `tandem.data.augment.colour_offsets`.
    crop_size : int
        Side of the window, in pixels.

    Returns
    -------
    dtype (batch, RGB, crop_size, crop_size)

    Raises
    ------
    TypeError
        An input has another dtype or number of axes.
    ValueError
        Known shapes do not fit each other; when it runs, also a window outside the picture.
        On a GPU, and where the graph is compiled, windows are not checked.
    """
    return CropMirror(crop_size, cropped, dtype)(pictures, mean, origins, mirrored, colours)
