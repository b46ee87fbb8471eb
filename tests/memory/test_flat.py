"""The flat layout: aligned, disjoint, in order."""

import numpy as np
import pytest

from tandem.memory.flat import ALIGNMENT, FlatLayout

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
