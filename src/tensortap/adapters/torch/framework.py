"""PyTorch as one object: the adapter for a module, a function or a block, and the quick looks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from tensortap.adapters.batches import copied, host_arrays
from tensortap.adapters.model_check import ModelCheck, ModelQuestion
from tensortap.adapters.nested import call_with, values_in
from tensortap.adapters.protocol import (
    DEFAULT_OPTIONS,
    AdapterOptions,
    Doubles,
    ForwardPass,
    Framework,
    watched_by_default,
)
from tensortap.adapters.results import Captured, ModelIdentity, Origin
from tensortap.adapters.torch import metrics
from tensortap.adapters.torch.adapter import TorchAdapter, adapt
from tensortap.adapters.torch.capabilities import CAPABILITIES
from tensortap.adapters.torch.compile.receivers import CompiledNamedValues
from tensortap.adapters.torch.distributed import world
from tensortap.adapters.torch.forward import forward_passes, host_array
from tensortap.adapters.torch.model_check.check import model_check
from tensortap.adapters.torch.modules.nested import tensors_in
from tensortap.adapters.torch.modules.tensors import TensorObserver, without_torch_function
from tensortap.adapters.torch.nonfinite import origin
from tensortap.adapters.torch.ops.function import FunctionAdapter
from tensortap.adapters.torch.snapshot import unrestored_attributes
from tensortap.adapters.torch.state import as_step, copied_batch, preserved
from tensortap.adapters.verification import GRADIENT, VerificationSubject
from tensortap.distributed.ranks import World
from tensortap.errors import UnsupportedError
from tensortap.record.pending import PendingNumber
from tensortap.record.recorder import OpenStep, Point, Recorder
from tensortap.reduce.buffers import NO_VALUES
from tensortap.select.ports import OP_PORTS
from tensortap.select.probes import as_probes
from tensortap.select.sites import Candidate

_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")


class TorchFramework(Framework):
    """Modules, stages of a pipeline, functions and blocks of PyTorch."""

    capabilities = CAPABILITIES

    def adapter(self, model: Any, options: AdapterOptions = DEFAULT_OPTIONS) -> TorchAdapter | None:
        """Return the adapter for a module or a pipeline's stage."""
        return adapt(model, options)

    def function_adapter(
        self, function: Callable[..., Any] | None, options: AdapterOptions = DEFAULT_OPTIONS
    ) -> FunctionAdapter:
        """Return the adapter for a function, or for the block of code that follows."""
        return FunctionAdapter(function, options)

    def capture(self, model: nn.Module, inputs: Any, patterns: Sequence[Any]) -> Captured:
        """Call the model once and return copies of the tensors at the chosen sites."""
        found = Captured()
        recorder = Recorder(as_probes(patterns))
        found.output = _call_with_taps(model, inputs, TensorCatcher(recorder, found))
        return found

    @contextmanager
    def forward_passes(self, model: nn.Module, patterns: Sequence[Any], stop: bool) -> Iterator[ForwardPass]:
        """Yield a function that calls the model in evaluation mode; with `stop` no further than is wanted."""
        with forward_passes(model, patterns, stop) as run:
            yield run

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Seed PyTorch's generators too: that of the processor, and of GPUs where they are in use."""
        state = torch.get_rng_state()
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        gpus = torch.cuda.get_rng_state_all() if in_use else []
        torch.default_generator.manual_seed(seed)
        if gpus:
            torch.cuda.manual_seed_all(seed)
        try:
            with super().seeded(seed):
                yield
        finally:
            torch.set_rng_state(state)
            if gpus:
                torch.cuda.set_rng_state_all(gpus)

    def identity(self, model: nn.Module) -> ModelIdentity:
        """Return parameters, buffers, and the class and the settings of every module."""
        named = [*model.named_parameters(), *model.named_buffers()]
        arrays = {name: host_array(tensor) for name, tensor in named if not nn.parameter.is_lazy(tensor)}
        layers = (f"{path} {module._get_name()}({module.extra_repr()})" for path, module in model.named_modules())
        return ModelIdentity(arrays, _ADDRESS.sub("", "\n".join(layers)))

    def parameters_of_call(self, model: nn.Module) -> frozenset[str] | None:
        """Return the names of forward's parameters."""
        found = inspect.signature(model.forward).parameters.values()
        named = frozenset(p.name for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
        return named or None

    def sites_of_call(self, model: nn.Module, inputs: Any, sites: Sequence[Candidate]) -> list[Candidate]:
        """Call the model once: add the operations it did, in order, and learn which modules compute themselves."""
        lister = Lister(Recorder(as_probes(["op:*", watched_by_default])))
        with preserved(model):
            _call_with_taps(model, copied_batch(inputs), lister)
        outputs = {site for site, op in lister.places.items() if not op}
        known = [site._replace(default=True) if site.path in outputs else site for site in sites]
        return known + [Candidate(site, (op,), OP_PORTS) for site, op in lister.places.items() if op]

    @contextmanager
    def verification(self, model: nn.Module, batch: Any) -> Iterator[VerificationSubject]:
        """Yield the subject of a verification: forward and backward from one seed and state."""
        _refuse_meta(model, batch)
        with preserved(model) as restore:
            yield TorchSubject(model, as_step(model, batch), restore)

    def model_check(self, question: ModelQuestion) -> AbstractContextManager[ModelCheck]:
        """Return the checks of a module on one batch."""
        _refuse_meta(question.model, question.batch)
        return model_check(question)

    def locate_nonfinite(self, model: nn.Module, batch: Any) -> Origin | None:
        """Run one step and return the operation that made the first NaN or infinity."""
        _refuse_meta(model, batch)
        return origin.locate(model, batch)

    @contextmanager
    def isolated(self, model: nn.Module, backward: bool) -> Iterator[Callable[[Any], object]]:
        """Yield a function that calls the model, and where wanted differentiates the mean of its outputs."""

        def run(batch: Any) -> None:
            _refuse_meta(model, batch)
            if backward:
                model.zero_grad(set_to_none=True)
                as_step(model, batch)()
            else:
                with torch.no_grad():
                    call_with(model, copied_batch(batch))

        _refuse_meta(model, None)
        with preserved(model), torch.random.fork_rng(devices=_cuda_devices(model)):
            yield run

    def own_batch(self, batch: Any) -> Any:
        """Return a batch of any framework's arrays as tensors on the CPU; tensors stay as they are."""
        return copied(batch, _own_tensor)

    def compiled_values(self, see: Callable[[Any, str], object]) -> Callable[[Any, str], bool]:
        """Return what sees named values in code that torch.compile compiles."""
        return CompiledNamedValues(see)

    def number(self, value: Any) -> float | PendingNumber:
        """Return the number in a tensor, now or when it has come from its device."""
        return metrics.number(value) if isinstance(value, Tensor) else float(value)

    def world(self) -> World | None:
        """Return the rank, once there is a process group."""
        return world.world()

    def summed(self, numbers: Doubles) -> Doubles:
        """Return the sum over all ranks by one all-reduce on the default group."""
        return world.summed(numbers)


class TensorCatcher(TensorObserver):
    """Keep copies instead of reducing."""

    __slots__ = ("found",)

    def __init__(self, recorder: Recorder, found: Captured) -> None:
        super().__init__(recorder)
        self.found = found

    def take(self, point: Point, tensor: Tensor, step: OpenStep, recomputed: bool = False) -> int:
        """Copy a tensor under its site's name."""
        if point.probes and not recomputed:
            with without_torch_function():
                self.found.put(point.text, tensor.detach().clone())
        return -1


class Lister(TensorObserver):
    """Note which places there are."""

    __slots__ = ("places",)

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.places: dict[str, str] = {}

    def take(self, point: Point, tensor: Tensor, step: OpenStep, recomputed: bool = False) -> int:
        """Note the site and its operation."""
        if point.probes:
            self.places.setdefault(point.place.site, point.place.op)
        return -1


def _call_with_taps(model: nn.Module, inputs: Any, observer: TensorObserver) -> Any:
    adapter = TorchAdapter(model, AdapterOptions(fast_path="leave"))
    adapter.attach(observer.recorder, adapter.plan(observer.recorder.probes), observer)
    adapter.steps.explicit = True
    try:
        return call_with(model, inputs)
    finally:
        adapter.detach()


class TorchSubject(VerificationSubject):
    """A module, run forward and backward."""

    def __init__(self, model: nn.Module, step: Callable[[], Any], restore: Callable[[], None]) -> None:
        self._model = model
        self._step = step
        self._restore = restore

    def observe(self) -> dict[str, Tensor]:
        """Return a run's outputs, gradients, buffers, parameters and random state."""
        self._restore()
        model = self._model
        seen = {f"output{slot}": t.detach().clone() for slot, t in tensors_in(self._step())}
        seen |= {f"{GRADIENT}{name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        seen |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
        seen |= {f"parameter {name}": p.detach().clone() for name, p in model.named_parameters()}
        seen["random state"] = torch.get_rng_state()
        return seen

    def run(self) -> None:
        """Run once."""
        self._step()

    def prepare(self) -> None:
        """Put the state back."""
        self._restore()

    def traces(self) -> dict[str, Any]:
        """Return everything a careless tap could leave on a model."""
        return {
            f"{path or '(root)'}.{name}": list(value) if isinstance(value, dict) else type(value)
            for path, module in self._model.named_modules()
            for name, value in vars(module).items()
        } | {
            **{f"{name} hooks": list(p._backward_hooks or ()) for name, p in self._model.named_parameters()},
            "function modes": torch._C._len_torch_function_stack(),
        }

    def unrestored(self) -> list[str]:
        """Return the attributes that differ from run to run although the state was put back."""
        return unrestored_attributes(self._model, self.prepare, self.run)

    def same(self, a: Tensor, b: Tensor) -> bool:
        """Compare bit for bit, NaN equal to the same NaN."""
        if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
            return False
        if a.layout is not torch.strided:
            return torch.equal(a.to_dense(), b.to_dense())
        flat = (a.contiguous().reshape(-1), b.contiguous().reshape(-1))
        return torch.equal(*(t.view(torch.uint8) if t.numel() else t for t in flat))

    def apart(self, a: Tensor, b: Tensor) -> Any:
        """Return the largest difference of two elements."""
        return (a.double() - b.double()).abs().max() if a.shape == b.shape else "?"


def _refuse_meta(model: nn.Module, batch: Any) -> None:
    """Refuse tensors without values where values are compared."""
    given = (*model.parameters(), *model.buffers(), *(tensor for _, tensor in values_in(batch, Tensor)))
    if any(tensor.is_meta for tensor in given):
        raise UnsupportedError(NO_VALUES.format("ask again"))


def _cuda_devices(model: nn.Module) -> list[torch.device]:
    """Return the CUDA devices a model is on; it draws from their generators."""
    found = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return [device for device in found if device.type == "cuda"]


def _own_tensor(leaf: Any) -> Tensor | None:
    if isinstance(leaf, Tensor):
        return leaf
    array = host_arrays(leaf) if hasattr(leaf, "__array__") and hasattr(leaf, "dtype") else None
    return None if array is None else torch.from_numpy(np.array(array))


FRAMEWORK: Final = TorchFramework()
