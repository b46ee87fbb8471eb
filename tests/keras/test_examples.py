"""Programs in the manner of Keras's examples and guides, run to their end by `distribute`.

They have the models, losses, callbacks and metrics of the originals, on small random data.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tandem.keras
from tests.support.keras_models import keras

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:__array__ implementation")]

Example = Callable[[Any, Path, Any], None]
EXAMPLES: dict[str, Example] = {}
RNG = np.random.default_rng(7)


def example(function: Example) -> Example:
    EXAMPLES[function.__name__] = function
    return function


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs_to_its_end(name: str, tmp_path: Path) -> None:
    def distribute(model: Any) -> None:
        tandem.keras.distribute(model, devices=["cpu", "cpu"], run=tmp_path / model.name)

    EXAMPLES[name](keras.layers, tmp_path, distribute)


@example
def mnist_convnet(layers: Any, folder: Path, distribute: Any) -> None:
    x = RNG.integers(0, 256, (80, 28, 28)).astype("float32") / 255
    x, y = np.expand_dims(x, -1), keras.utils.to_categorical(RNG.integers(0, 10, 80), 10)
    model = keras.Sequential(
        [
            keras.Input(shape=(28, 28, 1)),
            layers.Conv2D(8, kernel_size=(3, 3), activation="relu"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Conv2D(16, kernel_size=(3, 3), activation="relu"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
    distribute(model)
    model.fit(x, y, batch_size=32, epochs=2, validation_split=0.1)
    score = model.evaluate(x, y, verbose=0)
    assert len(score) == 2


@example
def functional_tickets(layers: Any, folder: Path, distribute: Any) -> None:
    """Three inputs of texts and tags, two outputs with weights, by name."""
    title, body = (keras.Input(shape=(6,), name=name) for name in ("title", "body"))
    tags = keras.Input(shape=(5,), name="tags")
    read = [layers.LSTM(8)(layers.Embedding(50, 8)(words)) for words in (title, body)]
    joined = layers.concatenate([*read, tags])
    priority = layers.Dense(1, name="priority")(joined)
    department = layers.Dense(4, name="department")(joined)
    model = keras.Model(
        inputs=[title, body, tags],
        outputs={"priority": priority, "department": department},
    )
    model.compile(
        optimizer=keras.optimizers.RMSprop(1e-3),
        loss={
            "priority": keras.losses.BinaryCrossentropy(from_logits=True),
            "department": keras.losses.CategoricalCrossentropy(from_logits=True),
        },
        loss_weights={"priority": 1.0, "department": 0.2},
    )
    distribute(model)
    history = model.fit(
        {
            "title": RNG.integers(0, 50, (60, 6)),
            "body": RNG.integers(0, 50, (60, 6)),
            "tags": RNG.integers(0, 2, (60, 5)).astype("float32"),
        },
        {"priority": RNG.random((60, 1)), "department": np.eye(4)[RNG.integers(0, 4, 60)]},
        epochs=1,
        batch_size=32,
    )
    assert {"priority_loss", "department_loss"} <= {*history.history}


@example
def timeseries_classification(layers: Any, folder: Path, distribute: Any) -> None:
    x, y = RNG.normal(size=(60, 40, 1)), RNG.integers(0, 2, 60)
    inputs = keras.layers.Input(x.shape[1:])
    y_hat = inputs
    for _ in range(2):
        y_hat = layers.Conv1D(filters=8, kernel_size=3, padding="same")(y_hat)
        y_hat = layers.BatchNormalization()(y_hat)
        y_hat = layers.ReLU()(y_hat)
    y_hat = layers.Dense(2, activation="softmax")(layers.GlobalAveragePooling1D()(y_hat))
    model = keras.models.Model(inputs=inputs, outputs=y_hat)
    best = folder / "best.keras"
    callbacks = [
        keras.callbacks.ModelCheckpoint(str(best), save_best_only=True, monitor="val_loss"),
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=20, min_lr=0.0001),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=50, verbose=1),
    ]
    model.compile(
        optimizer="adam",
        loss="sparse_categorical_crossentropy",
        metrics=["sparse_categorical_accuracy"],
    )
    distribute(model)
    history = model.fit(
        x, y, batch_size=32, epochs=2, callbacks=callbacks, validation_split=0.2, verbose=2
    )
    assert "val_sparse_categorical_accuracy" in history.history
    keras.models.load_model(best).evaluate(x, y)


@example
def timeseries_anomaly_detection(layers: Any, folder: Path, distribute: Any) -> None:
    x = RNG.normal(size=(60, 32, 1)).astype("float32")
    model = keras.Sequential(
        [
            layers.Input(shape=(32, 1)),
            layers.Conv1D(8, 7, padding="same", strides=2, activation="relu"),
            layers.Dropout(rate=0.2),
            layers.Conv1D(4, 7, padding="same", strides=2, activation="relu"),
            layers.Conv1DTranspose(4, 7, padding="same", strides=2, activation="relu"),
            layers.Conv1DTranspose(8, 7, padding="same", strides=2, activation="relu"),
            layers.Conv1DTranspose(1, 7, padding="same"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.001), loss="mse")
    distribute(model)
    stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=5, mode="min")
    history = model.fit(x, x, epochs=2, batch_size=32, validation_split=0.1, callbacks=[stop])
    assert history.history["val_loss"]
    assert np.abs(model.predict(x) - x).mean() < 2


@example
def autoencoder(layers: Any, folder: Path, distribute: Any) -> None:
    x = RNG.random((64, 28, 28, 1)).astype("float32")
    inputs = layers.Input(shape=(28, 28, 1))
    y = layers.Conv2D(8, (3, 3), activation="relu", padding="same")(inputs)
    y = layers.MaxPooling2D((2, 2), padding="same")(y)
    y = layers.Conv2DTranspose(8, (3, 3), strides=2, activation="relu", padding="same")(y)
    y = layers.Conv2D(1, (3, 3), activation="sigmoid", padding="same")(y)
    model = keras.Model(inputs, y)
    model.compile(optimizer="adam", loss="binary_crossentropy")
    distribute(model)
    model.fit(x=x, y=x, epochs=1, batch_size=32, shuffle=True, validation_data=(x, x))
    assert model.predict(x).shape == x.shape
    model.fit(x=x, y=x, epochs=1, batch_size=32)  # as the denoising part goes on


@example
def imbalanced_classification(layers: Any, folder: Path, distribute: Any) -> None:
    x, y = RNG.normal(size=(120, 6)), (RNG.random((120, 1)) < 0.1).astype("uint8")
    y[0] = 1
    model = keras.Sequential(
        [
            keras.Input(shape=x.shape[1:]),
            layers.Dense(16, activation="relu"),
            layers.Dropout(0.3),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    metrics = [
        keras.metrics.FalseNegatives(name="fn"),
        keras.metrics.TrueNegatives(name="tn"),
        keras.metrics.Precision(name="precision"),
        keras.metrics.Recall(name="recall"),
    ]
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2), loss="binary_crossentropy", metrics=metrics
    )
    callbacks = [keras.callbacks.ModelCheckpoint(str(folder / "at_{epoch}.keras"))]
    distribute(model)
    history = model.fit(
        x,
        y,
        batch_size=64,
        epochs=2,
        verbose=2,
        callbacks=callbacks,
        validation_data=(x, y),
        class_weight={0: 1.0 / 100, 1: 1.0 / 10},
    )
    assert len(history.history["val_recall"]) == 2
    assert (folder / "at_2.keras").exists()


@example
def addition_rnn(layers: Any, folder: Path, distribute: Any) -> None:
    x = np.eye(12)[RNG.integers(0, 12, (64, 7))].astype(bool)
    y = np.eye(12)[RNG.integers(0, 12, (64, 4))].astype(bool)
    model = keras.Sequential()
    model.add(layers.Input((7, 12)))
    model.add(layers.LSTM(16))
    model.add(layers.RepeatVector(4))
    model.add(layers.LSTM(16, return_sequences=True))
    model.add(layers.Dense(12, activation="softmax"))
    model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
    distribute(model)
    for _ in range(2):
        model.fit(x, y, batch_size=32, epochs=1, validation_data=(x[:9], y[:9]))
    assert np.argmax(model.predict(x[:1]), axis=-1).shape == (1, 4)


@example
def lstm_text_generation(layers: Any, folder: Path, distribute: Any) -> None:
    x = np.eye(9, dtype="bool")[RNG.integers(0, 9, (64, 10))]
    y = np.eye(9, dtype="bool")[RNG.integers(0, 9, 64)]
    model = keras.Sequential(
        [keras.Input(shape=(10, 9)), layers.LSTM(16), layers.Dense(9, activation="softmax")]
    )
    optimizer = keras.optimizers.RMSprop(learning_rate=0.01)
    model.compile(loss="categorical_crossentropy", optimizer=optimizer)
    distribute(model)
    model.fit(x, y, batch_size=32, epochs=1)
    assert model.predict(x[:1], verbose=0)[0].shape == (9,)


@example
def bidirectional_lstm_imdb(layers: Any, folder: Path, distribute: Any) -> None:
    inputs = keras.Input(shape=(None,), dtype="int32")
    y = layers.Embedding(100, 8)(inputs)
    y = layers.Bidirectional(layers.LSTM(8, return_sequences=True))(y)
    y = layers.Bidirectional(layers.LSTM(8))(y)
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(y))
    words = [RNG.integers(1, 100, RNG.integers(3, 12)).tolist() for _ in range(60)]
    x, y = keras.utils.pad_sequences(words, maxlen=10), RNG.integers(0, 2, 60)
    model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])
    distribute(model)
    model.fit(x, y, batch_size=32, epochs=1, validation_data=(x, y))


@example
def guide_to_functional_models(layers: Any, folder: Path, distribute: Any) -> None:
    """A residual network, then a model that shares an encoder."""
    inputs = keras.Input(shape=(16, 16, 3), name="img")
    y = layers.Conv2D(8, 3, activation="relu")(inputs)
    block = layers.MaxPooling2D(3)(y)
    y = layers.Conv2D(8, 3, activation="relu", padding="same")(block)
    y = layers.add([layers.Conv2D(8, 3, padding="same")(y), block])
    encoder = keras.Model(inputs, layers.GlobalAveragePooling2D()(y), name="encoder")
    one, other = keras.Input((16, 16, 3)), keras.Input((16, 16, 3))
    both = layers.concatenate([encoder(one), encoder(other)])
    model = keras.Model([one, other], layers.Dense(10)(layers.Dropout(0.5)(both)), name="pair")
    model.compile(
        optimizer=keras.optimizers.RMSprop(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["acc"],
    )
    distribute(model)
    x, y = RNG.random((60, 16, 16, 3)), RNG.integers(0, 10, 60)
    before = encoder.predict(x, verbose=0)
    history = model.fit([x, x], y, batch_size=32, epochs=1, validation_split=0.2)
    assert "val_acc" in history.history
    assert np.abs(encoder.predict(x, verbose=0) - before).max() > 0  # it has learnt with the model
    model.save(folder / "pair.keras")


@example
def guide_to_sequential_models(layers: Any, folder: Path, distribute: Any) -> None:
    """Built by its first fit; then its layers are frozen below a new head."""
    model = keras.Sequential(name="grown")
    model.add(layers.Dense(4, activation="relu", name="below"))
    model.add(layers.Dense(3))
    x, y = RNG.normal(size=(40, 5)), RNG.integers(0, 3, 40)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss)
    distribute(model)
    model.fit(x, y)
    kept = model.layers[0].get_weights()[0]
    for layer in model.layers[:-1]:
        layer.trainable = False
    head = keras.Sequential([*model.layers[:-1], layers.Dense(2, name="head")], name="head")
    head.compile("sgd", loss)
    distribute(head)
    head.fit(x, y % 2)
    np.testing.assert_array_equal(head.layers[0].get_weights()[0], kept)


@example
def guide_to_own_callbacks(layers: Any, folder: Path, distribute: Any) -> None:
    seen: list[str] = []

    class AtMinimum(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.best, self.best_weights = np.inf, None

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(f"batch {batch} {logs['loss']:.1f}")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if np.less(logs["loss"], self.best):
                self.best, self.best_weights = logs["loss"], self.model.get_weights()
            self.model.optimizer.learning_rate = 0.05
            if epoch == 1:
                self.model.stop_training = True

    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.RMSprop(0.1), loss="mean_squared_error")
    distribute(model)
    with pytest.warns(UserWarning, match="methods of batches"):
        history = model.fit(
            RNG.normal(size=(64, 4)),
            RNG.normal(size=64),
            batch_size=16,
            epochs=30,
            verbose=0,
            callbacks=[AtMinimum()],
        )
    assert history.epoch == [0, 1]
    assert len(seen) == 8
    assert float(model.optimizer.learning_rate) == pytest.approx(0.05)
