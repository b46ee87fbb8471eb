"""Each format written, read and compared; and what is refused."""

import gzip
import io
import pickle
import shutil
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tandem import datasets
from tandem.datasets.idx import FILES, read_idx
from tandem.errors import InputError
from tests.support.data_set_files import (
    random_pictures,
    write_cifar,
    write_mnist,
)


def same(found: datasets.arrays.Data, expected: datasets.arrays.Data) -> None:
    for pair, other in zip(found, expected, strict=True):
        for ours, theirs in zip(pair, other, strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_idx_files_come_back(tmp_path: Path, name: str, packed: bool) -> None:
    data = random_pictures(7, 3, (28, 28))
    write_mnist(tmp_path, data, packed)
    same(datasets.load(name, tmp_path), data)


def test_an_idx_file_is_the_bytes_that_its_specification_says(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes.fromhex("00000803 00000001 00000002 00000003 010203 0405ff"))
    assert read_idx(path, 3).tolist() == [[[1, 2, 3], [4, 5, 255]]]


@pytest.mark.parametrize("kind", ["folder", "w:gz", "w:xz", "w"])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_the_binary_version_comes_back(tmp_path: Path, name: str, kind: str) -> None:
    data = random_pictures(10, 3, (32, 32, 3))
    folder = write_cifar(tmp_path / "files", name, data)
    source = folder.parent
    if kind != "folder":
        source = tmp_path / "archive"
        with tarfile.open(source, kind) as archive:
            archive.add(folder, folder.name)
    same(datasets.load(name, source), data)


def test_the_planes_of_a_record_are_red_green_and_blue(tmp_path: Path) -> None:
    record = bytes([7]) + b"".join(bytes([1 + plane] * 1024) for plane in range(3))
    record = record[:1] + bytes([9]) + record[2:]  # the first pixel of the first row
    for i in range(1, 6):
        (tmp_path / f"data_batch_{i}.bin").write_bytes(record)
    (tmp_path / "test_batch.bin").write_bytes(record)
    (x, y), _ = datasets.load("cifar10", tmp_path)
    assert y.tolist() == [7] * 5
    assert x[0, 0, 0].tolist() == [9, 2, 3]
    assert x[0, 0, 1].tolist() == x[0, 31, 31].tolist() == [1, 2, 3]


def test_labels_of_cifar100_are_fine_or_coarse(tmp_path: Path) -> None:
    data = random_pictures(6, 2, (32, 32, 3), classes=20)
    write_cifar(tmp_path, "cifar100", data, coarse=True)
    same(datasets.load("cifar100", tmp_path, labels="coarse"), data)
    (_, fine), _ = datasets.load("cifar100", tmp_path)
    assert (fine == 99 - data[0][1]).all()
    with pytest.raises(InputError, match="found 'corse', expected fine or coarse; did you mean"):
        datasets.load("cifar100", tmp_path, labels="corse")


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_pickled_version_is_refused_and_not_opened(
    tmp_path: Path, name: str, packed: bool
) -> None:
    folder = tmp_path / "cifar-python"
    folder.mkdir()

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "sprung",)

    files = ["data_batch_1", "test_batch"] if name == "cifar10" else ["train", "test", "meta"]
    for file in files:
        (folder / file).write_bytes(pickle.dumps(Trap()))
    source = folder
    if packed:
        source = tmp_path / "cifar-python.tar.gz"
        with tarfile.open(source, "w:gz") as archive:
            archive.add(folder, folder.name)
    expected = rf"found the pickled version of {name} .*{name[5:]}-binary\.tar\.gz"
    with pytest.raises(InputError, match=expected):
        datasets.load(name, source)
    assert not (tmp_path / "sprung").exists()


def write_class_folders(folder: Path) -> dict[bytes, tuple[str, int]]:
    """Pictures of one colour each in class folders; split and label by colour."""
    colours = {}
    rng = np.random.default_rng(0)
    for split, count in (("train", 4), ("test", 2)):
        for label, name in enumerate(datasets.class_names("cifar10")):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                colour = rng.integers(0, 256, 3).astype(np.uint8)
                pixels = np.broadcast_to(colour, (32, 32, 3))
                Image.fromarray(pixels).save(folder / split / name / f"{i:04}.png")
                colours[colour.tobytes()] = split, label
    return colours


def test_class_folders_and_an_archive_of_them_are_read_alike(tmp_path: Path) -> None:
    colours = write_class_folders(tmp_path / "files")
    with tarfile.open(tmp_path / "a.tar.xz", "w:xz") as archive:
        for name in ("test", "train"):
            archive.add(tmp_path / "files" / name, name)
    data = datasets.load("cifar10", tmp_path / "files")
    same(datasets.load("cifar10", tmp_path / "a.tar.xz"), data)
    for (x, y), split in zip(data, ("train", "test"), strict=True):
        assert x.dtype == np.uint8
        assert x.shape[1:] == (32, 32, 3)
        assert (x == x[:, :1, :1]).all()
        found = [colours.pop(pixels[0, 0].tobytes()) for pixels in x]
        assert found == [(split, label) for label in y]
        assert (np.diff(y) < 0).any()  # not in order of the classes
    assert not colours


def test_a_folder_that_is_no_class_is_refused(tmp_path: Path) -> None:
    write_class_folders(tmp_path)
    (tmp_path / "train" / "frog").rename(tmp_path / "train" / "frogs")
    with pytest.raises(InputError, match=r"found the class frogs, .*did you mean frog"):
        datasets.load("cifar10", tmp_path)


def test_two_pictures_of_one_name_are_refused_and_hidden_files_ignored(tmp_path: Path) -> None:
    write_class_folders(tmp_path)
    (tmp_path / "train" / "frog" / "._0001.png").write_bytes(b"of macOS")
    assert len(datasets.load("cifar10", tmp_path)[0][0])
    shutil.copytree(tmp_path / "train", tmp_path / "more" / "train")
    with pytest.raises(InputError, match="found two pictures of a class with this name"):
        datasets.load("cifar10", tmp_path)


def test_linked_class_folders_are_read_and_two_validations_are_refused(tmp_path: Path) -> None:
    write_class_folders(tmp_path / "files")
    whole = datasets.load("cifar10", tmp_path / "files")
    (tmp_path / "files" / "train" / "frog").rename(tmp_path / "frog")
    (tmp_path / "files" / "train" / "frog").symlink_to(tmp_path / "frog")
    same(datasets.load("cifar10", tmp_path / "files"), whole)
    (tmp_path / "files" / "val").symlink_to(tmp_path / "files" / "test")
    with pytest.raises(InputError, match="found both test/ and val/, expected one of them"):
        datasets.load("cifar10", tmp_path / "files")


def test_a_picture_that_cannot_be_decoded_is_refused(tmp_path: Path) -> None:
    write_class_folders(tmp_path)
    (tmp_path / "train" / "frog" / "0001.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"train/frog/0001\.png: cannot be decoded"):
        datasets.load("cifar10", tmp_path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_come_back(tmp_path: Path, save: Callable[..., None]) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(9, 4, 2)).astype(np.float32), rng.integers(0, 5, 9)
    path = tmp_path / "a.npz"
    save(
        path,
        x_train=x[:6],
        y_train=y[:6, None].astype(np.uint8),
        x_test=x[6:],
        y_test=y[6:, None].astype(np.uint8),
    )
    same(datasets.load("arrays", path), ((x[:6], y[:6]), (x[6:], y[6:])))
    save(path, x=np.asfortranarray(x), y=x[:, 0].astype(float), other=y)
    same(datasets.load("arrays", path), ((x, x[:, 0]), (x[:0], x[:0, 0])))


def test_a_known_data_set_may_be_an_npz_file(tmp_path: Path) -> None:
    (x, y), (x_test, y_test) = data = random_pictures(5, 2, (28, 28))
    np.savez(tmp_path / "mnist.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    same(datasets.load("mnist", tmp_path / "mnist.npz"), data)
    with pytest.raises(InputError, match=r"found pictures of \(28, 28\) in uint8, expected"):
        datasets.load("cifar10", tmp_path / "mnist.npz")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros(3)}, "without y, expected x_train"),
        ({"x_train": np.zeros(3), "y_train": np.zeros(3), "x_test": np.zeros(1)}, "without y_test"),
        (
            {"x": np.zeros(3), "y": np.zeros(3), "x_val": np.zeros(3)},
            "of which x_val would be left",
        ),
        ({"x": np.zeros(3), "y": np.zeros(2)}, r"found x \(3,\) and y \(2,\), expected as many"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, "at least one"),
        ({"x": np.zeros(3), "y": np.zeros((3, 2), int)}, r"found integers \(3, 2\) as y, expected"),
        ({"x": np.array([{}] * 3), "y": np.zeros(3)}, "found object, expected numbers"),
        ({"x": np.array(["a"] * 3), "y": np.zeros(3)}, "found <U1, expected numbers"),
    ],
)
def test_other_arrays_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        datasets.load("arrays", tmp_path / "a.npz")


def test_test_rows_are_like_training_rows(tmp_path: Path) -> None:
    x, y = np.zeros((4, 3), np.float32), np.zeros(4, int)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:, :2], y_test=y)
    with pytest.raises(InputError, match=r"found x_test of rows \(2,\) .*, expected .*\(3,\)"):
        datasets.load("arrays", tmp_path / "a.npz")


# Damage


def idx_header(*shape: int) -> bytes:
    return bytes((0, 0, 8, len(shape))) + b"".join(n.to_bytes(4, "big") for n in shape)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found nothing at its start"),
        (b"\0\0\x0d\3" + bytes(12), "found 00 00 0d 03 at its start, expected 00 00 08 03"),
        (idx_header(4), "found 00 00 08 01 at its start"),
        (idx_header(2, 28), "found 00 00 08 02 at its start"),
        (idx_header(2, 3, 4)[:-1], "found its end after 11 bytes, expected 12"),
        (idx_header(2, 3, 4) + bytes(23), "found its end after 23 bytes, expected 24"),
        (idx_header(2, 3, 4) + bytes(25), "found more than the 24 bytes that its header claims"),
        (idx_header(2**32 - 1, 2**32 - 1, 2**32 - 1), "found a claim of 4294967295 x 4294967295"),
        (idx_header(60000, 28, 28), "found a claim of 60000 x 28 x 28 bytes in a file of"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_damaged_idx_file_is_refused(
    tmp_path: Path, content: bytes, message: str, packed: bool
) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(InputError, match=message):
        read_idx(path, 3)


@pytest.mark.parametrize("kept", [4, 30, -4])
def test_a_cut_or_changed_gzip_file_is_refused(tmp_path: Path, kept: int) -> None:
    content = gzip.compress(idx_header(100) + bytes(range(100)))
    path = tmp_path / "y.gz"
    path.write_bytes(content[:kept])
    with pytest.raises(InputError, match=r"y\.gz: "):
        read_idx(path, 1)
    path.write_bytes(content[:60] + bytes([content[60] ^ 1]) + content[61:])
    with pytest.raises(InputError, match=r"y\.gz: cannot be read"):
        read_idx(path, 1)


def test_labels_beside_the_classes_are_refused(tmp_path: Path) -> None:
    (x, y), test = random_pictures(4, 2, (28, 28))
    y[2] = 10
    write_mnist(tmp_path, ((x, y), test))
    with pytest.raises(InputError, match="found the label 10, expected the 10 classes of mnist"):
        datasets.load("mnist", tmp_path)
    write_mnist(tmp_path, ((x, y[:3]), test))
    with pytest.raises(InputError, match="found 3 labels, expected one for each of 4 pictures"):
        datasets.load("mnist", tmp_path)
    (tmp_path / FILES[3]).unlink()
    with pytest.raises(InputError, match="found no t10k-labels-idx1-ubyte, expected the four"):
        datasets.load("mnist", tmp_path)


def test_damaged_binary_files_are_refused(tmp_path: Path) -> None:
    folder = write_cifar(tmp_path, "cifar10", random_pictures(10, 2, (32, 32, 3)))
    batch = folder / "data_batch_3.bin"
    content = batch.read_bytes()
    batch.write_bytes(content[:-1])
    with pytest.raises(InputError, match=r"data_batch_3\.bin of 6145 bytes, expected a multiple"):
        datasets.load("cifar10", folder)
    batch.unlink()
    with pytest.raises(InputError, match=r"without data_batch_3\.bin, expected the binary version"):
        datasets.load("cifar10", folder)
    batch.write_bytes(bytes([10]) + content[1:])
    with pytest.raises(InputError, match="found the label 10, expected the 10 classes of cifar10"):
        datasets.load("cifar10", folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / batch.name).write_bytes(content)
    with pytest.raises(InputError, match=r"found two files data_batch_3\.bin"):
        datasets.load("cifar10", tmp_path)


def test_a_cut_archive_is_refused(tmp_path: Path) -> None:
    folder = write_cifar(tmp_path, "cifar100", random_pictures(6, 2, (32, 32, 3)))
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, folder.name)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(InputError, match=r"a\.tar\.gz: cannot be read"):
        datasets.load("cifar100", path)


def test_an_archive_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.datasets.files._MOST_UNPACKED", 1 << 21)
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo("data_batch_1.bin")
        member.size = 1 << 22
        archive.addfile(member, io.BytesIO(bytes(member.size)))
    with pytest.raises(InputError, match="found more than 2097152 bytes in it"):
        datasets.load("cifar10", path)


def test_an_array_that_claims_more_than_its_member_holds_is_refused(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f8", "fortran_order": False, "shape": (1 << 25,)}
    )
    path, written = tmp_path / "a.npz", len(header.getvalue()) + 64
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", header.getvalue() + bytes(64))
        archive.writestr("y.npy", header.getvalue())
    with pytest.raises(InputError, match="found 64 bytes of numbers, expected 268435456"):
        datasets.load("arrays", path)
    # The archive's directory may lie as well.
    size = written.to_bytes(4, "little")
    claim = (written - 64 + (1 << 28)).to_bytes(4, "little")
    assert path.read_bytes().count(2 * size) == 2
    path.write_bytes(path.read_bytes().replace(2 * size, size + claim))
    assert peak_of_refusal("arrays", path, "found its end after 64 bytes, expected") < 1 << 23


def test_a_claim_costs_no_more_memory_than_the_file_has(tmp_path: Path) -> None:
    write_mnist(tmp_path, random_pictures(4, 2, (28, 28)))
    (tmp_path / FILES[0]).write_bytes(idx_header(100, 1 << 10, 1 << 10) + bytes(1 << 17))
    assert peak_of_refusal("mnist", tmp_path, "found its end after 131072 bytes") < 1 << 23


def peak_of_refusal(name: str, source: Path, message: str) -> int:
    """Bytes of memory that it took, at most, to refuse a data set."""
    tracemalloc.start()
    with pytest.raises(InputError, match=message):
        datasets.load(name, source)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak
