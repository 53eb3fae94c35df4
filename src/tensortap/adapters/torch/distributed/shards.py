"""Find which shard of a tensor this rank holds, from the tensor alone: no other rank is asked."""

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


class MeshLayout(NamedTuple):
    """The placement of a tensor over a device mesh."""

    mesh: Any
    placements: tuple[Any, ...]

    def widened(self) -> MeshLayout:
        """Return the layout on the whole mesh, of which this may be a submesh; over the rest it is replicated."""
        root = self.mesh._get_root_mesh() if hasattr(self.mesh, "_get_root_mesh") else self.mesh
        own = dict(zip(self.mesh.mesh_dim_names or (), self.placements, strict=False))
        sides = root.mesh_dim_names or ()
        return MeshLayout(root, tuple(own.get(side, "R") for side in sides)) if own.keys() < set(sides) else self

    def shard(self, shape: Iterable[int]) -> Shard | None:
        """Return this rank's shard of a tensor of this layout; None for a rank that is not on the mesh."""
        at = self.mesh.get_coordinate()
        if at is None:
            return None
        names = self.mesh.mesh_dim_names or [f"dim{i}" for i in range(self.mesh.ndim)]
        sizes = dict(zip(names, self.mesh.shape, strict=True))
        on = tuple(self.mesh.mesh.flatten().tolist())
        return Shard(sizes, tuple(at), tuple(map(str, self.placements)), tuple(shape), on)


class ShardRegistry:
    """Record the shard that a site holds, the first time a tensor is observed there.

    A DTensor knows its own; for a local tensor made from one it is read from its node in the graph or, without a graph,
    from the parallel style of its module. A parameter is a replica where DistributedDataParallel has it, or where it is
    a plain tensor beside others that are DTensors; DistributedDataParallel may have the local parts of those.
    """

    def __init__(self, names: Names, root: nn.Module) -> None:
        self.known: set[int] = set()
        self._names = names
        self._styles = dict(_styles(root))
        self._replicas: list[tuple[str, Shard]] = list(_ddp_paths(root))
        local = dict(_local_parameters(root))
        self._local_parameters = {path: layout.shard(shape) for path, (layout, shape) in local.items()}
        known = next((layout for p in root.parameters() if (layout := layout_of(p)) is not None), None)
        known = known or next((layout for layout, _ in local.values()), None)
        self._plain_parameters = None if known is None else _replicated(known.widened().mesh)

    def root_called(self) -> None:
        """Note a call of the root: if DistributedDataParallel makes it, the parameters are replicas."""
        active = DistributedDataParallel._active_ddp_module
        if active is not None and not self._replicas:
            self._replicas.append(("", _replica(active)))
            self.known.clear()

    def record(self, point: Point, tensor: Tensor) -> None:
        """Record the shard of the first tensor at a site."""
        self.known.add(point.key)
        shard = self.shard_at(point.place, tensor)
        if shard is not None:
            self._names.parts[point.place] = shard

    def record_gradient(self, point: Point, tensor: Tensor) -> None:
        """Record the shard of a site whose gradient will have this tensor's layout."""
        layout = layout_of(tensor)
        if layout is not None and point.key not in self.known:
            shard = layout.shard(tensor.shape)
            if shard is not None:
                self.known.add(point.key)
                self._names.parts[point.place] = shard

    def shard_at(self, place: Place, tensor: Tensor) -> Shard | None:
        """Return the shard that a tensor at a site is, or None if it is unknown."""
        if place.port not in PARAMETER_PORTS:
            return self._of_value(place, tensor)
        layout = layout_of(tensor)
        found = self._local_parameters.get(place.site)
        if layout is not None:
            found = layout.widened().shard(_whole(tensor))
        replica = next((shard for prefix, shard in self._replicas if place.site.startswith(prefix)), None)
        if found is None:
            found = self._plain_parameters and self._plain_parameters._replace(shape=tuple(tensor.shape))
        if found is None or replica is None:
            return found or (replica and replica._replace(shape=tuple(tensor.shape)))
        if set(replica.ranks) <= set(found.ranks):
            return found
        both = {**replica.mesh, **found.mesh}
        return Shard(both, replica.at + found.at, replica.placements + found.placements, found.shape)

    def _of_value(self, place: Place, tensor: Tensor) -> Shard | None:
        layout = layout_of(tensor)
        if layout is not None:
            return layout.shard(_whole(tensor))
        style = self._styles.get(place.site) if place.port in RESULT_PORTS and not place.slot else None
        return style.shard(()) if style else None


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor, without importing torch.distributed.tensor."""
    return hasattr(value, "to_local") and hasattr(value, "device_mesh")


def layout_of(tensor: Any) -> MeshLayout | None:
    """Return the layout of a tensor, or of the DTensor it was made from by `to_local()`."""
    if is_dtensor(tensor):
        return MeshLayout(tensor.device_mesh, tuple(tensor.placements))
    spec = getattr(tensor.grad_fn, "dtensor_spec", None)
    return None if spec is None else MeshLayout(spec.mesh, tuple(spec.placements))


def local_parameter(value: Any) -> nn.Parameter | None:
    """Return the local parameter behind a DTensor that replaces it in its module.

    `_pre_dp_module_transform` does that to a model that is cut by parallelize_module: DistributedDataParallel and the
    optimizer hold the local parameter, and after the first forward pass its module holds the DTensor.
    """
    if not is_dtensor(value) or value.grad_fn is None:
        return None
    found = [getattr(node, "variable", None) for node, _ in value.grad_fn.next_functions if node is not None]
    return found[0] if len(found) == 1 and isinstance(found[0], nn.Parameter) else None


def local_of(tensor: Any) -> Any:
    """Return the local part of a tensor. It waits for a pending collective, and starts none."""
    if hasattr(tensor, "to_local"):
        with torch.no_grad():
            tensor = tensor.to_local()
    return tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor


def tensor_for_function(tensor: Tensor) -> Any:
    """Return the tensor to give to a user's function: the local shard of a DTensor, whose mean() would communicate."""
    return local_of(tensor).detach() if is_dtensor(tensor) else tensor.detach()


def add_locally(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of two tensors without communication; sharded ones must have the same layout."""
    if not (is_dtensor(a) or is_dtensor(b)):
        return a + b
    one, other = layout_of(a), layout_of(b)
    if one is None or other is None or one != other:
        raise TensortapError("its summands have different layouts and cannot be added without communication")
    make: Any = type(a)
    local = local_of(a) + local_of(b)
    total: Tensor = make.from_local(local, one.mesh, one.placements, run_check=False, shape=a.shape, stride=a.stride())
    return total


def may_communicate(module: nn.Module, tensors: Iterable[Tensor]) -> bool:
    """Return whether running a module again on this rank alone could communicate: other ranks would not take part."""
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return True
    return any(is_dtensor(tensor) for tensor in (*module.parameters(), *module.buffers(), *tensors))


def _whole(tensor: Any) -> tuple[int, ...]:
    spec = getattr(tensor.grad_fn, "dtensor_spec", None)
    return tuple(tensor.shape if is_dtensor(tensor) or spec is None else spec.shape)


def _replicated(mesh: Any) -> Shard | None:
    """Return the shard of a replica on every rank of a mesh."""
    return MeshLayout(mesh, ("R",) * mesh.ndim).shard(())


def _replica(ddp: DistributedDataParallel) -> Shard:
    size, rank = distributed.get_world_size(ddp.process_group), distributed.get_rank(ddp.process_group)
    return Shard({"ddp": size}, (rank,), ("R",), (), tuple(distributed.get_process_group_ranks(ddp.process_group)))


def _ddp_paths(root: nn.Module) -> Iterator[tuple[str, Shard]]:
    """Yield the paths whose parameters DistributedDataParallel replicates."""
    for path, module in root.named_modules():
        if isinstance(module, DistributedDataParallel):
            yield f"{path}.module" if path else "module", _replica(module)


def _local_parameters(root: nn.Module) -> Iterator[tuple[str, tuple[MeshLayout, tuple[int, ...]]]]:
    """Yield the layout and the whole shape of parameters whose local part DistributedDataParallel holds."""
    for path, module in root.named_modules():
        shown = [(name, local_parameter(value)) for name, value in vars(module).items() if is_dtensor(value)]
        for name, parameter in (*module._parameters.items(), *shown):
            spec = getattr(parameter, "_st_info", None)
            if spec is not None:
                layout = MeshLayout(spec.mesh, tuple(spec.placements)).widened()
                yield f"{path}.{name}" if path else name, (layout, tuple(spec.shape))


def _styles(root: nn.Module) -> Iterator[tuple[str, MeshLayout]]:
    """Yield the output layout of modules to which parallelize_module() applied a style."""
    for path, module in root.named_modules(remove_duplicate=False):
        if getattr(module, "_distribute_module_applied", False):
            for hook in module._forward_hooks.values():
                if (layout := _style(hook)) is not None:
                    yield path, layout


def _style(hook: Any) -> MeshLayout | None:
    """Return mesh and output layout, which PyTorch keeps only in the closure of the hook it registered."""
    held = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    mesh = next((value for value in held if hasattr(value, "get_coordinate")), None)
    prepare = next((value for value in held if isinstance(value, functools.partial)), None)
    if mesh is None or prepare is None or not prepare.args or prepare.func.__name__ != "_prepare_output_fn":
        return None
    layouts = prepare.args[0]
    return MeshLayout(mesh, tuple(layouts) if isinstance(layouts, tuple) else (layouts,))
