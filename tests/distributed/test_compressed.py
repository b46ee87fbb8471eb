"""PyTorch's conversions to 16 bits against NumPy's, bit for bit."""

import numpy as np
import pytest

from tandem.distributed.compressed import TransferFormat
from tests.support.numpy_formats import NumpyTransferFormat


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_rounding_has_numpys_bits(name: str) -> None:
    rng = np.random.default_rng(0)
    values = (2.0 ** rng.uniform(-30, 14.9, 10_000) * rng.choice([-1, 1], 10_000)).astype("float32")
    ties = (1 + (2 * np.arange(100) + 1) * 2.0 ** (-11 if name == "float16" else -8)).astype("f4")
    values = np.concatenate([values, ties, np.float32([0, -0.0, 2**15, -(2**15), np.inf])])
    found, expected = (np.empty(values.size, np.uint16) for _ in range(2))
    TransferFormat(name).narrow(values, found)
    NumpyTransferFormat(name).narrow(values, expected)
    assert (found == expected).all()
    back, oracle = (np.empty(values.size, np.float32) for _ in range(2))
    TransferFormat(name).widen(found, back)
    NumpyTransferFormat(name).widen(found, oracle)
    assert back.tobytes() == oracle.tobytes()
