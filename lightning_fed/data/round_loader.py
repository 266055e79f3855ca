"""Dataloader for one round, which Lightning reads as one epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from lightning_fed.data.population import PlannedVisit, Population, VisitBatch, batch_length, seed_everything
from lightning_fed.data.round_plan import VisitCosts, plan_round
from lightning_fed.data.visit_clock import VisitClock
from lightning_fed.errors import VisitTimeout
from lightning_fed.messages import Client
from lightning_fed.process_group import SINGLE_PROCESS, ProcessGroup
from lightning_fed.server.schedule import Cohort

_OF_LOADER = ("dataset", "batch_size", "num_workers", "sampler")


class RoundLoader:
    """Iterable over the training batches of a round, one client after another.

    If a client's training fails, the client's remaining batches are ``None``. Lightning skips these batches. With
    several processes, each process has the batches for some clients.

    Args:
        population: The clients' data.
        cohort: The round's clients.
        limit: Maximum number of batches in the round, from ``limit_train_batches``.
        process_group: The processes for the round.
        visit_costs: Expected training time by client; by default proportional to the number of batches.
        clock: Time limit for each client's training; by default none. Not allowed if several clients train at once.

    Attributes:
        visits: The planned training for each client in this process, in order.
        failed: Clients without usable data, with the reason.
        group: The current client's planned training. Several items if several clients train at once.
        interrupting: Function that returns a context manager. The time limit interrupts the code inside.
        batches_left: Number of later batches for ``group``; after the last group, number of later ``padding`` batches.
        num_skipped: Batches to skip in a resumed fit, because the earlier fit has trained on these.
        padding: Number of ``None`` batches at the round's end. With these, all processes have equally many batches.
        on_start: Function called before the first batch is fetched.
        on_skipped: Function called after the skipped batches.
        on_visit: Function called at the start of every ``group``.
        on_end: Function called before the last batch of a dataloader without length.
    """

    def __init__(
        self,
        population: Population,
        cohort: Cohort,
        limit: int | float = 1.0,
        process_group: ProcessGroup = SINGLE_PROCESS,
        visit_costs: VisitCosts | None = None,
        clock: VisitClock | None = None,
    ) -> None:
        self.round = cohort.visits[0].round if cohort.visits else None
        self.population = population
        population.round = self.round or 0
        self.clock, limit_visit = clock, nullcontext if clock is None else clock.visit
        self.interrupting = nullcontext if clock is None else clock.interrupting
        self._plan = plan_round(population, cohort, limit, process_group, visit_costs, limit_visit)
        self.visits, self.failed, self.padding = self._plan.visits, self._plan.failed, self._plan.padding
        self.group: Sequence[PlannedVisit] = ()
        self.batches_left = self.num_skipped = 0
        self.on_start: Callable[[], object] = _do_nothing
        self.on_visit = self.on_skipped = self.on_end = self.on_start
        self._limit = limit

    def __len__(self) -> int:
        return self._plan.length

    def __iter__(self) -> Iterator[Any]:
        # Lightning calls `iter` twice in an epoch, so data are read only from the first `next` on.
        self.group, self.batches_left = (), 0
        self.on_start()
        if not self.visits:
            self._plan.log_common_error()
        stream: Iterator[VisitBatch] | None = None
        self._is_stuck, self._first_of_stream, self._has_ended = False, 0, False
        for positions in self._plan.groups:
            group = [self.visits[position] for position in positions]
            self.on_visit()
            self.seed(group)
            if self._is_stuck:  # in an interrupted visit, because a worker process may also be stuck
                stream, self._is_stuck, self._first_of_stream = None, False, positions[0]
                self.population.close()
            if stream is None:
                stream = self.open_stream()
            if self.clock is not None:
                self.clock.start()
            for batches_left in range(group[0].num_batches - 1, -1, -1):
                batch, batches_left = self.fetch(stream, positions, batches_left)
                self.group, self.batches_left = group, batches_left
                if self.num_skipped:  # fetched nevertheless: the data set may augment
                    self.num_skipped -= 1
                    if not self.num_skipped:
                        self.on_skipped()
                    continue
                yield batch
                if not batches_left:
                    break
        for batches_left in range(self.padding - 1, -1, -1):
            self.group, self.batches_left = (), batches_left
            yield None

    def seed(self, group: Sequence[PlannedVisit]) -> None:
        """Seeds the global random generators for clients trained together (``group``), with the first client's seed."""
        seed_everything(group[0].visit.seed)

    def open_stream(self) -> Iterator[VisitBatch]:
        return self.population.stream(self.visits[self._first_of_stream :])

    def fetch(self, stream: Iterator[VisitBatch], positions: range, batches_left: int) -> tuple[Any, int]:
        planned = self.visits[positions[0]]
        is_given_up = planned.fault is not None or planned.is_over
        batch = None if is_given_up else self._fetch(stream, positions[0])
        if planned.is_counted and batch is not None:
            _count(planned, batch, planned.num_batches - 1 - batches_left)
        if planned.is_stream and (is_given_up or self._has_ended):
            planned.num_batches, batches_left = planned.num_batches - batches_left, 0
            self.on_end()
        return batch, batches_left

    @property
    def is_endless(self) -> bool:
        return any(planned.is_stream for planned in self.visits) and not isinstance(self._limit, int)

    def __getattr__(self, name: str) -> Any:
        """Returns a public attribute of the user's training dataloader, such as ``dataset``."""
        if name not in _OF_LOADER:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if self.population.split_loader is None:
            raise AttributeError(
                "With separate data per client, the training loader has no common data set, batch size or sampler: "
                "use the FederatedDataModule's `clients`."
            )
        return getattr(self.population.split_loader, name)

    @property
    def current(self) -> PlannedVisit | None:
        return self.group[0] if len(self.group) == 1 else None

    @property
    def epoch_position(self) -> tuple[int, bool] | None:
        """Index of the latest batch in the client's local epoch, and whether this batch ends the epoch.

        The client's last batch always ends the epoch.
        """
        if not self.group:
            return None
        planned = self.group[0]
        number = planned.num_batches - 1 - self.batches_left
        for length in planned.pass_batches:
            if number < length:
                return number, self.batches_left == 0 or number + 1 == length
            number -= length
        length = planned.epoch_batches or planned.num_batches
        return number % length, self.batches_left == 0 or (number + 1) % length == 0

    @property
    def errors(self) -> dict[Client, Exception]:
        raised = {planned.visit.client: planned.error for planned in self.visits if planned.error is not None}
        return {**self._plan.errors, **raised}

    @property
    def is_over(self) -> bool:
        if self.batches_left:
            return False
        return not self.group or (self.group[-1] is self.visits[-1] and not self.padding)

    def _fetch(self, stream: Iterator[VisitBatch], position: int) -> Any:
        try:
            with self.interrupting():
                item = next(stream)
                while item.position + self._first_of_stream != position:
                    item = next(stream)  # a failed visit's batch, prefetched by a worker
        except Exception:
            if self.clock is None or not self.clock.is_up:
                raise
            item = VisitBatch.failed(position, self.clock.timeout())
        planned = self.visits[position]
        self._has_ended = item.is_last or item.error is not None
        if item.error is not None:
            self._is_stuck = isinstance(item.error, VisitTimeout)
            planned.fault = self._plan.record_failure(self.population, planned.visit.client, item)
            planned.error = item.error
            self._plan.log_common_error()
        return item.batch


def _do_nothing() -> None: ...


def _count(planned: PlannedVisit, batch: Any, number: int) -> None:
    if planned.epoch_batches is None or number < planned.epoch_batches:
        try:
            planned.num_samples += batch_length(batch)
        except ValueError:
            planned.num_samples += 1
