"""Where a batch has its inputs and its labels: as first and second element, or under a usual key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

BatchKey: TypeAlias = int | str | Callable[[Any], Tensor] | None
"""Where something is in a batch: an index or key, or a function of the batch; ``None`` for the usual places."""

INPUT_KEYS = ("image", "images", "x", "input", "inputs", "text")
TARGET_KEYS = ("target", "targets", "label", "labels", "mask", "masks", "y")


def find_inputs(batch: Any, inputs: BatchKey = None) -> Tensor:
    """The inputs of a batch.

    Args:
        batch: The batch.
        inputs: Index, key or function; ``None`` for the first element, the usual keys, or a batch that is a tensor.

    Raises:
        ValueError: If there are none.

    Example:
        >>> import torch
        >>> find_inputs([torch.zeros(1), torch.tensor([0])]), find_inputs({"y": 0, "image": torch.ones(1)})
        (tensor([0.]), tensor([1.]))

    """
    first = batch[0] if isinstance(batch, Sequence) and batch else batch
    return _find(batch, inputs, INPUT_KEYS, first, "inputs")


def find_target(batch: Any, target: BatchKey = None, keys: Sequence[str] = TARGET_KEYS) -> Tensor:
    """The labels of a batch.

    Args:
        batch: The batch.
        target: Index, key or function; ``None`` for the second element, or the usual keys.
        keys: The usual keys, the likeliest first.

    Raises:
        ValueError: If there are none.

    Example:
        >>> import torch
        >>> find_target([torch.zeros(2, 1), torch.tensor([0, 1])]), find_target({"x": 0, "mask": torch.tensor([5])})
        (tensor([0, 1]), tensor([5]))

    """
    second = batch[1] if isinstance(batch, Sequence) and len(batch) > 1 else None
    return _find(batch, target, keys, second, "target")


def as_classes(labels: Tensor, feature_dims: int) -> Tensor:
    """Labels as integers without an empty channel, where features of so many dimensions call for none.

    Raises:
        ValueError: If they are fractions.

    Example:
        >>> import torch
        >>> as_classes(torch.tensor([[1.0], [0.0]]), 2), as_classes(torch.zeros(2, 1, 8, 8), 4).shape
        (tensor([1, 0]), torch.Size([2, 8, 8]))

    """
    if labels.is_floating_point():
        if not bool((labels == labels.round()).all()):
            raise ValueError("Expected labels to be classes, but they are fractions: say where with `target`.")
        labels = labels.long()
    has_channel = labels.ndim > 1 and labels.shape[1] == 1 and labels.ndim != feature_dims - 1
    return labels.squeeze(1) if has_channel else labels


def _find(batch: Any, place: BatchKey, keys: Sequence[str], otherwise: Any, name: str) -> Tensor:
    found: Any
    if callable(place):
        found = place(batch)
    elif place is not None:
        try:
            found = batch[place]
        except (LookupError, TypeError) as error:
            has = f"keys {list(batch)}" if isinstance(batch, Mapping) else f"type {type(batch).__name__}"
            if isinstance(batch, Sequence):
                has = f"places 0 to {len(batch) - 1}"
            raise ValueError(
                f"Expected `{name}` to be in the batch, but got {place!r} for a batch of {has}."
            ) from error
    elif isinstance(batch, Mapping):
        found = next((batch[key] for key in keys if key in batch), None)
    else:
        found = otherwise
    if not isinstance(found, Tensor):
        what = "labels" if name == "target" else name
        raise ValueError(f"Expected a batch with {what}, but found {type(found).__name__}: say where with `{name}`.")
    return found
