"""What a trainer is given before it computes."""

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.training import setup


@pytest.mark.parametrize("on_gpu", [False, True])
def test_freed_memory_is_kept_by_trainers_on_cpus(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    class BuiltNetwork(Exception): ...

    def build_network(*arguments: Any) -> None:
        raise BuiltNetwork

    calls: list[bool] = []
    monkeypatch.setattr("tandem.backend.set_threads", lambda count: None)
    monkeypatch.setattr("tandem.backend.keep_freed_memory", lambda: calls.append(True))
    monkeypatch.setattr(setup, "ExchangeSettings", SimpleNamespace(of=lambda config: None))
    monkeypatch.setattr(setup, "build_network", build_network)
    config = type("Config", (dict,), {"dtype": "float32"})()
    spec: Any = SimpleNamespace(threads=1, on_gpu=on_gpu, config=config, description=None)
    spec.of_rank, spec.own_code = lambda rank: spec, b""
    with pytest.raises(BuiltNetwork):
        setup.set_up(spec, SimpleNamespace(group=None, rank=0))  # type: ignore[arg-type]
    assert calls == [True] * (not on_gpu)
