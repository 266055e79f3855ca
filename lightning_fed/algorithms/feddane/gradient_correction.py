"""FedDANE on the clients: corrects gradients by the difference to the global gradient."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_fed.algorithms.client_pass import loss_of, refuse_manual_optimization
from lightning_fed.algorithms.feddane.aggregator import FedDANE
from lightning_fed.algorithms.gradient_terms import GradientTerm
from lightning_fed.algorithms.proximal_term import ProximalTerm
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.console import round_number
from lightning_fed.data.population import PlannedVisit, batch_length, seeded_generators
from lightning_fed.errors import describe
from lightning_fed.features.isolated_pass import isolated_pass, until_fault
from lightning_fed.federated_callback import notify_model_loaded
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State, message_bytes, with_prefix, without_prefix
from lightning_fed.method import register
from lightning_fed.model.entries import batch_norm_layers, find_non_finite, parameter_entries
from lightning_fed.numerics.precision import as_real
from lightning_fed.numerics.seeds import derive_seed
from lightning_fed.numerics.weighted_mean import WeightedMean
from lightning_fed.process_group import process_group_of
from lightning_fed.rounds.client_errors import client_fault
from lightning_fed.server.schedule import Visit

_log = logging.getLogger(__name__)

_PREFIX = "gradient:"


class GradientCorrection(GradientTerm):
    r"""Adds :math:`g_t - \nabla F_k(w_t)` to the gradients in every optimizer step.

    At the start of a round, some clients compute the gradients of the global model :math:`w_t` on all local data. These
    clients are selected by :meth:`Schedule.second_draw <lightning_fed.server.schedule.Schedule.second_draw>`. The mean
    of these gradients, weighted by numbers of examples, is :math:`g_t`. The server sends :math:`g_t` to the clients
    that train in this round. Each of these clients first computes the gradient :math:`\nabla F_k(w_t)` of the local
    loss :math:`F_k`. Reference: Li et al., Asilomar 2019, "FedDANE".

    ``training_step`` computes these gradients without dropout. The logged loss excludes the correction. Data loaders
    with persistent workers are not supported. A client that cannot compute the gradient is excluded from
    :math:`g_t` or from training. If :math:`g_t` has no clients, the round fails.

    Raises:
        MisconfigurationException: In ``fit``, if the module uses manual optimization.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> trainer = FederatedTrainer(max_rounds=10, method="feddane", logger=False)  # adds it by itself
    """

    needs_local_clients = "the server requests gradients from clients outside visits"

    def __init__(self) -> None:
        super().__init__()
        self._mean: State = {}
        self._step_error: Exception | None = None  # from a client in the sample

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            refuse_manual_optimization(pl_module, "FedDANE")

    def on_server_round_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        federation = find_federation(trainer)
        server, population, round = federation.server, federation.population, trainer.current_epoch
        local = federation.local_model(module)
        if local.sliced:
            raise MisconfigurationException(
                f"FedDANE needs whole entries, but clients only hold some rows of {sorted(local.sliced)}: use 'fedavg',"
                " for instance."
            )
        state, mean, ranks = local.global_state(), WeightedMean(), process_group_of(trainer)
        self._step_error = None
        sample = federation.schedule.second_draw(round, population.clients)
        for client in sample[ranks.rank :: ranks.size]:  # other processes measure other clients
            server.sent(client, Broadcast(round, state))
            local.load_client(client, state)
            notify_model_loaded(trainer, module, client)
            try:
                answer = self._measure(trainer, module, client, state, is_reloaded=True)
            except _NoAnswerError as fault:
                _log.warning("Round %d: client %r's gradient is excluded: %s.", round_number(round), client, fault)
                self._step_error = fault.step_error or self._step_error
                continue
            except Exception as error:
                error.add_note(f"Raised in round {round_number(round)}, in the gradient pass of client {client!r}.")
                raise
            server.report.up_bytes += message_bytes(answer)
            reason = find_non_finite(answer.extras)
            if reason is None:
                mean.add(answer.extras, answer.num_samples, answer.num_samples)
            else:
                _log.warning("Round %d: client %r's gradient is excluded: %s.", round_number(round), client, reason)
        local.load_global(state)
        notify_model_loaded(trainer, module, None)
        whole = WeightedMean()
        for part in ranks.gather_one_by_one(mean):
            whole.merge(part)
        self._mean = whole.mean() if whole.total else {}

    def on_server_send(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        broadcast.extras |= self._mean

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        mean = without_prefix(broadcast.extras, _PREFIX)
        visit = find_federation(trainer).visit
        if not mean:
            reason = "no client in the gradient sample sent a gradient"
            if visit.fault is None and self._step_error is not None:
                visit.fail(reason, self._step_error)
            visit.fault = visit.fault or reason
            return
        try:
            gradients = self._measure(trainer, module, client, broadcast.state).extras
        except _NoAnswerError as fault:
            if visit.fault is None and fault.step_error is not None:
                visit.fail(str(fault), fault.step_error)
            visit.fault = visit.fault or str(fault)
            return
        differences = {name: mean[name] - gradient for name, gradient in without_prefix(gradients, _PREFIX).items()}
        parameters = parameter_entries(module).items()
        self.tensors = {parameter: differences[name] for parameter, name in parameters if name in differences}

    def term(self, parameter: nn.Parameter) -> Tensor | None:
        return self.tensors.get(parameter)

    def on_server_round_end(self, trainer: L.Trainer, module: L.LightningModule, is_new: bool) -> None:
        self._mean = {}

    def _measure(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, state: State, is_reloaded: bool = False
    ) -> ClientUpdate:
        federation, round = find_federation(trainer), trainer.current_epoch
        schedule, population, faults = federation.schedule, federation.population, list[Exception]()
        try:
            num_samples = population.num_samples(client)
        except Exception as error:
            raise _NoAnswerError(f"the client's data raised {describe(error)}") from error
        visit = Visit(client, round, derive_seed(schedule.seed, round), steps=schedule.local_steps)
        parameters = {
            name: parameter
            for parameter, name in parameter_entries(module).items()
            if name in state and parameter.requires_grad
        }
        batches = until_fault(population.one_pass(visit, isolated=True), faults)
        with seeded_generators(), closing(batches):
            try:
                gradients = full_gradient(trainer, module, parameters, batches, is_reloaded)
            except Exception as error:
                reason = client_fault(error, PlannedVisit(visit, num_samples, 0))
                if reason is None:
                    raise
                raise _NoAnswerError(reason, error) from error
        if faults:
            raise _NoAnswerError(f"the client's data raised {describe(faults[0])}")
        if not gradients:
            raise _NoAnswerError("`training_step` returned no loss for any of the client's batches")
        return ClientUpdate(client, num_samples, {}, with_prefix(gradients, _PREFIX))


def full_gradient(
    trainer: L.Trainer,
    module: L.LightningModule,
    parameters: Mapping[str, nn.Parameter],
    batches: Iterable[Any],
    is_reloaded: bool = False,
) -> State:
    """Computes the mean gradients of the loss over all batches, by parameter name.

    Batches are weighted by numbers of examples. The result is empty if no batch has a loss. With ``is_reloaded`` the
    function does not restore the module's state.
    """
    normalizing = [layer for layer in batch_norm_layers(module).values() if layer.training]  # frozen layers stay frozen
    recurrent = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase) and layer.training]
    mean = WeightedMean()
    with isolated_pass(module, gradients=True, is_reloaded=is_reloaded):
        for layer in (*normalizing, *recurrent):
            layer.train()
        for layer in recurrent:
            layer.dropout = 0.0  # the isolated pass restores attributes
        for number, batch in enumerate(batches):
            loss = loss_of(trainer, module, batch, number)
            if loss is None:
                continue
            values = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            gradients = {
                name: as_real(torch.zeros_like(parameter) if value is None else value.to_dense())
                for (name, parameter), value in zip(parameters.items(), values, strict=True)
            }
            size = batch_length(batch)
            mean.add(gradients, size, size)
    return mean.mean() if mean.total else {}


class _NoAnswerError(Exception):
    def __init__(self, reason: str, step_error: Exception | None = None) -> None:
        super().__init__(reason)
        self.step_error = step_error


register(FedDANE, callbacks=lambda rule: [GradientCorrection(), ProximalTerm(rule.mu)])
