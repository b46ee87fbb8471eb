"""The programs in pretrained/: what each kind of file becomes, and the messages for others."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import validate
from alex_net import AlexNet
from tandem.artifacts.checkpoint import read_checkpoint, read_header
from tandem.config.command_line import load_config
from tandem.convert import cli, fetch
from tandem.convert.theano_folder import parts
from tandem.data.class_names import imagenet_names
from tandem.launch.prepare import prepare_run
from tandem.layers.network import build_network
from tests.convert.test_theano_folder import random_files, save
from tests.support.caffe_files import PROTO, caffemodel, fill_blob, random_blobs
from tests.support.tiny import ROOT, prepare, run_program, save_weights, settings

SMALL = ["--crop_size", "67", "--width", "0.05"]


def convert(*arguments: object) -> int:
    return cli.run_conversion([str(argument) for argument in arguments], None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    net = AlexNet(67, 3, 0.05)
    return save(tmp_path / "weights", random_files(net, "float32"))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert convert(*arguments) == 2
    errors = capsys.readouterr().err
    assert errors.count("error: ") == 1
    assert "Traceback" not in errors
    return errors


def test_the_originals_folder_and_back(folder: Path, tmp_path: Path) -> None:
    ours = tmp_path / "ours.safetensors"
    assert convert(folder, ours, *SMALL) == 0
    assert read_header(ours).state.epoch == 65
    description = read_header(ours).network
    assert (description.classes, description.wnids) == (3, None)
    assert not description.norm_before_pool
    assert convert(ours, tmp_path / "back") == 0
    theirs = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == theirs
    assert convert(ours, tmp_path / "renumbered", "--epoch", "7") == 0
    assert (tmp_path / "renumbered" / "W0_1_7.npy").read_bytes() == theirs["W0_1_65.npy"]


def test_the_archive(folder: Path, tmp_path: Path) -> None:
    archive = zipped(folder, tmp_path / "weights.zip")
    for target in ("folder", "zip"):
        source = folder if target == "folder" else archive
        assert convert(source, tmp_path / f"{target}.safetensors", *SMALL) == 0
    found, expected = (load_file(tmp_path / f"{n}.safetensors") for n in ("zip", "folder"))
    assert all(found[name].tobytes() == value.tobytes() for name, value in expected.items())


def zipped(folder: Path, path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for file in folder.iterdir():
            archive.write(file, f"parameters_releasing/{file.name}")
    return path


def test_a_converted_checkpoint_fits_a_validation(folder: Path, tmp_path: Path) -> None:
    data, ours = prepare(tmp_path / "data", train=1), tmp_path / "ours.safetensors"
    assert convert(folder, ours, *SMALL) == 0
    config = load_config(settings(data, tmp_path / "run"))
    spec = prepare_run(config, "validate", ours)
    net = build_network(spec.description)
    read_checkpoint(ours, {name: v.type.shape for name, v in net.parameters.items()})


@pytest.mark.slow
def test_a_converted_checkpoint_can_be_validated(folder: Path, tmp_path: Path) -> None:
    data, ours = prepare(tmp_path / "data", train=1), tmp_path / "ours.safetensors"
    assert convert(folder, ours, *SMALL) == 0
    result = run_program("validate.py", ["--weights", str(ours), *settings(data, tmp_path / "r")])
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["epoch"] == 65


def test_caffes_network_and_its_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = AlexNet(67, 3, 0.05)
    shapes = {name: variable.type.shape for name, variable in net.parameters.items()}
    source, ours = tmp_path / "net.caffemodel", tmp_path / "ours.safetensors"
    source.write_bytes(caffemodel(random_blobs(shapes)).SerializeToString())
    assert convert(source, ours, *SMALL) == 0
    assert "AlexNet of 3 classes (norm_before_pool: true)" in capsys.readouterr().err
    assert read_header(ours).network.norm_before_pool
    read_checkpoint(ours, shapes)
    # It says so itself when it is asked to be another network.
    data = prepare(tmp_path / "data", train=1)
    arguments = ["--weights", str(ours), *settings(data, tmp_path / "run")]
    assert validate.main(arguments) == 2
    assert "norm_before_pool true" in capsys.readouterr().err
    assert "normalises after pooling" in refusal(capsys, ours, tmp_path / "folder")
    fill_blob(blob := PROTO["BlobProto"](), np.ones((3, 8, 8), np.float32), modern=False)
    (tmp_path / "mean.binaryproto").write_bytes(blob.SerializeToString())
    assert convert(tmp_path / "mean.binaryproto", tmp_path / "mean.npy") == 0
    assert np.load(tmp_path / "mean.npy").shape == (3, 8, 8)


def test_a_thousand_classes_are_imagenets() -> None:
    described = cli.Settings().describe(1000, True)
    assert described.wnids == tuple(imagenet_names())
    assert (described.crop_size, described.width, described.norm_before_pool) == (227, 1.0, True)
    assert cli.Settings().describe(999).wnids is None


TORCHVISION = {
    "features.0.weight": np.zeros((64, 3, 11, 11), np.float32),
    "features.3.weight": np.zeros((2, 4), np.float32),
    "features.10.weight": np.zeros((2, 4), np.float32),
    "classifier.6.weight": np.zeros((2, 4), np.float32),
}


@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
def test_torchvisions_network_is_told_by_its_names(tmp_path: Path, capsys, form: str) -> None:
    path = tmp_path / f"alexnet.{'safetensors' if form == 'safetensors' else 'pth'}"
    tensors = {name: torch.from_numpy(value) for name, value in TORCHVISION.items()}
    if form == "safetensors":
        save_file(TORCHVISION, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=form == "zip")
    assert "torchvision's AlexNet, which is another network" in refusal(capsys, path, "x")
    # Wherever a checkpoint is expected, too.
    data = prepare(tmp_path / "data", train=1)
    assert validate.main(["--weights", str(path), *settings(data, tmp_path / "run")]) == 2
    assert "torchvision's AlexNet, which is another network" in capsys.readouterr().err


@pytest.mark.parametrize("legacy", [False, True])
def test_other_files_of_pytorch(tmp_path: Path, capsys, legacy: bool) -> None:
    path = tmp_path / "resnet.pt"
    torch.save({"fc.weight": torch.zeros(2)}, path, _use_new_zipfile_serialization=not legacy)
    assert "a PyTorch file, and reading it would execute" in refusal(capsys, path, "x")


def test_what_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "none: does not exist" in refusal(capsys, tmp_path / "none", "x")
    other = tmp_path / "weights.h5"
    other.write_bytes(b"\x89HDF and so on")
    assert "of no kind that can be converted" in refusal(capsys, other, "x")
    assert "must end in .safetensors" in refusal(capsys, folder, tmp_path / "x.npy")
    assert "W_0_65.npy: holds" in refusal(capsys, folder, tmp_path / "x.safetensors")
    text = refusal(capsys, folder, tmp_path / "x.safetensors", "--width", "-1", "--crop_size", 67)
    assert "width must be positive" in text
    assert "whole number of at least 0" in refusal(capsys, folder, "x.safetensors", "--epoch", "-1")
    named = ("x.safetensors", "--network", "alex_net:AlexNet")
    assert f"--network: the conversion of {folder} does not read" in refusal(capsys, folder, *named)
    for kind, target in ((".binaryproto", "x.npy"), (".keras", "x.safetensors")):
        source = tmp_path / f"a{kind}"
        source.touch()
        text = refusal(capsys, source, target, "--width", "0.5")
        assert f"--width: the conversion of {source} does not read it" in text
    assert not (tmp_path / "x.safetensors").exists()


def test_the_folder_of_a_run_is_its_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[Path] = []
    monkeypatch.setattr(cli, "_convert_safetensors", lambda path, *_: converted.append(path))
    for epoch in (1, 2):
        (tmp_path / f"epoch-000{epoch}.safetensors").touch()
    cli.convert(tmp_path, tmp_path / "a.keras", cli.Settings())
    assert converted == [tmp_path / "epoch-0002.safetensors"]


@pytest.mark.slow
def test_the_published_archive_at_its_full_size(tmp_path: Path, monkeypatch) -> None:
    """A synthetic release: the true one has not been seen, only its names and shapes are known."""
    folder = tmp_path / "release"
    folder.mkdir()
    for group in parts(AlexNet()).values():
        for part in group:
            array = np.zeros(part.shape, np.float32)
            array.flat[0], array.flat[-1] = 1, 2
            np.save(folder / f"{part.name}_65.npy", array)
    archive = zipped(folder, tmp_path / "release.zip")
    monkeypatch.setattr(fetch, "SHA1", hashlib.sha1(archive.read_bytes()).hexdigest())
    output = tmp_path / "alexnet.safetensors"
    assert cli.run_fetch(["--file", str(archive), "--output", str(output)], None) == 0
    checkpoint = read_checkpoint(output)
    assert checkpoint.network.wnids == tuple(imagenet_names())
    assert sum(value.size for value in checkpoint.weights.values()) == 60_965_224
    filters = checkpoint.weights["conv1.weight"]
    assert (filters[0, 0, 10, 10], filters[95, 2, 0, 0], filters.sum()) == (1, 2, 3)


def test_fetching_a_file_that_is_another(folder: Path, tmp_path: Path, capsys) -> None:
    archive = zipped(folder, tmp_path / "mine.zip")
    output = tmp_path / "x.safetensors"
    assert cli.run_fetch(["--file", str(archive), "--output", str(output)], None) == 2
    assert "its SHA-1 is" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize("name", ["fetch", "convert"])
def test_the_programs_start_from_anywhere(name: str, tmp_path: Path) -> None:
    """By their path, whatever is installed: a link to another place's packages has no tandem."""
    program = str(ROOT / "pretrained" / f"{name}.py")
    code = "import runpy, sys; "
    code += "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]; "
    code += f"sys.argv = [{program!r}, '--help']; runpy.run_path({program!r}, run_name='__main__')"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert f"python pretrained/{name}.py" in result.stdout


@pytest.mark.slow
def test_a_checkpoint_without_momentum_is_a_beginning(folder: Path, tmp_path: Path) -> None:
    data, ours = prepare(tmp_path / "data"), tmp_path / "ours.safetensors"
    assert convert(folder, ours, *SMALL) == 0
    arguments = settings(data, tmp_path / "run", init_weights=ours, learning_rate=1e-30)
    result = run_program("train.py", [*arguments, "--weight_decay", "0"])
    assert result.returncode == 0, result.stderr
    before, after = load_file(ours), load_file(tmp_path / "run" / "epoch-0001.safetensors")
    assert all((after[name] == value).all() for name, value in before.items())


def test_weights_of_one_size_do_not_fit_another(tmp_path: Path) -> None:
    path = save_weights(tmp_path / "w.safetensors", ("a", "b"), claimed_width=0.2)
    assert convert(path, tmp_path / "folder") == 2
