"""References to the place of a value: an attribute, an entry of a list or dict, or of a tuple inside one of these."""

from __future__ import annotations

from typing import Any, Protocol

# Tuples that were made anew because an entry was replaced, by id: the new tuple, and the original.
_REPLACED: dict[int, tuple[Any, Any]] = {}


class Reference(Protocol):
    """A place that can be read and written."""

    def get(self) -> Any:
        """Return what it holds now."""

    def put(self, value: Any) -> None:
        """Replace what it holds."""


class AttributeReference:
    """An attribute of an object, set without the `__setattr__` of its class."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name

    def get(self) -> Any:
        """Return what it holds now."""
        own = getattr(self.owner, "__dict__", {})
        return own[self.name] if self.name in own else object.__getattribute__(self.owner, self.name)

    def put(self, value: Any) -> None:
        """Replace what it holds."""
        own = getattr(self.owner, "__dict__", {})
        if self.name in own:
            own[self.name] = value
        else:
            object.__setattr__(self.owner, self.name, value)


class ItemReference:
    """An entry of a list or a dict."""

    def __init__(self, owner: Any, key: Any) -> None:
        self.owner = owner
        self.key = key

    def get(self) -> Any:
        """Return what it holds now."""
        return self.owner[self.key]

    def put(self, value: Any) -> None:
        """Replace what it holds."""
        self.owner[self.key] = value


class TupleItemReference:
    """An entry of a tuple: to replace it, the tuple is replaced, and in the end the original comes back."""

    def __init__(self, owner: Reference, index: int) -> None:
        self.owner = owner
        self.index = index

    def get(self) -> Any:
        """Return what it holds now."""
        return self.owner.get()[self.index]

    def put(self, value: Any) -> None:
        """Replace what it holds."""
        old = self.owner.get()
        items = [*old[: self.index], value, *old[self.index + 1 :]]
        _, original = _REPLACED.pop(id(old), (old, old))
        if all(a is b for a, b in zip(items, original, strict=True)):
            self.owner.put(original)
            return
        new = type(old)._make(items) if hasattr(old, "_make") else type(old)(items)
        _REPLACED[id(new)] = (new, original)
        self.owner.put(new)
