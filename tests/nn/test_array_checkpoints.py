"""Checkpoints of models of arrays in the programs that take checkpoints, after real runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tandem
from tandem import nn
from tandem.artifacts.metrics_log import ValidationRecord, read_records
from tandem.artifacts.run_folder import list_checkpoints
from tandem.classify import Classifier
from tandem.errors import InputError
from tandem.export.cli import export
from tests.support.lazily import Lazily

onnxruntime = Lazily("onnxruntime")

pytestmark = pytest.mark.slow

ROWS = 40
CASES: dict[str, tuple[Any, ...]] = {
    "classes": ((6, 5, 2), "softmax", "sparse_categorical_crossentropy", "cross_entropy"),
    "several labels": ((6, 5, 2), "sigmoid", "binary_crossentropy", "binary_cross_entropy"),
    "numbers": ((4,), None, "mse", "mse"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_of_arrays(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the weights were moved away from the settings of their run."""
    monkeypatch.chdir(tmp_path)
    shape, activation, loss, setting = CASES[case]
    images = len(shape) == 3
    given = [nn.layers.Conv2D(3, 3), nn.layers.BatchNormalization()] if images else []
    model = nn.Sequential(
        [
            nn.layers.Input(shape),
            *given,
            nn.layers.Flatten(),
            nn.layers.Dense(3, activation=activation),
        ]
    )
    model.compile("adam", loss)
    rng = np.random.default_rng(4)
    x = rng.normal(size=(ROWS, *shape)).astype(np.float32)
    y: Any = rng.normal(size=(ROWS, 3)).astype(np.float32)
    if case == "classes":
        y = rng.integers(0, 3, ROWS)
    elif case == "several labels":
        y = (y > 0).astype(np.float32)
    model.fit(
        *(x, y),
        batch_size=8,
        epochs=2,
        validation_split=0.2,
        devices=["cpu"],
        run=tmp_path / "run",
        verbose=0,
    )
    (last,) = [
        record
        for record in read_records(tmp_path / "run" / "record.jsonl")
        if isinstance(record, ValidationRecord) and record.epoch == 2
    ]
    weights = list_checkpoints(tmp_path / "run")[-1]
    moved = weights.rename(tmp_path / "moved.safetensors")
    chosen = {"data_folder": tmp_path / "run" / "data", "devices": ["cpu"], "batch_size": 8}
    found = tandem.validate(moved, {}, **chosen, loss=setting, mean_file=None)
    assert found.loss == pytest.approx(last.loss, rel=1e-5)
    assert found.images == last.images == 8

    expected = nn.load_model(moved).predict(x)
    export(moved, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (predicted,) = session.run(["predictions"], {"rows": x})
    np.testing.assert_allclose(predicted, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=r"nn\.load_model\(path\)\.predict"):
        Classifier.load(moved)
    assert tags(tmp_path / "run") >= {"loss/validation", "loss/training"}


def tags(run: Path) -> set[str]:
    """What event files have curves and histograms of."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = run.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    found = events.Tags()
    assert "weights/dense.weight" in found["histograms"]
    assert not found["images"]
    return {*found["scalars"]}
