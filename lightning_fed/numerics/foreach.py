"""Operations on lists of tensors: fused kernels on accelerators, a loop on the CPU.

:func:`copies` are adjacent in memory. :func:`join` views adjacent tensors as one flat tensor: an operation on a whole
model is one call.

PyTorch documents ``torch._foreach_*`` as beta ("Foreach Operations") and uses these functions in all optimizers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fed.numerics.precision import at_least_float32, to_float64

# Elements in intermediate results: 64 MiB in float32.
_MOST_ELEMENTS = 1 << 24

_CACHED_ELEMENTS = 1 << 15  # of one chunk

# Elements in a buffer. Larger allocations on a CPU would be returned to the system, and then page faults cost more than
# the copy.
_PACKED_ELEMENTS = 1 << 21

_NORMED = (torch.float32, torch.float64, torch.complex64, torch.complex128)


@torch.no_grad()
def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies tensors; contiguous tensors with equal dtype and device share buffers, in order."""
    buffers: list[list[int]] = []
    last: dict[Any, tuple[list[int], int]] = {}
    for position, value in enumerate(tensors):
        kind = (value.dtype, value.device) if value.is_contiguous() else position
        buffer, count = last.get(kind, ([], _PACKED_ELEMENTS))
        count += value.numel()
        if count > _PACKED_ELEMENTS:
            buffer, count = [], value.numel()
            buffers.append(buffer)
        buffer.append(position)
        last[kind] = buffer, count
    results = list(tensors)
    for buffer in buffers:
        members = [tensors[position] for position in buffer]
        count = sum(value.numel() for value in members)
        flat = torch.empty_like(members[0]) if len(members) == 1 else members[0].new_empty(count)
        for position, value in zip(buffer, _split(flat, members), strict=True):
            results[position] = value
    copy_into(results, tensors)
    return results


def map_runs(function: Callable[[Tensor, int], Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Applies an elementwise function to flat runs; also passes the position of the run's first tensor."""
    results = list(tensors)
    for run in find_runs(tensors):
        members = [tensors[at] for at in run]
        for at, value in zip(run, _split(function(_view_flat(members), run[0]), members), strict=True):
            results[at] = value
    return results


def find_runs(*lists: Sequence[Tensor]) -> list[list[int]]:
    """Groups positions: in every list, the tensors of a group are adjacent in memory, with one dtype and storage."""
    runs: list[list[int]] = []
    open_runs: dict[Any, tuple[list[int] | None, list[int]]] = {}  # runs and ends of storages, by next addresses
    for position, group in enumerate(zip(*lists, strict=True)):
        if not group[0].numel() or not all([value.is_contiguous() for value in group]):
            runs.append([position])
            continue
        starts, kinds = [value.data_ptr() for value in group], [value.dtype for value in group]
        nexts = [start + value.nbytes for start, value in zip(starts, group, strict=True)]
        run, limits = open_runs.pop((*starts, *kinds), (None, []))
        if run is None or any(map(operator.gt, nexts, limits)):
            run, storages = [], [value.untyped_storage() for value in group]
            runs.append(run)
            limits = [storage.data_ptr() + storage.nbytes() for storage in storages]
        run.append(position)
        open_runs[(*nexts, *kinds)] = run, limits
    return runs


def join(*lists: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Views runs (:func:`find_runs`) as flat tensors; a tensor without neighbours stays as is."""
    return [tuple(_view_flat([values[at] for at in run]) for values in lists) for run in find_runs(*lists)]


def _view_flat(members: Sequence[Tensor]) -> Tensor:
    if len(members) == 1:
        return members[0]
    return members[0].as_strided((sum(value.numel() for value in members),), (1,))


def _split(flat: Tensor, members: Sequence[Tensor]) -> list[Tensor]:
    if len(members) == 1:
        return [flat]
    parts = torch.split(flat, [value.numel() for value in members])
    return [part.view(value.shape) for part, value in zip(parts, members, strict=True)]


@torch.no_grad()
def copy_into(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copies each value into its target, like ``Tensor.copy_``."""
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}  # a fused kernel serves one dtype
    for target, value in zip(targets, values, strict=True):
        for tensors, tensor in zip(kinds.setdefault(target.dtype, ([], [])), (target, value), strict=True):
            tensors.append(tensor)
    for group in kinds.values():
        torch._foreach_copy_(*group)


@torch.no_grad()
def add_in_float64(sums: Sequence[Tensor], values: Sequence[Tensor], weight: float) -> None:
    """Adds each value, times ``weight``, to its sum. Sums are float64 or complex128; values have any dtype."""
    pairs = join(sums, values)
    if _are_on_the_cpu(sums):
        for total, value in pairs:
            for part, addend in zip(cache_chunks(total), cache_chunks(value), strict=True):
                part.add_(to_float64(addend), alpha=weight)  # a separate cast makes the addition faster
        return
    for batch in _batches(pairs):
        addends = [torch.empty_like(total) for total, _ in batch]
        copy_into(addends, [value for _, value in batch])
        torch._foreach_add_([total for total, _ in batch], addends, alpha=weight)


def differences(pairs: Iterable[tuple[Tensor, ...]]) -> Iterator[Tensor]:
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
