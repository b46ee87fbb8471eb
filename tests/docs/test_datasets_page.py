"""docs/datasets.md: its arrays, and its commands on a few pictures in place of Fashion-MNIST."""

from pathlib import Path

import pytest

from tests.support.data_set_files import random_pictures, write_mnist
from tests.support.pages import code_blocks, copy_project, in_shell
from tests.support.tiny import ROOT

PAGE = ROOT / "docs" / "datasets.md"


def test_its_arrays_are_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = code_blocks(PAGE, "python")
    exec(block, {})
    assert capsys.readouterr().out == "(600, 28, 28) uint8 int64\nAnkle boot\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_commands_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache" / "tandem" / "fashion_mnist"
    folder.mkdir(parents=True)
    write_mnist(folder, random_pictures(256, 64, (28, 28)), packed=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (block,) = code_blocks(PAGE)
    project = copy_project(tmp_path)
    in_shell(project, f"{block.rstrip()} --n_epochs 1 --batch_size 32 --devices cpu")
    assert (project / "runs" / "fashion" / "epoch-0001.safetensors").exists()
