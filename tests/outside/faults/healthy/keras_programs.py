"""Keras programs without a fault."""

from __future__ import annotations

from outside.faults.case import Healthy
from outside.faults.published_bases import KERAS_CLASSES, KERAS_HEAD

TRAININGS = [
    Healthy("Keras: classes", KERAS_CLASSES),
    Healthy("Keras: convolutions, dropout and a schedule", KERAS_HEAD + """
from sklearn.datasets import load_digits
digits = load_digits()
x, y = (digits.images[..., None] / 16).astype("float32"), digits.target
model = keras.Sequential([
    keras.Input((8, 8, 1)), layers.Conv2D(8, 3, activation="relu"), layers.BatchNormalization(), layers.Flatten(),
    layers.Dropout(0.3), layers.Dense(10),
])
rate = keras.optimizers.schedules.CosineDecay(0.01, 60)
model.compile(keras.optimizers.AdamW(rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(x[:1000], y[:1000], batch_size=50, epochs=3, validation_data=(x[1000:1200], y[1000:1200]), verbose=0)
"""),
]  # fmt: skip
