"""Save and restore everything that a run of a module tree can change: structure first, then values.

A forward may register buffers, replace them by larger ones or other types, turn lazy parameters into real ones, and
keep tensors or counters in plain attributes. Taps may be on while a snapshot is put back, so hooks are left alone.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

_OWN: Final = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))
_CONTAINERS: Final = (list, dict, set, deque)
# Types of attributes that a forward may make and that can be removed safely.
_DATA: Final = (Tensor, int, float, complex, str, bytes, type(None), tuple, PackedSequence, *_CONTAINERS)
# Wrappers whose attributes mirror state of their own in C++.
_LEFT_ALONE: Final = ("torch.distributed", "torch.nn.parallel", "torch._dynamo")


class ModelSnapshot:
    """The state of a module tree."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [_ModuleSnapshot(module) for module in model.modules()]
        tensors = {id(t): t for module in self._modules for t in module.tensors()}
        self._values = [_TensorSnapshot(tensor) for tensor in tensors.values()]

    def restore(self) -> None:
        """Restore everything; errors are raised when all else is done."""
        errors: list[Exception] = []
        for restore in (*(m.restore for m in self._modules), *(v.restore for v in self._values)):
            try:
                restore()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


class _TensorSnapshot:
    """One parameter, buffer or tensor in an attribute: values, type, gradient."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._lazy = type(tensor) if is_lazy(tensor) else None
        self._kept = None if self._lazy else tensor.detach().clone()
        self._empty = (tensor.dtype, tensor.device)
        gradient = tensor.grad if tensor.is_leaf and not self._lazy else None
        self._gradient = None if gradient is None else (gradient, gradient.clone())

    def restore(self) -> None:
        tensor = self._tensor
        if self._lazy is not None:
            self._make_lazy(self._lazy)
            return
        assert self._kept is not None
        with torch.no_grad():
            if not _same_kind(tensor, self._kept):
                tensor.data = self._kept.clone()
            elif not _equal(tensor, self._kept):  # only what has changed is written: others may have saved it
                tensor.copy_(self._kept)
        if tensor.is_leaf and (tensor.requires_grad or tensor.grad is not None or self._gradient is not None):
            self._restore_gradient(tensor)

    def _restore_gradient(self, tensor: Tensor) -> None:
        """Restore the gradient as the same object: an optimizer or a bucket of DDP may hold it."""
        if self._gradient is None:
            tensor.grad = None
            return
        gradient, kept = self._gradient
        if not _same_kind(gradient, kept):
            tensor.grad = kept.clone()
            return
        if not _equal(gradient, kept):
            with torch.no_grad():
                gradient.copy_(kept)
        if tensor.grad is not gradient:
            tensor.grad = gradient

    def _make_lazy(self, kind: type[Tensor]) -> None:
        if not is_lazy(self._tensor):
            self._tensor.grad = None
            self._tensor.data = torch.empty(0, dtype=self._empty[0], device=self._empty[1])
            self._tensor.__class__ = kind


class _ModuleSnapshot:
    """One module: which parameters, buffers and children it has, its mode and its plain attributes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._class = type(module)
        self._training = module.training
        self._scripted = isinstance(module, torch.jit.ScriptModule)
        own = {} if self._scripted else vars(module)
        self._members = {name: dict(own[name]) for name in ("_parameters", "_buffers", "_modules") if name in own}
        self._not_persistent = set(own.get("_non_persistent_buffers_set", ()))
        self._attributes = {} if self._leave_attributes() else {n: v for n, v in own.items() if _is_plain(n, v)}
        self._contents = {name: _items(v) for name, v in self._attributes.items() if isinstance(v, _CONTAINERS)}
        self._lazy_hooks = dict(_lazy_hooks(module))

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors whose values are to be kept."""
        if self._scripted:
            yield from self._module.parameters(recurse=False)
            yield from self._module.buffers(recurse=False)
            return
        yield from (t for t in self._members["_parameters"].values() if t is not None)
        yield from (t for t in self._members["_buffers"].values() if t is not None)
        yield from (v for v in self._attributes.values() if isinstance(v, Tensor) and v.is_leaf)

    def restore(self) -> None:
        if self._scripted:
            self._module.training = self._training
            return
        own = vars(self._module)
        if type(self._module) is not self._class:
            self._module.__class__ = self._class
        for name, members in self._members.items():
            _put_back(own[name], members, replace=name != "_parameters" or not self._leave_attributes())
        if "_non_persistent_buffers_set" in own:
            own["_non_persistent_buffers_set"].clear()
            own["_non_persistent_buffers_set"].update(self._not_persistent)
        self._restore_attributes(own)
        own["training"] = self._training
        self._restore_lazy_hooks()

    def _restore_attributes(self, own: dict[str, Any]) -> None:
        if self._leave_attributes():
            return
        for name in [n for n, v in own.items() if _is_plain(n, v) and n not in self._attributes]:
            if isinstance(own[name], _DATA):
                del own[name]
        for name, value in self._attributes.items():
            if own.get(name, own) is not value:
                own[name] = value
            if name in self._contents:
                _refill(value, self._contents[name])

    def _restore_lazy_hooks(self) -> None:
        """Put back the hooks that lazy modules remove when they become real."""
        for hooks, (key, hook) in self._lazy_hooks.items():
            found = getattr(self._module, hooks)
            if key not in found:
                found[key] = hook
                if isinstance(found, OrderedDict):
                    found.move_to_end(key, last=False)

    def _leave_attributes(self) -> bool:
        return self._class.__module__.startswith(_LEFT_ALONE) or self._class.__name__.startswith("FSDP")


def _is_plain(name: str, value: Any) -> bool:
    """Return whether an attribute is the user's own: not PyTorch's tables, nor hooks, nor the mode."""
    return name not in _OWN and name != "training" and not (name.endswith("_hooks") or "_hooks_" in name)


def _items(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value)


def _refill(value: Any, items: Any) -> None:
    if _same_items(value, items):
        return
    value.clear()
    (value.extend if isinstance(value, (list, deque)) else value.update)(items)


def _same_items(value: Any, items: Any) -> bool:
    if isinstance(value, dict):
        return list(value) == list(items) and all(value[key] is items[key] for key in items)
    return len(value) == len(items) and all(a is b for a, b in zip(value, items, strict=True))


def _put_back(now: dict[str, Any], was: dict[str, Any], replace: bool) -> None:
    for name in now.keys() - was.keys():
        del now[name]
    for name, value in was.items():
        if name not in now or now[name] is None or value is None or (replace and now[name] is not value):
            now[name] = value


def _lazy_hooks(module: nn.Module) -> Iterator[tuple[str, tuple[int, Any]]]:
    """Yield the hooks by which a lazy module becomes a real one, by the table that each is in."""
    if not isinstance(module, LazyModuleMixin) or not module.has_uninitialized_params():
        return
    first: Any = getattr(module, "_initialize_hook", None)
    load: Any = getattr(module, "_load_hook", None)
    tables = [(first, "_forward_pre_hooks"), (first, "_forward_pre_hooks_with_kwargs")]
    for handle, table in (*tables, (load, "_load_state_dict_pre_hooks")):
        if handle is not None and handle.id in getattr(module, table):
            yield table, (handle.id, getattr(module, table)[handle.id])


def _same_kind(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and a.layout == b.layout


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, NaN to NaN: weights that are NaN already have not changed."""
    floats = a.is_floating_point() or a.is_complex()
    return torch.equal(a, b) or (floats and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def unrestored_attributes(model: nn.Module, restore: Callable[[], None], run: Callable[[], None]) -> list[str]:
    """Return the plain attributes that a run changes and that a snapshot does not put back."""
    restore()
    before = _fingerprints(model)
    run()
    restore()
    after = _fingerprints(model)
    return [name for name in after if after[name] != before.get(name)]


def _fingerprints(model: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}".lstrip("."): _fingerprint(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if _is_plain(name, value) and not isinstance(value, nn.Module)
    }


def _fingerprint(value: Any) -> Any:
    try:
        return pickle.dumps(value)
    except Exception:  # what cannot be pickled is compared by its attributes
        return repr(vars(value)) if hasattr(value, "__dict__") else None
