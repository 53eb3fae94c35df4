"""What `nonfinite` advises and names: no more than the run does not hold already."""

import pytest
import torch

import tensortap as tt


class Divides(torch.nn.Module):
    """Give NaN for an input of zeros."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 8, bias=False)

    def forward(self, x):
        h = self.a(x)
        return h / h.norm(dim=-1, keepdim=True)


def _served(path, probe, **options):
    torch.manual_seed(0)
    model = Divides().eval()
    with tt.watch(model, probe, to=path, **options) as tap:
        for number in range(10):
            with torch.inference_mode(), tap.span(request_id=f"req-{number}", user="ann"):
                model(torch.zeros(1, 4) if number == 6 else torch.randn(1, 4))
    return tap.run


@pytest.mark.filterwarnings("ignore::tensortap.TensortapWarning")
@pytest.mark.parametrize("options", [{}, {"on_nonfinite": "record"}])
def test_lookback_is_advised_where_the_step_before_is_missing(tmp_path, options):
    """Without the step before, look-back is advised; with it, by look-back or as every step is kept, it is named."""
    when = tt.probe("**", when=tt.nonfinite())
    (missing,) = _served(tmp_path / "a", when, **options).findings("nonfinite")
    assert "lookback=5" in missing.advice
    for run in (
        _served(tmp_path / "b", when, lookback=3, **options),
        _served(tmp_path / "c", tt.probe("**"), **options),
    ):
        (held,) = run.findings("nonfinite")
        assert "lookback" not in held.advice and "step 5, which the run holds" in held.advice


def test_the_labels_of_the_span_are_named(tmp_path):
    """The finding names the request whose step is not finite, in its message and its evidence."""
    (found,) = _served(tmp_path / "run", tt.probe("**")).findings("nonfinite")
    assert "request_id req-6, user ann" in found.message
    assert found.evidence["labels"] == {"request_id": "req-6", "user": "ann"}
