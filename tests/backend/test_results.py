"""Results that stay on the device."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch
from pytensor.compile.mode import Mode

from tandem.backend import DeviceLinker, device_mode, device_shared
from tandem.errors import InputError
from tests.support.check_function import DEVICE

# Not the CPU: programs for it are those for a GPU. Its tensors have no values.
AFAR = torch.device("meta")


def test_results_are_tensors_with_the_values_of_arrays() -> None:
    x = pt.fmatrix("x")
    outputs = [x.sum(), x * 2, x > 1, pt.argmax(x, axis=1), x.shape[0], x]
    value = np.float32([[1, 2, 0], [3, -1, 4]])
    on_host = pytensor.function([x], outputs, mode=DEVICE)(value)
    results = pytensor.function([x], outputs, mode=device_mode("cpu", results="device"))(value)
    # The length of an axis is a number of the host.
    assert [type(result) for result in results] == [torch.Tensor] * 4 + [np.ndarray, torch.Tensor]
    for result, expected in zip(results, on_host, strict=True):
        array = np.asarray(result)
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)
    assert not np.shares_memory(results[-1].numpy(), value)


def test_variables_on_the_host_are_updated_there() -> None:
    x, private = pt.fvector("x"), pytensor.shared(np.float32([1, 2]), "private")
    resident = device_shared(np.float32([3, 4]), "resident")
    function = pytensor.function(
        [x],
        [resident, private],
        updates=[(private, private + x), (resident, resident * x)],
        mode=device_mode("cpu", results="device"),
    )
    first = function(np.float32([10, 20]))
    assert type(private.get_value(borrow=True)) is np.ndarray
    second = function(np.float32([1, 1]))
    # What was returned is not what the next call writes.
    assert [result.tolist() for result in first] == [[3, 4], [1, 2]]
    assert [result.tolist() for result in second] == [[30, 80], [11, 22]]


@pytest.mark.parametrize("results", ["host", "device"])
def test_results_on_another_device_are_memory_of_their_own(results: str) -> None:
    """Copies to the host are; of what stays there the caller may write each element."""
    x = pt.fmatrix("x")
    linker = DeviceLinker(AFAR, results=results)  # type: ignore[arg-type]
    function = pytensor.function([x], pt.alloc(x[0], 4, 3), mode=Mode(linker, None))
    (result,) = function.vm.program.run(torch.empty((2, 3), device=AFAR))
    assert result.shape == (4, 3)
    assert result.stride() == ((3, 1) if results == "device" else (0, 1))


def test_another_place_is_refused() -> None:
    with pytest.raises(InputError, match=r"results is 'gpu'; allowed are host, device"):
        device_mode("cpu", results="gpu")  # type: ignore[arg-type]
