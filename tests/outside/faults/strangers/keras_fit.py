"""Keras programs as people post them with a question, trained by `fit`, and the mistake in each."""

from __future__ import annotations

from outside.faults.case import Pair

STUCK = ("loss_not_decreasing", "loss_at_chance")
WILD = ("nonfinite", "exploding_gradients", "loss_spike", "update_ratio", "dead_units")
_HEAD = """import os
os.environ.setdefault("KERAS_BACKEND", "torch")
import numpy as np
import keras
from keras import layers
from keras.models import Sequential
keras.utils.set_random_seed(7)
"""

THREE_CLASSES = (
    _HEAD
    + """from sklearn.datasets import load_iris
X, y = load_iris(return_X_y=True)
X = (X - X.mean(axis=0)) / X.std(axis=0)
model = Sequential()
model.add(keras.Input(shape=(4,)))
model.add(layers.Dense(16, activation='relu'))
model.add(layers.Dense(3, activation='softmax'))
model.compile(loss='sparse_categorical_crossentropy', optimizer='adam', metrics=['accuracy'])
model.fit(X, y, epochs=15, batch_size=8, verbose=0)
"""
)

PIXELS = (
    _HEAD
    + """from sklearn.datasets import load_digits
digits = load_digits()
x_train, y_train = digits.images[:1400, ..., None].astype('float32'), digits.target[:1400]
x_val, y_val = digits.images[1400:, ..., None].astype('float32'), digits.target[1400:]
x_train /= 16.
x_val /= 16.
model = keras.Sequential([
    keras.Input((8, 8, 1)),
    layers.Conv2D(16, 3, activation='relu'),
    layers.MaxPooling2D(),
    layers.Flatten(),
    layers.Dense(32, activation='relu'),
    layers.Dense(10, activation='softmax'),
])
model.compile('adam', 'sparse_categorical_crossentropy', metrics=['accuracy'])
model.fit(x_train, y_train, epochs=3, batch_size=32, validation_data=(x_val, y_val), verbose=0)
"""
)

GROUPED = (
    _HEAD
    + """from sklearn.datasets import load_digits
x, y = load_digits(return_X_y=True)
x = x / 16.0
# images were collected folder by folder
order = np.argsort(y, kind='stable')
x, y = x[order], y[order]
perm = np.random.permutation(len(x))
x, y = x[perm], y[perm]
model = keras.Sequential([keras.Input((64,)), layers.Dense(48, activation='relu'), layers.Dense(10, activation='softmax')])
model.compile(optimizer='adam', loss='sparse_categorical_crossentropy', metrics=['accuracy'])
history = model.fit(x, y, epochs=4, batch_size=32, validation_split=0.2, verbose=0)
print(history.history['val_accuracy'])
"""
)

UNSHUFFLED = (
    _HEAD
    + """from sklearn.datasets import load_digits
x, y = load_digits(return_X_y=True)
order = np.argsort(y, kind='stable')
x, y = x[order] / 16.0, keras.utils.to_categorical(y[order], 10)
model = Sequential([keras.Input((64,)), layers.Dense(48, activation='relu'), layers.Dense(10, activation='softmax')])
model.compile(optimizer='adam', loss='categorical_crossentropy')
model.fit(x, y, epochs=3, batch_size=32, shuffle=True, verbose=0)
"""
)

HEAD_TRAINED = (
    _HEAD
    + """from sklearn.datasets import load_digits
x, y = load_digits(return_X_y=True)
x = (x / 16).astype('float32')
base = keras.Sequential([keras.Input((64,)), layers.Dense(64, activation='relu', name='f1'), layers.Dense(32, activation='relu', name='f2')])
inputs = keras.Input((64,))
h = base(inputs)
h = layers.Dropout(0.2)(h)
outputs = layers.Dense(10, activation='softmax', name='predictions')(h)
model = keras.Model(inputs, outputs)
base.trainable = False
model.compile(optimizer=keras.optimizers.Adam(0.005), loss='sparse_categorical_crossentropy', metrics=['accuracy'])
model.fit(x, y, epochs=4, batch_size=64, verbose=0)
"""
)

PRICES = (
    _HEAD
    + """area = np.random.uniform(40, 250, 500)
rooms = np.random.randint(1, 7, 500)
price = 2500 * area + 15000 * rooms + np.random.normal(0, 10000, 500)
X = np.stack([(area - area.mean()) / area.std(), (rooms - rooms.mean()) / rooms.std()], axis=1)
price = (price - price.mean()) / price.std()
model = Sequential([keras.Input((2,)), layers.Dense(32, activation='relu'), layers.Dense(1)])
model.compile(loss='mse', optimizer=keras.optimizers.SGD(0.01))
model.fit(X, price, epochs=8, batch_size=16, verbose=0)
"""
)

REGULARISED = (
    _HEAD
    + """from keras import regularizers
from sklearn.datasets import load_breast_cancer
X, y = load_breast_cancer(return_X_y=True)
X = (X - X.mean(0)) / X.std(0)
model = Sequential()
model.add(keras.Input((30,)))
model.add(layers.Dense(32, activation='relu', kernel_regularizer=regularizers.l2(1e-4)))
model.add(layers.Dropout(0.1))
model.add(layers.Dense(16, activation='relu', kernel_regularizer=regularizers.l2(1e-4)))
model.add(layers.Dense(1, activation='sigmoid'))
model.compile(optimizer='adam', loss='binary_crossentropy', metrics=['accuracy'])
model.fit(X, y, epochs=8, batch_size=32, verbose=0)
"""
)

FORECAST = (
    _HEAD
    + """t = np.arange(800)
series = np.sin(t / 9) + 0.1 * np.random.normal(size=800)
window = 12
X = np.stack([series[i:i + window] for i in range(800 - window)])[..., None].astype('float32')
y = series[window:, None].astype('float32')
model = Sequential([
    keras.Input((window, 1)),
    layers.GRU(16, return_sequences=False),
    layers.Dense(1),
])
model.compile(loss='mean_squared_error', optimizer=keras.optimizers.Adam(0.01))
model.fit(X, y, epochs=3, batch_size=64, verbose=0)
"""
)

RARE = (
    _HEAD
    + """X = np.random.normal(size=(3000, 8)).astype('float32')
y = (X[:, 0] > 0).astype('float32')
model = Sequential([keras.Input((8,)), layers.Dense(16, activation='relu'), layers.Dense(1, activation='sigmoid')])
model.compile('adam', 'binary_crossentropy', metrics=['accuracy'])
model.fit(X, y, epochs=3, batch_size=64, verbose=0)
"""
)

GENERATOR = (
    _HEAD
    + """from sklearn.datasets import load_digits


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y, size, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y, self.size = x, y, size

    def __len__(self):
        return len(self.x) // self.size

    def __getitem__(self, idx):
        x = self.x[idx * self.size:(idx + 1) * self.size] / 16.
        y = self.y[idx * self.size:(idx + 1) * self.size]
        return x, y


d = load_digits()
train = Batches(d.data.astype('float32'), d.target, 32)
model = Sequential([keras.Input((64,)), layers.Dense(64, activation='relu'), layers.Dense(10, activation='softmax')])
model.compile(keras.optimizers.Adam(1e-3), 'sparse_categorical_crossentropy', metrics=['accuracy'])
model.fit(train, epochs=3, verbose=0)
"""
)

SCHEDULE = (
    _HEAD
    + """X = np.random.uniform(-1, 1, (1000, 5)).astype('float32')
y = np.sin(3 * X[:, :1]) * X[:, 1:2]
epochs, batch = 10, 50
schedule = keras.optimizers.schedules.ExponentialDecay(0.01, decay_steps=1000 // batch, decay_rate=0.8)
model = Sequential([keras.Input((5,)), layers.Dense(64, activation='relu'), layers.Dense(64, activation='relu'), layers.Dense(1)])
model.compile(loss='mse', optimizer=keras.optimizers.Adam(schedule))
model.fit(X, y, epochs=epochs, batch_size=batch, verbose=0)
"""
)

COMPILED = (
    _HEAD
    + """from sklearn.datasets import load_wine
X, y = load_wine(return_X_y=True)
X = (X - X.mean(0)) / X.std(0)
y = keras.utils.to_categorical(y)
model = Sequential([keras.Input((13,)), layers.Dense(20, activation='relu'), layers.Dense(3, activation='softmax')])
model.compile(loss='categorical_crossentropy', optimizer='adam')
for epoch in range(12):
    h = model.fit(X, y, epochs=1, batch_size=16, verbose=0)
    print(epoch, h.history['loss'][-1])
"""
)

PAIRED = (
    _HEAD
    + """from sklearn.datasets import load_digits
x, y = load_digits(return_X_y=True)
x = x / 16.0
idx = np.random.permutation(len(x))
x, y = x[idx], y[idx]
model = Sequential([keras.Input((64,)), layers.Dense(32, activation='relu'), layers.Dense(10, activation='softmax')])
model.compile(optimizer='adam', loss='sparse_categorical_crossentropy', metrics=['accuracy'])
model.fit(x, y, epochs=4, batch_size=32, verbose=0)
"""
)

TABLE = (
    _HEAD
    + """data = np.random.normal(size=(600, 7)).astype('float32')
label = (data[:, 1] - data[:, 2] > 0).astype('int32')
missing = np.random.rand(600) < 0.02
data[missing, 4] = np.nan  # as the csv had it
data = np.nan_to_num(data)
model = Sequential([keras.Input((7,)), layers.Dense(12, activation='relu'), layers.Dense(8, activation='relu'), layers.Dense(1)])
model.compile(loss='mse', optimizer='adam')
model.fit(data, label.astype('float32'), epochs=5, batch_size=10, verbose=0)
"""
)

DEEP = (
    _HEAD
    + """from sklearn.datasets import load_digits
x, y = load_digits(return_X_y=True)
x = x / 16.0
model = Sequential()
model.add(keras.Input((64,)))
for _ in range(7):
    model.add(layers.Dense(40, activation='relu'))
model.add(layers.Dense(10, activation='softmax'))
model.compile(optimizer=keras.optimizers.SGD(0.05), loss='sparse_categorical_crossentropy', metrics=['accuracy'])
model.fit(x, y, epochs=4, batch_size=32, verbose=0)
"""
)

TAGS = (
    _HEAD
    + """lengths = np.random.randint(3, 8, 600)
tokens = np.zeros((600, 20), 'int32')
for row, n in zip(tokens, lengths):
    row[:n] = np.random.randint(1, 40, n)
tags = np.where(tokens > 0, tokens % 4 + 1, 0)
model = Sequential([
    keras.Input((20,), dtype='int32'),
    layers.Embedding(40, 16, mask_zero=True),
    layers.LSTM(16, return_sequences=True),
    layers.Dense(5, activation='softmax'),
])
model.compile(optimizer=keras.optimizers.Adam(0.01), loss='sparse_categorical_crossentropy')
model.fit(tokens, tags, epochs=2, batch_size=50, verbose=0)
"""
)

OVERLAP = (
    _HEAD
    + """from keras import ops
yy, xx = np.mgrid[:12, :12]
cx, cy, r = np.random.randint(3, 9, 300), np.random.randint(3, 9, 300), np.random.randint(2, 5, 300)
masks = ((xx - cx[:, None, None]) ** 2 + (yy - cy[:, None, None]) ** 2 < r[:, None, None] ** 2).astype('float32')[..., None]
images = masks + 0.3 * np.random.normal(size=masks.shape).astype('float32')


def dice_coef(y_true, y_pred, smooth=1.0):
    overlap = ops.sum(y_true * y_pred)
    return (2.0 * overlap + smooth) / (ops.sum(y_true) + ops.sum(y_pred) + smooth)


def dice_loss(y_true, y_pred):
    return 1.0 - dice_coef(y_true, y_pred)


inputs = keras.Input((12, 12, 1))
h = layers.Conv2D(8, 3, padding='same', activation='relu')(inputs)
h = layers.Conv2D(8, 3, padding='same', activation='relu')(h)
outputs = layers.Conv2D(1, 1, activation='sigmoid')(h)
model = keras.Model(inputs, outputs)
model.compile(keras.optimizers.Adam(0.01), loss=dice_loss, metrics=[dice_coef])
model.fit(images, masks, epochs=4, batch_size=20, verbose=0)
"""
)

PAIRS = [
    Pair("keras question: squared error for three classes", "StackOverflow", "loss", THREE_CLASSES,
         (("loss='sparse_categorical_crossentropy'", "loss='mse'"),
          ("X = (X - X", "y = keras.utils.to_categorical(y)\nX = (X - X")), "loss_unsuitable", "model.compile(", STUCK,
         ("dense_1",)),
    Pair("keras question: validation images not rescaled", "StackOverflow", "data", PIXELS,
         (("x_val /= 16.\n", ""),), "evaluation_inputs_differ", "model.fit(", (), (":input",)),
    Pair("keras question: images not rescaled", "SO 48594888", "data", PIXELS,
         (("x_train /= 16.\n", "x_train *= 16.\n"), ("x_val /= 16.\n", "x_val *= 16.\n")), "inputs_not_normalised",
         "model.fit(", (*WILD, *STUCK), (":input", "conv2d")),
    Pair("keras question: the last fifth is of other classes", "StackOverflow", "data", GROUPED,
         (("x, y = x[perm], y[perm]\n", ""),), "validation_classes_unseen", "model.fit(", ()),
    Pair("keras question: sorted and not shuffled", "StackOverflow", "data", UNSHUFFLED,
         (("shuffle=True", "shuffle=False"),), "labels_sorted", "shuffle=False", ("loss_spike", *STUCK)),
    Pair("keras question: the wrong end is frozen", "StackOverflow", "parameters not trained", HEAD_TRAINED,
         (("base.trainable = False\n", "for layer in model.layers[-1:]:\n    layer.trainable = False\n"),),
         "frozen", "layer.trainable = False", ("unchanged", *STUCK), ("predictions",)),
    Pair("keras question: prices as they are", "SO 37232782", "data", PRICES,
         (("price = (price - price.mean()) / price.std()\n", ""),), "targets_not_normalised", "model.fit(",
         (*WILD, *STUCK, "learning_rate_high")),
    Pair("keras question: a rate of 1 for a regression", "SO 37232782", "learning rate and optimizer", PRICES,
         (("SGD(0.01)", "SGD(1.0)"),), "learning_rate_high", "SGD(1.0)", (*WILD, *STUCK)),
    Pair("keras question: regulariser of 1", "StackOverflow", "learning rate and optimizer", REGULARISED,
         (("l2(1e-4)", "l2(1.0)"),), "weight_decay_high", "l2(1.0)", STUCK, ("dense", "dense_1")),
    Pair("keras question: keep probability for rate", "StackOverflow", "mode, dropout, batch norm", REGULARISED,
         (("layers.Dropout(0.1)", "layers.Dropout(0.9)"),), "dropout_high", "Dropout(0.9)", STUCK, ("dropout",)),
    Pair("keras question: sequences for one target", "StackOverflow", "loss", FORECAST,
         (("return_sequences=False", "return_sequences=True"),), "loss_broadcast", "model.compile(", STUCK,
         ("gru", "dense")),
    Pair("keras question: one positive in a hundred", "StackOverflow", "data", RARE,
         (("(X[:, 0] > 0)", "(X[:, 0] > 2.4)"),), "labels_imbalanced", "model.fit(", (), ()),
    Pair("keras question: the generator forgets its index", "StackOverflow", "data", GENERATOR,
         (("self.x[idx * self.size:(idx + 1) * self.size] / 16.", "self.x[:self.size] / 16."),
          ("self.y[idx * self.size:(idx + 1) * self.size]", "self.y[:self.size]")), "batches_repeated", "model.fit(", ()),
    Pair("keras question: the generator changes its data", "DeepCrime", "data", GENERATOR,
         (("        x = self.x[idx * self.size:(idx + 1) * self.size] / 16.\n",
           "        x = self.x[idx * self.size:(idx + 1) * self.size]\n        x *= 4.\n"),), "data_changed",
         "model.fit(", ("inputs_not_normalised", *WILD)),
    Pair("keras question: decay at each batch", "StackOverflow", "learning rate and optimizer", SCHEDULE,
         (("decay_steps=1000 // batch", "decay_steps=1"),), "scheduler_per_batch", "decay_steps=1",
         ("learning_rate_zero", "learning_rate_low", *STUCK)),
    Pair("keras question: compiled in each epoch", "StackOverflow", "learning rate and optimizer", COMPILED,
         (("for epoch in range(12):\n", "for epoch in range(12):\n    model.compile(loss='categorical_crossentropy', optimizer='adam')\n"),),
         "optimizer_recreated", "model.compile(", ()),
    Pair("keras question: images shuffled alone", "StackOverflow", "data", PAIRED,
         (("x, y = x[idx], y[idx]\n", "np.random.shuffle(x)\n"),), "loss_at_chance", "model.fit(", STUCK),
    Pair("keras question: missing values of a table", "SO 37232782", "data", TABLE,
         (("data = np.nan_to_num(data)\n", ""),), "nonfinite", "model.fit(", (), (":input",)),
    Pair("keras question: seven sigmoid layers", "SO 39217567; AUTOTRAINER", "initialisation and structure", DEEP,
         (("activation='relu'", "activation='sigmoid'"),), "vanishing_gradients", "activation='sigmoid'",
         (*STUCK, "learning_rate_low", "update_ratio", "saturated"), ("dense", "dense_1", "dense_2")),
    Pair("keras question: no activations at all", "StackOverflow", "initialisation and structure", DEEP,
         (("layers.Dense(40, activation='relu')", "layers.Dense(40)"),), "linear_stack", "layers.Dense(40)", (),
         ("dense", "dense_1", "dense_2", "dense_3", "dense_4", "dense_5", "dense_6")),
    Pair("keras question: kernels of std 1", "SO 48385830", "initialisation and structure", DEEP,
         (("activation='relu')", "activation='relu', kernel_initializer=keras.initializers.RandomNormal(stddev=1.0))"),),
         "poor_initialisation", "stddev=1.0", (*WILD, *STUCK, "learning_rate_high"),
         ("dense", "dense_1", "dense_2", "dense_3", "dense_4", "dense_5", "dense_6")),
    Pair("keras question: padding is not masked", "StackOverflow", "attention and sequences", TAGS,
         (("mask_zero=True", "mask_zero=False"),), "padding_in_loss", "model.fit(", (), ("embedding",)),
    Pair("keras question: overlap for a loss", "StackOverflow", "loss", OVERLAP,
         (("return 1.0 - dice_coef", "return dice_coef"),), "loss_negated", "model.compile(", STUCK),
]  # fmt: skip
