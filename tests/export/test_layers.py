"""Every layer of `tandem.nn` as ONNX, run by onnxruntime, against PyTensor."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from tandem.backend import device_mode
from tandem.nn import layers
from tandem.nn.layers import LAYERS
from tandem.ops.batch_norm_folding import fold_batch_norms
from tests.support.layer_cases import CASES, graph_of, random_values
from tests.support.onnx_graphs import by_onnxruntime

MORE = {
    "arctan": (lambda m: m.Activation("arctan"), [(5,)]),
    "response norm": (lambda m: m.LocalResponseNormalization(3, 0.1, 0.6, 1.0), [(4, 4, 6)]),
}


QUICK = {type(make(layers)): case for case, (make, _) in (CASES | MORE).items()}.values()
"""The last case of each layer."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES | MORE],
)
def test_onnx_computes_what_a_layer_does(case: str) -> None:
    make, shapes = (CASES | MORE)[case]
    inputs, _, y = graph_of(make(layers), shapes, "float32")
    values = [
        random_values((3, *variable.type.shape[1:]), number, "float32")
        for number, variable in enumerate(inputs)
    ]
    expected = pytensor.function(inputs, pt.as_tensor(y), mode=device_mode(strict=True))(*values)
    (y,) = fold_batch_norms([y])
    found = by_onnxruntime(inputs, y, values)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_every_layer_has_a_case() -> None:
    made = {type(make(layers)).__name__ for make, _ in (CASES | MORE).values()}
    assert made == {*LAYERS} - {"InputLayer"}
