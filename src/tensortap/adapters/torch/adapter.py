"""Taps on a PyTorch module: put on, kept out of the way of fused paths, and taken off without a trace."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any, Final

from torch import nn
from torch.utils.hooks import RemovableHandle

from tensortap.adapters.plan import Plan
from tensortap.adapters.protocol import DEFAULT_OPTIONS, Adapter, AdapterOptions
from tensortap.adapters.torch.autograd.members import MemberPorts, Owner, PendingGradients
from tensortap.adapters.torch.autograd.optimizers import OptimizerHooks
from tensortap.adapters.torch.autograd.parameters import ParameterTaps
from tensortap.adapters.torch.capabilities import CAPABILITIES
from tensortap.adapters.torch.compile import code as compiled_code
from tensortap.adapters.torch.compile.code import ModelCompileStatus
from tensortap.adapters.torch.distributed.fully_shard import FullyShardedParameters
from tensortap.adapters.torch.distributed.pipeline import is_stage, tree_of
from tensortap.adapters.torch.distributed.shards import ShardRegistry
from tensortap.adapters.torch.distributed.world import world
from tensortap.adapters.torch.modules import tree as modules
from tensortap.adapters.torch.modules import unseen
from tensortap.adapters.torch.modules.hookset import FusedLayerHooks, HookSet, UnfusedLayerHooks
from tensortap.adapters.torch.modules.named_values import NamedValues
from tensortap.adapters.torch.modules.placement import HookPlacement, register_on_root, tappable, within
from tensortap.adapters.torch.modules.roots import RootForwardHook, RootForwardPreHook, RootReceiver
from tensortap.adapters.torch.modules.tensors import TensorObserver, observer_for
from tensortap.adapters.torch.ops.hooks import place_hooks
from tensortap.adapters.torch.ops.names import known_operations
from tensortap.adapters.torch.ops.taps import OpTaps, op_patterns
from tensortap.adapters.torch.ops.visibility import COMPILED
from tensortap.adapters.torch.steps import TorchStepDetector
from tensortap.adapters.torch.threads import SharedThreads
from tensortap.errors import UnsupportedError
from tensortap.record.recorder import OpenStep, Recorder
from tensortap.select.ports import MEMBER_PORTS
from tensortap.select.sites import Candidate

EXPORTED: Final = (
    "an ExportedProgram is not what is called. Watch a module: tensortap.watch(torch.export.unflatten(program)) shows "
    "the model's modules, program.module() only what goes in and comes out"
)
_FAST_PATHS: Final = ("keep", "leave")


def adapt(model: Any, options: AdapterOptions = DEFAULT_OPTIONS) -> TorchAdapter | None:
    """Return the adapter for a module or a pipeline's stage, or None for other objects that PyTorch defines."""
    if is_stage(model):
        root, called = tree_of(model)
        return TorchAdapter(root, options, called=called)
    if type(model).__name__ == "ExportedProgram":
        raise UnsupportedError(EXPORTED)
    return TorchAdapter(modules.unwrapped(model), options) if isinstance(model, nn.Module) else None


class TorchAdapter(Adapter):
    """Taps on one module tree. It holds no reference that would keep the model alive."""

    capabilities = CAPABILITIES
    steps: TorchStepDetector

    def __init__(
        self, root: nn.Module, options: AdapterOptions = DEFAULT_OPTIONS, *, called: nn.Module | None = None
    ) -> None:
        if options.fast_path not in _FAST_PATHS:
            raise UnsupportedError(f"fast_path must be 'keep' or 'leave', got {options.fast_path!r}")
        self.fast_path, self.origins = options
        self._root = weakref.ref(root)
        self._called = self._root if called is None else weakref.ref(called)
        self._tree = None if called in (None, root) else root  # a tree made for the names, which nobody else holds
        self._handles: list[RemovableHandle] = []
        self._sets: list[HookSet] = []
        self._threads = SharedThreads()

    def candidates(self) -> list[Candidate]:
        """Every module and parameter that can be tapped."""
        root = self._model()
        if modules.is_scripted(root):
            raise UnsupportedError(f"the {type(root).__name__} given to watch() cannot be watched: {modules.SCRIPTED}")
        return modules.candidates_of(root)

    def untappable(self) -> dict[str, str]:
        """What TorchScript owns."""
        return modules.untappable(self._model())

    def describe(self) -> dict[str, Any]:
        """The module tree."""
        root = self._model()
        return {"framework": "torch", "class": type(self._called()).__name__, "modules": modules.describe_tree(root)}

    def attach(self, recorder: Recorder, plan: Plan, observer: TensorObserver | None = None) -> None:
        """Put hooks on what the probes want, and two on the root to find steps."""
        root = self._model()
        self._recorder, self._plan = recorder, plan
        self._observer = observer or observer_for(recorder)
        owners, sharded = modules.owners_of(root), FullyShardedParameters(root)
        self.steps = TorchStepDetector(recorder, PendingGradients(owners, sharded).any)
        self._compile_status = ModelCompileStatus(root)
        self._names = NamedValues(self._observer, self.steps, plan, self._compile_status)
        self._placement = HookPlacement(self._observer, self.steps, plan, self._compile_status, self.origins)
        called = root if (found := self._called()) is None else found
        receiver = RootReceiver(self.steps, self.arm, called, self._compile_status)
        self._handles = register_on_root(called, RootForwardPreHook(receiver), RootForwardHook(receiver))
        fused = {path: self._fused_set(layer) for path, layer in modules.encoder_layers(root)}
        plain = HookSet()
        for module, puts, bits, paths in self._placement.hooks_of(root):
            inside = next((hooks for path, hooks in fused.items() if within(paths, path)), None)
            if module is called and inside is None:  # its call has begun when a step is found to begin
                self._handles += [put(module) for put in puts]
            else:
                (inside or plain).add(module, puts, bits, paths)
        self._sets = [plain, *fused.values()]
        self._ops = self._attach_ops(root, fused)
        self._parameters = self._attach_parameters(owners, sharded)
        self._optimizers = OptimizerHooks(self.steps, self._parameters)
        self._refused = self._scripted(root)
        self._learn_shards()
        self._adjust(self._recorder.current.armed)
        self._parameters.arm(self._recorder.current.armed)
        plain.adjust(-1)  # until the first call: if that is compiled, it must find them
        compiled_code.reset_compiled(root)

    def arm(self) -> None:
        """Hooks are on only while a probe may want the open step; once threads have steps of their own, always.

        Once anything is compiled, always too: a graph has them or has not, and asks when it runs.
        """
        self._learn_shards()
        compile_status, root = self._compile_status, self._root()
        if not compile_status.compiled and compile_status.refresh() and root is not None:
            self._adjust(-1)
            compiled_code.reset_compiled(root)
            if self._ops is not None:
                self._ops.visibility.invalidate()
        if compile_status.compiled:
            compile_status.guard()
        armed = -1 if self.steps.spread else self._recorder.current.armed
        if armed:
            self._threads.update()
        self._adjust(-1 if compile_status.compiled else armed)
        self._parameters.arm(armed)

    def _learn_shards(self) -> None:
        """Where there are several ranks, each place's first tensor tells which part of it is here."""
        shards, root = self._observer.shards, self._root()
        if shards is not None:
            shards.root_called()
        elif root is not None and (here := world()) is not None and here.size > 1:
            self._observer.shards = ShardRegistry(self._recorder.names, root)

    def detach(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        for hooks in self._sets:
            hooks.remove()
        if self._ops is not None:
            self._ops.close()
        self._optimizers.remove()
        self._parameters.remove()
        for leaf in self._observer.leaves:
            leaf.remove()
        self._handles, self._sets, self._observer.leaves = [], [], []
        root = self._root()
        if self._compile_status.compiled and root is not None:
            compiled_code.reset_compiled(root)
        self._compile_status.release()

    def enter(self, step: OpenStep | None) -> OpenStep | None:
        """Give the calling thread a step of its own."""
        before = self.steps.enter(step)
        self.arm()
        return before

    def collect(self, step: OpenStep) -> None:
        """Record parameters and gradients that no optimizer step has shown."""
        if step is self._recorder.current:
            self._parameters.record_rest(step)
        done = [leaf for leaf in self._observer.leaves if leaf.step is step]
        if done:
            self._observer.leaves = [leaf for leaf in self._observer.leaves if leaf.step is not step]
            for leaf in done:
                leaf.remove()

    def named(self, name: str, value: Any) -> bool:
        """A value the user named, and its gradient."""
        return self._names.record(name, value)

    def unseen(self) -> dict[str, str]:
        """Modules, ports and names that were wanted but never seen."""
        if self.steps.lost and any(port.seen for port in self._placement.ports):
            self._recorder.counters.warn("root", unseen.NOT_CALLED)
        fused = {path for hooks in self._sets if getattr(hooks, "was_fused", False) for path in hooks.paths}
        hidden = compiled_code.graph_count() > 0 and not (self._compile_status.ran or self.steps.called)
        found = unseen.explain(self._placement.ports, self._root(), fused, hidden)
        if self._compile_status.ran:
            found = unseen.inside_graphs(found)
        if not self.steps.lost and unseen.all_hidden(self._placement.ports, found):
            self._recorder.counters.warn("compiled", unseen.ALL_HIDDEN)
        found |= self._refused | self._names.unseen()
        if self._ops is None:
            return found
        if self._compile_status.ran:
            self._ops.visibility.hidden = COMPILED
        return {text: why for text, why in found.items() if text not in self._ops.seen()} | self._ops.unseen()

    def operations(self) -> Collection[str]:
        """The names of operations that patterns may mean."""
        return known_operations()

    def _model(self) -> nn.Module:
        root = self._root()
        if root is None:
            raise ReferenceError("the watched model is gone")
        return root

    def _adjust(self, armed: int) -> None:
        for hooks in self._sets:
            hooks.adjust(armed)

    def _fused_set(self, layer: nn.TransformerEncoderLayer) -> HookSet:
        return FusedLayerHooks(layer) if self.fast_path == "keep" else UnfusedLayerHooks(layer, self._recorder.counters)

    def _attach_ops(self, root: nn.Module, fused: dict[str, HookSet]) -> OpTaps | None:
        """Look at operations, where probes want some."""
        patterns = op_patterns(self._plan, [path for paths in tappable(root).values() for path in paths])
        if not patterns:
            return None
        taps = OpTaps(self._observer, self.steps, self._plan, patterns, self.fast_path == "keep")
        around, handles = place_hooks(taps, root, fused)
        self._sets.append(around)
        self._handles += handles
        return taps

    def _scripted(self, root: nn.Module) -> dict[str, str]:
        """What the probes would want if it could be tapped."""
        found = [modules.candidate(path, m) for path, m in modules.modules_of(root) if modules.is_scripted(m)]
        return {
            f"{candidate.path}:{port}": modules.SCRIPTED
            for candidate in found
            for port in candidate.ports
            if self._plan.port_for_named_value(self._recorder, candidate, port)
        }

    def _attach_parameters(self, owners: dict[str, Owner], sharded: FullyShardedParameters) -> ParameterTaps:
        ports = {
            kind: [port for name in owners if (port := self._placement.port(name, kind)) is not None]
            for kind in MEMBER_PORTS
        }
        return ParameterTaps(self._observer, self.steps, MemberPorts(owners, ports, sharded))
