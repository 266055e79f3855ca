"""One operation on many tensors: together where every launch of a kernel costs, one after another on the CPU.

``torch._foreach_*`` are documented as a beta ("Foreach Operations"); PyTorch's optimizers are built on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_fed.numerics.chunks import cache_chunks
from lightning_fed.numerics.precision import at_least_float32, to_float64

_MOST_ELEMENTS = 1 << 24
"""Most numbers in intermediate results at a time: 64 MiB in float32."""

_NORMED = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the tensors, without gradients.

    Example:
        >>> copies([torch.ones(2), torch.tensor(3)])
        [tensor([1., 1.]), tensor(3)]

    """
    made = [torch.empty_like(value) for value in tensors]
    copy_into(made, tensors)
    return made


@torch.no_grad()
def copy_into(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copies each value into its target, as ``Tensor.copy_`` does."""
    if targets:
        torch._foreach_copy_(list(targets), list(values))


@torch.no_grad()
def add_in_float64(sums: Sequence[Tensor], values: Sequence[Tensor], weight: float) -> None:
    """Adds ``weight`` times each value to its sum.

    Args:
        sums: Of type float64 or complex128.
        values: Of the same shapes, of any types.
        weight: The factor.

    """
    if _are_on_the_cpu(sums):
        for total, value in zip(sums, values, strict=True):
            for part, addend in zip(cache_chunks(total), cache_chunks(value), strict=True):
                part.add_(to_float64(addend), alpha=weight)  # adding is faster after a cast of its own
        return
    for batch in _batches(zip(sums, values, strict=True)):
        addends = [torch.empty_like(total) for total, _ in batch]
        copy_into(addends, [value for _, value in batch])
        torch._foreach_add_([total for total, _ in batch], addends, alpha=weight)


def differences(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
    """The first tensor less the second of each pair, some at a time; on the CPU in chunks."""
    for batch in _batches(pairs):
        if _are_on_the_cpu(batch[0]):
            for new, old in zip(*map(cache_chunks, batch[0]), strict=True):
                yield new - old
        else:
            yield from torch._foreach_sub([new for new, _ in batch], [old for _, old in batch])  # noqa: SLF001


def are_equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[bool]:
    """Compares pairs of tensors of one shape: true where all values are the same. The device is waited for once.

    Example:
        >>> are_equal([torch.ones(2), torch.zeros(1)], [torch.ones(2), torch.ones(1)])
        [True, False]

    """
    if _are_on_the_cpu(left):
        return [torch.equal(one, other) for one, other in zip(left, right, strict=True)]
    flags = [(one == other).all() for one, other in zip(left, right, strict=True)]
    return [bool(flag) for flag in torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()]


def norms(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Euclidean norm of each tensor, shape ``()``; float32, but of 64-bit tensors float64.

    Example:
        >>> norms([torch.tensor([3.0, 4.0]), torch.tensor([2])])
        [tensor(5.), tensor(2.)]

    """
    return [
        at_least_float32(length)
        for batch in _batches((value if value.dtype in _NORMED else value.float(),) for value in tensors)
        for length in torch._foreach_norm([value for (value,) in batch])  # noqa: SLF001
    ]


def _are_on_the_cpu(tensors: Sequence[Tensor]) -> bool:
    return all(value.device.type == "cpu" for value in tensors)


def _batches(groups: Iterable[tuple[Tensor, ...]]) -> Iterator[list[tuple[Tensor, ...]]]:
    """As many groups at a time as intermediate results have room for, at least one; on the CPU one at a time."""
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
