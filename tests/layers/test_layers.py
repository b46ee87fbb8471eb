import math

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from tandem import layers
from tandem.errors import InputError
from tandem.layers import Parameter, Parameters, Training
from tandem.ops import Dropout, DropoutMask
from tests.support.op_checks import MODE, check_gradient, evaluate

BATCHES = [(1, 1), (1, 4), (5, 3), (4, 10)]


def logits_and_labels(batch, classes, dtype="float64"):
    rng = np.random.default_rng(batch * 100 + classes)
    return rng.normal(size=(batch, classes)).astype(dtype), rng.integers(0, classes, batch)


# Cost


@pytest.mark.parametrize(("batch", "classes"), BATCHES)
@pytest.mark.parametrize("left_out", [0, 1])
def test_gradient_of_the_cost_is_softmax_minus_one_hot(batch, classes, left_out):
    logits, labels = logits_and_labels(batch, classes)
    valid = batch - left_out

    def gradient(logits, labels, valid):
        losses = layers.negative_log_likelihood(logits, labels)
        return pytensor.grad(layers.mean_over_valid(losses, valid), logits)

    expected = np.zeros_like(logits)
    for n in range(valid):
        total = sum(math.exp(value) for value in logits[n])
        for j in range(classes):
            expected[n, j] = (math.exp(logits[n, j]) / total - (j == labels[n])) / valid
    found = evaluate(gradient, logits, labels, np.int64(valid))
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-14)


# Mean over valid rows


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("valid", [0, 1, 3, 5])
@pytest.mark.parametrize("stale", [1e30, np.inf, -np.inf, np.nan])
def test_only_valid_rows_count(valid, stale, dtype):
    values = np.array([1.0, 2.5, -4.0, 8.0, 0.5], dtype)
    expected = sum(values[:valid].tolist()) / valid if valid else 0.0
    values[valid:] = stale
    mean, gradient = evaluate(
        lambda values, valid: [
            mean := layers.mean_over_valid(values, valid),
            pytensor.grad(mean, values),
        ],
        *(values, np.int64(valid)),
    )
    assert mean.dtype == gradient.dtype == np.dtype(dtype)
    np.testing.assert_allclose(mean, expected, rtol=1e-6)
    share = 1 / max(valid, 1)
    np.testing.assert_allclose(gradient, [share] * valid + [0] * (5 - valid), rtol=1e-6)


def test_a_valid_row_that_is_nan_is_not_hidden():
    values = np.array([1.0, np.nan, 2.0])
    assert np.isnan(evaluate(layers.mean_over_valid, values, np.int64(2)))


def test_the_mean_of_integers_is_refused():
    with pytest.raises(TypeError, match=r"must be floating-point, got .*int64"):
        layers.mean_over_valid(pt.lvector(), pt.lscalar())


# Errors


def rank_by_loops(row, label):
    beaten_by = 0
    for j, value in enumerate(row):
        if not value <= row[label] or (value == row[label] and j < label):
            beaten_by += 1
    return beaten_by


@pytest.mark.parametrize(("batch", "classes"), BATCHES)
@pytest.mark.parametrize("ties", [False, True])
def test_ranks_are_what_loops_count(batch, classes, ties):
    logits, labels = logits_and_labels(batch, classes)
    logits = np.round(logits) if ties else logits
    ranks = evaluate(layers.label_rank, logits, labels)
    assert ranks.dtype == np.int64
    assert ranks.tolist() == [
        rank_by_loops(row, label) for row, label in zip(logits, labels, strict=True)
    ]


@pytest.mark.parametrize(
    ("logits", "label", "rank"),
    [
        *[([0.0] * 4, label, label) for label in range(4)],  # a tie: by the class index
        ([np.nan, np.nan, np.nan], 1, 3),
        ([0.0, np.nan, 1.0], 1, 3),
        ([0.0, np.nan, 1.0], 2, 1),
        ([np.inf, np.inf, 0.0], 1, 1),
        ([-np.inf, -np.inf, -np.inf], 0, 0),
    ],
)
def test_ranks_with_ties_and_nan(logits, label, rank):
    assert evaluate(layers.label_rank, np.array([logits]), np.array([label])).tolist() == [rank]


# Layers


def test_flatten_keeps_the_order_channel_row_column():
    x = np.arange(2 * 3 * 2 * 4, dtype="float32").reshape(2, 3, 2, 4)
    for static in (True, False):
        flat = evaluate(lambda x: layers.flatten(x, 24), x, static=static)
        np.testing.assert_array_equal(flat[1], [*range(24, 48)])
    assert layers.flatten(pt.tensor(dtype="float32", shape=(None, 3, 2, 4)), 24).type.shape[1] == 24


def test_fully_connected_is_what_loops_compute():
    rng = np.random.default_rng(0)
    x, weight, bias = rng.normal(size=(3, 4)), rng.normal(size=(4, 2)), rng.normal(size=2)
    expected = np.empty((3, 2))
    for n, o in np.ndindex(expected.shape):
        expected[n, o] = bias[o] + sum(x[n, i] * weight[i, o] for i in range(4))
    np.testing.assert_allclose(evaluate(layers.fully_connected, x, weight, bias), expected)
    check_gradient(layers.fully_connected, x, weight, bias)


def test_dropout_zeroes_in_training_and_scales_in_validation():
    x = np.random.default_rng(0).normal(size=(6, 50)).astype("float32")
    keys = (np.int64(5), np.int64(2), np.arange(10, 16))
    trained = evaluate(lambda x, *keys: layers.dropout(x, 0.25, 1, Training(*keys)), x, *keys)
    mask = evaluate(DropoutMask(0.25, 1, 50), *keys)
    np.testing.assert_array_equal(trained, x * mask)
    assert 0 < mask.mean() < 1
    validated = evaluate(lambda x: layers.dropout(x, 0.25, 1, None), x)
    np.testing.assert_array_equal(validated, x * np.float32(0.75))
    assert trained.dtype == validated.dtype == np.dtype("float32")


def test_gradient_of_dropout_is_the_mask():
    x = np.ones((4, 8))
    keys = (np.int64(5), np.int64(2), np.arange(4))
    gradient = evaluate(
        lambda x, *keys: pytensor.grad(layers.dropout(x, 0.5, 0, Training(*keys)).sum(), x),
        *(x, *keys),
    )
    np.testing.assert_array_equal(gradient, evaluate(DropoutMask(0.5, 0, 8), *keys))


def test_dropout_of_an_unknown_number_of_units_is_refused():
    keys = Training(pt.lscalar(), pt.lscalar(), pt.lvector())
    with pytest.raises(ValueError, match="number of units must be known, got"):
        layers.dropout(pt.fmatrix(), 0.5, 0, keys)


def test_response_norm_has_the_paper_s_constants():
    x = 50 * np.random.default_rng(0).normal(size=(1, 7, 1, 1))
    energy = [sum(x[0, max(0, c - 2) : c + 3, 0, 0] ** 2) for c in range(7)]
    expected = x[0, :, 0, 0] / (2 + 1e-4 * np.array(energy)) ** 0.75
    np.testing.assert_allclose(evaluate(layers.response_norm, x)[0, :, 0, 0], expected, rtol=1e-12)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, math.nan])
@pytest.mark.parametrize("training", [None, Training(pt.lscalar(), pt.lscalar(), pt.lvector())])
@pytest.mark.parametrize("inverted", [False, True])
def test_a_rate_of_dropout_that_is_no_fraction_is_refused(rate, training, inverted):
    x = pt.fmatrix() if training is None else pt.tensor(dtype="float32", shape=(None, 4))
    with pytest.raises(ValueError, match=r"rate must be in \[0, 1\), got"):
        layers.dropout(x, rate, 0, training, inverted=inverted)


@pytest.mark.parametrize("shape", [(3, 8), (3, 2, 4, 3)])
def test_inverted_dropout_keeps_the_mean_and_leaves_validation_alone(shape):
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    keys = (np.int64(5), np.int64(2), np.arange(3))

    def build(x, *keys):
        return layers.dropout(x, 0.25, 1, Training(*keys), inverted=True)

    trained = evaluate(build, x, *keys)
    expected = evaluate(Dropout(0.25, 1, 1 / 0.75), x, *keys)
    np.testing.assert_array_equal(trained, expected)
    assert 0 < (trained == 0).mean() < 1
    kept = trained != 0
    np.testing.assert_allclose(trained[kept], x[kept] / 0.75, rtol=1e-6)
    symbol = pt.tensor(dtype="float32", shape=shape)
    assert layers.dropout(symbol, 0.25, 1, None, inverted=True) is symbol


def test_images_are_dropped_by_one_op():
    keys = (pt.lscalar(), pt.lscalar(), pt.lvector())
    x = pt.tensor(dtype="float32", shape=(3, 2, 4, 3))
    function = pytensor.function([x, *keys], layers.dropout(x, 0.25, 1, Training(*keys)), mode=MODE)
    (node,) = function.maker.fgraph.apply_nodes
    assert node.op == Dropout(0.25, 1)


def test_response_norm_takes_other_constants():
    x = 5 * np.random.default_rng(0).normal(size=(1, 7, 1, 1))
    energy = [sum(x[0, max(0, c - 1) : c + 2, 0, 0] ** 2) for c in range(7)]
    expected = x[0, :, 0, 0] / (1 + 0.02 * np.array(energy)) ** 0.6
    found = evaluate(lambda x: layers.response_norm(x, 3, 0.02, 0.6, 1.0), x)
    np.testing.assert_allclose(found[0, :, 0, 0], expected, rtol=1e-12)


def test_global_average_pool_is_the_mean_over_pixels():
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 5))
    expected = np.empty((2, 3))
    for n, c in np.ndindex(2, 3):
        expected[n, c] = sum(x[n, c].ravel()) / 20
    np.testing.assert_allclose(evaluate(layers.global_average_pool, x), expected, rtol=1e-12)
    check_gradient(layers.global_average_pool, x)
    with pytest.raises(ValueError, match="rows and columns must be known, got"):
        layers.global_average_pool(pt.dtensor4())


def test_concatenate_puts_channels_behind_each_other():
    rng = np.random.default_rng(0)
    for image in ((), (2, 3)):
        parts = [rng.normal(size=(2, channels, *image)) for channels in (1, 3, 2)]
        found = evaluate(lambda *parts: layers.concatenate(parts), *parts)
        assert found.shape == (2, 6, *image)
        for first, part in zip((0, 1, 4), parts, strict=True):
            np.testing.assert_array_equal(found[:, first : first + part.shape[1]], part)
        check_gradient(lambda *parts: layers.concatenate(parts), *parts)


# Parameters

DECLARED = (
    layers.weight("a", (40, 50), std=0.01),
    layers.bias("a", 50, mean=0.1),
    Parameter("b.weight", (50, 40), "weight", 1.0, 2.0),
    layers.bias("b", 40),
)


def test_parameters_are_shared_zeros_of_static_shape_in_order():
    parameters = Parameters("float32", DECLARED)
    assert list(parameters) == list(parameters.declared) == [p.name for p in DECLARED]
    assert len(parameters) == 4
    assert [p.kind for p in parameters.declared.values()] == ["weight", "bias"] * 2
    for declared in DECLARED:
        variable = parameters[declared.name]
        assert (variable.name, variable.type.shape) == (declared.name, declared.shape)
        assert variable.type.dtype == "float32"
        assert not variable.get_value().any()
    assert parameters.of("b") == tuple(parameters[f"b.{kind}"] for kind in ("weight", "bias"))


def test_initial_values_have_the_declared_mean_and_deviation():
    for declared, (name, value) in zip(
        DECLARED, Parameters("float32", DECLARED).initial_values(3), strict=True
    ):
        assert name == declared.name
        assert value.shape == declared.shape
        if declared.std == 0:
            assert (value == np.float32(declared.mean)).all()
        else:
            error = declared.std / math.sqrt(value.size)
            assert abs(value.mean() - declared.mean) < 5 * error
            assert abs(value.std() - declared.std) < 5 * error


def test_initial_values_are_a_function_of_seed_and_position():
    first = dict(Parameters("float32", DECLARED).initial_values(3))
    again = dict(Parameters("float32", DECLARED[:3]).initial_values(3))
    other_seed = dict(Parameters("float32", DECLARED).initial_values(4))
    assert all((first[name] == value).all() for name, value in again.items())
    assert (first["a.weight"] != other_seed["a.weight"]).all()
    drawn = (first["a.weight"] / 0.01).ravel(), ((first["b.weight"] - 1) / 2).ravel()
    assert abs(np.corrcoef(*drawn)[0, 1]) < 5 / math.sqrt(drawn[0].size)


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1])
def test_both_precisions_start_from_the_same_numbers(seed):
    single, double = (
        dict(Parameters(t, DECLARED).initial_values(seed)) for t in ("float32", "float64")
    )
    for name, value in single.items():
        assert value.dtype == np.dtype("float32")
        assert double[name].dtype == np.dtype("float64")
        if name.endswith("weight"):
            np.testing.assert_array_equal(value, double[name])
        else:
            np.testing.assert_allclose(value, double[name], rtol=1e-7)


def test_initialize_sets_the_variables():
    parameters = Parameters("float64", DECLARED)
    parameters.initialize(9)
    for name, value in parameters.initial_values(9):
        np.testing.assert_array_equal(parameters[name].get_value(), value)


def test_a_mean_over_rows_leaves_no_shape_in_the_graph():
    values, valid = pt.tensor(dtype="float32", shape=(8,)), pt.lscalar()
    mean = pytensor.function([values, valid], layers.mean_over_valid(values, valid), mode=MODE)
    names = {type(node.op).__name__ for node in mean.maker.fgraph.apply_nodes}
    assert not names & {"Shape", "Shape_i", "Assert", "SpecifyShape", "ARange"}


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        # Before a slash would stand the name of an optimizer's state, in a checkpoint.
        (lambda: layers.weight("block/a", (2, 2), std=1.0), "block/a.weight: .* slash"),
        (lambda: Parameter("a.b", (2,), "average", keep=1.5), "a.b: keep is 1.5"),
        (lambda: Parameter("a.b", (2,), keep=0.5), "a.b: keep is 0.5, but only an average"),
        (lambda: Parameter("a.b", (2,), "gain"), "a.b: kind is gain; .* weight, .* or average"),
        (lambda: Parameter("a.b", (2,), distribution="cauchy"), "a.b: distribution is cauchy; it"),
        (lambda: Parameter("a.b", (2,), std=-1.0), "a.b: std is -1.0; it must not be neg"),
        (lambda: Parameter("a.b", (2,), std=float("nan")), "a.b: std is nan"),
    ],
)
def test_a_declaration_that_means_nothing_is_refused(declared, message):
    with pytest.raises(InputError, match=f"network: {message}"):
        declared()


def test_each_distribution_has_its_deviation_and_bounds():
    drawn = {
        distribution: Parameter("a.weight", (400, 500), "weight", 1.0, 0.5, distribution)
        .initial_value(3, 0, "float64")
        .ravel()
        for distribution in ("normal", "uniform", "truncated")
    }
    # Of a standard normal distribution within two deviations: the density is phi(x) / 0.9545.
    within = 0.9544997361036416
    truncated = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / within)
    bounds = {"normal": 9.0, "uniform": 0.5 * math.sqrt(3), "truncated": 1.0}
    for distribution, values in drawn.items():
        expected = 0.5 * (truncated if distribution == "truncated" else 1.0)
        assert abs(values.mean() - 1) < 5 * expected / math.sqrt(values.size)
        assert abs(values.std() - expected) < 5 * expected / math.sqrt(values.size)
        largest = np.abs(values - 1).max()
        assert 0.99 * min(bounds[distribution], 2.0) < largest <= bounds[distribution] + 1e-6


def test_batch_normalisation_declares_torchvisions_names():
    declared = layers.norm("layer1.0.bn1", 5, scale=0.0, keep=0.8)
    assert [(p.name.removeprefix("layer1.0.bn1."), p.kind, p.mean, p.keep) for p in declared] == [
        ("weight", "scale", 0, 0),
        ("bias", "shift", 0, 0),
        ("running_mean", "average", 0, 0.8),
        ("running_var", "average", 1, 0.8),
    ]
    assert [p.trainable for p in declared] == [True, True, False, False]


def test_a_second_parameter_of_a_name_is_refused():
    parameters = Parameters("float32", [layers.bias("a", 2)])
    with pytest.raises(InputError, match=r"network: a.bias is declared twice"):
        parameters.add(layers.bias("a", 2))
