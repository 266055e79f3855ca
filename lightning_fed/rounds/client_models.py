"""Models of the clients outside of their visits: handed out, and evaluated."""

from __future__ import annotations

import copy
import logging
from typing import Any

import lightning as L
import torch

from lightning_fed.client.local_model import LocalModel
from lightning_fed.data.federated import EvaluationData
from lightning_fed.messages import Client, State
from lightning_fed.rounds.client_evaluation import Stage, evaluate_clients, name_strangers
from lightning_fed.rounds.federated_callback import tell_of_model
from lightning_fed.rounds.federated_fit import FederatedFit
from lightning_fed.rounds.lightning_internals import datamodule_of
from lightning_fed.rule import ResizingAggregator, model_of

_log = logging.getLogger(__name__)


class ClientModels:
    """Each client's own model: the global one with the entries that are the client's own.

    Args:
        fit: The fit; it knows the clients, the policies of the entries and the store of the clients' own.

    Attributes:
        is_lost: Whether the entries of the clients' own are not there any more, so that clients are not evaluated.

    """

    def __init__(self, fit: FederatedFit) -> None:
        self._fit = fit
        self.is_lost = False
        self._has_named_strangers = False

    def restore(self, rounds: int, state: dict[str, Any], must: bool) -> None:
        """Restores the clients' own entries as they were after a number of rounds.

        Args:
            rounds: Number of rounds.
            state: What the store's ``checkpoint`` returned.
            must: Whether it is an error if it is lost; otherwise clients are not evaluated.

        Raises:
            ValueError: If it is.

        """
        try:
            self._fit.store.restore(rounds, state)
        except ValueError as error:
            if must:
                raise
            self.is_lost = True
            _log.warning("The clients are not evaluated one by one. %s", error)

    def local(self, module: L.LightningModule) -> LocalModel:
        """The module as one client after another sees it; to be asked for while it is the global model."""
        fit = self._fit
        return LocalModel(module, fit.policies, fit.store, isinstance(fit.server.rule, ResizingAggregator))

    def state(self, module: L.LightningModule | None, client: Client, is_in_round: bool) -> dict[str, Any]:
        """See :meth:`Federation.client_state`; without a module the clients are not known either."""
        # Validation alone does not ask who the clients are.
        if module is not None and not self._fit.is_population_known and self._fit.policies:
            is_known = not self.local(module).personal or self._fit.store.get(client) is not None
        else:
            is_known = client in self._fit.population.clients
        if not is_known:
            raise ValueError(f"Expected one of the federation's clients, but got {client!r}.")
        if is_in_round:
            raise RuntimeError("A client's own model can be asked for between rounds and after the fit.")
        assert module is not None
        local = self.local(module)
        state = local.global_state()
        local.load_client(client, self._shared(client, state), trains=False)
        try:
            return copy.deepcopy(module.state_dict())
        finally:
            local.load_global(state)

    def evaluate(self, trainer: L.Trainer, module: L.LightningModule, stage: Stage) -> None:
        """Runs the module's step over each client's data, where there are any, with its own model, and logs it.

        Args:
            trainer: The Trainer.
            module: The module; it is the global model, and is it afterwards.
            stage: Whose step and data.

        """
        datamodule = datamodule_of(trainer)
        if self.is_lost or not isinstance(datamodule, EvaluationData):
            return
        loaders = datamodule.val_clients() if stage == "validation" else datamodule.test_clients()
        if not loaders:
            return
        with torch.inference_mode(False):  # what is made in that mode cannot be trained
            local = self.local(module)
            if self._fit.is_population_known and not self._has_named_strangers:
                name_strangers(loaders, self._fit.population.clients, bool(local.personal))
                self._has_named_strangers = True
            state = local.global_state()

            def load(client: Client) -> None:
                local.load_client(client, self._shared(client, state), trains=False)
                tell_of_model(trainer, module, client)

            try:
                results = evaluate_clients(trainer, module, loaders, load, stage)
            finally:
                local.load_global(state)
                tell_of_model(trainer, module, None)
        self._fit.round_log.put_clients(trainer, trainer.current_epoch, results)

    def _shared(self, client: Client, state: State) -> State:
        """Shared entries of the model that serves a client, which with most rules is the global one's ``state``."""
        served_state = model_of(self._fit.server.rule, client)
        return state if served_state is None else served_state
