"""One picture: every kind that is found in the wild, and those that cannot be decoded."""

import io
import math
import random
from typing import Any, get_args

import numpy as np
import pytest
from PIL import Image

from tandem.data import decode
from tandem.data.decode import BadPictureError, decode_picture
from tandem.data.manifest import Resize

SIZE = 8


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def file_of(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def exact(content: bytes) -> np.ndarray:
    """Resize to the picture's own size, which changes no pixel."""
    return decode_picture(content, SIZE)


def bilinear_by_loops(pixels: np.ndarray, size: int) -> np.ndarray:
    """Weigh source pixels by a triangle as wide as the larger pixel, in each direction."""

    def weights(length: int, i: int) -> list[float]:
        scale = length / size
        centre, support = (i + 0.5) * scale, max(scale, 1.0)
        found = [max(0.0, 1 - abs(j + 0.5 - centre) / support) for j in range(length)]
        return [weight / math.fsum(found) for weight in found]

    rows, columns, channels = pixels.shape
    result = np.zeros((size, size, channels))
    for i in range(size):
        for j in range(size):
            for row, row_weight in enumerate(weights(rows, i)):
                for column, column_weight in enumerate(weights(columns, j)):
                    result[i, j] += row_weight * column_weight * pixels[row, column]
    return result


@pytest.mark.parametrize("shape", [(20, 11), (5, 3), (4, 19), (8, 8), (1, 1)])
def test_a_picture_is_squashed_whole(shape: tuple[int, int]) -> None:
    pixels = noise(*shape, 3)
    found = decode_picture(file_of(Image.fromarray(pixels)), SIZE)
    assert found.dtype == np.uint8
    assert found.shape == (SIZE, SIZE, 3)
    # Pillow rounds to bytes between the directions.
    np.testing.assert_allclose(found, bilinear_by_loops(pixels, SIZE), atol=1.01)


@pytest.mark.parametrize(
    "shape", [(20, 11), (5, 3), (4, 19), (8, 8), (8, 21), (13, 12), (1, 1), (500, 375), (333, 500)]
)
def test_the_middle_square_is_kept(shape: tuple[int, int]) -> None:
    """The picture is resized with its proportions, then cropped (the paper, section 2)."""
    pixels = noise(*shape, 3)
    found = decode_picture(file_of(Image.fromarray(pixels)), SIZE, "shorter_side")
    shorter = min(shape)
    rows, columns = (math.floor(side * SIZE / shorter + 0.5) for side in shape)
    assert min(rows, columns) == SIZE
    whole = Image.fromarray(pixels).resize((columns, rows), Image.Resampling.BILINEAR)
    top, left = (rows - SIZE) // 2, (columns - SIZE) // 2
    expected = np.asarray(whole)[top : top + SIZE, left : left + SIZE]
    np.testing.assert_allclose(found, expected.astype(float), atol=1)
    assert (found == expected).mean() > 0.7
    squashed = decode_picture(file_of(Image.fromarray(pixels)), SIZE)
    assert (found != squashed).any() == (rows != columns)


def test_a_long_picture_takes_no_more_memory() -> None:
    """Resized whole, it would have 65,000 million pixels."""
    long = Image.new("RGB", (1_000_000, 1), (7, 8, 9))
    found = decode_picture(file_of(long), 256, "shorter_side")
    assert found.shape == (256, 256, 3)
    assert (found == (7, 8, 9)).all()


def test_a_jpeg_is_decoded_at_full_size() -> None:
    content = file_of(Image.fromarray(noise(64, 80, 3)), "JPEG", quality=90)
    with Image.open(io.BytesIO(content)) as image:
        expected = np.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(decode_picture(content, SIZE), expected)


@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_grey_gets_three_channels(format: str) -> None:
    grey = np.full((SIZE, SIZE), 77, np.uint8)
    assert (exact(file_of(Image.fromarray(grey), format)) == 77).all()
    for varied, unit in ((noise(SIZE, SIZE), 1), (noise(SIZE, SIZE) > 127, 255)):
        expected = np.stack([varied * np.uint8(unit)] * 3, axis=-1)
        np.testing.assert_array_equal(exact(file_of(Image.fromarray(varied))), expected)


def test_of_16_bit_grey_the_high_byte_is_kept() -> None:
    deep = np.random.default_rng(0).integers(0, 1 << 16, (SIZE, SIZE), np.uint16)
    deep[0, :4] = (0, 255, 256, 65_535)
    found = exact(file_of(Image.fromarray(deep)))
    assert found[0, :4, 0].tolist() == [0, 0, 1, 255]
    np.testing.assert_array_equal(found, np.stack([deep // 256] * 3, axis=-1))


def test_cmyk_is_converted() -> None:
    cyan = Image.new("CMYK", (SIZE, SIZE), (255, 0, 0, 0))
    found = exact(file_of(cyan, "JPEG", quality=100)).astype(int)
    assert np.abs(found - (0, 255, 255)).max() <= 3


def test_a_palette_is_looked_up() -> None:
    palette = Image.fromarray((noise(SIZE, SIZE) % 4).astype(np.uint8), "P")
    colours = noise(4, 3)
    palette.putpalette(colours.tobytes())
    expected = colours[np.asarray(palette)]
    np.testing.assert_array_equal(exact(file_of(palette)), expected)
    np.testing.assert_array_equal(exact(file_of(palette, transparency=0)), expected)


def test_alpha_is_dropped_without_blending() -> None:
    pixels = noise(SIZE, SIZE, 4)
    pixels[:4, :, 3] = 0
    np.testing.assert_array_equal(exact(file_of(Image.fromarray(pixels))), pixels[..., :3])
    grey = noise(SIZE, SIZE, 2)
    found = exact(file_of(Image.fromarray(grey)))
    np.testing.assert_array_equal(found, np.repeat(grey[..., :1], 3, axis=-1))


@pytest.mark.parametrize("orientation", [3, 6, 8])
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_orientation_is_ignored(orientation: int, format: str) -> None:
    image = Image.fromarray(noise(16, 8, 3))
    exif = Image.Exif()
    exif[0x0112] = orientation
    np.testing.assert_array_equal(
        exact(file_of(image, format, exif=exif)), exact(file_of(image, format))
    )


def test_of_an_animation_the_first_picture_is_taken() -> None:
    first, second = (Image.new("RGB", (SIZE, SIZE), colour) for colour in ("red", "blue"))
    content = file_of(first, "GIF", save_all=True, append_images=[second])
    assert (exact(content) == (255, 0, 0)).all()


def test_other_formats_of_the_web_are_read() -> None:
    image = Image.fromarray(noise(SIZE, SIZE, 3))
    np.testing.assert_array_equal(exact(file_of(image, "BMP")), np.asarray(image))
    webp = file_of(image, "WEBP", lossless=True)
    np.testing.assert_array_equal(exact(webp), np.asarray(image))


WHOLE = {
    "JPEG": file_of(Image.fromarray(noise(64, 64, 3)), "JPEG"),
    "PNG": file_of(Image.fromarray(noise(64, 64, 3)), "PNG"),
}
BAD = {
    "empty": b"",
    "garbage": b"this is not a picture",
    "a page of the web": b"<html>404</html>",
    "half a JPEG": WHOLE["JPEG"][: len(WHOLE["JPEG"]) // 2],
    "the head of a JPEG": WHOLE["JPEG"][:20],
    "half a PNG": WHOLE["PNG"][: len(WHOLE["PNG"]) // 2],
    "a damaged PNG": WHOLE["PNG"][:60] + b"\0" * 40 + WHOLE["PNG"][100:],
    "TIFF": file_of(Image.fromarray(noise(8, 8, 3)), "TIFF"),
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n",
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_picture_has_a_reason_in_one_line(kind: str) -> None:
    reasons = set()
    for _ in range(2):
        with pytest.raises(BadPictureError) as caught:
            decode_picture(BAD[kind], SIZE)
        reasons.add(str(caught.value))
    (reason,) = reasons
    assert reason.strip() == reason != ""
    assert reason.isprintable()
    assert "0x" not in reason


def outcome(content: bytes, resize: Resize = "squash") -> bytes | str:
    try:
        return decode_picture(content, 32, resize).tobytes()
    except BadPictureError as reason:
        return str(reason)


# Of Pillow, the first component's factors, and those of 4:4:0 and 4:1:1, which Pillow cannot write.
SAMPLINGS = (
    ("4:4:4", b"\x11", b"\x11"),
    ("4:2:2", b"\x21", b"\x12"),
    ("4:2:0", b"\x22", b"\x41"),
)


def jpegs() -> dict[str, bytes]:
    """JPEGs of every kind that Pillow writes, whole, damaged and with more than a picture."""
    found = {}
    for rows, columns in ((1, 1), (7, 3), (64, 64), (61, 97), (375, 500)):
        ramp = np.add.outer(np.arange(rows), 2 * np.arange(columns))[..., None] * (1, 2, 3) % 256
        image = Image.fromarray(((ramp + noise(rows, columns, 3) // 4) % 256).astype(np.uint8))
        size = f"{columns} x {rows}"
        for progressive in (False, True):
            for sampling, factors, others in SAMPLINGS:
                content = file_of(image, "JPEG", subsampling=sampling, progressive=progressive)
                found[f"usual {size} {sampling} {progressive}"] = content
                # As many blocks in another order, at 64 x 64 pixels.
                other = content.replace(b"\x01" + factors + b"\0\x02", b"\x01" + others + b"\0\x02")
                found[f"usual {size} {others.hex()} {progressive}"] = other
        found[f"usual {size} grey"] = file_of(image.convert("L"), "JPEG", quality=30)
        found[f"usual {size} restarts"] = file_of(image, "JPEG", restart_marker_blocks=1)
        found[f"usual {size} comment"] = file_of(image, "JPEG", comment=b"some", dpi=(72, 72))
        found[f"usual {size} RGB"] = file_of(image, "JPEG", keep_rgb=True, quality=100)
        found[f"{size} CMYK"] = file_of(image.convert("CMYK"), "JPEG")
        found[f"{size} profile"] = file_of(image, "JPEG", icc_profile=bytes(70_000))
        exif = Image.Exif()
        exif[0x0112] = 6
        found[f"{size} EXIF"] = file_of(image, "JPEG", exif=exif)
        found[f"{size} two"] = file_of(image, "MPO", save_all=True, append_images=[image])
        for progressive in (False, True):
            whole = file_of(image, "JPEG", progressive=progressive)
            frame = whole.index(b"\xff\xc2" if progressive else b"\xff\xc0")
            name = f"{size} {progressive}"
            found[f"usual {name} more"] = whole + b"more" + whole
            found[f"{name} fill"] = whole[:2] + b"\xff\xff" + whole[2:]
            found[f"{name} before"] = b"before" + whole
            found[f"{name} 12 bits"] = whole[: frame + 4] + b"\x0c" + whole[frame + 5 :]
            arithmetic = bytes([whole[frame + 1] + 8 + 1 - progressive])  # SOF9 or SOF10
            found[f"{name} arithmetic"] = whole[: frame + 1] + arithmetic + whole[frame + 2 :]
            if progressive:
                found[f"{name} many scans"] = whole + b"\xff\xda" * 65
            for end in (-2, -1, -40, len(whole) // 2, frame + 6, frame + 12):
                found[f"{name} until {end}"] = whole[:end]
    return found


def damaged(content: bytes, generator: random.Random) -> bytes:
    """Return it with some octets changed, most of them in the header."""
    octets = bytearray(content)
    for _ in range(generator.choice((1, 2, 5))):
        end = generator.choice((len(octets), min(len(octets), 700)))
        octets[generator.randrange(end)] = generator.choice((0, 0xFF, generator.randrange(256)))
    return bytes(octets)


def test_simplejpeg_decodes_as_pillow_does(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("simplejpeg", reason="simplejpeg is not installed")
    plain, decoded = decode._simplejpeg(), []
    assert plain is not None
    kinds, generator = jpegs(), random.Random(0)
    small = [content for content in kinds.values() if len(content) < 8000]
    kinds |= {f"damaged {i}": damaged(generator.choice(small), generator) for i in range(400)}

    def spy(content: bytes) -> np.ndarray:
        picture = plain(content)
        decoded.append(kind)
        return picture

    for kind, content in kinds.items():
        for resize in get_args(Resize):
            monkeypatch.setattr(decode, "_simplejpeg", lambda: None)
            expected = outcome(content, resize)
            monkeypatch.setattr(decode, "_simplejpeg", lambda: spy)
            assert outcome(content, resize) == expected, kind
    undamaged = {kind for kind in decoded if not kind.startswith("damaged")}
    assert not {kind for kind in undamaged if not kind.startswith("usual")}
    assert undamaged >= {kind for kind in kinds if kind.startswith("usual 64 x 64")}
