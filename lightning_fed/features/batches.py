"""Finds the inputs and labels in a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

# Index, key or function for inputs or labels; `None` for the common position or key.
BatchKey: TypeAlias = int | str | Callable[[Any], Tensor] | None

INPUT_KEYS = ("image", "images", "x", "input", "inputs", "text")
TARGET_KEYS = ("target", "targets", "label", "labels", "mask", "masks", "y")
MASK_KEYS = ("mask", "masks", *TARGET_KEYS)  # masks first, because a batch may also contain image labels


def find_inputs(batch: Any, inputs: BatchKey = None) -> Tensor:
    """Returns a batch's inputs. By default the first element, a key such as "image", or the batch itself."""
    first = batch[0] if isinstance(batch, Sequence) and batch else batch
    return _find(batch, inputs, INPUT_KEYS, first, "inputs")


def find_target(batch: Any, target: BatchKey = None) -> Tensor:
    """Returns a batch's labels. By default the second element, or the value of a key such as "label"."""
    second = batch[1] if isinstance(batch, Sequence) and len(batch) > 1 else None
    return _find(batch, target, TARGET_KEYS, second, "target")


def as_classes(labels: Tensor, feature_dims: int) -> Tensor:
    """Converts labels to integers. Removes axis 1 if the size is 1, unless labels have ``feature_dims - 1`` axes."""
    if labels.is_floating_point():
        if not bool((labels == labels.round()).all()):
            raise ValueError("Expected integer class labels, but got fractions: select other labels with `target`.")
        labels = labels.long()
    # With one axis fewer than the features, as for masks of shape (N, H, W), axis 1 is not a channel.
    has_channel = labels.ndim > 1 and labels.shape[1] == 1 and labels.ndim != feature_dims - 1
    return labels.squeeze(1) if has_channel else labels


def _find(batch: Any, key: BatchKey, usual_keys: Sequence[str], default: Any, name: str) -> Tensor:
    value: Any
    if callable(key):
        value = key(batch)
    elif key is not None:
        try:
            value = batch[key]
        except (LookupError, TypeError) as error:
            contents = f"keys {list(batch)}" if isinstance(batch, Mapping) else f"type {type(batch).__name__}"
            if isinstance(batch, Sequence):
                contents = f"positions 0 to {len(batch) - 1}"
            raise ValueError(
                f"Expected `{name}` to be an index or key in the batch, but got {key!r} for a batch with {contents}."
            ) from error
    elif isinstance(batch, Mapping):
        value = next((batch[usual] for usual in usual_keys if usual in batch), None)
    else:
        value = default
    if not isinstance(value, Tensor):
        kind = "labels" if name == "target" else name
        raise ValueError(
            f"Expected a batch with {kind}, but got {type(value).__name__}: select the {kind} with `{name}`."
        )
    return value
