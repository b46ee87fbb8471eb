"""How the class of a network is found, and what is refused."""

import sys
from pathlib import Path

import pytest

from alex_net import AlexNet
from examples.le_net import LeNet
from tandem.config.schema import Config, make_config
from tandem.errors import InputError
from tandem.layers.network import NetworkDescription, build_network, check_network
from tandem.registry import find_class

MODULE = """
from tandem.layers import Network

class Odd:
    def __init__(self, crop_size, classes, width, dtype):
        pass

class Narrow(Network):
    def __init__(self, crop_size):
        pass

number = 5
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "a_network_of_the_tests"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def of(network: str, **changes: object) -> NetworkDescription:
    return NetworkDescription(
        **{"crop_size": 67, "classes": 3, "width": 0.1, **changes}, network=network
    )


def test_the_default_is_alexnet() -> None:
    net = build_network(NetworkDescription(67, 3, 0.1), "float64")
    assert type(net) is AlexNet
    assert (net.crop_size, net.classes, net.width, net.dtype) == (67, 3, 0.1, "float64")
    assert Config().network == NetworkDescription(67, 3, 0.1).network


def test_another_network_is_made_with_the_same_arguments() -> None:
    net = build_network(of("examples.le_net:LeNet"))
    assert type(net) is LeNet
    assert (net.crop_size, net.classes, net.dtype) == (67, 3, "float32")
    assert net.parameters["fc4.weight"].type.shape == (50, 3)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("nowhere:Net", "no module 'nowhere' for nowhere:Net"),
        ("examples.nowhere:Net", "no module 'examples.nowhere'"),
        ("examples.le_net:Lenet", "no class 'Lenet'; did you mean examples.le_net:LeNet"),
        ("examples.le_net:CONTRAST", "examples.le_net:CONTRAST is of type tuple, expected a class"),
    ],
)
def test_a_module_or_class_that_is_not_there(network: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_class("network", network)


def test_a_module_that_lacks_another_says_so_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacking_network.py").write_text("import something_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_that_is_not_there"):
        find_class("network", "lacking_network:Net")


@pytest.mark.parametrize(
    ("network", "changes", "message"),
    [
        ("{}:Odd", {}, r"Odd is no network: .* subclass"),
        ("{}:Narrow", {}, "Narrow cannot be made with the arguments crop_size, cl"),
        (
            "examples.le_net:LeNet",
            {"norm_before_pool": True},
            r"LeNet has no option 'norm_before_pool'\. It has none",
        ),
        (
            "examples.le_net:LeNet",
            {"crop_size": 15},
            "LeNet: at crop_size 15: MaxPool2d.* does not fit",
        ),
        (
            "alex_net:AlexNet",
            {"options": {"norm_before": True}},
            r"no option 'norm_before'; did you mean norm_before_pool",
        ),
        ("alex_net:AlexNet", {"options": {"width": 2.0}}, "width is not an option"),
        (
            "alex_net:AlexNet",
            {"options": {"norm_before_pool": 3}},
            "norm_before_pool is 3; it must be true or false",
        ),
    ],
)
def test_networks_and_options_that_are_refused(
    module: str, network: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        build_network(of(network.format(module), **changes))


@pytest.mark.parametrize("network", ["LeNet", "le_net.LeNet", "a b:C", "le_net:", ":C", "a/b:C"])
def test_a_name_needs_a_module_and_a_class(network: str) -> None:
    with pytest.raises(InputError, match=r"network is .* such as alex_net:AlexNet"):
        make_config({"network": network})


def test_a_checkpoint_does_not_decide_which_code_is_run() -> None:
    theirs = of("examples.le_net:LeNet")
    check_network("a.safetensors", theirs, "examples.le_net:LeNet")
    with pytest.raises(InputError, match=r"a.safetensors: .* say --network examples.le_net:LeNet"):
        check_network("a.safetensors", theirs, "alex_net:AlexNet")


def test_options_are_arguments_of_the_class() -> None:
    net = build_network(of("alex_net:AlexNet", options={"norm_before_pool": True}))
    assert isinstance(net, AlexNet)
    assert net.norm_before_pool
    assert of("alex_net:AlexNet", norm_before_pool=True) == of(
        "alex_net:AlexNet", options={"norm_before_pool": True}
    )


def test_a_header_lists_options_only_if_there_are_some() -> None:
    old = of("alex_net:AlexNet", norm_before_pool=True).header()
    assert list(old) == [*("crop_size", "classes", "width", "wnids", "norm_before_pool", "network")]
    new = of("n:Net", options={"depth": 28}).header()
    assert new["options"] == {"depth": 28}
    assert NetworkDescription(**new) == of("n:Net", options={"depth": 28})


def test_what_differs_between_two_descriptions() -> None:
    deep, flat = (of("n:Net", classes=c, options=o) for c, o in ((3, {"depth": 28}), (4, {})))
    assert list(deep.differences(flat)) == [("classes", 3, 4), ("depth", 28, "at its default")]
    assert list(deep.differences(flat, sizes=False)) == [("depth", 28, "at its default")]
    normed = of("n:Net", norm_before_pool=True)
    assert list(normed.differences(of("n:Net"))) == [("norm_before_pool", True, False)]


class Blocks(AlexNet):
    """A network with an option that no JSON value is, but one becomes."""

    def __init__(
        self,
        crop_size: int,
        classes: int,
        width: float,
        dtype: str = "float32",
        blocks: tuple[int, ...] = (3, 4),
    ) -> None:
        super().__init__(crop_size, classes, width, dtype)


def test_a_list_is_taken_for_a_tuple() -> None:
    name = f"{__name__}:Blocks"
    assert build_network(NetworkDescription(67, 3, 0.05, network=name, options={"blocks": [1, 2]}))
    with pytest.raises(InputError, match=r"blocks of .* is \[\"a\"\]: input should be a valid int"):
        build_network(NetworkDescription(67, 3, 0.05, network=name, options={"blocks": ["a"]}))
