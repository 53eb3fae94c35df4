"""Where the hooks go that tell which module runs, for those who look at operations."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.utils.hooks import RemovableHandle

from tensortap.adapters.torch.distributed.fully_shard import is_sharded
from tensortap.adapters.torch.modules import tree as modules
from tensortap.adapters.torch.modules.hookset import HookSet
from tensortap.adapters.torch.modules.placement import tappable, within
from tensortap.adapters.torch.ops.hooks import Entering, LayerHooks
from tensortap.adapters.torch.ops.taps import OpTaps
from tensortap.adapters.torch.ops.visibility import COMPILED


def place(taps: OpTaps, root: nn.Module, fused: Mapping[str, HookSet]) -> tuple[HookSet, list[RemovableHandle]]:
    """A set of hooks around the modules, which may rest, and those that are put on the root at once.

    What lies in encoder layers, `fused` by path, goes into their sets.
    """
    around, layers = HookSet(), LayerHooks()
    handles: list[RemovableHandle] = []
    compiled = modules.compiled_paths(root)
    for module, paths in tappable(root).items():
        if compiled.issuperset(paths):
            taps.visibility.hidden = COMPILED
            continue
        entering = Entering(taps, paths, module is root, is_sharded(module))
        if any(path in fused for path in paths):
            layers.add(module, entering)
        elif module is root:
            handles += [put(root) for put in entering.puts()]
        else:
            inside = next((hooks for path, hooks in fused.items() if within(paths, path)), around)
            inside.add(module, entering.puts(), taps.bits, paths)
    if "" in fused:
        handles += [put(root) for put in layers.puts()]
    elif fused:
        around.add(root, layers.puts(), taps.bits, [])
    return around, handles
