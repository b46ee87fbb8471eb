"""Where the arrays of a slot lie."""

import pickle

import numpy as np
import pytest

from tandem.memory import HostBuffer, RowType, Slot, SlotLayout


@pytest.mark.parametrize(
    "layout",
    [
        SlotLayout.of_pictures(3, 5),
        SlotLayout.of_pictures(1, 1, True),
        SlotLayout.of_pictures(64, 16, True),
        SlotLayout(3, RowType("float32", (5, 2)), RowType("float32", (3,))),
    ],
)
def test_arrays_are_aligned_disjoint_and_fill_the_layout(layout: SlotLayout) -> None:
    buffer = HostBuffer.create(layout.nbytes + 64)
    slot = Slot.on(buffer, layout, offset=64)
    whole = buffer.array(buffer.nbytes, "uint8")
    arrays = [getattr(slot, name) for name in layout.arrays]
    assert arrays.pop(5).shape == (layout.batch_size if layout.coloured else 0, 3)
    arrays += [slot.colours] * layout.coloured
    for number, array in enumerate(arrays, start=1):
        assert (array.ctypes.data - whole.ctypes.data) % 64 == 0
        assert (array == 0).all()
        array[...] = number
    numbers = list(range(1, len(arrays) + 1))
    assert [int(array.min()) for array in arrays] == numbers
    assert [int(array.max()) for array in arrays] == numbers
    assert not whole[:64].any()
    assert layout.nbytes % 64 == 0
    assert 0 <= layout.nbytes - sum(array.nbytes for array in arrays) < 7 * 64


def test_shapes_and_types() -> None:
    layout = SlotLayout.of_pictures(batch_size=4, picture_size=7)
    slot = Slot.on(HostBuffer.create(layout.nbytes), layout)
    found = {name: (array.shape, array.dtype.name) for name, array in vars(slot).items()}
    assert found == {
        "pictures": ((4, 7, 7, 3), "uint8"),
        "labels": ((4,), "int64"),
        "indices": ((4,), "int64"),
        "origins": ((4, 2), "int64"),
        "mirrored": ((4,), "uint8"),
        "colours": ((0, 3), "float32"),
        "valid": ((), "int64"),
    }


def test_two_slots_on_one_buffer_are_seen_by_all_who_lay_them_out_alike() -> None:
    layout = SlotLayout.of_pictures(2, 3)
    buffer = HostBuffer.create(2 * layout.nbytes)
    first, second = (Slot.on(buffer, layout, n * layout.nbytes) for n in range(2))
    second.labels[...] = 5
    assert not first.labels.any()
    np.testing.assert_array_equal(Slot.on(buffer, layout, layout.nbytes).labels, [5, 5])


def test_a_slot_that_does_not_fit_is_refused_and_pixels_are_never_pickled() -> None:
    layout = SlotLayout.of_pictures(2, 3)
    with pytest.raises(ValueError, match="doesn't fit"):
        Slot.on(HostBuffer.create(layout.nbytes - 1), layout)
    with pytest.raises(ValueError, match="64-byte boundary"):
        Slot.on(HostBuffer.create(2 * layout.nbytes), layout, offset=8)
    with pytest.raises(ValueError, match="can't have the sizes"):
        SlotLayout.of_pictures(0, 3)
    with pytest.raises(TypeError, match="its buffer and its layout"):
        pickle.dumps(Slot.on(HostBuffer.create(layout.nbytes), layout))
