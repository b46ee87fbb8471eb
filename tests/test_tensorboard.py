"""What TensorBoard shows of whole runs: its readers, its server, and its page in a browser."""

import contextlib
import io
import json
import re
import resource
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from tests.artifacts.test_tensorboard import TRAIN, VALIDATION, curve, read, write
from tests.support.browser import browser_page
from tests.support.runs import assert_same_bits, train
from tests.support.tiny import finish, read_record, settings, start_program

Points = list[tuple[int, float]]


def recorded(run: Path, event: str, key: str) -> Points:
    return [(line["step"], line[key]) for line in read_record(run) if line["event"] == event]  # type: ignore[misc]


def assert_curves_are_the_record(run: Path) -> None:
    for tag, event, key in (
        ("loss/training", "train", "loss"),
        ("error/training_top1", "train", "top1_error"),
        ("run/images_per_second", "train", "images_per_second"),
        ("loss/validation", "validation", "loss"),
        ("error/validation_top5", "validation", "top5_error"),
    ):
        expected = recorded(run, event, key)
        np.testing.assert_allclose(curve(run, tag), expected, rtol=1e-6, err_msg=tag)


@pytest.mark.slow
def test_a_run_that_was_interrupted_has_every_point_once(data: Path, tmp_path: Path) -> None:
    common = {"batch_size": 4, "n_epochs": 3}
    for changes in ({"n_epochs": 2}, {"resume_train": True, "load_epoch": 2}):
        train(data, tmp_path, **{**common, **changes})
    assert len(curve(tmp_path, "loss/training")) == 12
    assert_curves_are_the_record(tmp_path)
    found = read(tmp_path)
    weights = load_file(tmp_path / "epoch-0003.safetensors")
    # The second is left out while the first is processed, a moment before.
    shown_checkpoints = ([4, 8, 12], [4, 12])
    for name, value in weights.items():
        if not name.startswith("momentum/"):
            shown = found.Histograms(f"weights/{name}")
            assert [event.step for event in shown] in shown_checkpoints
            assert shown[-1].histogram_value.sum == pytest.approx(value.sum(dtype=float), rel=1e-4)
            update = found.Histograms(f"updates/{name}")[-1].histogram_value
            assert update.max == weights[f"momentum/{name}"].max()
    for tag in ("filters", "predictions"):
        assert [event.step for event in found.Images(tag)] in shown_checkpoints


@pytest.mark.slow
def test_an_event_file_that_cannot_be_written_changes_nothing(data: Path, tmp_path: Path) -> None:
    common = {"batch_size": 4, "n_epochs": 4}
    plain = train(data, tmp_path / "plain", **common, tensorboard=False)
    assert list(plain.glob("events*")) == []
    # Room for a checkpoint of 430 kB, not for pictures of noise from four epochs.
    run = tmp_path / "run"
    process = start_program(
        "train.py",
        settings(data, run, **common),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (450_000, 450_000)),
    )
    _, errors = finish(process)
    assert errors.count("nothing more is written for TensorBoard: OSError: [Errno 27]") == 1
    assert_same_bits(run, plain)
    shown = curve(run, "loss/training")
    assert 4 <= len(shown) < 16
    np.testing.assert_allclose(shown, recorded(run, "train", "loss")[: len(shown)], rtol=1e-6)


@dataclass(frozen=True)
class Server:
    """The program ``tensorboard``, at its address."""

    url: str

    def get(self, path: str, **query: str) -> Any:
        """What it answers, where that is JSON; otherwise the bytes."""
        address = f"{self.url}data/plugin/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=20) as answer:
            content = answer.read()
        is_json = "json" in answer.headers["Content-Type"]
        return json.loads(content) if is_json else content

    def curve(self, run: str, tag: str) -> Points:
        """Steps and values; none where it knows of none yet."""
        known = self.get("scalars/tags").get(run, {})
        points = self.get("scalars/scalars", run=run, tag=tag) if tag in known else []
        return [(step, value) for _, step, value in points]


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", "0"]
    command += ["--host", "127.0.0.1", "--reload_interval", "1", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        found = (re.search(r"at (http://\S+)", line) for line in process.stderr)
        yield Server(next(filter(None, found))[1])
    finally:
        process.terminate()
        process.communicate()


def eventually(true: Callable[[], Any], seconds: float = 120) -> Any:
    """Wait until something is true, and give it."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, "it has not come"
        time.sleep(0.2)
    return found


@dataclass(frozen=True)
class Watched:
    """A run that goes on as long as it is looked at, and a server that shows it."""

    run: Path
    process: "subprocess.Popen[str]"
    server: Server

    @property
    def goes_on(self) -> bool:
        return self.process.poll() is None


@pytest.fixture(scope="module")
def watched(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    runs = tmp_path_factory.mktemp("runs")
    common = {"n_epochs": 100_000, "batch_size": 4, "snapshot_freq": 5}
    process = start_program("train.py", settings(data, runs / "one", **common))
    try:
        with serving(runs) as server:
            yield Watched(runs / "one", process, server)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


@pytest.mark.slow
def test_the_server_tells_of_a_run_that_goes_on(watched: Watched) -> None:
    server = watched.server
    early = eventually(lambda: server.curve("one", "loss/training"))
    later = eventually(
        lambda: (found := server.curve("one", "loss/training"))[-1][0] > early[-1][0] + 10 and found
    )
    assert watched.goes_on
    expected = recorded(watched.run, "train", "loss")[: len(later)]
    np.testing.assert_allclose(later, expected, rtol=1e-6)
    eventually(lambda: "filters" in server.get("images/tags").get("one", {}))
    answer = server.get("images/images", run="one", tag="predictions", sample="0")
    query = dict(urllib.parse.parse_qsl(answer[0]["query"]))
    content = server.get("images/individualImage", **query)
    with Image.open(io.BytesIO(content)) as sheet:
        assert sheet.format == "JPEG"
    histogram = server.get("histograms/histograms", run="one", tag="weights/conv1.weight")
    assert len(histogram[0][2]) > 30
    assert watched.goes_on


@pytest.mark.slow
def test_a_browser_shows_the_curves_of_a_run_that_goes_on(watched: Watched) -> None:
    eventually(lambda: len(watched.server.curve("one", "loss/validation")) > 3)
    with browser_page() as page:
        page.goto(f"{watched.server.url}?tagFilter=%5Eloss#timeseries")
        assert steps_of_curve(page, "loss/validation") > 0
        seen = steps_of_curve(page, "loss/training")

        def has_grown() -> bool:
            page.locator("app-header-reload button").click()
            page.wait_for_timeout(500)
            return steps_of_curve(page, "loss/training") > seen

        eventually(has_grown)
        assert watched.goes_on
        page.goto(f"{watched.server.url}#images")
        picture = page.locator("tf-image-loader img").first
        picture.wait_for(timeout=120_000)
        eventually(lambda: picture.evaluate("image => image.naturalWidth") > 50)
    assert watched.goes_on


def columns_drawn(canvas: Any) -> int:
    """Columns of pixels of a chart through which something goes."""
    with Image.open(io.BytesIO(canvas.screenshot())) as chart:
        return int((np.asarray(chart.convert("L")) < 160).any(axis=0).sum())


def steps_of_curve(page: Any, tag: str) -> int:
    """How far the curve goes that a card of the page shows."""
    card = page.locator("scalar-card", has=page.locator(f'[title="{tag}"]'))
    row = card.locator("tb-data-table-content-row", has_text="one")
    row.wait_for(timeout=120_000)
    canvas = card.locator("line-chart canvas")
    eventually(lambda: columns_drawn(canvas) > 100)
    _, _, _, step, *_ = row.inner_text().split()
    return int(step.replace(",", ""))


@pytest.mark.slow
@pytest.mark.parametrize("fast", ["true", "false"])
def test_a_server_that_has_seen_an_ended_run_follows_the_resumed_one(
    tmp_path: Path, fast: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    losses = [replace(TRAIN, step=step, loss=float(step)) for step in range(1, 21)]
    errors = [replace(VALIDATION, step=step) for step in (5, 10, 15, 20)]
    write(run, 0, *losses, *errors)
    with serving(tmp_path, "--load_fast", fast) as server:
        eventually(lambda: len(server.curve("run", "loss/validation")) == 4)
        again = [replace(record, loss=-record.loss) for record in losses[12:15]]
        write(run, 12, *again, replace(VALIDATION, step=15, loss=7.0))
        expected = [(step, step if step <= 12 else -step) for step in range(1, 16)]
        eventually(lambda: server.curve("run", "loss/training") == expected)
        assert [step for step, _ in server.curve("run", "loss/validation")] == [5, 10, 15]
        assert server.curve("run", "loss/validation")[-1] == (15, 7.0)
