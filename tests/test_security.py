"""Whatever a user may get from elsewhere is data: nothing in it is executed.

A bomb is a pickle, or a YAML tag, that makes a folder when it is read by a reader that executes
what it reads. Each is first read so, in a copy: a bomb that does not go off there would prove
nothing here.
"""

import ast
import os
import pickle
import shutil
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import hickle
import numpy as np
import pytest
import torch
import yaml

import train
import validate
from tandem.artifacts.checkpoint import initial_weights, read_checkpoint, read_header
from tandem.data.batch_file import locate_batch, write_batch
from tandem.errors import InputError
from tests.support import tiny
from tests.support.picture_files import write_synsets
from tests.support.tiny import ROOT, run_program, settings, shared_memory


class Bomb:
    """Pickled, a call of os.mkdir."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


@dataclass(frozen=True)
class Trap:
    """A file with a bomb in it: how to make it, and the reader that sets it off."""

    plant: Callable[[Path, Path], object]  # (file, marker)
    naive: Callable[[Path], Any]


def plant_in_types_table(path: Path, marker: Path) -> None:
    """The pickle by which hickle names the type of an array; everything else is as it should be."""
    write_batch(path, np.zeros((5, 70, 70, 3), np.uint8), "b01c")
    with h5py.File(path, "r+") as file:
        table = file["hickle_types_table"]
        base_type = table["0"].attrs["base_type"]
        del table["0"]
        table["0"] = np.frombuffer(pickle.dumps(Bomb(marker)), "S1").reshape(1, -1)
        table["0"].attrs["base_type"] = base_type


def plant_in_attribute(path: Path, marker: Path) -> None:
    """Where older hickle had the type."""
    write_batch(path, np.zeros((5, 70, 70, 3), np.uint8), "b01c")
    with h5py.File(path, "r+") as file:
        file["data"].attrs["type"] = np.void(pickle.dumps(Bomb(marker)))
        file["data"].attrs["base_type"] = b"ndarray_dtype"


@pytest.mark.filterwarnings("ignore::hickle.lookup.SerializedWarning")
def plant_as_data(path: Path, marker: Path) -> None:
    hickle.dump(Bomb(marker), str(path), mode="w")


def plant_objects(path: Path, marker: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.array([Bomb(marker)], object), allow_pickle=True)


def plant_archive(path: Path, marker: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, record=np.array([Bomb(marker)], object), sums=np.zeros(1))


def load_objects(path: Path) -> Any:
    found = np.load(path, allow_pickle=True)
    return found["record"] if isinstance(found, np.lib.npyio.NpzFile) else found


def load_torch(path: Path) -> Any:
    with path.open("rb") as file:  # of a path, torch.load looks at the suffix
        return torch.load(file, weights_only=False)


TYPES_TABLE = Trap(plant_in_types_table, hickle.load)
ATTRIBUTE = Trap(plant_in_attribute, hickle.load)
HICKLED = Trap(plant_as_data, hickle.load)
PICKLE = Trap(
    lambda path, marker: path.write_bytes(pickle.dumps(Bomb(marker))),
    lambda path: pickle.loads(path.read_bytes()),
)
OBJECTS = Trap(plant_objects, load_objects)
ARCHIVE = Trap(plant_archive, load_objects)
TORCH = Trap(lambda path, marker: torch.save({"conv1.weight": Bomb(marker)}, path), load_torch)
YAML = Trap(
    lambda path, marker: path.write_text(f"seed: !!python/object/apply:os.mkdir [{marker}]\n"),
    lambda path: yaml.unsafe_load(path.read_text()),
)


@dataclass(frozen=True)
class Site:
    """A folder where bombs are planted, and what they make when they go off."""

    folder: Path

    @property
    def marker(self) -> Path:
        return self.folder / "gone_off"

    def plant(self, trap: Trap, path: Path) -> None:
        """Plant a bomb at `path`, once it has gone off elsewhere."""
        control = self.folder / f"control{path.suffix}"
        trap.plant(control, self.marker)
        assert not self.marker.exists()
        try:
            trap.naive(control)
        except Exception as error:
            print("the naive reader ended with", error)
        assert self.marker.is_dir(), "this bomb is a dud"
        self.marker.rmdir()
        path.parent.mkdir(parents=True, exist_ok=True)
        trap.plant(path, self.marker)

    def check(self) -> None:
        assert not self.marker.exists(), "the bomb went off"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Also what a test only implies has to leave the bomb as it is."""
    site = Site(tmp_path)
    yield site
    site.check()


@pytest.fixture
def copied(data: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(data, tmp_path / "data"))


# Training and validation


@pytest.mark.slow
def test_pickles_beside_the_pixels_do_not_matter(site: Site, copied: Path) -> None:
    """The pixels are good, so the run goes on to its end: every process has read these files."""
    site.plant(TYPES_TABLE, copied / "train_hkl" / "0000.hkl")
    site.plant(ATTRIBUTE, copied / "train_hkl" / "0001.hkl")
    site.plant(TYPES_TABLE, copied / "val_hkl" / "0000.hkl")
    changes = {"batch_size": 8, "para_load": True, "compile": False}
    result = run_program("train.py", settings(copied, site.folder / "run", **changes))
    assert result.returncode == 0, result.stderr


IN_THE_DATA = {
    "batch file": ("train_hkl/0000.hkl", HICKLED),
    "batch file, pickle": ("val_hkl/0001.hkl", PICKLE),
    "labels, objects": ("labels/train_labels.npy", OBJECTS),
    "labels, archive": ("labels/val_labels.npy", ARCHIVE),
    "labels, pickle": ("labels/val_labels.npy", PICKLE),
    "mean image, objects": ("misc/img_mean.npy", OBJECTS),
    "mean image, archive": ("misc/img_mean.npy", ARCHIVE),
    "mean image, pickle": ("misc/img_mean.npy", PICKLE),
    "manifest, pickle": ("manifest.json", PICKLE),
    "manifest, YAML": ("manifest.json", YAML),
}


@pytest.mark.filterwarnings("ignore::hickle.lookup.SerializedWarning")
@pytest.mark.parametrize("place", IN_THE_DATA)
def test_training_refuses_a_bomb_in_the_data(site: Site, copied: Path, place, capsys) -> None:
    name, trap = IN_THE_DATA[place]
    site.plant(trap, copied / name)
    assert train.main(settings(copied, site.folder / "run")) == 2
    assert f"error: {copied / name}: " in capsys.readouterr().err


@pytest.mark.parametrize("trap", [PICKLE, TORCH], ids=["pickle", "torch"])
def test_a_checkpoint_is_not_unpickled(site: Site, data: Path, trap: Trap) -> None:
    """Both are what other frameworks call a checkpoint, and a suffix is easily changed."""
    path = site.folder / "run" / "epoch-0001.safetensors"
    site.plant(trap, path)
    refused = r"not a checkpoint, or damaged|a PyTorch file"
    for read in (read_checkpoint, read_header):
        with pytest.raises(InputError, match=refused):
            read(path)
    with pytest.raises(InputError, match=refused):
        initial_weights(path, {"conv1.weight": (1,)})
    run = site.folder / "run"
    assert train.main(settings(data, run, resume_train=True)) == 2
    assert train.main(settings(data, site.folder / "other", init_weights=path)) == 2
    arguments = ["--weights", str(path), *settings(data, run)]
    assert validate.main(arguments) == 2
    assert run_program("validate.py", arguments).returncode == 2


@pytest.mark.parametrize("program", [train.main, validate.main], ids=["train", "validate"])
def test_a_configuration_is_not_constructed(site: Site, data: Path, program) -> None:
    path = site.folder / "mine.yaml"
    site.plant(YAML, path)
    rest = ["--weights", "none.safetensors"] if program is validate.main else []
    assert program([*rest, *settings(data, site.folder / "run", config=path)]) == 2
    value = path.read_text().removeprefix("seed: ").strip()
    # A script may pass on what it was given.
    assert program([*rest, *settings(data, site.folder / "run", seed=value)]) == 2


def test_the_programs_themselves_refuse_bombs(site: Site, copied: Path) -> None:
    """What a process imports and reads before main is not seen from inside the tests."""
    site.plant(YAML, site.folder / "mine.yaml")
    config = settings(copied, site.folder / "run", config=site.folder / "mine.yaml")
    result = run_program("train.py", config)
    assert result.returncode == 2, result.stderr
    site.plant(OBJECTS, copied / "misc" / "img_mean.npy")
    result = run_program("train.py", settings(copied, site.folder / "run"))
    assert result.returncode == 2, result.stderr
    assert "img_mean.npy" in result.stderr


# Preprocessing


def write_flat(folder: Path) -> dict[str, Path]:
    """A class folder and one flat validation picture with ILSVRC's two files; all settings."""
    from PIL import Image

    for name in ("train/n01/1.JPEG", "val/ILSVRC2012_val_00000001.JPEG"):
        (folder / name).parent.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / name)
    (folder / "truth.txt").write_text("1\n")
    write_synsets(folder / "meta.mat", {1: "n01"})
    (folder / "paths.yaml").write_text("image_size: 8\n")
    return {
        "config": folder / "paths.yaml",
        "train_img_dir": folder / "train",
        "val_img_dir": folder / "val",
        "val_label_file": folder / "truth.txt",
        "meta_clsloc_mat": folder / "meta.mat",
        "tar_root_dir": folder / "out",
    }


def preprocess(program: str, paths: dict[str, Path]) -> tuple[int, str]:
    options = [text for name, path in paths.items() for text in (f"--{name}", str(path))]
    result = run_program(f"preprocessing/{program}", [*options, "--workers", "1"])
    return result.returncode, result.stderr


def test_preprocessing_takes_the_same_inputs_without_bombs(tmp_path: Path) -> None:
    """Else the tests below could be refused for another reason."""
    assert preprocess("make_hkl.py", write_flat(tmp_path))[0] == 0


@pytest.mark.parametrize(
    ("key", "name", "trap"),
    [
        ("config", "paths.yaml", YAML),
        ("config", "paths.yaml", PICKLE),
        ("val_label_file", "truth.txt", PICKLE),
        ("meta_clsloc_mat", "meta.mat", PICKLE),
        ("tar_root_dir", "out/progress.npz", ARCHIVE),
        ("tar_root_dir", "out/manifest.json", YAML),
        ("tar_root_dir", "out/manifest.json", PICKLE),
    ],
)
def test_preprocessing_refuses_a_bomb(site: Site, key: str, name: str, trap: Trap) -> None:
    paths = write_flat(site.folder)
    site.plant(trap, site.folder / name)
    status, error = preprocess("make_hkl.py", paths)
    assert status == 2, error
    assert error.startswith(f"error: {site.folder / name}")
    assert "Traceback" not in error


@pytest.mark.parametrize("program", ["make_labels.py", "make_train_val_txt.py"])
@pytest.mark.parametrize("trap", [YAML, PICKLE], ids=["yaml", "pickle"])
def test_what_follows_the_manifest_refuses_a_bomb_in_it(site: Site, program, trap) -> None:
    site.plant(trap, site.folder / "out" / "manifest.json")
    paths = dict.fromkeys(("train_img_dir", "val_img_dir"), Path("none"))
    status, error = preprocess(program, {"tar_root_dir": site.folder / "out", **paths})
    assert status == 2
    assert "manifest.json: not JSON" in error


def test_a_picture_that_is_a_pickle_is_a_bad_picture(site: Site) -> None:
    paths = write_flat(site.folder)
    site.plant(PICKLE, site.folder / "train" / "n01" / "2.JPEG")
    assert preprocess("make_hkl.py", paths)[0] == 0
    skipped = (site.folder / "out" / "misc" / "skipped.txt").read_text()
    assert "n01/2.JPEG" in skipped


# Batch files that lead to other files


SHAPE = (2, 2, 2, 3)
SECRET = np.arange(24, dtype=np.uint8).reshape(SHAPE)


def link_softly(file: h5py.File, secret: Path) -> None:
    file["elsewhere"] = SECRET
    file["data"] = h5py.SoftLink("/elsewhere")


def link_to_a_file(file: h5py.File, secret: Path) -> None:
    file["data"] = h5py.ExternalLink(str(secret.with_suffix(".h5")), "/data")


def store_outside(file: h5py.File, secret: Path) -> None:
    file.create_dataset("data", SHAPE, np.uint8, external=[(str(secret), 0, 24)])


def map_virtually(file: h5py.File, secret: Path) -> None:
    layout = h5py.VirtualLayout(SHAPE, np.uint8)
    layout[...] = h5py.VirtualSource(str(secret.with_suffix(".h5")), "data", SHAPE)
    file.create_virtual_dataset("data", layout)


@pytest.mark.parametrize(
    "lead", [link_softly, link_to_a_file, store_outside, map_virtually], ids=lambda f: f.__name__
)
def test_a_batch_file_cannot_show_another_file(tmp_path: Path, lead: Callable) -> None:
    """Someone who trains on a strange data set must not send away /etc/passwd with the weights."""
    secret = tmp_path / "secret.raw"
    secret.write_bytes(SECRET.tobytes())
    with h5py.File(secret.with_suffix(".h5"), "w") as file:
        file["data"] = SECRET
    path = tmp_path / "0.hkl"
    with h5py.File(path, "w") as file:
        lead(file, secret)
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["data"][...], SECRET)
    with pytest.raises(InputError, match="expected"):
        locate_batch(path)


def test_the_sources_of_a_virtual_batch_file_are_not_even_opened(tmp_path: Path) -> None:
    """To open a pipe is to wait for ever; HDF5 opens sources when it is asked for a shape."""
    os.mkfifo(tmp_path / "pipe-0.h5")
    space, source = h5py.h5s.create_simple(SHAPE, (h5py.h5s.UNLIMITED, 2, 2, 3)), SHAPE[1:]
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    space.select_hyperslab((0, 0, 0, 0), (h5py.h5s.UNLIMITED, 1, 1, 1), (1, 2, 2, 3), (1, *source))
    name = str(tmp_path / "pipe-%b.h5").encode()
    created.set_virtual(space, name, b"data", h5py.h5s.create_simple((1, *source)))
    path = tmp_path / "0.hkl"
    with h5py.File(path, "w") as file:
        h5py.h5d.create(file.id, b"data", h5py.h5t.STD_U8LE, space, created)
    with pytest.raises(InputError, match="in another file"):
        locate_batch(path)


@pytest.mark.parametrize("kind", ["objects", "variable length", "text"])
def test_a_batch_file_of_objects_is_refused(tmp_path: Path, kind: str) -> None:
    types = {"objects": h5py.ref_dtype, "variable length": h5py.vlen_dtype(np.uint8)}
    with h5py.File(tmp_path / "0.hkl", "w") as file:
        file.create_dataset("data", SHAPE, types.get(kind, h5py.string_dtype()))
    with pytest.raises(InputError, match="found dtype object, expected uint8"):
        locate_batch(tmp_path / "0.hkl")


# The text of the program


PROGRAM_FILES = sorted(
    path
    for top in ROOT.iterdir()
    if top.name not in {".venv", "tests", "build"}
    for path in ([top] if top.suffix == ".py" else top.rglob("*.py"))
)
PERMITTED = {
    # The compiler of device functions, which compiles the text that it has itself made of a graph.
    "tandem/backend/codegen.py": {"exec", "compile"},
    # The call of a region, as text of a fixed form.
    "tandem/backend/regions.py": {"exec"},
    # What ranks of one job say to each other, as processes of one machine do by pipes.
    "tandem/distributed/group.py": {"pickle.loads"},
    # What a pool's processes say to each other, by pipes of their own.
    "tandem/parallel/team.py": {"pickle.loads"},
    "tandem/parallel/worker.py": {"pickle.loads"},
    # What ranks of a pool say to each other, by MPI or signed with a key of the user's.
    "tandem/parallel/rank_messages.py": {"pickle.loads"},
    # The lowerings of a script's own layers, by value through the pipes of its own processes.
    "tandem/keras/fit.py": {"cloudpickle"},
    "tandem/training/setup.py": {"pickle.loads"},
    # A library that is compared with; it reads nothing.
    "benchmarks/parallel_contenders.py": {"joblib"},
}
FORBIDDEN_CALLS = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "cPickle.load", "dill.load", "dill.loads"),
    *("joblib.load", "shelve.open", "marshal.load", "marshal.loads", "hickle.load", "torch.load"),
    *("yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all", "yaml.full_load_all"),
    *("yaml.load_all", "eval", "exec", "compile", "os.system", "os.popen"),
    *("numpy.load_pickle", "pandas.read_pickle", "ast.eval"),
}
FORBIDDEN_IMPORTS = {"dill", "joblib", "shelve", "marshal", "cloudpickle", "jsonpickle"}
FORBIDDEN_LOADERS = {"Loader", "FullLoader", "UnsafeLoader", "CLoader", "CFullLoader"}
SAFE_LOADERS = {"SafeLoader", "CSafeLoader", "BaseLoader"}


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an expression that is such a name, else empty."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return ""


def imported_names(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for: ``np`` is numpy, ``loads`` is pickle.loads."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname or a.name.partition(".")[0]: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def safe_loaders(tree: ast.AST) -> set[str]:
    """The classes of a file that are made from a safe YAML loader."""
    bases = {
        node.name: {dotted(base).rpartition(".")[2] for base in node.bases}
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    return {name for name, found in bases.items() if found and found <= SAFE_LOADERS}


def findings(source: str, allowed: frozenset[str] | set[str] = frozenset()) -> list[str]:
    """Calls in `source` that execute what they read."""
    tree = ast.parse(source)
    names, loaders = imported_names(tree), safe_loaders(tree) | SAFE_LOADERS
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or node.names[0].name
            if module.partition(".")[0] in FORBIDDEN_IMPORTS - allowed:
                found.append(f"{node.lineno}: import {module}")
        if not isinstance(node, ast.Call):
            continue
        first, _, rest = dotted(node.func).partition(".")
        name = ".".join(filter(None, (names.get(first, first), rest)))
        arguments = {keyword.arg: keyword.value for keyword in node.keywords}
        if name in FORBIDDEN_CALLS - allowed:
            found.append(f"{node.lineno}: {name}")
        if name == "yaml.load":
            loader = arguments.get("Loader", ast.Constant(None))
            if dotted(loader).rpartition(".")[2] not in loaders:
                found.append(f"{node.lineno}: yaml.load without a safe loader")
        if name in ("numpy.load", "np.load") and "allow_pickle" not in arguments:
            found.append(f"{node.lineno}: numpy.load without allow_pickle=False")
        allows = arguments.get("allow_pickle", ast.Constant(False))
        if not (isinstance(allows, ast.Constant) and allows.value is False):
            found.append(f"{node.lineno}: allow_pickle")
        if "shell" in arguments:
            found.append(f"{node.lineno}: shell")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.load(file)",
        "from pickle import loads as read\nread(text)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import numpy as np\nnp.load(path)",
        "import numpy as np\nnp.load(path, allow_pickle=flag)",
        "import hickle as hkl\nhkl.load(path)",
        "import yaml\nyaml.load(text)",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "import yaml\nclass L(yaml.FullLoader): pass\nyaml.load(text, Loader=L)",
        "import yaml\nyaml.unsafe_load(text)",
        "import torch\ntorch.load(path, weights_only=True)",
        "eval(text)",
        "exec(text)",
        "import dill",
        "import subprocess\nsubprocess.run(text, shell=True)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert findings(source)


def test_the_search_lets_safe_readers_pass() -> None:
    assert not findings(
        "import yaml, re, json, torch\nimport numpy as np\nclass L(yaml.SafeLoader): pass\n"
        "yaml.load(text, Loader=L)\nyaml.safe_load(text)\nnp.load(path, allow_pickle=False)\n"
        "re.compile(text)\njson.load(file)\ntorch.compile(f)\nmodel.eval()\nast.literal_eval(text)"
    )


@pytest.mark.parametrize("path", PROGRAM_FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_nothing_in_the_program_executes_what_it_reads(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    assert not findings(path.read_text(encoding="utf-8"), PERMITTED.get(name, set()))


# A run's own pipes and memory


TABLES = ("tcp", "tcp6", "udp", "udp6", "raw", "raw6", "udplite", "udplite6", "packet", "unix")
_LISTENING = "0A"  # TCP_LISTEN
_ACCEPTS = 0x10000  # __SO_ACCEPTCON, of Unix sockets


def listening_sockets() -> dict[int, str]:
    """Sockets that someone else could reach, by inode: bound to an address, or to a name."""
    found = {}
    for table in TABLES:
        path = Path("/proc/self/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if table == "unix":
                reached = int(fields[3], 16) & _ACCEPTS or len(fields) > 7
                inode = int(fields[6])
            elif table == "packet":
                reached, inode = True, int(fields[8])
            else:
                # A socket without a connection has no far end; TCP ones also have a state.
                reached = fields[3] == _LISTENING or table[:3] != "tcp"
                inode = int(fields[9])
            if reached:
                found[inode] = f"{table}: {line.strip()}"
    return found


def sockets_of(process: int) -> set[int]:
    """Inodes of the sockets that a process has open."""
    inodes = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(int(target[len("socket:[") : -1]))
    return inodes


def reachable(processes: list[int]) -> list[str]:
    listening = listening_sockets()
    return [
        f"process {process}, {listening[inode]}"
        for process in processes
        for inode in sockets_of(process) & listening.keys()
    ]


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/net/unix").exists(), reason="looks for sockets in /proc"
)


@needs_proc
def test_the_search_finds_sockets(tmp_path: Path) -> None:
    """One of each family; a pair without a name, as pipes are, is nobody else's."""
    first, second = socket.socketpair()
    with first, second:
        assert not reachable([os.getpid()])
    for family, kind, address in (
        (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
        (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
        (socket.AF_UNIX, socket.SOCK_STREAM, str(tmp_path / "socket")),
        (socket.AF_UNIX, socket.SOCK_STREAM, "\0tandem"),
    ):
        with socket.socket(family, kind) as listener:
            listener.bind(address)
            if kind == socket.SOCK_STREAM:
                listener.listen()
            assert reachable([os.getpid()])


@pytest.mark.slow
@needs_proc
def test_a_run_can_be_reached_by_nobody(data: Path, tmp_path: Path, monkeypatch) -> None:
    """No socket listens but that of the server of copies, which is the user's alone, and no memory
    has a name.
    """
    temporary, run, before = tmp_path / "tmp", tmp_path / "run", shared_memory()
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    changes = {"devices": ["cpu", "cpu"], "para_load": True, "compile": False, "n_epochs": 10_000}
    process = tiny.start_program("train.py", settings(data, run, **changes))
    try:
        tiny.wait_for_steps(run, process, 20, seconds=120)
        members = tiny.group_members(process.pid)
        assert len(members) >= 5, "a launcher, two trainers and two loaders"
        (folder,) = temporary.iterdir()
        (listener,) = folder.iterdir()
        assert (stat.S_IMODE(folder.stat().st_mode), listener.is_socket()) == (0o700, True)
        assert stat.S_IMODE(listener.stat().st_mode) == 0o600
        assert [line for line in reachable(members) if str(listener) not in line] == []
        assert shared_memory() <= before
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=30)
    assert tiny.is_gone(process.pid)
    assert [path.name for path in temporary.rglob("*")] == []
    assert shared_memory() <= before


def test_a_run_that_a_rank_is_sent_brings_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.launch.ranks import RankLauncher
    from tandem.training.run_spec import RunSpec

    fields: Any = ("train", {}, None, None, None, {}, None, None, None)
    messages = [RunSpec(*fields, own_code=b"a pickle"), "end"]
    launcher = RankLauncher.__new__(RankLauncher)
    world: Any = SimpleNamespace(all_gather_object=lambda value: [messages.pop(0)])
    launcher.world, executed = world, list[RunSpec]()
    monkeypatch.setattr(launcher, "_execute", lambda spec, reporter: executed.append(spec))
    assert launcher.follow() == "end"
    assert [spec.own_code for spec in executed] == [b""]
