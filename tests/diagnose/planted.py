"""Trainings: healthy ones, and ones with a planted fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diagnose.trainings import EVERYTHING, RELUS, WEIGHTS, Expected, Log, Rows, digits, mlp, scaled, train, training
from torch import Tensor, nn

import tensortap as tt


@training()
def healthy_mlp(path: Path) -> None:
    train(mlp(64, 64, 32, 10), path, *EVERYTHING, RELUS, tt.probe("0", "2", keep=tt.full(), when=tt.every(10)))


@training()
def healthy_tanh(path: Path) -> None:
    train(mlp(64, 64, 32, 10, activation=nn.Tanh), path)


@training()
def healthy_cnn(path: Path) -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(128, 10),
    )  # fmt: skip
    train(model, path, batches=digits(image=True), rate=0.05)


@training()
def healthy_transformer(path: Path) -> None:
    model = Rows()
    train(model, path, *EVERYTHING, WEIGHTS, optimizer=torch.optim.AdamW(model.parameters(), 3e-3))


@training()
def healthy_encoder(path: Path) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2)
    model = nn.Sequential(nn.Unflatten(1, (8, 8)), nn.Linear(8, 32), encoder, nn.Flatten(), nn.Linear(256, 10))
    train(model, path, optimizer=torch.optim.AdamW(model.parameters(), 1e-3))


@training()
def healthy_recurrent(path: Path) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 32, batch_first=True)
            self.head = nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x.view(-1, 8, 8))[0][:, -1])

    model = Reader()
    train(model, path, optimizer=torch.optim.Adam(model.parameters(), 1e-2))


@training()
def healthy_fine_tuning(path: Path) -> None:
    model = mlp(64, 64, 32, 10)
    for p in model[0].parameters():
        p.requires_grad = False
    train(model, path)


@training(reference="healthy_mlp")
def healthy_again(path: Path) -> None:
    train(mlp(64, 64, 32, 10), path, batches=digits(size=48))


@training(Expected("nonfinite", "1:output", severity="error"))
def log_of_zero(path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 32), Log(), nn.Linear(32, 10))
    with torch.no_grad():
        model[0].weight.abs_()
        model[0].bias.fill_(0.5)
    batches = [(x if step < 6 else -x, y) for step, (x, y) in enumerate(digits(12))]
    train(model, path, batches=batches, rate=1e-3)


@training(Expected("nonfinite", ":input", severity="error"))
def bad_batch(path: Path) -> None:
    batches = list(digits(12))
    batches[5][0][3, 7] = float("nan")
    train(mlp(64, 32, 10), path, batches=batches)


@training(Expected("nonfinite", "2:output", ("low_precision", "poor_initialisation"), "error"))
def overflow_in_half(path: Path) -> None:
    model = mlp(64, 32, 16, 10)
    scaled(model[0], 1000.0)
    scaled(model[2], 1000.0)
    batches = [(x.half(), y) for x, y in digits(12)]
    train(model.half(), path, batches=batches, loss_of=lambda out, y: F.cross_entropy(out.float(), y), rate=1e-4)


@training(Expected("dead_units", "1:output", ("all_zero", "loss_not_decreasing")))
def dead_layer(path: Path) -> None:
    model = mlp(64, 32, 32, 10)
    with torch.no_grad():
        model[0].bias.fill_(-50.0)
    train(model, path)


@training(Expected("dead_units", "3:output"))
def dead_units_of_a_layer(path: Path) -> None:
    model = mlp(64, 64, 32, 10)
    with torch.no_grad():
        model[2].bias[:22] = -50.0
    train(model, path)


@training(Expected("dead_units", "1:output", ("loss_not_decreasing",)))
def dead_layer_without_units(path: Path) -> None:
    model = mlp(64, 32, 32, 10)
    with torch.no_grad():
        model[0].bias.fill_(-50.0)
    train(model, path, tt.probe("**", keep=tt.stats()))


@training(Expected("dead_units", "2.weight:grad"))
def dead_units_by_gradient(path: Path) -> None:
    model = mlp(64, 64, 32, 10)
    with torch.no_grad():
        model[2].bias[:28] = -50.0
    train(model, path, "**:grad")


@training(Expected("saturated", "1:output", ("poor_initialisation",)))
def saturated_tanh(path: Path) -> None:
    model = mlp(64, 32, 10, activation=nn.Tanh)
    scaled(model[0], 40.0)
    train(model, path, rate=0.01)


@training(Expected("saturated", "3:output", ("poor_initialisation",)))
def saturated_sigmoid_without_histograms(path: Path) -> None:
    model = mlp(64, 64, 32, 10, activation=nn.Sigmoid)
    scaled(model[2], 300.0)
    train(model, path, tt.probe("**", keep=tt.stats()), rate=0.01)


@training(Expected("saturated", "1:input"))
def saturated_by_inputs(path: Path) -> None:
    model = mlp(64, 32, 10, activation=nn.Tanh)
    scaled(model[0], 400.0)
    train(model, path, "1:input", rate=0.01)


@training(Expected("vanishing_gradients", "0.weight:grad", ("loss_not_decreasing",)))
def vanishing(path: Path) -> None:
    train(mlp(64, *[32] * 8, 10, activation=nn.Sigmoid), path)


@training(Expected("vanishing_gradients", "0:grad_output", ("loss_not_decreasing",)))
def vanishing_outputs(path: Path) -> None:
    train(mlp(64, *[32] * 8, 10, activation=nn.Sigmoid), path, "**:grad_output")


@training(Expected("exploding_gradients", "0:grad_output", severity="error"))
def exploding(path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)), nn.Linear(64, 10))
    for layer in model[1:-1]:
        scaled(layer, 4.0)
    train(model, path, rate=1e-6)


@training(Expected("all_zero", "branch:output"))
def zero_branch(path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(64, 32)
            self.branch = nn.Linear(32, 32, bias=False)
            self.head = nn.Linear(32, 10)
            nn.init.zeros_(self.branch.weight)
            self.branch.weight.requires_grad = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).relu()
            return self.head(x + self.branch(x))

    train(Two(), path)


@training(Expected("constant", "2:output", ("loss_not_decreasing", "all_zero")))
def clamped(path: Path) -> None:
    class Clamp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.clamp(0.5, 0.5)

    train(nn.Sequential(nn.Linear(64, 32), nn.Tanh(), Clamp(), nn.Linear(32, 10)), path)


@training(Expected("unchanged", "2.weight:param"))
def forgotten_by_the_optimizer(path: Path) -> None:
    model = mlp(64, 32, 32, 10)
    known = [p for name, p in model.named_parameters() if not name.startswith("2.")]
    train(model, path, optimizer=torch.optim.SGD(known, 0.1))


@training(
    Expected(
        "update_ratio", "2.weight:update", ("loss_not_decreasing", "loss_spike", "saturated", "exploding_gradients")
    )
)
def huge_updates(path: Path) -> None:
    model = mlp(64, 32, 10, activation=nn.Tanh)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 500.0}]
    train(model, path, optimizer=torch.optim.SGD(groups, 0.01))


@training(Expected("update_ratio", "0.weight:update", ("loss_not_decreasing",)))
def tiny_updates(path: Path) -> None:
    model = mlp(64, 32, 10).double()
    batches = [(x.double(), y) for x, y in digits()]
    train(model, path, batches=batches, optimizer=torch.optim.SGD(model.parameters(), 1e-10))


@training(Expected("poor_initialisation", "2.weight:param"))
def weights_too_large(path: Path) -> None:
    model = mlp(64, 64, 32, 10)
    nn.init.normal_(model[2].weight)
    train(model, path, rate=1e-3)


@training(Expected("poor_initialisation", "2.weight:param"))
def equal_weights(path: Path) -> None:
    model = mlp(64, 64, 32, 10)
    nn.init.constant_(model[2].weight, 0.1)
    train(model, path)


@training(Expected("poor_initialisation", "2:output"))
def outputs_too_small(path: Path) -> None:
    model = mlp(64, 64, 64, 10)
    scaled(model[2], 1e-3)
    nn.init.zeros_(model[2].bias)
    train(model, path, "**")


@training(Expected("outliers", "2:output"))
def giant_channel(path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 10))
    with torch.no_grad():
        model[2].bias[5] = 4000.0
    train(model, path, rate=0.01)


@training(Expected("representation_collapse", "2:output", ("loss_not_decreasing",)))
def collapsed(path: Path) -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(0, keepdim=True) + 1e-5 * x

    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), Mean(), nn.Linear(32, 10))
    train(model, path, *EVERYTHING, tt.probe("2", keep=tt.full(), when=tt.every(10)))


@training(Expected("attention_collapse", "attention.softmax:output"))
def sharp_attention(path: Path) -> None:
    model = Rows(sharpness=500.0)
    train(model, path, *EVERYTHING, WEIGHTS, optimizer=torch.optim.AdamW(model.parameters(), 1e-3))


@training(Expected("attention_collapse", "attention.softmax:output"))
def sharp_attention_by_statistics(path: Path) -> None:
    model = Rows(sharpness=500.0)
    train(model, path, tt.probe("**", keep=tt.stats()), optimizer=torch.optim.AdamW(model.parameters(), 1e-3))


@training(Expected("loss_not_decreasing", "metric loss"))
def wrong_sign(path: Path) -> None:
    model = mlp(64, 32, 10)
    batches = digits(120)  # of fewer steps it would be a remark
    train(model, path, batches=batches, optimizer=torch.optim.SGD(model.parameters(), 1e-3, maximize=True))


@training(Expected("loss_spike", "metric loss", ("inputs_not_normalised",)))
def one_wild_batch(path: Path) -> None:
    batches = [(x * (30 if step == 30 else 1), y) for step, (x, y) in enumerate(digits())]
    model = mlp(64, 64, 32, 10)
    train(model, path, batches=batches, optimizer=torch.optim.Adam(model.parameters(), 0.01))


@training(
    Expected(
        "loss_spike",
        "metric loss",
        ("outliers", "dead_units", "all_zero", "update_ratio", "loss_not_decreasing"),
        "error",
    )
)
def rate_that_grows(path: Path) -> None:
    def grow(step: int, optimizer: Any) -> None:
        if step > 15:
            optimizer.param_groups[0]["lr"] *= 1.5

    train(mlp(64, 64, 32, 10), path, before=grow)


@training(Expected("low_precision", "2:output", ("poor_initialisation", "loss_not_decreasing")))
def near_overflow(path: Path) -> None:
    model = mlp(64, 32, 16, 10)
    scaled(model[2], 8e4)
    batches = [(x.half(), y) for x, y in digits(12)]
    small = lambda out, y: F.cross_entropy(out.float() / 1e4, y)  # noqa: E731
    train(model.half(), path, "**", batches=batches, loss_of=small, rate=1e-4)


@training(Expected("low_precision", "0:output", ("poor_initialisation", "vanishing_gradients", "unchanged"), "info"))
def too_large_for_half(path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 10))
    scaled(model[0], 1e6)
    train(model, path, rate=1e-3)


@training(Expected("inputs_not_normalised", ":input"))
def raw_pixels(path: Path) -> None:
    train(mlp(64, 64, 32, 10), path, batches=digits(scale=1.0), rate=0.003)


@training(Expected("never_ran", "extra:output"))
def unused_head(path: Path) -> None:
    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(64, 32, 32)
            self.extra = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
            self.head = nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    train(Forgetful(), path)


@training(Expected("drift", ":input"), reference="healthy_mlp")
def inputs_shifted(path: Path) -> None:
    train(mlp(64, 64, 32, 10), path, batches=[(1 - x, y) for x, y in digits()])
