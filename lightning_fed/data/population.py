"""A federation's clients with their data, and random generators for reproducible batches."""

from __future__ import annotations

import logging
import random
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import ConcatDataset, DataLoader, Subset

from lightning_fed.errors import without_frames
from lightning_fed.messages import Client
from lightning_fed.numerics.seeds import derive_seed
from lightning_fed.server.schedule import Visit, count_visit_batches

_log = logging.getLogger(__name__)

Item = TypeVar("Item")

LONGEST_NAME = 1000
"""Characters in a client's name: logs, files and checkpoints hold many of them."""


@dataclass
class PlannedVisit:
    """One client's training in a round, called a visit, with its progress.

    Args:
        visit: The client with round, seed and planned epochs or steps.
        num_samples: Number of the client's examples.
        num_batches: Number of batches to train on. For a dataloader without length, the largest possible number.
        fault: Reason for a failure, if any.
        position: Index of the visit in the round, from 0.
        error: Exception that caused the failure, if any.
        epoch_batches: Batches in a local epoch. ``None`` if the data have no length.
        pass_batches: Batches in each local epoch, if the epochs differ in length. Otherwise empty.
        is_over: Whether the training has ended early.
        is_stream: Whether the dataloader has no length. The training then ends with the dataloader.
        is_counted: Whether the client's examples are counted during the first local epoch.
    """

    visit: Visit
    num_samples: int
    num_batches: int
    fault: str | None = None
    position: int = 0
    error: Exception | None = None
    epoch_batches: int | None = None
    is_over: bool = False
    is_stream: bool = False
    is_counted: bool = False
    pass_batches: tuple[int, ...] = ()

    def fail(self, fault: str, error: Exception) -> None:
        self.fault, self.error = fault, without_frames(error)


@dataclass(slots=True)
class VisitBatch:
    """One batch of a client's training, or the exception from loading the batch.

    ``position`` is the client's index in the round. ``is_last`` marks the last batch of a dataloader without length.
    """

    position: int
    batch: Any = None
    error: Exception | None = None
    trace: str = ""
    is_last: bool = False

    @classmethod
    def failed(cls, position: int, error: Exception) -> VisitBatch:
        """Creates an item with an exception instead of a batch."""
        # A traceback would keep worker processes alive.
        trace = "".join(traceback.format_exception(error))
        return cls(position, error=error.with_traceback(None), trace=trace)


class Population(ABC):
    """Base class for a federation's clients with their training data.

    Args:
        clients: The client names in a fixed order, such as ``range(1_000_000)``.

    Attributes:
        has_raised: Whether a client's data or training step has raised an exception.
        sampling: Draws the examples of every training batch, such as ``privacy.poisson.PoissonSampling``. By default
            an epoch passes over all examples.
        local_steps: Number of batches for a client in a round. If ``None``, the client trains for ``local_epochs``.
        local_epochs: Number of passes over a client's data in a round.
        round: Current round.
        overfit_batches: Number or fraction of each client's batches for training, as in the Trainer. 0 means all.
        split_loader: The user's dataloader, if a partition splits its data set.

    Raises:
        ValueError: If ``clients`` is empty, or a name is longer than :data:`LONGEST_NAME`.
        TypeError: If a client's name is neither a str nor an int.
    """

    has_raised = False
    sampling: Any = None
    local_steps: int | None = None
    local_epochs = 1
    round = 0
    overfit_batches: int | float = 0
    split_loader: DataLoader[Any] | None = None

    def __init__(self, clients: Sequence[Client]) -> None:
        if len(clients) == 0:
            raise ValueError("Expected `clients` to contain at least one client, but got none.")
        if isinstance(clients, list | tuple):  # other sequences may be too long to check
            _check_keys(clients)
        self.clients = clients

    @abstractmethod
    def num_samples(self, client: Client) -> int:
        """Number of a client's training examples."""

    @abstractmethod
    def batches_per_epoch(self, client: Client, isolated: bool = False) -> int | None:
        """Number of batches in a pass over a client's data, or ``None`` if unknown.

        An ``isolated`` pass, for example to count classes, does not influence training. The pass includes an
        incomplete last batch, unless a client's own dataloader drops this batch.
        """

    def batches_by_pass(self, visit: Visit) -> tuple[int, ...]:
        """Number of batches in each local epoch of a client. Empty if all local epochs have equal length."""
        return ()

    @abstractmethod
    def stream(
        self, visits: Sequence[PlannedVisit], isolated: bool = False, groups: Sequence[range] = ()
    ) -> Iterator[VisitBatch]:
        """Yields the batches of several clients. After an exception, the caller skips the client's other batches.

        Args:
            visits: The clients' planned training, in order.
            isolated: True if the batches are not for training, see :meth:`batches_per_epoch`.
            groups: Ranges of indices into ``visits``. The clients in a range yield one batch each in turn. By default
                one client follows another.
        """

    def one_pass(self, visit: Visit, isolated: bool = False) -> Iterator[Any]:
        """Yields the batches in one pass over a client's data.

        ``visit.seed`` determines the order. With ``isolated``, the pass does not influence training, and contains all
        examples if :meth:`gives_all` is true. If the data have no length, the pass has ``local_steps`` batches.
        """
        self.round = visit.round
        seed = derive_seed(visit.seed, 1)
        per_epoch = self.batches_per_epoch(visit.client, isolated)
        pass_visit = Visit(visit.client, visit.round, seed, steps=None if per_epoch else visit.steps)
        planned = PlannedVisit(
            pass_visit, self.num_samples(visit.client), count_visit_batches(pass_visit, per_epoch or 1)
        )
        seed_everything(seed)
        for item in self.stream([planned], isolated):
            if item.error is not None:
                raise item.error
            if item.batch is not None:
                yield item.batch

    def batches_to_overfit(self, per_epoch: int | None) -> int | None:
        """Limits the number of batches in a pass by the option ``overfit_batches``."""
        if not self.overfit_batches:
            return per_epoch
        if isinstance(self.overfit_batches, int):
            return self.overfit_batches if per_epoch is None else min(per_epoch, self.overfit_batches)
        return per_epoch and max(1, int(per_epoch * self.overfit_batches))

    def log_raised(self, origin: str, client: Client, trace: str) -> None:
        """Logs a client's exception, if this is the fit's first. ``origin`` names the place, such as "data"."""
        if not self.has_raised:
            self.has_raised = True
            text = "The %s of client %r raised an exception (logged only for the first client):\n%s"
            _log.warning(text, origin, client, trace)

    def is_counted(self, client: Client) -> bool:
        """True if the client's examples must be counted during the first pass."""
        return False

    def gives_all(self, client: Client) -> bool:
        """True if :meth:`one_pass` with ``isolated=True`` yields every example. False if some may be skipped."""
        return True

    def close(self) -> None:  # noqa: B027 - optional
        """Ends worker processes. Workers restart when needed."""


def interleave(streams: Iterable[Iterator[Item]]) -> Iterator[Item]:
    """Yields one item from each iterator in turn, until all iterators are exhausted."""
    active = list(streams)
    while active:
        for stream in list(active):
            try:
                yield next(stream)
            except StopIteration:
                active.remove(stream)


def sequential_groups(visits: Sequence[Any]) -> list[range]:
    """Returns one group per visit, each a range with one index, so that clients train one after another."""
    return [range(position, position + 1) for position in range(len(visits))]


def seed_everything(seed: int) -> None:
    """Seeds the global random generators of Python, NumPy and PyTorch, without a log message."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the user's data sets may use the global generator
    # `torch.manual_seed` inspects the stack for every uninitialised device, which slows down small visits.
    torch.default_generator.manual_seed(seed)
    module = _device_module()
    if module is not None:
        getattr(module, "manual_seed_all", module.manual_seed)(seed)


def torch_generator_states() -> tuple[torch.Tensor, Any]:
    """Returns the states of PyTorch's global random generators on the CPU and the accelerator."""
    module = _device_module()
    accelerator = None if module is None else getattr(module, "get_rng_state_all", module.get_rng_state)()
    return torch.default_generator.get_state(), accelerator


def restore_torch_generators(states: tuple[torch.Tensor, Any]) -> None:
    """Restores the states returned by :func:`torch_generator_states`."""
    cpu, accelerator = states
    torch.default_generator.set_state(cpu)
    module = _device_module()
    if module is not None and accelerator is not None:
        getattr(module, "set_rng_state_all", module.set_rng_state)(accelerator)


def _device_module() -> Any:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module: Any = torch.get_device_module(accelerator)
    is_in_use = getattr(module, "is_initialized", torch.accelerator.is_available)
    return module if is_in_use() else None


@contextmanager
def seeded_generators(seed: int | None = None) -> Iterator[None]:
    """Context that seeds the global random generators, and restores the earlier states afterwards.

    If ``seed`` is ``None``, the generators continue from the current states.

    Example:
        >>> seed_everything(1)
        >>> with seeded_generators():
        ...     inside = torch.rand(1)
        >>> torch.equal(torch.rand(1), inside)
        True
    """
    states = generator_states()
    if seed is not None:
        seed_everything(seed)
    try:
        yield
    finally:
        restore_generators(states)


def generator_states() -> tuple[Any, ...]:
    """Returns the states of all global random generators, in a form for checkpoints."""
    numpy: Any = np.random.get_state()  # noqa: NPY002 - for the user's data sets
    name, keys, *rest = numpy
    return random.getstate(), (name, torch.from_numpy(keys.astype(np.int64)), *rest), torch_generator_states()


def restore_generators(states: tuple[Any, ...] | None) -> None:
    """Restores states from :func:`generator_states`. Does nothing for ``None``."""
    if states is None:
        return
    python, (name, keys, *rest), torch_states = states
    random.setstate(python)
    np.random.set_state((name, keys.numpy(), *rest))  # noqa: NPY002
    restore_torch_generators(torch_states)


_training_threads: list[int] = []


@contextmanager
def in_one_thread() -> Iterator[None]:
    """Context for a fit. Refuses a second fit in another thread at the same time."""
    thread = threading.get_ident()
    _training_threads.append(thread)
    try:
        if set(_training_threads) != {thread}:
            raise MisconfigurationException(
                "Expected one federated fit at a time in a process, but another thread is running one. Both would "
                "draw from the same random generators, so neither would be reproducible: run each fit in a separate "
                "process."
            )
        yield
    finally:
        _training_threads.remove(thread)


class LazyClients(Mapping[Client, Any]):
    """Mapping that builds a client's data on every access, for any number of clients.

    Args:
        clients: The client names, such as a ``range``.
        build: Function from a client's name to the client's data set or dataloader.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> clients = LazyClients(range(1_000_000), lambda client: TensorDataset(torch.full((4, 1), client)))
        >>> len(clients), clients[123_456][0]
        (1000000, (tensor([123456]),))
    """

    def __init__(self, clients: Sequence[Client], build: Callable[[Client], Any]) -> None:
        self.clients = clients
        self.build = build

    def __getitem__(self, client: Client) -> Any:
        if client not in self.clients:
            raise KeyError(client)
        return self.build(client)

    def __contains__(self, client: object) -> bool:
        return client in self.clients  # does not build data

    def __len__(self) -> int:
        return len(self.clients)

    def __iter__(self) -> Iterator[Client]:
        return iter(self.clients)


def client_keys(clients: Mapping[Client, Any]) -> Sequence[Client]:
    """Returns the sorted client names in a mapping. The names in :class:`LazyClients` keep their order.

    Raises:
        TypeError: If a name is neither a str nor an int.
        ValueError: If a name is longer than :data:`LONGEST_NAME`.

    Example:
        >>> client_keys({"b": 1, "a": 2}), client_keys({10: 1, 9: 2})
        (['a', 'b'], [9, 10])
    """
    if isinstance(clients, LazyClients):
        return clients.clients
    _check_keys(clients)
    keys: Iterable[Client] = (int(key) if isinstance(key, np.integer) else key for key in clients)
    return sorted(keys, key=lambda client: (isinstance(client, str), client))


def _check_keys(clients: Iterable[Any]) -> None:
    for client in clients:
        if not isinstance(client, str | int | np.integer):
            raise TypeError(
                "Expected client keys of type str or int, because checkpoints and logs contain the keys, but got "
                f"{client!r} of type {type(client).__name__}."
            )
        if isinstance(client, str) and len(client) > LONGEST_NAME:
            raise ValueError(
                f"Expected client names with at most {LONGEST_NAME} characters, but got a name with {len(client)} "
                f"characters: {client[:50]!r}..."
            )


def batch_length(batch: Any) -> int:
    """Number of examples in a batch: the length of the first tensor.

    Raises:
        ValueError: If the batch contains no tensor.

    Example:
        >>> batch_length({"name": ["a", "b"], "image": torch.zeros(2, 3)})
        2
    """
    length = next(_lengths(batch), None)
    if length is None:
        raise ValueError(f"Expected a tensor in the batch, to count examples, but got {type(batch).__name__}.")
    return length


def _lengths(batch: Any) -> Iterator[int]:
    if isinstance(batch, torch.Tensor | np.ndarray):
        if batch.ndim:
            yield len(batch)
        return
    elements: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        elements = batch.values()
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        elements = batch
    elif is_dataclass(batch):
        elements = (getattr(batch, field.name) for field in fields(batch))
    for element in elements:
        yield from _lengths(element)


KnownClasses: TypeAlias = dict[Any, tuple[Any, str]]
"""Number by class name, and class name by number, each with the place of the first occurrence."""


def check_class_numbers(known: KnownClasses, client: Client | None, data: Any, stage: str = "training") -> None:
    """Checks that a client's class numbers agree with ``known``, and adds new classes to ``known``.

    ``data.class_to_idx`` maps class names to numbers, as in image folders. Raises ``ValueError`` if a number differs.
    """
    # An image folder numbers only existing classes, so a class missing at one site changes the numbers there.
    place = f"the {stage} data" if client is None else f"client {client!r}"
    if client is not None and stage != "training":
        place = f"the {stage} data of {place}"
    for name, number in (item for classes in _named_classes(data) for item in classes.items()):
        first_number, owner = known.setdefault(name, (number, place))
        first_name, namer = known.setdefault(number, (name, place))
        if first_number != number:
            fault = f"class {name!r} has number {first_number} at {owner} and {number} at {place}"
        elif first_name != name:
            fault = f"number {number} means {first_name!r} at {namer} and {name!r} at {place}"
        else:
            continue
        raise ValueError(
            f"Expected each class to have one number, but {fault}: use the same `class_to_idx` in every data set "
            "(for example, with empty folders for missing classes and `allow_empty=True`), or change the numbers by a "
            "`target_transform` and delete the outdated `class_to_idx`."
        )


def _named_classes(data: Any) -> Iterator[Mapping[str, int]]:
    classes = getattr(data, "class_to_idx", None)
    if isinstance(classes, Mapping):
        yield classes
    elif isinstance(data, ConcatDataset):
        for part in data.datasets:
            yield from _named_classes(part)
    elif isinstance(data, Subset | DataLoader):
        yield from _named_classes(data.dataset)
