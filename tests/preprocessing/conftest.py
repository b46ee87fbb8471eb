"""Pictures to preprocess. The programs are scripts: they find modules in their own folder."""

import sys
from pathlib import Path

import pytest

from tests.support.picture_files import Pictures, Refusal, write_small

_ROOT = Path(__file__).resolve().parents[2]
for folder in ("preprocessing", "demo"):
    sys.path.insert(0, str(_ROOT / folder))


@pytest.fixture
def pictures(tmp_path: Path) -> Pictures:
    return write_small(tmp_path / "pictures")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def refusal(pictures: Pictures, out: Path, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Run make_hkl.py, or another program; it ends with status 2, and this is its message."""
    import make_hkl

    def run(*options: str, program=make_hkl) -> str:
        capsys.readouterr()
        assert program.main(pictures.options(out, *options)) == 2
        return capsys.readouterr().err

    return run
