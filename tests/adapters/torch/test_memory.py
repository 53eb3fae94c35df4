"""Statistics only: the extra memory is small, whatever the activations."""

from __future__ import annotations

SCRIPT = """
import ctypes, resource, torch, tensortap as tt
from torch import nn

# An activation is as large as glibc's threshold may grow: whether it is given back to the system would be chance.
assert ctypes.CDLL(None).mallopt(-3, 1_000_000)  # M_MMAP_THRESHOLD

class Transposes(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)[:, ::2].expand(x.shape[0], -1, -1)

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), Transposes(), nn.ReLU(), nn.Identity(), nn.Tanh())
model.eval()
x = torch.randn(16, 1024, 512)  # 32 MB an activation

def run():
    with torch.no_grad():
        for _ in range(3):
            model(x)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

with tt.watch(nn.Linear(2, 2), "**:*", to=tt.Memory()):
    pass  # what importing and a first tap cost is not the matter, so it is there before the bare peak
run()
before = peak()
with tt.watch(model, tt.probe("**:{output,input}", keep=tt.stats()), to=tt.Memory()) as tap:
    run()
assert not tap.counts, tap.counts
print(peak() - before)
"""


def test_statistics_take_less_than_ten_megabytes(tmp_path, warm_python):
    """The peak of a process that watches 32 MB activations, non-contiguous ones too, grows by less than 10 MB."""
    (tmp_path / "peak.py").write_text(SCRIPT)
    done = warm_python.run(["peak.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 10, done.stdout
