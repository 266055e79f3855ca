"""The clients of a federation: who they are, and their own models outside of their visits."""

from __future__ import annotations

import copy
import logging
from typing import Any

import lightning as L
import torch

from lightning_fed.client.local_model import LocalModel
from lightning_fed.data.federated import EvaluationData
from lightning_fed.data.population import Population
from lightning_fed.messages import Client, State
from lightning_fed.rounds.client_evaluation import Stage, evaluate_clients, name_strangers
from lightning_fed.rounds.loop import RoundLoop
from lightning_fed.rounds.round import tell_of_model
from lightning_fed.rounds.trainer_checks import check_min_clients

_log = logging.getLogger(__name__)


class Clients:
    """All clients, once the fit has asked for them, and each one's model: the global one with what is its own.

    Args:
        loop: The rounds; it knows who takes part, what travels and where clients keep the rest.

    Attributes:
        is_lost: Whether what the clients had is not there any more, so that they are not evaluated.

    """

    def __init__(self, loop: RoundLoop) -> None:
        self._loop = loop
        self._population: Population | None = None
        self.is_lost = False
        self._has_named_strangers = False

    @property
    def is_known(self) -> bool:
        """Whether :meth:`meet` was called."""
        return self._population is not None

    @property
    def population(self) -> Population:
        """All clients.

        Raises:
            RuntimeError: If they are not known yet.

        """
        if self._population is None:
            raise RuntimeError("The clients are not known before `fit` asks for the training data.")
        return self._population

    def meet(self, population: Population) -> Population:
        """Makes all clients known, before the first round.

        Raises:
            MisconfigurationException: If no round can have ``min_clients``.

        """
        self._population = population
        loop, size = self._loop, len(population.clients)
        chosen = loop.schedule.cohort_size(size)
        _log.info("%d clients, %d in every round.", size, chosen)
        check_min_clients(loop.server.min_clients, loop.schedule, chosen, loop.partial_work)
        return population

    def restore(self, rounds: int, state: dict[str, Any], must: bool) -> None:
        """What clients had after a number of rounds is theirs again.

        Args:
            rounds: Number of rounds.
            state: What the store's ``checkpoint`` returned.
            must: Whether it is an error if it is lost; otherwise clients are not evaluated.

        Raises:
            ValueError: If it is.

        """
        try:
            self._loop.store.restore(rounds, state)
        except ValueError as error:
            if must:
                raise
            self.is_lost = True
            _log.warning("The clients are not evaluated one by one. %s", error)

    def close(self) -> None:
        """Ends worker processes: left to the garbage collector they take seconds."""
        if self._population is not None:
            self._population.close()

    def local(self, module: L.LightningModule) -> LocalModel:
        """The module as one client after another sees it; to be asked for while it is the global model."""
        loop = self._loop
        return LocalModel(module, loop.policies, loop.store, loop.server.aggregator.resizes)

    def state(self, module: L.LightningModule | None, client: Client) -> dict[str, Any]:
        """See :meth:`Federation.client_state`; without a module the clients are not known either."""
        # Validation alone does not ask who the clients are.
        if module is not None and self._population is None and self._loop.policies:
            is_known = not self.local(module).personal or self._loop.store.get(client) is not None
        else:
            is_known = client in self.population.clients
        if not is_known:
            raise ValueError(f"Expected one of the federation's clients, but got {client!r}.")
        if self._loop.open is not None:
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
        datamodule = getattr(trainer, "datamodule", None)
        if self.is_lost or not isinstance(datamodule, EvaluationData):
            return
        loaders = datamodule.val_clients() if stage == "validation" else datamodule.test_clients()
        if not loaders:
            return
        with torch.inference_mode(False):  # what is made in that mode cannot be trained
            local = self.local(module)
            if self._population is not None and not self._has_named_strangers:
                name_strangers(loaders, self._population.clients, bool(local.personal))
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
        self._loop.round_log.put_clients(trainer, trainer.current_epoch, results)

    def _shared(self, client: Client, state: State) -> State:
        """Shared entries of the model that serves a client, which with most rules is the global one's ``state``."""
        own = self._loop.server.aggregator.model_of(client)
        return state if own is None else own
