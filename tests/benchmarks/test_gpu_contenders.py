"""Steps that are compared on a GPU, as far as a CPU can tell."""

import inspect
from typing import Any

import pytest
import torch
from pytensor.compile.mode import optdb
from pytensor.graph.rewriting.db import RewriteDatabaseQuery

from alex_net import AlexNet
from benchmarks.gpu_contenders import CONTENDERS, Ours, Place, Plain
from benchmarks.plain_alexnet import PlainAlexNet, plain_step
from examples.resident_step import PAPER, Sizes
from tandem.backend import device_mode

SMALL = Sizes(batch=3)


def test_plain_pytorch_has_the_papers_parameters() -> None:
    with torch.device("meta"):
        model = PlainAlexNet(PAPER.network(), "module")
    assert sum(p.numel() for p in model.parameters()) == 60_965_224


def test_the_two_ways_of_normalising_are_one() -> None:
    net = AlexNet(67, 5, 0.2)
    torch.manual_seed(0)
    images = 60 * torch.randn(2, 3, 67, 67)
    plain, sliced = (PlainAlexNet(net, norm).eval() for norm in ("module", "slices"))
    sliced.load_state_dict(plain.state_dict())
    torch.testing.assert_close(plain(images), sliced(images))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_plain_step_learns(precision: str) -> None:
    for norm in ("module", "slices"):
        step = plain_step(SMALL.network(), SMALL.batch, "cpu", norm, precision)
        step()
        step()


@pytest.mark.parametrize("name", ["ours-uncompiled", "channels-last", "eager-sliced"])
def test_what_needs_no_compiler_runs_on_a_cpu(name: str) -> None:
    CONTENDERS[name].make(Place(SMALL, "bfloat16", None))()


def test_gradient_and_update_are_called_apart() -> None:
    ours = Ours(compile=False, as_one=False, captured=False)
    ours.make(Place(SMALL, "float32", None))()


def test_layouts_of_the_filters_follow_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Driver:
        device = 0

    def refuse(*arguments: Any, channels_last: bool) -> None:
        asked.append((arguments[2], channels_last))
        raise InterruptedError

    monkeypatch.setattr("benchmarks.gpu_contenders.ResidentStep", refuse)
    mode = device_mode("cpu")
    monkeypatch.setattr("benchmarks.gpu_contenders.device_mode", lambda *args, **options: mode)
    for name in ("ours", "ours-channels-first"):
        with pytest.raises(InterruptedError):
            CONTENDERS[name].make(Place(SMALL, "bfloat16", Driver()))  # type: ignore[arg-type]
    assert asked == [("cuda:0", True), ("cuda:0", False)]


def test_arguments_of_modes_and_names_of_rewrites_exist() -> None:
    known = inspect.signature(device_mode).parameters
    for contender in CONTENDERS.values():
        if isinstance(contender, Ours):
            assert contender.mode.keys() <= known.keys()
            assert all(optdb.query(RewriteDatabaseQuery([tag])) for tag in contender.without)


def test_goals_are_against_both_ways_of_normalising() -> None:
    goals = {"module": 1.2, "slices": 1.0}
    for contender in CONTENDERS.values():
        if isinstance(contender, Plain) and contender.compile_mode is not None:
            assert contender.goal == goals[contender.norm]
        else:
            assert contender.goal is None
