"""Theano-MPI's session: rules start runs, whose records are those of `tandem train`."""

import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tandem.artifacts.checkpoint import read_header
from tandem.config.command_line import RECIPES
from tandem.config.schema import make_config
from tandem.errors import InputError, RunError
from tandem.session import BSP, EASGD, GOSGD
from tandem.validation import read_yaml
from tests.support.ranks import need_ranks
from tests.support.runs import assert_same_bits, train
from tests.support.tiny import wait_for_steps

TINY: dict[str, Any] = {
    "crop_size": 67,
    "width": 0.05,
    "batch_size": 2,
    "n_epochs": 1,
    "print_freq": 1,
    "threads": 1,
}


def test_what_cannot_be_used_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = BSP()
    with pytest.raises(InputError, match="expected init before wait"):
        rule.wait()
    with pytest.raises(InputError, match="n_epochs"):
        rule.init(["cpu"], n_epochs=0)
    with pytest.raises(InputError, match="unknown key epochz"):
        rule.init(["cpu"], epochz=3)
    monkeypatch.setattr("os.access", lambda *_: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"no mpirun.*use BSP"):
        EASGD().init(["cpu", "cpu"])
    rule.stop()  # no run: nothing to do


@pytest.mark.parametrize(
    ("module", "name", "network", "recipe"),
    [
        ("theanompi.models", "AlexNet", "alex_net:AlexNet", "alexnet"),
        ("theanompi.models.googlenet", "GoogLeNet", "googlenet:GoogLeNet", "googlenet"),
        ("theanompi.models.lasagne_model_zoo.vgg16", "VGG16", "vgg:VGG16", "vgg16"),
        ("theanompi.models.lasagne_model_zoo.resnet50", "ResNet50", "resnet:ResNet50", "resnet50"),
        (
            "theanompi.models.lasagne_model_zoo.resnet152",
            "ResNet152",
            "resnet:ResNet152",
            "resnet50",
        ),
        (
            "theanompi.models.keras_model_zoo.wresnet",
            "Wide_ResNet",
            "wide_resnet:WideResNet",
            "wide_resnet",
        ),
    ],
)
def test_lines_of_theano_mpis_examples_start_our_networks(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, network: str, recipe: str
) -> None:
    """With devices as there, and the recipe's settings, unless others are given."""
    started: list[dict[str, Any]] = []

    def popen(command: list[str], **options: Any) -> Any:
        started.append(read_yaml(Path(command[-1])))
        return Mock(stdout=None)

    monkeypatch.setattr("tandem.session.subprocess.Popen", popen)
    monkeypatch.setattr(BSP, "sync_type", "cdd")
    for settings in ({"n_epochs": 3}, make_config({"n_epochs": 3})):
        rule = BSP(settings)
        rule.init(devices=["cuda0", "cuda1"], modelfile=module, modelclass=name)
    values, others = started
    assert values == others
    assert values == read_yaml(RECIPES / f"{recipe}.yaml") | {
        "network": network if name == "AlexNet" else f"tandem.models.{network}",
        "devices": ["cuda:0", "cuda:1"],
        "rule": "bsp",
        "exchange": "gradients",
        "n_epochs": 3,
    }
    rule.stop()
    with pytest.raises(InputError, match=r"found WGAN of Theano-MPI.*examples\.parallel_gan"):
        rule.init(["cpu"], "theanompi.models.lasagne_model_zoo.wgan", "WGAN")


def test_by_default_the_network_is_the_configuration_s(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []

    def popen(command: list[str], **options: Any) -> Any:
        started.append(read_yaml(Path(command[-1])))
        return Mock(stdout=None)

    monkeypatch.setattr("tandem.session.subprocess.Popen", popen)
    for settings in ({"network": "tandem.models.resnet:ResNet20"}, {}):
        rule = BSP(settings)
        rule.init(devices=["cpu"])
        assert started[-1] == {**settings, "devices": ["cpu"], "rule": "bsp"}
        rule.stop()
        rule.init(devices=["cpu"], modelclass="AlexNet")
        assert started[-1]["network"] == "alex_net:AlexNet"
        rule.stop()


@pytest.mark.slow
def test_two_lines_train_as_the_program_does(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = BSP({**TINY, "data_folder": data})
    rule.init(["cpu", "cpu"], weights_dir=tmp_path / "run")
    with pytest.raises(InputError, match="expected wait or stop before init"):
        rule.init(["cpu"])
    result = rule.wait()
    assert "epoch 1" in capsys.readouterr().out
    assert result.record[-1].images == 7
    train(data, tmp_path / "other", devices=["cpu", "cpu"], **TINY)
    assert_same_bits(tmp_path / "run", tmp_path / "other")


@pytest.mark.slow
def test_another_network_is_named_by_its_module_and_class(data: Path, tmp_path: Path) -> None:
    rule = BSP({**TINY, "data_folder": data, "crop_size": 32})
    network = "tandem.models.wide_resnet", "WideResNet"
    rule.init(["cpu", "cpu"], *network, weights_dir=tmp_path / "run")
    checkpoint = rule.wait().weights
    assert read_header(checkpoint).network.network == ":".join(network)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [EASGD, GOSGD])
def test_asynchronous_rules_run_over_ranks(rule: Any, data: Path, tmp_path: Path) -> None:
    need_ranks()
    session = rule({**TINY, "data_folder": data, "weights_dir": tmp_path / "run"})
    result = session.init(["cpu", "cpu"]).wait()
    assert read_header(result.weights).network.network == "alex_net:AlexNet"
    assert result.record[-1].images == 7


@pytest.mark.slow
def test_a_run_is_stopped_with_a_checkpoint_and_fails_with_its_last_line(
    data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    rule = BSP({**TINY, "data_folder": data, "weights_dir": folder, "n_epochs": 1000})
    rule.init(["cpu"])
    assert rule._process is not None
    wait_for_steps(folder, rule._process, 3)
    rule.stop()
    assert list(folder.glob("epoch-*-step-*.safetensors"))
    rule.init(["cpu"], resume_train=True)
    time.sleep(1)
    assert rule._process is not None
    rule._process.send_signal(signal.SIGKILL)
    with pytest.raises(RunError, match="status -9"):
        rule.wait()
