"""One picture, as it is in the wild, to a square of RGB."""

import io

import numpy as np
from PIL import Image, UnidentifiedImageError

# Not every format that Pillow knows: some start other programs (EPS), and TIFF turns pictures by
# their orientation.
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP")

PICTURE_SUFFIXES = frozenset((".jpeg", ".jpg", ".png", ".gif", ".bmp", ".webp"))
"""Of the files that are taken for pictures, in small letters."""

# Decoded, converted and resized: what one picture holds at a time, and one to spare.
_BLOCKS_KEPT = 4


class BadPictureError(Exception):
    """A picture cannot be decoded; the message is the reason, in one line."""


def keep_memory() -> None:
    """Let Pillow use the memory of one picture for the next, at most 64 MB in all.

    By default it gives every block back to the system, and a sixth of the time for a small picture
    goes into getting it again, zeroed.
    """
    Image.core.set_blocks_max(_BLOCKS_KEPT)


def decode_picture(content: bytes, size: int) -> np.ndarray:
    """Decode a picture and decode_picture (not crop) it to a square.

    Grey and palette pictures get three channels, CMYK is converted, of 16-bit grey the high byte is
    kept, an alpha channel is dropped without blending (the colours under it stay), the orientation
    in EXIF is ignored, as is usual for ImageNet, and of an animation the first picture is taken.
    The suffix of the file's name plays no part.

    Parameters
    ----------
    content : bytes
        The file.
    size : int
        S, pixels.

    Returns
    -------
    uint8 (S, S, 3)
        (row, column, RGB), resized with Pillow's bilinear filter.

    Raises
    ------
    BadPictureError
        The picture cannot be decoded whole.
    """
    if not content:
        raise BadPictureError("the file is empty")
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            image.load()
            return np.asarray(_to_rgb(image).resize((size, size), Image.Resampling.BILINEAR))
    except MemoryError:
        raise
    except UnidentifiedImageError:
        # Pillow's own message has an address in it, another in every run.
        raise BadPictureError(f"not a picture in {', '.join(_FORMATS)}") from None
    except Exception as error:
        # Decoders raise OSError, SyntaxError, ValueError, struct.error, zlib.error and others.
        reason = " ".join(str(error).split())
        raise BadPictureError(f"{type(error).__name__}: {reason}") from None


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
