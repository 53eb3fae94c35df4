"""Training loops as people write them, run by `python` and by `tensortap run`: the same results, and steps recorded."""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from warm_python import PATIENCE, Done, WarmPython

from outside.checks import Verdict

BEGIN = """
import copy, io, sys, torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
x, y = torch.randn(32, 8), torch.randn(32, 1)
def mlp(n=8, m=1): return nn.Sequential(nn.Linear(n, 16), nn.Tanh(), nn.Linear(16, m))
def digest(*models): print(*(f"{p.double().sum():.17g}" for m in models for p in m.parameters()))
"""


class Loop(NamedTuple):
    """One script; `least` is how many records it must leave at least, `code` how it ends."""

    name: str
    script: str
    least: int = 1
    code: int = 0
    first: str = ""  # what it does before torch is imported, in an interpreter of its own

    def check(self, python: WarmPython | None = None) -> Verdict:
        """Run it both ways and compare; `python` is an interpreter that is there already."""
        warm = python or _warm()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "train.py")
            path.write_text(self.first + BEGIN + textwrap.dedent(self.script), encoding="utf-8")
            bare = warm.run([str(path)], folder)
            run = str(Path(folder, "run"))
            command = ["-m", "tensortap", "run", "--to", run, str(path)]
            watched = _cold(command, folder) if self.first else warm.run(command, folder)
            return Verdict(self.name, dict(self._problems(bare, watched, run)))

    def _problems(self, bare: Done, watched: Done, run: str) -> Iterator[tuple[str, str]]:
        if bare.returncode != self.code:
            yield "script", f"the script itself ended with {bare.returncode}: {bare.stderr[-200:]}"
            return
        if bare.stdout != watched.stdout:
            yield "same results", f"{watched.stdout[-150:]!r} for {bare.stdout[-150:]!r}"
        if bare.returncode != watched.returncode:
            yield "ended as it did", f"exit code {watched.returncode} for {bare.returncode}: {watched.stderr[-150:]}"
        if self.least and (records := _records(run)) < self.least:
            yield "recorded", f"{records} records, at least {self.least} expected"


def subjects() -> list[Loop]:
    """Every loop of this file."""
    return [Loop(f"loop/{name}", *((rest,) if isinstance(rest, str) else rest)) for name, rest in _SCRIPTS.items()]


@functools.cache
def _warm() -> WarmPython:
    python = WarmPython("torch", "torch._dynamo", "tensortap.cli.app", "tensortap.adapters.torch.script.watcher",
                        path=_path())  # fmt: skip
    atexit.register(python.__exit__)
    return python


def _path() -> list[str]:
    return [folder for folder in sys.path if not Path(folder, "torchvision").exists()]  # its operators are missing


def _cold(command: list[str], folder: str) -> Done:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": os.pathsep.join(_path())}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE
    )
    return Done(done.returncode, done.stdout, done.stderr)


def _records(path: str) -> int:
    import tensortap as tt

    try:
        return len(tt.open(path).to_arrow()) if hasattr(tt.Run, "to_arrow") else sum(1 for _ in tt.open(path).records())
    except tt.TensortapError:
        return 0


_SCRIPTS: dict[str, Any] = {
    "plain": """
        m = mlp(); o = torch.optim.Adam(m.parameters())
        for _ in range(5):
            o.zero_grad(); F.mse_loss(m(x), y).backward(); o.step()
        digest(m)
    """,
    "evaluation between": """
        m = mlp(); o = torch.optim.SGD(m.parameters(), 0.1)
        for epoch in range(3):
            m.train()
            for i in range(4):
                o.zero_grad(); F.mse_loss(m(x[i * 8:i * 8 + 8]), y[i * 8:i * 8 + 8]).backward(); o.step()
            m.eval()
            with torch.no_grad(): print(f"{F.mse_loss(m(x), y):.9g}")
        digest(m)
    """,
    "GAN": """
        g, d = mlp(8, 8), mlp()
        og, od = (torch.optim.Adam(m.parameters(), 1e-3, betas=(0.5, 0.9)) for m in (g, d))
        bce = nn.BCEWithLogitsLoss()
        for _ in range(5):
            fake = g(torch.randn(32, 8))
            lossd = bce(d(x), torch.ones(32, 1)) + bce(d(fake.detach()), torch.zeros(32, 1))
            od.zero_grad(); lossd.backward(); od.step()
            og.zero_grad(); bce(d(fake), torch.ones(32, 1)).backward(); og.step()
        digest(g, d)
    """,
    "LBFGS": """
        m = mlp(); o = torch.optim.LBFGS(m.parameters(), max_iter=4)
        def closure():
            o.zero_grad(); loss = F.mse_loss(m(x), y); loss.backward(); return loss
        for _ in range(3): o.step(closure)
        digest(m)
    """,
    "EMA": """
        m = mlp(); e = copy.deepcopy(m).requires_grad_(False); o = torch.optim.SGD(m.parameters(), 0.1)
        for _ in range(5):
            o.zero_grad(); F.mse_loss(m(x), y).backward(); o.step()
            with torch.no_grad():
                for a, b in zip(e.parameters(), m.parameters()): a.lerp_(b, 0.1)
        e.eval(); print(f"{F.mse_loss(e(x), y):.9g}"); digest(m, e)
    """,
    "AveragedModel": """
        from torch.optim.swa_utils import AveragedModel
        m = mlp(); e = AveragedModel(m); o = torch.optim.SGD(m.parameters(), 0.1)
        for _ in range(5):
            o.zero_grad(); F.mse_loss(m(x), y).backward(); o.step(); e.update_parameters(m)
        digest(m, e)
    """,
    "MAML": """
        m = mlp(); o = torch.optim.SGD(m.parameters(), 0.01)
        for _ in range(3):
            fast = dict(m.named_parameters())
            loss = F.mse_loss(torch.func.functional_call(m, fast, (x[:16],)), y[:16])
            gs = torch.autograd.grad(loss, fast.values(), create_graph=True)
            fast = {n: p - 0.1 * g for (n, p), g in zip(fast.items(), gs)}
            o.zero_grad(); F.mse_loss(torch.func.functional_call(m, fast, (x[16:],)), y[16:]).backward(); o.step()
        digest(m)
    """,
    "accumulation": """
        m = mlp(); o = torch.optim.AdamW(m.parameters())
        for i in range(8):
            (F.mse_loss(m(x[i * 4:i * 4 + 4]), y[i * 4:i * 4 + 4]) / 4).backward()
            if i % 4 == 3: o.step(); o.zero_grad()
        digest(m)
    """,
    "manual SGD": """
        m = mlp()
        for _ in range(5):
            loss = F.mse_loss(m(x), y); m.zero_grad(); loss.backward()
            with torch.no_grad():
                for p in m.parameters(): p -= 0.1 * p.grad
        digest(m)
    """,
    "autograd.grad": """
        m = mlp()
        for _ in range(4):
            gs = torch.autograd.grad(F.mse_loss(m(x), y), list(m.parameters()))
            with torch.no_grad():
                for p, g in zip(m.parameters(), gs): p -= 0.1 * g
        digest(m)
    """,
    "several models": """
        ms = [mlp() for _ in range(6)]; os_ = [torch.optim.SGD(m.parameters(), 0.1) for m in ms]
        for _ in range(3):
            for m, o in zip(ms, os_): o.zero_grad(); F.mse_loss(m(x), y).backward(); o.step()
        digest(*ms)
    """,
    "forty models": """
        ms = [mlp() for _ in range(40)]; os_ = [torch.optim.SGD(m.parameters(), 0.1) for m in ms]
        for _ in range(2):
            for m, o in zip(ms, os_): o.zero_grad(); F.mse_loss(m(x), y).backward(); o.step()
        digest(*ms)
    """,
    "teacher and student": """
        t, s = mlp(), mlp(); t.eval(); o = torch.optim.Adam(s.parameters())
        for _ in range(5):
            with torch.no_grad(): goal = t(x)
            o.zero_grad(); F.mse_loss(s(x), goal).backward(); o.step()
        digest(t, s)
    """,
    "DataLoader fork": """
        from torch.utils.data import DataLoader, TensorDataset
        if __name__ == "__main__":
            m = mlp(); o = torch.optim.SGD(m.parameters(), 0.1)
            for a, b in DataLoader(TensorDataset(x, y), 8, num_workers=2, multiprocessing_context="fork"):
                o.zero_grad(); F.mse_loss(m(a), b).backward(); o.step()
            digest(m)
    """,
    "DataLoader spawn": """
        from torch.utils.data import DataLoader, TensorDataset
        if __name__ == "__main__":
            m = mlp(); o = torch.optim.SGD(m.parameters(), 0.1)
            for a, b in DataLoader(TensorDataset(x, y), 8, num_workers=1, multiprocessing_context="spawn"):
                o.zero_grad(); F.mse_loss(m(a), b).backward(); o.step()
            digest(m)
    """,
    "DataLoader forkserver": """
        from torch.utils.data import DataLoader, TensorDataset
        if __name__ == "__main__":
            m = mlp(); o = torch.optim.SGD(m.parameters(), 0.1)
            for a, b in DataLoader(TensorDataset(x, y), 8, num_workers=1, multiprocessing_context="forkserver"):
                o.zero_grad(); F.mse_loss(m(a), b).backward(); o.step()
            digest(m)
    """,
    "mp.spawn": (
        """
        import torch.multiprocessing as mp
        def work(rank):
            torch.manual_seed(rank); m = mlp(); o = torch.optim.SGD(m.parameters(), 0.1)
            for _ in range(2): o.zero_grad(); F.mse_loss(m(x), y).backward(); o.step()
        if __name__ == "__main__":
            mp.spawn(work, nprocs=2); print("done")
    """,
        0,
    ),
    "saves the whole model": """
        m = mlp(); o = torch.optim.SGD(m.parameters(), 0.1)
        for _ in range(3): o.zero_grad(); F.mse_loss(m(x), y).backward(); o.step()
        f = io.BytesIO(); torch.save(m, f); f.seek(0)
        again = torch.load(f, weights_only=False); digest(m, again)
        with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.Tanh]):
            f.seek(0); digest(torch.load(f, weights_only=True))
    """,
    "deepcopy while training": """
        m = mlp(); o = torch.optim.SGD(m.parameters(), 0.1); best = None
        for _ in range(3):
            o.zero_grad(); F.mse_loss(m(x), y).backward(); o.step(); best = copy.deepcopy(m)
        digest(m, best)
    """,
    "raises in the middle": (
        """
        m = mlp(); o = torch.optim.SGD(m.parameters(), 0.1)
        for i in range(5):
            o.zero_grad(); F.mse_loss(m(x), y).backward(); o.step()
            if i == 2: raise ValueError("mine")
    """,
        1,
        1,
    ),
    "raises in forward": (
        """
        class Bad(nn.Module):
            def __init__(self): super().__init__(); self.net = mlp(); self.n = 0
            def forward(self, x):
                self.n += 1
                if self.n == 3: raise RuntimeError("mine")
                return self.net(x)
        m = Bad(); o = torch.optim.SGD(m.parameters(), 0.1)
        for i in range(5):
            try: o.zero_grad(); F.mse_loss(m(x), y).backward(); o.step()
            except RuntimeError: print("caught")
        digest(m)
    """,
    ),
    "sys.exit": (
        """
        m = mlp(); m(x); sys.exit(3)
    """,
        1,
        3,
    ),
    "asks transformers before torch": (
        """
        m = mlp(GPT2Config(n_embd=8).n_embd)
        for _ in range(2):
            m.zero_grad(); F.mse_loss(m(x), y).backward()
            with torch.no_grad():
                for p in m.parameters(): p -= 0.1 * p.grad
        digest(m)
    """,
        1,
        0,
        "import importlib.util; print(importlib.util.find_spec('torch') is not None)\n"
        "from transformers import GPT2Config",
    ),
    "imports transformers first": (
        """
        m = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16))
        o = torch.optim.AdamW(m.parameters()); ids = torch.randint(0, 50, (2, 8))
        for _ in range(2): o.zero_grad(); m(ids, labels=ids).loss.backward(); o.step()
        digest(m)
    """,
        1,
        0,
        "import importlib.util; print(importlib.util.find_spec('torch') is not None)\n"
        "from transformers import GPT2Config, GPT2LMHeadModel",
    ),
    "gradient clipping and a schedule": """
        m = mlp(); o = torch.optim.SGD(m.parameters(), 0.5); s = torch.optim.lr_scheduler.StepLR(o, 2, 0.5)
        for _ in range(5):
            o.zero_grad(); F.mse_loss(m(x), y).backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.1); o.step(); s.step()
        digest(m)
    """,
    "autocast with a scaler": """
        m = mlp(); o = torch.optim.SGD(m.parameters(), 0.1); s = torch.amp.GradScaler("cpu")
        for _ in range(3):
            o.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16): loss = F.mse_loss(m(x), y)
            s.scale(loss).backward(); s.step(o); s.update()
        digest(m)
    """,
    "reinforcement learning": """
        m = mlp(8, 2); o = torch.optim.Adam(m.parameters(), 1e-2)
        for _ in range(3):
            logs, rewards = [], []
            state = torch.randn(8)
            for _ in range(5):
                d = torch.distributions.Categorical(logits=m(state)); a = d.sample()
                logs.append(d.log_prob(a)); rewards.append(float(a)); state = torch.randn(8)
            o.zero_grad(); (-torch.stack(logs) * torch.tensor(rewards)).sum().backward(); o.step()
        digest(m)
    """,
    "VAE": """
        class V(nn.Module):
            def __init__(self): super().__init__(); self.e, self.d = mlp(8, 4), mlp(2, 8)
            def forward(self, x):
                mu, log = self.e(x).chunk(2, -1); z = mu + torch.randn_like(mu) * (log / 2).exp()
                return self.d(z), mu, log
        m = V(); o = torch.optim.Adam(m.parameters())
        for _ in range(3):
            r, mu, log = m(x); loss = F.mse_loss(r, x) - 0.5 * (1 + log - mu ** 2 - log.exp()).mean()
            o.zero_grad(); loss.backward(); o.step()
        digest(m)
    """,
    "two losses, retained graph": """
        m = mlp(8, 2); o = torch.optim.SGD(m.parameters(), 0.1)
        for _ in range(3):
            out = m(x); o.zero_grad(); out[:, 0].mean().backward(retain_graph=True)
            out[:, 1].pow(2).mean().backward(); o.step()
        digest(m)
    """,
    "threads": """
        import threading
        ms = [mlp() for _ in range(2)]
        def work(m):
            o = torch.optim.SGD(m.parameters(), 0.1)
            for _ in range(3): o.zero_grad(); F.mse_loss(m(x), y).backward(); o.step()
        ts = [threading.Thread(target=work, args=(m,)) for m in ms]
        [t.start() for t in ts]; [t.join() for t in ts]; digest(*ms)
    """,
    "inference only": """
        m = mlp().eval()
        with torch.inference_mode():
            for i in range(4): print(f"{m(x[i * 8:i * 8 + 8]).sum():.9g}")
    """,
    "stdin and arguments": """
        print(sys.argv[1:], sys.stdin.read()); m = mlp(); print(f"{m(x).sum():.9g}")
    """,
}
