"""Keras's layers as ONNX files, run by onnxruntime, against Keras."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.errors import InputError
from tandem.export.cli import export
from tests.support.keras_layers import IMAGE, LAYERS, ROW, randomize
from tests.support.keras_models import keras, random_rows, ravelled, save_model
from tests.support.lazily import Lazily

onnxruntime = Lazily("onnxruntime")

UNTRANSLATED = {
    *("EinsumDense", "LayerNormalization", "GroupNormalization", "UnitNormalization"),
    *("RMSNormalization", "RepeatVector", "Masking", "UpSampling1D"),
    *("Conv1DTranspose", "Conv2DTranspose", "GlobalMaxPooling1D", "GlobalMaxPooling2D"),
    *("SimpleRNN", "LSTM", "GRU", "RNN", "Bidirectional"),
}
"""Layers with an Op that has no translation."""


def is_translated(layer: Any) -> bool:
    is_erf = getattr(layer, "activation", None) is keras.activations.gelu
    is_index = getattr(layer, "interpolation", None) == "nearest"
    return type(layer).__name__ not in UNTRANSLATED and not is_erf and not is_index


def padded(m: Any) -> list[Any]:
    """Zeros above most numbers, in front of pools whose own border is -inf."""
    pools = [m.MaxPooling2D(2), m.MaxPooling2D((1, 3), 1), m.AveragePooling2D(2)]
    front = [m.Rescaling(1, -5), m.ZeroPadding2D(((1, 2), (2, 0)))]
    chains = [keras.Sequential([*front, pool, m.Conv2D(2, 1)]) for pool in pools]
    deep = [m.Conv2D(4, 3, 2, "same"), m.BatchNormalization(), m.ReLU(threshold=0.1)]
    return [*chains, keras.Sequential([*deep, m.MaxPooling2D(2, padding="same"), m.Flatten()])]


def activations(m: Any) -> list[Any]:
    names = "elu leaky_relu log_sigmoid relu6 sigmoid silu softmax softplus tanh"
    return [m.Activation(name) for name in names.split()]


def merged(x: Any, m: Any) -> list[Any]:
    y = m.Conv2D(4, 1)(x)
    return [m.Add()([x, y, x]), m.Multiply()([x, y]), *(m.Concatenate(n)([y, x]) for n in (-1, 1))]


CASES: dict[str, Any] = {
    **{key: value for key, value in LAYERS.items() if key != "recurrent"},
    "padding": (IMAGE, padded),
    "activations": (ROW, activations),
    "joins": (IMAGE, lambda m: [lambda x: merged(x, m)]),
}


@pytest.mark.parametrize("case", CASES)
def test_onnxruntime_computes_what_keras_does(case: str, tmp_path: Path) -> None:
    shape, make = CASES[case]
    x = keras.Input(shape)
    y = keras.layers.PReLU()(x)
    outputs = [layer(y) for layer in make(keras.layers) if is_translated(layer)]
    model = keras.Model(x, keras.tree.flatten(outputs))
    randomize(model)
    export(save_model(tmp_path / "w.safetensors", model), tmp_path / "w.onnx")
    (rows,) = random_rows(model)
    session = onnxruntime.InferenceSession(tmp_path / "w.onnx")
    found, first = session.run(["predictions"], {"rows": rows})[0], 0
    assert found.dtype == np.float32
    for output in model.outputs:
        expected = ravelled([keras.Model(x, output)(rows).detach()])
        part = found[:, first : (first := first + expected.shape[1])]
        np.testing.assert_allclose(part, expected, rtol=1e-4, atol=1e-5, err_msg=output.name)
    assert first == found.shape[1]


def test_a_layer_with_an_op_that_has_no_translation_is_refused(tmp_path: Path) -> None:
    weights = tmp_path / "w.safetensors"
    for shape, make in LAYERS.values():
        layers = [layer for layer in make(keras.layers) if not is_translated(layer)]
        for layer in {type(layer): layer for layer in layers}.values():
            x = keras.Input(shape)
            save_model(weights, keras.Model(x, layer(keras.layers.PReLU()(x))))
            with pytest.raises(InputError, match="has no translation"):
                export(weights, tmp_path / "w.onnx")
