import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from tandem.backend import device_mode
from tandem.ops import CropMirror, crop_mirror
from tests.support.op_checks import check_shapes, evaluate, symbols

# stored side, crop
SIZES = [(1, 1), (5, 5), (7, 4), (8, 3)]


def minibatch(side, crop, dtype="float32", batch=6):
    """Pictures, a mean image, a window and a flag for each picture, the extreme ones among them."""
    rng = np.random.default_rng(side * 100 + crop)
    pictures = rng.integers(0, 256, (batch, side, side, 3), np.uint8)
    mean = rng.uniform(0, 255, (3, side, side)).astype(dtype)
    origins = rng.integers(0, side - crop + 1, (batch, 2), np.int64)
    origins[:2] = 0
    origins[2:4] = side - crop
    mirrored = np.arange(batch, dtype=np.uint8) % 2
    return pictures, mean, origins, mirrored


def images_by_loops(pictures, mean, origins, mirrored, crop):
    images = np.empty((len(pictures), 3, crop, crop), mean.dtype)
    for n, c, i, j in np.ndindex(images.shape):
        row = origins[n, 0] + i
        column = origins[n, 1] + (crop - 1 - j if mirrored[n] else j)
        images[n, c, i, j] = mean.dtype.type(pictures[n, row, column, c]) - mean[c, row, column]
    return images


def cropped_by_loops(pictures, origins, mirrored, crop):
    """What a loader that crops and mirrors leaves in the slot."""
    crops = np.empty((len(pictures), crop, crop, 3), np.uint8)
    for n, i, j, c in np.ndindex(crops.shape):
        column = origins[n, 1] + (crop - 1 - j if mirrored[n] else j)
        crops[n, i, j, c] = pictures[n, origins[n, 0] + i, column, c]
    return crops


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("side", "crop"), SIZES)
def test_images_are_bit_for_bit_what_loops_compute(side, crop, dtype, static):
    inputs = minibatch(side, crop, dtype)
    images = evaluate(CropMirror(crop, False, dtype), *inputs, static=static)
    assert images.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(images, images_by_loops(*inputs, crop))


@pytest.mark.parametrize("cropped", [False, True])
@pytest.mark.parametrize(("side", "crop", "block"), [(8, 8, 2), (9, 7, 3), (12, 11, 4), (7, 2, 5)])
def test_squares_of_pixels_become_channels(side, crop, block, cropped):
    pictures, *others = minibatch(side, crop)
    images = images_by_loops(pictures, *others, crop)
    given = cropped_by_loops(pictures, *others[1:], crop) if cropped else pictures
    op = CropMirror(crop, cropped, block=block)
    check_shapes(op, given, *others)
    found = evaluate(op, given, *others)
    assert found.shape == (len(pictures), *op.image_shape)
    inputs = symbols((given, *others))
    on_device = pytensor.function(inputs, op(*inputs), mode=device_mode())(given, *others)
    np.testing.assert_array_equal(on_device, found)
    for n, c, i, j, p, q in np.ndindex(len(images), 3, block, block, *found.shape[2:]):
        row, column = min(block * p + i, crop - 1), min(block * q + j, crop - 1)
        assert found[n, 3 * (block * i + j) + c, p, q] == images[n, c, row, column]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("side", "crop"), SIZES)
def test_cropping_here_and_in_the_loader_give_the_same_bits(side, crop, dtype):
    pictures, *others = minibatch(side, crop, dtype)
    crops = cropped_by_loops(pictures, *others[1:], crop)
    found = []
    for cropped, given in ((False, pictures), (True, crops)):
        op = CropMirror(crop, cropped, dtype)
        check_shapes(op, given, *others)
        found.append(evaluate(op, given, *others).tobytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize("cropped", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_each_picture_gets_its_colour(dtype, cropped, block):
    pictures, *others = minibatch(9, 6, dtype)
    colours = np.random.default_rng(0).normal(0, 9, (len(pictures), 3)).astype("float32")
    expected = images_by_loops(pictures, *others, 6)
    for n, c, i, j in np.ndindex(expected.shape):
        expected[n, c, i, j] += colours[n, c]
    given = cropped_by_loops(pictures, *others[1:], 6) if cropped else pictures
    inputs = given, *others, colours
    op = CropMirror(6, cropped, dtype, block)
    check_shapes(op, *inputs)
    found = evaluate(op, *inputs)
    plain = evaluate(CropMirror(6, cropped, dtype), *inputs)
    np.testing.assert_array_equal(plain, expected)
    variables = symbols(inputs)
    on_device = pytensor.function(variables, op(*variables), mode=device_mode())(*inputs)
    assert on_device.tobytes() == found.tobytes()
    for c, i, j in np.ndindex(3, block, block):
        channel = found[:, 3 * (block * i + j) + c]
        np.testing.assert_array_equal(channel, expected[:, c, i::block, j::block])


def test_colours_of_other_shapes_or_types_are_refused():
    inputs = minibatch(7, 4)
    for value, error in (
        (np.zeros((6, 4), "float32"), ValueError),
        (np.zeros((5, 3), "float32"), ValueError),
        (np.zeros((6, 3), "float64"), TypeError),
    ):
        with pytest.raises(error, match="colour"):
            CropMirror(4)(*inputs, value)


@pytest.mark.parametrize("origin", [(-1, 0), (0, -1), (4, 0), (0, 4)])
def test_a_window_outside_the_picture_is_refused_when_it_runs(origin):
    pictures, mean, origins, mirrored = minibatch(7, 4)
    origins[3] = origin
    inputs = pictures, mean, origins, mirrored
    with pytest.raises(ValueError, match=r"origin lies outside \[0, side - 4\] of .* 7 x 7"):
        evaluate(CropMirror(4), *inputs)
    for block in (1, 2):
        variables = symbols(inputs)
        f = pytensor.function(variables, CropMirror(4, block=block)(*variables), mode=device_mode())
        with pytest.raises(ValueError, match="of picture 3 does not lie in a mean image of 7 x 7"):
            f(*inputs)


def test_pictures_of_another_size_than_the_mean_are_refused_when_it_runs():
    pictures, _, origins, mirrored = minibatch(7, 4)
    _, mean, _, _ = minibatch(8, 4)
    with pytest.raises(ValueError, match="of the mean image must be equal, got 7 and 8"):
        evaluate(CropMirror(4), pictures, mean, origins, mirrored, static=False)


def symbolic(pictures=(6, 7, 7, 3), mean=(3, 7, 7), origins=(6, 2), mirrored=(6,), **dtypes):
    defaults = {"pictures": "uint8", "mean": "float32", "origins": "int64", "mirrored": "uint8"}
    shapes = {"pictures": pictures, "mean": mean, "origins": origins, "mirrored": mirrored}
    return [
        pt.tensor(dtype=dtypes.get(f"{name}_dtype", dtype), shape=shapes[name])
        for name, dtype in defaults.items()
    ]


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        ({"pictures_dtype": "float32"}, {}, TypeError, "pictures must be .* uint8, got"),
        ({"mean_dtype": "float64"}, {}, TypeError, "mean must be .* float32, got"),
        ({"origins_dtype": "int32"}, {}, TypeError, "origins must be .* int64, got"),
        ({"pictures": (6, 3, 7, 7)}, {}, ValueError, "colours must be equal, got 3 and 7"),
        ({"origins": (6, 3)}, {}, ValueError, "origin and 2 must be equal, got 2 and 3"),
        ({"mirrored": (5,)}, {}, ValueError, "mirror flags must be equal, got 5 and 6"),
        ({"pictures": (6, 8, 7, 3)}, {}, ValueError, "of the mean image must be equal, got 7 and"),
        ({}, {"cropped": True}, ValueError, "of the crop must be equal, got 4 and 7"),
        ({}, {"crop_size": 8}, ValueError, "a crop of 8 does not fit into a mean image of 7"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changes, options, error, message):
    with pytest.raises(error, match=message):
        crop_mirror(*symbolic(**changes), **{"crop_size": 4, **options})


def test_images_have_no_gradient_by_the_pictures():
    pictures, mean, origins, mirrored = symbolic()
    images = crop_mirror(pictures, mean, origins, mirrored, crop_size=4)
    assert images.owner.op.connection_pattern(images.owner) == [[False], [True], [False], [False]]
