"""Finds, compares and replaces the tensors in a nested batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from lightning_fed.numerics.trees import like_sequence


def batch_tensors(batch: Any) -> list[Tensor]:
    """Lists the tensors in a batch at any depth, in the order used by :func:`rebuild_batch`."""
    tensors: list[Tensor] = []
    batch_structure(batch, tensors)
    return tensors


def rebuild_batch(batch: Any, tensors: Iterator[Tensor]) -> Any:
    """Replaces the tensors in a copy of ``batch``, in the order of :func:`batch_tensors`.

    Example:
        >>> import torch
        >>> batch = {"image": torch.zeros(1), "name": "a"}
        >>> rebuild_batch(batch, iter([torch.ones(1)]))
        {'image': tensor([1.]), 'name': 'a'}
    """
    if isinstance(batch, Tensor):
        return next(tensors)
    if isinstance(batch, Mapping):
        rebuilt = {key: rebuild_batch(value, tensors) for key, value in batch.items()}
        if isinstance(batch, defaultdict):
            return type(batch)(batch.default_factory, rebuilt)
        return type(batch)(rebuilt)  # type: ignore[call-arg]
    if isinstance(batch, list | tuple):
        return like_sequence(batch, [rebuild_batch(value, tensors) for value in batch])
    return batch


def batch_structure(batch: Any, tensors: list[Tensor]) -> Any:
    """Describes a batch's containers, shapes and dtypes. Appends the batch's tensors to ``tensors``."""
    if isinstance(batch, Tensor):
        tensors.append(batch)
        return batch.shape, batch.dtype, batch.device
    if isinstance(batch, Mapping):
        return type(batch), tuple((key, batch_structure(value, tensors)) for key, value in batch.items())
    if isinstance(batch, list | tuple):
        return type(batch), tuple(batch_structure(value, tensors) for value in batch)
    return batch if isinstance(batch, str | bytes | int | float | None) else id(batch)
