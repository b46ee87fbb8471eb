"""The notebooks of examples/: a kernel that is interrupted in `fit` continues."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.support.tiny import ROOT, python_path

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_small_and_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < 6000
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


class Notebook:
    """A notebook of examples/ with a kernel of its own, in a folder."""

    def __init__(self, name: str, folder: Path) -> None:
        notebook = nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)
        self.folder = folder
        self.cells = {n: cell for n, cell in enumerate(notebook.cells) if cell.cell_type == "code"}
        self.client = NotebookClient(
            notebook, timeout=600, resources={"metadata": {"path": str(folder)}}
        )

    @contextlib.contextmanager
    def kernel(self) -> Iterator[None]:
        with self.client.setup_kernel(env={**os.environ, "PYTHONPATH": python_path()}):
            yield

    def run(self, *having: str) -> str:
        """Run the cells that have any of these words, or all; return what they print."""
        printed = ""
        for number, cell in self.cells.items():
            if not having or any(words in cell.source for words in having):
                self.client.execute_cell(cell, number)
                printed += "".join(output.get("text", "") for output in cell.outputs)
        return printed

    def interrupt(self, having: str, run: str) -> None:
        """Run a cell, and interrupt the kernel as soon as a run has made some steps."""
        record = self.folder / run / "record.jsonl"

        def wait_and_interrupt() -> None:
            while not (record.exists() and record.stat().st_size):
                time.sleep(0.01)
            os.killpg(os.getpgid(self.client.km.provisioner.pid), 2)  # as Jupyter's servers do

        thread = threading.Thread(target=wait_and_interrupt, daemon=True)
        thread.start()
        with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
            self.run(having)
        thread.join()
        assert list((self.folder / run).glob("epoch-*.safetensors"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_lines_go_on_in_a_second_fit_and_in_a_new_kernel(tmp_path: Path) -> None:
    notebook = Notebook("ten_lines", tmp_path)
    with notebook.kernel():
        notebook.run("load_digits", "Sequential")
        notebook.interrupt("model.fit", "runs/digits")
        assert "Epoch 6/6" in notebook.run("model.fit")
        assert (tmp_path / "runs" / "digits-2").exists()
        assert "accuracy" in notebook.run("model.evaluate", "matplotlib")
    with notebook.kernel():
        printed = notebook.run()
    first = printed.index("Epoch 6/6")  # what is left of the run that was interrupted
    assert "accuracy on the rows" in printed[first:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_trainer_that_was_interrupted_equals_two(tmp_path: Path) -> None:
    """The notebook's last assertion compares the weights."""
    notebook = Notebook("two_trainers", tmp_path)
    with notebook.kernel():
        notebook.run("def trained")
        notebook.interrupt('"runs/one"', "runs/one")
        notebook.run('"runs/one"')
        assert not (tmp_path / "runs" / "one-2").exists()
        printed = notebook.run('"runs/two"', "differences =", "matplotlib")
    assert "32 rows a step by 2 trainers: 16, 16" in printed
    assert "largest difference of a weight: " in printed
