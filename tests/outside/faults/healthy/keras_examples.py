"""Keras programs without a fault, in the style of Keras's own examples."""

from __future__ import annotations

from outside.faults.case import Healthy
from outside.faults.published_bases import KERAS_HEAD

TRAININGS = [
    Healthy("Keras example: U-Net by the functional interface", KERAS_HEAD + """
yy, xx = np.mgrid[:16, :16]
cx, cy = np.random.uniform(4, 12, (2, 160))
masks = ((xx - cx[:, None, None]) ** 2 + (yy - cy[:, None, None]) ** 2 < 12).astype("float32")[..., None]
images = masks + np.random.normal(0, 0.4, masks.shape).astype("float32")
inputs = keras.Input((16, 16, 1))
a = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
b = layers.MaxPooling2D()(a)
b = layers.Conv2D(16, 3, padding="same", activation="relu")(b)
c = layers.UpSampling2D()(b)
c = layers.Concatenate()([c, a])
c = layers.Conv2D(8, 3, padding="same", activation="relu")(c)
outputs = layers.Conv2D(1, 1, activation="sigmoid")(c)
model = keras.Model(inputs, outputs)
model.compile(keras.optimizers.Adam(5e-3), "binary_crossentropy", metrics=["accuracy"])
model.fit(images, masks, batch_size=16, epochs=3, validation_split=0.1, verbose=0)
"""),
    Healthy("Keras example: variational autoencoder with its own train step", KERAS_HEAD + """
import torch
from keras import ops
from sklearn.datasets import load_digits
x = (load_digits().data / 16).astype("float32")


class VAE(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(32, activation="relu")
        self.mean, self.log_var = layers.Dense(4), layers.Dense(4)
        self.decoder = keras.Sequential([layers.Dense(32, activation="relu"), layers.Dense(64, activation="sigmoid")])
        self.seed = keras.random.SeedGenerator(1)
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x):
        h = self.hidden(x)
        mean, log_var = self.mean(h), self.log_var(h)
        z = mean + ops.exp(0.5 * log_var) * keras.random.normal(ops.shape(mean), seed=self.seed)
        return self.decoder(z), mean, log_var

    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        self.zero_grad()
        out, mean, log_var = self(x, training=True)
        error = ops.mean(ops.sum(keras.losses.binary_crossentropy(x[..., None], out[..., None]), axis=1))
        divergence = ops.mean(ops.sum(-0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var)), axis=1))
        loss = error + divergence
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


vae = VAE()
vae.compile(optimizer=keras.optimizers.Adam(3e-3))
vae.fit(x, epochs=3, batch_size=64, verbose=0)
"""),
    Healthy("Keras example: LSTM with masking and an embedding", KERAS_HEAD + """
tokens = np.zeros((500, 15), "int32")
for row in tokens:
    n = np.random.randint(4, 15)
    row[:n] = np.random.randint(1, 30, n)
label = (tokens == 7).any(1).astype("float32")
model = keras.Sequential([
    keras.Input((15,), dtype="int32"), layers.Embedding(30, 16, mask_zero=True), layers.LSTM(16),
    layers.Dropout(0.2), layers.Dense(1, activation="sigmoid"),
])
model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
model.fit(tokens, label, epochs=3, batch_size=25, validation_split=0.2, verbose=0)
"""),
    Healthy("Keras example: frozen base, then fine-tuned at a low rate", KERAS_HEAD + """
from sklearn.datasets import load_digits
d = load_digits()
x, y = (d.images[..., None] / 16).astype("float32"), d.target
base = keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(8, 3, activation="relu"), layers.BatchNormalization(),
                         layers.Conv2D(16, 3, activation="relu"), layers.GlobalAveragePooling2D()], name="base")
base.trainable = False
inputs = keras.Input((8, 8, 1))
h = base(inputs, training=False)
outputs = layers.Dense(10)(layers.Dropout(0.2)(h))
model = keras.Model(inputs, outputs)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.01), loss, metrics=[keras.metrics.SparseCategoricalAccuracy()])
model.fit(x, y, epochs=3, batch_size=50, verbose=0)
base.trainable = True
model.compile(keras.optimizers.Adam(1e-4), loss, metrics=[keras.metrics.SparseCategoricalAccuracy()])
model.fit(x, y, epochs=2, batch_size=50, verbose=0)
"""),
    Healthy("Keras example: features of a table with a normalisation layer", KERAS_HEAD + """
age, income = np.random.uniform(18, 90, 800), np.random.lognormal(10, 0.5, 800)
x = np.stack([age, income], 1).astype("float32")
y = ((age > 50) ^ (income > 25000)).astype("float32")
norm = layers.Normalization()
norm.adapt(x)
model = keras.Sequential([keras.Input((2,)), norm, layers.Dense(32, activation="relu"), layers.Dense(32, activation="relu"),
                          layers.Dense(1, activation="sigmoid")])
model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["AUC"])
model.fit(x, y, epochs=5, batch_size=40, verbose=0)
"""),
    Healthy("Keras example: two inputs and two outputs", KERAS_HEAD + """
title, body = np.random.normal(size=(600, 8)).astype("float32"), np.random.normal(size=(600, 12)).astype("float32")
priority = (title[:, :1] + body[:, :1]).astype("float32")
department = np.argmax(body[:, :4], 1)
a, b = keras.Input((8,), name="title"), keras.Input((12,), name="body")
h = layers.Dense(32, activation="relu")(layers.concatenate([a, b]))
model = keras.Model([a, b], {"priority": layers.Dense(1, name="priority")(h), "department": layers.Dense(4, name="department")(h)})
model.compile(keras.optimizers.RMSprop(3e-3), loss={"priority": "mse", "department": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
              loss_weights={"priority": 1.0, "department": 0.5})
model.fit({"title": title, "body": body}, {"priority": priority, "department": department}, epochs=4, batch_size=32, verbose=0)
"""),
    Healthy("Keras example: rare events with class weights", KERAS_HEAD + """
x = np.random.normal(size=(4000, 6)).astype("float32")
y = (x[:, 0] + x[:, 1] > 3.3).astype("int32")
weight = {0: 1.0, 1: float(len(y) / max(1, y.sum()) / 2)}
model = keras.Sequential([keras.Input((6,)), layers.Dense(32, activation="relu"), layers.Dropout(0.3), layers.Dense(1, activation="sigmoid")])
model.compile(keras.optimizers.Adam(1e-3), "binary_crossentropy", metrics=[keras.metrics.Recall()])
model.fit(x, y, epochs=2, batch_size=128, class_weight=weight, verbose=0)
"""),
    Healthy("Keras example: autoencoder with callbacks", KERAS_HEAD + """
t = np.linspace(0, 20, 64)
x = np.stack([np.sin(t * np.random.uniform(0.5, 1.5) + np.random.uniform(0, 6)) for _ in range(400)])[..., None].astype("float32")
model = keras.Sequential([
    keras.Input((64, 1)), layers.Conv1D(16, 7, strides=2, padding="same", activation="relu"), layers.Dropout(0.1),
    layers.Conv1D(8, 7, strides=2, padding="same", activation="relu"), layers.Conv1DTranspose(8, 7, strides=2, padding="same", activation="relu"),
    layers.Conv1DTranspose(16, 7, strides=2, padding="same", activation="relu"), layers.Conv1DTranspose(1, 7, padding="same"),
])
model.compile(keras.optimizers.Adam(2e-3), "mse")
model.fit(x, x, epochs=4, batch_size=32, validation_split=0.1, verbose=0, callbacks=[
    keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True), keras.callbacks.ReduceLROnPlateau(patience=1)])
"""),
    Healthy("Keras example: batches from a generator with augmentation", KERAS_HEAD + """
from sklearn.datasets import load_digits
d = load_digits()


class Images(keras.utils.PyDataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        pick = np.random.randint(0, 1700, 32)
        x = d.images[pick, ..., None] / 16 + np.random.normal(0, 0.05, (32, 8, 8, 1))
        return x.astype("float32"), keras.utils.to_categorical(d.target[pick], 10)


model = keras.Sequential([keras.Input((8, 8, 1)), layers.RandomTranslation(0.1, 0.1), layers.Conv2D(16, 3, activation="relu"),
                          layers.Flatten(), layers.Dense(10, activation="softmax")])
model.compile("adam", keras.losses.CategoricalCrossentropy(label_smoothing=0.1), metrics=["accuracy"])
model.fit(Images(), epochs=2, verbose=0)
"""),
    Healthy("Keras example: quantile loss and an exponential decay", KERAS_HEAD + """
from keras import ops
x = np.random.uniform(-2, 2, (800, 1)).astype("float32")
y = (np.sin(2 * x) + np.random.normal(0, 0.3, x.shape)).astype("float32")


def pinball(y_true, y_pred):
    error = y_true - y_pred
    return ops.mean(ops.maximum(0.9 * error, -0.1 * error), axis=-1)


rate = keras.optimizers.schedules.ExponentialDecay(0.01, decay_steps=50, decay_rate=0.9)
model = keras.Sequential([keras.Input((1,)), layers.Dense(32, activation="tanh"), layers.Dense(32, activation="tanh"), layers.Dense(1)])
model.compile(keras.optimizers.Adam(rate), pinball)
model.fit(x, y, epochs=6, batch_size=40, verbose=0)
"""),
    Healthy("Keras example: siamese distances", KERAS_HEAD + """
from keras import ops
points = np.random.normal(size=(300, 10)).astype("float32")
kind = (points[:, 0] > 0).astype(int)
i, j = np.random.randint(0, 300, (2, 1200))
same = (kind[i] == kind[j]).astype("float32")
encoder = keras.Sequential([keras.Input((10,)), layers.Dense(32, activation="relu"), layers.Dense(4)])
a, b = keras.Input((10,)), keras.Input((10,))
distance = layers.Lambda(lambda t: ops.sqrt(ops.sum(ops.square(t[0] - t[1]), axis=1, keepdims=True) + 1e-6))([encoder(a), encoder(b)])
model = keras.Model([a, b], distance)


def contrastive(y_true, y_pred):
    return ops.mean(y_true * ops.square(y_pred) + (1 - y_true) * ops.square(ops.maximum(1.0 - y_pred, 0.0)))


model.compile(keras.optimizers.Adam(3e-3), contrastive)
model.fit([points[i], points[j]], same, epochs=4, batch_size=40, verbose=0)
"""),
    Healthy("Keras example: transformer for sequences", KERAS_HEAD + """
tokens = np.random.randint(0, 12, (500, 10))
label = (tokens[:, 0] == tokens[:, 5]).astype("int32") | (tokens[:, 2] > 8)


class Tokens(layers.Layer):
    def __init__(self):
        super().__init__()
        self.token, self.position = layers.Embedding(12, 16), layers.Embedding(10, 16)

    def call(self, tokens):
        return self.token(tokens) + self.position(keras.ops.arange(10))


inputs = keras.Input((10,), dtype="int32")
h = Tokens()(inputs)
attended = layers.MultiHeadAttention(2, 8, dropout=0.1)(h, h)
h = layers.LayerNormalization()(h + attended)
h = layers.LayerNormalization()(h + layers.Dense(16)(layers.Dense(32, activation="relu")(h)))
h = layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(h))
model = keras.Model(inputs, layers.Dense(2, activation="softmax")(h))
model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(tokens, label.astype("int32"), epochs=3, batch_size=32, validation_split=0.1, verbose=0)
"""),
    Healthy("Keras example: several labels at once", KERAS_HEAD + """
x = np.random.normal(size=(600, 12)).astype("float32")
tags = (x[:, :5] + 0.3 * np.random.normal(size=(600, 5)) > 0.5).astype("float32")
model = keras.Sequential([keras.Input((12,)), layers.Dense(32, activation="relu"), layers.BatchNormalization(), layers.Dense(5, activation="sigmoid")])
model.compile("nadam", "binary_crossentropy", metrics=["binary_accuracy"])
model.fit(x, tags, epochs=4, batch_size=32, verbose=0)
print(model.predict(x[:4], verbose=0))
"""),
    Healthy("Keras example: trained in two calls from a saved file", KERAS_HEAD + """
import tempfile
x = np.random.normal(size=(500, 6)).astype("float32")
y = (x @ np.array([1., -2., 0.5, 0, 0, 1]) + 0.1 * np.random.normal(size=500)).astype("float32")
model = keras.Sequential([keras.Input((6,)), layers.Dense(32, activation="relu"), layers.Dense(1)])
model.compile(keras.optimizers.Adam(5e-3), "mae")
model.fit(x[:400], y[:400], epochs=4, batch_size=20, validation_data=(x[400:], y[400:]), verbose=0)
path = os.path.join(tempfile.mkdtemp(), "model.keras")
model.save(path)
again = keras.models.load_model(path)
again.fit(x[:400], y[:400], epochs=2, batch_size=20, verbose=0)
"""),
]  # fmt: skip
