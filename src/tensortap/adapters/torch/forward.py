"""Call a module with one batch after another and pass on the tensors at chosen sites, without running what follows.

The first call runs to its end and shows in which order the sites come. From then on a call is left at the last of
them by an exception of our own, which is caught around the call. It is no `Exception`, so `except Exception` in a
model does not see it; a model that catches everything is never left early again. Nor is one left early that did not
reach a chosen module in the first call, or that changed a buffer in it: what follows may be needed then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tensortap.adapters.batches import copied
from tensortap.adapters.nested import call_with
from tensortap.adapters.protocol import AdapterOptions, ForwardPass, See
from tensortap.adapters.rng import preserve_rng_state
from tensortap.adapters.torch.adapter import TorchAdapter
from tensortap.adapters.torch.modules import tree
from tensortap.adapters.torch.modules.tensors import TensorObserver, without_torch_function
from tensortap.adapters.torch.modules.values import values_of
from tensortap.errors import UnsupportedError
from tensortap.record.recorder import OpenStep, Point, Recorder
from tensortap.select.probes import as_probes

_MORE: Final = (
    "some batches reach sites that the first one does not ({}): name the sites exactly, or begin with a batch that "
    "reaches them all, and remove what was written"
)
_MOST_BUFFERS: Final = 64_000_000  # bytes of buffers that are copied, so that what a forward pass changes can be undone
_CERTAIN: Final = 16  # from here on every call whose number is a power of two runs in full too, to be sure
_NATIVE: Final = {torch.bfloat16: ml_dtypes.bfloat16}


class ForwardStopped(BaseException):
    """Leave a forward pass whose remaining part nobody needs."""


class SiteReader(TensorObserver):
    """Pass tensors on instead of recording them, and leave the forward pass after the last."""

    __slots__ = ("_calls", "_see", "_wanted", "failure", "order", "stopped")

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.begin(lambda site, values: None, frozenset())

    def begin(self, see: See, wanted: frozenset[str]) -> None:
        """Prepare for a call, to be left when all the wanted sites were passed on; with none of them, never."""
        self._see = see
        self._wanted = wanted
        self._calls: Counter[str] = Counter()
        self.order: list[str] = []
        self.failure: Exception | None = None
        self.stopped = False

    def take(self, point: Point, tensor: Tensor, step: OpenStep, recomputed: bool = False) -> int:
        """Pass a tensor on under its site's name; a second call's has `#1` behind it."""
        if not point.probes or recomputed or self.stopped:
            return -1
        again = self._calls[point.text]
        self._calls[point.text] += 1
        site = f"{point.text}#{again}" if again else point.text
        self.order.append(site)
        try:
            with without_torch_function():
                self._see(site, host_array(tensor))
        except Exception as error:  # hooks count errors and go on; this one is the caller's
            self.failure = error
        self.stopped = self.failure is not None or self._wanted == frozenset(self.order)
        if self.stopped:
            raise ForwardStopped
        return -1


class TorchForward:
    """Call a module whose hooks are on."""

    def __init__(self, model: nn.Module, reader: SiteReader, stop: bool, chosen: frozenset[str]) -> None:
        self._model = model
        self._reader = reader
        self._stop = stop
        self._chosen = chosen  # the ports of modules that the patterns name, `path:port`
        self._wanted: frozenset[str] = frozenset()
        self._count = 0
        self._device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
        floats = list(dict.fromkeys(p.dtype for p in model.parameters() if p.is_floating_point()))
        # Python's numbers are float64, as those of most files: where no weight is, they are taken for the model's own.
        self._float = floats[0] if floats and torch.float64 not in floats else None

    def __call__(self, batch: Any, see: See) -> None:
        """Call the module with a batch."""
        in_full = not self._wanted or (self._count >= _CERTAIN and self._count & (self._count - 1) == 0)
        self._count += 1
        self._reader.begin(see, frozenset() if in_full or not self._stop else self._wanted)
        buffers = self._buffers() if in_full else ()
        try:
            call_with(self._model, copied(batch, self._to_device))
        except ForwardStopped:
            pass
        else:
            self._stop &= not self._reader.stopped  # the model caught what was to leave it
        if self._reader.failure is not None:
            raise self._reader.failure
        if in_full and self._stop:
            self._learn(frozenset(self._reader.order), changed=self._buffers() != buffers)

    def _learn(self, sites: frozenset[str], changed: bool) -> None:
        if self._wanted and (more := sites - self._wanted):
            raise UnsupportedError(_MORE.format(", ".join(sorted(more))))
        self._wanted = sites
        again = any("#" in site for site in sites)  # called again and again: how often, the data may decide
        missing = any(not any(_is_of(site, port) for site in sites) for port in self._chosen)
        if again or missing or changed:  # another batch may reach what is missing; a buffer is for the next batch
            self._stop = False

    def _buffers(self) -> tuple[tuple[int, int], ...]:
        """Return what changes when a buffer is written to, or replaced."""
        return tuple((id(b), 0 if b.is_inference() else b._version) for b in self._model.buffers())

    def _to_device(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(np.array(value).view(np.uint16)).view(torch.bfloat16).to(self._device)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            given = torch.from_numpy(value if value.flags.writeable else value.copy())
            return given.to(self._device, self._float if given.dtype == torch.float64 else None)
        return value.to(self._device) if isinstance(value, Tensor) else None


@contextmanager
def forward_passes(model: nn.Module, patterns: Sequence[Any], stop: bool) -> Iterator[ForwardPass]:
    """Put the hooks on for the time of a block, in which the model is in evaluation mode and builds no graph."""
    adapter = TorchAdapter(tree.unwrapped(model), AdapterOptions(fast_path="leave"))
    reader = SiteReader(Recorder(as_probes(patterns)))
    plan = adapter.plan(reader.recorder.probes)
    adapter.attach(reader.recorder, plan, reader)
    adapter.steps.explicit = True
    training = [module for module in model.modules() if module.training]
    restore_buffers = _preserve_buffers(model)
    seed, restore_rng_state = torch.get_rng_state(), preserve_rng_state()
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            chosen = frozenset(f"{path}:{port}" for path, port in plan.ports if port in ("input", "output"))
            yield TorchForward(model, reader, stop and not tree.compiled_paths(model), chosen)
    finally:
        adapter.detach()
        restore_buffers()
        for module in training:
            module.training = True
        torch.set_rng_state(seed)
        restore_rng_state()


def _preserve_buffers(model: nn.Module) -> Callable[[], None]:
    """Keep the buffers as they are now; the function given puts back what was written to, or replaced.

    Of buffers beyond a total size only replacing is undone: they are weights, as those of quantized layers.
    """
    kept: list[tuple[nn.Module, str, Tensor | None, Tensor | None, int]] = []
    left = _MOST_BUFFERS
    for module in model.modules():
        for name, buffer in module._buffers.items():
            copy = None
            if buffer is not None and not buffer.is_inference() and buffer.nbytes <= left:
                copy, left = buffer.detach().clone(), left - buffer.nbytes
            kept.append((module, name, buffer, copy, 0 if copy is None or buffer is None else buffer._version))

    def put_back() -> None:
        for module, name, buffer, copy, version in kept:
            if name in module._buffers and module._buffers[name] is not buffer:
                module._buffers[name] = buffer
            if buffer is not None and copy is not None and buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(copy)

    return put_back


def _is_of(site: str, port: str) -> bool:
    """Return whether a site is one of a port's: the port itself, something in what passes there, or a later call.

    >>> _is_of("fc:output[0]#1", "fc:output"), _is_of("fc:output_mask", "fc:output")
    (True, False)
    """
    return site == port or (site.startswith(port) and site[len(port)] in ".[#")


def host_array(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor's values as an array that shares its memory where it can."""
    plain = values_of(tensor)
    if plain is None:
        raise UnsupportedError(f"a tensor of {tuple(tensor.shape)} has no values here (it is on the meta device)")
    plain = plain.cpu().resolve_conj().resolve_neg()
    if (native := _NATIVE.get(plain.dtype)) is not None:
        return plain.contiguous().view(torch.uint16).numpy().view(native)
    return plain.numpy()
