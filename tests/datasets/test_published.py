"""Data sets are found in the usual folders, else downloaded and checked."""

import hashlib
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from tandem import datasets
from tandem.datasets import published
from tandem.datasets.idx import FILES
from tandem.datasets.names import CLASSES
from tandem.errors import InputError
from tests.support.data_set_files import random_pictures, write_cifar, write_mnist

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without data; the system's folder is left out."""
    folder = tmp_path / "home"
    (folder / "work").mkdir(parents=True)
    monkeypatch.chdir(folder / "work")
    monkeypatch.setenv("HOME", str(folder))
    for name in ("XDG_CACHE_HOME", "KERAS_HOME"):
        monkeypatch.delenv(name, raising=False)
    roots = published._roots
    monkeypatch.setattr(
        published, "_roots", lambda: tuple(r for r in roots() if not r.is_relative_to("/usr"))
    )
    return folder


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Serves the files of tmp_path/files; its address."""
    (tmp_path / "files").mkdir()
    handler = partial(Quiet, directory=str(tmp_path / "files"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}/"
        found.shutdown()
        thread.join()


def publish(
    monkeypatch: pytest.MonkeyPatch, name: str, address: str, folder: Path
) -> dict[str, str]:
    """Publish the files of a folder under an address."""
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    places = published.PUBLISHED[name].places
    monkeypatch.setitem(published.PUBLISHED, name, published.Published(address, files, places))
    return files


def test_files_are_downloaded_once_and_kept(
    home: Path, tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random_pictures(4, 2, (28, 28))
    write_mnist(tmp_path / "files", data, packed=True)
    publish(monkeypatch, "mnist", server, tmp_path / "files")
    (x, _), _ = datasets.load("mnist")
    np.testing.assert_array_equal(x, data[0][0])
    kept = sorted(path.name for path in (home / ".cache" / "tandem" / "mnist").iterdir())
    assert kept == sorted(f"{name}.gz" for name in FILES)
    publish(monkeypatch, "mnist", "http://127.0.0.1:9/", tmp_path / "files")
    (again, _), _ = datasets.load("mnist")
    np.testing.assert_array_equal(again, x)


def test_another_file_than_the_published_one_is_refused(
    home: Path, tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path / "files", random_pictures(4, 2, (28, 28)), packed=True)
    publish(monkeypatch, "mnist", server, tmp_path / "files")
    (tmp_path / "files" / f"{FILES[0]}.gz").write_bytes(b"another")
    with pytest.raises(InputError, match="cannot be downloaded: SHA256 hash of downloaded file"):
        datasets.load("mnist")
    assert not (home / ".cache" / "tandem" / "mnist" / f"{FILES[0]}.gz").exists()


def test_without_a_network_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CLASSES:
        there = published.PUBLISHED[name]
        refused = published.Published("http://127.0.0.1:9/", there.files, there.places)
        monkeypatch.setitem(published.PUBLISHED, name, refused)
        with pytest.raises(InputError) as caught:
            datasets.load(name)
        file = next(iter(there.files))
        assert str(caught.value).endswith(
            f"http://127.0.0.1:9/{file} cannot be downloaded: no connection; expected --source"
            " PATH (in Python source=PATH), or a network"
        )
        assert "\n" not in str(caught.value)


def test_without_pooch_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(InputError, match=r"pip install 'tandem-train\[datasets\]'"):
        datasets.load("mnist")


def test_folders_of_other_programs_are_read(home: Path) -> None:
    keras = home / ".keras" / "datasets"
    (keras / "fashion-mnist").mkdir(parents=True)
    data = random_pictures(4, 2, (28, 28))
    write_mnist(keras / "fashion-mnist", data, packed=True)
    assert (datasets.load("fashion_mnist")[0][0] == data[0][0]).all()
    (x, y), (x_test, y_test) = data
    np.savez(keras / "mnist.npz", x_train=x[::-1], y_train=y, x_test=x_test, y_test=y_test)
    assert (datasets.load("mnist")[0][0] == x[::-1]).all()
    raw = Path("data") / "MNIST" / "raw"
    raw.mkdir(parents=True)
    (keras / "mnist.npz").unlink()
    write_mnist(raw, data)
    assert (datasets.load("mnist")[0][1] == y).all()
    colours = random_pictures(5, 2, (32, 32, 3))
    write_cifar(Path("data"), "cifar10", colours)
    assert (datasets.load("cifar10")[0][0] == colours[0][0]).all()


def test_a_folder_with_some_of_the_files_does_not_count(home: Path) -> None:
    folder = home / ".keras" / "datasets" / "fashion-mnist"
    folder.mkdir(parents=True)
    write_mnist(folder, random_pictures(4, 2, (28, 28)))
    assert published._holds("fashion_mnist", folder)
    (folder / FILES[2]).unlink()
    assert not published._holds("fashion_mnist", folder)


@pytest.mark.skipif(not DEBIAN.exists(), reason="Debian's dataset-fashion-mnist is not installed")
def test_debians_fashion_mnist_has_all_pictures() -> None:
    (x, y), (x_test, y_test) = datasets.load("fashion_mnist", DEBIAN)
    assert (x.shape, x_test.shape) == ((60000, 28, 28), (10000, 28, 28))
    assert np.bincount(y).tolist() == [6000] * 10
    assert np.bincount(y_test).tolist() == [1000] * 10
