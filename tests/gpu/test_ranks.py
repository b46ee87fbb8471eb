"""Ranks on one GPU, by mpirun and torchrun, against one trainer on the host."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.ranks import Starter
from tests.support.runs import train, train_ranks, weights
from tests.support.tiny import read_record

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

COMMON = {
    "precision": "float64",
    "n_epochs": 2,
    "check_every": 1,
    "compile": False,
    "data_on_gpu": False,  # as of data that do not fit
}
GRADIENTS = {"exchange": "gradients", "bucket_mb": 0.1}


@pytest.fixture(scope="module")
def on_host(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("host") / "run"
    return train(data, run, **COMMON, devices=["cpu"], batch_size=4)


@pytest.mark.parametrize(
    ("starter", "ranks", "changes"),
    [
        ("mpirun", 2, {"collective": "asa"}),
        ("mpirun", 2, {"collective": "ar", "exchange": "gradients"}),
        ("mpirun", 2, {"collective": "hierarchical"}),
        ("mpirun", 2, {"collective": "hierarchical", **GRADIENTS}),
        ("mpirun", 2, {"collective": "asa", **GRADIENTS}),
        ("torchrun", 2, {"collective": "hierarchical"}),
        ("torchrun", 2, {"collective": "asa", **GRADIENTS}),
    ],
)
def test_ranks_on_a_gpu_compute_what_one_trainer_does_on_the_host(
    data: Path,
    tmp_path: Path,
    on_host: Path,
    starter: Starter,
    ranks: int,
    changes: dict[str, object],
) -> None:
    changes = {**COMMON, **changes, "devices": ["cuda:0"] * ranks, "batch_size": 4 // ranks}
    run = train_ranks(data, tmp_path / "run", ranks, starter, timeout=200, **changes)
    ours, theirs = weights(run), weights(on_host)
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-7, atol=1e-10, err_msg=name)
    for line, expected in zip(read_record(run), read_record(on_host), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-7)


@pytest.mark.parametrize("rule", ["easgd", "gosgd"])
def test_ranks_on_a_gpu_need_not_be_in_step(data: Path, tmp_path: Path, rule: str) -> None:
    changes = {**COMMON, "check_every": 0, "rule": rule, "gosgd_p": 0.5, "devices": ["cuda:0"] * 2}
    run = train_ranks(data, tmp_path / "run", 2, timeout=200, **changes)
    assert [line["event"] for line in read_record(run)].count("validation") == 2


def test_nccl_takes_what_it_is_given() -> None:
    """NCCL wants a GPU for each rank: of one GPU it can't be asked for more."""
    import torch
    from torch.distributed import HashStore

    from tandem.distributed.gloo import GlooGroup

    group = GlooGroup(HashStore(), 0, 1, "test")
    group.open_nccl()
    tensor = torch.arange(5.0, device="cuda:0")
    group.all_reduce(tensor)
    assert tensor.tolist() == [0, 1, 2, 3, 4]
    group.close()


@pytest.mark.parametrize("shares", [[1 / 9] * 9, np.random.default_rng(0).dirichlet(np.ones(9))])
def test_a_vector_is_added_with_the_same_bits_on_a_gpu(shares: Sequence[float]) -> None:
    import torch

    from tandem.distributed.allreduce import add_weighted

    rng = np.random.default_rng(0)
    terms = rng.normal(size=(9, 10_007)).astype(np.float32)
    found, expected = torch.empty(10_007, device="cuda:0"), np.empty(10_007, np.float32)
    add_weighted(found, torch.from_numpy(terms).cuda(), shares)
    add_weighted(expected, terms, shares)
    assert found.cpu().numpy().tobytes() == expected.tobytes()
