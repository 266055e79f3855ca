"""One round while it is open: visits go in, a new global model comes out."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_fed.backends.vectorized.stacked_model import StackedModel
from lightning_fed.client.client_store import ClientStore
from lightning_fed.client.local_model import LocalModel
from lightning_fed.client.local_optimizers import LocalOptimizers
from lightning_fed.data.population import PlannedVisit
from lightning_fed.errors import ClientFault
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State
from lightning_fed.model.entries import Policy, find_fault, tied_names, trainable_entries
from lightning_fed.rounds.callback import FederatedCallback
from lightning_fed.server.interface import ServerInterface

_log = logging.getLogger(__name__)


class Round:
    """Joins the client half, the server half and the callbacks between them, from a round's first batch to its last.

    Args:
        trainer: The Trainer.
        module: The module, which holds the global model.
        server: The server half, or the way to it.
        policies: The policy of every entry of the module.
        store: Where clients keep what is theirs.
        optimizer_state: Whether clients start with fresh optimizer state or with their own.
        stack: Where several visits are under way at once.

    Attributes:
        local: The module's entries.
        optimizers: The optimizers and schedulers.
        before: The global model's shared entries as the round found them.
        visit: The visit that is under way, until its answer is sent; ``None`` between visits, and while several are.
        group: The visits that are under way.
        is_new: Whether there is a new global model.

    """

    def __init__(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        server: ServerInterface,
        policies: Mapping[str, Policy],
        store: ClientStore,
        optimizer_state: Literal["reset", "keep"],
        stack: StackedModel | None = None,
    ) -> None:
        self._trainer = trainer
        self._stack = stack
        self._module = module
        self._server = server
        self._callbacks = federated_callbacks(trainer)
        self.local = LocalModel(module, policies, store, server.aggregator.resizes)
        # With manual optimization Lightning leaves the stepping, and so the interval, to the user.
        is_manual = not module.automatic_optimization
        configs = trainer.lr_scheduler_configs
        self._stepwise = [place for place, config in enumerate(configs) if is_manual or config.interval == "step"]
        self._epochwise = {
            place: copy.deepcopy(config.scheduler.state_dict())
            for place, config in enumerate(configs)
            if place not in self._stepwise
        }
        step_schedulers = [configs[place].scheduler for place in self._stepwise]
        epoch_schedulers = [
            config.scheduler
            for place, config in enumerate(configs)
            if place not in self._stepwise and not config.reduce_on_plateau
        ]
        scaler = trainer.precision_plugin if trainer.precision_plugin.state_dict() else None
        self.optimizers = LocalOptimizers(
            trainer.optimizers, step_schedulers, scaler, optimizer_state, epoch_schedulers
        )
        self.before = self.local.global_state()
        self.visit: PlannedVisit | None = None
        self.group: Sequence[PlannedVisit] = ()
        self._memories: dict[int, State] = {}  # of the clients that train at once, by place
        self.is_new = False
        self._broadcasts: dict[int, Broadcast] = {}  # by place of the visit, while it is under way
        server.aggregator.trainable = trainable_entries(module)
        server.start_round(trainer.current_epoch, self.before)

    def start_visits(self, group: Sequence[PlannedVisit]) -> None:
        """Makes the module the client's, or all the clients' of those who train at once: before their first batch."""
        self.group = group
        if len(group) == 1:
            self.start_visit(group[0])
            return
        assert self._stack is not None
        for planned in group:
            if planned.fault is None:
                self.start_visit(planned)
                self._memories[planned.position] = self.local.memory
                self.visit = None
            self._stack.take()  # of who failed already there is a row too, on which nothing is trained
        self._stack.enter(self._trainer.optimizers)

    def end_batch(self, batches_left: int) -> None:
        """Notes what those of the group have trained who are done before the others."""
        if self._stack is None or not self._stack.is_entered:
            return
        self._stack.check_step()
        if not batches_left:
            return
        done = self.group[0].num_batches - batches_left
        for row, planned in enumerate(self.group):
            if planned.num_batches == done:
                self._stack.end(row)

    def end_visits(self, group: Sequence[PlannedVisit]) -> None:
        """Sends the clients' answers: after their last batch."""
        if self._stack is not None:
            self._stack.leave()
        for row, planned in enumerate(group):
            memory = self._memories.pop(planned.position, None)
            if memory is not None:
                assert self._stack is not None
                self.visit, self.local.memory = planned, memory
                self._stack.put(row)
            self.end_visit(planned)
        if self._stack is not None:
            self._stack.clear()
        self.group, self._memories, self._broadcasts = (), {}, {}

    # The client's half: its request, its visit, its answer

    def ask(self, planned: PlannedVisit) -> Request:
        """What the client asks for before its visit, which begins; it has a ``fault`` if it cannot even ask."""
        self.visit = planned
        client = planned.visit.client
        self.local.recall(client)
        request = Request(client)
        for callback in self._callbacks:
            callback.on_client_request(self._trainer, self._module, client, request)
        whole = sorted(request.rows.keys() - self.local.sliced.keys())
        if whole and planned.fault is None:
            raise MisconfigurationException(
                f"A callback asks for rows of {whole}, which travel as a whole: name them in its `sliced_entries`."
            )
        return request

    def start_visit(self, planned: PlannedVisit) -> None:
        """Makes the module the client's: before its first batch."""
        client, request = planned.visit.client, self.ask(planned)
        if planned.fault is not None:  # it is sent nothing
            return
        try:
            broadcast = self._broadcasts[planned.position] = self.send(client, request)
            for callback in self._callbacks:
                callback.on_client_receive(self._trainer, self._module, client, broadcast)
        except ClientFault as error:
            planned.fail(str(error), error)
            return
        self.local.load_client(client, broadcast.state)
        keeps = self.optimizers.mode == "keep"
        held = [(self.local.sliced[name], rows) for name, rows in request.rows.items()]
        self.optimizers.start_visit(self.local.kept_optimizer_state(client) if keeps else None, held)
        self._module.zero_grad()
        for callback in self._callbacks:
            callback.on_client_start(self._trainer, self._module, client, broadcast)

    def end_visit(self, planned: PlannedVisit) -> None:
        """Sends the client's answer: after its last batch. What a client keeps is kept only if its answer was good."""
        if planned.fault is not None:
            self._server.fail(planned.visit.client, planned.fault)
        else:
            self._answer(planned)
        self.leave()

    def prepare(self, batch: Any) -> Any:
        """The batch as the training step gets it."""
        assert self.visit is not None
        for callback in self._callbacks:
            batch = callback.on_client_batch(self._trainer, self._module, self.visit.visit.client, batch)
        return batch

    # The server's half: what is sent, what comes back, what comes of the round

    def send(self, client: Client, request: Request | None = None) -> Broadcast:
        """The message for a client, as callbacks change it on its way."""

        def shape(broadcast: Broadcast) -> None:
            for callback in self._callbacks:
                callback.on_server_send(self._trainer, self._module, client, broadcast)

        return self._server.send(client, shape, request)

    def receive(self, update: ClientUpdate) -> bool:
        """Takes a client's answer, as callbacks unpack it; whether it was good."""

        def unpack(update: ClientUpdate) -> None:
            for callback in self._callbacks:
                callback.on_server_receive(self._trainer, self._module, update)

        return self._server.receive(update, unpack)

    def close(self) -> bool:
        """Aggregates and makes the module the global model: after the last visit. Whether anything came of it."""
        state = self._server.finish_round()
        has_come = state is not None
        if state is not None:
            form = {name: torch.empty_like(value, device="meta") for name, value in state.items()}
            for callback in self._callbacks:
                callback.on_server_aggregate(self._trainer, self._module, state)
            if any(is_overridden("on_server_aggregate", callback, FederatedCallback) for callback in self._callbacks):
                fault = find_fault(state, form)
                if fault is not None:
                    _log.error("The aggregate is not used after `on_server_aggregate`: %s.", fault)
                    self._server.abandon_round()
                    has_come = False
        after = state if state is not None and has_come else self.before
        self.is_new = after is not self.before
        self.local.load_global(after)
        self.optimizers.end_round()
        return has_come

    def abandon(self) -> None:
        """Makes the module the global model that the round found."""
        if self._stack is not None:
            self._stack.leave()
            self._stack.clear()
        self.leave()
        for planned in self.group:  # of those who train at once the others
            if self._memories.pop(planned.position, None) is not None:
                self.visit = planned
                self.leave()
        self.local.load_global(self.before)
        self.optimizers.start_visit()
        self._server.abandon_round()

    def patch(self, checkpoint: dict[str, Any]) -> None:
        """Puts the global model that the round found into a checkpoint taken meanwhile, for a client's."""
        state = {**self.before, **self.local.server_entries}
        saved = {name: value for name, value in checkpoint["state_dict"].items() if isinstance(value, torch.Tensor)}
        firsts = tied_names(saved)
        checkpoint["state_dict"] |= {name: state[first].clone() for name, first in firsts.items() if first in state}
        if "optimizer_states" not in checkpoint:
            return
        checkpoint["optimizer_states"], schedulers, scaler = self.optimizers.checkpoint()
        if scaler:
            checkpoint[type(self._trainer.precision_plugin).__qualname__] = scaler
        for place, scheduler in zip(self._stepwise, schedulers, strict=True):
            checkpoint["lr_schedulers"][place] = scheduler
        for place, scheduler in self._epochwise.items():  # they have stepped when callbacks see the last batch
            checkpoint["lr_schedulers"][place] = copy.deepcopy(scheduler)

    def _answer(self, planned: PlannedVisit) -> None:
        client, num_samples = planned.visit.client, planned.num_samples
        update = self.local.answer(client, num_samples)
        for callback in self._callbacks:
            callback.on_client_end(self._trainer, self._module, client, update)
        distance = self.local.distance(update, self._broadcasts[planned.position])
        if distance is not None and not self._server.aggregator.resizes:  # models of other shapes have no distance
            update.metrics["update_norm"] = distance
        if self.receive(update):
            self.local.keep(client, planned.visit.round, self.optimizers.end_visit(num_samples, planned.position))

    def leave(self) -> None:
        """Ends the visit that is under way, whatever came of it."""
        if self.visit is None:  # the client's first batch failed, so that its visit never began
            return
        for callback in self._callbacks:
            callback.on_client_visit_end(self._trainer, self._module, self.visit.visit.client)
        self.visit = None


def federated_callbacks(trainer: L.Trainer) -> list[FederatedCallback]:
    """The Trainer's callbacks that take part in the federation, in their order."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, FederatedCallback)]


def tell_of_model(trainer: L.Trainer, module: L.LightningModule, client: Client | None) -> None:
    """Tells callbacks whose model the module has become outside of visits; ``None`` for the global model."""
    for callback in federated_callbacks(trainer):
        callback.on_model_loaded(trainer, module, client)
