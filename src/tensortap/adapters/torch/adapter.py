"""The adapter of a PyTorch module: it puts the pieces together that observe one model."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any, Final

from torch import nn

from tensortap.adapters.plan import Plan
from tensortap.adapters.protocol import DEFAULT_OPTIONS, Adapter, AdapterOptions
from tensortap.adapters.torch.attachment import ModelHooks
from tensortap.adapters.torch.autograd.members import MemberPorts, Owner, PendingGradients
from tensortap.adapters.torch.autograd.optimizers import OptimizerHooks
from tensortap.adapters.torch.autograd.parameters import ParameterTaps
from tensortap.adapters.torch.capabilities import CAPABILITIES
from tensortap.adapters.torch.context.recorder import CONTEXT
from tensortap.adapters.torch.distributed.fully_shard import FullyShardedParameters
from tensortap.adapters.torch.distributed.pipeline import is_stage, tree_of
from tensortap.adapters.torch.distributed.shards import ShardRegistry
from tensortap.adapters.torch.distributed.world import has_group, world
from tensortap.adapters.torch.modules import tree as modules
from tensortap.adapters.torch.modules.named_values import NamedValues
from tensortap.adapters.torch.modules.tensors import TensorObserver, observer_for
from tensortap.adapters.torch.ops.names import known_operations
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
    locates_backward = True
    steps: TorchStepDetector
    changes_in_calls = True

    def __init__(
        self, root: nn.Module, options: AdapterOptions = DEFAULT_OPTIONS, *, called: nn.Module | None = None
    ) -> None:
        self.options = options
        self._root = weakref.ref(root)
        self._called = self._root if called is None else weakref.ref(called)
        self._tree = None if called in (None, root) else root  # a tree made for the names, which nobody else holds
        self._threads = SharedThreads()
        self._armed: int | None = None  # the probes that hooks are registered for, once a step has begun
        self._asked = False  # the root has been called since a step ended

    def candidates(self) -> list[Candidate]:
        """Return every module, parameter and buffer that can be tapped."""
        root = self._model()
        if modules.is_scripted(root):
            raise UnsupportedError(f"the {type(root).__name__} given to watch() cannot be watched: {modules.SCRIPTED}")
        return modules.candidates_of(root)

    def untappable(self) -> dict[str, str]:
        """Return the modules that cannot be tapped, each with the reason."""
        return modules.untappable(self._model())

    def operations(self) -> Collection[str]:
        """Return the names of operations that patterns may mean."""
        return known_operations()

    def describe(self) -> dict[str, Any]:
        """Return the module tree."""
        root = self._model()
        return {"framework": "torch", "class": type(self._called()).__name__, "modules": modules.describe_tree(root)}

    def attach(self, recorder: Recorder, plan: Plan, observer: TensorObserver | None = None) -> None:
        """Put hooks on what the probes want, and two on the root to find steps."""
        root = self._model()
        self._recorder = recorder
        self._observer = observer or observer_for(recorder)
        tree = modules.walk(root)
        owners, sharded = modules.owners_of(tree.named), FullyShardedParameters(root)
        self.steps = TorchStepDetector(recorder, PendingGradients(owners, sharded).any)
        self._hooks = ModelHooks(tree, self._observer, self.steps, plan, self.options)
        self._names = NamedValues(self._observer, self.steps, plan, self._hooks.compile_status)
        self._parameters = ParameterTaps(self._observer, self.steps, self._members(plan, owners, sharded))
        # From here on another thread may call the model: what its hooks ask for is there.
        self._hooks.register(tree, root if (called := self._called()) is None else called, self._root_called)
        self._optimizers = OptimizerHooks(self.steps, self._parameters)
        if self.options.context:
            CONTEXT.join(recorder.events, self)
            CONTEXT.add_model(root, "", self._called())
        self._learn_shards()
        self._parameters.arm(recorder.current.armed)
        self._hooks.begin(recorder.current.armed)

    def change(self, recorder: Recorder, plan: Plan) -> None:
        """Replace all hooks but those that find steps. What is compiled is compiled again."""
        root, called = self._model(), self._called()
        tree = modules.walk(root)
        self._hooks.change(plan, tree, root if called is None else called)
        self._names = NamedValues(self._observer, self.steps, plan, self._hooks.compile_status)
        self._parameters.members = self._members(plan, modules.owners_of(tree.named), FullyShardedParameters(root))
        self._armed = None
        self.arm()

    def arm(self) -> None:
        """Keep hooks only while a probe may want the open step; once threads have steps of their own, always.

        Mostly a step is wanted as the one before it was, and the root's next call asks the rest.
        """
        armed = -1 if self._recorder.per_thread else self._recorder.current.armed
        asked, self._asked = self._asked, False
        if not (asked and armed == self._armed and self._hooks.steady and self._observer.shards is None):
            self._arm(armed)

    def _root_called(self) -> None:
        self._arm(-1 if self._recorder.per_thread else self._recorder.current.armed)
        self._asked = True

    def _arm(self, armed: int) -> None:
        several = has_group()
        if several:
            self._learn_shards()
        if armed:
            self._threads.update()
        again, self._armed = armed == self._armed, armed
        self._hooks.arm(armed, again)
        if several or not again:
            self._parameters.arm(armed)

    def optimizer_started(self, optimizer: Any) -> None:
        """Note an optimizer's step that had begun when the model was met: by its closure."""
        self._optimizers.started(optimizer)

    def detach(self) -> None:
        """Remove every hook."""
        CONTEXT.leave(self)
        self._hooks.remove()
        self._optimizers.remove()
        self._parameters.remove()
        for leaf in self._observer.leaves:
            leaf.remove()
        self._observer.leaves = []

    def enter(self, step: OpenStep | None) -> OpenStep | None:
        """Give the calling thread a step of its own, or take it away; return what it had before."""
        before = self.steps.enter(step)
        self.arm()
        return before

    def collect(self, step: OpenStep) -> None:
        """Record parameters and gradients that no optimizer step has shown."""
        if step.idle:
            return
        if step is self._recorder.current:
            self._parameters.record_rest(step)
        origins = self._hooks.placement.origins
        if origins is not None:  # of a non-finite value, known only now
            origins.collect(step)
        if not self._observer.leaves:
            return
        done = [leaf for leaf in self._observer.leaves if leaf.step is step]
        if done:
            self._observer.leaves = [leaf for leaf in self._observer.leaves if leaf.step is not step]
            for leaf in done:
                leaf.remove()

    def named(self, name: str, value: Any) -> bool:
        """Record a value the user named, and its gradient."""
        return self._names.record(name, value)

    def unseen(self) -> dict[str, str]:
        """Return the sites and names that were wanted but never observed, each with the reason."""
        return self._hooks.unseen(self._names.unseen())

    def _members(self, plan: Plan, owners: dict[str, Owner], sharded: FullyShardedParameters) -> MemberPorts:
        """Return the ports of parameters and buffers that probes want."""
        placement = self._hooks.placement
        ports = {
            kind: [port for name in owners if (port := placement.port(name, kind)) is not None]
            for kind in plan.kinds(MEMBER_PORTS)
        }
        return MemberPorts(owners, ports, sharded)

    def _model(self) -> nn.Module:
        root = self._root()
        if root is None:
            raise ReferenceError("the watched model is gone")
        return root

    def _learn_shards(self) -> None:
        """Learn, on several ranks, from each site's first tensor which shard of it this rank holds."""
        shards, root = self._observer.shards, self._root()
        if shards is not None:
            shards.root_called()
        elif root is not None and (here := world()) is not None and here.size > 1:
            self._observer.use_shards(ShardRegistry(self._recorder.names, root))
