"""The original's files: against its own arithmetic, both ways bit for bit, and what is refused."""

from pathlib import Path

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from alex_net import AlexNet
from tandem.convert.theano_folder import find_classes, find_epoch, parts, read_folder, write_folder
from tandem.errors import InputError
from tests.support.op_checks import MODE, plain_python
from tests.support.slow_networks import theano_logits

CLASSES = 4

GROUPS = {"1": (48, 5, 5, 128), "3": (192, 3, 3, 192), "4": (192, 3, 3, 128)}
PUBLISHED = {
    "W_0": (3, 11, 11, 96),
    "b_0": (96,),
    "W_2": (256, 3, 3, 384),
    "b_2": (384,),
    **{f"W{group}_{layer}": shape for layer, shape in GROUPS.items() for group in "01"},
    **{f"b{group}_{layer}": shape[3:] for layer, shape in GROUPS.items() for group in "01"},
    "W_5": (9216, 4096),
    "b_5": (4096,),
    "W_6": (4096, 4096),
    "b_6": (4096,),
    "W_7": (4096, 1000),
    "b_7": (1000,),
}


@pytest.fixture
def net() -> AlexNet:
    return AlexNet(67, CLASSES, 0.05, "float64")


def random_files(net: AlexNet, dtype: str = "float64") -> dict[str, np.ndarray]:
    """Arrays as the original would leave them, of a size at which every layer says something."""
    rng = np.random.default_rng(1)
    files = {}
    for group in parts(net).values():
        for part in group:
            inputs = np.prod(part.shape[:-1])
            std = np.sqrt(2 / inputs) if len(part.shape) > 1 else 0.3
            files[part.name] = (std * rng.normal(size=part.shape)).astype(dtype)
    return files


def save(folder: Path, files: dict[str, np.ndarray], epoch: int = 65) -> Path:
    folder.mkdir(exist_ok=True)
    for name, array in files.items():
        np.save(folder / f"{name}_{epoch}.npy", array)
    return folder


def our_logits(net: AlexNet, weights: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    for name, value in weights.items():
        net.parameters[name].set_value(value)
    x = pt.tensor("x", dtype="float64", shape=(None, 3, 67, 67))
    with plain_python():
        return pytensor.function([x], net.logits(x, None), mode=MODE)(images)


def test_the_published_files_have_the_shapes_of_the_paper() -> None:
    found = [part for group in parts(AlexNet()).values() for part in group]
    assert {part.name: part.shape for part in found} == PUBLISHED


@pytest.mark.parametrize("lib_conv", ["cudnn", "cudaconvnet"])
def test_the_converted_network_computes_what_theano_did(net, tmp_path: Path, lib_conv) -> None:
    files = random_files(net)
    images = 50 * np.random.default_rng(2).normal(size=(2, 3, 67, 67))
    folder = save(tmp_path, files)
    found = our_logits(net, read_folder(folder, 65, net, lib_conv), images)
    if lib_conv == "cudaconvnet":  # which correlates: it convolves with what is flipped
        files = {n: a[:, ::-1, ::-1] if a.ndim == 4 else a for n, a in files.items()}
    expected = theano_logits(files, images.transpose(1, 2, 3, 0))
    assert np.ptp(expected, axis=0).min() > 0.01
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    other = "cudnn" if lib_conv == "cudaconvnet" else "cudaconvnet"
    wrong = our_logits(net, read_folder(folder, 65, net, other), images)
    assert not np.allclose(wrong, expected, rtol=1e-2)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("lib_conv", ["cudnn", "cudaconvnet"])
def test_there_and_back_no_bit_changes(net: AlexNet, tmp_path: Path, dtype, lib_conv) -> None:
    files = random_files(net, dtype)
    files["W_0"].flat[:3] = np.nan, -0.0, np.inf
    weights = read_folder(save(tmp_path / "one", files), 65, net, lib_conv)
    assert all(weights[name].dtype == dtype for name in weights)
    write_folder(tmp_path / "two", 7, weights, net, lib_conv)
    for name, array in files.items():
        again = np.load(tmp_path / "two" / f"{name}_7.npy")
        assert (again.dtype, again.shape) == (array.dtype, array.shape)
        assert again.tobytes() == array.tobytes()
    assert len(list((tmp_path / "two").iterdir())) == len(files)
    back = read_folder(tmp_path / "two", 7, net, lib_conv)
    assert all(back[name].tobytes() == value.tobytes() for name, value in weights.items())


def test_files_that_numpy_writes_in_other_ways_are_read(net: AlexNet, tmp_path: Path) -> None:
    files = random_files(net, "float32")
    expected = read_folder(save(tmp_path / "one", files), 65, net)
    files = {name: np.asfortranarray(array.astype(">f4")) for name, array in files.items()}
    found = read_folder(save(tmp_path / "two", files), 65, net)
    assert all(found[name].tobytes() == value.tobytes() for name, value in expected.items())


def test_epochs_and_classes_are_found(net: AlexNet, tmp_path: Path) -> None:
    save(tmp_path, random_files(net), 65)
    assert find_epoch(tmp_path) == 65
    assert find_classes(tmp_path, 65) == CLASSES
    save(tmp_path, random_files(net), 7)
    with pytest.raises(InputError, match=r"of the epochs 7, 65: choose one by --epoch"):
        find_epoch(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no weights of the original"):
        find_epoch(tmp_path / "empty")
    with pytest.raises(InputError, match="cannot be read"):
        find_epoch(tmp_path / "none")


def test_what_does_not_fit_is_named(net: AlexNet, tmp_path: Path) -> None:
    folder, files = save(tmp_path, random_files(net)), random_files(net)

    def refusal() -> str:
        with pytest.raises(InputError) as caught:
            read_folder(folder, 65, net)
        save(folder, files)
        return str(caught.value)

    (folder / "b1_3_65.npy").unlink()
    assert "b1_3_65.npy: is missing; the original program does not save" in refusal()
    (folder / "W_5_65.npy").unlink()
    assert refusal().endswith("W_5_65.npy: is missing")
    np.save(folder / "W_5_65.npy", files["W_5"].T)
    assert "W_5_65.npy: holds float64 (205, 12), expected float32 (12, 205)" in refusal()
    np.save(folder / "b_0_65.npy", files["b_0"].astype(int))
    assert "b_0_65.npy: holds int64 (4,)" in refusal()
    np.save(folder / "b_0_65.npy", np.array([{}] * 4), allow_pickle=True)
    assert "objects would be unpickled" in refusal()
    (folder / "W_2_65.npy").write_bytes((folder / "W_2_65.npy").read_bytes()[:-8])
    assert "W_2_65.npy: cannot be read as weights: found" in refusal()
    assert read_folder(folder, 65, net)


def test_a_folder_that_holds_something_is_not_written_to(net: AlexNet, tmp_path: Path) -> None:
    weights = dict(net.initial_values(1))
    (tmp_path / "mine").write_text("")
    with pytest.raises(InputError, match="is not empty"):
        write_folder(tmp_path, 1, weights, net)
    with pytest.raises(InputError, match="cannot be written"):
        write_folder(tmp_path / "mine" / "below", 1, weights, net)
