"""All hooks of one tap on one model: registered while a step is wanted, and removed without a trace."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial

from torch import nn
from torch.utils.hooks import RemovableHandle

from tensortap.adapters.plan import Plan
from tensortap.adapters.protocol import AdapterOptions
from tensortap.adapters.torch.compile import code as compiled_code
from tensortap.adapters.torch.compile.code import ModelCompileStatus
from tensortap.adapters.torch.distributed.pipeline import pipelines_in_use
from tensortap.adapters.torch.modules import tree as modules
from tensortap.adapters.torch.modules import unseen
from tensortap.adapters.torch.modules.hidden import HIDING
from tensortap.adapters.torch.modules.hookset import FusedLayerHooks, HookSet, UnfusedLayerHooks
from tensortap.adapters.torch.modules.own_outputs import OwnOutputs
from tensortap.adapters.torch.modules.placement import (
    HookPlacement,
    enclosing,
    register_after_root,
    register_before_root,
    tappable,
)
from tensortap.adapters.torch.modules.roots import RootForwardHook, RootForwardPreHook, RootReceiver
from tensortap.adapters.torch.modules.tensors import TensorObserver
from tensortap.adapters.torch.modules.tree import ModuleTree, NamedModules, TypeNames
from tensortap.adapters.torch.ops.hooks import place_hooks
from tensortap.adapters.torch.ops.taps import OpTaps, op_patterns
from tensortap.adapters.torch.ops.visibility import COMPILED
from tensortap.adapters.torch.steps import TorchStepDetector


class ModelHooks:
    """The hooks on a model's modules, its root and around its operations. It does not keep the model alive."""

    def __init__(
        self, tree: ModuleTree, observer: TensorObserver, steps: TorchStepDetector, plan: Plan, options: AdapterOptions
    ) -> None:
        self.compile_status = ModelCompileStatus(module for _, module in tree.named)
        self.placement = HookPlacement(observer, steps, plan, self.compile_status, options.origins)
        self.operations: OpTaps | None = None
        self._root = weakref.ref(tree.root)
        self._observer, self._steps, self._plan = observer, steps, plan
        self._options = options
        self._keep_fused = options.fast_path == "keep"
        self._step_handles: list[RemovableHandle] = []  # of the two hooks that find steps
        self._handles: list[RemovableHandle] = []
        self._plain = HookSet()
        self._sets: list[HookSet] = []
        self._own_outputs = OwnOutputs([])
        self._deciding: list[HookSet] = []
        self._untappable: dict[str, str] = {}
        self._never_fused = True

    def register(self, tree: ModuleTree, called: nn.Module, begin_step: Callable[[], None]) -> None:
        """Register the hooks. `called` is the module whose calls are steps; `begin_step` runs before each."""
        HIDING.begin()
        receiver = RootReceiver(self._steps, partial(self._root_called, begin_step), called, self.compile_status)
        self._receiver = receiver
        self._step_handles = [register_before_root(called, RootForwardPreHook(receiver))]
        self._place(tree, called)
        self._step_handles.append(register_after_root(called, RootForwardHook(receiver)))
        if isinstance(called, (nn.ModuleDict, nn.ModuleList)) and pipelines_in_use():
            hook = self._steps.stage_called
            self._step_handles += [stage.register_forward_pre_hook(hook, prepend=True) for stage in called.children()]

    def change(self, plan: Plan, tree: ModuleTree, called: nn.Module) -> None:
        """Replace all hooks but those that find steps."""
        self._remove_taps()
        before, self._plan = self.placement, plan
        self.placement = HookPlacement(self._observer, self._steps, plan, self.compile_status, self._options.origins)
        self.placement.follow(before, tree)
        self._step_handles[1].remove()
        self._place(tree, called)
        self._step_handles[1] = register_after_root(called, RootForwardHook(self._receiver))
        if self.compile_status.compiled:
            self._adjust(-1)
            self._reset_compiled()

    def _place(self, tree: ModuleTree, called: nn.Module) -> None:
        """Choose the hooks of every module; those of the one that is called are registered for good."""
        fused = {path: self._layer_hooks(layer) for path, layer in modules.encoder_layers(tree.named)}
        names = tappable(tree.named)
        for module, registers, bits, paths in self.placement.hooks_of(names):
            inside = enclosing(paths, fused)
            if module is called and inside is None:  # its call has begun when a step is found to begin
                self._handles += [register(module) for register in registers]
            else:
                (inside or self._plain).add(module, registers, bits, paths)
        self._never_fused = not fused
        self._sets = [self._plain, *fused.values()]
        self._own_outputs = OwnOutputs(
            self.placement.undecided(names, lambda paths: enclosing(paths, fused) or self._plain)
        )
        self._place_operations(tree.root, names, fused)
        self._untappable = self._wanted_of_scripted(tree.named)

    @property
    def steady(self) -> bool:
        """Whether no hooks come and go but by the probes that are armed."""
        return self._never_fused and not self.compile_status.compiled

    def begin(self, armed: int) -> None:
        """Begin with the hooks of the armed probes; all others too until the first call, which may be compiled."""
        self._adjust(armed)
        self._plain.adjust(-1)
        self._reset_compiled()

    def arm(self, armed: int, again: bool = False) -> None:
        """Register the hooks of the armed probes, and remove the others. `again` says that the same were armed before.

        Once anything is compiled, all stay: a graph either has them or not, and asks when it runs.
        """
        status = self.compile_status
        if not status.compiled and status.refresh():
            self._adjust(-1)
            self._reset_compiled()
            if self.operations is not None:
                self.operations.visibility.invalidate()
        if status.compiled:
            status.guard()
        elif again and self._never_fused:
            return
        self._adjust(-1 if status.compiled else armed)

    def remove(self) -> None:
        """Remove every hook."""
        HIDING.end()
        for handle in self._step_handles:
            handle.remove()
        self._step_handles = []
        self._remove_taps()
        if self.compile_status.compiled:
            self._reset_compiled()
        self.compile_status.release()

    def unseen(self, names: dict[str, str]) -> dict[str, str]:
        """Return what was wanted but never observed, each with the reason; `names` may mean operations instead."""
        found = self._unseen_ports() | self._untappable | names
        if self.operations is None:
            return found
        if self.compile_status.ran:
            self.operations.visibility.hidden = COMPILED
        seen = self.operations.seen()
        return {text: why for text, why in found.items() if text not in seen} | self.operations.unseen()

    def _remove_taps(self) -> None:
        for handle in self._handles:
            handle.remove()
        for hooks in (*self._sets, *self._deciding):
            hooks.remove()
        if self.operations is not None:
            self.operations.close()
        self.operations = None
        self._plain = HookSet()
        self._handles, self._sets, self._deciding = [], [], []

    def _unseen_ports(self) -> dict[str, str]:
        ports, steps, counters = self.placement.ports, self._steps, self._observer.recorder.counters
        if steps.lost and any(port.seen for port in ports):
            counters.warn("root", unseen.NOT_CALLED)
        fused = {path for hooks in self._sets if hooks.was_fused for path in hooks.paths}
        hidden = compiled_code.graph_count() > 0 and not (self.compile_status.ran or steps.called)
        found = unseen.explain(ports, self._root(), fused, hidden)
        if self.compile_status.ran:
            found = unseen.inside_graphs(found)
        if not steps.lost and unseen.all_hidden(ports, found):
            counters.warn("compiled", unseen.ALL_HIDDEN)
        return found

    def _adjust(self, armed: int) -> None:
        for hooks in (*self._sets, *self._deciding):
            hooks.adjust(armed)

    def _root_called(self, begin_step: Callable[[], None]) -> None:
        """Begin a step; until it is known which modules compute, keep the hooks on them that tell.

        Not once anything is compiled: a graph would have to be compiled again without them.
        """
        begin_step()
        root, own = self._root(), self._own_outputs
        if own.undecided and root is not None:
            own.settle()
            if own.changed or self.compile_status.compiled:
                self._place_deciding(root)

    def _place_deciding(self, root: nn.Module) -> None:
        for hooks in self._deciding:
            hooks.remove()
        if self.compile_status.compiled:
            self._own_outputs.undecided = []
        tree = modules.walk(root)
        plain, named = HookSet(), {paths[0]: module for module, paths in tappable(tree.named).items()}
        fused = {path: self._layer_hooks(layer) for path, layer in modules.encoder_layers(tree.named)}
        for path, registers in self._own_outputs.hooks():
            if path in named:
                (enclosing([path], fused) or plain).add(named[path], registers, self._own_outputs.bits, [path])
        self._deciding = [plain, *fused.values()]
        recorder = self._observer.recorder
        armed = -1 if recorder.per_thread else recorder.current.armed
        for hooks in self._deciding:
            hooks.adjust(armed)

    def _reset_compiled(self) -> None:
        root = self._root()
        if root is not None:
            compiled_code.reset_compiled(root)

    def _layer_hooks(self, layer: nn.TransformerEncoderLayer) -> HookSet:
        counters = self._observer.recorder.counters
        return FusedLayerHooks(layer) if self._keep_fused else UnfusedLayerHooks(layer, counters)

    def _place_operations(
        self, root: nn.Module, names: Mapping[nn.Module, list[str]], fused: dict[str, HookSet]
    ) -> None:
        """Place the hooks that operations need, where probes want some."""
        patterns = op_patterns(self._plan, (path for paths in names.values() for path in paths))
        if patterns:
            self.operations = OpTaps(self._observer, self._steps, self._plan, patterns, self._keep_fused)
            around, handles = place_hooks(self.operations, root, names, fused)
            self._sets.append(around)
            self._handles += handles

    def _wanted_of_scripted(self, named: NamedModules) -> dict[str, str]:
        """Return the sites that probes want of scripted modules, which cannot have hooks."""
        types = TypeNames()
        found = [modules.candidate(path, m, types) for path, m in named if modules.is_scripted(m)]
        return {
            f"{candidate.path}:{port}": modules.SCRIPTED
            for candidate in found
            for port in candidate.ports
            if self._plan.port_for_named_value(self._observer.recorder, candidate, port)
        }
