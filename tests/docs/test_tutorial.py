"""The pages whose commands are run, in their order, in a copy of the project."""

import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.support.pages import code_blocks, copy_project, in_shell
from tests.support.tiny import ROOT, read_record

DOCS = ROOT / "docs"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_from_an_empty_folder_to_a_named_picture(tmp_path: Path) -> None:
    project = copy_project(tmp_path)
    printed = {}
    for block in code_blocks(DOCS / "tutorial.md"):
        first = block.split(" --")[0].splitlines()[0]
        printed[first] = (look_at if first == "tensorboard" else in_shell)(project, block)
    (code,) = code_blocks(DOCS / "tutorial.md", "python")
    by_python = in_shell(project, f"python - <<'END'\n{code}\nEND")

    record = read_record(project / "runs" / "tutorial")
    last = [line for line in record if line["event"] == "validation"][-1]
    assert last["epoch"] == 8
    assert float(str(last["top1_error"])) < 0.2
    validated = json.loads(printed["python validate.py"].splitlines()[-1])
    assert validated["top1_error"] == last["top1_error"]
    named = re.findall(r"^ +([\d.]+) %  (\w+)$", printed["python classify.py"], re.MULTILINE)
    assert len(named) == 3
    assert named[0][1] == "digit_3"
    assert by_python.startswith("digit_3 0.")
    assert (project / "runs" / "tutorial" / "curves.png").exists()
    assert (project / "data" / "tutorial" / "look.png").exists()
    assert (project / "tutorial.onnx").stat().st_size > 1e6


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_another_network(tmp_path: Path) -> None:
    project = copy_project(tmp_path)
    outputs = [in_shell(project, block) for block in code_blocks(DOCS / "another-network.md")]
    record = read_record(project / "runs" / "le_net")
    losses = [float(str(line["loss"])) for line in record if line["event"] == "train"]
    assert losses[-1] < losses[0] / 4
    validation = [line for line in record if line["event"] == "validation"]
    assert float(str(validation[-1]["top1_error"])) < 0.1
    assert "digit_3" in outputs[-1]
    assert (project / "le_net.onnx").exists()


def look_at(project: Path, command: str) -> str:
    """Start TensorBoard as the page does, check that it answers, and end it."""
    program = Path(sys.executable).parent / "tensorboard"
    with subprocess.Popen(
        [program, *command.split()[1:]], cwd=project, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stderr is not None
            lines = iter(server.stderr.readline, "")
            address = next(found[0] for line in lines if (found := re.search(r"http://\S+", line)))
            deadline = time.monotonic() + 60
            while True:
                try:
                    with urllib.request.urlopen(f"{address}data/environment") as answer:
                        return str(answer.read().decode())
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.5)
        finally:
            server.terminate()  # background jobs of a shell ignore Ctrl-C
