# A script as a user writes it, without a guard: two fits of a Keras model with a layer of its own.
# python keras_script.py RUN DEVICES EPOCHS
import sys
from pathlib import Path
from typing import Any

import numpy as np

import tandem.keras

# isort: split
import keras


@keras.saving.register_keras_serializable()
class Scaled(keras.layers.Layer):
    def build(self, shape: tuple[int, ...]) -> None:
        self.gain = self.add_weight(shape=(shape[-1],), initializer="ones", name="gain")

    def call(self, x: Any) -> Any:
        return x * self.gain


@tandem.keras.lowers(Scaled)
def scaled(layer: Any, x: Any) -> Any:
    return x * layer.parameter("gain", x.type.shape[1:])


run, devices, epochs = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3])
keras.utils.set_random_seed(1)
rng = np.random.default_rng(1)
x = rng.normal(size=(150, 8)).astype(np.float32)
y = (x[:, 0] > x[:, 1]).astype(int)
model = keras.Sequential(
    [
        keras.Input((8,)),
        Scaled(),
        keras.layers.Dense(6, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(2, activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
tandem.keras.distribute(
    model, devices=devices, run=run, norm_rows=8, precision="float64", threads=1
)
plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=9.0)
for _ in range(2):
    history = model.fit(
        x[:100], y[:100], 32, epochs, validation_data=(x[100:], y[100:]), callbacks=[plateau],
        resume=True,
    )  # fmt: skip
# In one piece: other ranks write to the same pipe.
total = float(sum(np.abs(array).sum() for array in model.get_weights()))
sys.stdout.write(f"last {history.epoch[-1]} {total!r}\n")
