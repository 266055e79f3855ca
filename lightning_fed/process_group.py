"""The processes that share the clients of a round, and how what one of them has reaches the others.

Tensors travel as they are, bit for bit; all around them (numbers, names, objects) is pickled, for it is small.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

_SMALL = 1 << 20  # bytes: smaller tensors go together, for every message takes its time
_ALIGNED = 16


class ProcessGroup:
    """The processes that train a federation's clients: this one alone.

    Attributes:
        rank: Index of this process, from 0.
        size: Number of processes.
        is_independent: Whether every process is on its own: while visits are under way, of which each has others.

    Example:
        >>> group = ProcessGroup()
        >>> group.size, group.gather("state")
        (1, ['state'])

    """

    rank = 0
    size = 1
    is_independent = False

    @contextmanager
    def independent(self) -> Iterator[None]:
        """Meanwhile every process is on its own."""
        before, self.is_independent = self.is_independent, True
        try:
            yield
        finally:
            self.is_independent = before

    def gather_one_by_one(self, value: Any, known: Sequence[Tensor] = ()) -> Iterator[Any]:
        """What every process has, in the order of the ranks: one after another, so that memory is that of two.

        All processes must ask, and take all. Every value is a copy of the sender's but for its tensors, which the
        sender shares with it.

        Args:
            value: What this process has: anything that can be pickled, with tensors anywhere in it.
            known: Tensors that all processes have alike, in this order: where they are in ``value`` they need not
                travel.

        Raises:
            MisconfigurationException: If ``value`` cannot be pickled.

        """
        yield value

    def gather(self, value: Any) -> list[Any]:
        """What every process has, in the order of the ranks, as :meth:`gather_one_by_one`; in all of them."""
        return list(self.gather_one_by_one(value))

    def broadcast(self, value: Any) -> Any:
        """What the first process has; as :meth:`gather_one_by_one`."""
        return value


SINGLE_PROCESS = ProcessGroup()
"""One process."""


class TorchProcessGroup(ProcessGroup):
    """The processes of ``torch.distributed``'s default group.

    Args:
        device: This process's device.

    """

    def __init__(self, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._device = device
        self._wire = device if dist.get_backend() == "nccl" else torch.device("cpu")  # gloo's tensors are on the CPU

    def gather_one_by_one(self, value: Any, known: Sequence[Tensor] = ()) -> Iterator[Any]:
        """What every process has, in the order of the ranks."""
        rest, tensors = pack(value, known)
        headers: list[Any] = [None] * self.size
        with _explained():
            dist.all_gather_object(headers, (rest, [_describe(tensor) for tensor in tensors], len(known)))
        if len({count for _, _, count in headers}) > 1:
            raise RuntimeError("The processes do not know the same tensors: this is an error of `lightning_fed`.")
        for source, (theirs, forms, _) in enumerate(headers):
            received = self._broadcast_tensors(source, tensors if source == self.rank else None, forms)
            yield unpack(theirs, received, known)

    def broadcast(self, value: Any) -> Any:
        """What the first process has."""
        rest, tensors = pack(value) if self.rank == 0 else (b"", [])
        header: list[Any] = [(rest, [_describe(tensor) for tensor in tensors])]
        with _explained():
            dist.broadcast_object_list(header, src=0)
        rest, forms = header[0]
        return unpack(rest, self._broadcast_tensors(0, tensors if self.rank == 0 else None, forms))

    def _broadcast_tensors(self, source: int, tensors: Sequence[Tensor] | None, forms: Sequence[_Form]) -> list[Tensor]:
        """The tensors of one process, in all: small ones together, each of the others alone."""
        done: list[Tensor] = []
        for group in _groups(forms):
            own = None if tensors is None else tensors[len(done) : len(done) + len(group)]
            if own is None:
                size = sum(form.padded for form in group) if len(group) > 1 else group[0].nbytes
                buffer = torch.empty(size, dtype=torch.uint8, device=self._wire)
            elif len(own) == 1:
                buffer = _as_bytes(own[0]).to(self._wire)
            else:
                buffer = torch.cat([_padded(_as_bytes(tensor)).to(self._wire) for tensor in own])
            if len(buffer):
                with _explained():
                    dist.broadcast(buffer, src=source)
            done += self._cut(buffer, group) if own is None else own
        return done

    def _cut(self, buffer: Tensor, group: Sequence[_Form]) -> list[Tensor]:
        starts = itertools.accumulate((form.padded for form in group), initial=0)
        tensors = []
        for start, form in zip(starts, group, strict=False):
            part = buffer[start : start + form.nbytes].view(form.dtype).view(form.shape)
            # A copy, where others are in the same memory.
            tensors.append(part.to(self._device if form.is_on_device else "cpu", copy=len(group) > 1))
        return tensors


class _Form(NamedTuple):
    """What a tensor looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_device: bool
    nbytes: int

    @property
    def padded(self) -> int:
        """Bytes up to where the next tensor may begin."""
        return -(-self.nbytes // _ALIGNED) * _ALIGNED


def pack(value: Any, known: Sequence[Tensor] = ()) -> tuple[bytes, list[Tensor]]:
    """An object in two parts: its tensors, each once, and all the rest.

    Args:
        value: The object.
        known: Tensors that the receiver has, of which only their places travel.

    Raises:
        MisconfigurationException: If it cannot be pickled.

    Example:
        >>> w = torch.ones(2)
        >>> rest, tensors = pack({"w": w, "again": w, "lr": 0.1})
        >>> tensors, unpack(rest, tensors)["lr"]
        ([tensor([1., 1.])], 0.1)

    """
    file = io.BytesIO()
    pickler = _Pickler(file, known)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise MisconfigurationException(
            f"Expected what goes from one process to the others to be picklable, but got {error}. An aggregator must be"
            " made of tensors, numbers and plain objects, without lambdas and open files; or leave them out in its"
            " `__getstate__`."
        ) from error
    return file.getvalue(), pickler.tensors


def unpack(rest: bytes, tensors: Sequence[Tensor], known: Sequence[Tensor] = ()) -> Any:
    """What :func:`pack` took apart: with these tensors, which it holds without copying them."""
    unpickler = _Unpickler(io.BytesIO(rest))
    unpickler.tensors, unpickler.known = tensors, known
    return unpickler.load()


class _Pickler(pickle.Pickler):
    """Leaves tensors out: of known ones it writes the place among those, of others that among ``tensors``."""

    def __init__(self, file: io.BytesIO, known: Sequence[Tensor]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._places = {id(tensor): ("known", place) for place, tensor in enumerate(known)}

    def persistent_id(self, value: Any) -> tuple[str, Any] | None:
        if not isinstance(value, Tensor):
            return None
        if value.is_meta:  # has no values
            return "meta", (tuple(value.shape), value.dtype)
        if id(value) not in self._places:
            self._places[id(value)] = "new", len(self.tensors)
            self.tensors.append(value)  # which also keeps its `id` from becoming another's
        return self._places[id(value)]


class _Unpickler(pickle.Unpickler):
    tensors: Sequence[Tensor]
    known: Sequence[Tensor]

    def persistent_load(self, saved: tuple[str, Any]) -> Tensor:
        kind, place = saved
        if kind == "meta":
            shape, dtype = place
            return torch.empty(shape, dtype=dtype, device="meta")
        found: Tensor = (self.known if kind == "known" else self.tensors)[place]
        return found


def _describe(tensor: Tensor) -> _Form:
    if tensor.layout != torch.strided:
        raise MisconfigurationException(f"Expected dense tensors to send to other processes, but got {tensor.layout}.")
    size = tensor.numel() * tensor.element_size()
    return _Form(tuple(tensor.shape), tensor.dtype, tensor.device.type != "cpu", size)


def _groups(forms: Sequence[_Form]) -> Iterator[list[_Form]]:
    """Runs of small tensors, of about a megabyte together; large ones each alone."""
    group: list[_Form] = []
    for form in forms:
        if group and sum(each.padded for each in group) + form.padded > _SMALL:
            yield group
            group = []
        group.append(form)
    if group:
        yield group


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _padded(value: Tensor) -> Tensor:
    return torch.nn.functional.pad(value, (0, -len(value) % _ALIGNED))


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        error.add_note("Another process of this fit may have died: its own error, in its own output, says of what.")
        raise
