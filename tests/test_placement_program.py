"""``tandem placement``: what it prints and refuses."""

import pytest

from tandem.__main__ import main

TINY = ["--width", "0.05", "--classes", "12", "--crop_size", "67", "--batch_size", "4"]
HEAD = """\
alex_net:AlexNet, 12 classes, input 3x67x67, float32; fully_connected: sharded
3 trainers of 4 images each

   conversion      of                  shape """


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["placement", *TINY, *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["placement", *TINY, *arguments]) == 2
    return capsys.readouterr().err


def test_conversions_and_sums_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--ranks", "3", "--strict")
    assert text.startswith(HEAD)
    assert "8 conversions, MB received: " in text
    assert "without a rule, computed from whole tensors: none\n" in text
    for line in ("together", "replicated, exchange: gradients", "sharded", "replicated"):
        assert f"\n  {line}  " in text


def test_replicated_layers_need_no_conversion(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--fully_connected", "replicated")
    assert "0 conversions, MB received: 0.0\n" in text
    found = {line.split("  ")[1]: line.split()[-1] for line in text.splitlines() if "  " in line}
    assert found["together"] == found["replicated, exchange: gradients"]


def test_ranks_of_single_differ(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--fully_connected", "single", "--optimizer", "adam")
    assert "3 conversions" in text
    assert " at rank 0, 0 at others\n" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "--ranks is 1; it must be a whole number of at least 2"),
        (["--network", "alex_nett:AlexNet"], "network: there is no module 'alex_nett'"),
        (["--network", "alex_net:AlexNett"], "network: the module alex_net has no class"),
        (["--fully_connected", "shared"], '--fully_connected is "shared"; it must be sharded,'),
        (
            ["--ranks", "13"],
            "fully_connected: sharded divides axis 1 of fc8.weight, of length 12, among 13 ",
        ),
        (["--optimizer", "adan"], 'optimizer is "adan"; it must be sgd, adadelta, adagrad, '),
        (["--norm_row", "8"], "unknown option --norm_row; did you mean --norm_rows?"),
        (["--network_options", "{depth: 3}"], "network_options: alex_net:AlexNet has no option"),
    ],
)
def test_what_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(capsys, *arguments)
    assert text.startswith(f"error: {message}")
    assert text.count("\n") == 1


def test_an_op_without_a_rule_is_refused_with_strict(capsys: pytest.CaptureFixture[str]) -> None:
    network = ["--network", "tests.support.unruled_network:UnruledNetwork"]
    assert "whole tensors: Unruled\n" in printed(capsys, *network)
    assert refused(capsys, *network, "--strict").startswith(
        "error: --strict: Unruled: no rule says"
    )
