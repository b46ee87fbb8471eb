"""Exported Keras models, run by onnxruntime, against what Keras predicts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

from tandem.classify import Classifier
from tandem.classify.cli import run_classification
from tandem.errors import InputError
from tandem.export.cli import export, main
from tests.support.keras_models import keras, random_rows, ravelled, save_model
from tests.support.lazily import Lazily

onnx = Lazily("onnx")
onnxruntime = Lazily("onnxruntime")


def chain(shape: tuple[int, ...], *layers: Any) -> Any:
    return keras.Sequential([keras.Input(shape), *layers])


@pytest.mark.parametrize("shape", [(5,), (5, 3), (6, 7, 2)])
def test_rows_of_arrays(tmp_path: Path, shape: tuple[int, ...]) -> None:
    model = chain(shape, keras.layers.Flatten(), keras.layers.Dense(4, "sigmoid"))
    weights = save_model(tmp_path / "w.safetensors", model, options={"output": "sigmoid"})
    assert main([str(weights), str(tmp_path / "w.onnx")]) == 0
    (put,) = onnx.load(tmp_path / "w.onnx").graph.input
    assert put.name == "rows"
    assert put.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    lengths = [d.dim_param or d.dim_value for d in put.type.tensor_type.shape.dim]
    assert lengths == ["batch", *shape]
    session = onnxruntime.InferenceSession(tmp_path / "w.onnx")
    for count in (1, 3):
        (rows,) = random_rows(model, count)
        logits, found = session.run(["logits", "predictions"], {"rows": rows})
        np.testing.assert_allclose(found, model(rows).detach(), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(1 / (1 + np.exp(-logits)), found, rtol=1e-4)
    assert np.ptp(found) > 0.01


def pictures_of(colours: int, activation: str | None = "sigmoid") -> Any:
    m = keras.layers
    front = [m.Rescaling(1 / 255, name="scaled"), m.Conv2D(3, 3), m.Flatten()]
    return chain((6, 6, colours), *front, m.Dense(4, activation))


@pytest.mark.parametrize(("colours", "activation"), [(1, "sigmoid"), (3, "sigmoid"), (3, None)])
def test_pictures_without_a_mean_image(
    tmp_path: Path, colours: int, activation: str | None
) -> None:
    """Grey ones are the mean of the colours; a sigmoid's outputs are no softmax, logits become."""
    names = ("cat", "dog", "cow", "pig")
    model, config = pictures_of(colours, activation), {"data_folder": "none", "mean_file": None}
    weights = save_model(tmp_path / "w.safetensors", model, 6, config, wnids=names)
    pictures = np.random.default_rng(3).integers(0, 256, (5, 6, 6, 3), np.uint8)
    images = pictures.astype(np.float32)
    given = images if colours == 3 else images.mean(axis=3, keepdims=True)
    expected = ravelled([model(given).detach()])
    assert np.abs(expected.sum(axis=1) - 1).max() > 0.1
    if activation is None:
        expected = softmax(expected, axis=1)
    classifier = Classifier.load(weights)
    np.testing.assert_allclose(classifier.probabilities(pictures), expected, rtol=1e-4)
    assert {guess.wnid for guess in classifier.guesses(pictures[:1])[0]} == {*names}
    export(weights, tmp_path / "w.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "w.onnx")
    (found,) = session.run(["probabilities"], {"pictures": pictures})
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    properties = {p.key: json.loads(p.value) for p in onnx.load(tmp_path / "w.onnx").metadata_props}
    assert properties["names"] == [*names]


def test_rows_of_arrays_are_not_classified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = save_model(tmp_path / "w.safetensors", pictures_of(3))
    reason = "found a network of rows of numbers, expected one of pictures; its predictions are"
    with pytest.raises(InputError, match=rf"{reason} those of tandem\.keras\.load_model\(path\)"):
        Classifier.load(weights)
    assert run_classification(["--weights", str(weights), "cat.jpg"], None) == 2
    assert reason in capsys.readouterr().err


def test_own_layers_are_named_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "layers_of_an_export.py").write_text(
        'from tandem.keras import lowers\n@lowers("own:Own")\ndef own(layer, x):\n    return x\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = "layers_of_an_export:own"
    options, config = {"layers": [own]}, {"mean_file": None}
    weights = save_model(tmp_path / "w.safetensors", pictures_of(3), 6, config, options=options)
    arguments = [str(weights), str(tmp_path / "w.onnx")]
    classify = ["--weights", str(weights), "none.jpg"]
    assert main(arguments) == run_classification(classify, None) == 2
    assert capsys.readouterr().err.count(f"so say --layers {own} if you mean it") == 2
    assert main([*arguments, "--layers", own]) == 0
    assert run_classification([*classify, "--layers", own], None) == 1
    assert "none.jpg" in capsys.readouterr().err
