"""The callback that turns a Trainer's epochs into rounds of federated training."""

from __future__ import annotations

import copy
import inspect
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn

from lightning_fed.aggregators import Aggregator, build_aggregator
from lightning_fed.callbacks.batch_norm import thaw_batch_norm
from lightning_fed.callbacks.blame import note_on
from lightning_fed.callbacks.client_evaluation import Stage, evaluate_clients, name_strangers
from lightning_fed.callbacks.door import (
    TakenHook,
    check_min_clients,
    check_schedulers,
    check_trainer,
    find_loader_owner,
    ranks_of,
)
from lightning_fed.callbacks.open_round import federated_callbacks, tell_of_model
from lightning_fed.callbacks.policies import check_sliced, decide_policies, freeze_parameters
from lightning_fed.callbacks.pooled_log import PooledLog
from lightning_fed.callbacks.processes import Processes, check_processes
from lightning_fed.callbacks.round_log import RoundLog
from lightning_fed.callbacks.round_loop import BatchNormMode, RoundLoop
from lightning_fed.data.federated import EvaluationData, FederatedDataModule, split_loader
from lightning_fed.data.partitions import Partition
from lightning_fed.data.population import PlannedVisit, Population
from lightning_fed.data.rounds import RoundLoader
from lightning_fed.functional.options import check_count, check_option
from lightning_fed.messages import Client, State
from lightning_fed.schedule import Cohort, Schedule
from lightning_fed.server import Server
from lightning_fed.state import Policy, Selector, check_selectors
from lightning_fed.store import ClientStore, FolderStore, MemoryStore
from lightning_fed.visit import LocalModel

_log = logging.getLogger(__name__)


class Federation(L.Callback):
    r"""Federated training on an ordinary Trainer: one epoch is one round.

    Inside an epoch the round's clients train one after another on the same module. Each visit starts from what the
    server sent, with fresh optimizer state and its own seed, and ends when the client's batches are used up. At the
    last batch of the last visit the server aggregates, and the global model is loaded before Lightning validates, logs
    and saves checkpoints: ``max_epochs``, ``EarlyStopping``, ``ModelCheckpoint`` and epoch-interval schedulers count
    rounds.

    The data come from a :class:`~lightning_fed.data.FederatedDataModule`, or from the ``train_dataloader`` of any
    datamodule or module, which ``partition`` splits.

    Args:
        aggregator: The server's rule, by name (one of :data:`~lightning_fed.aggregators.AGGREGATORS`: ``"fedavg"``,
            ``"fedprox"``, ...) or as an object.
        partition: How the training data are split into clients, where they do not come as clients already.
        clients_per_round: Number of clients in a round (int) or fraction of all (float in (0, 1]).
        local_epochs: Passes over a client's data in a visit.
        local_steps: Batches in a visit; replaces ``local_epochs``.
        stragglers: Fraction of the cohort that does only part of its work.
        partial_work: ``"keep"`` aggregates the partial work of stragglers, ``"drop"`` leaves them out.
        dropout: Probability that a chosen client never reports.
        min_clients: Least number of good updates; with fewer the global model stays as it was.
        personal: Entries that stay with their client: name patterns (``"head.*"``) and module types.
        frozen: Entries that never travel, do not train and stay as the server has them, likewise.
        batch_norm: What becomes of BatchNorm's running statistics: ``"recalibrate"`` has the round's clients run their
            data once through the new global model, without gradients, and pools their means and variances by total
            variance (it calls ``training_step`` once more; the module's metrics, logs and plain attributes are put
            aside meanwhile); ``"average"`` averages them like all entries, which costs nothing and lags behind the
            weights where visits are short; ``"personal"`` keeps the whole layers with their clients (FedBN);
            ``"frozen"`` keeps the statistics the model came with and trains with them. Models without BatchNorm do not
            notice.
        optimizer_state: ``"reset"`` starts every visit with fresh optimizer state; ``"keep"`` lets each client go on
            with its own.
        store: Where clients keep what is theirs between visits: a folder (safetensors files, for many clients), a
            :class:`~lightning_fed.store.ClientStore`, or memory (``None``).
        evaluate_clients_every: Rounds between evaluations client by client, where the validation data are a mapping of
            clients and the Trainer validates; 0 for never. ``trainer.validate`` and ``trainer.test`` do it unless 0.
        seed: Seed of the partition and the schedule; ``None`` takes that of ``lightning.seed_everything``, or else 0.

    Attributes:
        arguments: What it was built with, by name.
        client_callbacks: Callbacks that belong to the method, added to the Trainer as those of the aggregator are.

    Raises:
        ValueError: If an argument is out of its range, or a selector matches nothing.
        TypeError: If ``aggregator`` is neither a name nor an aggregator, or ``partition`` is not a partition.
        MisconfigurationException: In ``setup``, if the Trainer is asked for what cannot be right in a round.

    Note:
        The callback's checkpoint state holds ``rounds`` (int), ``seed`` (int), ``totals``
        (two ints), ``aggregator`` (its own state: nothing for averages) and ``store`` (all clients' personal entries
        with the memory store, the folder's name with a folder).

    Example:
        >>> federation = Federation("fedavg", clients_per_round=10, local_epochs=2)
        >>> trainer = L.Trainer(max_epochs=50, callbacks=[federation], logger=False)

    References:
        McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

    """

    def __init__(
        self,
        aggregator: str | Aggregator = "fedavg",
        partition: Partition | None = None,
        clients_per_round: int | float = 1.0,
        local_epochs: int = 1,
        local_steps: int | None = None,
        stragglers: float = 0.0,
        partial_work: Literal["keep", "drop"] = "keep",
        dropout: float = 0.0,
        min_clients: int = 1,
        personal: Sequence[Selector] = (),
        frozen: Sequence[Selector] = (),
        batch_norm: BatchNormMode = "recalibrate",
        optimizer_state: Literal["reset", "keep"] = "reset",
        store: str | os.PathLike[str] | ClientStore | None = None,
        evaluate_clients_every: int = 1,
        seed: int | None = None,
    ) -> None:
        given = locals()
        self.arguments = {name: given[name] for name in inspect.signature(Federation).parameters}
        check_option("partial_work", partial_work, ("keep", "drop"))
        check_option("batch_norm", batch_norm, ("average", "recalibrate", "personal", "frozen"))
        check_option("optimizer_state", optimizer_state, ("reset", "keep"))
        if not (partition is None or isinstance(partition, Partition)):
            raise TypeError(f"Expected `partition` to be a Partition object such as `IID(10)`, but got {partition!r}.")
        self.server = Server(build_aggregator(aggregator), min_clients)
        self._fresh_aggregator = copy.deepcopy(self.server.aggregator.state_dict())
        self.partition = partition
        self.schedule = Schedule(
            default_seed() if seed is None else seed, clients_per_round, local_epochs, local_steps, stragglers, dropout
        )
        self.partial_work = partial_work
        self.personal = check_selectors("personal", personal)
        self.frozen = check_selectors("frozen", frozen)
        self.batch_norm = batch_norm
        self.optimizer_state = optimizer_state
        if store is None or isinstance(store, ClientStore):
            self.store = store or MemoryStore()
        else:
            self.store = FolderStore(Path(store))
        self.evaluate_clients_every = check_count("evaluate_clients_every", evaluate_clients_every, lowest=0)
        self.client_callbacks: list[L.Callback] = []
        self._seed = seed
        self._is_fit, self._is_lost = True, False  # `_is_lost`: what the clients had is not there any more
        self._hooks: list[TakenHook] = []
        self._frozen_parameters: list[torch.nn.Parameter] = []
        self._reset()

    def _reset(self) -> None:
        self._loop = RoundLoop(
            self.server, self.schedule, self.store, self.batch_norm, self.optimizer_state, self.partial_work
        )
        self._has_named_strangers = False
        self._population: Population | None = None

    # What the outside may ask

    def replace(self, **changes: Any) -> Federation:
        """A new federation with the same arguments, but for the changes.

        Example:
            >>> Federation(local_epochs=2).replace(stragglers=0.5).arguments["local_epochs"]
            2

        """
        made = Federation(**{**self.arguments, **changes})
        made.client_callbacks = self.client_callbacks
        return made

    @property
    def rounds(self) -> int:
        """Number of rounds that are over, also those of which nothing came."""
        return self._loop.rounds

    @property
    def log_book(self) -> RoundLog:
        """Where a round's numbers are logged."""
        return self._loop.log_book

    @property
    def current_visit(self) -> PlannedVisit | None:
        """The visit that is under way; ``None`` between visits."""
        return self._loop.visit

    @property
    def cohort(self) -> Cohort:
        """The clients of the round that is under way, or was last."""
        return self._loop.cohort

    @property
    def current_client(self) -> Client | None:
        """The client that trains now; ``None`` between visits."""
        return None if self.current_visit is None else self.current_visit.visit.client

    @property
    def client_memory(self) -> State:
        """Tensors that callbacks keep for the client that trains now, until its next visit; theirs to change.

        They stay with the client (in the ``store``), and are kept only if its update was good.

        Raises:
            RuntimeError: Between visits.

        """
        if self._loop.open is None or self._loop.visit is None:
            raise RuntimeError("No client is training: its memory can be asked for during its visit.")
        return self._loop.open.local.memory

    @property
    def population(self) -> Population:
        """All clients; known once the fit has asked for its data.

        Raises:
            RuntimeError: If it is not known yet.

        """
        if self._population is None:
            raise RuntimeError("The clients are not known before `fit` asks for the training data.")
        return self._population

    @property
    def policies(self) -> dict[str, Policy]:
        """What becomes of each entry of the module: known once a fit or an evaluation has begun, empty before."""
        return dict(self._loop.policies)

    def client_state(self, client: Client) -> dict[str, Any]:
        """The state of a client's own model: the global model with the client's personal entries.

        After ``trainer.validate`` or ``trainer.test`` with a checkpoint it is that of the checkpoint. Without a fit
        only clients that have trained are known, where they have personal entries.

        Args:
            client: The client's key; before its first visit its personal entries have the server's initial values.

        Returns:
            A copy, as ``module.state_dict()`` has it, for ``load_state_dict``.

        Raises:
            RuntimeError: Before the clients are known, and inside a round, when the module is not the global model.
            ValueError: If there is no such client.

        """
        if self._population is None and self._loop.policies:  # validation alone does not ask who the clients are
            has_personal = bool(self.local_model(self._trainer.lightning_module).personal)
            is_known = not has_personal or self.store.get(client) is not None
        else:
            is_known = client in self.population.clients
        if not is_known:
            raise ValueError(f"Expected one of the federation's clients, but got {client!r}.")
        if self._loop.open is not None:
            raise RuntimeError("A client's own model can be asked for between rounds and after the fit.")
        module = self._trainer.lightning_module
        local = self.local_model(module)
        state = local.global_state()
        local.load_client(client, self._state_of(client, state), trains=False)
        try:
            return copy.deepcopy(module.state_dict())
        finally:
            local.load_global(state)

    def local_model(self, pl_module: L.LightningModule) -> LocalModel:
        """The module as one client after another sees it; to be asked for while it is the global model."""
        return LocalModel(pl_module, self._loop.policies, self.store, self.server.aggregator.resizes)

    @property
    def state_key(self) -> str:
        """The same for every federation, so that a checkpoint of one loads into another with other options."""
        return "Federation"

    # Lightning's hooks, in the order of a fit

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Checks the Trainer, puts the round's loader in place, adds the callbacks that the aggregator needs."""
        self._is_fit, self._is_lost = stage == "fit", False
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for needed in (*self.client_callbacks, *self.server.aggregator.required_callbacks()):
            if not any(isinstance(callback, type(needed)) for callback in callbacks):
                callbacks.insert(callbacks.index(self) + 1, needed)
        if ranks_of(trainer).size > 1 and not any(isinstance(callback, PooledLog) for callback in callbacks):
            callbacks.insert(callbacks.index(self) + 1, PooledLog())
        if stage != "fit":
            self._trainer = trainer
            return
        self._give_back()
        book, rounds = self.log_book, self.rounds
        self._reset()
        self._loop.trainer = trainer
        if rounds and getattr(self, "_trainer", None) is trainer and trainer.current_epoch == rounds:
            self._loop.log_book, self._loop.rounds = (
                book,
                rounds,
            )  # the same Trainer goes on: its `max_epochs` was raised
            self.store.restore(rounds, self.store.checkpoint(rounds))
        else:
            self.server.aggregator.load_state_dict(copy.deepcopy(self._fresh_aggregator))
        check_trainer(trainer, self.schedule.local_steps, self.schedule.stragglers)
        if ranks_of(trainer).size > 1:
            check_processes(trainer, self.store)
            (pooled_log,) = (callback for callback in callbacks if isinstance(callback, PooledLog))
            self._loop.processes = Processes(trainer, pooled_log)
        if sum(isinstance(callback, Federation) for callback in callbacks) > 1:
            raise MisconfigurationException("Expected one `Federation` callback, but the Trainer has more.")
        # First, so that for all others a visit has begun before its first batch. (This hook runs in a loop over them.)
        callbacks.remove(self)
        callbacks.insert(0, self)
        datamodule = getattr(trainer, "datamodule", None)
        if isinstance(datamodule, FederatedDataModule) == (self.partition is not None):
            raise MisconfigurationException(
                "Expected a `partition` that splits the training data into clients, or a FederatedDataModule that"
                f" brings them, but got {'both' if self.partition is not None else 'neither'}."
            )
        # A visit that fails is padded with `None` batches: on purpose, and the log says why.
        self._loop.ignore("train_dataloader yielded None")
        self._trainer = trainer
        owner = find_loader_owner(trainer, pl_module)
        self._previous_reload = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
        self._hooks = [
            TakenHook(owner, "train_dataloader", self._plan),
            TakenHook(pl_module, "on_save_checkpoint", self._on_save_checkpoint),
            TakenHook(pl_module, "on_train_batch_end", self._module_on_train_batch_end),
            TakenHook(pl_module, "training_step", self._training_step),
        ]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Decides what travels, before anything trains."""
        check_schedulers(trainer)
        self._loop.policies = self._decide_policies(trainer, pl_module)
        check_sliced(pl_module, self._loop.policies, self.server.aggregator, self.batch_norm, self.optimizer_state)
        self._frozen_parameters = freeze_parameters(pl_module, self._loop.policies)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Makes sure that the Trainer's loader is ours."""
        if not isinstance(trainer.train_dataloader, RoundLoader):
            raise MisconfigurationException(
                "The Trainer trains on loaders that were handed to `fit`, not on the clients: use a datamodule, or"
                " `FederatedTrainer`."
            )
        self.log_book.show(trainer)  # a fit that was resumed between a round's end and its checkpoint needs them
        if self.rounds == 0:
            self.store.restore(0, {})
        self.store.start(ranks_of(trainer))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Lets checkpoints inside a round count steps again: the last round's x-axis would name them all alike."""
        trainer.callback_metrics.pop("step", None)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts the visit if this is its first batch."""
        self._loop.start_batch()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gives up a round that is cut short: a Trainer that is told to stop validates at once."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._loop.policies = self._decide_policies(trainer, pl_module)
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        self._loop.progress.validate()
        self._loop.cut_short()

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gives the validation metrics the round as their x-axis."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.log_book.put_axis(pl_module, self.rounds - 1)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluates the clients, before any checkpoint is saved by what they reach."""
        every = self.evaluate_clients_every
        is_due = every and (trainer.state.fn == TrainerFn.VALIDATING or (trainer.current_epoch + 1) % every == 0)
        datamodule = getattr(trainer, "datamodule", None)
        if is_due and isinstance(datamodule, EvaluationData) and not trainer.sanity_checking:
            self._evaluate(trainer, pl_module, datamodule.val_clients(), "validation")

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Decides what is the clients' own."""
        self._loop.policies = self._decide_policies(trainer, pl_module)

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluates the clients."""
        datamodule = getattr(trainer, "datamodule", None)
        if self.evaluate_clients_every and isinstance(datamodule, EvaluationData):
            self._evaluate(trainer, pl_module, datamodule.test_clients(), "test")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gives up a round that was cut short by the module."""
        self._loop.cut_short()
        self._loop.progress.end_epoch()
        self._loop.rounds = trainer.current_epoch + 1  # also where nothing came of the round
        self.log_book.put_axis(pl_module, self.rounds - 1)  # also where the fit was resumed after the round's batches

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leaves the last complete global model in the module, also where the fit ended inside a round."""
        self._loop.abandon()
        if self.batch_norm == "frozen":
            thaw_batch_norm(pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leaves the last complete global model in the module, and says whose visit it was."""
        planned = self._loop.visit
        if planned is not None:
            exception.add_note(note_on(exception, planned))
        if self._loop.processes is not None:
            self._loop.processes.leave()
        self._loop.abandon()
        if self.batch_norm == "frozen":
            thaw_batch_norm(pl_module)
        self._give_back()  # Lightning does not call `teardown` after an exception

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Gives back what ``setup`` took."""
        self._give_back()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Takes back the batches of a round that is not complete: it is trained again from its start."""
        self._loop.progress.patch(checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """See the class's note."""
        return {
            "rounds": self.rounds,
            "seed": self.schedule.seed,
            "totals": self.log_book.state_dict(),
            "aggregator": self.server.aggregator.state_dict() if self._loop.open is None else self.server.state_before,
            "store": self.store.checkpoint(self.rounds),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on after the checkpoint's last complete round."""
        self._loop.rounds = state_dict["rounds"]
        if state_dict["seed"] != self.schedule.seed:
            _log.warning(
                "The checkpoint's rounds were drawn with seed %d; from now on they are drawn with seed %d.",
                state_dict["seed"],
                self.schedule.seed,
            )
        self.log_book.load_state_dict(state_dict["totals"])
        self.server.aggregator.load_state_dict(state_dict["aggregator"])
        try:
            self.store.restore(self.rounds, state_dict["store"])
        except ValueError as error:
            if self._is_fit:
                raise
            self._is_lost = True
            _log.warning("The clients are not evaluated one by one. %s", error)

    # The round

    def find_population(self) -> Population:
        """All clients; during a fit their data are asked for if they are not known yet."""
        if self._population is None:
            if self.partition is None:
                self._population = self._trainer.datamodule.population()  # type: ignore[attr-defined]
            else:
                loader = self._hooks[0].original()
                self._population = split_loader(loader, self.partition, self.schedule.seed)
            size = len(self._population.clients)
            chosen = self.schedule.cohort_size(size)
            _log.info("%d clients, %d in every round.", size, chosen)
            check_min_clients(self.server.min_clients, self.schedule, chosen, self.partial_work)
        return self._population

    def _decide_policies(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Policy]:
        sliced = {name for callback in federated_callbacks(trainer) for name in callback.sliced_entries(pl_module)}
        return decide_policies(pl_module, self.personal, self.frozen, self.batch_norm, sliced)

    def _plan(self) -> RoundLoader:
        self._loop.population = self.find_population()
        return self._loop.plan()

    def _module_on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The module's own hook; then the end of the visit if this was its last batch, and of the round.

        It is the last hook of a batch: what callbacks and the module do after a batch is part of the visit.
        """
        if self._loop.has_trained(batch):
            self._hooks[2].original(outputs, batch, batch_idx)
        self._loop.end_batch()

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._loop.step(self._hooks[3].original, *args, **kwargs)

    def _on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint inside a round holds the last complete global model, and the round is trained again."""
        if self._loop.open is not None:
            self._loop.open.patch(checkpoint)
        self._hooks[1].original(checkpoint)

    def _evaluate(
        self, trainer: L.Trainer, pl_module: L.LightningModule, clients: dict[Client, Any], stage: Stage
    ) -> None:
        if not clients or self._is_lost:
            return
        with torch.inference_mode(False):  # what is made in that mode cannot be trained
            local = self.local_model(pl_module)
            if self._population is not None and not self._has_named_strangers:
                name_strangers(clients, self._population.clients, bool(local.personal))
                self._has_named_strangers = True
            state = local.global_state()

            def load(client: Client) -> None:
                local.load_client(client, self._state_of(client, state), trains=False)
                tell_of_model(trainer, pl_module, client)

            try:
                results = evaluate_clients(trainer, pl_module, clients, load, stage)
            finally:
                local.load_global(state)
                tell_of_model(trainer, pl_module, None)
        self.log_book.put_clients(trainer, trainer.current_epoch, results)

    def _state_of(self, client: Client, state: State) -> State:
        """Shared entries of the model that serves a client, which with most rules is the global one's ``state``."""
        own = self.server.aggregator.model_of(client)
        return state if own is None else own

    def _give_back(self) -> None:
        for hook in self._hooks:
            hook.give_back()
        self._loop.give_back()
        if self._hooks:
            self._trainer.reload_dataloaders_every_n_epochs = self._previous_reload  # type: ignore[attr-defined]
        self._hooks = []
        for parameter in self._frozen_parameters:
            parameter.requires_grad_(True)
        self._frozen_parameters = []
        if self._population is not None:
            self._population.close()  # worker processes that are left to the garbage collector take seconds to end


def find_federation(trainer: L.Trainer) -> Federation:
    """The Trainer's federation.

    Raises:
        MisconfigurationException: If it has none.

    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Federation):
            return callback
    raise MisconfigurationException("The Trainer has no `Federation` callback.")


def default_seed() -> int:
    """The seed of ``lightning.seed_everything`` if it was called, else 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))
