"""Keras's layers as ONNX files, run by onnxruntime, against Keras."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.export.cli import export
from tests.support.keras_layers import (
    IMAGE,
    LAYERS,
    SEQUENCE,
    activated,
    attended,
    merged,
    of_tokens,
    operated,
    randomize,
    recurrent_of_tokens,
)
from tests.support.keras_models import keras, random_rows, ravelled, save_model
from tests.support.lazily import Lazily

onnxruntime = Lazily("onnxruntime")


def padded(m: Any) -> list[Any]:
    """Zeros above most numbers, in front of pools whose own border is -inf."""
    pools = [m.MaxPooling2D(2), m.MaxPooling2D((1, 3), 1), m.AveragePooling2D(2)]
    front = [m.Rescaling(1, -5), m.ZeroPadding2D(((1, 2), (2, 0)))]
    chains = [keras.Sequential([*front, pool, m.Conv2D(2, 1)]) for pool in pools]
    deep = [m.Conv2D(4, 3, 2, "same"), m.BatchNormalization(), m.ReLU(threshold=0.1)]
    return [*chains, keras.Sequential([*deep, m.MaxPooling2D(2, padding="same"), m.Flatten()])]


def behind(layers: Any) -> Any:
    """Each of several layers behind a PReLU."""
    return lambda x, m: [layer(m.PReLU()(x)) for layer in layers(m)]


TOKENS = (6,)
CASES: dict[str, Any] = {
    **{name: (shape, behind(layers)) for name, (shape, layers) in LAYERS.items()},
    "padding": (IMAGE, behind(padded)),
    "joins": (IMAGE, merged),
    "activations": (IMAGE, partial(activated, without=("sparsemax",))),
    "operations": (IMAGE, operated),
    "attention": (SEQUENCE, attended),
    "masks": (TOKENS, of_tokens),
    "masked steps": (TOKENS, recurrent_of_tokens),
}


@pytest.mark.parametrize("case", CASES)
def test_onnxruntime_computes_what_keras_does(case: str, tmp_path: Path) -> None:
    shape, make = CASES[case]
    x = keras.Input(shape, dtype="int32" if shape == TOKENS else "float32")
    model = keras.Model(x, keras.tree.flatten(make(x, keras.layers)))
    randomize(model)
    export(save_model(tmp_path / "w.safetensors", model), tmp_path / "w.onnx")
    (rows,) = random_rows(model)
    session = onnxruntime.InferenceSession(tmp_path / "w.onnx")
    found, first = session.run(["predictions"], {"rows": rows.astype(np.float32)})[0], 0
    assert found.dtype == np.float32
    atol = 3e-5 if case == "operations" else 1e-5  # remainders of squares up to 300
    for output in model.outputs:
        expected = ravelled([keras.Model(x, output)(rows).detach()])
        part = found[:, first : (first := first + expected.shape[1])]
        np.testing.assert_allclose(part, expected, rtol=1e-5, atol=atol, err_msg=output.name)
    assert first == found.shape[1]
