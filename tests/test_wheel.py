"""The wheel, away from the clone: what it installs with, what it holds, and that it trains."""

import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tandem import __version__
from tandem.__main__ import VERBS
from tests.support.pages import copy_project
from tests.support.tiny import ROOT, prepare, settings

pytestmark = pytest.mark.slow

EXTRAS = "dev,docs,export,gpu-compile,mpi,parquet"  # PyCUDA, of gpu, has no binary
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
CONSTRAINTS = ROOT / "constraints.txt"
# In no form but source, all of it Python, so that what is built here serves every version.
SOURCE_ONLY = {"cons", "etuples", "logical-unification", "miniKanren"}
PLATFORMS = [*(f"manylinux_2_{minor}" for minor in range(5, 29)), "manylinux2014", "manylinux1"]


def run(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command as a user who has no clone; fail if it does."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    run(*PIP, "wheel", *options, copy_project(tmp_path_factory.mktemp("copy")))
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_the_library_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"tandem_train-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        information = f"tandem_train-{__version__}.dist-info"
        license_text = archive.read(f"{information}/licenses/LICENSE").decode()
        metadata = archive.read(f"{information}/METADATA").decode()
    tracked = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tandem").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == tracked | {"alex_net.py"}
    assert {"tandem/py.typed", "tandem/models/resnet50.yaml"} <= names
    assert license_text == (ROOT / "LICENSE").read_text()
    assert "License-Expression: BSD-3-Clause\n" in metadata


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """The command of the unpacked wheel, with the packages of this environment."""
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    start = "import sys; sys.path[0] = sys.argv.pop(1); from tandem.__main__ import main; "
    return [sys.executable, "-c", start + "raise SystemExit(main())", folder]


def test_a_recipe_of_the_wheel_trains_by_its_name(unpacked: list[object], tmp_path: Path) -> None:
    data, here = prepare(tmp_path / "data", image_size=36), tmp_path / "empty"
    here.mkdir()
    options = settings(data, tmp_path / "run", crop_size=32, width=0.25, batch_size=4)
    run(*unpacked, "train", "--config", "resnet_cifar", *options, cwd=here)
    saved = (tmp_path / "run" / "config.yaml").read_text()
    assert "network: tandem.models.resnet:ResNet20" in saved
    assert (tmp_path / "run" / "epoch-0001.safetensors").exists()


def test_the_demo_of_the_wheel_trains_in_an_empty_folder(
    unpacked: list[object], tmp_path: Path
) -> None:
    last = run(*unpacked, "demo", "--n_epochs", "1", cwd=tmp_path).stdout.strip()
    assert re.fullmatch(r"demo: top-1 error [\d.]+ %, top-5 error .*; see runs/demo", last)
    assert (tmp_path / "runs" / "demo" / "curves.png").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "runs"]


@pytest.mark.timeout(1800)
def test_it_trains_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """The demo's pictures, from JPEGs to a name, by the console command alone."""
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    run(programs / "python", *PIP[1:], "install", "-q", "--constraint", CONSTRAINTS, wheel)
    run(programs / "python", *PIP[1:], "check")
    pictures, here = tmp_path / "pictures", tmp_path / "empty"
    run(sys.executable, ROOT / "demo" / "make_digits.py", "--out", pictures)
    here.mkdir()

    def tandem(*arguments: object) -> str:
        return run(programs / "tandem", *arguments, cwd=here).stdout

    origin = "import tandem, alex_net; print(tandem.__file__, alex_net.__file__)"
    origins = run(programs / "python", "-c", origin, cwd=here).stdout.split()
    assert all(path.startswith(str(tmp_path / "venv")) for path in origins)
    assert tandem("--version") == f"tandem {__version__}\n"
    for verb in VERBS:
        assert tandem(verb, "--help").startswith(f"usage: tandem {verb} ")
    folders = ("--train-img-dir", pictures / "train", "--val-img-dir", pictures / "val")
    tandem("preprocess", *folders, "--tar-root-dir", "data", "--image-size", "72")
    settings = ("--data_folder", "data", "--crop_size", "67", "--batch_size", "32")
    chosen = ("--devices", "cpu", "cpu", "--n_epochs", "2", "--learning_rate", "0.025")
    tandem("train", *settings, *chosen, "--weights_dir", "run")
    weights = "run/epoch-0002.safetensors"
    result = json.loads(tandem("validate", *settings, "--weights", weights))
    assert result["images"] == 360
    record = [json.loads(line) for line in (here / "run" / "record.jsonl").read_text().splitlines()]
    assert result["loss"] == pytest.approx(record[-1]["loss"])
    picture = next((pictures / "val").rglob("*.JPEG"))
    assert "digit_" in tandem("classify", "--weights", weights, picture)
    tandem("plot", "run")
    assert (here / "run" / "curves.png").exists()
    assert sorted(path.name for path in here.iterdir()) == ["data", "run"]


def pins() -> dict[str, str]:
    return dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines())


@pytest.fixture(scope="module")
def built_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels of the packages that the index has in source only."""
    folder = tmp_path_factory.mktemp("built")
    wanted = [f"{name}=={pins()[name]}" for name in SOURCE_ONLY]
    run(*PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, *wanted)
    names = {path.name for path in folder.iterdir()}
    assert all(name.endswith("-py3-none-any.whl") for name in names), names
    return folder


def test_the_packages_of_the_project_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    pinned = {re.sub("[-_.]+", "-", name.lower()) for name in pins()}
    for requirement in itertools.chain(*groups):
        name = re.split("[<>=;]", requirement)[0]
        assert re.sub("[-_.]+", "-", name.lower()) in pinned, requirement


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_the_constraints_resolve(
    version: str, wheel: Path, built_here: Path, tmp_path: Path
) -> None:
    """Nothing is downloaded but what describes the packages; markers are this Python's."""
    platforms = [f"--platform={name}_x86_64" for name in PLATFORMS]
    report = tmp_path / "report.json"
    options = ["--dry-run", "--quiet", "--report", report, "--target", tmp_path / "target"]
    options += ["--only-binary=:all:", "--python-version", version, *platforms]
    options += ["--find-links", built_here, "--constraint", CONSTRAINTS]
    run(*PIP, "install", *options, f"tandem-train[{EXTRAS}] @ {wheel.as_uri()}")
    chosen = json.loads(report.read_text())["install"]
    versions = {entry["metadata"]["name"].lower(): entry["metadata"]["version"] for entry in chosen}
    assert versions["tandem-train"] == __version__
    assert versions["torch"].partition("+")[0] == pins()["torch"]
    assert versions["numpy"] == pins()["numpy"]
