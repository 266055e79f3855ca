"""The callback that turns a Trainer's epochs into rounds of federated training."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, get_args

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.callbacks.unseen_data import UnseenData
from lightning_fed.client.client_store import ClientStore, build_store
from lightning_fed.client.local_model import LocalModel
from lightning_fed.data.federated import EvaluationData
from lightning_fed.data.partitions import Partition
from lightning_fed.data.population import PlannedVisit, Population
from lightning_fed.data.visit_clock import VisitClock
from lightning_fed.messages import Client, State
from lightning_fed.method import Method, Protection, build_method
from lightning_fed.model.entries import Policy, Selector, check_selectors, live_entries
from lightning_fed.rounds.checkpoint_checks import check_file, check_method, check_model, count_of, describe_clients
from lightning_fed.rounds.client_errors import describe_visit
from lightning_fed.rounds.client_models import ClientModels
from lightning_fed.rounds.entry_policies import check_sliced, decide_policies, freeze_unset, unset_buffers
from lightning_fed.rounds.federated_callback import federated_callbacks
from lightning_fed.rounds.federated_fit import BatchNormMode, FederatedFit, UnseenMode, VisitsMode
from lightning_fed.rounds.fit_summary import describe_end, describe_start
from lightning_fed.rounds.lightning_internals import (
    callbacks_of,
    datamodule_of,
    forget_step,
    is_fitting,
    is_validating,
    log_step,
)
from lightning_fed.rounds.loop import RoundLoop
from lightning_fed.rounds.remote import RemoteSide
from lightning_fed.rounds.round import VisitModel
from lightning_fed.rounds.round_log import RoundLog
from lightning_fed.rounds.scheduler_steps import check_estimate, count_scheduler_steps
from lightning_fed.rounds.synchronisation import process_group_of, sharing_strategy
from lightning_fed.rounds.trainer_checks import add_callbacks, check_schedulers, put_first
from lightning_fed.server.aggregator import Aggregator
from lightning_fed.server.held_entries import HeldEntries
from lightning_fed.server.interface import ServerInterface
from lightning_fed.server.limits import UpdateLimits
from lightning_fed.server.schedule import Cohort, Schedule, default_seed
from lightning_fed.server.server import Server

_log = logging.getLogger(__name__)

_SETTINGS = (
    "local_epochs", "local_steps", "partial_work", "personal", "frozen", "batch_norm", "unseen_statistics",
    "fixed_after", "optimizer_state",
)  # fmt: skip
"""Arguments that a method may set: those of a visit's work and of what travels. The clients that take part are the
user's to set."""


class Federation(L.Callback):
    r"""Federated training on an ordinary Trainer: one epoch is one round.

    Inside an epoch the round's clients train one after another on the same module, each from what the server sent, and
    at the last batch of the last visit the server aggregates. What Lightning does per epoch then happens per round:
    ``max_epochs``, validation, ``EarlyStopping``, ``ModelCheckpoint`` and epoch-interval schedulers count rounds.

    Args:
        method: The federated method: its name, with options behind it if need be (``"fedss:num_negatives=40"``), a
            :class:`~lightning_fed.Method`, or the server's rule. What it sets of the following arguments is its own.
        partition: How the data of a datamodule's or module's ``train_dataloader`` are split into clients; ``None`` with
            a :class:`~lightning_fed.data.FederatedDataModule`, which brings them.
        clients_per_round: Number of clients in a round (int) or fraction of all (float in (0, 1]).
        local_epochs: Passes over a client's data in a visit.
        local_steps: Batches in a visit; replaces ``local_epochs``.
        stragglers: Fraction of the cohort that does only part of its work.
        partial_work: ``"keep"`` aggregates the partial work of stragglers, ``"drop"`` leaves them out.
        dropout: Probability that a chosen client never reports.
        min_clients: Least number of good updates; with fewer the global model stays as it was.
        max_failed_rounds: Rounds in a row that may bring no new model because clients fail: at that many the fit ends
            with an error. So does one in which no round succeeds, and, at once, a round in which all clients fail by
            the same error. ``None`` goes on whatever fails.
        personal: Entries that stay with their client: name patterns (``"head.*"``) and module types.
        frozen: Entries that never travel, do not train and stay as the server has them, likewise. Parameters without
            gradient need not be named: they travel only where the other side does not have their values.
        batch_norm: BatchNorm's running statistics are measured with the new global model by the round's clients
            (``"recalibrate"``), averaged like all entries (``"average"``), averaged for some rounds and then fixed,
            also in training (``"fixed"``, FixBN), kept by each client (``"local"``, SiloBN) or kept with the layers'
            weights (``"personal"``, FedBN), or those the model came with, also in training (``"frozen"``).
        unseen_statistics: With ``batch_norm="local"``, what normalises data of no known client, as those that the
            global model is evaluated on: the mean and variance of the ``"batch"``; those that the clients measure and
            the server pools (``"pooled"``: what ``"recalibrate"`` costs and gives); or those of the client whose data
            look most alike (``"nearest"``: the server needs every client's). See
            :class:`~lightning_fed.modules.UnseenStatistics`.
        fixed_after: With ``batch_norm="fixed"``, the number of rounds before the running statistics are fixed.
        optimizer_state: Every visit starts with fresh optimizer state (``"reset"``), or with the client's (``"keep"``).
        store: Where clients keep what is theirs between visits: a folder (for many clients), a
            :class:`~lightning_fed.client.client_store.ClientStore`, or memory (``None``).
        evaluate_clients_every: Of the rounds in which validation runs (``check_val_every_n_epoch``), after every how
            many-th it runs client by client too, where the validation data are a mapping of clients; 0 for never, also
            in ``trainer.validate`` and ``trainer.test``. With ``privacy`` it is 0: the log says so.
        visits: Whether the visits' batches are trained in one loop without what nobody looks at (``"fused"``), in
            Lightning's own (``"lightning"``), or fused where nothing stands in the way (``"auto"``; else the log says
            what). The results are the same.
        privacy: Protection of the clients, such as :class:`~lightning_fed.privacy.CentralDP`; ``None`` for none.
        secure_sum: A sum of the clients' steps of which the server sees no single one
            (:class:`~lightning_fed.privacy.SecureSum`); ``None`` for none.
        vectorize: At most how many clients train at once, for small models; where they cannot, the log says why.
        max_update_norm: Longest step of a client, as the Euclidean norm of (local - global) over the entries that
            train: a number, or a multiple of the round's median (``"3 * median"``), for which the round's updates wait
            for each other in memory. Longer steps are shortened to it, and counted in ``fed/shortened``. ``None`` for
            any.
        max_samples: Largest number of examples that counts, in weights and wherever the client with the most decides;
            ``None`` for any.
        weighting: What a client counts by: its ``"samples"``, or nothing (``"uniform"``): each as one of one example.
        visit_timeout: Seconds after which a visit is broken off, where the data or the training step are waiting;
            ``None`` for any. It needs Unix, and a fit in the main thread.
        seed: Seed of the partition and the schedule; ``None`` takes that of ``lightning.seed_everything``, or else 0.

    Attributes:
        arguments: What it was built with, by name.
        method: The method. Its callbacks are added to a Trainer that has none of their kind.

    Raises:
        ValueError: If an argument is out of its range or is the method's to set, or a selector matches nothing.
        TypeError: If ``method`` is neither a name nor a method nor a rule, or ``partition`` is not a partition.
        MisconfigurationException: In ``setup``, if the Trainer is asked for what cannot be right in a round; in
            ``fit``, if ``visits="fused"`` and they cannot be.

    Note:
        Attributes of the module that are neither parameters nor buffers pass from one visit to the next; those that
        a round has changed are named in the log. Buffers with ``persistent=False`` start every visit as they were at
        the start of the round.

        Checkpoints hold ``rounds``, ``seed``, ``totals``, ``failed_rounds`` (ints), ``method``, ``clients`` (texts),
        the states of ``aggregator`` and ``store``, ``initial_statistics`` (tensors; empty but for pooled statistics of
        unseen data) and ``held`` (which clients have which entries that do not train).

    Example:
        >>> federation = Federation("fedavg", clients_per_round=10, local_epochs=2)
        >>> trainer = L.Trainer(max_epochs=50, callbacks=[federation], logger=False)

    References:
        McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

    """

    supports_vectorize = True

    def __init__(
        self,
        method: str | Method | Aggregator = "fedavg",
        partition: Partition | None = None,
        clients_per_round: int | float = 1.0,
        local_epochs: int = 1,
        local_steps: int | None = None,
        stragglers: float = 0.0,
        partial_work: Literal["keep", "drop"] = "keep",
        dropout: float = 0.0,
        min_clients: int = 1,
        max_failed_rounds: int | None = 3,
        personal: Sequence[Selector] = (),
        frozen: Sequence[Selector] = (),
        batch_norm: BatchNormMode = "recalibrate",
        unseen_statistics: UnseenMode = "batch",
        fixed_after: int | None = None,
        optimizer_state: Literal["reset", "keep"] = "reset",
        store: str | os.PathLike[str] | ClientStore | None = None,
        evaluate_clients_every: int = 1,
        vectorize: int = 1,
        visits: Literal["auto", "lightning", "fused"] = "auto",
        privacy: Protection | None = None,
        secure_sum: Protection | None = None,
        max_update_norm: float | str | None = None,
        max_samples: int | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        visit_timeout: float | None = None,
        seed: int | None = None,
    ) -> None:
        given = locals()
        self.arguments = {name: given[name] for name in inspect.signature(Federation).parameters}
        self.method = build_method(method)
        for protection in (privacy, secure_sum):
            if protection is not None:
                self.method = protection.protect(self.method)
        options = SimpleNamespace(**_settle(self.method, self.arguments))
        check_option("partial_work", options.partial_work, ("keep", "drop"))
        check_option("batch_norm", options.batch_norm, get_args(BatchNormMode))
        check_option("unseen_statistics", options.unseen_statistics, get_args(UnseenMode))
        if options.unseen_statistics != "batch" and options.batch_norm != "local":
            raise ValueError(
                "Expected `unseen_statistics` with batch_norm='local' only, but got"
                f" {options.unseen_statistics!r} with {options.batch_norm!r}."
            )
        if (options.fixed_after is not None) != (options.batch_norm == "fixed"):
            raise ValueError(
                "Expected `fixed_after`, the number of rounds before running statistics are fixed, with"
                f" batch_norm='fixed' and only there, but got {options.fixed_after!r} with {options.batch_norm!r}."
            )
        check_option("optimizer_state", options.optimizer_state, ("reset", "keep"))
        if not (partition is None or isinstance(partition, Partition)):
            raise TypeError(f"Expected `partition` to be a Partition object such as `IID(10)`, but got {partition!r}.")
        limits = UpdateLimits(max_update_norm, max_samples, weighting)
        self.server: ServerInterface = Server(self.method.aggregator, min_clients, limits)
        self._fresh_aggregator = copy.deepcopy(self.server.aggregator.state_dict())
        self.partition = partition
        seed = default_seed() if seed is None else seed
        work = options.local_epochs, options.local_steps
        self.schedule = Schedule(seed, clients_per_round, *work, stragglers, dropout)
        self.max_failed_rounds = (
            None if max_failed_rounds is None else check_count("max_failed_rounds", max_failed_rounds)
        )
        self.personal = check_selectors("personal", options.personal)
        self.frozen = check_selectors("frozen", options.frozen)
        self.batch_norm: BatchNormMode = options.batch_norm
        self.unseen_statistics: UnseenMode = options.unseen_statistics
        self.fixed_after = None if options.fixed_after is None else check_count("fixed_after", options.fixed_after, 0)
        self.optimizer_state: Literal["reset", "keep"] = options.optimizer_state
        self.partial_work: Literal["keep", "drop"] = options.partial_work
        self.store = build_store(store)
        self.evaluate_clients_every = check_count("evaluate_clients_every", evaluate_clients_every, lowest=0)
        if privacy is not None:  # scores of single clients are nothing that noise covers
            self.evaluate_clients_every = 0
        self.vectorize = check_count("vectorize", vectorize)
        check_option("visits", visits, get_args(VisitsMode))
        self.visits: VisitsMode = visits
        if visit_timeout is not None and self.vectorize > 1:
            raise ValueError(
                "Expected one of `visit_timeout` and `vectorize`: clients that train at once wait for each other."
            )
        self.clock = VisitClock(visit_timeout)
        self._is_fit = True
        self._clients = ""
        self._trainer: L.Trainer | None = None
        self._reset()

    def _reset(self, remote: RemoteSide | None = None) -> None:
        self._fit = FederatedFit(
            server=self.server,
            schedule=self.schedule,
            store=self.store,
            batch_norm=self.batch_norm,
            optimizer_state=self.optimizer_state,
            partial_work=self.partial_work,
            remote=remote,
            unseen_statistics=self.unseen_statistics,
            fixed_after=self.fixed_after,
            clock=self.clock,
        )
        self.server.held = HeldEntries()
        self._loop = RoundLoop(self._fit, self.max_failed_rounds)
        self._models = ClientModels(self._fit)

    def replace(self, **changes: Any) -> Federation:
        """A new federation with the same arguments, but for the changes.

        Example:
            >>> Federation(local_epochs=2).replace(stragglers=0.5).arguments["local_epochs"]
            2

        """
        return Federation(**{**self.arguments, **changes})

    def split(self, remote: RemoteSide) -> None:
        """Leaves one half of the federation to another machine: what a backend does before a fit."""
        self.server = remote.connect(self.server)
        self._reset(remote)

    @property
    def has_personal_entries(self) -> bool:
        """True if entries of the model stay with the clients, as far as the options say it."""
        return bool(self.personal) or self.batch_norm in ("personal", "local")

    @property
    def measures_batch_norm(self) -> bool:
        """True if clients measure BatchNorm's running statistics with every new global model."""
        return self._fit.measures_batch_norm

    @property
    def rounds(self) -> int:
        """Number of rounds that are over, also those of which nothing came."""
        return self._fit.rounds

    @property
    def round_log(self) -> RoundLog:
        """Log of the rounds."""
        return self._fit.round_log

    @property
    def current_visit(self) -> PlannedVisit | None:
        """The visit that is under way; ``None`` between visits."""
        return None if self._fit.round is None else self._fit.round.visit

    @property
    def current_visits(self) -> Sequence[PlannedVisit]:
        """The visits that train now: one, or those that train at once, in the order of their rows in a stack.

        None while a client trains a model beside the one that it was sent (:meth:`exchange_model`): no correction of
        the latter's gradients belongs there.
        """
        round = self._fit.round
        return () if round is None or not round.trains_sent_model else round.group

    @property
    def cohort(self) -> Cohort:
        """The clients of the round that is under way, or was last."""
        return self._fit.cohort

    @property
    def current_client(self) -> Client | None:
        """The client that trains now; ``None`` between visits."""
        return None if self.current_visit is None else self.current_visit.visit.client

    @property
    def client_memory(self) -> State:
        """Tensors that callbacks keep with the client that trains now, if its update is good; theirs to change.

        Raises:
            RuntimeError: Between visits.

        """
        if self._fit.round is None or self._fit.round.visit is None:
            raise RuntimeError("No client is training: its memory can be asked for during its visit.")
        return self._fit.round.local.memory

    def exchange_model(self, model: VisitModel) -> VisitModel:
        """Makes the module another model in the middle of a visit, for a client that trains two; returns the former.

        Args:
            model: The model, with whole entries; its optimizers go on from their state, or begin as in a new visit.
                Until the former is given back, :attr:`current_visits` is empty.

        Raises:
            RuntimeError: Between visits.

        """
        if self._fit.round is None or self._fit.round.visit is None:
            raise RuntimeError("No client is training: its model can be exchanged during its visit.")
        return self._fit.round.exchange_model(model)

    @property
    def has_server(self) -> bool:
        """True if the server's half is in this process."""
        return self._fit.has_server

    @property
    def population(self) -> Population:
        """All clients.

        Raises:
            RuntimeError: Before the fit has asked for its data.

        """
        return self._fit.population

    @property
    def policies(self) -> dict[str, Policy]:
        """Policy of every entry of the module: known once a fit or an evaluation has begun, empty before."""
        return dict(self._fit.policies)

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
        return self._models.state(None if self._trainer is None else self._trainer.lightning_module, client)

    def local_model(self, pl_module: L.LightningModule) -> LocalModel:
        """The module as one client after another sees it; to be asked for while it is the global model."""
        return self._models.local(pl_module)

    @property
    def state_key(self) -> str:
        """The same for every federation, so that a checkpoint of one loads into another with other options."""
        return "Federation"

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Checks the Trainer, puts the round's loader in place, adds the method's callbacks."""
        self._is_fit, self._models.is_lost = stage == "fit", False
        strategy = sharing_strategy(trainer)
        add_callbacks(trainer, self, [*self.method.callbacks, *(strategy.callbacks() if strategy is not None else ())])
        if self.batch_norm == "local" and self.unseen_statistics != "pooled":
            add_callbacks(trainer, self, [UnseenData(self.unseen_statistics, self.store)])
        previous, self._trainer = self._trainer, trainer
        if stage != "fit":
            return
        self._loop.detach()
        log, rounds, failed_rounds = self.round_log, self.rounds, self._loop.failed_rounds
        initial_statistics, held, unset = self._fit.initial_statistics, self.server.held, self._fit.unset
        self._reset(self._fit.remote)
        if rounds and previous is trainer and trainer.current_epoch == rounds:  # its `max_epochs` was raised
            self._fit.round_log, self._fit.rounds, self._loop.failed_rounds = log, rounds, failed_rounds
            self._fit.initial_statistics, self.server.held, self._fit.unset = initial_statistics, held, unset
            self.store.restore(rounds, self.store.checkpoint(rounds))
        else:
            self.server.aggregator.load_state_dict(copy.deepcopy(self._fresh_aggregator))
        put_first(trainer, self, Federation)
        self._loop.attach(trainer, pl_module, self.partition)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Decides what travels, before anything trains."""
        check_schedulers(trainer)
        if self._loop.is_planned and self._fit.remote is None:
            check_estimate(self._fit)
        policies = self._decide_policies(trainer, pl_module)
        check_sliced(pl_module, policies, self.server.aggregator, self.measures_batch_norm, self.optimizer_state)
        self._loop.start_fit(policies, self.vectorize, self.visits)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Makes sure that the Trainer's loader is ours, and puts the states of the global generators aside."""
        self._loop.start_training()
        local = self.local_model(pl_module)
        check_model({name: local.entries[name] for name in local.shared})
        self.server.held.restore(local.entries)
        self._describe_clients()
        self.round_log.show(trainer)  # a fit that was resumed between a round's end and its checkpoint needs them
        if self.rounds == 0:
            self.store.restore(0, {})
        self.store.start(process_group_of(trainer))
        self._start, self.round_log.totals = time.monotonic(), Counter()
        if self._fit.has_server and trainer.is_global_zero:
            _log.info(describe_start(self._fit, self.method.name))
            data = datamodule_of(trainer)
            if self.arguments["privacy"] is not None and isinstance(data, EvaluationData) and data.val_clients():
                _log.info("Clients are not evaluated one by one: `privacy` does not cover scores of single clients.")

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Lets checkpoints inside a round count steps again: the last round's x-axis would name them all alike."""
        forget_step(trainer)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts the visit if this is its first batch."""
        self._loop.start_batch()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gives up a round that is cut short: a Trainer that is told to stop validates at once."""
        if is_validating(trainer):
            self._fit.policies = self._decide_policies(trainer, pl_module)
        elif is_fitting(trainer) and not trainer.sanity_checking:
            self._fit.progress.validate()
            self._loop.cut_short()

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gives the validation metrics the round as their x-axis."""
        if is_fitting(trainer) and not trainer.sanity_checking:
            log_step(pl_module, self.rounds - 1)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluates the clients, before any checkpoint is saved by what they reach."""
        every = 0 if trainer.sanity_checking else self.evaluate_clients_every * (trainer.check_val_every_n_epoch or 1)
        if every and (is_validating(trainer) or (trainer.current_epoch + 1) % every == 0):
            with self._loop.averages_in_place():
                self._models.evaluate(trainer, pl_module, "validation")

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Decides what is the clients' own."""
        self._fit.policies = self._decide_policies(trainer, pl_module)

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluates the clients."""
        if self.evaluate_clients_every:
            self._models.evaluate(trainer, pl_module, "test")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gives up a round that was cut short by the module."""
        self._loop.cut_short()
        self._fit.progress.end_epoch()
        self._fit.rounds = trainer.current_epoch + 1  # also where nothing came of the round
        log_step(pl_module, self.rounds - 1)  # also where the fit was resumed after the round's batches

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leaves the last complete global model in the module, also where the fit ended inside a round.

        Raises:
            RuntimeError: If no round has ever succeeded because clients failed.

        """
        self._loop.end_training(pl_module)
        self._loop.failed_rounds.end_fit()
        totals = self.round_log.totals
        if totals["rounds"] and trainer.is_global_zero:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            _log.info(describe_end(self.method.name, totals, time.monotonic() - self._start, metrics))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Shows the last round's numbers also where nothing was left to train after a resume."""
        self.round_log.show(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leaves the last complete global model in the module, and names the visit that it ended."""
        try:
            if self.current_visit is not None:
                exception.add_note(describe_visit(exception, self.current_visit))
            self._fit.synchronisation.abort()
            self._loop.end_training(pl_module)
        finally:
            self._loop.detach()  # Lightning does not call `teardown` after an exception

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restores what ``setup`` changed."""
        self._loop.detach()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Takes back the batches of a round that is not complete: it is trained again from its start."""
        self._fit.progress.patch(checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """Returns the rounds' counts, method, clients, states of aggregator and store, and what the fit began with."""
        module = self._trainer.lightning_module if self._trainer is not None and self._fit.round is None else None
        return {
            "rounds": self.rounds,
            "seed": self.schedule.seed,
            "method": self.method.name,
            "clients": self._clients,
            "totals": self.round_log.state_dict(),
            "failed_rounds": self._loop.failed_rounds.state_dict(),
            "aggregator": self.server.aggregator.state_dict() if self._fit.round is None else self.server.state_before,
            "store": self.store.checkpoint(self.rounds),
            "initial_statistics": self._fit.initial_statistics,
            "held": self.server.held.state_dict(None if module is None else live_entries(module)),
            "unset": None if self._fit.unset is None else sorted(self._fit.unset),
        }

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Checks the bytes of the file."""
        check_file(trainer.ckpt_path)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on after the checkpoint's last complete round.

        Raises:
            ValueError: If a fit is to go on from the checkpoint of another method.

        """
        if self._is_fit:
            check_method(state_dict.get("method", ""), self.method.name)
        self._clients = state_dict.get("clients", "")
        self._fit.rounds = state_dict["rounds"]
        then, now = state_dict["seed"], self.schedule.seed
        if then != now:
            _log.warning("The checkpoint's rounds were drawn with seed %d; from now on it is seed %d.", then, now)
        self.round_log.load_state_dict(state_dict["totals"])
        self._loop.failed_rounds.load_state_dict(state_dict["failed_rounds"])
        self.server.aggregator.load_state_dict(state_dict["aggregator"])
        self._models.restore(self.rounds, state_dict["store"], must=self._is_fit)
        self._fit.initial_statistics = state_dict.get("initial_statistics", {})  # not in checkpoints of older versions
        self.server.held.load_state_dict(state_dict.get("held", {}))
        unset = state_dict.get("unset")
        self._fit.unset = None if unset is None else frozenset(unset)

    def find_population(self) -> Population:
        """All clients; in a fit their data are asked for if they are not known yet."""
        return self._loop.find_population()

    def scheduler_steps(self, rounds: int, window: int = 1) -> int:
        """Number of steps that a per-step scheduler makes in a fit, see :func:`~lightning_fed.scheduler_steps`.

        Args:
            rounds: Number of rounds of the fit.
            window: Batches for one step of the optimizer.

        """
        self.find_population()
        return count_scheduler_steps(self._fit, rounds, window)

    def _describe_clients(self) -> None:
        """Says it if the clients are not those of the checkpoint that the fit goes on from."""
        then, now = self._clients, describe_clients(self.population.clients)
        if self.rounds and then and then != now:
            _log.warning(
                "The clients are not those of the checkpoint: it had %s, and there are %s%s.",
                count_of(then),
                count_of(now),
                ", of other names" if count_of(then) == count_of(now) else "",
            )
        self._clients = now

    def _decide_policies(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Policy]:
        sliced = {name for callback in federated_callbacks(trainer) for name in callback.sliced_entries(pl_module)}
        policies = decide_policies(pl_module, self.personal, self.frozen, self.batch_norm, sliced)
        if self._fit.unset is None:  # a resumed fit knows them: by then they may have values
            self._fit.unset = unset_buffers(pl_module, policies)
        return freeze_unset(policies, self._fit.unset)


def _settle(method: Method, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a federation, with those that its method sets.

    Raises:
        ValueError: If the method sets what it may not, or what the user sets to another value.

    """
    parameters = inspect.signature(Federation).parameters
    for name, value in method.settings.items():
        if name not in _SETTINGS:
            raise ValueError(f"Expected the settings of `{method.name}` to be of {_SETTINGS}, but got {name!r}.")
        given, default = arguments[name], parameters[name].default
        if given not in (default, value) and (given or default):  # a recipe's empty list is not given
            raise ValueError(f"Expected `{method.name}` without `{name}`, which it sets itself, but got {given!r}.")
    return {**arguments, **method.settings}


def find_federation(trainer: L.Trainer) -> Federation:
    """The Trainer's federation.

    Raises:
        MisconfigurationException: If it has none.

    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, Federation):
            return callback
    raise MisconfigurationException("The Trainer has no `Federation` callback.")


def scheduler_steps(trainer: L.Trainer) -> int | float:
    """Number of steps that a scheduler with ``interval="step"`` makes in a fit.

    It is the ``total_steps`` of a ``OneCycleLR``, or the ``num_training_steps`` of a warm-up, in
    ``configure_optimizers``. In a federation every visit starts from the round's state of the scheduler, and the round
    goes on from where its client with the most examples left it: in a round a scheduler advances by the steps of one
    visit. ``trainer.estimated_stepping_batches`` counts the steps of all clients of a round.

    Args:
        trainer: The Trainer. Without a :class:`~lightning_fed.Federation` the number is Lightning's own, so that a
            module can ask for it in both.

    Returns:
        The number of steps; as in Lightning ``inf`` where the Trainer has no limit.

    Raises:
        MisconfigurationException: If the clients' data are on other machines.

    Example:
        >>> trainer = L.Trainer(max_steps=7, logger=False, enable_checkpointing=False)
        >>> scheduler_steps(trainer)
        7

    """
    federation = next((callback for callback in callbacks_of(trainer) if isinstance(callback, Federation)), None)
    rounds = trainer.max_epochs
    if federation is None or rounds is None or rounds < 0:
        return trainer.estimated_stepping_batches
    return federation.scheduler_steps(rounds, trainer.accumulate_grad_batches)
