"""A model before it is trained: its graph, weights and refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem import nn
from tandem.config.schema import Config
from tandem.errors import InputError
from tandem.nn.stored import remove_unbegun
from tandem.preprocessing.arrays import write_arrays, write_pictures
from tandem.processes.supervisor import Outcome
from tests.support.bars import bars, small_model


def test_add_makes_what_a_list_makes() -> None:
    one, other = small_model(), nn.Sequential()
    for layer in one.layers:
        other.add(layer)
    assert one.graph.to_json() == other.graph.to_json()


def test_a_model_without_input_takes_the_shape_of_its_arrays() -> None:
    model = nn.Sequential([nn.layers.Flatten(), nn.layers.Dense(3)])
    with pytest.raises(InputError, match=r"expected layers.Input\(shape\) at first"):
        model.summary()
    model.build((None, 4, 4, 1))
    assert model.count_params() == 16 * 3 + 3
    assert model.output_shape == (None, 3)


def test_a_model_that_is_called_shares_its_weights() -> None:
    inner = nn.Sequential([nn.layers.Input((4,)), nn.layers.Dense(4, name="both")])
    x = nn.Input((4,))
    twice = nn.Model(x, inner(inner(x)))
    assert [*twice.weights] == ["both.weight", "both.bias"]


def test_initial_weights_are_those_of_the_seed() -> None:
    assert np.array_equal(small_model().get_weights()[0], small_model().get_weights()[0])
    assert not np.array_equal(small_model(seed=2).get_weights()[0], small_model().get_weights()[0])


def one_number(targets: Any, predictions: Any) -> Any:
    """A function that is no loss: a number for all rows together."""
    return (targets - predictions).mean()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": one_number}, "test_model:one_number, expected a number for each row"),
        ({"loss": "mse", "metrics": [one_number]}, "metrics: found mean of tests.nn.test_model"),
        ({"loss": None}, "loss: found None, expected a loss"),
        ({"loss": "crossentropy"}, "did you mean"),
        ({"optimizer": "adm", "loss": "mse"}, 'optimizer: found "adm"'),
        ({"loss": "mse", "metrics": ["acuracy"]}, 'metrics: found "acuracy"'),
        (
            {"loss": "mse", "metrics": "mae"},
            'metrics: found "mae", expected a list, such as ["mae"]',
        ),
        ({"loss": "binary_crossentropy"}, "after a last activation softmax, expected sigmoid"),
        (
            {"loss": nn.losses.CategoricalCrossentropy(from_logits=True)},
            "after a last activation softmax, expected linear",
        ),
        (
            {"loss": lambda targets, predictions: predictions},
            "put it into a module",
        ),
        (
            {"optimizer": nn.optimizers.SGD(0.1, 0.9, weight_decay=0.1), "loss": "mse"},
            "SGD: found weight_decay 0.1 with momentum 0.9",
        ),
    ],
)
def test_compile_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        small_model().compile(**arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1, 0, "0.1", True, None])
@pytest.mark.parametrize("kind", ["SGD", "RMSprop", "Adam", "AdamW", "Nadam"])
def test_an_optimizer_refuses_a_rate_that_is_none(kind: str, rate: Any) -> None:
    with pytest.raises(InputError, match=rf"{kind}: learning_rate: found .*, expected a finite"):
        getattr(nn.optimizers, kind)(rate)


def test_what_a_script_defines_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def my_loss(targets: Any, predictions: Any) -> Any:
        return predictions

    monkeypatch.setattr(my_loss, "__module__", "__main__")
    monkeypatch.setattr(my_loss, "__qualname__", "my_loss")
    for arguments in ({"loss": my_loss}, {"loss": "mse", "metrics": [my_loss]}):
        with pytest.raises(InputError, match="put it into a module"):
            small_model().compile(**arguments)


X, Y = bars(64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": None}, "x: found None, expected an array, or the setting data_folder"),
        ({"x": None, "data_folder": "nowhere"}, "data_folder: found it with y, class_names"),
        ({"data_folder": "nowhere"}, "data_folder: found it beside x, expected one of them"),
        ({"x": [[1], [1, 2]]}, "expected rows of one shape"),
        ({"y": np.ma.masked_equal(Y, 1)}, "y: found a masked array with 30 of 64"),
        ({"y": None}, "y: found None, expected an array"),
        ({"x": X / 255, "rand_mirror": True}, "rand_mirror: found true with rows of numbers"),
        ({"verbose": "loud"}, 'verbose: found "loud", expected auto, 0, 1 or 2'),
        ({"y": Y[:3]}, "y: found shape (3,), expected 64 rows, as x has"),
        ({"x": X[:, :7]}, "x: found shape (64, 7, 8), expected (n, 8, 8, 1)"),
        ({"y": Y.astype(float)}, "y: found float64, expected whole numbers"),
        ({"x": np.full((64, 8, 8, 1), np.nan)}, "x: found nan in row 0"),
        ({"epochs": 0}, "epochs: found 0, expected a whole number from 1"),
        ({"batch_size": 2.5}, "batch_size: found 2.5, expected a whole number from 1"),
        ({"batch_size": 33}, "batch_size: found 33 for 2 trainers, expected a multiple"),
        ({"validation_data": X}, "validation_data: found ndarray, expected (x, y)"),
        ({"validation_split": 2.0}, "validation_split: found 2.0, expected a fraction"),
        ({"validation_split": "a"}, 'validation_split: found "a", expected a fraction'),
        ({"validation_data": (X, Y, Y)}, "validation_data: found 3 values, expected (x, y)"),
        ({"devices": 2}, "devices: found 2, expected auto, or a device for each trainer"),
        ({"run": ""}, 'run: found "", expected the path of a folder'),
        ({"run": "a\0b"}, 'run: found "a\\u0000b", expected the path of a folder'),
        ({"run": 5}, "run: found 5, expected the path of a folder"),
        ({"run": __file__}, f"run {__file__}: {__file__} is a file, not a folder"),
        ({"class_weight": {0: 2}}, "fit: found class_weight, expected no such argument"),
        ({"n_epochs": 3}, "fit: found the setting n_epochs, expected epochs instead"),
        ({"rand_miror": True}, "did you mean rand_mirror"),
        ({"resume": True, "run": None}, "resume: found True without run"),
        ({"class_names": ["a"]}, "class_names: found 1, expected 2"),
        ({"class_names": "ab"}, 'class_names: found "ab", expected a list of names'),
        ({"class_names": ["a", "a"]}, "class_names: found 'a', 'a', expected printable names"),
        ({"class_names": [0, 1]}, "class_names: found 0, 1, expected printable names"),
        ({"devices": ["gpu"]}, "did you mean cuda:0"),
    ],
)
def test_fit_refuses(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = small_model()
    model.compile("adam", "sparse_categorical_crossentropy")
    given = {"x": X, "y": Y, "run": tmp_path / "run", "devices": ["cpu", "cpu"], "verbose": 0}
    with pytest.raises(InputError) as caught:
        model.fit(**given | arguments)
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_last_activation_that_is_not_the_losses_is_refused() -> None:
    model = nn.Sequential([nn.Input((2,)), nn.layers.Dense(2, activation="relu")])
    with pytest.raises(InputError, match="other than softmax, expected softmax, such as Dense"):
        model.compile("adam", "categorical_crossentropy")


def test_what_keras_has_and_a_run_cannot_do_is_refused() -> None:
    with pytest.raises(InputError, match="Own: found the method call, expected a graph of layers"):
        type("Own", (nn.Model,), {"call": lambda self, x: x})
    model = small_model()
    assert model.trainable
    with pytest.raises(InputError, match="trainable: found False for a model"):
        model.trainable = False
    assert not nn.Sequential([nn.Input((2,)), nn.layers.Dense(1, trainable=False)]).trainable


def test_fit_without_compile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a call of compile first"):
        small_model().fit(X, Y, run=tmp_path)


@pytest.mark.parametrize("name", ["record.jsonl", "config.yaml", "epoch-0001.safetensors"])
def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    model = small_model()
    model.compile("adam", "sparse_categorical_crossentropy")
    with pytest.raises(InputError, match="continue it with resume=True, or choose another"):
        model.fit(X, Y, run=tmp_path)


def test_norm_rows_have_to_divide_a_trainers_part(tmp_path: Path) -> None:
    model = small_model(norm_rows=24)
    model.add(nn.layers.BatchNormalization())
    model.compile("adam", "mse")
    with pytest.raises(InputError, match="norm_rows: found 24"):
        model.fit(X, np.eye(2)[Y], batch_size=64, devices=["cpu", "cpu"], run=tmp_path / "run")


class Starts:
    """Stands for the start of a run: notes what it is given, and refuses it."""

    def __init__(self) -> None:
        self.configs: list[Config] = []
        self.files: list[set[str]] = []

    def __call__(self, config: Config, *_: Any) -> Outcome:
        self.configs.append(config)
        self.files.append({path.name for path in config.weights_path.iterdir()})
        raise InputError("refused")


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    found = Starts()
    monkeypatch.setattr("tandem.nn.fit.execute_training", found)
    return found


def fit(starts: Starts, folder: Path, x: Any = X, y: Any = Y, **options: Any) -> None:
    model = small_model()
    model.compile("adam", "sparse_categorical_crossentropy")
    with pytest.raises(InputError, match="refused"):
        model.fit(x, y, run=folder / "run", devices=["cpu"], **options)


def test_a_batch_of_more_rows_than_there_are_takes_all(starts: Starts, tmp_path: Path) -> None:
    fit(starts, tmp_path / "a", X[:5], Y[:5], batch_size=64)
    fit(starts, tmp_path / "b", batch_size=64)
    assert [config.batch_size for config in starts.configs] == [5, 64]


def test_a_run_that_failed_at_once_leaves_what_was_there(tmp_path: Path) -> None:
    for name in ("config.yaml", "record.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "data").mkdir()
    remove_unbegun(tmp_path, [tmp_path / "record.jsonl", tmp_path / "data", tmp_path / "none"])
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    (tmp_path / "epoch-0001.safetensors").touch()
    remove_unbegun(tmp_path, [tmp_path / "config.yaml"])
    assert (tmp_path / "config.yaml").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_refused_run_leaves_nothing_that_hinders_the_next(
    starts: Starts, tmp_path: Path, resume: bool
) -> None:
    fit(starts, tmp_path)
    assert "data" in starts.files[0]
    assert not (tmp_path / "run").exists()
    fit(starts, tmp_path, x=X[::-1], class_names=["a", "b"], resume=resume, epochs=np.int64(3))
    assert starts.configs[1].n_epochs == 3
    assert not (tmp_path / "run").exists()


def test_arrays_that_are_refused_give_a_model_no_input_shape(
    starts: Starts, tmp_path: Path
) -> None:
    model = nn.Sequential([nn.layers.Flatten(), nn.layers.Dense(2, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    options: dict[str, Any] = {"run": tmp_path / "run", "devices": ["cpu"]}
    with pytest.raises(InputError, match="expected 9 rows"):
        model.fit(np.ones((9, 7)), Y, **options)
    with pytest.raises(InputError, match="refused"):
        model.fit(X, Y, **options)
    assert model.input_shape == (None, 8, 8)


def test_arrays_that_cannot_be_written_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.preprocessing.arrays.free_bytes", lambda folder: 10)
    model = small_model()
    model.compile("adam", "sparse_categorical_crossentropy")
    with pytest.raises(InputError, match=r"free, expected .* for the arrays"):
        model.fit(X, Y, run=tmp_path / "runs" / "run", devices=["cpu"])
    assert not [*tmp_path.iterdir()]


def test_data_of_other_arrays_are_not_removed(starts: Starts, tmp_path: Path) -> None:
    write_pictures(tmp_path / "run" / "data", (X, Y), None, ["a", "b"])
    model = small_model()
    model.compile("adam", "sparse_categorical_crossentropy")
    with pytest.raises(InputError, match="found a data set of other arrays"):
        model.fit(X[::-1], Y, run=tmp_path / "run", devices=["cpu"])
    fit(starts, tmp_path)
    assert (tmp_path / "run" / "data" / "manifest.json").exists()


def test_initial_weights_are_those_of_the_model_whatever_seed_a_run_has(
    starts: Starts, tmp_path: Path
) -> None:
    fit(starts, tmp_path)
    assert starts.configs[0].init_weights is None  # drawn by the run, from the model's seed
    fit(starts, tmp_path, seed=5)
    assert starts.configs[1].init_weights == str(tmp_path / "run" / "initial.safetensors")
    assert "initial.safetensors" in starts.files[1]


def test_prepared_data_have_to_fit_the_model(starts: Starts, tmp_path: Path) -> None:
    write_pictures(tmp_path / "three", (X, Y), None, ["a", "b", "c"])
    write_arrays(tmp_path / "rows", (X / 255, Y), None, ["a", "b"])
    write_pictures(tmp_path / "two", (X, Y), None, ["a", "b"])
    messages = {
        "three": "found 3 classes or values of a target, expected 2, as the model has outputs",
        "rows": "found rows of shape (8, 8), expected (8, 8, 1), as the model's input",
        "two": "refused",
    }
    model = small_model()
    model.compile("adam", "sparse_categorical_crossentropy")
    for name, message in messages.items():
        with pytest.raises(InputError) as caught:
            model.fit(data_folder=tmp_path / name, run=tmp_path / "run", devices=["cpu"])
        assert message in str(caught.value)
        assert (tmp_path / name / "manifest.json").exists()
    assert starts.configs[0].data_folder == str(tmp_path / "two")


@pytest.mark.parametrize("batch_size", [0, None, 1.5, True])
def test_rows_at_a_time_are_a_whole_number(batch_size: Any) -> None:
    with pytest.raises(InputError, match="expected a whole number from 1"):
        small_model().predict(X, batch_size=batch_size)
