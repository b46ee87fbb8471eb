"""Arrays in shared memory: as arrays, in other processes, and their memory."""

import gc
import multiprocessing
import os
import pickle
import weakref
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.parallel.data import Data, as_array, data
from tests.support.tiny import open_files

CONTEXT = multiprocessing.get_context("spawn")
DTYPES = ["bool", "int8", "uint8", "int32", "int64", "uint64", "float16", "float32", "float64"]


def table(rows: int, columns: int = 4, dtype: str = "float32") -> np.ndarray:
    return np.arange(rows * columns).reshape(rows, columns).astype(dtype)


class TestArray:
    """What an array has too."""

    def test_it_holds_a_copy_of_its_value(self) -> None:
        value = table(5)
        x = data(value)
        assert (x.shape, x.ndim, x.size, len(x), x.dtype) == ((5, 4), 2, 20, 5, np.float32)
        assert (x.minibatch, x.name, x.alloc_size) == (False, None, 20)
        np.testing.assert_array_equal(x.data, value, strict=True)
        value[0] = 7
        assert x[0].tolist() == [0, 1, 2, 3]

    def test_items_are_read_and_written(self) -> None:
        x = data(table(5))
        x[3] = 0
        x[0, 1:3] += 1
        assert x[2:4].tolist() == [[8, 9, 10, 11], [0, 0, 0, 0]]
        assert [row[1] for row in x] == [2, 5, 9, 0, 17]
        x[:] = table(5)[::-1]
        np.testing.assert_array_equal(x, table(5)[::-1])

    def test_numpy_takes_it_without_a_copy(self) -> None:
        x = data(table(5))
        array = np.asarray(x)
        assert np.shares_memory(array, x.data)
        assert not np.shares_memory(np.array(x), x.data)
        assert np.asarray(x, "float64").dtype == np.float64
        with pytest.raises(ValueError, match="copy"):
            np.asarray(x, "float64", copy=False)
        np.testing.assert_array_equal(np.add(x, 1), table(5) + 1)

    @pytest.mark.parametrize("dtype", [*DTYPES, "complex64", ">f4"])
    @pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 1, 3, 2)])
    def test_shapes_and_dtypes(self, shape: tuple[int, ...], dtype: str) -> None:
        value = (np.arange(np.prod(shape, dtype=int)) % 2 + 1).reshape(shape).astype(dtype)
        x = data(value, name="x")
        assert (x.shape, x.dtype) == (shape, np.dtype(dtype).newbyteorder("="))
        np.testing.assert_array_equal(x, value)
        x.set_value(value[...])
        np.testing.assert_array_equal(x, value)

    def test_without_dimensions(self) -> None:
        x = data(dtype="float64", ndim=0)
        assert (float(x[()]), x.shape, x.size, x.alloc_size) == (0, (), 1, 1)
        x.set_value(2.5)
        x[...] *= 2
        assert float(x.data) == 5
        with pytest.raises(TypeError, match="unsized"):
            len(x)
        with pytest.raises(ValueError, match="without dimensions has no length"):
            x.set_length(1)
        x.free_memory()
        assert (x.alloc_size, float(x.data), x.alloc_size) == (0, 0, 1)

    def test_its_description(self) -> None:
        assert repr(data(table(5))) == "Data(float32 (5, 4))"
        made = data(dtype="int64", ndim=1, minibatch=True, name="y")
        assert repr(made) == "Data(int64 (0,), minibatch, name='y')"

    def test_the_place_of_its_array_in_its_memory(self) -> None:
        x = data(table(5))
        x.set_length(3)
        offset, shape, dtype = x.array_place
        np.testing.assert_array_equal(x.buffer.array(shape, dtype, offset), table(3), strict=True)


class TestMaking:
    """`data`."""

    @pytest.mark.parametrize(
        "arguments",
        [
            {"value": pt.fmatrix("v")},
            {"var": pt.fmatrix("v")},
            {"var": np.zeros((7, 2), "float32"), "name": "v"},
            {"dtype": "float32", "ndim": 2, "name": "v"},
            {"dtype": np.float32, "shape": (0, 0), "name": "v"},
            {"var": pt.fmatrix("v"), "dtype": "float32", "ndim": 2, "shape": (0, 0)},
            {"value": pytensor.shared(np.zeros((7, 2), "float32"), name="v")},
        ],
    )
    def test_without_a_value_it_is_empty(self, arguments: dict[str, Any]) -> None:
        x = data(**arguments)
        assert (x.shape, x.dtype, x.name, x.alloc_size) == ((0, 0), np.float32, "v", 0)

    def test_a_shape_is_zeros(self) -> None:
        x = data(dtype="int32", shape=[3, 2], oversize=2)
        assert (x.data.tolist(), x.alloc_size) == ([[0, 0]] * 3, 12)

    def test_value_and_variable(self) -> None:
        assert data(table(3, dtype="int8"), pt.fmatrix()).dtype == np.float32
        assert data(value=[[1, 2]], var=pt.dmatrix()).data.tolist() == [[1.0, 2.0]]
        assert data([1.5, 2.5]).dtype == np.float64
        assert data(table(3, dtype="float64"), dtype="float32", force_cast=True).dtype == np.float32
        assert data(data(table(3))).data.tolist() == table(3).tolist()

    @pytest.mark.parametrize(
        ("arguments", "kind", "message"),
        [
            ({}, TypeError, "needs a value, a variable, or a dtype with ndim or shape"),
            ({"dtype": "int8"}, TypeError, "needs a value"),
            ({"ndim": 1}, TypeError, "needs a value"),
            ({"var": 3}, TypeError, "var has no dtype and number of dimensions: int"),
            ({"value": pt.vector(), "var": pt.vector()}, ValueError, "pass one of them"),
            ({"var": pt.fvector(), "dtype": "int8"}, ValueError, "dtype is int8, .*imply float32"),
            ({"dtype": "int8", "ndim": 1, "shape": (2, 2)}, ValueError, "ndim is 1, .* imply 2"),
            ({"value": table(3), "shape": (2, 4)}, ValueError, r"\(2, 4\), .* has \(3, 4\)"),
            ({"value": table(3), "ndim": 1}, TypeError, "expected 1 dimension, got 2 dimensions"),
            ({"dtype": "int8", "shape": (-1,)}, ValueError, "can't have the shape"),
            ({"dtype": "int8", "ndim": -1}, ValueError, "-1 dimensions"),
            ({"dtype": "int8", "ndim": 1, "oversize": 3}, ValueError, "oversize is 3, and must"),
            ({"value": np.array(["a"])}, TypeError, "numbers or booleans, not of <U1"),
            ({"dtype": object, "ndim": 1}, TypeError, "not of object"),
        ],
    )
    def test_arguments_that_do_not_fit(
        self, arguments: dict[str, Any], kind: type[Exception], message: str
    ) -> None:
        with pytest.raises(kind, match=message):
            data(**arguments)


class TestValues:
    """`set_value`, `set_length`, `set_shape`, `free_memory`."""

    def test_memory_grows_for_larger_values_only(self) -> None:
        x = data(table(5))
        x.set_value(table(2000), oversize=1.1)
        assert (x.shape, x.alloc_size) == ((2000, 4), 8800)
        for rows in (2100, 100, 2200):
            x.set_value(table(rows))
            assert (len(x), x.alloc_size) == (rows, 8800)
            np.testing.assert_array_equal(x, table(rows), strict=True)
        x.set_value(table(2201))
        assert x.alloc_size == 8804

    def test_rows_keep_their_values_when_the_length_changes(self) -> None:
        x = data(table(5))
        x.set_length(2)
        np.testing.assert_array_equal(x, table(2))
        x.set_length(1000)
        np.testing.assert_array_equal(x[:5], table(5))
        assert not x[5:].any()
        x.set_length(0)
        assert x.shape == (0, 4)
        x.set_shape((2, 2))
        assert x.data.tolist() == [[0, 1], [2, 3]]

    def test_an_array_taken_before_the_memory_grew_stays_the_same_memory(self) -> None:
        x = data(table(5))
        before = x.data
        x.set_length(100_000)
        x[4, 3] = -1
        assert before[4, 3] == -1

    def test_a_value_may_be_a_part_of_itself(self) -> None:
        x = data(table(50))
        x.set_value(x[::-1][3:])
        np.testing.assert_array_equal(x, table(50)[::-1][3:])
        y = data(table(3))
        y.set_value(x)
        np.testing.assert_array_equal(y, x.data, strict=True)

    def test_a_value_may_be_an_array_taken_before_the_memory_grew(self) -> None:
        x = data(table(50))
        before = x.data
        x.set_length(100_000)
        x[:50] = before[::-1]
        np.testing.assert_array_equal(x[:50], table(50)[::-1])
        x.set_value(before[::-1])
        np.testing.assert_array_equal(x, table(50))

    def test_freed_memory_is_replaced_at_the_next_use(self) -> None:
        x = data(table(50))
        old, buffer = x.data, x.buffer
        x.free_memory()
        assert (x.shape, x.alloc_size, x.data.shape) == ((0, 0), 0, (0, 0))
        assert x.buffer is not buffer
        x.set_value(table(2))
        assert (x.alloc_size, old[49, 3]) == (8, 199)
        with pytest.raises(ValueError, match="closed"):
            buffer.fileno()
        x.free_memory()
        x.free_memory()

    @pytest.mark.parametrize("oversize", [0.99, 2.01, float("nan")])
    def test_oversize_is_from_1_to_2(self, oversize: float) -> None:
        x = data(table(5))
        for refused in (
            lambda: x.set_value(table(9), oversize=oversize),
            lambda: x.set_length(2, oversize),
            lambda: x.set_shape((1, 1), oversize),
        ):
            with pytest.raises(ValueError, match="must be from 1 to 2"):
                refused()
        assert x.shape == (5, 4)

    def test_shapes_that_are_refused(self) -> None:
        x = data(table(5))
        with pytest.raises(ValueError, match=r"can't have the shape \(20,\): its number of dim"):
            x.set_shape((20,))
        with pytest.raises(ValueError, match="can't have the shape"):
            x.set_length(-1)
        with pytest.raises(TypeError):
            x.set_length(2.5)  # type: ignore[arg-type]
        assert x.shape == (5, 4)

    def test_a_refused_value_leaves_the_old(self) -> None:
        x = data(table(5))
        message = r"value of Data\(float32 \(5, 4\)\): expected float32, got float64.*force_cast=T"
        with pytest.raises(TypeError, match=message):
            x.set_value(table(9, dtype="float64"))
        with pytest.raises(TypeError, match=r"expected 2 dimensions, got 1 dimension, .* \(3,\)"):
            x.set_value(np.zeros(3, "float32"))
        np.testing.assert_array_equal(x, table(5), strict=True)
        x.set_value(table(9, dtype="float64"), force_cast=True)
        np.testing.assert_array_equal(x, table(9), strict=True)


class TestCasts:
    """`condition_data` and `as_array`, against PyTensor's inputs."""

    @pytest.mark.parametrize("expected", DTYPES)
    @pytest.mark.parametrize("given", [*DTYPES, "complex64"])
    def test_arrays_are_cast_as_pytensor_does(self, given: str, expected: str) -> None:
        value, kind = np.ones((2, 3), given), pt.TensorType(expected, shape=(None, None))
        x = data(var=kind())
        try:
            accepted = kind.filter(value)
        except TypeError:
            with pytest.raises(TypeError, match=f"expected {expected}, got {given}"):
                x.condition_data(value)
        else:
            np.testing.assert_array_equal(x.condition_data(value), accepted, strict=True)
        if given != "complex64":
            assert x.condition_data(value, force_cast=True).dtype == expected

    @pytest.mark.parametrize("expected", DTYPES)
    @pytest.mark.parametrize("value", [0.1, 0.5, 3, -1, 300, True, np.float64(0.1), np.int64(2)])
    @pytest.mark.parametrize("float_x", ["float32", "float64"])
    def test_numbers_are_cast_as_pytensor_does(
        self, value: Any, expected: str, float_x: str
    ) -> None:
        kind = pt.TensorType(expected, shape=())
        with pytensor.config.change_flags(floatX=float_x):
            try:
                accepted = kind.filter(value)
            except (TypeError, OverflowError):
                with pytest.raises(TypeError, match=f"input 0: expected {expected}, got"):
                    as_array(value, expected, 0, "input 0")
            else:
                found = as_array(value, expected, 0, "input 0")
                np.testing.assert_array_equal(found, accepted, strict=True)

    @given(
        # Not both of the last: beside a NaN, PyTensor lets pass what is rounded.
        st.sampled_from([0.1, float("nan")]).flatmap(
            lambda real: st.lists(st.integers(-3, 300) | st.sampled_from([0.5, real]), max_size=3)
        ),
        st.sampled_from(["uint8", "int64", "float32", "float64"]),
    )
    def test_lists_are_cast_as_pytensor_does(self, value: list[Any], expected: str) -> None:
        kind = pt.TensorType(expected, shape=(None,))
        try:
            accepted = kind.filter(value)
        except (TypeError, OverflowError, ValueError):
            with pytest.raises(TypeError, match=f"x: expected {expected}, got"):
                as_array(value, expected, 1, "x")
        else:
            found = as_array(value, expected, 1, "x")
            np.testing.assert_array_equal(found, accepted, strict=True)

    def test_what_fits_is_not_copied(self) -> None:
        value, x = table(3), data(table(3))
        assert x.condition_data(value) is value
        assert as_array(x, "float32", 2, "x") is x.data

    def test_what_is_no_array_is_refused(self) -> None:
        with pytest.raises(TypeError, match="x: expected float32, got the variable v"):
            as_array(pt.vector("v"), "float32", 1, "x")
        with pytest.raises(TypeError, match="x is no array of numbers"):
            as_array([[1.0], [2.0, 3.0]], "float32", 2, "x")
        with pytest.raises(TypeError, match="x: expected float32, got <U1"):
            as_array(["a"], "float32", 1, "x")
        with pytest.raises(TypeError, match="x: expected float32, got datetime64"):
            as_array(np.array(["2020-01-01"], "datetime64[D]"), "float32", 1, "x")
        with pytest.raises(TypeError, match="expected float32, got complex"):
            as_array([1j], "float32", 1, "x")


def double(x: Data, freed: Data, answer: Connection) -> None:
    """Double the array, then the part that the parent has written since, and set a new shape."""
    array = x.data
    array *= 2
    answer.send((x.shape, x.name, x.minibatch, str(x.dtype), freed.shape))
    assert answer.recv() == "written"
    array[1] *= 10
    x.set_shape((50, 5))
    x[49, 4] = -1
    answer.send(x.alloc_size)


class TestProcesses:
    """The same memory in processes of the user's."""

    def test_a_spawned_process_has_the_same_memory(self) -> None:
        x, freed = data(table(3), minibatch=True, name="x"), data(table(3))
        freed.free_memory()
        here, there = CONTEXT.Pipe()
        process = CONTEXT.Process(target=double, args=(x, freed, there))
        process.start()
        try:
            assert here.recv() == ((3, 4), "x", True, "float32", (0, 0))
            np.testing.assert_array_equal(x, 2 * table(3))
            x[1] = 1
            here.send("written")
            assert here.recv() == 250
        finally:
            process.join()
        assert x[1].tolist() == [10] * 4
        assert x.shape == (3, 4)  # the other's shape is its own, its memory is both's
        assert x.alloc_size == 250
        x.set_shape((50, 5))
        assert x[49, 4] == -1

    def test_a_forked_process_has_the_same_memory(self) -> None:
        x, late = data(table(3)), data(dtype="int64", ndim=1)
        assert x[0, 1] == 1
        child = os.fork()
        if child == 0:
            x.data[...] *= 2
            late.set_value([1, 2, 3])
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        np.testing.assert_array_equal(x, 2 * table(3))
        late.set_length(3)
        assert late.data.tolist() == [1, 2, 3]

    def test_it_is_pickled_only_for_a_process_that_is_being_started(self) -> None:
        with pytest.raises(TypeError, match="a Data can be passed to another process only as"):
            pickle.dumps(data(table(3)))


class TestMemory:
    def test_fresh_minibatches_leave_no_memory_and_no_descriptor(self) -> None:
        gc.collect()
        before = open_files()
        held = [data(table(64), minibatch=True) for _ in range(3)]
        for _ in range(200):
            x = data(table(64), minibatch=True)
            x[0] += 1
        assert open_files() == before + 2 * 4  # a mapping has one of its own
        memory = weakref.ref(x.buffer)
        del x, held
        assert memory() is None
        assert open_files() == before

    def test_names_of_any_length(self) -> None:
        assert data(table(2), name="ä" * 400).data[1, 3] == 7
