"""The import rules of the design: which package may be imported where, and when."""

import ast
import functools
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
    "torch": ("tandem/backend/", "tandem/distributed/"),
    "pycuda": ("tandem/memory/cuda/",),
    "cuda": ("tandem/distributed/gpu_kernel.py",),
    "h5py": ("tandem/data/",),
    "hickle": ("tandem/data/", "tandem/preprocessing/", "preprocessing/"),
    "mpi4py": ("tandem/distributed/mpi.py",),
    "numba": (
        "tandem/loops.py",
        "tandem/backend/channels_last.py",
        "tandem/backend/dropout_loops.py",
        "tandem/backend/filter_loops.py",
        "tandem/backend/image_loops.py",
        "tandem/backend/norm_loops.py",
        "tandem/backend/product_loops.py",
        "tandem/backend/recurrent_loops.py",
        "tandem/backend/regions.py",
        "tandem/backend/vectors.py",
        "tandem/backend/winograd_loops.py",
    ),
    "simplejpeg": ("tandem/data/decode.py",),
    "tensorboard": ("tandem/artifacts/tensorboard.py",),
    "rich": ("tandem/launch/live_view.py", "tandem/progress_bar.py"),
    "keras": ("tandem/keras/",),
    "onnx": ("tandem/export/",),
    "pooch": ("tandem/datasets/published.py",),
    "pyarrow": ("tandem/preprocessing/sources/parquet.py",),
    "pytensor": (
        "alex_net.py",
        "tandem/layers/",
        "tandem/models/",
        "tandem/ops/",
        "tandem/optim/",
        "tandem/cost/probes.py",
        "tandem/cost/timed_steps.py",
        "tandem/backend/",
        "tandem/parallel/",
        "tandem/placement/",
        "tandem/training/attribution.py",
        "tandem/training/divided_graphs.py",
        "tandem/training/functions.py",
        "tandem/training/graphs.py",
        "tandem/training/network_graphs.py",
        "tandem/training/op_tracing.py",
        "tandem/training/whole_graphs.py",
        "tandem/classify/classifier.py",
        "tandem/export/",
        "tandem/keras/",
        "tandem/catalogue.py",
        "tandem/placement_program.py",
    ),
}
# A package of the library imports only from the rows above its own and, without a circle, from its
# own row.
ROWS = (
    (
        "callbacks",
        "compilers",
        "errors",
        "files",
        "garbage",
        "nested",
        "philox",
        "loops",
        "processor",
        "progress_bar",
        "registry",
        "split",
        "text_table",
        "trace",
        "validation",
        "cli",
    ),
    ("ops", "memory"),
    ("layers", "data", "distributed", "placement", "processes"),
    ("optim", "backend", "config", "models"),
    ("artifacts", "preprocessing", "parallel"),
    ("training",),
    ("launch",),
    ("datasets",),
    (
        "catalogue",
        "classify",
        "convert",
        "cost",
        "demo",
        "export",
        "keras",
        "look",
        "placement_program",
        "plot",
        "report",
        "session",
    ),
    ("__main__",),
)
WITHOUT_CONFIGURATION = {"distributed", "processes", "layers", "optim"}


@functools.cache
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
def test_dependencies_are_imported_only_where_allowed(source: str) -> None:
    for module in imported_modules(source):
        allowed = ALLOWED.get(module.partition(".")[0])
        assert allowed is None or source.startswith(allowed), f"{source} imports {module}"


def test_only_the_tests_of_benchmarks_import_them() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        source = path.relative_to(ROOT).as_posix()
        if not source.startswith(
            ("tests/benchmarks/", "tests/gpu/first/", "tests/gpu/test_scripts")
        ):
            assert not {m for m in imported_modules(source) if m.startswith("benchmarks")}, source


@functools.cache
def imported_packages() -> set[tuple[str, str]]:
    """Each pair of packages of the library of which the first imports the second."""
    found = set()
    for source in (s for s in SOURCES if s.startswith("tandem/") and s.count("/") + 1 > 1):
        package = source.split("/")[1].removesuffix(".py")
        for module in imported_modules(source):
            parts = module.split(".")
            if parts[0] == "tandem" and len(parts) > 1 and parts[1] not in (package, "__version__"):
                found.add((package, parts[1]))
    return {(a, b) for a, b in found if a != "__init__"}


def row_of(package: str) -> int:
    """The row of a package; a new one needs a place there."""
    return next(number for number, row in enumerate(ROWS) if package in row)


def test_packages_import_from_the_rows_above() -> None:
    assert not {(a, b) for a, b in imported_packages() if row_of(b) > row_of(a)}


def test_there_is_no_circle_within_a_row() -> None:
    beside = {(a, b) for a, b in imported_packages() if row_of(a) == row_of(b)}
    reach = set(beside)
    while more := {(a, d) for a, b in reach for c, d in beside if b == c} - reach:
        reach |= more
    assert not {a for a, b in reach if a == b}


def test_packages_without_configuration_import_none() -> None:
    assert not {a for a, b in imported_packages() if b == "config"} & WITHOUT_CONFIGURATION


@pytest.mark.parametrize(
    "source", ["alex_net.py", *(s for s in SOURCES if s.startswith("tandem/models/"))]
)
def test_networks_import_nothing_below_pytensor(source: str) -> None:
    others = {m for m in imported_modules(source) if m.startswith("tandem.")}
    assert {m.split(".")[1] for m in others} <= {"layers", "models"}


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        (
            "train, validate, tandem.training.trainer",
            "torch pytensor numba rich tensorboard PIL",
        ),
        (
            "proc_load, tandem.data.dataset",
            "torch pytensor numba matplotlib rich tensorboard PIL hickle pydantic scipy",
        ),
        ("classify", "torch pytensor numba rich tensorboard"),
        ("tandem.look", "torch pytensor numba rich tensorboard matplotlib"),
        ("tandem.placement_program", "torch numba rich tensorboard matplotlib"),
        ("tandem.cost.program", "torch pytensor numba rich tensorboard matplotlib scipy"),
        ("tandem.datasets", "torch pytensor numba matplotlib rich PIL hickle h5py pooch pydantic"),
        (
            "tandem.keras, tandem.keras.network",
            "torch pytensor numba rich tensorboard matplotlib keras",
        ),
        ("tandem", "numpy"),
        ("tandem.__main__", "numpy pydantic yaml argparse logging"),
        ("tandem.memory.cuda, tandem.distributed.peer_to_peer", "pycuda cuda torch pytensor"),
    ],
)
def test_starting_imports_no_heavy_package(module: str, banned: str) -> None:
    program = f"import sys, {module}; print([m for m in {banned.split()} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
