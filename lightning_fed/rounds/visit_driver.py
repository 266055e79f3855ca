"""Driver for visits one by one: training steps in Lightning's loop, or in the fused loop, advance each visit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lightning_fed.data.population import PlannedVisit
from lightning_fed.data.round_loader import RoundLoader, VisitGroups
from lightning_fed.errors import ClientFault, VisitTimeout
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.rounds.client_errors import client_fault
from lightning_fed.rounds.visit_flow import ClientVisit

_log = logging.getLogger(__name__)


class VisitDriver:
    """Drives the visits during one round.

    Attributes:
        current: The current visit; ``None`` between visits, and while several visits train at once.
        group: The current visits.
        open_visit: Builds the client's half.
        trains_at_once: Whether grouped visits train at once.
    """

    trains_at_once = False

    def __init__(
        self, fit: FederatedFit, loader: RoundLoader, open_visit: Callable[[PlannedVisit], ClientVisit]
    ) -> None:
        self.fit, self.open_visit = fit, open_visit
        self._loader, self._module = loader, fit.module
        self.current: ClientVisit | None = None
        self.group: Sequence[PlannedVisit] = ()
        self._has_loss = False

    def start(self, group: Sequence[PlannedVisit]) -> None:
        """Starts grouped visits, before the first batch."""
        self.group = group
        self.fit.synchronisation.start_visit(group[0])
        self.current = self.open_visit(group[0])
        self.current.advance()
        self._has_loss = False  # a pass over the data before the first batch does not count

    def train_step(self, training_step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the module's training step on a batch.

        An error excludes the client. The result is then ``None``, so Lightning skips the batch.
        """
        visit = self.current
        assert visit is not None
        planned = visit.planned
        if planned.fault is not None:
            return self._skip_batch()
        try:
            with self._loader.clock.interrupting():
                if args:
                    args = (visit.prepare_batch(args[0]), *args[1:])
        except (ClientFault, VisitTimeout) as error:
            planned.fail(str(error), error)
            return self._skip_batch()
        # Manual optimization switches some parameters off during a step.
        parameters = () if self._module.automatic_optimization else self._module.parameters()
        switches = [(parameter, parameter.requires_grad) for parameter in parameters]
        try:
            with self._loader.clock.interrupting():
                output = training_step(*args, **kwargs)
        except Exception as error:
            self._fail(planned, error)
            for parameter, is_on in switches:
                parameter.requires_grad_(is_on)
            return self._skip_batch()
        self._has_loss = self._has_loss or output is not None
        return output

    def backward(self, backward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Runs the module's backward pass; an error excludes the client."""
        if not self._module.automatic_optimization:  # inside the training step
            backward(*args, **kwargs)
            return
        assert self.current is not None
        try:
            with self._loader.clock.interrupting():
                backward(*args, **kwargs)
        except Exception as error:
            self._fail(self.current.planned, error)
            for parameter in self._module.parameters():  # the optimizer steps, and a loss scale needs gradients
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None

    def end_batch(self) -> None:
        """Advances the visit after a batch; the last batch ends the visit."""
        self.fit.synchronisation.end_batch()
        group = self._loader.group
        if not group or group[0].is_over:
            return
        if not self._loader.batches_left:
            self.end(group)
        elif self.group is group:
            self._advance()

    def end_early(self, planned: PlannedVisit, num_batches: int) -> None:
        """Ends a visit before the last batch: the client sends the current model."""
        planned.is_over, planned.num_batches = True, num_batches
        if planned.fault is None and not num_batches:
            planned.fault = "`on_train_batch_start` returned -1 before it had trained"
        self.end(self._loader.group)

    def end(self, group: Sequence[PlannedVisit]) -> None:
        """Ends grouped visits after the last batch, also without a first batch."""
        planned = group[0]
        if planned.fault is None and self._loader.clock.is_up:
            planned.fault = str(self._loader.clock.timeout())
        self._loader.clock.stop()
        if self.group is group:
            while self.current is not None and self.current.step is not None:  # again for a skipped first batch
                self._advance()
        else:
            self._exclude(planned)
        self.group, self.current = (), None
        self.fit.synchronisation.end_visit(planned)

    def close(self) -> None:
        """Ends open visits without an update."""
        self._loader.clock.stop()
        if self.current is not None:
            self.current.close()
        self.group, self.current = (), None

    def _advance(self) -> None:
        if self.current is not None and self.current.step is not None:
            self.current.advance(self._has_loss)
        self._has_loss = False

    def _exclude(self, planned: PlannedVisit) -> None:
        planned.fault = planned.fault or f"it had none of its {planned.num_batches} batches"
        self.fit.server.fail(planned.visit.client, planned.fault, planned.error)

    def _fail(self, planned: PlannedVisit, error: Exception) -> None:
        """Marks a visit as failed; raises the error if the program cannot continue, or if the only client fails."""
        fault = client_fault(error, planned)
        is_alone = self.fit.has_one_client and self.fit.options.faults.max_failed_rounds is not None
        if fault is None or is_alone:
            raise error
        planned.fail(fault, error)
        if not isinstance(error, ClientFault) and not self._loader.population.has_raised:
            self._loader.population.has_raised = True
            trace = error.__notes__[-1]
            _log.warning(
                "The step of client %r raised (this is shown for the first one only):\n%s", planned.visit.client, trace
            )

    def _skip_batch(self) -> None:
        self.fit.ignore_warning("`training_step` returned `None`")


class VisitPlan(NamedTuple):
    """Plan for all visits in a fit: builds a round's driver, and groups simultaneous visits (or ``None``)."""

    driver: Callable[..., VisitDriver] = VisitDriver
    groups: VisitGroups | None = None
