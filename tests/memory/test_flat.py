"""The flat layout: aligned, disjoint, in order."""

import itertools

import numpy as np
import pytest

from tandem.memory import HostBuffer
from tandem.memory.cuda import CudaBuffer
from tandem.memory.flat import ALIGNMENT, FlatLayout, Vectors
from tests.support.fake_cuda import FakeDriver, FakeMachine

SHAPES = {"a": (3, 5), "b": (1,), "c": (64,), "d": (65,), "e": (2, 3, 4)}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_views_are_aligned_disjoint_and_complete(dtype: str) -> None:
    layout = FlatLayout.of(SHAPES, dtype)
    vector = np.zeros(layout.size, dtype)
    for number, (name, view) in enumerate(layout.views(vector).items(), start=1):
        assert view.shape == SHAPES[name]
        offset = view.__array_interface__["data"][0] - vector.__array_interface__["data"][0]
        assert offset % ALIGNMENT == 0
        assert (view == 0).all(), f"{name} overlaps an earlier array"
        view[...] = number
    counted = sum(int(np.prod(shape)) for shape in SHAPES.values())
    assert np.count_nonzero(vector) == counted
    assert layout.nbytes % ALIGNMENT == 0


def test_a_vector_of_another_size_or_type_is_refused() -> None:
    layout = FlatLayout.of(SHAPES, "float32")
    with pytest.raises(ValueError, match="float64"):
        layout.views(np.zeros(layout.size, "float64"))
    with pytest.raises(ValueError, match="the layout needs"):
        layout.views(np.zeros(layout.size - 1, "float32"))


def test_pieces_of_parts_cover_the_arrays_once() -> None:
    layout = FlatLayout.of(SHAPES, "float64")
    buffer = HostBuffer.create(64 + layout.nbytes)
    for cuts in ([0, layout.size], [0, 7, 64, 65, layout.size], [*range(layout.size + 1)]):
        views = layout.on(HostBuffer.create(layout.nbytes))
        vector = buffer.array(layout.size, "float64", 64)
        vector[:] = 0
        for number, part in enumerate(itertools.pairwise(cuts), start=1):
            for name, piece in layout.pieces(buffer, slice(*part), offset=64).items():
                assert piece.ndim == 1
                assert (piece == 0).all(), f"{name} overlaps an earlier piece"
                piece[...] = number
        # Padding belongs to no array.
        assert np.count_nonzero(vector) == sum(view.size for view in views.values())
        assert all((view > 0).all() for view in layout.views(vector).values())
        assert (np.diff(vector[vector > 0]) >= 0).all()


@pytest.mark.parametrize("channels_last", [False, True])
def test_filters_lie_as_asked_and_look_the_same(channels_last: bool) -> None:
    shapes = {"weight": (4, 3, 5, 5), "bias": (4,), "dense": (6, 7)}
    layout = FlatLayout.of(shapes, "float32", channels_last)
    buffer = HostBuffer.create(2 * layout.nbytes)
    views = layout.on(buffer, layout.nbytes)
    vector = buffer.array(2 * layout.size, "float32")[layout.size :]
    same = layout.views(vector)
    for name, shape in shapes.items():
        assert views[name].shape == same[name].shape == shape
        values = np.arange(np.prod(shape), dtype="float32").reshape(shape)
        views[name][...] = values
        np.testing.assert_array_equal(same[name], values)
    expected = np.arange(300).reshape(4, 3, 5, 5)
    stored = expected.transpose(0, 2, 3, 1) if channels_last else expected
    np.testing.assert_array_equal(vector[:300], stored.ravel())
    np.testing.assert_array_equal(views["weight"], expected)


def test_a_layout_lies_in_device_memory_too() -> None:
    driver = FakeDriver(FakeMachine())
    layout = FlatLayout.of({"weight": (4, 3, 5, 5), "bias": (4,)}, "float32", channels_last=True)
    views = layout.on(CudaBuffer.create(driver, layout.nbytes))
    base = views["weight"].address
    assert views["bias"].address - base == 4 * layout.offsets["bias"]
    assert views["weight"].shape == (4, 3, 5, 5)
    assert views["weight"].strides == (300, 4, 60, 12)


def test_states_lie_behind_the_weights_and_leave_out_what_is_not_trained() -> None:
    layout = FlatLayout.of(
        {"weight": (4, 3), "bias": (4,)},
        "float32",
        states=("first_moment", "second_moment"),
        untrained={"mean": (70,)},
    )
    parameters = HostBuffer.create(layout.parameters_nbytes)
    gradients = HostBuffer.create(layout.nbytes)
    vectors = Vectors.on(layout, parameters, gradients)
    assert list(vectors.weights) == list(vectors.gradients) == ["weight", "bias", "mean"]
    assert [list(state) for state in vectors.states.values()] == [["weight", "bias"]] * 2
    flat = parameters.array(layout.parameters_size, "float32")
    arrays = [*vectors.weights.values()]
    arrays += [array for state in vectors.states.values() for array in state.values()]
    for number, array in enumerate(arrays, start=1):
        array[...] = number
    assert layout.size == 64 + 64 + 128
    starts = [0, 64, 128, 256, 320, 384, 448]
    assert [flat[start] for start in starts] == [*range(1, 8)]
    assert layout.parameters_size == 512
    assert np.count_nonzero(flat) == 16 + 70 + 2 * 16
