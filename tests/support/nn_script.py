# A script as a user writes it, without a guard: it trains on bars and saves what it has learnt.
# python nn_script.py RUN DEVICES EPOCHS
import sys
from pathlib import Path

import numpy as np

from tests.support.bars import bars, small_model

run, devices, epochs = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3])
x, y = bars(200)
model = small_model(norm=True, norm_rows=8)
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(
    x[:150], y[:150], batch_size=32, epochs=epochs, validation_data=(x[150:], y[150:]),
    devices=devices, run=run, resume=True, precision="float64", threads=1,
)  # fmt: skip
# In one piece: other ranks write to the same pipe.
sys.stdout.write(f"last {history.epoch[-1]} {history.history['val_accuracy'][-1]}\n")
assert np.array_equal(model.predict(x), model.predict(x))
