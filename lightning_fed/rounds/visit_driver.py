"""Trains a round's clients one by one in Lightning's training loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch

from lightning_fed.console import round_number
from lightning_fed.data.population import PlannedVisit
from lightning_fed.data.round_loader import RoundLoader
from lightning_fed.errors import ClientFault, VisitTimeout
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.lightning.internals import (
    OverriddenMethod,
    ends_after_batch,
    exchange_last_batch,
    exchange_max_steps,
    implements,
)
from lightning_fed.rounds.client_errors import client_fault
from lightning_fed.rounds.visit_flow import ClientVisit

_log = logging.getLogger(__name__)


class VisitDriver:
    """Trains the clients of one round, by overriding the module's batch hooks.

    Attributes:
        current: The client in training; ``None`` between clients, and while several clients train at once.
        group: All clients in training: usually one.
        open_visit: Creates a :class:`ClientVisit`, which trains a client.
        may_end_early: Whether the round may end before the last batch.
    """

    may_end_early = True

    def __init__(
        self, fit: FederatedFit, loader: RoundLoader, open_visit: Callable[[PlannedVisit], ClientVisit]
    ) -> None:
        self.fit, self.open_visit = fit, open_visit
        self._loader, self._module = loader, fit.module
        self.current: ClientVisit | None = None
        self.group: Sequence[PlannedVisit] = ()
        self._has_loss = False
        self._is_skipped = False  # after the module has ended the visit
        self._methods: dict[str, OverriddenMethod] = {}

    def attach(self, close_round: Callable[[], bool], batch_loop: Any) -> None:
        """Overrides the module's batch hooks until :meth:`detach`.

        ``close_round`` ends the round, and returns whether the aggregation succeeded. ``batch_loop`` is a faster
        replacement of Lightning's loop (:class:`~lightning_fed.backends.fused.BatchLoop`), or ``None``.
        """
        module, self._close_round, self._batch_loop = self._module, close_round, batch_loop
        self._max_steps, self._has_one_client = self.fit.trainer.max_steps, self.fit.has_one_client
        self._has_batch_end = implements(module, "on_train_batch_end", L.LightningModule)
        hooks = {"backward": self._on_backward, "training_step": self._training_step}
        hooks["on_train_batch_end"] = self._on_train_batch_end
        if implements(module, "on_train_batch_start", L.LightningModule):
            hooks["on_train_batch_start"] = self._on_train_batch_start
        self._methods = {name: OverriddenMethod(module, name, hook) for name, hook in hooks.items()}

    def detach(self) -> None:
        methods, self._methods = self._methods, {}
        for method in methods.values():
            method.restore()
        if methods:
            exchange_max_steps(self.fit.trainer, self._max_steps)

    def find_cut(self) -> bool:
        loader, trainer = self._loader, self.fit.trainer
        if not (self._has_one_client or loader.is_over) and -1 != trainer.max_steps <= trainer.global_step:
            exchange_max_steps(trainer, trainer.global_step + 1)  # the fit ends with the round
        is_inside = loader.current is not None and not loader.is_over
        return self.may_end_early and is_inside and ends_after_batch(trainer)

    def start_batch(self) -> None:
        if self._loader.group and self.group is not self._loader.group:
            self.start(self._loader.group)

    def start(self, group: Sequence[PlannedVisit]) -> None:
        self.group = group
        self.current = self.open_visit(group[0])
        self.current.advance()
        self._has_loss = False  # a pass over the data before the first batch is not counted

    def train_step(self, training_step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Calls the module's training step on a client's batch.

        After an error the client is excluded. The method then returns ``None``, so that Lightning skips the batch.
        """
        visit = self.current
        assert visit is not None
        planned = visit.planned
        if planned.fault is not None:
            return self._skip_batch()
        try:
            with self._loader.interrupting():
                if args:
                    args = (visit.prepare_batch(args[0]), *args[1:])
        except (ClientFault, VisitTimeout) as error:
            planned.fail(str(error), error)
            return self._skip_batch()
        # Manual optimization disables the gradients of some parameters during a step.
        parameters = () if self._module.automatic_optimization else self._module.parameters()
        switches = [(parameter, parameter.requires_grad) for parameter in parameters]
        try:
            with self._loader.interrupting():
                output = training_step(*args, **kwargs)
        except Exception as error:
            self._fail(planned, error)
            for parameter, is_on in switches:
                parameter.requires_grad_(is_on)
            return self._skip_batch()
        self._has_loss = self._has_loss or output is not None
        return output

    def end(self, group: Sequence[PlannedVisit]) -> None:
        planned = group[0]
        clock = self._loader.clock
        if clock is not None:
            if planned.fault is None and clock.is_up:
                planned.fault = str(clock.timeout())
            clock.stop()
        if self.group is group:
            while self.current is not None and self.current.step is not None:  # again, for a skipped first batch
                self._advance()
        else:
            self._exclude(planned)
        self.group, self.current = (), None

    def close(self) -> None:
        self.detach()
        if self._loader.clock is not None:
            self._loader.clock.stop()
        if self.current is not None:
            self.current.close()
        self.group, self.current = (), None

    def _on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        loader, planned = self._loader, self._loader.current
        self._is_skipped = planned is not None and planned.is_over
        if self._is_skipped:
            return None
        with self._counting_in_visit(batch_idx) as local_idx:
            response = self._methods["on_train_batch_start"].original(batch, local_idx)
        if response != -1 or planned is None:
            return response
        self._end_early(planned, planned.num_batches - loader.batches_left - 1)
        if planned is loader.visits[-1] and self.may_end_early:
            self._close_round()
            return -1
        self._is_skipped = True
        return None  # other clients' batches follow

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_skipped:
            return self._skip_batch()
        if not self.group:  # between visits
            return self._methods["training_step"].original(*args, **kwargs)
        with self._counting_in_visit(0) as local_idx:
            if len(args) > 1:  # the batch, and the index if the step takes one
                args = (args[0], local_idx, *args[2:])
            return self.train_step(self._methods["training_step"].original, args, kwargs)

    def _on_backward(self, *args: Any, **kwargs: Any) -> None:
        visit = self.current
        # Without a single visit, or inside a training step with manual optimization, the caller handles errors.
        if visit is None or not self._module.automatic_optimization:
            self._methods["backward"].original(*args, **kwargs)
            return
        try:
            with self._loader.interrupting():
                self._methods["backward"].original(*args, **kwargs)
        except Exception as error:
            self._fail(visit.planned, error)
            for parameter in self._module.parameters():  # the optimizer still steps, and a loss scale needs gradients
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None

    def _on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Ends a batch. If a faster loop is in use, the loop then trains the remaining batches."""
        self._end_batch(outputs, batch, batch_idx)
        if self._batch_loop is not None:
            self._batch_loop.train_rest(self._loader, self._end_batch)

    def _end_batch(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        loader, planned = self._loader, self._loader.current
        is_skipped = batch is None or self._is_skipped or (planned is not None and planned.fault is not None)
        self._is_skipped = False
        if is_skipped:
            self._skip_batch()
        elif self._has_batch_end:
            with self._counting_in_visit(batch_idx) as local_idx:
                self._methods["on_train_batch_end"].original(outputs, batch, local_idx)
        is_cut, group = self.find_cut(), loader.group
        if group and not group[0].is_over:
            if not loader.batches_left:
                self.end(group)
            elif self.group is group:
                self._advance()
        if is_cut and planned is not None:
            self.cut(planned)
        elif loader.is_over:
            self._close_round()

    def _end_early(self, planned: PlannedVisit, num_batches: int) -> None:
        planned.is_over, planned.num_batches = True, num_batches
        if planned.fault is None and not num_batches:
            planned.fault = "`on_train_batch_start` returned -1 before the client's first training step"
        self.end(self._loader.group)

    def cut(self, planned: PlannedVisit) -> None:
        """Ends a round early, because the fit ends. The server aggregates the updates received so far."""
        loader = self._loader
        if loader.batches_left and not planned.is_over:
            self._end_early(planned, planned.num_batches - loader.batches_left)
        has_aggregate = self._close_round()
        _log.warning(
            "Round %d was cut short: the fit ends in visit %d of %d, %s.",
            round_number(self.fit.server.report.round),
            loader.visits.index(planned) + 1,
            len(loader.visits),
            "and the updates so far are aggregated" if has_aggregate else "and the global model does not change",
        )

    @contextmanager
    def _counting_in_visit(self, batch_idx: int) -> Iterator[int]:
        position = self._loader.epoch_position
        if position is None:
            yield batch_idx
            return
        number, is_last = position
        before = exchange_last_batch(self.fit.trainer, is_last)
        try:
            yield number
        finally:
            exchange_last_batch(self.fit.trainer, before)

    def _advance(self) -> None:
        if self.current is not None and self.current.step is not None:
            self.current.advance(self._has_loss)
        self._has_loss = False

    def _exclude(self, planned: PlannedVisit) -> None:
        planned.fault = planned.fault or f"the client received none of the {planned.num_batches} planned batches"
        self.fit.server.fail(planned.visit.client, planned.fault, planned.error)

    def _fail(self, planned: PlannedVisit, error: Exception) -> None:
        fault = client_fault(error, planned)
        is_alone = self.fit.has_one_client and self.fit.options.faults.max_failed_rounds is not None
        if fault is None or is_alone or self.fit.has_ranks:
            raise error
        planned.fail(fault, error)
        if not isinstance(error, ClientFault):
            self._loader.population.log_raised("step", planned.visit.client, error.__notes__[-1])

    def _skip_batch(self) -> None:
        planned = self._loader.current
        if self.fit.has_ranks and planned is not None and planned.fault is not None:
            raise planned.error or ClientFault(planned.fault)  # the other processes wait for this batch
        self.fit.ignore_warning("`training_step` returned `None`")
