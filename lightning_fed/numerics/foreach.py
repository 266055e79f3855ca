"""Operations on lists of tensors: fused kernels on accelerators, a loop on the CPU.

PyTorch documents ``torch._foreach_*`` as beta ("Foreach Operations") and uses these functions in all optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_fed.numerics.precision import at_least_float32, to_float64

# Elements in intermediate results: 64 MiB in float32.
_MOST_ELEMENTS = 1 << 24

_CACHED_ELEMENTS = 1 << 15  # of one chunk
_NORMED = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies tensors, detached from the autograd graph."""
    results = [torch.empty_like(value) for value in tensors]
    copy_into(results, tensors)
    return results


@torch.no_grad()
def copy_into(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copies each value into its target, like ``Tensor.copy_``."""
    if targets:
        torch._foreach_copy_(list(targets), list(values))


@torch.no_grad()
def add_in_float64(sums: Sequence[Tensor], values: Sequence[Tensor], weight: float) -> None:
    """Adds each value, times ``weight``, to its sum. Sums are float64 or complex128; values have any dtype."""
    if _are_on_the_cpu(sums):
        for total, value in zip(sums, values, strict=True):
            for part, addend in zip(cache_chunks(total), cache_chunks(value), strict=True):
                part.add_(to_float64(addend), alpha=weight)  # a separate cast makes the addition faster
        return
    for batch in _batches(zip(sums, values, strict=True)):
        addends = [torch.empty_like(total) for total, _ in batch]
        copy_into(addends, [value for _, value in batch])
        torch._foreach_add_([total for total, _ in batch], addends, alpha=weight)


def differences(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
    """Yields the difference ``new - old`` for each pair, on the CPU in chunks."""
    for batch in _batches(pairs):
        if _are_on_the_cpu(batch[0]):
            for new, old in zip(*map(cache_chunks, batch[0]), strict=True):
                yield new - old
        else:
            yield from torch._foreach_sub([new for new, _ in batch], [old for _, old in batch])  # noqa: SLF001


def are_equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[bool]:
    """Compares pairs of tensors with equal shapes, using one device synchronisation."""
    if _are_on_the_cpu(left):
        return [torch.equal(one, other) for one, other in zip(left, right, strict=True)]
    flags = [(one == other).all() for one, other in zip(left, right, strict=True)]
    return [bool(flag) for flag in torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()]


def norms(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Euclidean norm of each tensor, shape ``()``: float64 for 64-bit tensors, else float32."""
    return [
        at_least_float32(length)
        for batch in _batches((value if value.dtype in _NORMED else value.float(),) for value in tensors)
        for length in torch._foreach_norm([value for (value,) in batch])  # noqa: SLF001
    ]


def cache_chunks(value: Tensor) -> tuple[Tensor, ...]:
    """Flattens and splits a tensor into chunks for the CPU cache. On other devices the result is a single chunk.

    Working chunk by chunk avoids large intermediate tensors, whose memory traffic costs more than the arithmetic.
    Chunks of a contiguous tensor share the tensor's memory.
    """
    flat = value.reshape(-1)
    if value.device.type != "cpu" or len(flat) <= _CACHED_ELEMENTS:
        return (flat,)
    return torch.split(flat, _CACHED_ELEMENTS)


def _are_on_the_cpu(tensors: Sequence[Tensor]) -> bool:
    return all(value.device.type == "cpu" for value in tensors)


def _batches(groups: Iterable[tuple[Tensor, ...]]) -> Iterator[list[tuple[Tensor, ...]]]:
    """Groups tuples into batches of up to ``_MOST_ELEMENTS`` elements. On the CPU each batch has one tuple."""
    batch: list[tuple[Tensor, ...]] = []
    size = 0
    for group in groups:
        batch.append(group)
        size += group[0].numel()
        if size >= _MOST_ELEMENTS or _are_on_the_cpu(group):
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
