"""What a trainer is given before it computes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from alex_net import AlexNet
from tandem.training import setup


@pytest.mark.parametrize("on_gpu", [False, True])
def test_freed_memory_is_kept_by_trainers_on_cpus(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    class Prepared(Exception): ...

    def prepared(config: Any) -> None:
        raise Prepared

    calls: list[bool] = []
    monkeypatch.setattr("tandem.backend.set_threads", lambda count: None)
    monkeypatch.setattr("tandem.backend.keep_freed_memory", lambda: calls.append(True))
    monkeypatch.setattr(setup, "ExchangeSettings", SimpleNamespace(of=prepared))
    monkeypatch.setattr(setup, "build_network", lambda *arguments: None)
    monkeypatch.setattr(setup, "_drawn_ahead", lambda spec, network: None)
    config = type("Config", (dict,), {"dtype": "float32"})()
    spec: Any = SimpleNamespace(threads=1, on_gpu=on_gpu, config=config, description=None)
    spec.of_rank, spec.own_code = lambda rank: spec, b""
    with pytest.raises(Prepared):
        setup.set_up(spec, SimpleNamespace(group=None, rank=0))  # type: ignore[arg-type]
    assert calls == [True] * (not on_gpu)


class OwnValues(AlexNet):
    """A network whose values may need an import."""

    def initial_values(self, seed: int) -> Any:
        return super().initial_values(seed + 1)


def test_values_are_drawn_ahead_only_where_they_are_used() -> None:
    def drawn(kind: type[AlexNet] = AlexNet, **changed: Any) -> Any:
        network = kind(crop_size=67, classes=3, width=0.05)
        settings: dict[str, Any] = {"job": "train", "resumed": None, "weights": None}
        config = SimpleNamespace(seed=5, init_weights_skip=changed.pop("skipped", []))
        spec: Any = SimpleNamespace(config=config, **settings | changed)
        return network, setup._drawn_ahead(spec, network)

    for changed in ({}, {"weights": "a.safetensors", "skipped": ["fc8"]}):
        network, found = drawn(**changed)
        for (name, one), (other_name, other) in zip(
            found.result(), network.initial_values(5), strict=True
        ):
            assert name == other_name
            np.testing.assert_array_equal(one, other)
    path = "a.safetensors"
    for changed in ({"weights": path}, {"resumed": path}, {"weights": path, "job": "validate"}):
        assert drawn(**changed)[1] is None
    assert drawn(OwnValues)[1] is None
