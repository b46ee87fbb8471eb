"""docs/python.md: the network in PyTorch has the outputs of ours; the programs by import."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tandem.classify import Classifier
from tests.support.pages import code_blocks, copy_project, in_shell
from tests.support.tiny import ROOT, save_weights

TRAINING, USE, NETWORK, INPUT = code_blocks(ROOT / "docs" / "python.md", "python")
DEMO = ("runs/demo/epoch-0016.safetensors", "data/demo/misc/img_mean.npy")
PICTURE = "data/demo/pictures/val/digit_3/0045.JPEG"


def test_the_network_in_pytorch_has_the_outputs_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    for name in (*DEMO, PICTURE):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
    save_weights(Path(DEMO[0]), ("a", "b", "c", "d"))
    np.save(DEMO[1], rng.uniform(90, 130, (3, 72, 72)).astype(np.float32))
    Image.fromarray(rng.integers(0, 256, (90, 80, 3), np.uint8)).save(PICTURE, "PNG")
    names: dict[str, Any] = {}
    exec(f"{NETWORK}\n{INPUT}", names)
    assert "values=tensor" in capsys.readouterr().out

    (ours,) = Classifier.load(*DEMO).classify([PICTURE], top=4)
    theirs = names["logits"].softmax(1)[0].numpy()
    expected = np.array([guess.probability for guess in sorted(ours, key=lambda g: g.number)])
    assert np.ptp(expected) > 0.01
    np.testing.assert_allclose(theirs, expected, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_validation_and_classification_by_import(tmp_path: Path) -> None:
    """Every block of the page, on the demo's data; the demo's weights are of one epoch."""
    project = copy_project(tmp_path)
    in_shell(project, "demo/prepare.sh")
    trained = in_shell(project, f"python - <<'END'\n{TRAINING}\nEND").splitlines()
    assert "runs/python/epoch-0001.safetensors" in trained
    (project / "runs" / "demo").mkdir()
    copied = "cp runs/python/epoch-0001.safetensors runs/demo/epoch-0016.safetensors"
    validated = in_shell(project, f"{copied} && python - <<'END'\n{USE}\nEND").splitlines()
    loss, top1, _, images = map(float, validated[-2].split())
    assert images == 360
    assert 2 < loss < 3
    assert top1 == float(trained[-1])
    name, probability = validated[-1].split()
    theirs = in_shell(project, f"python - <<'END'\n{NETWORK}\n{INPUT}\nEND")
    first = float(theirs.split("[[")[1].split(",")[0])
    assert name.startswith("digit_")
    assert first == pytest.approx(float(probability), rel=1e-3)
