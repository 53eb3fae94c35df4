"""Where parameters and buffers are held, and which of their ports probes want."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tensortap.adapters.plan import Port, bits_of
from tensortap.adapters.torch.distributed.fully_shard import FullyShardedParameters
from tensortap.adapters.torch.distributed.shards import local_parameter
from tensortap.select.ports import BUFFER_PORTS


class Owner(NamedTuple):
    """The module and attribute that hold a parameter or buffer. The tensor itself may be replaced."""

    module: weakref.ref[nn.Module]
    name: str
    ports: tuple[str, ...]

    def parameter(self) -> nn.Parameter | None:
        """Return the parameter as it is now, if it is there and has a shape."""
        found = self._found("_parameters")
        if type(found) is nn.Parameter:
            return found
        if isinstance(found, nn.Parameter):
            return None if is_lazy(found) else found
        return local_parameter(getattr(self.module(), "__dict__", {}).get(self.name))

    def buffer(self) -> Tensor | None:
        """Return the buffer as it is now, if it is there and has a shape."""
        found = self._found("_buffers")
        return found if isinstance(found, Tensor) and not is_lazy(found) else None

    def _found(self, held: str) -> Any:
        module = self.module()
        members = getattr(module, held, None)
        # Scripted modules have no dict; an ordinary one is asked without its `__getattr__`, which is slow.
        return members.get(self.name) if isinstance(members, dict) else getattr(module, self.name, None)


def member_types(ports: tuple[str, ...]) -> tuple[str, ...]:
    """Return the class name of the tensors with these ports, as in patterns such as `type:Parameter:grad`."""
    return ("Buffer",) if ports == BUFFER_PORTS else ("Parameter",)


class PendingGradients:
    """The gradients of a model's parameters that a further backward would add to."""

    def __init__(self, owners: dict[str, Owner], sharded: FullyShardedParameters) -> None:
        self._parameters = [owner for owner in owners.values() if owner.ports != BUFFER_PORTS]
        self._sharded = sharded

    def any(self) -> bool:
        """Return whether there are any."""
        parameters = (owner.parameter() for owner in self._parameters)
        return any(p.grad is not None for p in parameters if p is not None) or self._sharded.pending()


class MemberPort(NamedTuple):
    """A port of a parameter or buffer that a probe wants."""

    port: Port
    owner: Owner
    site: str  # `path:port`


class MemberPorts:
    """The ports of parameters and buffers that probes want, found once, when taps are attached."""

    def __init__(self, owners: dict[str, Owner], ports: dict[str, list[Port]], sharded: FullyShardedParameters) -> None:
        self._parameters = {path: owner for path, owner in owners.items() if owner.ports != BUFFER_PORTS}
        self._sharded = sharded
        self._wanted = {
            kind: [MemberPort(port, owners[port.path], f"{port.path}:{kind}") for port in group]
            for kind, group in ports.items()
        }
        self._bits = {kind: bits_of(group) for kind, group in ports.items()}
        self.bits = bits_of([port for group in ports.values() for port in group])  # of the probes that want any

    def are_wanted(self, kind: str, armed: int) -> bool:
        """Return whether an armed probe wants any port of this kind."""
        return armed & self._bits.get(kind, 0) != 0

    def parameters(self, kind: str, armed: int, ids: set[int] | None) -> Iterator[tuple[MemberPort, nn.Parameter]]:
        """Yield the wanted ports of a kind with their parameters; with `ids`, only the parameters of these ids.

        Without `ids` no optimizer says which tensor it uses, so that FSDP is asked for the shard.
        """
        shards = self._sharded.shards() if ids is None and self._wanted.get(kind) else {}
        for member in self._wanted.get(kind, ()):
            parameter = member.owner.parameter() if armed & member.port.bits else None
            if parameter is not None and (ids is None or id(parameter) in ids):
                yield member, shards.get(id(parameter), parameter) if shards else parameter

    def buffers(self, armed: int) -> Iterator[tuple[MemberPort, Tensor]]:
        """Yield the wanted buffers."""
        for member in self._wanted.get("buffer", ()):
            buffer = member.owner.buffer() if armed & member.port.bits else None
            if buffer is not None:
                yield member, buffer

    def parameter_at(self, path: str) -> nn.Parameter | None:
        """Return the parameter of a path, wanted or not."""
        return self._parameters[path].parameter()

    def any_of(self, ids: set[int]) -> bool:
        """Return whether one of the model's parameters has one of these ids."""
        return any(id(owner.parameter()) in ids for owner in self._parameters.values())

    def refresh(self) -> None:
        """Look for sharded modules again: `fully_shard` may have been called since the last step."""
        self._sharded.refresh()
