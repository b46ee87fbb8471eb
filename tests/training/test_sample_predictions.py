"""Which validation pictures are shown with their predictions, and what they are."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.artifacts.checkpoint import RunState
from tandem.config.schema import Config
from tandem.data.minibatch import MinibatchRequest
from tandem.data.order import global_minibatch, minibatch_count
from tandem.launch.prepare import prepare_run
from tandem.memory import HostSlots, SlotLayout
from tandem.training.input_pipeline import minibatch_requests
from tandem.training.run_spec import RunSpec
from tandem.training.sample_predictions import SamplePredictions, sample_rows
from tests.support.tiny import prepare


@given(st.integers(1, 300), st.integers(1, 4), st.integers(1, 40), st.integers(1, 10))
def test_samples_are_pictures_of_trainer_0_from_all_over_the_split(
    size: int, trainers: int, batch: int, count: int
) -> None:
    rows = sample_rows(size, trainers * batch, batch, count)
    order = np.arange(size)
    chosen = []
    for minibatch, mine in rows.items():
        seen = global_minibatch(order, minibatch, trainers * batch)[:batch]
        assert all(row < len(seen) for row in mine)
        chosen += [int(seen[row]) for row in mine]
    assert len(set(chosen)) == len(chosen) <= count
    assert list(rows) == sorted(rows)
    if trainers == 1:
        assert chosen == sorted({number * size // count for number in range(count)})
    # As many minibatches as there can be.
    assert len(rows) == len({n * size // count // (trainers * batch) for n in range(count)})


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    config = Config(
        data_folder=str(prepare(tmp_path / "data", validation=23)),
        weights_dir=str(tmp_path / "run"),
        crop_size=67,
        batch_size=2,
        devices=("cpu", "cpu"),
        threads=1,
    )
    return prepare_run(config)


def test_scores_are_collected_during_validation(spec: RunSpec) -> None:
    samples, size = SamplePredictions(spec), 23
    scores = np.random.default_rng(0).standard_normal((size, 3))
    for epoch in range(2):
        for k in range(minibatch_count(size, 4)):
            mine = global_minibatch(np.arange(size), k, 4)[:2]
            batch = np.full((2, 3), np.nan)
            batch[: len(mine)] = scores[mine] + epoch
            samples.collect(k, lambda batch=batch: batch)
        np.testing.assert_array_equal(samples.take(), scores[samples.indices] + epoch)
    assert len(samples.indices) == 7  # 6 minibatches have 1 or 2


def test_the_sheet_shows_the_crops_that_the_network_sees(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    monkeypatch.setattr(
        "tandem.artifacts.visualize.prediction_sheet", lambda *arguments: drawn.append(arguments)
    )
    spec = replace(spec, wnids=("n01440764", "n01443537", "my own"))
    samples = SamplePredictions(spec)
    indices = np.array(samples.indices)
    slot = HostSlots.create(SlotLayout.of_pictures(len(indices), 67), rank=0).arrays[0]
    spec.minibatch_builder().fill(slot, MinibatchRequest(0, "validation", 0, 0, indices))
    predicted = np.full((len(indices), 3), 1 / 3)
    for _ in range(2):
        samples.draw(predicted)
        crops, labels, probabilities, names = drawn.pop()
        np.testing.assert_array_equal(crops, slot.pictures)
        np.testing.assert_array_equal(labels, slot.labels)
        np.testing.assert_array_equal(probabilities, predicted)
        assert names == ["tench", "goldfish", "my own"]


def test_a_run_of_a_few_steps_asks_for_these_only_and_shows_what_they_contain(
    spec: RunSpec,
) -> None:
    """13 pictures to train with and 23 to validate, 4 a step."""
    few = replace(spec, most_steps=2)
    assert [few.steps("train"), few.steps("validation")] == [2, 2]
    assert [spec.steps("train"), spec.steps("validation")] == [4, 6]
    assert replace(spec, most_steps=9).steps("train") == 4
    asked = minibatch_requests(few, 0, RunState(epoch=few.config.n_epochs - 1))
    assert [(r.mode, r.minibatch) for r in asked] == [
        (mode, step) for mode in ("train", "validation") for step in (0, 1)
    ]
    asked = minibatch_requests(
        replace(few, unvalidated=frozenset({few.config.n_epochs - 1})),
        0,
        RunState(epoch=few.config.n_epochs - 1),
    )
    assert [r.mode for r in asked] == ["train", "train"]
    assert max(SamplePredictions(spec).indices) > 8
    assert max(SamplePredictions(few).indices) < 8
