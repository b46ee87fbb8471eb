"""An exported file, run by onnxruntime, against validate.py on pictures of handwritten digits."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tandem.classify import Classifier
from tandem.data.batch_file import write_batch
from tandem.data.manifest import read_manifest
from tandem.errors import InputError
from tandem.export.cli import export, main
from tests.support.lazily import Lazily
from tests.support.tiny import prepare, run_program, save_weights, settings

onnx = Lazily("onnx")
onnxruntime = Lazily("onnxruntime")
datasets = Lazily("sklearn.datasets")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of which the validation pictures are digits, of the classes that it says."""
    folder = prepare(tmp_path_factory.mktemp("digits"), train=3, validation=40, classes=10)
    split, digits = read_manifest(folder).splits["val"], datasets.load_digits()
    chosen = [digits.images[digits.target == label][i] for i, label in enumerate(split.labels)]
    pictures = np.stack([picture_of(digit) for digit in chosen])
    for number, name in enumerate(split.files):
        write_batch(folder / name, pictures[5 * number : 5 * number + 5], "b01c")
    return folder


def picture_of(digit: np.ndarray) -> np.ndarray:
    grey = Image.fromarray((digit * 15).astype(np.uint8)).resize((70, 70))
    return np.asarray(grey.convert("RGB"))


@pytest.fixture(scope="module")
def pictures(data: Path) -> np.ndarray:
    import h5py

    files = read_manifest(data).splits["val"].files
    return np.concatenate([h5py.File(data / name)["data"][...] for name in files])


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="paper"),
        pytest.param(True, id="norm before pool", marks=pytest.mark.slow),
    ],
)
def norm_before_pool(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def weights(data: Path, norm_before_pool: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"data_folder": str(data), "mean_file": "misc/img_mean.npy"}
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    return save_weights(
        path, read_manifest(data).wnids, norm_before_pool=norm_before_pool, config=config, width=0.1
    )


@pytest.fixture(scope="module")
def exported(weights: Path) -> Path:
    target = weights.with_suffix(".onnx")
    assert main([str(weights), str(target)]) == 0
    return target


def run(model: Path, pictures: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model)
    return session.run(["logits", "probabilities"], {"pictures": pictures})


@pytest.mark.slow
def test_it_agrees_with_validation(
    data: Path,
    weights: Path,
    norm_before_pool: bool,
    exported: Path,
    pictures: np.ndarray,
    tmp_path: Path,
) -> None:
    changes = {"batch_size": 20, "norm_before_pool": norm_before_pool, "width": 0.1}
    arguments = settings(data, tmp_path / "run", **changes)
    result = run_program("validate.py", ["--weights", str(weights), *arguments])
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    logits = run(exported, pictures)[0].astype(float)
    labels = read_manifest(data).splits["val"].labels
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(40), labels]
    order = np.argsort(-logits, axis=1, kind="stable")
    assert record["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert record["top1_error"] == np.mean(order[:, 0] != labels)
    assert record["top5_error"] == np.mean((order[:, :5] != labels[:, None]).all(axis=1))


@pytest.mark.parametrize("pad", [1, 2])
def test_it_takes_pictures_without_their_border(tmp_path: Path, pad: int) -> None:
    """Also where the crop is larger than the picture, and reaches into the border."""
    rng, size, own = np.random.default_rng(6), 70, 70 - 2 * pad
    mean = np.full((3, size, size), 117, np.float32)
    mean[:, pad:-pad, pad:-pad] = rng.uniform(90, 130, (3, own, own))
    np.save(tmp_path / "mean.npy", mean)
    weights = save_weights(tmp_path / "w.safetensors", ("n01", "n02", "n03"), pad=pad)
    classifier = Classifier.load(weights, tmp_path / "mean.npy")
    pictures = rng.integers(0, 256, (7, own, own, 3), np.uint8)
    prepared = np.full((7, size, size, 3), 117, np.uint8)
    prepared[:, pad:-pad, pad:-pad] = pictures
    expected = classifier.probabilities(prepared)
    assert np.ptp(expected, axis=0).max() > 0.001
    target = tmp_path / "w.onnx"
    assert main([str(weights), str(target), "--mean", str(tmp_path / "mean.npy")]) == 0
    np.testing.assert_allclose(run(target, pictures)[1], expected, rtol=1e-4, atol=1e-6)


def test_a_border_whose_colour_nobody_knows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tandem.artifacts.trained_network._stored_size", lambda *_: 70)
    weights = save_weights(
        tmp_path / "w.safetensors", ("n01", "n02"), pad=2, config={"mean_file": None}
    )
    assert main([str(weights), str(tmp_path / "w.onnx")]) == 2
    assert "found a crop_size of 67, pictures of" in capsys.readouterr().err


def test_it_agrees_with_classification(weights: Path, exported: Path, pictures: np.ndarray) -> None:
    expected = Classifier.load(weights).probabilities(pictures)
    assert np.ptp(expected, axis=0).max() > 0.01
    for count in (40, 1):
        found = run(exported, pictures[:count])[1]
        np.testing.assert_allclose(found, expected[:count], rtol=1e-4, atol=1e-6)


def test_the_file_says_what_goes_in_and_what_comes_out(exported: Path, data: Path) -> None:
    model = onnx.load(exported)
    onnx.checker.check_model(model)
    (put,) = model.graph.input
    assert put.name == "pictures"
    lengths = [d.dim_param or d.dim_value for d in put.type.tensor_type.shape.dim]
    assert lengths == ["batch", 70, 70, 3]
    assert put.type.tensor_type.elem_type == onnx.TensorProto.UINT8
    assert [output.name for output in model.graph.output] == ["logits", "probabilities"]
    names = {prop.key: json.loads(prop.value) for prop in model.metadata_props}
    assert names["wnids"] == list(read_manifest(data).wnids)
    assert len(names["names"]) == 10
    assert names["resize"] == "squash"


def test_what_is_refused(
    weights: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tmp_path / "x.onnx"
    for arguments, reason in (
        ([weights, tmp_path / "x.pb"], "x.pb: the name of an ONNX file must end in .onnx"),
        ([tmp_path / "none.safetensors", target], "does not exist"),
        ([weights, tmp_path / "none" / "x.onnx"], "x.onnx: cannot be written"),
        ([weights, target, "--mean", tmp_path / "m.npy"], "there is no mean image"),
    ):
        assert main([str(argument) for argument in arguments]) == 2
        assert reason in capsys.readouterr().err
    monkeypatch.setattr("tandem.export.cli._MOST_BYTES", 1000)
    with pytest.raises(InputError, match="more than one ONNX file holds"):
        export(weights, target)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install onnx"):
        export(weights, target)
    assert list(tmp_path.iterdir()) == []


def test_the_module_is_a_program(tmp_path: Path) -> None:
    result = run_program("-m", ["tandem.export", "none.safetensors", str(tmp_path / "x.onnx")])
    assert result.returncode == 2
    reason = "does not exist; expected a checkpoint (.safetensors)"
    assert result.stderr == f"error: none.safetensors: {reason}\n"
