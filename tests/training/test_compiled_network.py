"""The compiled functions of a trainer: update against NumPy, gradients, sums, dropout."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch

from alex_net import AlexNet
from tandem.artifacts.metrics import Sums
from tandem.backend.precision import set_tf32
from tandem.config.schema import Config
from tandem.errors import InputError
from tandem.layers.checks import choose_loss
from tandem.layers.choices import LOSSES, CrossEntropy, evaluate_metrics, metrics_of
from tandem.ops import Conv2d, Conv2dInputGrad, Conv2dWeightGrad, DropoutMask, MaxPool2dGrad
from tandem.optim import OPTIMIZERS
from tandem.training.compiled_network import CROPS, CompiledNetwork
from tandem.training.graphs import are_finite
from tests.support.trainer_memory import host_memory, noise_slot

BATCH, CLASSES = 3, 6
MEAN = np.full((3, 67, 67), 100, np.float32)
NET = AlexNet(67, CLASSES, 0.05, "float64")

slot_of = partial(noise_slot, NET, BATCH)


def build(
    records: bool = False,
    on_gradient_ready: Callable[[str], None] | None = None,
    pictures: Mapping[str, np.ndarray] = MappingProxyType({}),
    **settings: object,
) -> CompiledNetwork:
    """A tiny model in float64."""
    config = Config(
        crop_size=67, width=0.05, batch_size=BATCH, precision="float64", threads=1, **settings
    )
    optimizer = OPTIMIZERS.make("sgd", dict(config))
    memory = host_memory(NET, optimizer, BATCH, config.freeze)
    memory.records, memory.pictures = records, pictures
    model = CompiledNetwork(NET, config, optimizer, MEAN, memory, on_gradient_ready)
    model.load(dict(NET.initial_values(1)))
    return model


def values_of(variables: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: variable.get_value() for name, variable in variables.items()}


def put_values(variables: dict[str, Any], values: dict[str, np.ndarray]) -> None:
    for name, value in values.items():
        variables[name].set_value(value)


ZERO = Sums(values={"top1_errors": 0, "top5_errors": 0})


def counted(model: CompiledNetwork) -> Sums:
    """What the gradients that were computed last add to the sums, by an update of no effect."""
    groups = model.weights, model.states["momentum"]
    before = [values_of(group) for group in groups]
    model.update(0.0)
    for group, values in zip(groups, before, strict=True):
        put_values(group, values)
    return model.take_sums("train")


@pytest.mark.parametrize("nesterov", [False, True])
def test_update_gives_biases_twice_the_rate_and_no_decay(nesterov: bool) -> None:
    model = build(use_nesterov_momentum=nesterov, weight_decay=0.01)
    rng = np.random.default_rng(3)
    gradients = {name: rng.normal(size=v.type.shape) for name, v in model.gradients.items()}
    put_values(model.gradients, gradients)
    weights, momenta = values_of(model.weights), values_of(model.states["momentum"])
    for rate in (0.1, 0.02):
        model.update(rate)
        for name in weights:
            bias = name.endswith(".bias")
            slope = gradients[name] + (0 if bias else 0.01) * weights[name]
            change = (2 if bias else 1) * rate * slope
            momenta[name] = 0.9 * momenta[name] - change
            ahead = 0.9 * momenta[name] - change if nesterov else momenta[name]
            weights[name] = weights[name] + ahead
    for variables, expected in ((model.weights, weights), (model.states["momentum"], momenta)):
        for name, value in values_of(variables).items():
            np.testing.assert_allclose(value, expected[name], 1e-12, 1e-15, err_msg=name)


def test_what_a_network_predicts_is_what_is_averaged_and_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where that is no softmax."""
    monkeypatch.setattr(NET, "predictions", lambda logits: pt.sigmoid(logits) / 2, raising=False)
    model, slot = build(), slot_of(3, 1)
    model.validate(slot)
    expected = 0.5 / (1 + np.exp(-model.read_scores()))
    np.testing.assert_allclose(model.read_predictions(), expected, rtol=1e-12)
    for crop in range(CROPS):
        model.validate_crop(slot, crop)
    np.testing.assert_allclose(model.read_probabilities(), expected, rtol=1e-12)


def test_showing_predictions_leaves_tf32_to_the_run() -> None:
    model = build()
    model.validate(slot_of(3, 1))
    model.graphs._config = model.graphs._config.model_copy(update={"precision": "tf32"})
    set_tf32(True)
    try:
        assert model.read_predictions().shape == (BATCH, CLASSES)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        set_tf32(False)


def test_crops_are_averaged_before_they_are_judged() -> None:
    """By loops, over two minibatches; rows beyond the valid ones do not count."""
    model, expected, found = build(), Sums(), Sums()
    for seed, valid in ((1, 3), (2, 2)):
        slots = [slot_of(valid, 10 * seed + crop) for crop in range(CROPS)]
        averages = np.zeros((BATCH, CLASSES))
        for slot in slots:
            slot.labels[...] = slots[0].labels
            model.validate(slot)
            for row, scores in enumerate(model.read_scores()):
                averages[row] += np.exp(scores) / np.exp(scores).sum() / CROPS
        model.take_sums("validation")
        for row in range(valid):
            label = slots[0].labels[row]
            better = int((averages[row] > averages[row, label]).sum())
            loss = -np.log(averages[row, label])
            errors = {"top1_errors": int(better >= 1), "top5_errors": int(better >= 5)}
            expected += Sums(1, loss, errors)
        for crop, slot in enumerate(slots):
            assert model.read_sums("validation") == ZERO
            model.validate_crop(slot, crop)
        np.testing.assert_allclose(model.read_probabilities(), averages, rtol=1e-12)
        found += model.take_sums("validation")
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    assert replace(found, loss=0.0) == replace(expected, loss=0.0)
    assert found.values["top1_errors"] > 0


def test_gradients_are_those_of_finite_differences() -> None:
    model, slot = build(), slot_of(valid=2)
    model.compute_gradients(slot, epoch=4)
    gradients = values_of(model.gradients)
    for name in ("conv1.weight", "conv4.bias", "fc6.weight", "fc8.bias"):
        variable = model.weights[name]
        value = variable.get_value()
        index = np.unravel_index(np.abs(gradients[name]).argmax(), value.shape)
        losses = []
        for step in (1e-6, -1e-6):
            moved = value.copy()
            moved[index] += step
            variable.set_value(moved)
            model.compute_gradients(slot, epoch=4)
            losses.append(counted(model).loss / 2)
        variable.set_value(value)
        slope = (losses[0] - losses[1]) / 2e-6
        assert gradients[name][index] == pytest.approx(slope, rel=1e-4), name


def test_a_trainer_without_pictures_has_a_gradient_of_zero() -> None:
    model = build()
    put_values(model.gradients, {n: v + np.nan for n, v in values_of(model.gradients).items()})
    model.compute_gradients(slot_of(valid=0), epoch=0)
    assert all((value == 0).all() for value in values_of(model.gradients).values())
    assert model.is_finite()
    assert counted(model) == ZERO


def test_stale_rows_change_nothing() -> None:
    model = build()
    first, second = slot_of(valid=2), slot_of(valid=2)
    second.pictures[2:], second.labels[2:], second.indices[2:] = 255, 1, 7
    model.compute_gradients(first, epoch=0)
    expected, sums = values_of(model.gradients), counted(model)
    model.compute_gradients(second, epoch=0)
    for name, value in values_of(model.gradients).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-15)
    again = counted(model)
    assert again.loss == pytest.approx(sums.loss)
    assert (again.values["top1_errors"], again.images) == (sums.values["top1_errors"], 2)


def test_pictures_that_are_kept_give_the_same_bits() -> None:
    """Of a row that is not valid the index may be one of the other split, which is larger."""
    rng = np.random.default_rng(5)
    kept = {
        split: rng.integers(0, 256, (count, 67, 67, 3), np.uint8)
        for split, count in (("train", 5), ("validation", 4))
    }
    keeping, loading = (
        build(records=True, pictures=given, use_data_layer=True) for given in (kept, {})
    )
    for split, compute in (
        ("train", lambda model, slot: model.compute_gradients(slot, 0)),
        ("validation", CompiledNetwork.validate),
    ):
        full = slot_of(valid=2)
        full.indices[...], full.mirrored[...] = [3, 0, 5], [0, 1, 1]
        full.pictures[...] = kept[split][[3, 0, 1]]
        compute(keeping, replace(full, pictures=np.empty((BATCH, 0, 0, 3), np.uint8)))
        compute(loading, full)
    gradients = [values_of(model.gradients) for model in (keeping, loading)]
    for name, value in gradients[0].items():
        assert value.tobytes() == gradients[1][name].tobytes(), name
    assert counted(keeping) == counted(loading)
    assert keeping.take_sums("validation") == loading.take_sums("validation")


def test_sums_count_every_valid_picture_until_they_are_taken() -> None:
    model = build()
    for valid in (3, 1):
        model.validate(slot_of(valid))
    sums = model.take_sums("validation")
    assert sums.images == 4
    assert 0 <= sums.values["top5_errors"] <= sums.values["top1_errors"] <= 4
    assert sums.loss == pytest.approx(4 * np.log(CLASSES), rel=0.2)
    assert model.take_sums("validation") == ZERO


@pytest.mark.parametrize("records", [False, True])
def test_scores_are_the_outputs_that_loss_and_errors_follow_from(records: bool) -> None:
    model = build(records)
    with pytest.raises(RuntimeError, match="nothing has been validated"):
        model.read_scores()
    for seed in (1, 2):
        slot = slot_of(valid=2, seed=seed)
        model.take_sums("validation")
        model.validate(slot)
        scores, labels = model.read_scores(), slot.labels[:2]
        assert scores.shape == (BATCH, CLASSES)
        powers = np.exp(scores[:2])
        likelihood = powers[[0, 1], labels] / powers.sum(axis=1)
        sums = model.take_sums("validation")
        assert sums.loss == pytest.approx(-np.log(likelihood).sum(), rel=1e-9)
        assert sums.values["top1_errors"] == np.count_nonzero(scores[:2].argmax(axis=1) != labels)


def test_the_chosen_loss_is_trained_and_reported_and_metrics_are_counted() -> None:
    model = build(loss="mse", metrics=("accuracy", "mse", "f1"))
    slot = slot_of(3)
    for mode in ("validation", "train"):
        if mode == "validation":
            model.validate(slot)
        else:
            model.compute_gradients(slot, 0)
            model.update(1e-3)
        sums = model.take_sums(mode)
        found = evaluate_metrics(metrics_of(("accuracy", "mse", "f1")), 3, sums.values)
        assert found["mse"] == pytest.approx(sums.loss / 3, rel=1e-12)
        assert found["accuracy"] == pytest.approx(1 - sums.error(1))
        assert sum(sums.values["class_labelled"]) == sum(sums.values["class_predicted"]) == 3
        assert model.read_sums(mode).values["class_right"] == (0.0,) * CLASSES
        if mode == "validation":
            errors = model.read_scores()[:3] - np.eye(CLASSES)[slot.labels[:3]]
            assert sums.loss / 3 == pytest.approx((errors**2).mean(), rel=1e-12)
    assert build(metrics=("f1",), print_train_error=False).variables.sums["train"].keys() >= {
        "class_right"
    }


def test_sums_of_metrics_that_a_checkpoint_lacks_are_not_known() -> None:
    model = build(metrics=("accuracy", "recall"))
    model.put_sums("train", Sums(5, 0.5, {"top1_errors": 2, "class_right": (1.0,)}))
    found = model.read_sums("train")
    assert (found.images, found.values["top1_errors"]) == (5, 2)
    for name in ("top5_errors", "top1_right", "class_right", "class_labelled"):
        assert np.isnan(found.values[name]).all()
    model.put_sums("train", found)
    model.put_sums("train", Sums())
    assert not any(np.any(value) for value in model.read_sums("train").values.values())


def test_errors_of_before_they_were_counted_are_not_known() -> None:
    silent = build(print_train_error=False, metrics=("recall",))
    assert not any(np.any(value) for value in silent.read_sums("train").values.values())
    silent.compute_gradients(slot_of(3), 0)
    silent.update(0.01)
    sums = silent.read_sums("train")
    for name in ("train", "last"):  # what trainers send each other with their votes
        values = silent.read_sums(name).values.values()
        assert all(np.isnan(value).all() for value in values)
    model = build(metrics=("recall",))
    model.put_sums("train", sums)
    model.compute_gradients(slot_of(3), 0)
    model.update(0.01)
    found = model.read_sums("train")
    assert found.images == 6
    assert np.isnan([found.error(1), found.error(5)]).all()
    assert np.isnan((sums + Sums(1, 0.1, {"top1_errors": 1})).error(1))
    model.take_sums("train")
    model.compute_gradients(slot_of(3), 0)
    model.update(0.01)
    assert 0 <= model.read_sums("train").error(1) <= 1


class OwnCost(AlexNet):
    """A network with a cost of its own."""

    def cost(self, logits: Any, labels: Any, valid: Any) -> Any:
        return super().cost(2 * logits, labels, valid)


def test_a_loss_is_not_for_a_network_with_a_cost_of_its_own() -> None:
    network = OwnCost(67, CLASSES, 0.05, "float64")
    choose_loss(network, CrossEntropy())
    for loss in (LOSSES["mae"](), CrossEntropy(0.1)):
        with pytest.raises(InputError, match="OwnCost has a cost of its own"):
            choose_loss(network, loss)


def test_dropout_is_in_the_training_graph_alone() -> None:
    model = build()

    def masks(function: object) -> int:
        nodes = function.maker.fgraph.apply_nodes
        return sum(isinstance(node.op, DropoutMask) for node in nodes)

    assert masks(model.functions.compiled("gradients")[0]) == 2
    assert masks(model.functions.compiled("validation")[0]) == 0


def test_dropout_depends_on_the_epoch() -> None:
    model = build()
    losses = []
    for epoch in (0, 0, 1):
        model.compute_gradients(slot_of(3), epoch)
        losses.append(counted(model).loss)
    assert losses[0] == losses[1] != losses[2]


def test_only_what_is_updated_is_counted_on_top_of_sums_that_were_put() -> None:
    """A minibatch that the trainers agree to leave out is in no figure either."""
    model = build()
    begin = Sums(5, 0.1 + 0.2, {"top1_errors": 2, "top5_errors": 1})
    model.put_sums("train", begin)
    before = values_of(model.weights)
    model.compute_gradients(slot_of(3), 0)
    assert model.read_sums("train") == begin
    assert all((value == before[name]).all() for name, value in values_of(model.weights).items())
    model.compute_gradients(slot_of(2), 0)
    model.update(0.01)
    assert model.take_sums("train").images == 7
    assert model.take_sums("train") == ZERO
    assert any((value != before[name]).any() for name, value in values_of(model.weights).items())


@pytest.mark.parametrize("name", ["conv1.weight", "fc7.bias", "fc8.weight"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_a_loss_that_is_not_finite_is_noticed(name: str, value: float) -> None:
    model = build()
    model.compute_gradients(slot_of(3), 0)
    assert model.is_finite()
    wrong = model.weights[name].get_value()
    wrong.flat[0] = value
    model.weights[name].set_value(wrong)
    model.compute_gradients(slot_of(3), 0)
    loss = model.variables.last["loss"].get_value()
    gradients = values_of(model.gradients).values()
    expected = np.isfinite(loss) and all(np.isfinite(g).all() for g in gradients)
    assert model.is_finite() == expected
    assert name != "fc8.weight" or not np.isnan(value) or not expected
    model.load(dict(NET.initial_values(1)))
    model.compute_gradients(slot_of(3), 0)
    assert model.is_finite()


def test_a_gradient_that_is_not_finite_is_noticed_though_the_loss_is() -> None:
    """Else the weights would be lost in this step, and noticed in the next, when it is too late."""
    value, wrong = pt.vector("value"), pt.vector("wrong")
    finite = pytensor.function([value, wrong], are_finite([pt.sum(value), value, wrong]))
    ones = np.ones(4)
    assert finite(ones, ones)
    for bad in (np.nan, np.inf, -np.inf):
        assert not finite(ones, np.array([1, bad, 2, 3]))
        assert not finite(ones, np.array([bad, -bad, 2, 3]))


def test_a_whole_step_is_a_gradient_and_an_update() -> None:
    apart, whole = build(), build(records=True)
    slots = [slot_of(3, seed=1), slot_of(2, seed=2)]
    for step in range(4):
        slot, rate = slots[step % 2], 0.01 / (step + 1)
        apart.compute_gradients(slot, epoch=step // 2)
        apart.update(rate)
        assert whole.step(slot, step // 2, rate)()
    for ours, theirs in zip(_groups(whole), _groups(apart), strict=True):
        for name, value in values_of(theirs).items():
            found = ours[name].get_value()
            np.testing.assert_allclose(found, value, 1e-11, 1e-15, err_msg=name)
    sums, expected = whole.take_sums("train"), apart.take_sums("train")
    assert sums.loss == pytest.approx(expected.loss, rel=1e-12)
    assert (sums.images, sums.values["top1_errors"]) == (10, expected.values["top1_errors"])


def _groups(model: CompiledNetwork) -> tuple[dict[str, Any], ...]:
    return model.weights, model.states["momentum"]


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    model, slot = build(records=True), slot_of(3)
    good = model.step(slot, 0, 0.01)
    bias = model.weights["fc7.bias"]
    kept = bias.get_value()
    bias.set_value(np.where(np.arange(len(kept)) == 0, np.nan, kept))
    before, sums = [values_of(g) for g in _groups(model)], model.read_sums("train")
    bad = model.step(slot, 0, 0.01)
    for group, expected in zip(_groups(model), before, strict=True):
        for name, array in values_of(group).items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name)
    assert model.read_sums("train") == sums
    bias.set_value(kept)
    after = model.step(slot, 0, 0.01)
    # Each is asked for later, when others have been started.
    assert [good(), bad(), after()] == [True, False, True]
    assert model.take_sums("train").images == 6


def test_functions_that_are_recorded_over_slots_compute_the_same() -> None:
    """As on a GPU, where nothing is passed to them; here a recording is just a call."""
    results = []
    for records in (False, True):
        model = build(records=records)
        slots = [slot_of(3, seed=1), slot_of(2, seed=2)]
        for step in range(4):
            slots[step % 2].labels[:] = (slots[step % 2].labels + 1) % CLASSES
            model.compute_gradients(slots[step % 2], epoch=step // 2)
            assert model.is_finite()
            model.update(0.01 / (step + 1))
            model.validate(slots[step % 2])
        sums = model.take_sums("train"), model.take_sums("validation")
        groups = model.weights, model.states["momentum"]
        results.append(([v.tobytes() for g in groups for v in values_of(g).values()], sums))
    assert results[0] == results[1]
    assert results[0][1][0].images == 10


# Fine-tuning


def filters_of(model: CompiledNetwork, kind: type) -> list[tuple[int, ...]]:
    """Shapes of the filters of every convolution, or gradient of one, of the gradients' graph."""
    place = {Conv2d: 1, Conv2dInputGrad: 1, Conv2dWeightGrad: 1}[kind]
    nodes = model.functions.compiled("gradients")[0].maker.fgraph.apply_nodes
    shapes = [node.inputs[place].type.shape for node in nodes if isinstance(node.op, kind)]
    return sorted(shapes)


def test_nothing_is_computed_for_what_is_frozen() -> None:
    whole = build()
    shapes = {
        name.partition(".")[0]: whole.weights[name].type.shape
        for name in whole.weights
        if name.startswith("conv") and name.endswith("weight")
    }
    assert filters_of(whole, Conv2dWeightGrad) == sorted(shapes.values())
    # None of the first either when all learn: pictures have no gradient.
    assert filters_of(whole, Conv2dInputGrad) == sorted([*shapes.values()][1:])

    frozen = ["conv1", "conv2", "conv4"]
    model = build(init_weights="w", freeze=frozen)
    learned = [shapes["conv3"], shapes["conv5"]]
    assert filters_of(model, Conv2d) == sorted(shapes.values())
    assert filters_of(model, Conv2dWeightGrad) == sorted(learned)
    # The gradient passes conv4, which is frozen, to conv3, the lowest that learns, and ends there.
    assert filters_of(model, Conv2dInputGrad) == sorted([shapes["conv4"], shapes["conv5"]])
    nodes = model.functions.compiled("gradients")[0].maker.fgraph.apply_nodes
    assert sum(isinstance(node.op, MaxPool2dGrad) for node in nodes) == 1


def test_where_only_the_last_layer_learns_no_convolution_has_a_gradient() -> None:
    layers = ["conv1", "conv2", "conv3", "conv4", "conv5", "fc6", "fc7"]
    model = build(init_weights="w", freeze=layers)
    assert list(model.gradients) == ["fc8.weight", "fc8.bias"]
    assert filters_of(model, Conv2dWeightGrad) == filters_of(model, Conv2dInputGrad) == []


def test_what_learns_beside_frozen_layers_steps_as_if_all_did() -> None:
    whole, part = build(), build(init_weights="w", freeze=["conv1", "fc6"])
    before = values_of(part.weights)
    for model in (whole, part):
        model.compute_gradients(slot_of(3), epoch=0)
        model.update(0.1)
    weights, states = part.state()
    momenta = states["momentum"]
    assert list(weights) == list(momenta) == list(whole.weights)
    for name, value in whole.weights.items():
        if name.startswith(("conv1", "fc6")):
            assert (weights[name] == before[name]).all()
            assert not momenta[name].any()
        else:
            np.testing.assert_allclose(weights[name], value.get_value(), rtol=1e-12)
            assert (weights[name] != before[name]).any()


def test_a_multiplied_rate_is_a_larger_rate() -> None:
    model, other = build(lr_multipliers={"fc8": 10}), build()
    for each, rate in ((model, 0.01), (other, 0.1)):
        each.compute_gradients(slot_of(3), epoch=0)
        each.update(rate)
    for name in ("fc8.weight", "fc8.bias"):
        ours, theirs = (m.weights[name].get_value() for m in (model, other))
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    ours, theirs = (m.weights["fc7.bias"].get_value() for m in (model, other))
    assert not np.allclose(ours, theirs, rtol=1e-6)


def test_a_momentum_of_what_is_frozen_now_is_left_behind() -> None:
    model = build(init_weights="w", freeze=["conv1"])
    weights = dict(model.state()[0])
    momenta = {name: np.ones_like(value) for name, value in weights.items()}
    model.load(weights, {"momentum": momenta})
    found = model.state()[1]["momentum"]
    assert {name for name, value in found.items() if value.any()} == set(model.states["momentum"])


@pytest.mark.parametrize("records", [False, True])
def test_gradients_are_told_of_while_earlier_layers_are_computed(records: bool) -> None:
    """Who is told may change them at once: what else the function computes stays as it was."""
    told: list[str] = []
    first_then: list[float] = []
    values: dict[str, np.ndarray] = {}

    def spoil(name: str) -> None:
        told.append(name)
        first_then.append(float(np.abs(model.gradients["conv1.weight"].get_value()).max()))
        values[name] = model.gradients[name].get_value()
        model.gradients[name].set_value(np.full_like(values[name], np.nan))

    model, quiet = build(records, spoil), build(records)
    slot = slot_of(BATCH)
    for one in (model, quiet):
        one.compute_gradients(slot, 0)
        assert one.is_finite()
    for name, value in values_of(quiet.gradients).items():
        np.testing.assert_array_equal(values[name], value)
    assert np.isnan(model.gradients["fc6.weight"].get_value()).all()
    layers = list(dict.fromkeys(name.partition(".")[0] for name in told))
    assert layers == ["fc8", "fc7", "fc6", "conv5", "conv4", "conv3", "conv2", "conv1"]
    assert len(told) == 16
    assert not any(first_then[:14])
