"""The visits of a round, from top to bottom: what happens with one client.

For every visit (:meth:`Visits.start_group`, :meth:`Visits.train_step`, :meth:`Visits.end_group`):

1. :meth:`Visits.request`: the client asks for what it needs;
2. :meth:`Visits.send`: the server answers with a broadcast;
3. :meth:`Visits.unpack`: the client receives it;
4. :meth:`Visits.load`: the module becomes the client's model, with its own optimizer state;
5. :meth:`Visits.train_step`: Lightning trains it on the client's batches;
6. :meth:`Visits.answer`: the client makes its update;
7. :meth:`Visits.receive`: the server counts the update, checks it and adds it to the aggregate;
8. :meth:`Visits.keep`: the client keeps what is its own.

What the module holds meanwhile is in :mod:`lightning_fed.client.local_model`, the optimizers are in
:mod:`lightning_fed.client.local_optimizers`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.client.local_model import LocalModel
from lightning_fed.client.local_optimizers import OPTIMIZER
from lightning_fed.data.population import PlannedVisit
from lightning_fed.data.round_loader import RoundLoader
from lightning_fed.errors import ClientFault, VisitTimeout, describe, without_frames
from lightning_fed.federated_callback import FederatedCallback, federated_callbacks
from lightning_fed.fit.entry_policies import warn_of_filled
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.fit.round_start import RoundStart
from lightning_fed.lightning.internals import is_overridden
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State
from lightning_fed.model.entries import identical_entries
from lightning_fed.rounds.client_errors import client_fault
from lightning_fed.rounds.simultaneous_visits import SimultaneousVisits

_log = logging.getLogger(__name__)

_FIT = f"{OPTIMIZER}fit"  # of a kept optimizer state, where it is not the first one


@dataclass
class VisitModel:
    """A model in the middle of a visit.

    Args:
        state: The entries that the client trains, shared and personal.
        optimizers: State of the optimizers, per-step schedulers and loss scale; ``None`` for a model beside the one
            that the client was sent, with which they begin as at the start of a visit.

    """

    state: State
    optimizers: Mapping[str, Any] | None = None


class Visits:
    """The visits of one round.

    Args:
        fit: The fit; its module becomes one client's model after another.
        loader: Serves the batches of the visits.
        local: The module's entries.
        start: The global model, optimizers and schedulers as the round found them.
        untrained: Names of the entries that no client trains.
        executor: Trains several visits at once; ``None`` where they come one by one.

    Attributes:
        current: The visit that is under way, until its update is received; ``None`` between visits, and while several
            are.
        group: The visits that are under way.
        trains_sent_model: False while a client trains another model than the one that it was sent and will send.

    """

    def __init__(
        self,
        fit: FederatedFit,
        loader: RoundLoader,
        local: LocalModel,
        start: RoundStart,
        untrained: Sequence[str],
        executor: SimultaneousVisits | None = None,
    ) -> None:
        self.fit, self.local, self.start = fit, local, start
        self._loader, self._untrained, self._executor = loader, untrained, executor
        self._trainer, self._module, self._server = fit.trainer, fit.module, fit.server
        self._callbacks, self._server_callbacks = federated_callbacks(fit.trainer), fit.server_callbacks
        self.current: PlannedVisit | None = None
        self.group: Sequence[PlannedVisit] = ()
        self.trains_sent_model = True
        self._trained: set[int] = set()  # positions of the visits in which a step has given a loss
        self._suspended_memories: dict[int, State] = {}  # of the visits that are suspended, by position
        self._messages: dict[Client, tuple[Broadcast, State]] = {}  # to clients, and their entries as they arrived

    def start_group(self, group: Sequence[PlannedVisit]) -> None:
        """Starts a visit, or several that train at once, before their first batch."""
        self.group = group
        self.fit.synchronisation.start_visit(group[0])
        if len(group) == 1:
            self.start_visit(group[0])
        else:
            assert self._executor is not None
            for planned in group:
                if planned.fault is None:
                    self.start_visit(planned)
                    self.suspend_visit()
                self._executor.take()  # a client that has failed already has a row too, on which nothing is trained
            self._executor.start()

    def start_visit(self, planned: PlannedVisit) -> None:
        """Makes the module a client's model, by way of the server."""
        client, request = planned.visit.client, self.request(planned)
        if planned.fault is not None:  # it is sent nothing
            return
        try:
            broadcast = self.send(client, request)
            self.unpack(client, broadcast)
        except ClientFault as error:
            planned.fail(str(error), error)
            return
        self.load(client, request, broadcast)

    def request(self, planned: PlannedVisit) -> Request:
        """Begins a visit and makes its client's request; sets the visit's ``fault`` if the client cannot even ask."""
        self.current, self.trains_sent_model = planned, True
        client = planned.visit.client
        request = Request(client)
        try:
            self.local.recall(client)
        except ClientFault as error:  # what it has kept is lost
            planned.fail(str(error), error)
            return request
        for callback in self._callbacks:
            callback.on_client_request(self._trainer, self._module, client, request)
        unsliced = sorted(request.rows.keys() - self.local.sliced.keys())
        if unsliced and planned.fault is None:
            raise MisconfigurationException(
                f"A callback asks for rows of {unsliced}, which travel as a whole: name them in its `sliced_entries`."
            )
        return request

    def send(self, client: Client, request: Request | None = None) -> Broadcast:
        """Makes the server's message for a client, as callbacks change it before it is sent."""
        broadcast = self._server.prepare(client, request)
        for callback in self._server_callbacks:
            callback.on_server_send(self._trainer, self._module, client, broadcast)
        self._server.sent(client, broadcast)
        return broadcast

    def unpack(self, client: Client, broadcast: Broadcast) -> None:
        """Has callbacks unpack the message on the client's side."""
        self._messages[client] = broadcast, dict(broadcast.state)
        for callback in self._callbacks:
            callback.on_client_receive(self._trainer, self._module, client, broadcast)

    def load(self, client: Client, request: Request, broadcast: Broadcast) -> None:
        """Makes the module the client's model, and its optimizers fresh or those that the client has kept."""
        self.local.load_client(client, broadcast.state)
        kept = self.local.kept_optimizer_state(client) if self.fit.options.optimizer_state == "keep" else {}
        if kept.pop(_FIT, torch.tensor(0)) != self.fit.number:  # a fit begins with new optimizers
            kept = {}
        rows = [(self.local.sliced[name], rows) for name, rows in request.rows.items()]
        self.start.optimizers.start_visit(kept, rows)
        self._forget_gradients()
        for callback in self._callbacks:
            callback.on_client_start(self._trainer, self._module, client, broadcast)

    def train_step(self, training_step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the module's training step on a client's batch; a client that fails at it is left out of the round.

        Args:
            training_step: The module's own.
            args: Its arguments, of which the first is the batch.
            kwargs: Its keyword arguments.

        Returns:
            What the step returns; ``None``, with which Lightning skips the batch, where there is nothing to train.

        """
        if len(self.group) > 1 and self.current is None:
            assert self._executor is not None
            assert self._loader.numbers is not None
            loss = self._executor.step(self.group, training_step, args[0], args[1:], self._loader.numbers)
            self._trained.update(planned.position for planned in self.group)
            return self._skip_batch() if loss is None else loss
        planned = self.current or self.group[0]  # of a group, one that looks at its data before all of them train
        if planned.fault is not None:  # it failed before its first batch
            return self._skip_batch()
        try:
            with self._loader.clock.interrupting():
                if args:
                    args = (self._prepare_batch(planned.visit.client, args[0]), *args[1:])
        except (ClientFault, VisitTimeout) as error:
            planned.fail(str(error), error)
            return self._skip_batch()
        # Manual optimization switches some off in a step.
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
        if output is not None:
            self._trained.add(planned.position)
        return output

    def backward(self, backward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Runs the module's backward pass after a client's training step, at which the client may fail likewise.

        Args:
            backward: The module's own.
            args: Its arguments, of which the first is the loss.
            kwargs: Its keyword arguments.

        """
        if len(self.group) > 1 or not self._module.automatic_optimization:  # there it is part of the training step
            backward(*args, **kwargs)
            return
        (planned,) = self.group
        try:
            with self._loader.clock.interrupting():
                backward(*args, **kwargs)
        except Exception as error:
            self._fail(planned, error)
            for parameter in self._module.parameters():  # the optimizer steps all the same, and a loss scale wants some
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None

    def _fail(self, planned: PlannedVisit, error: Exception) -> None:
        """Marks a visit as failed by an error in the module's step; raises it where the program cannot go on."""
        fault = client_fault(error, planned)
        if fault is None or self._is_alone():
            raise error
        planned.fail(fault, error)
        if not isinstance(error, ClientFault) and not self._loader.population.has_raised:
            self._loader.population.has_raised = True
            trace = error.__notes__[-1]
            _log.warning(
                "The step of client %r raised (this is shown for the first one only):\n%s", planned.visit.client, trace
            )

    def _is_alone(self) -> bool:
        """True if this is the only client there is, so that nothing comes of a round without it."""
        return self.fit.has_one_client and self.fit.options.faults.max_failed_rounds is not None

    def _prepare_batch(self, client: Client, batch: Any) -> Any:
        for callback in self._callbacks:
            batch = callback.on_client_batch(self._trainer, self._module, client, batch)
        return batch

    def _skip_batch(self) -> None:
        self.fit.ignore_warning("`training_step` returned `None`")

    def end_batch(self, batches_left: int) -> None:
        """Runs after every batch; ``batches_left`` counts the group's batches that are still to come."""
        self.fit.synchronisation.end_batch()
        if len(self.group) > 1:
            assert self._executor is not None
            self._executor.end_batch(self.group, batches_left)

    def end_group(self, group: Sequence[PlannedVisit]) -> None:
        """Ends the visits of a group after their last batch, also if their first batch never came."""
        if len(group) == 1 and group[0].fault is None and self._loader.clock.is_up:
            group[0].fault = str(self._loader.clock.timeout())
        self._loader.clock.stop()
        if len(group) == 1:
            self.end_visit(group[0])
        else:
            assert self._executor is not None
            self._executor.leave()
            for row, planned in enumerate(group):
                if self.resume_visit(planned):
                    self._executor.put(row)
                self.end_visit(planned)
            self._executor.clear()
        self.group, self._suspended_memories = (), {}
        self.fit.synchronisation.end_visit(group[0])

    def end_visit(self, planned: PlannedVisit) -> None:
        """Brings a client's update to the server; what a client keeps is kept only if its update was good."""
        if planned.is_over and planned.fault is None and not self.trains_sent_model:
            planned.fault = "its visit was ended while it trained another model than the one that it sends"
        must_train = self._module.automatic_optimization and not self.fit.has_one_client
        if planned.fault is None and must_train and planned.position not in self._trained:
            planned.fault = f"its training step gave no loss in {planned.num_batches} batches"
        update = None
        if planned.fault is None:
            try:
                update = self.answer(planned)
            except ClientFault as error:
                planned.fail(str(error), error)
        if update is None:
            self._messages.pop(planned.visit.client, None)
            self._server.fail(planned.visit.client, planned.fault or "", planned.error)
        elif self.receive(update):
            self.keep(planned)
        self.leave()

    def answer(self, planned: PlannedVisit) -> ClientUpdate:
        """Makes the client's update, as callbacks change it before it is sent.

        Raises:
            ClientFault: If its personal entries are not fit to be kept.

        """
        client = planned.visit.client
        broadcast, came = self._messages.pop(client)
        fault = self.local.find_personal_fault(client)
        if fault is not None:
            raise ClientFault(f"of its personal entries, {fault}")
        # Callbacks may write into the update, which without them needs no copies of what has not changed.
        has_callbacks = any(is_overridden("on_client_end", hooks, FederatedCallback) for hooks in self._callbacks)
        update = self.local.answer(client, planned.num_samples, None if has_callbacks else self._unchanged_of(came))
        self._look_at_unset()
        for callback in self._callbacks:
            callback.on_client_end(self._trainer, self._module, client, update)
        update = self._server.chain.on_client(update, broadcast, self.local.memory)
        if update.state.keys() == came.keys():
            unchanged = self._unchanged_of(came)
            update.unsent = identical_entries(unchanged, update.state)
            update.state |= {name: unchanged[name] for name in update.unsent}
        return update

    def _look_at_unset(self) -> None:
        """Says it, once a fit, if a visit has written into buffers that do not travel because of their values."""
        fit = self.fit
        if not fit.unset or fit.has_warned("filled"):
            return
        frozen = [name for name in fit.unset if fit.policies[name] == "frozen"]
        filled = self.local.changed_server_entries(frozen)
        if filled:
            fit.note_warning("filled")
            warn_of_filled(filled)

    def _unchanged_of(self, came: State) -> State:
        return {name: came[name] for name in self._untrained if name in came}

    def receive(self, update: ClientUpdate) -> bool:
        """Counts, unpacks and checks an update, and has it aggregated; returns whether it was good."""
        if not self._server.count(update):
            return False
        try:
            for callback in self._server_callbacks:
                callback.on_server_receive(self._trainer, self._module, update)
        except Exception as error:  # the first half of a message may be good, what it is taken for is one client's
            reason = f"the server cannot read its update: {describe(error)}"
            return self._server.refuse(update.client, reason, without_frames(error))
        return self._server.accept(update)

    def keep(self, planned: PlannedVisit) -> None:
        """Stages the client's personal entries, memory and optimizer state until its next visit."""
        optimizer_state = self.start.optimizers.end_visit(planned.position)
        if optimizer_state and self.fit.number:
            optimizer_state[_FIT] = torch.tensor(self.fit.number)
        self.local.keep(planned.visit.client, planned.visit.round, optimizer_state)

    def leave(self) -> None:
        """Ends the visit that is under way, whatever came of it."""
        if self.current is None:  # the client's first batch failed, so that its visit never began
            return
        for callback in self._callbacks:
            callback.on_client_visit_end(self._trainer, self._module, self.current.visit.client)
        self.current = None

    def _forget_gradients(self) -> None:
        for parameter in self._module.parameters():  # the module's `zero_grad` is the user's, and not a visit's hook
            parameter.grad = None

    def exchange_model(self, model: VisitModel) -> VisitModel:
        """Makes the module another model in the middle of a visit; returns the one that it was."""
        optimizers = self.start.optimizers
        before = VisitModel(self.local.client_entries(), optimizers.snapshot())
        self.local.load_client_entries(model.state)
        self.trains_sent_model = model.optimizers is not None
        if model.optimizers is None:
            optimizers.start_visit()
        else:
            optimizers.resume(model.optimizers)
        self._forget_gradients()
        return before

    def suspend_visit(self) -> None:
        """Puts the visit that is under way aside, so that another one can start."""
        assert self.current is not None
        self._suspended_memories[self.current.position] = self.local.memory
        self.current = None

    def resume_visit(self, planned: PlannedVisit) -> bool:
        """Goes on with a visit that was suspended; returns whether it was."""
        memory = self._suspended_memories.pop(planned.position, None)
        if memory is None:
            return False
        self.current, self.local.memory = planned, memory
        return True

    def abandon(self) -> None:
        """Ends the visits that are under way; their clients are as before them."""
        self._loader.clock.stop()
        if self._executor is not None:
            self._executor.leave()
            self._executor.clear()
        self.leave()
        for planned in self.group:
            if self.resume_visit(planned):
                self.leave()
