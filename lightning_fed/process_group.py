"""Communication between processes with different clients, and base classes for a Lightning strategy.

Tensors are sent as raw memory. All other objects (numbers, names, containers) are pickled.
"""

from __future__ import annotations

import io
import itertools
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_fed.messages import State

_SMALL = 1 << 20  # bytes: smaller tensors are sent in one message, because every message has a latency
_ALIGNED = 16


class ProcessGroup:
    """The processes that train a federation's clients. This base class represents a single process.

    Attributes:
        rank: Index of this process, from 0.
        size: Number of processes.
        is_independent: Whether communication is disabled, because the processes train different clients.
    """

    rank = 0
    size = 1
    is_independent = False

    @contextmanager
    def independent(self) -> Iterator[None]:
        """Context in which the processes train different clients, without communication."""
        was_independent, self.is_independent = self.is_independent, True
        try:
            yield
        finally:
            self.is_independent = was_independent

    def gather_one_by_one(self, value: Any, known: Sequence[Tensor] = ()) -> Iterator[Any]:
        """Yields each process's value in rank order. At most two values are in memory at once.

        All processes must call the method and exhaust the iterator.

        Args:
            value: This process's value: any picklable object, possibly with tensors inside.
            known: Tensors with equal values and order in all processes, which are not sent.

        Raises:
            MisconfigurationException: If ``value`` cannot be pickled.
        """
        yield value

    def gather(self, value: Any) -> list[Any]:
        """Returns a list with the value of each process, in rank order, in every process."""
        return list(self.gather_one_by_one(value))

    def broadcast(self, value: Any) -> Any:
        """Returns the value of the first process in every process."""
        return value


SINGLE_PROCESS = ProcessGroup()
"""A group of one process."""


class RoundSynchronisation(ABC):
    """Exchanges updates and reports between processes. Each process trains some of the round's clients.

    Attributes:
        visit_costs: Durations of earlier local trainings (:class:`~lightning_fed.data.round_plan.VisitCosts`), to
            balance work.
        driver: Class that trains a process's clients: a :class:`~lightning_fed.rounds.visit_driver.VisitDriver`.
    """

    visit_costs: Any
    driver: Any

    @abstractmethod
    def start_round(self) -> None:
        """Called before the first batch of a round. The processes then run independently until :meth:`join`."""

    @abstractmethod
    def join(self, state: State, optimizers: Any, cohort: Any, is_cut: bool = False) -> None:
        """Merges the updates and reports of all processes at the end of a round.

        ``is_cut``: whether this process left the round before the last batch. All processes then raise an error.
        """

    @abstractmethod
    def check_state(self, local: Any) -> None:
        """Raises an error if the processes' global models differ by more than rounding errors."""

    @abstractmethod
    def end_round(self) -> None:
        """Enables the Trainer's communication between processes again, which :meth:`start_round` has disabled."""

    @abstractmethod
    def abort(self) -> None:
        """Disables communication in this process after an error. The process then waits for no other process."""

    @abstractmethod
    def release(self) -> None:
        """Re-enables the synchronisation of the module's metrics between processes, disabled during a round."""


class ClientSharing(ABC):
    """Base class of Lightning strategies with several processes. Each process trains some of the round's clients."""

    @property
    @abstractmethod
    def process_group(self) -> ProcessGroup:
        """The processes for training a round's clients. Before the Trainer launches processes, only this process."""

    @abstractmethod
    def callbacks(self) -> Sequence[L.Callback]:
        """Returns the callbacks to add to a Trainer with this strategy."""

    @abstractmethod
    def synchronise(self, fit: Any) -> RoundSynchronisation:
        """Creates the object to merge the processes' results after each round. Refuses fits that need one process."""


def process_group_of(trainer: L.Trainer) -> ProcessGroup:
    """Returns the processes for training a federation's clients; by default a single process."""
    strategy = trainer.strategy
    return strategy.process_group if isinstance(strategy, ClientSharing) else SINGLE_PROCESS


def sharing_strategy(trainer: L.Trainer) -> ClientSharing | None:
    """Returns the Trainer's strategy if several processes train different clients; otherwise ``None``."""
    strategy = trainer.strategy
    return strategy if isinstance(strategy, ClientSharing) and strategy.process_group.size > 1 else None


class TorchProcessGroup(ProcessGroup):
    """The processes in ``torch.distributed``'s default group."""

    def __init__(self, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._device = device
        self._wire = device if dist.get_backend() == "nccl" else torch.device("cpu")  # gloo needs tensors on the CPU

    def gather_one_by_one(self, value: Any, known: Sequence[Tensor] = ()) -> Iterator[Any]:
        rest, tensors = pack(value, known)
        headers: list[Any] = [None] * self.size
        with _noting_dead_peers():
            dist.all_gather_object(headers, (rest, [_describe(tensor) for tensor in tensors], len(known)))
        if len({count for _, _, count in headers}) > 1:
            raise RuntimeError(
                "A message between processes refers to an unknown tensor. This is a bug in `lightning_fed`."
            )
        for source, (pickled, forms, _) in enumerate(headers):
            received = self._broadcast_tensors(source, tensors if source == self.rank else None, forms)
            yield unpack(pickled, received, known)

    def broadcast(self, value: Any) -> Any:
        rest, tensors = pack(value) if self.rank == 0 else (b"", [])
        header: list[Any] = [(rest, [_describe(tensor) for tensor in tensors])]
        with _noting_dead_peers():
            dist.broadcast_object_list(header, src=0)
        rest, forms = header[0]
        return unpack(rest, self._broadcast_tensors(0, tensors if self.rank == 0 else None, forms))

    def _broadcast_tensors(self, source: int, tensors: Sequence[Tensor] | None, forms: Sequence[_Form]) -> list[Tensor]:
        received: list[Tensor] = []
        for group in _groups(forms):
            sent = None if tensors is None else tensors[len(received) : len(received) + len(group)]
            if sent is None:
                size = sum(form.padded for form in group) if len(group) > 1 else group[0].nbytes
                buffer = torch.empty(size, dtype=torch.uint8, device=self._wire)
            elif len(sent) == 1:
                buffer = _as_bytes(sent[0]).to(self._wire)
            else:
                buffer = torch.cat([_padded(_as_bytes(tensor)).to(self._wire) for tensor in sent])
            if len(buffer):
                with _noting_dead_peers():
                    dist.broadcast(buffer, src=source)
            received += self._cut(buffer, group) if sent is None else sent
        return received

    def _cut(self, buffer: Tensor, group: Sequence[_Form]) -> list[Tensor]:
        starts = itertools.accumulate((form.padded for form in group), initial=0)
        tensors = []
        for start, form in zip(starts, group, strict=False):
            part = buffer[start : start + form.nbytes].view(form.dtype).view(form.shape)
            # A copy, because a view would keep the whole common buffer in memory.
            tensors.append(part.to(self._device if form.is_on_device else "cpu", copy=len(group) > 1))
        return tensors


class _Form(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_device: bool
    nbytes: int

    @property
    def padded(self) -> int:
        return -(-self.nbytes // _ALIGNED) * _ALIGNED


def pack(value: Any, known: Sequence[Tensor] = ()) -> tuple[bytes, list[Tensor]]:
    """Pickles an object without its tensors. Returns the bytes and the tensors.

    Tensors in ``known`` are omitted, because the receiver already has equal tensors. A tensor used twice is returned
    once.

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
            f"Expected objects for other processes to be picklable, but got {error}. An aggregator must consist of"
            " tensors, numbers and plain objects, without lambdas and open files; or exclude these in `__getstate__`."
        ) from error
    return file.getvalue(), pickler.tensors


def unpack(rest: bytes, tensors: Sequence[Tensor], known: Sequence[Tensor] = ()) -> Any:
    """Rebuilds an object from the two results of :func:`pack`. ``known`` has tensors equal to ``known`` in ``pack``."""
    unpickler = _Unpickler(io.BytesIO(rest))
    unpickler.tensors, unpickler.known = tensors, known
    return unpickler.load()


class _Pickler(pickle.Pickler):
    """Replaces each tensor by an index into ``known`` or into ``tensors``, a list with all other tensors."""

    def __init__(self, file: io.BytesIO, known: Sequence[Tensor]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._references = {id(tensor): ("known", index) for index, tensor in enumerate(known)}

    def persistent_id(self, value: Any) -> tuple[str, Any] | None:
        if not isinstance(value, Tensor):
            return None
        if value.is_meta:  # has no values
            return "meta", (tuple(value.shape), value.dtype)
        if id(value) not in self._references:
            self._references[id(value)] = "new", len(self.tensors)
            self.tensors.append(value)  # a reference, so that the `id` stays unique
        return self._references[id(value)]


class _Unpickler(pickle.Unpickler):
    tensors: Sequence[Tensor]
    known: Sequence[Tensor]

    def persistent_load(self, reference: tuple[str, Any]) -> Tensor:
        kind, index = reference
        if kind == "meta":
            shape, dtype = index
            return torch.empty(shape, dtype=dtype, device="meta")
        tensor: Tensor = (self.known if kind == "known" else self.tensors)[index]
        return tensor


def _describe(tensor: Tensor) -> _Form:
    if tensor.layout != torch.strided:
        raise MisconfigurationException(
            f"Expected dense tensors for sending to other processes, but got {tensor.layout}."
        )
    size = tensor.numel() * tensor.element_size()
    return _Form(tuple(tensor.shape), tensor.dtype, tensor.device.type != "cpu", size)


def _groups(forms: Sequence[_Form]) -> Iterator[list[_Form]]:
    # Consecutive small tensors share a message of up to `_SMALL` bytes.
    group: list[_Form] = []
    for form in forms:
        if group and sum(small.padded for small in group) + form.padded > _SMALL:
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
def _noting_dead_peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        error.add_note("Another process of this fit may have ended: see the output of that process.")
        raise
