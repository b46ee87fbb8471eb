"""The scripts for a first look at a GPU: every name of the project that they use exists."""

import ast
import importlib
import pkgutil
import subprocess
from pathlib import Path

import pytest

from tests.gpu.compile.fake_device import REPLACED

HERE = Path(__file__).parent
SCRIPTS = [path for folder in ("first", "compile") for path in sorted((HERE / folder).glob("*.py"))]
OURS = ("alex_net", "benchmarks", "examples", "tandem", "tests")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_imported_name_exists(script: Path) -> None:
    nodes = [n for n in ast.walk(ast.parse(script.read_text())) if isinstance(n, ast.ImportFrom)]
    for node in nodes:
        assert node.module
        if node.module.partition(".")[0] in OURS:
            module = importlib.import_module(node.module)
            missing = [each.name for each in node.names if not hasattr(module, each.name)]
            assert not missing, f"{script.name}: {node.module} has no {missing}"


@pytest.mark.parametrize("name", REPLACED)
def test_every_patched_name_exists(name: str) -> None:
    assert callable(pkgutil.resolve_name(name))


def test_the_shell_script_is_sound_and_explains_itself() -> None:
    script = HERE / "first" / "first_gpu.sh"
    subprocess.run(["bash", "-n", script], check=True)
    result = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert "look|step|runs|learn|profile" in result.stdout
    assert subprocess.run([script, "nothing"], capture_output=True, cwd=HERE).returncode == 2
