"""The round's loader: what Lightning iterates over in one epoch."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import Dataset

from lightning_fed.data.interleave import ClientGenerators, StackedBatch, sequential_groups, stack_batches
from lightning_fed.data.population import PlannedVisit, Population, VisitBatch, seed_everything
from lightning_fed.data.visit_costs import VisitCosts, balance_loads
from lightning_fed.messages import Client
from lightning_fed.process_group import SINGLE_PROCESS, ProcessGroup
from lightning_fed.server.schedule import Cohort, Visit

_log = logging.getLogger(__name__)


class VisitGroups(NamedTuple):
    """Which visits train at once.

    Args:
        size: At most how many.
        is_equal: Whether all of them must have as many batches.
        draws: Whether Python's and NumPy's random numbers matter, and not PyTorch's alone.

    """

    size: int
    is_equal: bool = False
    draws: bool = True


class EpochPosition(NamedTuple):
    """Which batch of a client's local epoch one is.

    Args:
        number: Index of the batch in the local epoch.
        is_last: Whether it is the last batch of the local epoch, or of the visit.

    """

    number: int
    is_last: bool


class RoundLoader:
    """The batches of a round's visits, one client after another, with a cursor that says whose batch this is.

    It is a plain iterable with a length, which Lightning leaves alone. Lightning calls ``iter`` twice in every epoch
    after the first: an iterator does nothing before its first ``next``. A visit that fails is padded with ``None``
    batches, which Lightning skips, so that the epoch keeps the length it was promised.

    Of several processes each asks some of the clients what they have, and serves its share of the visits. All serve
    as many batches as the one with the most: behind its last visit a process gives ``None``.

    Args:
        population: The clients' data.
        cohort: Who takes part in the round.
        limit: Largest number of batches of the round (``limit_train_batches``); visits beyond it are cut or left out.
        ranks: The processes that share the round.
        paces: What the visits are expected to take; by default their batches say so.
        together: Which visits train at once; by default none do.

    Attributes:
        visits: The visits that are served, in order.
        failed: Clients that have no data to serve, with the reason.
        group: The visits of the batch served last: one, or those that train at once, whose batch is a list of
            :class:`~lightning_fed.data.interleave.StackedBatch`. Nobody before the first, and behind the last.
        numbers: The random numbers of those that train at once.
        batches_left: Batches of the group that follow the one served last; behind the last visit those that
            are still given.
        padding: Batches that are given behind the last visit.
        on_start: Called before the first batch is fetched.

    """

    def __init__(
        self,
        population: Population,
        cohort: Cohort,
        limit: int | float = 1.0,
        ranks: ProcessGroup = SINGLE_PROCESS,
        visit_costs: VisitCosts | None = None,
        together: VisitGroups | None = None,
    ) -> None:
        self.round = cohort.visits[0].round if cohort.visits else None
        self.population = population
        self.visits: list[PlannedVisit] = []
        self.failed: dict[Client, str] = {}
        self.group: Sequence[PlannedVisit] = ()
        self.numbers: ClientGenerators | None = None
        self.batches_left = 0
        self.on_start: Callable[[], object] | None = None
        self._chosen = len(cohort.visits)
        self._reasons: list[str] = []  # of data that raised
        self._errors: dict[Client, Exception] = {}  # of clients without a visit
        for position, planned in enumerate(self._look_up(cohort.visits, ranks)):
            if isinstance(planned, str):
                self.failed[cohort.visits[position].client] = planned
            else:
                planned.position = position
                self.visits.append(planned)
        # A round without visits serves one `None`, so that the epoch runs, validates and logs.
        self._length = max(1, sum(planned.num_batches for planned in self.visits))
        self._limit(limit)
        self.padding = 0 if self.visits else 1
        if ranks.size > 1:
            self._share(limit, ranks, visit_costs or VisitCosts())
        self._turns = sequential_groups(self.visits)
        self._draws = True
        if together is not None:
            self._put_together(together)

    def __len__(self) -> int:
        """Batches without the limit, which Lightning applies to this number again."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self.group, self.batches_left = (), 0
        if self.on_start is not None:
            self.on_start()
        if not self.visits:
            self._look_at_raised()
        stream: Iterator[VisitBatch] | None = None
        for positions in self._turns:
            group = [self.visits[position] for position in positions]
            numbers = (
                ClientGenerators([planned.visit.seed for planned in group], self._draws) if len(group) > 1 else None
            )
            if numbers is None:
                seed_everything(group[0].visit.seed)  # before the first batch is fetched: it may be augmented
            else:
                numbers.switch_to(0)
            if stream is None:
                if len(self._turns) < len(self.visits):
                    stream = self.population.stream(self.visits, groups=self._turns)
                else:
                    stream = self.population.stream(self.visits)
            for left in range(group[0].num_batches - 1, -1, -1):
                if numbers is None:
                    batch = None if group[0].fault is not None else self._fetch(stream, positions[0])
                else:
                    batch = self._fetch_together(stream, positions, numbers, left)
                self.group, self.numbers, self.batches_left = group, numbers, left
                yield batch
        for left in range(self.padding - 1, -1, -1):
            self.group, self.batches_left = (), left
            yield None

    @property
    def dataset(self) -> Dataset[Any]:
        """The data set of all clients, as the user's own loader has it: to count classes in ``setup``, say.

        Raises:
            AttributeError: If every client has data of its own.

        """
        return self.population.dataset

    @property
    def current(self) -> PlannedVisit | None:
        """The visit of the batch served last; ``None`` before the first, behind the last, and for one of several."""
        return self.group[0] if len(self.group) == 1 else None

    @property
    def epoch_position(self) -> EpochPosition | None:
        """Where in its local epoch the batch served last is, of the first visit of the group; ``None`` of no visit."""
        if not self.group:
            return None
        planned = self.group[0]
        number = planned.num_batches - 1 - self.batches_left
        length = planned.epoch_batches or planned.num_batches
        return EpochPosition(number % length, self.batches_left == 0 or (number + 1) % length == 0)

    @property
    def errors(self) -> dict[Client, Exception]:
        """The exceptions by which clients have failed in this process."""
        raised = {planned.visit.client: planned.error for planned in self.visits if planned.error is not None}
        return {**self._errors, **raised}

    @property
    def is_over(self) -> bool:
        """Whether the batch served last is the round's last."""
        if self.batches_left:
            return False
        return not self.group or (self.group[-1] is self.visits[-1] and not self.padding)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a round that is resumed starts again. That there is one tells Lightning that resuming is exact."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing, likewise."""

    def _look_up(self, visits: Sequence[Visit], ranks: ProcessGroup) -> list[PlannedVisit | str]:
        """What is known of the clients' data before the round, or why they cannot take part."""
        planned: list[PlannedVisit | str] = [""] * len(visits)
        own = [self._planned(visit) for visit in visits[ranks.rank :: ranks.size]]
        for rank, theirs in enumerate(ranks.gather(own)):
            planned[rank :: ranks.size] = theirs
        return planned

    def _planned(self, visit: Visit) -> PlannedVisit | str:
        try:
            num_samples = self.population.num_samples(visit.client)
            per_epoch = self.population.batches_per_epoch(visit.client)
        except Exception as error:
            item = VisitBatch.failed(0, error)
            self._errors[visit.client] = error
            return self._raised(visit.client, item)
        if per_epoch is None and visit.steps is None:
            reason = "has no length: set `local_steps`"
            self._errors[visit.client] = MisconfigurationException(f"The loader of client {visit.client!r} {reason}.")
            return f"its loader {reason}"
        num_batches = visit.num_batches((visit.steps or 0) if per_epoch is None else per_epoch)
        planned = PlannedVisit(visit, num_samples, num_batches, epoch_batches=per_epoch)
        if num_samples == 0:
            return "it has no examples"
        if planned.num_batches == 0:
            return f"its {num_samples} examples make no full batch and `drop_last` is set"
        return planned

    def _share(self, limit: int | float, ranks: ProcessGroup, visit_costs: VisitCosts) -> None:
        """Leaves this process's share of the visits, and the length that all processes have."""
        shares = balance_loads(visit_costs.expected(self.visits), ranks.size)
        batches = [sum(self.visits[position].num_batches for position in share) for share in shares]
        self.visits = [self.visits[position] for position in shares[ranks.rank]]
        self._chosen = len(self.visits) + len(self._reasons)
        served = self._length = max(1, *batches)
        if isinstance(limit, float):  # of which Lightning takes this share of the length
            self._length = int(served / limit)
            while int(self._length * limit) < served:
                self._length += 1
            served = int(self._length * limit)
        self.padding = served - batches[ranks.rank]

    def _put_together(self, together: VisitGroups) -> None:
        """Makes groups of visits; those with about as many batches come together, so that few have to wait."""
        self.visits.sort(key=lambda planned: planned.num_batches, reverse=True)
        self._draws, self._turns = together.draws, []
        for position, planned in enumerate(self.visits):
            last = self._turns[-1] if self._turns else range(0)
            fits = not together.is_equal or (last and self.visits[last[0]].num_batches == planned.num_batches)
            if last and fits and len(last) < together.size:
                self._turns[-1] = range(last.start, position + 1)
            else:
                self._turns.append(range(position, position + 1))
        self._length = max(1, sum(self.visits[positions[0]].num_batches for positions in self._turns))

    def _fetch_together(
        self, stream: Iterator[VisitBatch], positions: range, numbers: ClientGenerators, left: int
    ) -> list[StackedBatch] | None:
        """One batch of each client that is not done yet."""
        number = self.visits[positions[0]].num_batches - 1 - left
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
        item = next(stream)
        while item.position != position:  # of a visit that has failed since: fetched ahead by a worker, or its turn
            item = next(stream)
        if item.error is not None:
            planned = self.visits[position]
            planned.fault, planned.error = self._raised(planned.visit.client, item), item.error
            self._look_at_raised()
        return item.batch

    def _raised(self, client: Client, item: VisitBatch) -> str:
        """Why a client is left out whose data raised; the first time, where they did goes to the log."""
        assert item.error is not None
        if item.trace:
            item.error.add_note(f"The data of client {client!r} raised it:\n{item.trace}")
        if not self.population.has_raised:
            self.population.has_raised = True
            _log.warning(
                "The data of client %r raised (this is shown for the first one only):\n%s",
                client,
                item.trace or f"{describe(item.error)}\n",
            )
        reason = describe(item.error)
        self._reasons.append(reason)
        return f"its data raised {reason}"

    def _look_at_raised(self) -> None:
        if self._reasons and len(self._reasons) == self._chosen:
            reason, count = Counter(self._reasons).most_common(1)[0]
            _log.error(
                "Round %s: the data of all %d clients raised, of %d with %s. Nothing came of it: look for the fault in"
                " the data set.",
                self.round,
                self._chosen,
                count,
                reason,
            )

    def _limit(self, limit: int | float) -> None:
        total = sum(planned.num_batches for planned in self.visits)
        left = limit if isinstance(limit, int) else int(total * limit)
        if left >= total:
            return
        kept = []
        for planned in self.visits:
            planned.num_batches = min(planned.num_batches, left)
            left -= planned.num_batches
            if planned.num_batches:
                kept.append(planned)
        _log.warning(
            "`limit_train_batches` cuts the round from %d visits and %d batches to %d visits and %d batches.",
            len(self.visits),
            total,
            len(kept),
            sum(planned.num_batches for planned in kept),
        )
        self.visits = kept


def describe(error: BaseException) -> str:
    """An exception in one line.

    Example:
        >>> describe(KeyError("image"))
        "KeyError: 'image'"

    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
