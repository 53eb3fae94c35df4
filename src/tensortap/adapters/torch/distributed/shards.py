"""Which part of a tensor this rank holds, as far as PyTorch tells: asked of the tensor, never of another rank."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tensortap.distributed.shards import Shard
from tensortap.errors import TensortapError
from tensortap.record.recorder import Point
from tensortap.record.table import Names
from tensortap.select.ports import PARAMETER_PORTS, RESULT_PORTS
from tensortap.types import Place


class Layout(NamedTuple):
    """How a tensor lies over a mesh."""

    mesh: Any
    placements: tuple[Any, ...]

    def widened(self) -> Layout:
        """On the whole mesh that this one may be a side of: along its other sides a parameter is copied."""
        root = self.mesh._get_root_mesh() if hasattr(self.mesh, "_get_root_mesh") else self.mesh
        own = dict(zip(self.mesh.mesh_dim_names or (), self.placements, strict=False))
        sides = root.mesh_dim_names or ()
        return Layout(root, tuple(own.get(side, "R") for side in sides)) if own.keys() < set(sides) else self

    def part(self, shape: Iterable[int]) -> Shard | None:
        """This rank's part of a tensor that is laid out so; nothing for a rank that is not on the mesh."""
        at = self.mesh.get_coordinate()
        if at is None:
            return None
        names = self.mesh.mesh_dim_names or [f"dim{i}" for i in range(self.mesh.ndim)]
        sizes = dict(zip(names, self.mesh.shape, strict=True))
        on = tuple(self.mesh.mesh.flatten().tolist())
        return Shard(sizes, tuple(at), tuple(map(str, self.placements)), tuple(shape), on)


class Parts:
    """Notes the part that a place holds the first time something is seen there.

    A DTensor tells itself; a local tensor that was made from one tells by its node in the graph or, where no graph is
    made, by the parallel style of its module. A parameter is a copy where DistributedDataParallel has it, or where it
    is plain beside others that are DTensors.
    """

    def __init__(self, names: Names, root: nn.Module) -> None:
        self.known: set[int] = set()
        self._names = names
        self._styles = dict(_styles(root))
        self._copies: list[tuple[str, Shard]] = list(_wrapped(root))
        known = next((layout for p in root.parameters() if (layout := layout_of(p)) is not None), None)
        self._beside = None if known is None else _everywhere(known.widened().mesh)

    def inside(self) -> None:
        """The root is being called: if DistributedDataParallel calls it, its parameters are copies."""
        active = DistributedDataParallel._active_ddp_module
        if active is not None and not self._copies:
            self._copies.append(("", _copy(active)))
            self.known.clear()

    def look(self, point: Point, tensor: Tensor) -> None:
        """The first tensor at a place."""
        self.known.add(point.key)
        part = self.of(point.place, tensor)
        if part is not None:
            self._names.parts[point.place] = part

    def note(self, point: Point, tensor: Tensor) -> None:
        """The gradient of this tensor will be recorded at a place, and is laid out as it is."""
        layout = layout_of(tensor)
        if layout is not None and point.key not in self.known:
            part = layout.part(tensor.shape)
            if part is not None:
                self.known.add(point.key)
                self._names.parts[point.place] = part

    def of(self, place: Place, tensor: Tensor) -> Shard | None:
        """Which part a tensor at a place is, if that can be known."""
        if place.port not in PARAMETER_PORTS:
            return self._of_value(place, tensor)
        layout = layout_of(tensor)
        found = None if layout is None else layout.widened().part(_whole(tensor))
        copy = next((part for prefix, part in self._copies if place.site.startswith(prefix)), None)
        if found is None:
            found = self._beside and self._beside._replace(shape=tuple(tensor.shape))
        if found is None or copy is None:
            return found or (copy and copy._replace(shape=tuple(tensor.shape)))
        both = {**copy.mesh, **found.mesh}
        return Shard(both, copy.at + found.at, copy.placements + found.placements, found.shape)

    def _of_value(self, place: Place, tensor: Tensor) -> Shard | None:
        layout = layout_of(tensor)
        if layout is not None:
            return layout.part(_whole(tensor))
        style = self._styles.get(place.site) if place.port in RESULT_PORTS and not place.slot else None
        return style.part(()) if style else None


def is_dtensor(value: Any) -> bool:
    """Whether a tensor is one of several parts. Asked without importing what most people never import."""
    return hasattr(value, "to_local") and hasattr(value, "device_mesh")


def layout_of(tensor: Any) -> Layout | None:
    """How a tensor, or what it was made from by `to_local()`, lies over ranks."""
    if is_dtensor(tensor):
        return Layout(tensor.device_mesh, tuple(tensor.placements))
    spec = getattr(tensor.grad_fn, "dtensor_spec", None)
    return None if spec is None else Layout(spec.mesh, tuple(spec.placements))


def local_of(tensor: Any) -> Any:
    """What this rank holds of a tensor. What is still on its way is waited for; nothing is sent or gathered."""
    if hasattr(tensor, "to_local"):
        with torch.no_grad():
            tensor = tensor.to_local()
    return tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor


def given(tensor: Tensor) -> Any:
    """The tensor as a function of the user's gets it. Of a DTensor the local part: its mean() would be a collective."""
    return local_of(tensor).detach() if is_dtensor(tensor) else tensor.detach()


def added(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two tensors without communication, which sharded ones have only when they are laid out alike."""
    if not (is_dtensor(a) or is_dtensor(b)):
        return a + b
    one, other = layout_of(a), layout_of(b)
    if one is None or other is None or one != other:
        raise TensortapError("its parts are laid out differently and cannot be added without communication")
    make: Any = type(a)
    local = local_of(a) + local_of(b)
    total: Tensor = make.from_local(local, one.mesh, one.placements, run_check=False, shape=a.shape, stride=a.stride())
    return total


def may_communicate(module: nn.Module, tensors: Iterable[Tensor]) -> bool:
    """Whether running a module once more on this rank alone could wait for other ranks: unless it surely cannot."""
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return False
    return any(_unsure(part) for part in module.modules()) or any(is_dtensor(tensor) for tensor in tensors)


def _unsure(module: nn.Module) -> bool:
    plain = type(module).__module__.startswith("torch.nn.modules.") and not isinstance(module, nn.SyncBatchNorm)
    styled = getattr(module, "_distribute_module_applied", False)
    return not plain or styled or any(is_dtensor(p) for p in module.parameters(recurse=False))


def _whole(tensor: Any) -> tuple[int, ...]:
    spec = getattr(tensor.grad_fn, "dtensor_spec", None)
    return tuple(tensor.shape if is_dtensor(tensor) or spec is None else spec.shape)


def _everywhere(mesh: Any) -> Shard | None:
    """A copy on every rank of a mesh."""
    return Layout(mesh, ("R",) * mesh.ndim).part(())


def _copy(ddp: DistributedDataParallel) -> Shard:
    size, rank = distributed.get_world_size(ddp.process_group), distributed.get_rank(ddp.process_group)
    return Shard({"ddp": size}, (rank,), ("R",), (), tuple(distributed.get_process_group_ranks(ddp.process_group)))


def _wrapped(root: nn.Module) -> Iterator[tuple[str, Shard]]:
    """Paths whose parameters DistributedDataParallel keeps alike on all ranks."""
    for path, module in root.named_modules():
        if isinstance(module, DistributedDataParallel):
            yield f"{path}.module" if path else "module", _copy(module)


def _styles(root: nn.Module) -> Iterator[tuple[str, Layout]]:
    """How modules return local tensors, by the parallel style that parallelize_module() applied to them."""
    for path, module in root.named_modules(remove_duplicate=False):
        if getattr(module, "_distribute_module_applied", False):
            for hook in module._forward_hooks.values():
                if (layout := _style(hook)) is not None:
                    yield path, layout


def _style(hook: Any) -> Layout | None:
    """The mesh and the output's layout, which PyTorch keeps only in the closure of the hook it registered."""
    held = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    mesh = next((value for value in held if hasattr(value, "get_coordinate")), None)
    prepare = next((value for value in held if isinstance(value, functools.partial)), None)
    if mesh is None or prepare is None or not prepare.args or prepare.func.__name__ != "_prepare_output_fn":
        return None
    layouts = prepare.args[0]
    return Layout(mesh, tuple(layouts) if isinstance(layouts, tuple) else (layouts,))
