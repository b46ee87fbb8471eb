"""State dicts with torchvision's names: the outputs of their network, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch
from safetensors.torch import save_file

from tandem.artifacts.checkpoint import Checkpoint, read_checkpoint
from tandem.artifacts.trained_network import load_network
from tandem.backend import device_mode
from tandem.convert import cli
from tandem.layers.network import build_network
from tests.support import torch_networks as plain

CLASSES = 5
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of pictures from 0 to 1
NARROW = ["--width", "0.125", "--crop_size", "64"]
PEERS: dict[str, Callable[[], plain.PlainNetwork]] = {
    "resnet:ResNet18": lambda: plain.PlainResNet(18, CLASSES, 0.125),
    "resnet:ResNet50": lambda: plain.PlainResNet(50, CLASSES, 0.125),
    "vgg:VGG11": lambda: plain.PlainVGG(11, 64, CLASSES, 0.125),
    "vgg:VGG16": lambda: plain.PlainVGG(16, 64, CLASSES, 0.125),
    "googlenet:GoogLeNetBN": lambda: plain.PlainGoogLeNetBN(CLASSES, 0.125, auxiliaries=False),
    "densenet:DenseNet121": lambda: plain.PlainDenseNet(121, CLASSES, 0.125),
    "mobilenet:MobileNetV2": lambda: plain.PlainMobileNetV2(CLASSES, 0.125),
}
QUICK = "resnet:ResNet18"


def convert(*arguments: object) -> int:
    return cli.run_conversion([str(argument) for argument in arguments], None)


def peer_of(name: str) -> plain.PlainNetwork:
    """A network whose outputs differ, and whose running averages are not at their beginning."""
    torch.manual_seed(3)
    peer = PEERS[name]()
    peer.train()
    with torch.no_grad():
        for parameter in peer.parameters():
            if parameter.ndim > 1:
                torch.nn.init.kaiming_normal_(parameter)
        for _ in range(10):
            peer(60 * torch.randn(8, 3, 64, 64) + 60 * torch.randn(8, 3, 1, 1))
    return peer.eval()


def our_outputs(checkpoint: Checkpoint, images: np.ndarray) -> np.ndarray:
    net = build_network(checkpoint.network)
    for name, variable in net.parameters.items():
        variable.set_value(checkpoint.weights[name])
    x = pt.tensor("x", dtype="float32", shape=(None, 3, 64, 64))
    return pytensor.function([x], net.logits(x, None), mode=device_mode("cpu"))(images)


@pytest.mark.parametrize(
    "name", [QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in PEERS if n != QUICK)]
)
def test_the_outputs_are_those_of_the_state_dict(name: str, tmp_path: Path) -> None:
    """For the pictures that torchvision's own transform makes."""
    peer, source, target = peer_of(name), tmp_path / "net.safetensors", tmp_path / "x.safetensors"
    save_file(peer.state_dict(), source)
    assert convert(source, target, *NARROW) == 0
    checkpoint = read_checkpoint(target)
    assert checkpoint.network.network == f"tandem.models.{name}"
    assert (checkpoint.network.classes, checkpoint.network.resize) == (CLASSES, "shorter_side")
    averages = {n for n in checkpoint.weights if "running" in n}
    assert {*checkpoint.untrained} == averages

    rng = np.random.default_rng(4)
    pictures = rng.integers(0, rng.integers(9, 256, (3, 3, 1, 1)), (3, 3, 64, 64))
    pictures = pictures.astype(np.float32)
    mean = np.load(tmp_path / "x_mean.npy")
    assert (mean.dtype, mean.shape) == (np.float32, (3, 256, 256))
    ours = our_outputs(checkpoint, pictures - mean[:, :64, :64])
    shown = torch.from_numpy(pictures) / 255
    if "GoogLe" in name:  # its pretrained weights see pictures from -1 to 1
        shown = (shown - 0.5) / 0.5
    else:
        shown = (shown - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    peer.std = (1.0, 1.0, 1.0)
    with torch.no_grad():
        theirs = peer(shown).numpy()
    assert np.ptp(theirs, axis=0).min() > 1e-3
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


@pytest.mark.slow
def test_auxiliary_heads_are_converted_where_a_file_has_them(tmp_path: Path) -> None:
    peer = plain.PlainGoogLeNetBN(CLASSES, 0.125)
    save_file(peer.state_dict(), tmp_path / "net.safetensors")
    assert convert(tmp_path / "net.safetensors", tmp_path / "x.safetensors", *NARROW) == 0
    checkpoint = read_checkpoint(tmp_path / "x.safetensors")
    assert not checkpoint.network.options
    expected = peer.get_submodule("aux2").get_submodule("fc2").weight.detach().numpy().T
    np.testing.assert_array_equal(checkpoint.weights["aux2.fc2.weight"], expected)


def test_the_names_of_densenets_published_file(tmp_path: Path) -> None:
    state = plain.PlainDenseNet(121, CLASSES, 0.125).state_dict()
    old = {
        name.replace("norm1.", "norm.1.").replace("conv2.", "conv.2.")
        if "denselayer" in name
        else name: value
        for name, value in state.items()
    }
    assert {*old} != {*state}
    save_file(old, tmp_path / "net.safetensors")
    assert convert(tmp_path / "net.safetensors", tmp_path / "x.safetensors", *NARROW) == 0
    assert read_checkpoint(tmp_path / "x.safetensors").network.network.endswith("DenseNet121")


@pytest.mark.parametrize(
    ("name", "crop", "side"),
    [(QUICK, 288, 288), pytest.param("mobilenet:MobileNetV2", 24, 256, marks=pytest.mark.slow)],
)
def test_crops_of_other_sizes(name: str, crop: int, side: int, tmp_path: Path) -> None:
    """Too large for the usual mean image, and too small for other networks."""
    source, target = tmp_path / "net.safetensors", tmp_path / "x.safetensors"
    save_file(PEERS[name]().state_dict(), source)
    assert convert(source, target, "--width", "0.125", "--crop_size", crop) == 0
    assert load_network(target, tmp_path / "x_mean.npy", f"tandem.models.{name}")
    assert np.load(tmp_path / "x_mean.npy").shape == (3, side, side)


State = dict[str, torch.Tensor]


def without(state: State) -> None:
    del state["layer2.0.conv1.weight"], state["layer2.0.bn1.bias"]


def with_another(state: State) -> None:
    state["layer9.weight"] = torch.zeros(2)


def of_another_shape(state: State) -> None:
    state["layer1.0.conv1.weight"] = torch.zeros(8, 8, 5, 5)


def of_integers(state: State) -> None:
    state["conv1.weight"] = torch.zeros(8, 3, 7, 7, dtype=torch.int64)


NAMED = ["--network", "tandem.models.resnet:ResNet18"]
FAULTS: list[tuple[Callable[[State], None], list[str], str]] = [
    (without, NAMED, "has no layer2.0.conv1.weight and 1 more; expected those of ResNet18"),
    (without, [], "--network tandem.models.resnet:ResNet18 says what differs"),
    (with_another, NAMED, "has, and the network has not, layer9.weight"),
    (
        of_another_shape,
        [],
        "layer1.0.conv1.weight: found the shape (8, 8, 5, 5), expected (8, 8",
    ),
    (of_integers, [], "conv1.weight: found numbers of I64, expected F16, F32 or F64"),
    (lambda state: None, ["--network", "nowhere:Net"], "there is no module 'nowhere'"),
    (lambda state: None, ["--network", "tandem.models.vgg:VGG11"], "has no features.0.weight"),
    (
        lambda state: None,
        ["--width", "0.25"],
        "the shape (8, 3, 7, 7), expected (16, 3, 7, 7)",
    ),
]


@pytest.mark.parametrize(("spoil", "options", "message"), FAULTS)
def test_what_is_refused(
    spoil: Callable[[State], None],
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, target = tmp_path / "resnet18.safetensors", tmp_path / "x.safetensors"
    state: dict[str, Any] = dict(plain.PlainResNet(18, CLASSES, 0.125).state_dict())
    spoil(state)
    save_file(state, source)
    assert convert(source, target, *(NARROW if "--width" not in options else []), *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("error: ") == 1
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


def test_a_damaged_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "resnet18.safetensors"
    save_file({"fc.weight": torch.zeros(2, 2)}, source)
    source.write_bytes(source.read_bytes()[:-4])
    assert convert(source, tmp_path / "x.safetensors") == 2
    assert "cannot be read; expected a whole safetensors file" in capsys.readouterr().err


class Malicious:
    """Unpickled, it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_is_refused_with_the_line_that_converts_it(
    legacy: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trap, source, target = tmp_path / "trap", tmp_path / "net.pth", tmp_path / "x.safetensors"
    state = {"fc.weight": torch.zeros(2), "trap": Malicious(trap)}
    torch.save(state, source, _use_new_zipfile_serialization=not legacy)
    assert convert(source, target) == 2
    error = capsys.readouterr().err
    assert "reading it would execute code that it holds" in error
    assert not trap.exists()
    assert not target.exists()
    line = error.partition("python -c '")[2]
    # The line of the message makes a file that is read.
    torch.save(plain.PlainResNet(18, CLASSES, 0.125).state_dict(), source)
    command = line.partition("'")[0].replace('"net.', f'"{tmp_path}/net.')
    exec(command, {})
    assert convert(tmp_path / "net.safetensors", target, *NARROW) == 0
