"""The programs as a user starts them, and that text and labels follow the manifest."""

import errno
import os
import re
import subprocess
import sys
import termios
from pathlib import Path

import make_hkl
import make_labels
import make_train_val_txt
import numpy as np
import pytest

from tandem.data.dataset import open_split
from tandem.data.manifest import read_manifest
from tests.support.pages import uninstalled
from tests.support.picture_files import (
    WNID_OF_ID,
    Pictures,
    Refusal,
    encoded,
    stored,
    write_exact,
    write_synsets,
)

FOLDER = Path(make_hkl.__file__).parent


def run(
    *command: str, cwd: Path | None = None, python: str | Path = sys.executable
) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHON": str(python)}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


def test_generate_data_runs_all_three(pictures: Pictures, out: Path, tmp_path: Path) -> None:
    """Also where the project is a clone that nobody has installed."""
    pictures.spoil(("train", "n03", 1))
    program, python = str(FOLDER / "generate_data.sh"), uninstalled(tmp_path)
    ended = run(program, *pictures.options(out, "--workers", "2"), cwd=tmp_path, python=python)
    assert ended.returncode == 0, ended.stderr
    assert "train/n03/001.JPEG" in (out / "misc" / "skipped.txt").read_text()
    manifest = read_manifest(out)
    for split in ("train", "val"):
        lines = (out / f"{split}.txt").read_text().splitlines()
        labels = np.load(out / "labels" / f"{split}_labels.npy")
        assert labels.dtype == np.int64
        assert len(lines) == {"train": 12, "val": 6}[split]
        for line, label, pixels in zip(lines, labels, stored(out, split), strict=True):
            name, _, number = line.rpartition(" ")
            wnid, file = name.split("/")
            assert manifest.wnids[int(number)] == wnid
            assert int(number) == label
            np.testing.assert_array_equal(pixels, encoded(split, wnid, int(file[:3])))
        assert open_split(manifest, out, split, out / "labels").size == len(lines)


def test_generate_data_prints_one_help() -> None:
    ended = run(str(FOLDER / "generate_data.sh"), "--help")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("usage: ") == 1


@pytest.mark.slow
def test_generate_toy_data_takes_a_part(tmp_path: Path) -> None:
    pictures = Pictures(tmp_path / "pictures")
    pictures.write("val", {"n01": 3})
    write_exact(pictures.path("train", "n01", 0), encoded("train", "n01", 0))
    for number in range(1, 2600):
        pictures.path("train", "n01", number).hardlink_to(pictures.path("train", "n01", 0))
    out = tmp_path / "toy"
    options = pictures.options(out, "--batch-size", "1000", "--workers", "1")
    ended = run(str(FOLDER / "generate_toy_data.sh"), *options)
    assert ended.returncode == 0, ended.stderr
    manifest = read_manifest(out)
    assert manifest.counts("train") == (1000, 1000, 560)
    assert manifest.counts("val") == (3,)


def test_a_program_starts_in_its_own_folder_with_relative_paths(
    pictures: Pictures, tmp_path: Path
) -> None:
    here = os.path.relpath(tmp_path, FOLDER)
    relative = Pictures(Path(here) / "pictures").options(Path(here) / "out")
    ended = run(sys.executable, "make_hkl.py", *relative, cwd=FOLDER)
    assert ended.returncode == 0, ended.stderr
    assert len(stored(tmp_path / "out", "train")) == 13


def test_the_layout_of_ilsvrc_from_end_to_end(pictures: Pictures, tmp_path: Path) -> None:
    """Labels follow the ground truth, by ID and not by the order of wnids."""
    val, out = tmp_path / "flat", tmp_path / "out"
    truth = [3, 1, 2, 2, 1]
    for number, key in enumerate(truth, 1):
        name = f"ILSVRC2012_val_{number:08d}.JPEG"
        write_exact(val / name, encoded("val", WNID_OF_ID[key], number))
    (tmp_path / "truth.txt").write_text("\n".join(map(str, truth)))
    write_synsets(tmp_path / "meta.mat", WNID_OF_ID)
    options = pictures.options(
        out,
        *("--val-img-dir", str(val), "--val-label-file", str(tmp_path / "truth.txt")),
        *("--meta-clsloc-mat", str(tmp_path / "meta.mat")),
    )
    for program in (make_hkl, make_train_val_txt, make_labels):
        assert program.main(options) == 0
    manifest, labels = read_manifest(out), np.load(out / "labels" / "val_labels.npy")
    pairs = zip(labels, stored(out, "val"), truth, strict=True)
    for number, (label, pixels, key) in enumerate(pairs, 1):
        assert manifest.wnids[label] == WNID_OF_ID[key]
        np.testing.assert_array_equal(pixels, encoded("val", WNID_OF_ID[key], number))
    first = (out / "val.txt").read_text().splitlines()[0]
    assert first == "ILSVRC2012_val_00000001.JPEG 1"


@pytest.mark.parametrize("program", [make_labels, make_train_val_txt])
def test_without_a_manifest_nothing_is_written(out: Path, program, refusal: Refusal) -> None:
    error = refusal(program=program)
    assert error.startswith(f"error: {out / 'manifest.json'}: there is no manifest")
    assert not out.exists()


@pytest.mark.parametrize(
    ("program", "name"),
    [(make_hkl, "manifest.json"), (make_train_val_txt, "train.txt")],
)
def test_a_full_disk_is_one_message_that_names_the_file(
    pictures: Pictures, out: Path, program, name: str, monkeypatch, refusal: Refusal
) -> None:
    if program is not make_hkl:
        assert make_hkl.main(pictures.options(out)) == 0
    original = Path.write_text

    def write_text(path: Path, text: str, encoding: str | None = None) -> int:
        if path.name.startswith(f".{Path(name).stem}."):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, text, encoding)

    monkeypatch.setattr(Path, "write_text", write_text)
    assert f"error: {out / name}: No space left on device\n" in refusal(program=program)
    assert not (out / name).exists()


def test_a_folder_that_may_not_be_written_is_named(
    pictures: Pictures, out: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    assert make_hkl.main(pictures.options(out)) == 0

    def touch(path: Path, exist_ok: bool) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "touch", touch)
    path = out / "labels" / "train_labels.npy"
    assert refusal(program=make_labels) == f"error: {path}: Permission denied\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--image-sise", "8"), "did you mean --image-size?"),
        (
            ("--train-img-dir", "/nowhere"),
            "/nowhere (train_img_dir): the folder cannot be read: No such file or directory",
        ),
        (("--config", "/nowhere.yaml"), "/nowhere.yaml: cannot be read"),
    ],
)
def test_bad_input_ends_with_one_message_and_status_2(
    pictures: Pictures, out: Path, options: tuple[str, ...], message: str
) -> None:
    ended = run(sys.executable, str(FOLDER / "make_hkl.py"), *pictures.options(out, *options))
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize("program", ["make_hkl.py", "make_labels.py", "make_train_val_txt.py"])
def test_help_is_the_launch_commands_and_every_option(program: str) -> None:
    ended = run(sys.executable, str(FOLDER / program), "--help")
    assert ended.returncode == 0
    assert f"python preprocessing/{program}" in ended.stdout
    assert "--image_size" in ended.stdout


COPIES = """
import sys, threading
from concurrent.futures import ProcessPoolExecutor
spawn, threads = ProcessPoolExecutor._spawn_process, []
def watched(self):
    threads.append(threading.active_count())
    spawn(self)
ProcessPoolExecutor._spawn_process = watched
sys.path.insert(0, sys.argv.pop(1))
import make_hkl
sys.argv[0] = "make_hkl.py"
assert make_hkl.main() == 0
print(threads)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are copies on Linux alone")
def test_processes_are_copied_before_the_bar_has_its_thread(
    pictures: Pictures, tmp_path: Path
) -> None:
    leader, terminal = os.openpty()
    options = pictures.options(tmp_path / "out")
    options[options.index("--workers") + 1] = "2"
    command = [sys.executable, "-c", COPIES, str(FOLDER), *options]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, timeout=120)
    os.close(terminal)
    os.close(leader)
    assert ended.stdout.decode() == "[1, 1]\n"


def test_on_a_terminal_there_is_a_bar_and_elsewhere_lines(
    pictures: Pictures, tmp_path: Path
) -> None:
    """The bar has the rate and the time left; in a log file it would be thousands of lines."""
    command = [sys.executable, str(FOLDER / "make_hkl.py")]
    leader, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (25, 100))
    ended = subprocess.run(
        [*command, *pictures.options(tmp_path / "shown")], stderr=terminal, timeout=120
    )
    os.close(terminal)
    shown = os.read(leader, 100_000).decode()
    os.close(leader)
    assert ended.returncode == 0
    assert "19/19" in shown
    assert "pictures/s" in shown
    assert re.search(r"\d:\d\d:\d\d.*\d:\d\d:\d\d", shown)  # time so far, time left
    ended = run(*command, *pictures.options(tmp_path / "logged"))
    assert "\r" not in ended.stderr
    assert ended.stderr.splitlines() == [
        f"{tmp_path / 'logged' / 'manifest.json'}: 13 training and 6 validation pictures of"
        " 3 classes; 0 left out"
    ]
