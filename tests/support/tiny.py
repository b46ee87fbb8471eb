"""Tiny prepared data sets, and the programs run on them as a user runs them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tandem.artifacts.checkpoint import Checkpoint, save_checkpoint
from tandem.data.batch_file import write_batch
from tandem.data.colour import COVARIANCE_NAME, colour_moments, covariance_of
from tandem.data.manifest import Manifest, Resize, Split, write_manifest
from tandem.files import write_array
from tandem.layers.network import NetworkDescription

ROOT = Path(__file__).parents[2]


def python_path(project: Path = ROOT) -> str:
    """PYTHONPATH for a program of the project: its folder, before what is there already."""
    return os.pathsep.join(filter(None, (str(project), os.environ.get("PYTHONPATH"))))


def prepare(
    folder: Path,
    train: int = 13,
    validation: int = 7,
    classes: int = 3,
    image_size: int = 70,
    per_file: int = 5,
    layout: str = "b01c",
    seed: int = 0,
) -> Path:
    """Write a prepared data set of random pictures; return `folder`.

    A picture is noise whose brightness depends on its class, so that there is something to learn.
    """
    rng = np.random.default_rng(seed)
    splits = {}
    pixels = {}
    for name, size in (("train", train), ("val", validation)):
        labels = rng.integers(0, classes, size)
        noise = rng.integers(0, 128, (size, image_size, image_size, 3))
        brightness = 127 * labels // max(classes - 1, 1)
        pixels[name] = (noise + brightness[:, None, None, None]).astype(np.uint8)
        files = []
        for start in range(0, size, per_file):
            file = folder / f"{name}_hkl" / f"{start // per_file:04}.hkl"
            file.parent.mkdir(parents=True, exist_ok=True)
            write_batch(file, pixels[name][start : start + per_file], layout)
            files.append(f"{name}_hkl/{file.name}")
        splits[name] = Split(tuple(files), tuple(f"{i}.JPEG" for i in range(size)), labels)
        (folder / "labels").mkdir(exist_ok=True)
        write_array(folder / "labels" / f"{name}_labels.npy", labels)
    (folder / "misc").mkdir(exist_ok=True)
    mean = pixels["train"].mean(axis=0, dtype=float).astype(np.float32).transpose(2, 0, 1)
    write_array(folder / "misc" / "img_mean.npy", mean)
    covariance = covariance_of(colour_moments(pixels["train"]))
    write_array(folder / "misc" / COVARIANCE_NAME, covariance)
    wnids = tuple(f"n{i:08}" for i in range(classes))
    manifest = Manifest(image_size, layout, per_file, wnids, seed, {}, splits)
    write_manifest(folder / "manifest.json", manifest)
    return folder


def save_weights(
    path: Path,
    wnids: tuple[str, ...] | None,
    classes: int | None = None,
    crop_size: int = 67,
    width: float = 0.05,
    norm_before_pool: bool = False,
    claimed_width: float | None = None,
    value: float | None = None,
    resize: Resize = "squash",
    pad: int = 0,
    **fields: Any,
) -> Path:
    """Write a checkpoint of untrained weights; return `path`.

    Every layer's output varies with the picture, unless all weights have one `value`.
    """
    from alex_net import AlexNet

    classes = classes or len(wnids or ())
    net = AlexNet(crop_size, classes, width, norm_before_pool=norm_before_pool)
    rng = np.random.default_rng(5)
    weights = {}
    for name, variable in net.parameters.items():
        shape = variable.type.shape
        inputs = np.prod(shape[1:]) if len(shape) == 4 else shape[0]
        std = np.sqrt(2 / inputs) if net.parameters.declared[name].kind == "weight" else 0.1
        weights[name] = (std * rng.normal(size=shape)).astype(np.float32)
        if value is not None:
            weights[name][...] = value
    network = NetworkDescription(
        crop_size,
        classes,
        claimed_width or width,
        wnids,
        norm_before_pool,
        resize=resize,
        pad=pad,
    )
    save_checkpoint(path, Checkpoint(weights, {}, network, **fields))
    return path


def settings(data: Path, run: Path, **changes: Any) -> list[str]:
    """Command-line settings for a quick run on a tiny data set."""
    values = {
        "data_folder": data,
        "weights_dir": run,
        "crop_size": 67,
        "width": 0.05,
        "batch_size": 2,
        "n_epochs": 1,
        "print_freq": 1,
        "threads": 1,
        "devices": ["cpu"],
        **changes,
    }
    arguments = []
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        arguments += [
            f"--{name}",
            *(json.dumps(v) if isinstance(v, bool) else str(v) for v in items),
        ]
    return arguments


def run_program(
    program: str, arguments: Iterable[str], timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a program of the project as a user does, from its top folder."""
    return subprocess.run(
        [sys.executable, program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def start(command: Sequence[str], folder: Path = ROOT, **options: Any) -> subprocess.Popen[str]:
    """Start a command in a process group of its own, as a shell does."""
    usual = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "env": {**os.environ, "PYTHONPATH": python_path()},
    }
    return subprocess.Popen(
        command, cwd=folder, text=True, start_new_session=True, **usual | options
    )


def start_program(program: str, arguments: Iterable[str], **options: Any) -> subprocess.Popen[str]:
    """Start a program of the project, from its top folder."""
    return start([sys.executable, program, *arguments], **options)


def start_script(folder: Path, text: str, *words: object) -> subprocess.Popen[str]:
    """Start a script of this text, which is written to the folder in which it runs."""
    script = folder / "script.py"
    script.write_text(text)
    return start([sys.executable, str(script), *map(str, words)], folder)


def finish(
    process: subprocess.Popen[str], status: int = 0, timeout: float = 120
) -> tuple[str, str]:
    """Wait for the end of a process and its group; return what it has printed, and its errors."""
    try:
        output, errors = process.communicate(timeout=timeout)
        assert process.returncode == status, errors if errors is not None else output
        assert is_gone(process.pid), "a process was left behind"
    except BaseException:
        kill(process)
        raise
    return output, errors


def kill(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Kill a process and what is left of its group; return what it has printed, and its errors."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    return process.communicate()


def wait_until(
    condition: Callable[[], Any], seconds: float, process: subprocess.Popen[str] | None = None
) -> Any:
    """Wait for a condition, at most until a process ends; return the condition's last value."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            break
        time.sleep(0.02)
    return found


def open_files(pid: int | str = "self") -> int:
    """Return the number of files, pipes and sockets that a process has open."""
    return len([*Path(f"/proc/{pid}/fd").iterdir()])


def group_members(group: int) -> list[int]:
    """Processes of a group that are alive."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        fields = text.rpartition(")")[2].split()
        if int(fields[2]) == group and fields[0] != "Z":
            members.append(int(stat.parent.name))
    return members


def state_of(pid: int) -> str:
    """Return the letter of a process's state; "Z", a zombie's, also where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def descendants() -> set[int]:
    """Processes that this one has started, or had started by another, but for Python's helpers."""
    found: set[int] = set()
    new = {os.getpid()}
    while new:
        parents, new = new, set()
        for parent in parents:
            for children in Path(f"/proc/{parent}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    new |= {int(child) for child in children.read_text().split()}
        found |= new
    return {pid for pid in found if not is_helper(pid)}


def is_helper(pid: int) -> bool:
    """Whether it is a process that ends with its program, not one that works, or is gone."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return True
    return b"resource_tracker" in command or name == "libraries"


def is_gone(group: int, seconds: float = 5.0) -> bool:
    """Whether no process of a group is left; multiprocessing's own helper ends a moment later."""
    return bool(wait_until(lambda: not group_members(group), seconds))


_OF_OTHERS = ("sem.", ".org.chromium.", ".com.google.", "mpich_shm")  # ours makes no such names


def shared_memory() -> set[str]:
    """Names in the machine's shared memory folder, except those of other programs."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return set()
    return {path.name for path in folder.iterdir() if not path.name.startswith(_OF_OTHERS)}


def find_process(group: int, name: str) -> int:
    """Find a process of a run by the name that it has given itself, or raise LookupError."""
    wanted = name.replace(" ", "-")
    for member in group_members(group):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{member}/comm").read_text().strip() == wanted:
                return member
    raise LookupError(f"no process is named {name}")


def wait_for_steps(
    run: Path, process: "subprocess.Popen[str]", steps: int, seconds: float = 60
) -> None:
    """Wait until the record has that many lines."""
    assert wait_until(lambda: count_steps(run) >= steps, seconds, process), kill(process)


def count_steps(run: Path) -> int:
    """Return the number of lines of a run's record, which may not have begun."""
    record = run / "record.jsonl"
    return record.read_bytes().count(b"\n") if record.exists() else 0


def read_record(run: Path) -> list[dict[str, object]]:
    """The lines of a record, unchecked."""
    return [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]


def without_times(line: dict[str, object]) -> dict[str, object]:
    """A line of the record but for how long things took."""
    return {key: value for key, value in line.items() if "second" not in key}
