"""Plan of a round: the clients to train, and the batches for each client."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.console import round_number
from lightning_fed.data.population import PlannedVisit, Population, VisitBatch, sequential_groups
from lightning_fed.errors import VisitTimeout, describe
from lightning_fed.messages import Client, find_bad_count
from lightning_fed.process_group import ProcessGroup
from lightning_fed.server.schedule import Cohort, Visit, count_visit_batches

_log = logging.getLogger(__name__)

_ENDLESS = 2**31
"""Batches of a stream without a length or limit, until it ends."""

_MOST = 100_000  # remembered clients


@dataclass
class PlannedRound:
    """Plan of a round in this process. ``failed`` maps clients without usable data to the reasons."""

    round: int | None
    visits: list[PlannedVisit] = field(default_factory=list)
    failed: dict[Client, str] = field(default_factory=dict)
    errors: dict[Client, Exception] = field(default_factory=dict)  # for clients without a visit
    reasons: list[str] = field(default_factory=list)  # from data with an exception
    groups: list[range] = field(default_factory=list)  # positions of simultaneous visits, or of one visit
    length: int = 1  # batches, as Lightning counts
    padding: int = 0
    num_clients: int = 0  # in this process

    def record_failure(self, population: Population, client: Client, item: VisitBatch) -> str:
        assert item.error is not None
        if item.trace:
            item.error.add_note(f"Raised while loading the data of client {client!r}:\n{item.trace}")
        population.log_raised("data", client, item.trace or f"{describe(item.error)}\n")
        if isinstance(item.error, VisitTimeout):
            return str(item.error)
        reason = describe(item.error)
        self.reasons.append(reason)
        return f"the client's data raised {reason}"

    def log_common_error(self) -> None:
        if self.reasons and len(self.reasons) == self.num_clients:
            reason, count = Counter(self.reasons).most_common(1)[0]
            assert self.round is not None
            _log.error(
                "Round %s failed: the data of all %d clients raised exceptions. The most frequent exception (for %d "
                "clients) is %s. The data set is probably at fault.",
                round_number(self.round),
                self.num_clients,
                count,
                reason,
            )


def plan_round(
    population: Population,
    cohort: Cohort,
    limit: int | float,
    process_group: ProcessGroup,
    visit_costs: VisitCosts | None,
    limit_visit: Callable[[], AbstractContextManager[None]],
) -> PlannedRound:
    """Plans a round: divides the clients among the processes, and counts the batches."""
    plan = PlannedRound(cohort.visits[0].round if cohort.visits else None)
    rank, size = process_group.rank, process_group.size
    planned_visits = [_plan_visit(plan, population, limit, limit_visit, visit) for visit in cohort.visits[rank::size]]
    if size > 1:
        parts = process_group.gather(planned_visits)
        planned_visits = [parts[position % size][position // size] for position in range(len(cohort.visits))]
    for position, planned in enumerate(planned_visits):
        if isinstance(planned, str):
            plan.failed[cohort.visits[position].client] = planned
        else:
            planned.position = position
            plan.visits.append(planned)
    _apply_limit(plan, limit)
    _take_share(plan, limit, process_group, visit_costs)
    plan.groups = sequential_groups(plan.visits)
    return plan


def _plan_visit(
    plan: PlannedRound,
    population: Population,
    limit: int | float,
    limit_visit: Callable[[], AbstractContextManager[None]],
    visit: Visit,
) -> PlannedVisit | str:
    try:
        with limit_visit():
            is_counted = population.is_counted(visit.client)
            num_samples = 0 if is_counted else population.num_samples(visit.client)
            fault = None if is_counted else find_bad_count(num_samples)
            if fault is not None:
                return "the client has no examples" if num_samples == 0 else fault
            per_epoch = population.batches_per_epoch(visit.client)
            passes = population.batches_by_pass(visit)
    except Exception as error:
        item = VisitBatch.failed(0, error)
        plan.errors[visit.client] = error
        return plan.record_failure(population, visit.client, item)
    is_stream = per_epoch is None and visit.steps is None
    if is_stream and not is_counted:
        reason = "has no length: set `local_steps`"
        plan.errors[visit.client] = MisconfigurationException(f"The loader of client {visit.client!r} {reason}.")
        return f"the client's loader {reason}"
    if passes and visit.steps is None and visit.portion is None:
        num_batches = sum(passes)
    elif is_stream:
        num_batches = limit if isinstance(limit, int) else _ENDLESS
    else:
        num_batches = count_visit_batches(visit, (visit.steps or 0) if per_epoch is None else per_epoch)
    planned = PlannedVisit(
        visit,
        num_samples,
        num_batches,
        epoch_batches=per_epoch,
        is_stream=is_stream,
        is_counted=is_counted,
        pass_batches=passes,
    )
    if planned.num_batches:
        return planned
    if is_counted:
        return "the client's loader returned no batch"
    return f"the client's {num_samples} examples do not fill a batch, and `drop_last` is set"


def _apply_limit(plan: PlannedRound, limit: int | float) -> None:
    total = sum(planned.num_batches for planned in plan.visits)
    remaining = limit if isinstance(limit, int) else int(total * limit)
    if remaining >= total:
        return
    visits = []
    for planned in plan.visits:
        planned.num_batches = min(planned.num_batches, remaining)
        remaining -= planned.num_batches
        if planned.num_batches:
            visits.append(planned)
    _log.warning(
        "`limit_train_batches` shortens the round from %d visits and %d batches to %d visits and %d batches.",
        len(plan.visits),
        total,
        len(visits),
        sum(planned.num_batches for planned in visits),
    )
    plan.visits = visits


def _take_share(
    plan: PlannedRound, limit: int | float, process_group: ProcessGroup, visit_costs: VisitCosts | None
) -> None:
    shares: Sequence[Sequence[int]] = [range(len(plan.visits))]
    if process_group.size > 1:
        shares = balance_loads((visit_costs or VisitCosts()).expected(plan.visits), process_group.size)
    batches = [sum(plan.visits[position].num_batches for position in share) for share in shares]
    plan.visits = [plan.visits[position] for position in shares[process_group.rank]]
    plan.num_clients = len(plan.visits) + len(plan.reasons)  # clients of this process
    served = plan.length = max(1, *batches)
    if isinstance(limit, float):  # Lightning takes this share of the length
        plan.length = int(served / limit)
        while int(plan.length * limit) < served:
            plan.length += 1
        served = int(plan.length * limit)
    plan.padding = served - batches[process_group.rank]


class VisitCosts:
    """Estimates the duration of clients' training from the measured seconds per batch.

    A client without a measurement gets the other clients' mean, or else 1 second per batch.

    Example:
        >>> from lightning_fed.server.schedule import Visit
        >>> visits = [PlannedVisit(Visit(client, 0, 0), 8, batches) for client, batches in zip("abc", (2, 2, 6))]
        >>> costs = VisitCosts()
        >>> costs.expected(visits)
        [2.0, 2.0, 6.0]
        >>> costs.note({"a": 0.5, "b": 1.5})
        >>> costs.expected(visits)
        [1.0, 3.0, 6.0]
    """

    def __init__(self) -> None:
        self._seconds: dict[Client, float] = {}

    def note(self, seconds: Mapping[Client, float]) -> None:
        for client, value in seconds.items():
            self._seconds.pop(client, None)  # recent clients stay the longest
            self._seconds[client] = value
        while len(self._seconds) > _MOST:
            del self._seconds[next(iter(self._seconds))]

    def expected(self, visits: Sequence[PlannedVisit]) -> list[float]:
        clients = [planned.visit.client for planned in visits]
        known = [self._seconds[client] for client in clients if client in self._seconds]
        usual = sum(known) / len(known) if known else 1.0
        return [planned.num_batches * self._seconds.get(planned.visit.client, usual) for planned in visits]


def balance_loads(work: Sequence[float], size: int) -> list[list[int]]:
    """Divides tasks with the durations ``work`` among ``size`` processes. Returns task indices by process."""
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [0.0] * size
    for position in sorted(range(len(work)), key=lambda position: -work[position]):
        least = loads.index(min(loads))
        loads[least] += work[position]
        shares[least].append(position)
    return [sorted(share) for share in shares]
