"""Events of checkpoints: files that `torch.save` writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from tensortap.adapters.torch.context.caller import user_line
from tensortap.adapters.torch.context.sink import EventHub, guarded

_KEYS: Final = 12


class CheckpointEvents:
    """Note each file that is written with `torch.save`; what is written into memory is not a file."""

    def __init__(self, hub: EventHub) -> None:
        self.hub = hub

    @guarded
    def saved(self, content: Any, target: Any) -> None:
        """Note a file, its path and the keys of what it holds."""
        if not isinstance(target, (str, os.PathLike)) or not self.hub.due("checkpoint", first=256, then=16):
            return
        path = Path(os.fsdecode(target))
        keys = [str(key) for key in list(content)[:_KEYS]] if isinstance(content, dict) else []
        self.hub.add("checkpoint", path.name, user_line(3), {"path": str(path), "keys": keys})
