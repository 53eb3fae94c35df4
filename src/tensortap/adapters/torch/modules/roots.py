"""What sits on the root module and finds steps by its calls, in eager mode and inside a compiled graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from tensortap.adapters.torch.compile.backward import expect
from tensortap.adapters.torch.compile.code import compiler, pass_by
from tensortap.adapters.torch.compile.operators import CALLED, Found, Regions, Target, is_exporting, tell
from tensortap.adapters.torch.modules.hooks import Hook, tracing
from tensortap.adapters.torch.modules.nested import tensors_in
from tensortap.adapters.torch.steps import MOST_MARKS, TorchStepDetector
from tensortap.errors import NonFiniteError


class RootSite(Target):
    """The root where the compiler took its hooks into a graph: a step begins and ends as the graph runs."""

    __slots__ = ("detector", "prepare", "root")

    def __init__(
        self, detector: TorchStepDetector, prepare: Callable[[], None], root: nn.Module, regions: Regions
    ) -> None:
        super().__init__(regions)
        self.detector = detector
        self.prepare = prepare
        self.root = weakref.ref(root)

    def see(self, tensor: Tensor, slot: str) -> None:
        """Backward has come."""
        self.detector.backward_came()

    def told(self, note: str, slots: list[str]) -> None:
        """The root is called, or has returned what backward may come back to."""
        root = self.root()
        if note == CALLED and root is not None:
            self.begin(root)
        else:
            self.end(None, bool(slots))

    def expect(self, found: Found) -> None:
        """The root has returned these, where autograd is at work while the graph runs."""
        self.end([tensor for _, tensor in found])

    def begin(self, root: nn.Module, compiled: bool = False) -> None:
        """Before the root's forward, which the compiler may be about to see."""
        self.regions.due |= compiled
        try:
            self.detector.root_called(root)
            self.prepare()
        except NonFiniteError:  # the user asked for it
            raise
        except Exception as error:
            self.detector.recorder.counters.failed("step_errors", "beginning a step", error)

    def end(self, output: Any, awaits: bool | None = None) -> None:
        """After it, or after its failure."""
        try:
            self.detector.root_returned(output, awaits)
        except NonFiniteError:
            raise
        except Exception as error:
            self.detector.recorder.counters.failed("step_errors", "ending a step", error)


class RootBefore(Hook):
    """Sits before the root's forward."""

    __slots__ = ("site", "target")

    def __init__(self, target: RootSite) -> None:
        self.target = target
        self.site = target.site

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Before the forward."""
        if is_compiling():
            if not is_exporting():
                tell(self.site, CALLED)
            return
        if not tracing():
            self.target.begin(module, callable(compiler()))


# It must see the compiler at work, and `begin` must not be its work.
pass_by(RootBefore.__call__, inside=False)
pass_by(RootSite.begin)


class RootAfter(Hook):
    """Sits after the root's forward."""

    __slots__ = ("site", "target")

    def __init__(self, target: RootSite) -> None:
        self.target = target
        self.site = target.site

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the forward, or after its failure."""
        if is_compiling():
            if not is_exporting():
                expect(self.site, list(tensors_in(output))[:MOST_MARKS])
            return
        if not tracing():
            self.target.end(output)
