"""Stopped at any moment and started again, a run ends with the same bytes in every file."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import make_hkl
import numpy as np
import pytest
from PIL import Image

from tandem.preprocessing import batches, prepare, report
from tandem.preprocessing.progress import load_progress
from tests.support.picture_files import Pictures, Refusal, contents
from tests.support.stopped_preprocessing import stop
from tests.support.tiny import state_of, wait_until


@pytest.fixture(autouse=True)
def _bad_pictures(pictures: Pictures) -> None:
    pictures.spoil(("train", "n03", 1), ("train", "n20", 2), ("val", "n20", 1))


@pytest.fixture
def expected(tmp_path: Path, pictures: Pictures) -> dict[str, bytes]:
    assert make_hkl.main(pictures.options(tmp_path / "undisturbed")) == 0
    return contents(tmp_path / "undisturbed")


# Where a run may stop, and how often it passes there: three train, two val files.
MOMENTS = [
    *((batches, "write_batch", call) for call in range(5)),
    *((batches, "save_progress", call) for call in range(5)),
    (prepare, "save_progress", 0),
    (prepare, "write_array", 0),
    (prepare, "write_array", 1),
    (report, "write_text", 0),
    (prepare, "write_manifest", 0),
]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("module", "name", "call"), MOMENTS)
def test_a_run_stopped_anywhere_goes_on(
    pictures: Pictures, expected, out: Path, monkeypatch, module, name: str, call: int, after: bool
) -> None:
    stop(monkeypatch, pictures.options(out), module, name, call, after)
    assert contents(out) != expected
    (out / ".progress.abc.partial.npz").write_bytes(b"half")
    if (out / "progress.npz").exists():
        (out / "train_hkl" / ".0001.abc.partial.hkl").write_bytes(b"half")
    assert make_hkl.main(pictures.options(out)) == 0
    assert contents(out) == expected


def test_what_is_done_is_not_done_again(
    pictures: Pictures, expected: dict[str, bytes], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop(monkeypatch, pictures.options(out), batches, "write_batch", 2)
    progress = load_progress(out)
    assert progress is not None
    assert progress.splits["train"].files == 2
    before = {path: path.stat().st_ino for path in (out / "train_hkl").iterdir()}
    decoded: list[int] = []
    advance = prepare.Report.advance
    monkeypatch.setattr(
        prepare.Report, "advance", lambda self, n: (decoded.append(n), advance(self, n))[1]
    )
    assert make_hkl.main(pictures.options(out)) == 0
    assert {path: path.stat().st_ino for path in before} == before
    assert sum(decoded) == 13 + 6 - progress.splits["train"].cursor
    assert contents(out) == expected


def test_a_full_disk_is_one_clear_message(
    pictures: Pictures, expected, out: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    """No later file may be written, and recorded, past one that was not."""
    original = batches.write_batch

    def write(path: Path, *rest: object) -> None:
        if path.name == "0001.hkl":
            raise OSError(28, "No space left on device")
        original(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(batches, "write_batch", write)
        error = refusal()
    assert f"error: {out / 'train_hkl' / '0001.hkl'}: cannot be written: No space" in error
    assert list((out / "train_hkl").iterdir()) == [out / "train_hkl" / "0000.hkl"]
    assert make_hkl.main(pictures.options(out)) == 0
    assert contents(out) == expected


@pytest.mark.parametrize("versions", [{"pillow": "1.0"}, {"numpy": "0.1"}])
def test_a_run_does_not_go_on_with_other_versions(
    pictures: Pictures, out: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal, versions
) -> None:
    """They may decode or resize otherwise; a finished run, though, is still good."""
    stop(monkeypatch, pictures.options(out), prepare, "write_manifest")
    before = contents(out)
    now = prepare._versions()
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_versions", lambda: now | versions)
        error = refusal()
    (name,) = versions
    assert f"a stopped run with versions.{name} {now[name]}, expected" in error
    assert contents(out) == before
    assert make_hkl.main(pictures.options(out)) == 0
    monkeypatch.setattr(prepare, "_versions", lambda: now | versions)
    assert make_hkl.main(pictures.options(out)) == 0


@pytest.mark.parametrize("content", [b"", b"nothing of the kind", b"PK\x03\x04"])
def test_a_damaged_record_is_refused(out: Path, refusal: Refusal, content: bytes) -> None:
    out.mkdir()
    (out / "progress.npz").write_bytes(content)
    assert f"{out / 'progress.npz'}: found something else" in refusal()
    assert contents(out) == {"progress.npz": content}


def record(**changes: object) -> dict[str, object]:
    split = {"cursor": 4, "files": 1, "skipped": []}
    return {
        "spec": {"image_size": 8, "pad": 0},
        "splits": {"train": split, "val": split},
        **changes,
    }


# A compressed array may be a thousand times as large as its file.
@pytest.mark.parametrize(
    ("content", "save"),
    [
        (record(spec=3), np.savez),
        (record(spec={"image_size": 9, "pad": 0}), np.savez),
        (record(splits={}), np.savez),
        (record(splits={"train": {"cursor": "all", "files": 1, "skipped": []}}), np.savez),
        (record(splits={"train": {"cursor": 4, "files": -1, "skipped": []}}), np.savez),
        (
            record(splits={"train": {"cursor": 4, "files": 1, "skipped": [{"position": 1}]}}),
            np.savez,
        ),
        ([], np.savez),
        (record(), np.savez_compressed),
    ],
)
def test_a_record_of_something_else_is_refused(
    out: Path, refusal: Refusal, content: object, save: Callable
) -> None:
    """It is read before anything else is known of the folder."""
    out.mkdir()
    packed = np.frombuffer(json.dumps(content).encode(), np.uint8)
    sums, moments = np.zeros((8, 8, 3), np.int64), np.zeros((4, 4), np.int64)
    save(out / "progress.npz", record=packed, sums=sums, moments=moments)
    reason = " (compressed arrays)" if save is np.savez_compressed else ""
    assert f"{out / 'progress.npz'}: found something else{reason}" in refusal()


def test_a_run_that_an_older_version_began_is_refused(
    pictures: Pictures, out: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    """It has not counted the colours of the pictures that are in batch files already."""
    stop(monkeypatch, pictures.options(out), batches, "write_batch", 2)
    with np.load(out / "progress.npz") as arrays:
        kept = {name: arrays[name] for name in ("record", "sums")}
    np.savez(out / "progress.npz", **kept)
    assert "progress.npz: found something else (a run that an older version began" in refusal()


def write_many(root: Path) -> Pictures:
    """300 JPEGs, large enough that a run can be caught at work."""
    pictures = Pictures(root)
    noise = np.random.default_rng(0).integers(0, 256, (8, 300, 400, 3), np.uint8)
    for split, count in (("train", 260), ("val", 40)):
        for number in range(count):
            path = pictures.path(split, f"n{number % 3:02d}", number)
            path.parent.mkdir(parents=True, exist_ok=True)
            if number < len(noise):
                Image.fromarray(noise[number]).save(path)
            else:
                path.hardlink_to(pictures.path(split, f"n{number % 8 % 3:02d}", number % 8))
    pictures.path("train", "n01", 100).unlink()
    pictures.spoil(("train", "n01", 100))
    return pictures


def children_of(process: int) -> list[int]:
    text = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(child) for child in text.split()]


SIZE = ("--image-size", "128", "--batch-size", "20")
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="finds processes in /proc"
)


def start(pictures: Pictures, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, make_hkl.__file__, *pictures.options(out, *SIZE, "--workers", "2")]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@needs_proc
@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGKILL, -9),
        pytest.param(signal.SIGTERM, -15, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_leaves_no_process_and_goes_on(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    pictures, out = write_many(tmp_path / "many"), tmp_path / "out"
    with start(pictures, out) as process:
        assert wait_until((out / "train_hkl" / "0002.hkl").exists, 60)
        children = children_of(process.pid)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    assert process.returncode == status
    if status == 130:
        assert error.splitlines()[-1] == "stopped; the same command continues from there"
        assert "Traceback" not in error
    assert len(children) >= 2
    assert wait_until(lambda: {state_of(child) for child in children} == {"Z"}, 10)
    assert not (out / "manifest.json").exists()
    assert make_hkl.main(pictures.options(out, *SIZE)) == 0
    assert make_hkl.main(pictures.options(tmp_path / "undisturbed", *SIZE)) == 0
    assert contents(out) == contents(tmp_path / "undisturbed")


@needs_proc
def test_a_dead_worker_ends_the_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with start(write_many(tmp_path / "many"), out) as process:
        assert wait_until((out / "train_hkl" / "0000.hkl").exists, 60)
        workers = [
            child
            for child in children_of(process.pid)
            if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        os.kill(workers[0], signal.SIGKILL)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: a process that decodes pictures died" in error
    assert {state_of(worker) for worker in workers} == {"Z"}


def test_ctrl_c_counts_also_where_python_drops_the_exception(
    out: Path, pictures: Pictures, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a finalizer, where an exception is printed and forgotten."""
    submit = prepare.SplitWriter._submit

    def interrupted(maker: prepare.SplitWriter) -> None:
        submit(maker)
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(prepare.SplitWriter, "_submit", interrupted)
        assert make_hkl.main(pictures.options(out)) == 130
    assert make_hkl.main(pictures.options(out)) == 0
    assert contents(out) == expected


def test_a_resumed_run_takes_no_mean_image_of_another(
    pictures: Pictures, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    stop(monkeypatch, pictures.options(out), batches, "write_batch", 2)
    other = tmp_path / "other"
    other.mkdir()
    (other / "img_mean.npy").write_bytes(b"of another")
    message = f"{other / 'img_mean.npy'}: found a file that no run recorded"
    assert message in refusal("--misc-dir", str(other))
    assert (other / "img_mean.npy").read_bytes() == b"of another"
    options = pictures.options(out, "--misc-dir", str(tmp_path / "new"))
    assert make_hkl.main(options) == 0
    assert (tmp_path / "new" / "img_mean.npy").is_file()
