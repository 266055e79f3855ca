"""Casts to float64 and back, also for devices that have no float64."""

from __future__ import annotations

import torch
from torch import Tensor

_WITHOUT_FLOAT64 = ("mps",)  # Apple's


def float64_device(device: torch.device) -> torch.device:
    """The device itself, or the CPU where it has no float64."""
    return torch.device("cpu") if device.type in _WITHOUT_FLOAT64 else device


def to_float64(value: Tensor, copy: bool = False) -> Tensor:
    """Casts values to float64 (complex128), on their device or on the CPU where the device has no float64.

    Args:
        value: Numbers of any type and shape.
        copy: Whether the result shares no memory with ``value``.

    Example:
        >>> to_float64(torch.tensor([1, 2]))
        tensor([1., 2.], dtype=torch.float64)

    """
    moved = value.to(float64_device(value.device))
    return moved.to(torch.complex128 if value.is_complex() else torch.float64, copy=copy)


def cast_back(value: Tensor, like: Tensor) -> Tensor:
    """Casts a result of :func:`to_float64` to the type of ``like``, on its device.

    Example:
        >>> cast_back(torch.tensor([0.5], dtype=torch.float64), torch.tensor([1.0]))
        tensor([0.5000])

    """
    return value.to(like.dtype).to(like.device)


def at_least_float32(value: Tensor) -> Tensor:
    """Casts values to float32, except those that are float64 already.

    Example:
        >>> at_least_float32(torch.tensor([0.5], dtype=torch.float16))
        tensor([0.5000])

    """
    return value if value.dtype == torch.float64 else value.float()


def as_real(value: Tensor) -> Tensor:
    """View of complex numbers as pairs of real ones, shape ``(..., 2)``, on the same memory; other tensors unchanged.

    Example:
        >>> as_real(torch.tensor([1 + 2j])), as_real(torch.tensor([3.0]))
        (tensor([[1., 2.]]), tensor([3.]))

    """
    return torch.view_as_real(value) if value.is_complex() else value
