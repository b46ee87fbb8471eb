"""Networks of `tandem.models` in every program: training, resuming, classifying, ONNX."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tandem.classify.cli import run_classification
from tandem.export.cli import main as export
from tests.support.lazily import Lazily
from tests.support.runs import assert_same_weights, train
from tests.support.tiny import prepare, read_record

onnxruntime = Lazily("onnxruntime")

pytestmark = pytest.mark.slow

NAMES = {
    "tandem.models.resnet:ResNet20": {"crop_size": 32, "width": 0.5},
    "tandem.models.googlenet:GoogLeNetBN": {"crop_size": 96, "width": 0.125},
    "tandem.models.mobilenet:MobileNetV2": {"crop_size": 64, "width": 0.25},
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_a_network_in_every_program(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    side = int(NAMES[name]["crop_size"])
    data = prepare(tmp_path / "data", train=26, validation=9, image_size=side + 8)
    changes = {"network": name, **NAMES[name], "batch_size": 4, "learning_rate": 0.02}
    whole = train(data, tmp_path / "whole", 400, **changes, n_epochs=3)
    parts = train(data, tmp_path / "parts", 400, **changes, n_epochs=1)
    train(data, parts, 400, **changes, n_epochs=3, resume_train=True)
    weights = whole / "epoch-0003.safetensors"
    assert_same_weights(parts, whole)
    losses = [float(str(line["loss"])) for line in read_record(whole) if line["event"] == "train"]
    assert np.isfinite(losses).all()

    picture = np.random.default_rng(1).integers(0, 256, (side + 8, side + 8, 3)).astype(np.uint8)
    Image.fromarray(picture).save(tmp_path / "noise.png")
    guess = ["--network", name, "--weights", str(weights), "--json", str(tmp_path / "noise.png")]
    assert run_classification(guess, None) == 0
    guesses = json.loads(capsys.readouterr().out)["guesses"]
    found = [guess["probability"] for guess in guesses]
    assert sum(found) == pytest.approx(1, rel=1e-4)

    target = tmp_path / "net.onnx"
    assert export([str(weights), str(target), "--network", name]) == 0
    session = onnxruntime.InferenceSession(target)
    (probabilities,) = session.run(["probabilities"], {"pictures": picture[np.newaxis]})
    np.testing.assert_allclose(sorted(probabilities[0]), sorted(found), rtol=1e-3)
