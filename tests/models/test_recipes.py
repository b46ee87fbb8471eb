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


def settings_of(
    batch: int,
    rate: float,
    policy: str,
    epochs: int,
    decay: float,
    decays: list[str],
    *,
    bias_rate: float = 1.0,
    nesterov: bool = False,
    **others: object,
) -> dict[str, object]:
    return {
        "batch_size": batch,
        "learning_rate": rate,
        "lr_policy": policy,
        "n_epochs": epochs,
        "weight_decay": decay,
        "decay_kinds": decays,
        "bias_rate": bias_rate,
        "use_nesterov_momentum": nesterov,
        "momentum": 0.9,
        "optimizer": "sgd",
        **others,
    }


NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
PARAMETERS = {
    "alexnet": 60_965_224,
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

ALL = ["weight", "bias", "scale", "shift"]
# What the sources that each recipe names have: batch, rate, policy, epochs, decay, what decays, the
# rate of biases, Nesterov's momentum, and what else is particular.
SETTINGS: dict[str, dict[str, object]] = {
    "alexnet": settings_of(
        *(128, 0.01, "plateau", 90, 5e-4, ["weight"]),
        bias_rate=2.0,
        rand_colour=0.1,
        lr_patience=5,
    ),
    "densenet": settings_of(64, 0.1, "step", 300, 1e-4, ALL, nesterov=True, lr_step=[150, 225]),
    "googlenet": settings_of(32, 0.01, "poly", 60, 2e-4, ["weight"], bias_rate=2.0, lr_power=0.5),
    "googlenet_bn": settings_of(256, 0.1, "step", 90, 1e-4, ["weight"], lr_step=[30, 60, 80]),
    "mobilenet": settings_of(256, 0.045, "every", 300, 4e-5, ALL, lr_every=1, lr_factor=0.98),
    "resnet18": settings_of(256, 0.1, "step", 90, 1e-4, ALL, lr_step=[30, 60]),
    # Goyal et al. 2017, section 5.1: Nesterov's momentum, no decay of scale and shift.
    "resnet50": settings_of(
        256, 0.1, "step", 90, 1e-4, ["weight"], nesterov=True, lr_step=[30, 60, 80]
    ),
    "resnet_cifar": settings_of(128, 0.1, "step", 164, 1e-4, ALL, lr_step=[82, 123]),
    "vgg16": settings_of(256, 0.01, "step", 90, 1e-4, ["weight", "bias"], lr_step=[30, 60]),
    "wide_resnet": settings_of(
        *(128, 0.1, "step", 200, 5e-4, ALL),
        nesterov=True,
        lr_step=[60, 120, 160],
        lr_factor=0.2,
        width=10,
    ),
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


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_the_published_settings(name: str) -> None:
    config = load_config(["--config", name])
    found = {key: getattr(config, key) for key in SETTINGS[name]}
    found = {k: [*v] if isinstance(v, tuple) else v for k, v in found.items()}
    assert found == SETTINGS[name]


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


@pytest.mark.slow
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
