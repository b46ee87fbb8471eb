"""The import rules of the design: which package may be imported where, and when."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAMS = ("train.py", "validate.py", "classify.py", "proc_load.py", "alex_net.py")
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [
        *(ROOT / "tandem").rglob("*.py"),
        *(ROOT / "preprocessing").rglob("*.py"),
        *(ROOT / "pretrained").rglob("*.py"),
        *(ROOT / name for name in PROGRAMS),
    ]
)
ALLOWED = {
    "torch": ("tandem/device/", "tandem/exchange/torchrun.py"),
    "pycuda": ("tandem/memory/cuda.py", "tandem/exchange/peer.py"),
    "h5py": ("tandem/data/", "preprocessing/"),
    "hickle": ("tandem/data/", "preprocessing/"),
    "mpi4py": ("tandem/exchange/mpi.py",),
    "numba": ("tandem/exchange/loops.py",),
    "tensorboard": ("tandem/run/events.py",),
    "rich": ("tandem/run/live.py",),
    "onnx": ("tandem/export/",),
    "pytensor": (
        "alex_net.py",
        "tandem/layers.py",
        "tandem/ops/",
        "tandem/device/",
        "tandem/run/model.py",
        "tandem/classify/classifier.py",
        "tandem/export/",
    ),
}
# Which rooms of the library a room may import, beside the leaves and itself.
ROOMS = {
    "memory": set(),
    "data": {"memory"},
    "exchange": {"memory"},
    "ops": set(),
    "layers": {"ops"},
    "device": {"ops"},
    "run": {"exchange", "data", "memory", "device", "layers", "ops"},
    "plot": {"run"},
    "classify": {"run", "data", "device", "ops"},
    "export": {"run", "data", "ops"},
    "convert": {"run", "data", "layers"},
}
LEAVES = {"errors", "files", "philox", "plain_yaml"}


def imported_modules(source: str) -> set[str]:
    """Every module that the file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / source).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_packages_are_imported_only_in_their_rooms(source: str) -> None:
    for module in imported_modules(source):
        allowed = ALLOWED.get(module.partition(".")[0])
        assert allowed is None or source.startswith(allowed), f"{source} imports {module}"


@pytest.mark.parametrize("source", [s for s in SOURCES if s.startswith("tandem/")])
def test_rooms_depend_in_one_direction(source: str) -> None:
    room = source.split("/")[1].removesuffix(".py")
    if room not in ROOMS:
        assert room in LEAVES | {"__init__"}, f"{source} is a room without a rule"
    others = {m.split(".")[1] for m in imported_modules(source) if m.startswith("tandem.")}
    allowed = ROOMS.get(room, set()) | LEAVES | {room}
    assert others <= allowed, f"{source} imports {others - allowed}"


def test_the_network_imports_nothing_below_pytensor() -> None:
    others = {m for m in imported_modules("alex_net.py") if m.startswith("tandem.")}
    assert {m.split(".")[1] for m in others} <= {"layers"}


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("train", "torch pytensor numba rich tensorboard PIL"),
        ("validate", "torch pytensor numba rich tensorboard PIL"),
        ("proc_load", "torch pytensor numba matplotlib rich tensorboard PIL"),
        ("tandem.run.trainer", "torch pytensor numba rich tensorboard PIL"),
        ("classify", "torch pytensor numba rich tensorboard"),
        ("tandem", "numpy"),
        ("tandem.memory.cuda, tandem.exchange.peer", "pycuda torch pytensor"),
    ],
)
def test_starting_imports_no_heavy_package(module: str, banned: str) -> None:
    program = f"import sys, {module}; print([m for m in {banned.split()} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
