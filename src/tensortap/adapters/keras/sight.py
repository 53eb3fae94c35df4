"""Temporary: the quick looks still import `arrays_of` from here."""

from tensortap.adapters.keras.observer import arrays_of

__all__ = ["arrays_of"]
