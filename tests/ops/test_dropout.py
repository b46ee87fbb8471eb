import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from tandem.backend import device_mode
from tandem.ops import Dropout, DropoutMask, dropout, dropout_mask
from tandem.philox import Purpose
from tests.support import slow_philox
from tests.support.op_checks import check_gradient, check_shapes, evaluate

INDICES = np.array([0, 1, 5, 255, 256, 1_281_166, 2**32 - 1], np.int64)
KEYS = (np.int64(7), np.int64(3), INDICES)


def mask(rate=0.5, layer=0, units=10, seed=7, epoch=3, indices=INDICES, dtype="float32"):
    op = DropoutMask(rate, layer, units, dtype)
    return evaluate(op, np.int64(seed), np.int64(epoch), indices)


def mask_unit_by_unit(rate, layer, units, seed, epoch, indices):
    kept = np.empty((len(indices), units))
    for i, j in np.ndindex(kept.shape):
        random = slow_philox.word(seed, epoch, int(indices[i]), Purpose.DROPOUT + layer, j)
        kept[i, j] = random >= rate * 2**32
    return kept


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.999])
@pytest.mark.parametrize(("layer", "units"), [(0, 1), (1, 4), (0, 5), (3, 18)])
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (2**63 - 1, 2**31)])
def test_the_mask_is_what_the_scalar_generator_gives(rate, layer, units, seed, epoch):
    found = mask(rate, layer, units, seed, epoch)
    expected = mask_unit_by_unit(rate, layer, units, seed, epoch, INDICES)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_mask_is_zero_or_one_in_its_dtype(dtype):
    found = mask(dtype=dtype, units=100)
    assert found.dtype == np.dtype(dtype)
    assert set(np.unique(found)) == {0, 1}


@pytest.mark.parametrize("rate", [0.0, 0.25, 0.5, 0.9])
def test_the_fraction_dropped_is_the_rate(rate):
    found = mask(rate, units=2000, indices=np.arange(100))
    deviation = np.sqrt(rate * (1 - rate) / found.size)
    assert abs((1 - found.mean()) - rate) <= 5 * deviation


@pytest.mark.parametrize("unit", range(5))
def test_a_word_equal_to_the_threshold_keeps_its_unit(unit):
    random = slow_philox.word(7, 3, 5, Purpose.DROPOUT, unit)
    place = [*INDICES].index(5)
    assert mask(rate=random / 2**32)[place, unit] == 1
    assert mask(rate=(random + 1) / 2**32)[place, unit] == 0


def test_a_unit_s_mask_does_not_depend_on_its_picture_s_place_or_the_number_of_units():
    order = np.array([3, 0, 6, 1])
    np.testing.assert_array_equal(mask(indices=INDICES[order]), mask()[order])
    np.testing.assert_array_equal(mask(units=37)[:, :10], mask(units=10))


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4, 5, 11, 30])
@pytest.mark.parametrize("units", [0, 1, 2, 4, 7])
def test_a_part_of_a_layer_has_the_whole_layer_s_bits(first, units):
    part = slice(first, first + units)
    found = evaluate(DropoutMask(0.3, 2, units, first=first), *KEYS)
    np.testing.assert_array_equal(found, mask(0.3, 2, 37)[:, part])
    x = np.random.default_rng(0).normal(size=(7, 37))
    whole = evaluate(Dropout(0.3, 2, 1.5), x, *KEYS)
    found = evaluate(Dropout(0.3, 2, 1.5, first), x[:, part], *KEYS)
    np.testing.assert_array_equal(found, whole[:, part])


@pytest.mark.parametrize("other", [{"seed": 8}, {"epoch": 4}, {"layer": 1}])
def test_seeds_epochs_and_layers_have_masks_of_their_own(other):
    agreement = (mask(units=1000) == mask(units=1000, **other)).mean()
    assert 0.4 < agreement < 0.6


def test_shapes_are_known_without_computing():
    check_shapes(DropoutMask(0.5, 0, 6), np.int64(1), np.int64(2), INDICES)


def test_no_gradient_passes_through_the_mask():
    x = pt.dmatrix("x")
    kept = dropout_mask(1, 2, pt.as_tensor(INDICES), rate=0.5, layer=0, units=3, dtype="float64")
    gradient = pytensor.grad((x * kept).sum(), x)
    values = np.ones((len(INDICES), 3))
    np.testing.assert_array_equal(
        gradient.eval({x: values}, on_unused_input="ignore", mode="FAST_COMPILE"),
        mask(units=3, seed=1, epoch=2),
    )


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_a_rate_out_of_range_is_refused(rate):
    with pytest.raises(ValueError, match=r"rate must be in \[0, 1\), got"):
        DropoutMask(rate, 0, 4)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((pt.dscalar(), pt.lscalar(), pt.lvector()), "seed must be .* int64, got .*float64"),
        ((pt.lscalar(), pt.iscalar(), pt.lvector()), "epoch must be .* int64, got .*int32"),
        ((pt.lscalar(), pt.lscalar(), pt.lmatrix()), "indices must be a 1-dimensional .* got"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(inputs, message):
    with pytest.raises(TypeError, match=message):
        dropout_mask(*inputs, rate=0.5, layer=0, units=4)


@pytest.mark.parametrize("shape", [(7, 10), (7, 3, 2, 5), (7, 4, 3, 3)])
@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_units_are_multiplied_by_the_mask_in_the_order_of_memory(shape, factor):
    x = np.random.default_rng(0).normal(size=shape)
    found = evaluate(Dropout(0.2, 1, factor), x, *KEYS)
    units = int(np.prod(shape[1:]))
    flat = mask(0.2, 1, units)
    for place in np.ndindex(shape):
        unit = place[1]
        if len(shape) == 4:
            unit = (place[2] * shape[3] + place[3]) * shape[1] + place[1]
        assert found[place] == x[place] * factor * flat[place[0], unit]


def test_gradient_of_dropout_is_dropout():
    x = np.random.default_rng(0).normal(size=(7, 2, 3, 2))
    keys = [pt.constant(key) for key in KEYS]
    check_gradient(lambda x: Dropout(0.4, 0, 2.0)(x, *keys), x)
    check_shapes(Dropout(0.4, 0, 2.0), x, *KEYS)


def test_a_unit_that_is_dropped_is_zero_whatever_it_was():
    found = evaluate(Dropout(0.5, 0), np.full((7, 10), np.nan), *KEYS)
    np.testing.assert_array_equal(np.isnan(found), mask() == 1)
    assert (found[mask() == 0] == 0).all()


@pytest.mark.parametrize(
    ("x", "indices", "error", "message"),
    [
        (pt.dtensor3(), pt.lvector(), TypeError, "x must be a 2- or 4-dimensional .* got"),
        (pt.imatrix(), pt.lvector(), TypeError, "x must be .* got .*int32"),
        (pt.tensor(shape=(3, 4)), pt.tensor(dtype="int64", shape=(2,)), ValueError, "2 and 3"),
    ],
)
def test_images_that_do_not_fit_are_refused(x, indices, error, message):
    with pytest.raises(error, match=message):
        dropout(x, 1, 2, indices, rate=0.5, layer=0)


def test_rows_without_an_index_are_refused_when_it_runs():
    with pytest.raises(ValueError, match="x has 7 rows, indices has 3"):
        evaluate(Dropout(0.5, 0), np.ones((7, 2)), *KEYS[:2], INDICES[:3], static=False)


@pytest.mark.parametrize("shape", [(0, 10), (0, 3, 2, 5)])
def test_no_rows_are_none(shape):
    x = pt.tensor(dtype="float32", shape=(None, *shape[1:]))
    keys = [pt.constant(np.int64(1)), pt.constant(np.int64(2)), pt.lvector()]
    function = pytensor.function([x, keys[2]], Dropout(0.5, 0)(x, *keys), mode=device_mode("cpu"))
    assert function(np.zeros(shape, "float32"), INDICES[:0]).shape == shape
