"""The device of each rank."""

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.errors import InputError
from tandem.parallel import devices
from tandem.parallel.devices import choose_devices
from tandem.parallel.rank_team import choose_rank_devices


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cuda_device_count", lambda: 2)
    monkeypatch.setattr(devices, "missing_for_gpus", lambda: None)


@pytest.fixture
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cuda_device_count", lambda: 0)
    monkeypatch.setattr(devices, "available_cores", lambda: (0, 1, 5))


@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_used_where_there_are_any() -> None:
    assert choose_devices(None, None, None) == ["cuda:0", "cuda:1"]
    assert choose_devices(1, True, None) == ["cuda:0"]
    assert choose_devices(3, False, None) == ["cpu"] * 3
    assert choose_devices(None, None, ["cuda:1", "cuda:1"]) == ["cuda:1", "cuda:1"]


@pytest.mark.usefixtures("three_cores")
def test_without_gpus_there_is_a_rank_for_each_core() -> None:
    assert choose_devices(None, None, None) == ["cpu"] * 3
    assert choose_devices(None, None, ["cpu", "cpu"]) == ["cpu"] * 2
    with pytest.raises(InputError, match="use_gpu is True; no GPU was found"):
        choose_devices(None, True, None)
    with pytest.raises(InputError, match="devices are cuda:0; no GPU was found"):
        choose_devices(None, None, ["cuda:0"])


@pytest.mark.usefixtures("two_gpus")
def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(InputError, match="there are 2 GPUs; list devices to have ranks share"):
        choose_devices(3, None, None)
    with pytest.raises(InputError, match="'cuda:2' does not exist: this machine has 2 GPUs"):
        choose_devices(None, None, ["cuda:0", "cuda:2"])
    for name in ("cuda", "gpu:0", "cuda:x", "CPU"):
        with pytest.raises(InputError, match=f"there is no device '{name}'"):
            choose_devices(None, None, [name])
    with pytest.raises(TypeError, match=r'devices is a list .*, not "cpu"'):
        choose_devices(None, None, "cpu")
    with pytest.raises(InputError, match="either all are GPUs or all cpu"):
        choose_devices(None, None, ["cuda:0", "cpu"])
    for ranks, use_gpu, names in ((3, None, ["cpu"]), (0, None, None), (None, True, ["cpu"])):
        with pytest.raises(ValueError, match=r"n_parallel|use_gpu"):
            choose_devices(ranks, use_gpu, names)
    with pytest.raises(ValueError, match="devices is empty"):
        choose_devices(None, None, [])


@pytest.mark.usefixtures("two_gpus")
def test_ranks_on_several_machines_list_more_devices_than_one_has() -> None:
    group: Any = SimpleNamespace(rank=2, size=3, starter="mpirun")
    group.local = SimpleNamespace(rank=0, size=1)
    group.all_gather_object = lambda value: [value] * 3
    for ranks in (None, 3):
        listed = choose_rank_devices(group, ranks, None, ["cuda:0", "cuda:1", "cuda:0"])
        assert listed == ["cuda:0"] * 3
    with pytest.raises(TypeError, match=r'devices is a list .*, not "cpu"'):
        choose_rank_devices(group, None, None, "cpu")
    with pytest.raises(ValueError, match="n_parallel is 2, for 3 devices"):
        choose_rank_devices(group, 2, None, ["cpu"] * 3)
