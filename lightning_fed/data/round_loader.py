"""Loader for one round, which Lightning reads as one epoch."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.console import round_number
from lightning_fed.data.interleave import ClientGenerators, StackedBatch, stack_batches
from lightning_fed.data.population import (
    PlannedVisit,
    Population,
    VisitBatch,
    batch_length,
    seed_everything,
    sequential_groups,
)
from lightning_fed.data.visit_clock import VisitClock
from lightning_fed.data.visit_costs import VisitCosts, balance_loads
from lightning_fed.errors import VisitTimeout, describe
from lightning_fed.messages import Client, find_bad_count
from lightning_fed.process_group import SINGLE_PROCESS, ProcessGroup
from lightning_fed.server.schedule import Cohort, Visit

_log = logging.getLogger(__name__)


_ENDLESS = 2**31
"""Batches of a stream without a length or limit, until it ends."""

_OF_LOADER = ("dataset", "batch_size", "num_workers", "sampler")


class VisitGroups(NamedTuple):
    """Rule for grouping visits that train at once.

    Args:
        size: Maximum visits per group.
        is_equal: Whether all visits in a group must have equally many batches.
        draws: Whether the visits also draw from Python's and NumPy's generators, in addition to PyTorch.

    """

    size: int
    is_equal: bool = False
    draws: bool = True


class EpochPosition(NamedTuple):
    """Batch index in a client's local epoch, and whether the batch is the last in the epoch or visit."""

    number: int
    is_last: bool


class RoundLoader:
    """Batches for a round's visits, one client after another; :attr:`current` is the current visit.

    The loader is a plain iterable with a length, because Lightning does not modify such loaders. Lightning calls
    ``iter`` twice in every epoch after the first, so an iterator does nothing before the first ``next``. A failed visit
    is completed with ``None`` batches, which Lightning skips.

    With several processes, each process serves a share of the visits, padded to the same number of batches.

    Args:
        population: The clients' data.
        cohort: The round's clients.
        limit: Maximum number of batches in the round (``limit_train_batches``).
        process_group: The round's processes.
        visit_costs: Expected duration of visits; by default proportional to the batches.
        visit_groups: Rule for simultaneous visits; by default visits train one by one.
        clock: Time limit for visits, except simultaneous visits; by default visits have no time limit.

    Attributes:
        visits: The visits in this process, in order.
        failed: Clients without usable data, with the reason.
        group: The visits of the last batch: one visit, or simultaneous visits with a list of
            :class:`~lightning_fed.data.interleave.StackedBatch`. Empty before the first visit and after the last one.
        numbers: Random generators for simultaneous visits.
        batches_left: Remaining batches in the group; after the last visit, in the padding.
        padding: The number of ``None`` batches after the last visit.
        on_start: Function called before the first batch is fetched.
        on_visit: Function called at the start of every visit, or visit group.
        on_end: Function called with a stream's last batch, before the loader returns the batch.
    """

    def __init__(
        self,
        population: Population,
        cohort: Cohort,
        limit: int | float = 1.0,
        process_group: ProcessGroup = SINGLE_PROCESS,
        visit_costs: VisitCosts | None = None,
        visit_groups: VisitGroups | None = None,
        clock: VisitClock | None = None,
    ) -> None:
        self.round = cohort.visits[0].round if cohort.visits else None
        self.population = population
        population.round = self.round or 0
        self.clock = VisitClock(None) if clock is None else clock
        self.visits: list[PlannedVisit] = []
        self.failed: dict[Client, str] = {}
        self.group: Sequence[PlannedVisit] = ()
        self.numbers: ClientGenerators | None = None
        self.batches_left = 0
        self.on_start: Callable[[], object] | None = None
        self.on_visit: Callable[[], object] | None = None
        self.on_end: Callable[[], object] | None = None
        self._reasons: list[str] = []  # visits whose data raised an exception
        self._errors: dict[Client, Exception] = {}  # reasons for clients without a visit
        self._limit = limit
        for position, planned in enumerate(self._look_up(cohort.visits, process_group)):
            if isinstance(planned, str):
                self.failed[cohort.visits[position].client] = planned
            else:
                planned.position = position
                self.visits.append(planned)
        self._apply_limit(limit)
        self._take_share(limit, process_group, visit_costs)
        self._groups = sequential_groups(self.visits)
        self._draws = True
        if visit_groups is not None:
            self._group_visits(visit_groups)

    def __len__(self) -> int:
        """Number of batches."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self.group, self.batches_left = (), 0
        if self.on_start is not None:
            self.on_start()
        if not self.visits:
            self._log_common_error()
        stream: Iterator[VisitBatch] | None = None
        self._is_stuck, self._first_of_stream, self._has_ended = False, 0, False
        for positions in self._groups:
            group = [self.visits[position] for position in positions]
            if self.on_visit is not None:
                self.on_visit()
            numbers = (
                ClientGenerators([planned.visit.seed for planned in group], self._draws) if len(group) > 1 else None
            )
            if numbers is None:
                seed_everything(group[0].visit.seed)  # before the first fetch, because the data set may augment
            else:
                numbers.switch_to(0)
            if self._is_stuck:  # in an interrupted visit, because a worker process may also be stuck
                stream, self._is_stuck, self._first_of_stream = None, False, positions[0]
                self.population.close()
            if stream is None:
                if len(self._groups) < len(self.visits):
                    stream = self.population.stream(self.visits, groups=self._groups)
                else:
                    stream = self.population.stream(self.visits[self._first_of_stream :])
            self.clock.start()
            for batches_left in range(group[0].num_batches - 1, -1, -1):
                if numbers is None:
                    is_given_up = group[0].fault is not None or group[0].is_over
                    batch = None if is_given_up else self._fetch(stream, positions[0])
                    if group[0].is_counted and batch is not None:
                        _count(group[0], batch, group[0].num_batches - 1 - batches_left)
                    if group[0].is_stream and (is_given_up or self._has_ended):
                        group[0].num_batches, batches_left = group[0].num_batches - batches_left, 0
                        if self.on_end is not None:
                            self.on_end()
                else:
                    batch = self._fetch_group(stream, positions, numbers, batches_left)
                self.group, self.numbers, self.batches_left = group, numbers, batches_left
                yield batch
                if not batches_left:
                    break
        for batches_left in range(self.padding - 1, -1, -1):
            self.group, self.batches_left = (), batches_left
            yield None

    @property
    def is_endless(self) -> bool:
        return any(planned.is_stream for planned in self.visits) and not isinstance(self._limit, int)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the user's loader, for a module's ``setup`` (for example to count classes)."""
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
        """The visit of the last batch; ``None`` outside visits and in larger groups."""
        return self.group[0] if len(self.group) == 1 else None

    @property
    def epoch_position(self) -> EpochPosition | None:
        if not self.group:
            return None
        planned = self.group[0]
        number = planned.num_batches - 1 - self.batches_left
        for length in planned.pass_batches:
            if number < length:
                return EpochPosition(number, self.batches_left == 0 or number + 1 == length)
            number -= length
        length = planned.epoch_batches or planned.num_batches
        return EpochPosition(number % length, self.batches_left == 0 or (number + 1) % length == 0)

    @property
    def errors(self) -> dict[Client, Exception]:
        raised = {planned.visit.client: planned.error for planned in self.visits if planned.error is not None}
        return {**self._errors, **raised}

    @property
    def is_over(self) -> bool:
        if self.batches_left:
            return False
        return not self.group or (self.group[-1] is self.visits[-1] and not self.padding)

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty state, because a resumed round starts again. This method lets Lightning resume exactly."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing, because the state is empty."""

    def _look_up(self, visits: Sequence[Visit], process_group: ProcessGroup) -> list[PlannedVisit | str]:
        planned: list[PlannedVisit | str] = [""] * len(visits)
        looked_up = [self._plan_visit(visit) for visit in visits[process_group.rank :: process_group.size]]
        for rank, part in enumerate(process_group.gather(looked_up)):
            planned[rank :: process_group.size] = part
        return planned

    def _plan_visit(self, visit: Visit) -> PlannedVisit | str:
        try:
            with self.clock.visit():
                is_counted = self.population.is_counted(visit.client)
                num_samples = 0 if is_counted else self.population.num_samples(visit.client)
                fault = None if is_counted else find_bad_count(num_samples)
                if fault is not None:
                    return "it has no examples" if num_samples == 0 else fault
                per_epoch = self.population.batches_per_epoch(visit.client)
                passes = self.population.batches_by_pass(visit)
        except Exception as error:
            item = VisitBatch.failed(0, error)
            self._errors[visit.client] = error
            return self._failure_reason(visit.client, item)
        is_stream = per_epoch is None and visit.steps is None
        if is_stream and not is_counted:
            reason = "has no length: set `local_steps`"
            self._errors[visit.client] = MisconfigurationException(f"The loader of client {visit.client!r} {reason}.")
            return f"its loader {reason}"
        if passes and visit.steps is None and visit.portion is None:
            num_batches = sum(passes)
        elif is_stream:
            num_batches = self._limit if isinstance(self._limit, int) else _ENDLESS
        else:
            num_batches = visit.num_batches((visit.steps or 0) if per_epoch is None else per_epoch)
        planned = PlannedVisit(
            visit,
            num_samples,
            num_batches,
            epoch_batches=per_epoch,
            is_stream=is_stream,
            is_counted=is_counted,
            pass_batches=passes,
        )
        if planned.num_batches == 0 and is_counted:
            return "its loader has no batch"
        if planned.num_batches == 0:
            return f"its {num_samples} examples make no full batch and `drop_last` is set"
        return planned

    def _take_share(self, limit: int | float, process_group: ProcessGroup, visit_costs: VisitCosts | None) -> None:
        """Limits the visits to this process's share, and sets the common length of all processes."""
        shares: Sequence[Sequence[int]] = [range(len(self.visits))]
        if process_group.size > 1:
            shares = balance_loads((visit_costs or VisitCosts()).expected(self.visits), process_group.size)
        batches = [sum(self.visits[position].num_batches for position in share) for share in shares]
        self.visits = [self.visits[position] for position in shares[process_group.rank]]
        self._chosen = len(self.visits) + len(self._reasons)  # number of clients in this process
        served = self._length = max(1, *batches)
        if isinstance(limit, float):  # Lightning takes this fraction of the length
            self._length = int(served / limit)
            while int(self._length * limit) < served:
                self._length += 1
            served = int(self._length * limit)
        self.padding = served - batches[process_group.rank]

    def _group_visits(self, rule: VisitGroups) -> None:
        self.visits.sort(key=lambda planned: planned.num_batches, reverse=True)
        self._draws, self._groups = rule.draws, []
        for position, planned in enumerate(self.visits):
            last = self._groups[-1] if self._groups else range(0)
            fits = not rule.is_equal or (last and self.visits[last[0]].num_batches == planned.num_batches)
            if last and fits and len(last) < rule.size:
                self._groups[-1] = range(last.start, position + 1)
            else:
                self._groups.append(range(position, position + 1))
        self._length = max(1, sum(self.visits[positions[0]].num_batches for positions in self._groups))

    def _fetch_group(
        self, stream: Iterator[VisitBatch], positions: range, numbers: ClientGenerators, batches_left: int
    ) -> list[StackedBatch] | None:
        number = self.visits[positions[0]].num_batches - 1 - batches_left
        batches = {}
        for index, position in enumerate(positions):
            planned = self.visits[position]
            if planned.fault is None and number < planned.num_batches:
                numbers.switch_to(index)
                batch = self._fetch(stream, position)
                if batch is not None:
                    batches[index] = batch
        return stack_batches(batches) or None

    def _fetch(self, stream: Iterator[VisitBatch], position: int) -> Any:
        try:
            with self.clock.interrupting():
                item = next(stream)
                while item.position + self._first_of_stream != position:
                    item = next(stream)  # a failed visit's batch, prefetched by a worker
        except Exception:
            if not self.clock.is_up:
                raise
            item = VisitBatch.failed(position, self.clock.timeout())
        planned = self.visits[position]
        self._has_ended = item.is_last or item.error is not None
        if item.error is not None:
            self._is_stuck = isinstance(item.error, VisitTimeout)
            planned.fault, planned.error = self._failure_reason(planned.visit.client, item), item.error
            self._log_common_error()
        return item.batch

    def _failure_reason(self, client: Client, item: VisitBatch) -> str:
        assert item.error is not None
        if item.trace:
            item.error.add_note(f"Raised by the data of client {client!r}:\n{item.trace}")
        if not self.population.has_raised:
            self.population.has_raised = True
            _log.warning(
                "The data of client %r raised (shown for the first client only):\n%s",
                client,
                item.trace or f"{describe(item.error)}\n",
            )
        if isinstance(item.error, VisitTimeout):
            return str(item.error)
        reason = describe(item.error)
        self._reasons.append(reason)
        return f"its data raised {reason}"

    def _log_common_error(self) -> None:
        if self._reasons and len(self._reasons) == self._chosen:
            reason, count = Counter(self._reasons).most_common(1)[0]
            assert self.round is not None
            _log.error(
                "Round %s failed: the data of all %d clients raised an exception, for %d clients %s. Look for the "
                "fault in the data set.",
                round_number(self.round),
                self._chosen,
                count,
                reason,
            )

    def _apply_limit(self, limit: int | float) -> None:
        total = sum(planned.num_batches for planned in self.visits)
        remaining = limit if isinstance(limit, int) else int(total * limit)
        if remaining >= total:
            return
        visits = []
        for planned in self.visits:
            planned.num_batches = min(planned.num_batches, remaining)
            remaining -= planned.num_batches
            if planned.num_batches:
                visits.append(planned)
        _log.warning(
            "`limit_train_batches` cuts the round from %d visits and %d batches to %d visits and %d batches.",
            len(self.visits),
            total,
            len(visits),
            sum(planned.num_batches for planned in visits),
        )
        self.visits = visits


def _count(planned: PlannedVisit, batch: Any, number: int) -> None:
    """Counts the examples of a batch in the first pass. A batch without tensors counts as one example."""
    if planned.epoch_batches is None or number < planned.epoch_batches:
        try:
            planned.num_samples += batch_length(batch)
        except ValueError:
            planned.num_samples += 1
