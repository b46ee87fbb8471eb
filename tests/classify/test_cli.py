"""classify.py as a user runs it: files, folders, the standard input, and what is wrong there."""

import io
import json
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

import classify
from tandem.classify.cli import find_pictures
from tandem.data.manifest import read_manifest
from tests.support.tiny import prepare, run_program, save_weights, settings, start_program

WNIDS = ("n01440764", "n02123045", "n07930864")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights, a mean image, and pictures: three that can be read and one that can't."""
    folder = tmp_path_factory.mktemp("classify")
    save_weights(folder / "w.safetensors", WNIDS)
    rng = np.random.default_rng(4)
    np.save(folder / "mean.npy", rng.uniform(90, 130, (3, 70, 70)).astype(np.float32))
    (folder / "pictures" / "deep").mkdir(parents=True)
    for name in ("pictures/b.png", "pictures/deep/a.JPG", "loose"):
        Image.fromarray(rng.integers(0, 256, (80, 60, 3), np.uint8)).save(folder / name, "PNG")
    (folder / "pictures" / "bad.jpg").write_text("no picture")
    (folder / "pictures" / "notes.txt").write_text("not taken for one")
    return folder


def run(folder: Path, *arguments: str) -> int:
    common = ("--weights", str(folder / "w.safetensors"), "--mean", str(folder / "mean.npy"))
    return classify.main([*common, *arguments])


def test_pictures_are_named_in_order_and_the_bad_one_is_reported(folder: Path, capsys) -> None:
    pictures = folder / "pictures"
    # Two at a time, so that the bad one stands among others.
    assert run(folder, str(folder / "loose"), "--batch_size", "2", str(pictures)) == 1
    output, errors = capsys.readouterr()
    lines = output.splitlines()
    assert lines[::4] == [f"{folder}/loose", f"{pictures}/b.png", f"{pictures}/deep/a.JPG"]
    assert errors == f"error: {pictures}/bad.jpg: not a picture in JPEG, PNG, GIF, BMP, WEBP\n"
    assert any("tench, Tinca tinca  (n01440764)" in line for line in lines)
    shares = [float(line.split()[0]) for line in lines if "%" in line]
    assert len(shares) == 9
    assert sum(shares) == pytest.approx(300, abs=0.1)


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--json", "--top", "2", str(folder / "pictures")) == 1
    first, bad, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["picture"] == str(folder / "pictures" / "b.png")
    keys = ["number", "wnid", "name", "probability"]
    assert [list(guess) for guess in first["guesses"]] == [keys] * 2
    assert first["guesses"][0]["probability"] >= first["guesses"][1]["probability"]
    assert bad["picture"].endswith("bad.jpg")
    assert "not a picture" in bad["error"]
    assert last["guesses"][0]["wnid"] in WNIDS
    assert run(folder, "--json", "--ten_crops", first["picture"]) == 0
    ten_crops = json.loads(capsys.readouterr().out)["guesses"][0]
    assert ten_crops["probability"] != first["guesses"][0]["probability"]


def test_the_standard_input(folder: Path, capsys, monkeypatch) -> None:
    class Input:
        buffer = io.BytesIO((folder / "loose").read_bytes())

    monkeypatch.setattr(sys, "stdin", Input)
    assert run(folder, "--json", "-", str(folder / "loose")) == 0
    piped, named = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert piped["picture"] == "-"
    for one, other in zip(piped["guesses"], named["guesses"], strict=True):
        assert one == other | {"probability": pytest.approx(other["probability"], rel=1e-4)}
    assert run(folder, "-") == 1
    assert "error: standard input: the file is empty" in capsys.readouterr().err


def test_what_is_missing_is_said_and_the_rest_goes_on(folder: Path, tmp_path: Path, capsys) -> None:
    assert run(folder, str(tmp_path), str(folder / "none.png"), str(folder / "loose")) == 1
    output, errors = capsys.readouterr()
    assert output.splitlines()[0] == str(folder / "loose")
    assert f"{tmp_path}: no picture is in this folder" in errors
    assert "none.png: No such file or directory" in errors


def test_what_is_found_in_folders(folder: Path) -> None:
    (folder / "pictures" / ".hidden.png").write_text("")
    given = [str(folder / "pictures"), "-", "nowhere.gif"]
    names = [Path(path).name for path in find_pictures(given)]
    assert names == ["b.png", "bad.jpg", "a.JPG", "-", "nowhere.gif"]


def test_wrong_arguments(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert classify.main(["--weights", str(folder / "none.safetensors"), "x"]) == 2
    assert "none.safetensors: does not exist" in capsys.readouterr().err
    assert run(folder, "--device", "cuda:99", "x") == 2
    assert "cuda:99" in capsys.readouterr().err
    for arguments, message in (
        (["x"], "--weights is missing; it must be a path"),
        (["--weights", "w"], "pictures is missing; it must be files or folders"),
        (["--weights", "w", "x", "--top", "0"], "--top is 0; it must be a whole number of at"),
        (["--weights", "w", "x", "--gpu", "0"], "unknown option --gpu; did you mean --device?"),
        (["--weights", "w", "--image", "x"], "pictures are named without an option"),
    ):
        assert classify.main(arguments) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_it_agrees_with_validation(tmp_path: Path) -> None:
    """Both count the same errors; the pictures of the batch files are written as PNG for this."""
    data = prepare(tmp_path / "data", train=1, validation=23)
    config = {"data_folder": str(data), "mean_file": "misc/img_mean.npy"}
    weights = save_weights(tmp_path / "w.safetensors", read_manifest(data).wnids, config=config)
    arguments = settings(data, tmp_path / "run", batch_size=23)
    result = run_program("validate.py", ["--weights", str(weights), *arguments])
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    manifest = read_manifest(data)
    split = manifest.splits["val"]
    pixels = np.concatenate([h5py.File(data / name)["data"][...] for name in split.files])
    (tmp_path / "png").mkdir()
    for number, (picture, label) in enumerate(zip(pixels, split.labels, strict=True)):
        Image.fromarray(picture).save(tmp_path / "png" / f"{number:04}-{manifest.wnids[label]}.png")
    arguments = ["--weights", str(weights), "--json", str(tmp_path / "png")]
    result = run_program("classify.py", arguments)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(found) == 23
    wrong = [a["guesses"][0]["wnid"] not in Path(a["picture"]).name for a in found]
    assert sum(wrong) / 23 == pytest.approx(record["top1_error"])


@pytest.mark.slow
def test_nobody_need_read_on(folder: Path) -> None:
    """As ``head``, which has enough after a line."""
    common = ["--weights", str(folder / "w.safetensors"), "--mean", str(folder / "mean.npy")]
    pictures = ["--batch_size", "1", *[str(folder / "loose")] * 200]
    process = start_program("classify.py", [*common, *pictures])
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 0
