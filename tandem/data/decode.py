"""Decoding of picture files of any kind to squares of RGB."""

import functools
import io
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError, features

from tandem.data.manifest import Resize

Box = tuple[float, float, float, float]
"""What is resized: left, top, right and bottom, as in Pillow's ``resize``."""

Resample = Callable[[Image.Image | np.ndarray, int, Box | None], np.ndarray]
"""Resizes a picture in RGB, or what is in its box, as `resize_by_pillow` does."""

# A subset of Pillow's formats: EPS starts another program, and TIFF rotates pictures by their
# orientation.
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP")

# Suffixes of files that are listed as pictures, in lower case.
PICTURE_SUFFIXES = frozenset((".jpeg", ".jpg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".webp"))


MOST_PICTURE_BYTES = 64 << 20
"""Bytes of a picture file; the largest of ImageNet has 17 MB."""

_MOST_SECONDS = 10.0  # of processor time for a picture; 178 million pixels, Pillow's limit, take 3
# Of larger pictures, copies between libraries take longer than they save.
_MOST_PIXELS = 1 << 22
_MOST_SCANS = 64  # of a progressive JPEG; there are about ten
_BASELINE, _PROGRESSIVE, _SCAN = 0xC0, 0xC2, 0xDA
_TABLES = (0xC4, 0xDB, 0xDD, 0xFE)  # with the restart interval and comments
_APPLICATIONS = (0xE0, 0xEE)  # JFIF and Adobe, which name the colours


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
        if (jpeg := _decode_jpeg(content)) is not None:
            return resample(jpeg, size, _box(jpeg.shape[1::-1], size, resize))
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


def _decode_jpeg(content: bytes) -> np.ndarray | None:
    """Decode a usual JPEG to uint8 (row, column, RGB); None where Pillow is to decide."""
    decode = _simplejpeg()
    try:
        return decode(content) if decode is not None and _is_usual(content) else None
    except (IndexError, ValueError, struct.error):  # simplejpeg also raises what it warns of
        return None


def _is_usual(content: bytes) -> bool:
    """Return whether a JPEG is baseline or progressive, of 8 bits and one or three components.

    Not where its header has more than decoding needs, such as EXIF, which Pillow reads and may
    refuse, nor where many scans could take long.
    """
    at, components, progressive = 2, 0, False
    while content.startswith(b"\xff\xd8") and content[at] == 0xFF:
        kind, length = struct.unpack_from(">xBH", content, at)
        if kind == _SCAN:
            if progressive:
                return content.count(b"\xff\xda") <= _MOST_SCANS
            return content[at + 4] == components
        if kind in (_BASELINE, _PROGRESSIVE):
            bits, rows, columns, components = struct.unpack_from(">BHHB", content, at + 4)
            progressive = kind == _PROGRESSIVE
            if bits != 8 or components not in (1, 3) or rows * columns > _MOST_PIXELS:
                return False
        elif kind not in _TABLES and (kind not in _APPLICATIONS or length < 14):
            return False
        at += 2 + length
    return False


@functools.cache
def _simplejpeg() -> Callable[..., Any] | None:
    """Find simplejpeg's function; None where Pillow's bits are not libjpeg-turbo's as well."""
    try:
        from simplejpeg import decode_jpeg
    except ImportError:
        return None
    return decode_jpeg if features.check("libjpeg_turbo") else None


def too_large(nbytes: int, most: int = MOST_PICTURE_BYTES) -> str:
    """Why a file of so many bytes is not read."""
    return f"found {nbytes} bytes, expected at most {most}"


def _box(sides: tuple[int, ...], size: int, resize: Resize) -> Box | None:
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
