"""The attributes by which Keras recognises a tensor; a tensor that replaces another one needs them too.

Keras sets a mask on a tensor for the layers that follow, and the logits on the result of a sigmoid or softmax: the loss
is then computed from the logits, and no gradient passes through the activation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.tensor_attributes import get_tensor_attr, set_tensor_attr

_NAMES: Final = ("_keras_mask", "_keras_logits", "_keras_history")


def copy_attributes(source: Any, target: Any) -> None:
    """Give a tensor every attribute that Keras has set on another."""
    own = vars(source) if hasattr(source, "__dict__") else {}
    for name in dict.fromkeys((*_NAMES, *(name for name in own if name.startswith("_keras")))):
        value = get_tensor_attr(source, name)
        if value is not None:
            set_tensor_attr(target, name, value)


def has_logits(tensor: Any) -> bool:
    """Return whether Keras would compute a loss from the logits of a tensor rather than from the tensor."""
    return get_tensor_attr(tensor, "_keras_logits") is not None


def copy_masks_back(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Copy the changes that a layer made to the masks of its inputs from the replacements to the originals.

    `MultiHeadAttention` removes the masks of its inputs, so that the layers after it do not see them.
    """
    for original, replacement in pairs:
        mask = get_keras_mask(replacement)
        if mask is not get_keras_mask(original):
            set_keras_mask(original, mask)
