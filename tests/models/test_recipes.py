"""The recipes of `tandem.models`: found by name, complete, and refused where they are wrong."""

import json
from pathlib import Path

import numpy as np
import pytest

from tandem.config.command_line import RECIPES, load_config
from tandem.config.schema import Config
from tandem.errors import InputError
from tandem.layers.network import NetworkDescription, build_network
from tests.support.tiny import ROOT, prepare, read_record, run_program, settings

NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
PARAMETERS = {
    "densenet": 769_162,
    "googlenet": 13_378_280,
    "googlenet_bn": 13_004_888,
    "mobilenet": 3_504_872,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet_cifar": 269_722,
    "vgg16": 138_357_544,
    "wide_resnet": 36_479_194,
}


def description(config: Config, classes: int) -> NetworkDescription:
    return NetworkDescription(
        config.crop_size, classes, config.width, None, False, config.network, config.options
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_names_the_published_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(["--config", name])
    classes = 10 if config.crop_size == 32 else 1000
    net = build_network(description(config, classes))
    declared = net.parameters.declared.values()
    trained = sum(int(np.prod(p.shape)) for p in declared if p.trainable)
    assert trained == PARAMETERS[name]
    assert config.weights_dir == f"runs/{name}"
    assert config == load_config(["--config", str(RECIPES / f"{name}.yaml")])


def test_a_file_comes_before_the_recipe_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("resnet50").write_text("batch_size: 3\n")
    assert load_config(["--config", "resnet50"]) == Config(batch_size=3)


def test_an_option_comes_before_the_recipe() -> None:
    assert load_config(["--config", "resnet50", "--batch_size", "32"]).batch_size == 32


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet5", "there is no such file, and no such recipe; did you mean resnet50?"),
        ("nothing", f"there is no such file, and no such recipe; recipes are {', '.join(NAMES)}"),
        ("resnet50.yml", "cannot be read"),
        ("models/resnet50", "cannot be read"),
    ],
)
def test_an_unknown_recipe_is_refused(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        load_config(["--config", name])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        (
            "resnet50",
            "{zero_innit: true}",
            "network_options: tandem.models.resnet:ResNet50 has no option 'zero_innit'; "
            "did you mean zero_init?",
        ),
        (
            "wide_resnet",
            "{depth: 27}",
            "crop_size, width, network_options: WideResNet: depth is 27, expected 6n + 4",
        ),
        (
            "wide_resnet",
            "{depth: deep}",
            'network_options: depth of tandem.models.wide_resnet:WideResNet is "deep": '
            "input should be a valid integer",
        ),
        ("wide_resnet", "{depth: 1000000}", "input should be less than or equal to 2000"),
        ("wide_resnet", "{dropout: 1.5}", "input should be less than 1"),
        ("resnet_cifar", "{shortcut: padded}", "input should be 'identity' or 'projection'"),
    ],
)
def test_a_recipe_with_a_wrong_option_is_refused_and_nothing_is_written(
    recipe: str, options: str, message: str
) -> None:
    config = load_config(["--config", recipe, "--network_options", options])
    with pytest.raises(InputError) as error:
        build_network(description(config, 10))
    assert message in str(error.value)


def test_a_run_of_a_recipe_with_an_unknown_option_writes_nothing(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    text = (RECIPES / "wide_resnet.yaml").read_text()
    recipe.write_text(text.replace("{depth: 28, dropout: 0.0}", "{dpeth: 28}"))
    data = prepare(tmp_path / "data", image_size=40)
    arguments = settings(data, tmp_path / "run", crop_size=32, width=1)
    result = run_program("train.py", ["--config", str(recipe), *arguments])
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(
        "error: network_options: tandem.models.wide_resnet:WideResNet has no option 'dpeth'; "
        "did you mean depth?"
    )
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_trains(name: str, tmp_path: Path) -> None:
    """Its network, narrow and on small pictures, by the program."""
    side = 32 if load_config(["--config", name]).crop_size == 32 else 96
    data = prepare(tmp_path / "data", image_size=side + 8)
    width = 1 if name == "wide_resnet" else 0.125
    changes = {"crop_size": side, "width": width, "n_epochs": 2, "batch_size": 4}
    recipe = str(ROOT / "tandem" / "models" / f"{name}.yaml")
    arguments = settings(data, tmp_path / "run", **changes)
    result = run_program("train.py", ["--config", recipe, *arguments], timeout=280)
    assert result.returncode == 0, result.stderr
    lines = read_record(tmp_path / "run")
    validated = [line for line in lines if line["event"] == "validation"]
    assert len(validated) == 2
    assert all(np.isfinite(float(str(line["loss"]))) for line in lines if "loss" in line)
    weights = ["--weights", str(tmp_path / "run" / "epoch-0002.safetensors")]
    result = run_program("validate.py", ["--config", recipe, *arguments, *weights], timeout=280)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["loss"] == pytest.approx(validated[-1]["loss"], rel=1e-4)
