"""Training of one client in a round, as a generator.

The generator :meth:`ClientVisit.run` yields these events, and receives a reply to each event:

- :class:`Ask` requests the global model. The reply is the server's broadcast.
- :class:`Step` requests a training step. The reply is whether the step returned a loss.
- :class:`Answer` sends the client's update. The reply is whether the update is valid.

If the training fails, an error is thrown into the generator. If the round is abandoned, the generator is closed.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.client.local_model import LocalModel, memory_of
from lightning_fed.client.local_optimizers import LocalOptimizers
from lightning_fed.client.packed_optimizers import OPTIMIZER
from lightning_fed.data.population import PlannedVisit
from lightning_fed.errors import ClientFault, describe, without_frames
from lightning_fed.federated_callback import FederatedCallback, federated_callbacks
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.lightning.internals import is_overridden, tensor_version
from lightning_fed.messages import Broadcast, ClientUpdate, Request, State
from lightning_fed.model.entries import identical_entries
from lightning_fed.rounds.client_errors import check_changes

_FIT_NUMBER = f"{OPTIMIZER}fit"  # index of the last fit, next to the optimizer state


class Ask(NamedTuple):
    """Event to request the global model. The reply is the server's broadcast."""

    request: Request


class Step(NamedTuple):
    """Event to request a training step. The reply is whether the step returned a loss."""


class Answer(NamedTuple):
    """Event to send a client's update to the server. The reply is true if the server accepts the update."""

    update: ClientUpdate


Flow: TypeAlias = Generator[Ask | Step | Answer, Any, None]
"""A running visit."""


class ClientVisit:
    """Trains one client in a round. During the training, the module contains the client's model.

    Attributes:
        planned: The client, and the number of batches.
        local: Loads the client's model.
        optimizers: The client's optimizers.
        memory: Tensors of callbacks and update steps, stored on the client if the server accepts the update.
        main_batches: Number of batches for the received model; if ``None``, all. The remaining batches train a second
            model, such as a personal model.
        trains_second_model: Whether the module currently contains the second model.
        step: The current training step; ``None`` before the first and after the last batch.
    """

    def __init__(
        self,
        fit: FederatedFit,
        local: LocalModel,
        optimizers: LocalOptimizers,
        untrained: Sequence[str],
        planned: PlannedVisit,
    ) -> None:
        self._fit, self.local, self.optimizers, self._untrained = fit, local, optimizers, untrained
        self._trainer, self._module = fit.trainer, fit.module
        self._callbacks, self._is_alone = federated_callbacks(fit.trainer), fit.has_one_client
        self.planned, self.memory = planned, State()
        self.main_batches: int | None = None
        self.trains_second_model = False
        self.step: Step | None = None
        self._flow = self.run()

    def run(self) -> Flow:
        """Trains one client, as a generator that yields :class:`Ask`, :class:`Step` and :class:`Answer`."""
        trainer, module, client = self._trainer, self._module, self.planned.visit.client
        try:
            # Request.
            stored = self.local.recall(client)
            self.memory = memory_of(stored)
            request = Request(client)
            for callback in self._callbacks:
                callback.on_client_request(trainer, module, client, request)
            self._check_rows(request)
            broadcast: Broadcast = yield Ask(request)
            received = dict(broadcast.state)
            for callback in self._callbacks:
                callback.on_client_receive(trainer, module, client, broadcast)

            # Load.
            self.local.load_client(client, broadcast.state, stored=stored)
            self._load_optimizers(request, stored)
            del stored  # may be large
            for callback in self._callbacks:
                callback.on_client_start(trainer, module, client, broadcast)

            # Train.
            num_batches = num_losses = 0
            while num_batches < self.planned.num_batches and num_batches != self.main_batches:
                num_losses += yield Step()
                num_batches += 1

            # Answer.
            # Callbacks may write into the update. Without such callbacks, unchanged entries need no copies.
            has_callbacks = any(is_overridden("on_client_end", hooks, FederatedCallback) for hooks in self._callbacks)
            known = None if has_callbacks else self._unchanged(received)
            update = self.local.answer(client, self.planned.num_samples, known)
            self._check_trained(num_losses, received, update.state)
            for callback in self._callbacks:
                before = self._entry_versions(update)
                for _ in callback.on_client_end(trainer, module, client, update) or ():
                    if self.planned.is_over:
                        self.planned.fault = "the client's visit ended before the last batch of the second model"
                        raise ClientFault(self.planned.fault)
                    yield Step()
                if self._entry_versions(update) != before and not getattr(callback, "changes_update", False):
                    raise MisconfigurationException(
                        f"Expected `{type(callback).__name__}.on_client_end` to leave `update.state` unchanged, but "
                        "the state changed: use an update step, or set `changes_update = True` on the callback."
                    )
            update = self._fit.server.chain.on_client(update, broadcast, self.memory)
            self._mark_unchanged(update, received)
            if not (yield Answer(update)):
                return

            # Keep.
            self.local.store_client(client, self.planned.visit.round, self._end_optimizers(), self.memory)
        finally:
            for callback in self._callbacks:
                callback.on_client_visit_end(trainer, module, client)

    def advance(self, has_loss: bool | None = None) -> None:
        """Continues the training until the next training step. An error excludes the client.

        ``has_loss``: whether the last training step returned a loss; ``None`` before the first batch.
        """
        fit, planned, self.step = self._fit, self.planned, None
        try:
            if planned.fault is not None:
                self._flow.throw(ClientFault(planned.fault))
            self.step = run_to_step(fit, self._flow, has_loss)
        except ClientFault as error:  # any other exception is a bug and ends the fit
            self._flow.close()
            if planned.fault is None:
                planned.fail(str(error), error)
            fit.server.fail(planned.visit.client, planned.fault or "", planned.error)

    def close(self) -> None:
        self._flow.close()

    def prepare_batch(self, batch: Any) -> Any:
        for callback in self._callbacks:
            batch = callback.on_client_batch(self._trainer, self._module, self.planned.visit.client, batch)
        return batch

    def clear_gradients(self) -> None:
        for parameter in self._module.parameters():  # the user may have replaced `zero_grad`
            parameter.grad = None

    def _check_rows(self, request: Request) -> None:
        unsliced = sorted(request.rows.keys() - self.local.sliced.keys())
        if unsliced:
            raise MisconfigurationException(
                f"A callback requests rows of {unsliced}, which are sent as a whole: list these entries in"
                " `sliced_entries`."
            )

    def _load_optimizers(self, request: Request, stored: State) -> None:
        kept = {}
        if self._fit.options.optimizer_state == "keep":
            kept = {name: value for name, value in stored.items() if name.startswith(OPTIMIZER)}
        if kept.pop(_FIT_NUMBER, torch.tensor(0)) != self._fit.number:  # a fit begins with new optimizers
            kept = {}
        rows = [(self.local.sliced[name], rows) for name, rows in request.rows.items()]
        self.optimizers.start_visit(kept, rows)
        self.clear_gradients()

    def _end_optimizers(self) -> State:
        state = self.optimizers.end_visit(self.planned.position)
        if state and self._fit.number:
            state[_FIT_NUMBER] = torch.tensor(self._fit.number)
        return state

    def _check_trained(self, num_losses: int, received: State, state: State) -> None:
        if not any(optimizer.param_groups for optimizer in self._trainer.optimizers):  # Lightning's has no groups
            may_be_equal = self._is_alone or bool(self.local.personal) or self.planned.visit.round > 0
            check_changes(self._module, self.planned, received, state, may_be_equal)
        elif not num_losses and self._module.automatic_optimization and not self._is_alone:
            self.planned.fault = (
                f"the client's training step returned no loss in {self.planned.num_batches} batches (if "
                "training only changes buffers, return `None` from `configure_optimizers`)"
            )
            raise ClientFault(self.planned.fault)
        fault = self.local.find_personal_fault(self.planned.visit.client)
        if fault is not None:
            raise ClientFault(f"in the client's personal entries, {fault}")

    def _entry_versions(self, update: ClientUpdate) -> list[tuple[str, int, int]]:
        # Sliced entries are the module's own tensors, and a pass with the model writes and restores the module.
        sliced, state = self.local.sliced, update.state.items()
        return [(name, id(value), name in sliced or tensor_version(value)) for name, value in state]

    def _mark_unchanged(self, update: ClientUpdate, received: State) -> None:
        if update.state.keys() == received.keys():
            unchanged = self._unchanged(received)
            update.unsent = identical_entries(unchanged, update.state)
            update.state |= {name: unchanged[name] for name in update.unsent}

    def _unchanged(self, received: State) -> State:
        return {name: received[name] for name in self._untrained if name in received}


def run_to_step(fit: FederatedFit, flow: Flow, reply: Any = None) -> Step | None:
    """Continues a client's training until the next training step. Returns ``None`` at the end.

    ``reply``: whether the last training step returned a loss; ``None`` before the first step.
    """
    try:
        event = flow.send(reply)
        while not isinstance(event, Step):
            answer = ask_server(fit, event.request) if isinstance(event, Ask) else answer_server(fit, event.update)
            event = flow.send(answer)
        return event
    except StopIteration:
        return None


def server_callbacks(fit: FederatedFit) -> list[FederatedCallback]:
    """Returns the callbacks whose server hooks run in this process. On a client's machine the list is empty."""
    return federated_callbacks(fit.trainer) if fit.has_server else []


def ask_server(fit: FederatedFit, request: Request) -> Broadcast:
    """Returns the server's broadcast for a client's request."""
    server, trainer = fit.server, fit.trainer
    broadcast = server.prepare(request.client, request)
    for callback in server_callbacks(fit):
        callback.on_server_send(trainer, trainer.lightning_module, request.client, broadcast)
    server.sent(request.client, broadcast)
    return broadcast


def answer_server(fit: FederatedFit, update: ClientUpdate) -> bool:
    """Passes a client's update to the server. Returns whether the server accepts the update."""
    server, trainer = fit.server, fit.trainer
    if not server.count(update):
        return False
    try:
        for callback in server_callbacks(fit):
            callback.on_server_receive(trainer, trainer.lightning_module, update)
    except Exception as error:  # a fault of one client
        reason = f"the server cannot read the client's update: {describe(error)}"
        return server.refuse(update.client, reason, without_frames(error))
    return server.accept(update)
