"""Exported graphs, run by onnxruntime, against what they predict in plain NumPy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.artifacts.trained_network import load_network
from tandem.classify import Classifier
from tandem.classify.cli import run_classification
from tandem.errors import InputError
from tandem.export.cli import export, main
from tandem.nn import layers
from tests.support.graphs import describe_graph, predicted, save_graph
from tests.support.lazily import Lazily

onnx = Lazily("onnx")
onnxruntime = Lazily("onnxruntime")

IMAGES = (
    layers.Input((6, 7, 2)),
    layers.ZeroPadding2D(1),
    layers.Conv2D(4, 3, strides=2, padding="same", activation="relu"),
    layers.BatchNormalization(),
    layers.ReLU(threshold=0.1),
    layers.MaxPooling2D(2, padding="same"),
    layers.Flatten(),
    layers.Dense(5, activation="softmax"),
)


def padded(pool: Any) -> tuple[Any, ...]:
    """Zeros above most numbers, in front of a pool whose own border is -inf."""
    border = layers.ZeroPadding2D(((1, 2), (2, 0)))
    return layers.Input((6, 7, 2)), layers.Rescaling(1, -5), border, pool, layers.Conv2D(2, 1)


@pytest.mark.parametrize(
    "given",
    [
        (layers.Input((5,)), layers.Dense(1)),
        (layers.Input((5,)), layers.Dense(4, activation="sigmoid")),
        (layers.Input((5, 3)), layers.Flatten(), layers.Dense(4, activation="tanh")),
        IMAGES,
        (layers.Input((6, 7, 2)), layers.Conv2D(2, 3)),
        padded(layers.MaxPooling2D(2)),
        padded(layers.MaxPooling2D((1, 3), 1)),
        padded(layers.AveragePooling2D(2)),
    ],
    ids=["regression", "sigmoid", "two axes", "images", "image to image", "2", "1 x 3", "mean"],
)
def test_rows_of_arrays(tmp_path: Path, given: tuple[Any, ...]) -> None:
    weights = save_graph(tmp_path / "w.safetensors", describe_graph(given))
    assert main([str(weights), str(tmp_path / "w.onnx")]) == 0
    network = load_network(weights, None).network
    shape = given[0].shape
    model = onnx.load(tmp_path / "w.onnx")
    (put,) = model.graph.input
    assert put.name == "rows"
    assert put.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    lengths = [d.dim_param or d.dim_value for d in put.type.tensor_type.shape.dim]
    assert lengths == ["batch", *shape]
    session = onnxruntime.InferenceSession(tmp_path / "w.onnx")
    for count in (1, 3):
        rows = np.random.default_rng(count).normal(size=(count, *shape)).astype(np.float32)
        expected = predicted(network, rows.transpose(0, 3, 1, 2) if rows.ndim == 4 else rows)
        (found,) = session.run(["predictions"], {"rows": rows})
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert np.ptp(expected) > 0.01


def pictures_of(colours: int) -> tuple[Any, ...]:
    return (
        layers.Input((6, 6, colours)),
        layers.Rescaling(1 / 255),
        layers.Conv2D(3, 3),
        layers.Flatten(),
        layers.Dense(4, activation="sigmoid"),
    )


@pytest.mark.parametrize("colours", [1, 3])
def test_pictures_without_a_mean_image(tmp_path: Path, colours: int) -> None:
    """Grey ones are the mean of the colours; a sigmoid's outputs are no softmax."""
    names = ("cat", "dog", "cow", "pig")
    description = describe_graph(pictures_of(colours), 6, wnids=names)
    config = {"data_folder": "none", "mean_file": None}
    weights = save_graph(tmp_path / "w.safetensors", description, config)
    pictures = np.random.default_rng(3).integers(0, 256, (5, 6, 6, 3), np.uint8)
    images = pictures.transpose(0, 3, 1, 2).astype(np.float32)
    expected = predicted(load_network(weights, None).network, images)
    assert np.abs(expected.sum(axis=1) - 1).max() > 0.1
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
    weights = save_graph(tmp_path / "w.safetensors", describe_graph(IMAGES))
    reason = "found a network of rows of numbers, expected one of pictures; its predictions are"
    with pytest.raises(InputError, match=rf"{reason} those of nn\.load_model\(path\)\.predict"):
        Classifier.load(weights)
    assert run_classification(["--weights", str(weights), "cat.jpg"], None) == 2
    assert reason in capsys.readouterr().err


def test_own_layers_are_named_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "layers_of_an_export.py").write_text(
        "from tandem.nn.layers import ReLU\nclass Own(ReLU):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = "layers_of_an_export:Own"
    description = describe_graph(pictures_of(3), 6, options={"layers": [own]})
    config = {"mean_file": None}
    weights = save_graph(tmp_path / "w.safetensors", description, config)
    arguments = [str(weights), str(tmp_path / "w.onnx")]
    classify = ["--weights", str(weights), "none.jpg"]
    assert main(arguments) == run_classification(classify, None) == 2
    assert capsys.readouterr().err.count(f"so say --layers {own} if you mean it") == 2
    assert main([*arguments, "--layers", own]) == 0
    assert run_classification([*classify, "--layers", own], None) == 1
    assert "none.jpg" in capsys.readouterr().err
