"""Steps that are compared on a GPU, as far as a CPU can tell."""

import inspect

import pytest
import torch
from pytensor.compile.mode import optdb
from pytensor.graph.rewriting.db import RewriteDatabaseQuery

from alex_net import AlexNet
from benchmarks.gpu_contenders import CONTENDERS, Ours, StepSetting
from benchmarks.plain_alexnet import PlainAlexNet
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


@pytest.mark.parametrize("name", ["ours-uncompiled", "channels-last", "eager-sliced"])
def test_what_needs_no_compiler_runs_on_a_cpu(name: str) -> None:
    CONTENDERS[name].make(StepSetting(SMALL, "bfloat16", None))()


def test_arguments_of_modes_and_names_of_rewrites_exist() -> None:
    known = inspect.signature(device_mode).parameters
    for contender in CONTENDERS.values():
        if isinstance(contender, Ours):
            assert contender.mode.keys() <= known.keys()
            assert all(optdb.query(RewriteDatabaseQuery([tag])) for tag in contender.without)
