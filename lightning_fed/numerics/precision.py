"""Casts to float64 and back, with a fallback for devices without float64."""

from __future__ import annotations

import torch
from torch import Tensor

_WITHOUT_FLOAT64 = ("mps",)  # Apple's


def float64_device(device: torch.device) -> torch.device:
    """Returns ``device``, or the CPU if ``device`` lacks float64."""
    return torch.device("cpu") if device.type in _WITHOUT_FLOAT64 else device


def to_float64(value: Tensor, copy: bool = False) -> Tensor:
    """Casts a tensor to float64 (complex to complex128), on the CPU if the device lacks float64."""
    on_device = value.to(float64_device(value.device))
    return on_device.to(torch.complex128 if value.is_complex() else torch.float64, copy=copy)


def cast_back(value: Tensor, like: Tensor) -> Tensor:
    """Casts a tensor from :func:`to_float64` to the dtype and device of ``like``."""
    return value.to(like.dtype).to(like.device)


def at_least_float32(value: Tensor) -> Tensor:
    """Casts a tensor to float32, unless the tensor is float64."""
    return value if value.dtype == torch.float64 else value.float()


def as_real(value: Tensor) -> Tensor:
    """Views a complex tensor as pairs of real numbers, shape ``(..., 2)``. Returns real tensors unchanged.

    Example:
        >>> as_real(torch.tensor([1 + 2j])), as_real(torch.tensor([3.0]))
        (tensor([[1., 2.]]), tensor([3.]))
    """
    return torch.view_as_real(value) if value.is_complex() else value
