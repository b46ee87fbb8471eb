"""Decoding of picture files of any kind to squares of RGB."""

import io
import time
from collections.abc import Callable

import numpy as np
from PIL import Image, UnidentifiedImageError

from tandem.data.manifest import Resize

Box = tuple[float, float, float, float]
"""What is resized: left, top, right and bottom, as in Pillow's ``resize``."""

Resample = Callable[[Image.Image | np.ndarray, int, Box | None], np.ndarray]
"""Resizes a picture in RGB, or what is in its box, as `resize_by_pillow` does."""

# A subset of Pillow's formats: EPS starts another program, and TIFF rotates pictures by their
# orientation.
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP")

# Suffixes of files that are listed as pictures, in lower case.
PICTURE_SUFFIXES = frozenset((".jpeg", ".jpg", ".png", ".gif", ".bmp", ".webp"))


MOST_PICTURE_BYTES = 64 << 20
"""Bytes of a picture file; the largest of ImageNet has 17 MB."""

_MOST_SECONDS = 10.0  # of processor time for a picture; 178 million pixels, Pillow's limit, take 3
_MOST_PIXELS = 1 << 22  # copies of larger pictures out of Pillow take longer than they save


class BadPictureError(Exception):
    """A picture cannot be decoded; the message is the reason, in one line."""


class _Content(io.BytesIO):
    """The bytes of a picture, which Pillow reads piece by piece: junk may be read for minutes."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self._end = time.thread_time() + _MOST_SECONDS

    def read(self, size: int | None = -1, /) -> bytes:
        if time.thread_time() > self._end:
            raise BadPictureError(f"decoding takes more than {_MOST_SECONDS:g} s")
        return super().read(size)


def keep_memory() -> None:
    """Let Pillow reuse the memory of one picture for the next, at most 64 MB.

    By default it returns every block to the system; allocating zeroed memory again takes a sixth
    of the time of a small picture.
    """
    # One picture needs three blocks (decoded, converted, resized); one is spare.
    Image.core.set_blocks_max(4)


def resize_by_pillow(picture: Image.Image | np.ndarray, size: int, box: Box | None) -> np.ndarray:
    """Resize a picture in RGB to `size` rows and columns, uint8 (row, column, RGB)."""
    image = Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box))


def decode_picture(
    content: bytes, size: int, resize: Resize = "squash", resample: Resample = resize_by_pillow
) -> np.ndarray:
    """Decode a picture and make it a square of `size` rows and columns.

    With ``squash`` the whole picture is resized, and its proportions change. With ``shorter_side``
    it is resized so that its shorter side becomes `size` and the longer one is rounded, half up, to
    whole pixels; the square in the middle is kept. Of an odd number of pixels, one more is cut off
    on the right or at the bottom (Krizhevsky, Sutskever, Hinton 2012, section 2).

    Returns uint8 (row, column, RGB), resized with Pillow's bilinear filter; raises BadPictureError
    if the picture cannot be decoded completely, or only from more than `MOST_PICTURE_BYTES` or in
    more than ten seconds of processor time. Grey and palette pictures get three channels, CMYK
    is converted, the high byte of 16-bit grey is kept, an alpha channel is dropped without blending
    (the colours under it stay), the orientation in EXIF is ignored, as is usual for ImageNet, and
    the first picture of an animation is used. The file's suffix is ignored.
    """
    if not content:
        raise BadPictureError("the file is empty")
    if len(content) > MOST_PICTURE_BYTES:
        raise BadPictureError(too_large(len(content)))
    try:
        with Image.open(_Content(content), formats=_FORMATS) as image:
            image.load()
            large = image.width * image.height > _MOST_PIXELS
            resample = resize_by_pillow if large else resample
            return resample(_to_rgb(image), size, _box(image.size, size, resize))
    except (MemoryError, BadPictureError):
        raise
    except UnidentifiedImageError:
        # Pillow's own message contains an address, which differs between runs.
        raise BadPictureError(f"not a picture in {', '.join(_FORMATS)}") from None
    except Exception as error:
        # Decoders raise OSError, SyntaxError, ValueError, struct.error, zlib.error and others.
        reason = " ".join(str(error).split())
        raise BadPictureError(f"{type(error).__name__}: {reason}") from None


def too_large(nbytes: int, most: int = MOST_PICTURE_BYTES) -> str:
    """Why a file of so many bytes is not read."""
    return f"found {nbytes} bytes, expected at most {most}"


def _box(sides: tuple[int, int], size: int, resize: Resize) -> Box | None:
    """Return what becomes the square of `size`: all, or the middle at the shorter side's scale.

    Returns left, top, right and bottom in the picture's own pixels. Resizing this part alone takes
    memory that does not grow with the length of the picture, and gives the same to within 1, since
    Pillow takes these numbers in single precision.
    """
    if resize == "squash":
        return None
    shorter = min(sides)
    lengths = [(2 * side * size + shorter) // (2 * shorter) for side in sides]
    starts = [(length - size) // 2 for length in lengths]
    scales = [side / length for side, length in zip(sides, lengths, strict=True)]
    (left, top), (across, down) = starts, scales
    return left * across, top * down, (left + size) * across, (top + size) * down


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16"):
        # convert() would clip at 255 instead of scaling.
        high = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
        return Image.fromarray(high).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no known range")
    return image.convert("RGB")
