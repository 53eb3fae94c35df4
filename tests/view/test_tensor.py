"""`tt.print`: a tensor of any framework as a few lines."""

import io

import numpy as np
import pytest

import tensortap as tt

X = np.random.default_rng(0).normal(size=(8, 128)).astype(np.float32)


def said(value, **more):
    stream = io.StringIO()
    assert tt.print(value, file=stream, **more) is None
    return stream.getvalue().splitlines()


def test_a_tensor():
    """What it is, its range with a histogram, mean and deviation, and its first and last values."""
    about, numbers, values = said(X)
    assert about == "numpy.ndarray [8,128] f32 cpu · 4.1 kB"
    assert "mean −0.0492 ± 0.972" in numbers and "█" in numbers
    assert values.startswith("0.126 −0.132 0.64 0.105 … ")


def test_what_is_not_finite_comes_first():
    """NaN and infinities are said before any number, and do not spoil the numbers."""
    _, bad, numbers, values = said(np.array([np.nan, np.inf, 1, 3], np.float32), name="loss")[1:]
    assert bad == "NaN 1 (25%), +inf 1 (25%)"
    assert "mean 2 ± 1" in numbers
    assert values == "nan inf 1 3"
    assert said(np.full(3, np.nan))[1:] == ["NaN 3 (100%)", "nan nan nan"]


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        (2.5, ["[] f64 · 8 B", "2.5"]),
        ([True, False], ["[2] bool · 2 B", "0 █              █ 1  mean 0.5 ± 0.5  zeros 50%", "True False"]),
        (np.zeros((0, 3)), ["numpy.ndarray [0,3] f64 cpu · 0 B"]),
        (np.full(9, 7), ["numpy.ndarray [9] i64 cpu · 72 B", "every finite element is 7", "7 7 7 7 … 7 7 7 7"]),
    ],
)
def test_numbers_lists_and_nothing(value, lines):
    """Numbers, lists, constants and empty arrays have their own short forms."""
    assert said(value) == lines


def test_torch():
    """A tensor of PyTorch says its device and that it wants a gradient, and stays as it is."""
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T.requires_grad_()
    about, _, values = said(tensor)
    assert about == "torch.Tensor [3,2] bf16 cpu requires_grad · 12 B"
    assert values == "0 3 1 4 2 5"
    assert tensor.grad_fn is None and tensor._version == 0


def test_jax():
    """An array of JAX is read as it is."""
    jax = pytest.importorskip("jax")
    assert said(jax.numpy.arange(4.0))[0].startswith("jax.Array [4] f32 ")


def test_a_name_cannot_steer_the_terminal():
    """Control characters in a name are written out."""
    assert said(1.0, name="a\x1b[31m")[0] == "a\\x1b[31m"
