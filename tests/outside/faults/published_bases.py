"""Correct scripts for the faults that were read in published benchmarks, written as their authors write: much by hand."""

from __future__ import annotations

from outside.faults.bases import HEAD

DIGITS = (
    HEAD
    + """
import numpy as np
from sklearn.datasets import load_digits
data = load_digits()
x = torch.tensor(data.data, dtype=torch.float32) / 16
y = torch.tensor(data.target)
x_train, y_train, x_test, y_test = x[:1200], y[:1200], x[1200:], y[1200:]

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 128)
        self.fc2 = nn.Linear(128, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.out(x)

def evaluate(net):
    net.eval()
    with torch.no_grad():
        correct = (net(x_test).argmax(1) == y_test).float().mean().item()
    net.train()
    return correct

net = MLP()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
for epoch in range(4):
    order = torch.randperm(1200)
    for i in range(0, 1200, 50):
        xb, yb = x_train[order[i:i + 50]], y_train[order[i:i + 50]]
        optimizer.zero_grad()
        out = net(xb)
        loss = criterion(out, yb)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item(), evaluate(net))
"""
)

# Probabilities, one-hot labels and the cross entropy written out, as ports of Keras and TensorFlow programs have it.
BY_HAND = (
    HEAD
    + """
from sklearn.datasets import load_iris
data = load_iris()
x = torch.tensor(data.data, dtype=torch.float32)
x = (x - x.mean(0)) / x.std(0)
y = F.one_hot(torch.tensor(data.target), 3).float()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden1 = nn.Linear(4, 16)
        self.hidden2 = nn.Linear(16, 16)
        self.output = nn.Linear(16, 3)

    def forward(self, x):
        x = torch.relu(self.hidden1(x))
        x = torch.relu(self.hidden2(x))
        return torch.softmax(self.output(x), dim=1)

def categorical_crossentropy(target, output):
    output = output.clamp(1e-7, 1 - 1e-7)
    return -(target * torch.log(output)).sum(dim=1).mean()

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(12):
    order = torch.randperm(150)
    for i in range(0, 150, 16):
        index = order[i:i + 16]
        prediction = model(x[index])
        loss = categorical_crossentropy(y[index], prediction)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
"""
)

XOR = (
    HEAD
    + """
x = torch.tensor([[0., 0.], [0., 1.], [1., 0.], [1., 1.]])
y = torch.tensor([[0.], [1.], [1.], [0.]])
model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1), nn.Sigmoid())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
for epoch in range(200):
    output = model(x)
    loss = ((output - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item(), model(x).flatten().tolist())
"""
)

MPG = (
    HEAD
    + """
n = 392
cylinders = torch.randint(2, 5, (n,)).float() * 2
displacement = cylinders * 35 + 20 * torch.randn(n)
horsepower = displacement * 0.4 + 30 + 12 * torch.randn(n)
weight = displacement * 8 + 1400 + 250 * torch.randn(n)
year = torch.randint(70, 83, (n,)).float()
mpg = 45 - 0.0075 * weight - 0.02 * horsepower + 0.6 * (year - 76) + 1.5 * torch.randn(n)
x = torch.stack([cylinders, displacement, horsepower, weight, year], 1)
x = (x - x.mean(0)) / x.std(0)
y = mpg.unsqueeze(1)
y = (y - y.mean()) / y.std()
train_x, train_y, test_x, test_y = x[:320], y[:320], x[320:], y[320:]

class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(5, 64)
        self.layer2 = nn.Linear(64, 64)
        self.out = nn.Linear(64, 1)

    def forward(self, x):
        x = F.relu(self.layer1(x))
        x = F.relu(self.layer2(x))
        return self.out(x)

model = Regressor()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(10):
    model.train()
    for i in range(0, 320, 32):
        prediction = model(train_x[i:i + 32])
        target = train_y[i:i + 32]
        loss = torch.mean((prediction - target) ** 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        print(epoch, loss.item(), torch.mean((model(test_x) - test_y) ** 2).item())
"""
)

LENET = (
    HEAD
    + """
from sklearn.datasets import load_digits
data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(data.target)
train = DataLoader(TensorDataset(images[:1000], labels[:1000]), batch_size=50, shuffle=True)
test = DataLoader(TensorDataset(images[1000:1400], labels[1000:1400]), batch_size=100)

class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.bn = nn.BatchNorm2d(16)
        self.drop = nn.Dropout(0.2)
        self.fc1 = nn.Linear(16 * 16, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.bn(self.conv2(x))), 2)
        x = self.drop(x.flatten(1))
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), dim=1)

model = LeNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(3):
    model.train()
    for data, target in train:
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
    model.eval()
    total = 0.0
    with torch.no_grad():
        for data, target in test:
            total += F.nll_loss(model(data), target, reduction="sum").item()
    print(epoch, total / 400)
"""
)

TEXT = (
    HEAD
    + """
words = torch.randint(2, 200, (600, 20))
sentiment = (words < 60).float().sum(1) > (words > 140).float().sum(1)
targets = sentiment.float()

class Reviews(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(200, 16)
        self.rnn = nn.LSTM(16, 24, batch_first=True)
        self.dense = nn.Linear(24, 1)

    def forward(self, tokens):
        embedded = self.embedding(tokens)
        output, (hidden, cell) = self.rnn(embedded)
        return self.dense(output.mean(1)).squeeze(1)

model = Reviews()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
criterion = nn.BCEWithLogitsLoss()
for epoch in range(6):
    for i in range(0, 600, 50):
        optimizer.zero_grad()
        prediction = model(words[i:i + 50])
        loss = criterion(prediction, targets[i:i + 50])
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
"""
)

TRANSLATE = (
    HEAD
    + """
class Attention(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.dropout = heads, dropout

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(c // self.heads), dim=-1)
        weights = F.dropout(weights, self.dropout, training=self.training)
        return self.o((weights @ v).transpose(1, 2).reshape(b, t, c))

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 32)
        self.attention = Attention(32, 4, 0.2)
        self.norm = nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 30)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.norm(x))
        return self.head(x + self.mlp(x))

source = torch.randint(0, 30, (400, 8))
target = (source * 7 + 3) % 30
model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
for step in range(80):
    model.train()
    pick = torch.randint(0, 320, (32,))
    logits = model(source[pick])
    loss = F.cross_entropy(logits.reshape(-1, 30), target[pick].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 20 == 0:
        model.eval()
        with torch.no_grad():
            logits = model(source[320:])
            print(step, F.cross_entropy(logits.reshape(-1, 30), target[320:].reshape(-1)).item())
"""
)

WORKERS = (
    HEAD
    + """
import numpy as np
from torch.utils.data import Dataset

class Noisy(Dataset):
    def __init__(self):
        self.x = torch.randn(256, 8)
        self.y = (self.x[:, 0] * 2).unsqueeze(1)

    def __len__(self):
        return 256

    def __getitem__(self, i):
        return self.x[i] + torch.from_numpy(np.random.normal(0, 0.1, 8)).float(), self.y[i]

loader = DataLoader(Noisy(), batch_size=32, num_workers=2, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(3):
    for xb, yb in loader:
        loss = F.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
)

KERAS_HEAD = """import os
os.environ.setdefault("KERAS_BACKEND", "torch")
import numpy as np
import keras
from keras import layers
keras.utils.set_random_seed(0)
"""

KERAS_CLASSES = (
    KERAS_HEAD
    + """
from sklearn.datasets import load_digits
digits = load_digits()
x = (digits.data / 16).astype("float32")
y = keras.utils.to_categorical(digits.target, 10)
x_train, y_train, x_test, y_test = x[:1000], y[:1000], x[1000:1400], y[1000:1400]

model = keras.Sequential([
    keras.Input((64,)),
    layers.Dense(64, activation="relu"),
    layers.Dense(32, activation="relu"),
    layers.Dense(10, activation="softmax"),
])
model.compile(loss="categorical_crossentropy", optimizer=keras.optimizers.Adam(learning_rate=0.003), metrics=["accuracy"])
model.fit(x_train, y_train, batch_size=50, epochs=3, verbose=0)
print(model.evaluate(x_test, y_test, verbose=0))
"""
)

KERAS_BINARY = (
    KERAS_HEAD
    + """
x = np.random.normal(size=(600, 6)).astype("float32")
y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype("float32")

model = keras.Sequential()
model.add(keras.Input((6,)))
model.add(layers.Dense(32, activation="relu"))
model.add(layers.Dense(16, activation="relu"))
model.add(layers.Dense(1, activation="sigmoid"))
optimizer = keras.optimizers.Adam(learning_rate=0.01)
model.compile(loss="binary_crossentropy", optimizer=optimizer, metrics=["accuracy"])
model.fit(x, y, epochs=4, batch_size=32, validation_split=0.2, verbose=0)
"""
)

KERAS_REGRESSION = (
    KERAS_HEAD
    + """
x = np.random.uniform(-1, 1, size=(500, 4)).astype("float32")
y = 3 * x[:, :1] - 2 * x[:, 1:2] ** 2 + 5 + np.random.normal(0, 0.1, size=(500, 1)).astype("float32")

model = keras.Sequential([keras.Input((4,)), layers.Dense(32, activation="relu"), layers.Dense(32, activation="relu"), layers.Dense(1)])
model.compile(loss="mse", optimizer=keras.optimizers.Adam(0.01))
model.fit(x, y, epochs=5, batch_size=25, verbose=0)
"""
)
