"""A small network that every training loop here trains."""

import pytest

torch = pytest.importorskip("torch")


class Net(torch.nn.Module):
    """Two layers and a dropout, so that consumed random numbers would show; gives what Trainer wants of a model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(4, 8)
        self.act = torch.nn.ReLU()
        self.drop = torch.nn.Dropout(0.2)
        self.head = torch.nn.Linear(8, 1)

    def forward(self, x, y=None):
        out = self.head(self.drop(self.act(self.body(x))))
        return out if y is None else {"loss": (out - y).square().mean(), "logits": out}


@pytest.fixture
def net():
    """A function that makes the network, the same every time."""
    return Net


@pytest.fixture
def data():
    """Thirty-two samples."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 4, generator=generator)
    return [{"x": a, "y": b} for a, b in zip(x, x.sum(1, keepdim=True), strict=True)]


@pytest.fixture
def same():
    """A function that says whether two models hold the same bits and no hooks of ours."""

    def compare(one, other):
        hooks = [h for m in one.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]
        pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
        return not hooks and all(torch.equal(a, b) for a, b in pairs)

    return compare


@pytest.fixture
def used():
    """A function that gives the norm of a recorded gradient as the optimizer used it: the row is before clipping."""
    return lambda record: record["l2"] * record.numbers["clip"]
