"""`tandem models` and `tandem recipes` list what there is."""

import json
from math import prod

import pytensor.tensor as pt
import pytest
from pytensor.graph.traversal import applys_between

from tandem.catalogue import FROM_KERAS, run_models, run_recipes
from tandem.config.command_line import RECIPES
from tandem.ops.work import work_of
from tests.models.test_recipes import PARAMETERS


def listed(run: object, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    assert run(["--json"], None) == 0  # type: ignore[operator]
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_networks_have_the_published_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    found = {str(each["name"]).rpartition(":")[2]: each for each in listed(run_models, capsys)}
    assert len(found) == 29
    assert 19.3e6 < found["ResNet1202"]["parameters"] < 19.5e6  # the paper's 19.4 million
    assert found["AlexNet"]["parameters"] == 60_965_224
    by_recipe = {name: each for each in found.values() for name in each["recipes"]}  # type: ignore[attr-defined]
    assert {name: each["parameters"] for name, each in by_recipe.items()} == PARAMETERS
    # Of multiplications and additions: twice the 4.09 and 15.47 billion that torchvision counts.
    assert found["ResNet50"]["operations"] == pytest.approx(2 * 4.09e9, rel=0.02)
    assert found["VGG16"]["operations"] == pytest.approx(2 * 15.47e9, rel=0.02)
    assert found["WideResNet"]["pixels"] == 32
    assert found["ResNet18"]["source"] == "He, Zhang, Ren, Sun 2016, arXiv 1512.03385"


@pytest.mark.slow
def test_networks_of_keras_have_the_listed_numbers() -> None:
    from tests.support.keras_models import keras, network_of

    for entry in FROM_KERAS:
        make = getattr(keras.applications, entry.name.partition(":")[2])
        network = network_of(make(weights=None, classifier_activation=None))
        declared = network.parameters.declared.values()
        assert entry.parameters == sum(prod(p.shape) for p in declared if p.trainable)
        images = pt.tensor(dtype="float32", shape=(1, entry.pixels, entry.pixels, 3))
        nodes = applys_between([images], [network.logits(images, None)])
        assert entry.operations == sum(work_of(node).flops for node in nodes)


def test_recipes_have_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    found = {each["name"]: each for each in listed(run_recipes, capsys)}
    assert sorted(found) == sorted(path.stem for path in RECIPES.glob("*.yaml"))
    assert found["vgg16"]["network"] == "tandem.models.vgg:VGG16"
    assert found["vgg16"]["summary"] == "VGG-16 on ImageNet"
    assert run_recipes([], None) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split()[0] == "wide_resnet"
    assert lines[-1].endswith("WRN-28-10 on CIFAR-10")
