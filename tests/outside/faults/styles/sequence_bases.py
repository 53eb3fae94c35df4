"""Correct scripts on sequences: attention written out, PyTorch's own transformer, an LSTM on lengths, Hugging Face."""

from __future__ import annotations

ATTENTION = """# character model, attention written out
import torch
import torch.nn as nn
from torch.nn import functional as F
torch.manual_seed(1337)
text = "".join("abcdefgh"[(i * i + 3 * i) % 8] + "ijkl"[i % 4] for i in range(3000))
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text], dtype=torch.long)
block_size, batch_size, n_embd, head_size = 12, 16, 32, 16

def get_batch():
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    x = torch.stack([data[i:i + block_size] for i in ix])
    y = torch.stack([data[i + 1:i + block_size + 1] for i in ix])
    return x, y

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        B, T, C = x.shape
        k, q, v = self.key(x), self.query(x), self.value(x)
        wei = q @ k.transpose(-2, -1) * head_size ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = F.softmax(wei, dim=-1)
        return wei @ v

class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_embedding = nn.Embedding(len(chars), n_embd)
        self.position_embedding = nn.Embedding(block_size, n_embd)
        self.heads = nn.ModuleList([Head(), Head()])
        self.ln = nn.LayerNorm(n_embd)
        self.ffwd = nn.Sequential(nn.Linear(n_embd, 64), nn.ReLU(), nn.Linear(64, n_embd))
        self.lm_head = nn.Linear(n_embd, len(chars))

    def forward(self, idx, targets=None):
        x = self.token_embedding(idx) + self.position_embedding(torch.arange(idx.shape[1]))
        x = x + torch.cat([h(self.ln(x)) for h in self.heads], dim=-1)
        x = x + self.ffwd(x)
        logits = self.lm_head(x)
        if targets is None:
            return logits, None
        B, T, C = logits.shape
        return logits, F.cross_entropy(logits.view(B * T, C), targets.view(B * T))

m = LanguageModel()
optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
for it in range(80):
    xb, yb = get_batch()
    logits, loss = m(xb, yb)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
print(loss.item())
"""

ENCODER = """import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

torch.manual_seed(2)
PAD, VOCAB = 0, 30
def sample():
    n = int(torch.randint(3, 16, ()))
    ids = torch.randint(2, VOCAB, (n,))
    label = int(torch.rand(()) < 0.5)
    if label:
        ids[int(torch.randint(0, n, ()))] = 1
    return ids, label

corpus = [sample() for _ in range(480)]

def collate(items):
    ids, labels = zip(*items)
    return pad_sequence(ids, batch_first=True, padding_value=PAD), torch.tensor(labels)

loader = DataLoader(corpus, batch_size=24, shuffle=True, collate_fn=collate)

class Detector(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d, padding_idx=PAD)
        layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.cls = nn.Linear(d, 2)

    def forward(self, ids):
        keep = (ids != PAD)
        h = self.enc(self.emb(ids), src_key_padding_mask=~keep)
        pooled = (h * keep.unsqueeze(-1)).sum(1) / keep.sum(1, keepdim=True)
        return self.cls(pooled)

net = Detector()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
ce = nn.CrossEntropyLoss()
for epoch in range(4):
    for ids, labels in loader:
        loss = ce(net(ids), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
"""

FORECAST = """import numpy as np, torch
from torch import nn, optim
np.random.seed(0); torch.manual_seed(0)
t = np.arange(0, 900) * 0.1
series = (np.sin(t) + 0.5 * np.sin(0.31 * t) + 0.05 * np.random.randn(t.size)).astype("float32")
series = (series - series.mean()) / series.std()
L = 20
windows = np.lib.stride_tricks.sliding_window_view(series, L + 1)
X = torch.tensor(windows[:, :-1]).unsqueeze(-1)
Y = torch.tensor(windows[:, -1:].copy())
train_X, train_Y = X[:700], Y[:700]

class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(input_size=1, hidden_size=24, batch_first=True)
        self.head = nn.Linear(24, 1)
    def forward(self, x):
        out, (h, c) = self.rnn(x)
        return self.head(out[:, -1])

model = Forecaster()
criterion = nn.SmoothL1Loss()
opt = optim.RMSprop(model.parameters(), lr=5e-3)
for epoch in range(3):
    perm = np.random.permutation(len(train_X))
    for k in range(0, len(perm), 35):
        b = perm[k:k + 35]
        opt.zero_grad()
        loss = criterion(model(train_X[b]), train_Y[b])
        loss.backward()
        opt.step()
    print(epoch, float(loss))
"""

HUGGING = """import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
class Sentences(Dataset):
    def __init__(self, n):
        self.ids = torch.randint(5, 60, (n, 12))
        self.labels = (self.ids[:, 1] > 32).long()
        self.ids[:, 0] = 1
    def __len__(self):
        return len(self.labels)
    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": torch.ones(12, dtype=torch.long), "labels": self.labels[i]}

config = BertConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
                    max_position_embeddings=16, hidden_dropout_prob=0.05, attention_probs_dropout_prob=0.05, num_labels=2)
model = BertForSequenceClassification(config)
args = TrainingArguments(output_dir="out", num_train_epochs=3, per_device_train_batch_size=16, learning_rate=5e-3,
                         logging_steps=10, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=0)
trainer = Trainer(model=model, args=args, train_dataset=Sentences(320), eval_dataset=Sentences(32))
trainer.train()
print(trainer.evaluate())
"""
