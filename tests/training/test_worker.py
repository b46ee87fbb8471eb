"""The process of a trainer, with a trainer that does nothing."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.training import worker


@pytest.mark.parametrize("job", ["train", "validate"])
def test_a_trainer_reports_what_its_gpu_keeps(monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    said: list[str] = []
    nothing = dict.fromkeys(["train", "validate_only", "finish", "close"], lambda: None)
    trainer = SimpleNamespace(reports=SimpleNamespace(notice=said.append), memory=0, **nothing)
    monkeypatch.setattr(worker, "Trainer", lambda *_: trainer)
    spec: Any = SimpleNamespace(job=job, config=SimpleNamespace(trace="off"))
    for kept in (None, "cuda:0 keeps all"):
        monkeypatch.setattr(worker, "describe_kept", lambda spec, memory, text=kept: text)
        worker._train(spec, trainer, trainer)  # type: ignore[arg-type]
    assert said == ["cuda:0 keeps all"]


def test_a_trainer_is_set_up_without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    nothing = dict.fromkeys(["finish", "close"], lambda: None)
    trainer = SimpleNamespace(memory=0, train=lambda: said.append(gc.isenabled()), **nothing)

    def set_up(*_: Any) -> Any:
        said.append(gc.isenabled())
        return trainer

    monkeypatch.setattr(worker, "Trainer", set_up)
    monkeypatch.setattr(worker, "describe_kept", lambda *_: None)
    monkeypatch.setattr(gc, "freeze", lambda: said.append("frozen"))
    spec: Any = SimpleNamespace(job="train", config=SimpleNamespace(trace="off"))
    worker._train(spec, trainer, trainer)  # type: ignore[arg-type]
    assert said == [False, "frozen", True]
