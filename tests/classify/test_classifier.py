"""Probabilities against the network in plain NumPy on crops cut by hand; names; what is refused."""

import io
from pathlib import Path

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from PIL import Image

from alex_net import AlexNet
from tandem import classify
from tandem.artifacts.checkpoint import Checkpoint, read_checkpoint, save_checkpoint
from tandem.classify import Classifier
from tandem.data.decode import BadPictureError, decode_picture
from tandem.errors import InputError
from tandem.layers.network import NetworkDescription, build_network
from tests.support.op_checks import MODE, plain_python
from tests.support.tiny import save_weights

SIZE, CROP = 70, 67
WNIDS = ("n01440764", "n02123045", "teapot")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_weights(tmp_path_factory.mktemp("weights") / "w.safetensors", WNIDS)


@pytest.fixture(scope="module")
def mean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mean") / "mean.npy"
    np.save(path, np.random.default_rng(1).uniform(90, 130, (3, SIZE, SIZE)).astype(np.float32))
    return path


def noise(count: int) -> np.ndarray:
    return np.random.default_rng(2).integers(0, 256, (count, SIZE, SIZE, 3), np.uint8)


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def by_hand(weights: Path, mean: Path, crops: np.ndarray) -> np.ndarray:
    """Softmax of the network, run by the Ops' NumPy, for float32 (n, RGB, row, column) crops."""
    net = AlexNet(CROP, len(WNIDS), 0.05)
    for name, value in read_checkpoint(weights).weights.items():
        net.parameters[name].set_value(value)
    images = pt.tensor("images", dtype="float32", shape=(None, 3, CROP, CROP))
    with plain_python():
        logits = pytensor.function([images], net.logits(images, None), mode=MODE)(crops)
    powers = np.exp(logits.astype(float))
    return powers / powers.sum(axis=1, keepdims=True)


def cut(prepared: np.ndarray, mean: Path, row: int, column: int) -> np.ndarray:
    """One window of each picture minus the mean at that window, (n, RGB, row, column)."""
    whole = prepared.transpose(0, 3, 1, 2).astype(np.float32) - np.load(mean)
    return whole[:, :, row : row + CROP, column : column + CROP]


def test_the_room_has_what_it_says() -> None:
    assert classify.Guess.__name__ == "Guess"
    with pytest.raises(AttributeError, match="has no attribute 'guess'"):
        _ = classify.guess


def test_the_centre_is_looked_at(weights: Path, mean: Path) -> None:
    prepared = noise(3)
    found = Classifier.load(weights, mean).probabilities(prepared)
    expected = by_hand(weights, mean, cut(prepared, mean, 1, 1))
    assert np.ptp(expected, axis=0).max() > 0.01
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_ten_crops_are_four_corners_and_the_centre_and_all_mirrored(
    weights: Path, mean: Path
) -> None:
    prepared = noise(2)
    found = Classifier.load(weights, mean, ten_crops=True).probabilities(prepared)
    total = np.zeros((2, len(WNIDS)))
    for row, column in ((0, 0), (0, 3), (3, 0), (3, 3), (1, 1)):
        crops = cut(prepared, mean, row, column)
        total += by_hand(weights, mean, crops) + by_hand(weights, mean, crops[..., ::-1].copy())
    np.testing.assert_allclose(found, total / 10, rtol=1e-4)


def test_a_picture_is_named_alike_alone_and_among_others(weights: Path, mean: Path) -> None:
    classifier, prepared = Classifier.load(weights, mean), noise(4)
    together = classifier.probabilities(prepared)
    for picture, row in zip(prepared, together, strict=True):
        np.testing.assert_allclose(classifier.probabilities(picture[None])[0], row, rtol=1e-5)


def test_guesses_are_sorted_and_called_by_their_names(
    weights: Path, mean: Path, tmp_path: Path
) -> None:
    classifier = Classifier.load(str(weights), str(mean))
    pixels = np.random.default_rng(3).integers(0, 256, (2, 90, 50, 3), np.uint8)
    contents = [png(picture) for picture in pixels]
    path = tmp_path / "picture"
    path.write_bytes(contents[1])
    found = classifier.classify([contents[0], path])
    prepared = np.stack([decode_picture(content, SIZE) for content in contents])
    for guesses, row in zip(found, classifier.probabilities(prepared), strict=True):
        assert [guess.number for guess in guesses] == sorted(range(3), key=lambda i: -row[i])
        for guess in guesses:
            assert guess.probability == pytest.approx(row[guess.number])
            assert guess.wnid == WNIDS[guess.number]
    names = {guess.wnid: guess.name for guess in found[0]}
    assert names == {
        "n01440764": "tench, Tinca tinca",
        "n02123045": "tabby, tabby cat",
        "teapot": "teapot",
    }
    assert [len(guesses) for guesses in classifier.classify(contents, top=2)] == [2, 2]
    assert classifier.classify([]) == []


def test_pictures_are_resized_as_those_of_training(mean: Path, tmp_path: Path) -> None:
    content = png(np.random.default_rng(3).integers(0, 256, (50, 90, 3), np.uint8))
    prepared = {}
    for resize in ("squash", "shorter_side"):
        weights = save_weights(tmp_path / f"{resize}.safetensors", WNIDS, resize=resize)
        classifier = Classifier.load(weights, mean)
        prepared[resize] = classifier.prepare(content)
        np.testing.assert_array_equal(prepared[resize], decode_picture(content, SIZE, resize))
    assert (prepared["squash"] != prepared["shorter_side"]).any()


def test_pictures_get_the_border_of_those_of_training(tmp_path: Path) -> None:
    """A crop of their own size is the picture itself; a larger one shows the border."""
    rng = np.random.default_rng(4)
    for pad in (1, 2):
        own = SIZE - 2 * pad
        mean = np.empty((3, SIZE, SIZE), np.float32)
        mean[...] = [[[91]], [[120]], [[133]]]
        mean[:, pad:-pad, pad:-pad] = rng.uniform(90, 130, (3, own, own))
        np.save(tmp_path / "mean.npy", mean)
        weights = save_weights(tmp_path / f"{pad}.safetensors", WNIDS, pad=pad)
        classifier = Classifier.load(weights, tmp_path / "mean.npy")
        pixels = rng.integers(0, 256, (own, own, 3), np.uint8)
        prepared = classifier.prepare(png(pixels))
        assert prepared.shape == (SIZE, SIZE, 3)
        np.testing.assert_array_equal(prepared[pad:-pad, pad:-pad], pixels)
        outside = np.ones((SIZE, SIZE), bool)
        outside[pad:-pad, pad:-pad] = False
        assert (prepared[outside] == [91, 120, 133]).all()
        found = classifier.probabilities(prepared[np.newaxis])
        crops = cut(prepared[np.newaxis], tmp_path / "mean.npy", 1, 1)
        np.testing.assert_allclose(found, by_hand(weights, tmp_path / "mean.npy", crops), rtol=1e-4)


def test_a_border_whose_colour_nobody_knows_is_refused_where_it_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of pictures from which no mean image was subtracted."""
    monkeypatch.setattr("tandem.artifacts.trained_network._stored_size", lambda *_: SIZE)
    file, config = tmp_path / "w.safetensors", {"mean_file": None}
    weights = save_weights(file, WNIDS, pad=1, config=config)
    assert Classifier.load(weights).window.start == 1
    with pytest.raises(InputError, match=r"found a border of 1 pixels .*by the centre alone"):
        Classifier.load(weights, ten_crops=True)
    with pytest.raises(InputError, match="found a border of 2 pixels"):
        Classifier.load(save_weights(file, WNIDS, pad=2, config=config))


@pytest.mark.parametrize("pad", [35, 100])
def test_a_border_wider_than_the_mean_image_is_refused(
    mean: Path, tmp_path: Path, pad: int
) -> None:
    weights = save_weights(tmp_path / "w.safetensors", WNIDS, pad=pad)
    with pytest.raises(InputError, match=f"70 pixels wide and high, .* a border of {pad}"):
        Classifier.load(weights, mean)


def test_classes_without_names_have_numbers(mean: Path, tmp_path: Path) -> None:
    weights = save_weights(tmp_path / "w.safetensors", None, classes=3)
    (guesses,) = Classifier.load(weights, mean).guesses(noise(1))
    assert {guess.name for guess in guesses} == {"class 0", "class 1", "class 2"}
    assert all(guess.wnid is None for guess in guesses)


def test_pictures_that_cannot_be_read(weights: Path, mean: Path, tmp_path: Path) -> None:
    classifier = Classifier.load(weights, mean)
    (tmp_path / "text.png").write_text("text")
    for picture, reason in (
        (tmp_path / "text.png", "text.png: not a picture"),
        (tmp_path / "none.png", "none.png: No such file"),
        (tmp_path, "not a file"),
        (b"", "the file is empty"),
        ("a\0b", "null byte"),
    ):
        with pytest.raises(BadPictureError, match=reason):
            classifier.classify([picture])


def test_the_mean_image_of_the_run_is_found(weights: Path, mean: Path, tmp_path: Path) -> None:
    config = {"data_folder": str(mean.parent), "mean_file": mean.name}
    found = save_weights(tmp_path / "found.safetensors", WNIDS, config=config)
    np.testing.assert_array_equal(
        Classifier.load(found).probabilities(noise(1)),
        Classifier.load(weights, mean).probabilities(noise(1)),
    )
    lost = save_weights(
        tmp_path / "lost.safetensors", WNIDS, config={**config, "mean_file": "gone.npy"}
    )
    with pytest.raises(InputError, match=r"gone\.npy.*is not there; say --mean"):
        Classifier.load(lost)
    with pytest.raises(InputError, match="does not say which mean image"):
        Classifier.load(weights)


def test_a_mean_image_that_does_not_fit(weights: Path, tmp_path: Path) -> None:
    for shape, reason in (
        ((3, 60, 60), "60 pixels wide and high, the network .* sees 67"),
        ((3, 70, 71), r"\(3, 70, 71\), the pictures need float32 \(3, S, S\)"),
        ((), r"\(\), the pictures need"),
    ):
        np.save(tmp_path / "mean.npy", np.zeros(shape, np.float32))
        with pytest.raises(InputError, match=reason):
            Classifier.load(weights, tmp_path / "mean.npy")


def test_weights_that_cannot_be_used(mean: Path, tmp_path: Path) -> None:
    for changes, reason in (
        ({"value": np.nan}, "not finite"),
        ({"claimed_width": 1e9}, "crop_size, width"),
        ({"claimed_width": 0.5}, "of another network"),
    ):
        path = save_weights(tmp_path / "w.safetensors", WNIDS, **changes)
        with pytest.raises(InputError, match=reason):
            Classifier.load(path, mean).probabilities(noise(1))


HEADED = """
from tandem.layers import Builder, LayeredNetwork, global_average_pool, relu


class Headed(LayeredNetwork):
    def build(self, net: Builder, x):
        x = global_average_pool(relu(net.convolution("conv1", x, 4, 3)))
        if net.training is not None:
            net.auxiliary(net.fully_connected("head", x, self.classes), 0.3)
        return net.fully_connected("fc", x, self.classes)
"""


def test_a_network_with_an_auxiliary_head_classifies_without_it(
    mean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "headed_network.py").write_text(HEADED)
    monkeypatch.syspath_prepend(tmp_path)
    description = NetworkDescription(67, 3, 1.0, network="headed_network:Headed")
    values = dict(build_network(description).initial_values(seed=1))
    assert "head.weight" in values
    weights = tmp_path / "headed.safetensors"
    save_checkpoint(weights, Checkpoint(values, {}, description))
    classifier = Classifier.load(weights, mean, network=description.network)
    picture = np.random.default_rng(2).integers(0, 256, (70, 70, 3), np.uint8)
    (guesses,) = classifier.classify([png(picture)], top=3)
    assert sum(guess.probability for guess in guesses) == pytest.approx(1, rel=1e-5)
