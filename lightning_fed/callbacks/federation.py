"""Callback that turns the epochs of a Trainer into rounds of federated training."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import perf_counter  # bound at import, because profilers may replace `time.perf_counter`
from typing import Any, Literal

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.client.client_store import ClientStore, build_store
from lightning_fed.client.local_model import LocalModel
from lightning_fed.console import round_number
from lightning_fed.data.federated import evaluated_client
from lightning_fed.data.partition import Partition
from lightning_fed.data.population import PlannedVisit, Population
from lightning_fed.errors import describe
from lightning_fed.federated_callback import AskableCallback, FederatedCallback, TrainerCallback
from lightning_fed.fit.checks import (
    add_callbacks,
    check_file,
    check_model,
    check_option,
    check_steps,
    count_of,
    describe_clients,
    put_first,
    warn_of_batch_norm_option,
)
from lightning_fed.fit.federated_fit import FederatedFit, RemoteSide, describe_start, statistics_of_monitored
from lightning_fed.fit.options import BatchNormOption, Faults, LocalStatistics, VisitsOption, build_options
from lightning_fed.fit.round_log import RoundLog, describe_end, files_of, last_checkpoint
from lightning_fed.lazy_names import find_feature, load_feature, warn_of_two
from lightning_fed.lightning.checkpoints import folders_of, protect_checkpoints
from lightning_fed.lightning.internals import callbacks_of, find_callbacks, is_fitting, is_validating, show_status
from lightning_fed.messages import Client, State
from lightning_fed.method import Method, build_method
from lightning_fed.model.entries import Policy, Selector, batch_norm_layers, live_entries
from lightning_fed.process_group import process_group_of, sharing_strategy
from lightning_fed.rounds.client_errors import describe_visit
from lightning_fed.rounds.client_models import Answers, ask, client_state, own_models
from lightning_fed.rounds.loop import RoundLoop
from lightning_fed.rounds.scheduler_steps import check_estimate, count_scheduler_steps
from lightning_fed.rounds.visit_flow import ClientVisit
from lightning_fed.rule import Aggregator
from lightning_fed.server.schedule import Availability, Cohort, Schedule, default_seed
from lightning_fed.server.server import HeldEntries, Server, ServerInterface
from lightning_fed.steps.chain import Chain
from lightning_fed.steps.update_step import UpdateStep

_log = logging.getLogger(__name__)

_SETTINGS = ("local_epochs", "local_steps", "personal", "frozen", "batch_norm", "optimizer_state")
"""Arguments that a method may set: the work of a visit, and the sent entries. Only the user chooses the clients."""

_LEAST_AT_ONCE = 4  # in smaller cohorts, clients at once gain nothing (measurements in `backends/vectorized/plan.py`)


class Federation(TrainerCallback):
    r"""Federated training on an ordinary Trainer: one epoch is one round.

    Inside an epoch the round's clients train one after another in the same module. Each client starts from the global
    model. At the end the server aggregates. For ``max_epochs``, validation, ``EarlyStopping``, ``ModelCheckpoint`` and
    learning-rate schedulers with epoch interval, an epoch is a round.

    Args:
        method: Federated method: a name, with options if needed (``"fedss:num_negatives=40"``), a
            :class:`~lightning_fed.Method`, or an aggregation rule. The object is copied. Arguments that the method sets
            cannot be passed.
        partition: Split of the training data into clients; ``None`` if the data are a
            :class:`~lightning_fed.data.FederatedDataModule`.
        clients_per_round: Number of clients in a round (int) or fraction of all (float in (0, 1]).
        local_epochs: Passes over a client's data in one round.
        local_steps: Batches per client in one round; replaces ``local_epochs``.
        personal: Parameters and buffers that stay on each client and are never averaged: name patterns (``"head.*"``)
            and module types.
        frozen: Parameters and buffers that are neither trained nor sent: patterns and types as for ``personal``.
            Parameters without gradient are always frozen.
        batch_norm: Treatment of BatchNorm's running statistics. ``"recalibrate"``: the clients measure statistics with
            each new global model, and the server pools the statistics. :class:`~lightning_fed.LocalStatistics`:
            separate statistics for each client. ``"auto"``: chosen after the first round, separate statistics if the
            clients' statistics differ much, otherwise pooled. ``"average"``: averaged like parameters. ``"personal"``:
            whole BatchNorm layers stay on the clients (FedBN). :class:`~lightning_fed.FixedStatistics`: fixed after
            some rounds. ``"frozen"``: the initial statistics, also in training.
        optimizer_state: Optimizer state at the start of local training: new (``"reset"``), or from the client's last
            round (``"keep"``).
        availability: Slow clients, and clients that never report (:class:`~lightning_fed.Availability`).
        faults: Limits on failures of clients (:class:`~lightning_fed.Faults`).
        store: Storage for client state between rounds: a folder (for many clients), a
            :class:`~lightning_fed.client.client_store.ClientStore`, or by default memory.
        visits: Loop for local training. All loops have equal results, up to rounding. ``"lightning"``: Lightning's
            loop. ``"fused"``: a faster loop that skips unused hooks. ``"auto"``: fused if possible.
            :class:`~lightning_fed.Vectorized`: several clients at once. ``"fastest"``: ``Vectorized`` with the
            best number from stored benchmarks for model, device and clients per round; without a gain, ``"auto"``.
        steps: Steps between local training and the new global model, such as clipping (:mod:`lightning_fed.steps`), in
            order of execution on the client. The method's steps run first on the client. The objects are copied.
        seed: Seed for the partition and the choice of clients; by default the seed from ``seed_everything``, or 0.

    Attributes:
        arguments: The constructor's arguments, by name.
        options: Options for a fit: the arguments combined with the method's settings.
        method: The federation's copy of the method. The method's callbacks are added to the Trainer, except classes
            already present.
        has_lost_entries: True if ``store`` cannot restore the clients' tensors for the evaluated checkpoint.
        server: The server. Results are in ``server.rule`` and ``steps``, not in the objects passed as arguments.

    Raises:
        ValueError: If an argument is out of range or set by the method, or a pattern or type matches nothing.
        TypeError: If ``method`` or ``partition`` has an invalid type, or if ``method`` cannot be copied.
        MisconfigurationException: In ``setup``, if a Trainer setting is invalid in a round. In ``fit``, if
            ``visits="fused"`` is set but not possible.

    Note:
        Attributes outside ``state_dict`` (of module, callbacks, optimizers and schedulers) keep their values from
        client to client. A warning names changed attributes that can affect later clients. Buffers with
        ``persistent=False`` start with the round's initial values on every client.

        Checkpoints contain the state of the federation: completed rounds, seed, method, clients, update steps, client
        store, and the choice for ``batch_norm="auto"``.

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
        personal: Sequence[Selector] = (),
        frozen: Sequence[Selector] = (),
        batch_norm: BatchNormOption = "auto",
        optimizer_state: Literal["reset", "keep"] = "reset",
        availability: Availability | None = None,
        faults: Faults | None = None,
        store: str | os.PathLike[str] | ClientStore | None = None,
        visits: VisitsOption = "auto",
        steps: Sequence[UpdateStep] = (),
        seed: int | None = None,
    ) -> None:
        given = locals()
        warn_of_two()
        self.arguments = {name: given[name] for name in inspect.signature(Federation).parameters}
        self.method = _copy_method(build_method(method))
        options = _combine_settings(self.method, self.arguments)
        if not (partition is None or isinstance(partition, Partition)):
            raise TypeError(f"Expected `partition` to be a Partition object such as `IID(10)`, but got {partition!r}.")
        chain = Chain(self.method.aggregator, [*self.method.steps, *steps])
        self.options = build_options(**{name: options[name] for name in inspect.signature(build_options).parameters})
        self.server: ServerInterface = Server(chain, self.options.faults.min_clients)
        self._fresh_chain = copy.deepcopy(chain.state_dict())
        self._steps = chain.describe()
        self.partition = partition
        work = options["local_epochs"], options["local_steps"]
        self.schedule = Schedule(self.seed, clients_per_round, *work, self.options.availability)
        self.store = build_store(store)
        self._is_fit, self.has_lost_entries = True, False
        self._preset_decision = ""
        self._clients = ""
        self._trainer: L.Trainer | None = None
        self._reset()

    def _reset(self, remote: RemoteSide | None = None) -> None:
        parts = self.options, self.server, self.schedule, self.store
        self._fit = FederatedFit(*parts, remote, self._preset_decision)
        self.server.held = HeldEntries()
        self._loop = RoundLoop(self._fit)

    def replace(self, **changes: Any) -> Federation:
        """Creates a federation with the same arguments, except for the given ones."""
        return Federation(**{**self.arguments, **changes})

    def split(self, remote: RemoteSide) -> None:
        """Runs only the server or only clients in this process. ``remote`` is the connection to the other machines."""
        self.server = remote.connect(self.server)
        self._reset(remote)

    @property
    def steps(self) -> Sequence[UpdateStep]:
        """Update steps (such as clipping) in the order of execution on the client."""
        return tuple(self.server.chain.steps)

    @property
    def has_personal_entries(self) -> bool:
        return self.options.has_personal_entries

    @property
    def has_own_statistics(self) -> bool:
        """True if each client has separate BatchNorm statistics in the current fit or evaluation."""
        return self._fit.batch_norm.has_own

    @property
    def batch_norm_decision(self) -> str:
        """Statistics chosen by ``batch_norm="auto"``: ``"own"`` per client, ``"pooled"``, or empty if undecided."""
        return self._fit.batch_norm.decision

    def preset_decision(self, decision: str) -> None:
        """Sets the choice of ``batch_norm="auto"`` before a fit: ``"own"`` statistics per client, or ``"pooled"``."""
        self._preset_decision = decision if self.options.batch_norm == "auto" else ""
        self._reset(self._fit.remote)

    def needs_own_statistics(self, module: L.LightningModule) -> bool:
        """True if ``batch_norm="auto"`` selects separate BatchNorm statistics for each client in this fit."""
        callbacks = [callback for callback in self.method.callbacks if isinstance(callback, FederatedCallback)]
        sliced = [name for callback in callbacks for name in callback.sliced_entries(module)]
        return self._fit.needs_own_statistics(module, sliced)

    @property
    def reports_statistics(self) -> bool:
        """True if clients send BatchNorm statistics of each new global model to the server."""
        return self._fit.batch_norm.is_reported

    @property
    def seed(self) -> int:
        """Seed for the partition and the choice of clients in this fit."""
        given: int | None = self.arguments["seed"]
        return default_seed() if given is None else int(given)  # NumPy integers do not load with `weights_only=True`

    @property
    def rounds(self) -> int:
        """Number of completed rounds, including rounds without a new model."""
        return self._fit.rounds

    @property
    def round_log(self) -> RoundLog:
        return self._fit.round_log

    @property
    def open_visit(self) -> ClientVisit | None:
        """The local training in progress, or ``None`` between clients."""
        return None if self._loop.open_round is None else self._loop.open_round.driver.current

    @property
    def current_visit(self) -> PlannedVisit | None:
        """Plan of the current local training: client, round, seed and length. ``None`` if no client trains."""
        return None if self.open_visit is None else self.open_visit.planned

    @property
    def visit(self) -> PlannedVisit:
        """Plan of the current local training: client, round, seed and length. Raises an error if no client trains."""
        assert self.current_visit is not None
        return self.current_visit

    @property
    def current_visits(self) -> Sequence[PlannedVisit]:
        """Plans of all local trainings in progress. Several clients can train simultaneously."""
        if self._loop.open_round is None or (self.open_visit is not None and self.open_visit.trains_second_model):
            return ()
        return self._loop.open_round.driver.group

    @property
    def cohort(self) -> Cohort:
        """The clients in the current or last round."""
        return self._fit.cohort

    @property
    def current_client(self) -> Client | None:
        """The client in training, or ``None``."""
        return None if self.current_visit is None else self.current_visit.visit.client

    @property
    def client_memory(self) -> State:
        """Tensors stored for the client in training. Changes are kept only if the server accepts the update."""
        if self.open_visit is None:
            raise RuntimeError("No client is training: a client's memory is only available during the client's visit.")
        return self.open_visit.memory

    @property
    def has_server(self) -> bool:
        """True if the server of the federation runs in this process."""
        return self._fit.has_server

    @property
    def population(self) -> Population:
        """All clients. Raises ``RuntimeError`` before the training data are loaded."""
        return self._fit.population

    @property
    def policies(self) -> dict[str, Policy]:
        """Maps state dict entries to policies, such as ``"shared"`` (averaged) or ``"personal"`` (never sent)."""
        return dict(self._fit.policies)

    def client_state(self, client: Client) -> dict[str, Any]:
        """Copies the state of a client's model: the global state dict with the client's personal tensors.

        After ``trainer.validate`` or ``trainer.test`` with a checkpoint, the state comes from the checkpoint. Before a
        client's first round, personal tensors have the initial values. Raises ``RuntimeError`` before the clients are
        known and during a round, and ``ValueError`` for an unknown client.
        """
        module = None if self._trainer is None else self._trainer.lightning_module
        return client_state(self._fit, module, client, self._loop.open_round is not None)

    def client_model(self, client: Client) -> L.LightningModule:
        """Copies the module as a client's model, with the client's personal tensors and BatchNorm statistics.

        The copy is in evaluation mode and works without this package. Raises ``RuntimeError`` during a fit, and
        ``ValueError`` for an unknown client.
        """
        state = self.client_state(client)
        if self._loop.is_attached:
            raise RuntimeError("A client's model is available only after the fit: between rounds use `client_state`.")
        model = copy.deepcopy(self._fit.module)
        model.load_state_dict(state)
        return model.eval()

    def ask(
        self,
        module: L.LightningModule,
        callback: AskableCallback,
        clients: Iterable[Client],
        question: Mapping[str, Any],
        own: bool = False,
    ) -> Answers:
        """Sends a model and a question to clients outside a round, and collects the answers.

        The hook ``on_client_question`` of ``callback`` computes an answer. On other machines, a callback of the same
        class answers.

        Args:
            module: The module with the model to send, usually the global model.
            callback: The callback for computing the answers.
            clients: The clients to ask.
            question: The question: primitives and plain containers.
            own: Whether each client loads its own model, such as one with personal tensors, not the global model.
        """
        return ask(self._fit, module, callback, clients, question, own)

    def averages_in_place(self) -> AbstractContextManager[None]:
        """Context for validation: the module contains averaged weights, if the fit averages weights over steps."""
        return self._fit.averages_in_place()

    @property
    def is_remote(self) -> bool:
        """True if the server or the clients run on other machines."""
        return self._fit.remote is not None

    def local_model(self, pl_module: L.LightningModule) -> LocalModel:
        """Returns an object that loads any client's model into the module. The module must contain the global model."""
        if self._trainer is not None:
            self._fit.decide_policies(self._trainer, pl_module)  # `on_fit_start` runs before the decision
        return self._fit.local_model(pl_module)

    def own_models(self, pl_module: L.LightningModule) -> AbstractContextManager[Callable[[Client], None]]:
        """Context that yields a function for loading a client's own model. The global model is restored at the end."""
        return own_models(self._fit, pl_module)

    @property
    def state_key(self) -> str:
        """Key of the federation's state in checkpoints. The key is constant, so most options can change on resuming."""
        return "Federation"

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Prepares a fit or evaluation: checks the Trainer, installs the round loader, adds the method's callbacks."""
        self._is_fit, self.has_lost_entries = stage == "fit", False
        protect_checkpoints(trainer)
        strategy = sharing_strategy(trainer)
        step_callbacks = self.server.chain.callbacks()
        shared = strategy.callbacks() if strategy is not None else ()
        add_callbacks(trainer, self, [*self.method.callbacks, *step_callbacks, *shared])
        previous, self._trainer = self._trainer, trainer
        if stage != "fit":
            self._fit.trainer = trainer
            if self._fit.remote is not None:
                self._fit.set_population(self._fit.remote.population)
            return
        self._loop.detach()
        state, held = self._loop.state_dict(), self.server.held
        self._reset(self._fit.remote)
        self._fit.trainer = trainer
        if trainer.current_epoch and previous not in (None, trainer) and not self.is_remote:
            raise MisconfigurationException(
                f"This Trainer would continue after epoch {trainer.current_epoch}, but another Trainer has used the "
                "`Federation` in the meantime: create a separate federation for each Trainer (`federation.replace()` "
                "makes a copy)."
            )
        if state["rounds"] and previous is trainer and trainer.current_epoch:  # with a larger `max_epochs`
            self._loop.continue_from(state)
            self.server.held = held
            self.store.restore(state["rounds"], self.store.checkpoint(state["rounds"]))
        else:
            self.server.chain.load_state_dict(copy.deepcopy(self._fresh_chain))
            self.schedule.secret, self.schedule.seed = None, self.seed
        put_first(trainer, self, Federation)
        self._loop.attach(pl_module, self.partition)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._loop.prepare()
        if self._loop.is_planned and not self.is_remote:
            check_estimate(self._fit)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Decides which parameters and buffers are shared, personal or frozen, after all ``on_fit_start`` hooks."""
        self._loop.start_fit()
        self._add_unseen(trainer, pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.on_sanity_check_start(trainer, pl_module)
        self._loop.start_training()
        local = self.local_model(pl_module)
        check_model({name: local.entries[name] for name in local.shared})
        self.server.held.restore(local.entries)
        self._describe_clients()
        self.round_log.show(trainer)  # for a fit that resumes between the end of a round and its checkpoint
        if self.rounds == 0:
            self.store.restore(0, {})
        self.store.start(process_group_of(trainer))
        self._start, self.round_log.totals = perf_counter(), Counter()
        if self._fit.has_server and trainer.is_global_zero:
            _log.info(describe_start(self._fit, self.method.name, self._loop.plan.clients))
            is_large = self.schedule.cohort_size(len(self.population.clients)) >= _LEAST_AT_ONCE
            if self.options.visits == "auto" and is_large and not self.is_remote:
                vectorized = find_feature("lightning_fed.backends.vectorized.plan")
                if vectorized is not None:
                    vectorized.suggest_fastest(self._fit)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._loop.start_epoch()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._loop.open_round is not None:
            self._loop.open_round.driver.start_batch()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if is_validating(trainer):
            self._decide_policies(trainer, pl_module)
        elif is_fitting(trainer) and not trainer.sanity_checking:
            show_status(trainer, "validating")
            self._loop.start_validation()

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._decide_policies(trainer, pl_module)

    def _decide_policies(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._fit.policies = {}  # an evaluation may use another module
        self._fit.decide_policies(trainer, pl_module)
        self._add_unseen(trainer, pl_module)

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._add_unseen(trainer, pl_module)

    def _add_unseen(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        option = self.options.batch_norm
        is_needed = option == "auto" or (isinstance(option, LocalStatistics) and option.unseen != "pooled")
        if is_needed and batch_norm_layers(pl_module):
            unseen = find_feature("lightning_fed.batch_norm.unseen_data")
            if unseen is not None:
                add_callbacks(trainer, self, [unseen.UnseenData(partial(getattr, self, "_fit"))])  # can be pickled

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Abandons an unfinished round, and prepares Lightning's loops for the next round."""
        show_status(trainer, "")
        if self.has_own_statistics:
            load_feature("lightning_fed.batch_norm.measurement").warn_of_monitors(self._fit)
        self._loop.end_epoch()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restores the last complete global model in the module, also if the fit ends inside a round."""
        self._loop.end_training(pl_module)
        failed = self._loop.failed_rounds
        if failed.message and not failed.has_trained:
            raise RuntimeError(failed.message) from failed.cause
        self._loop.measure_statistics(self.store.clients())
        totals, files = self.round_log.totals, files_of(trainer)  # in all processes
        if totals["rounds"] and trainer.is_global_zero:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            seconds = perf_counter() - self._start
            state = self._fit.batch_norm
            again = (state.is_reported or state.num_measured > 0) and bool(batch_norm_layers(pl_module))
            _log.info(describe_end(self.method.name, totals, seconds, metrics, files, again))
            if self.has_own_statistics:
                _log.info(
                    "Each client has its own BatchNorm statistics: %s. A model from `load_from_checkpoint` has %s "
                    "statistics, so its scores differ: adapt(model, loader) measures new statistics.",
                    "the clients measure the statistics again before each evaluation"
                    if self.is_remote
                    else "`client_model(client)` of the federation returns a client's model, and "
                    "`trainer.test(ckpt_path=...)` evaluates with the checkpoint's statistics, if these were "
                    "measured with the checkpoint's weights",
                    "pooled" if state.is_reported else "averaged" if state.decision else "the initial",
                )

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.round_log.show(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Restores the last complete global model, and adds the interrupted client and round to the exception."""
        try:
            if self.current_visit is not None:
                exception.add_note(describe_visit(exception, self.current_visit))
            elif (client := evaluated_client(trainer)) is not None:
                exception.add_note(f"Raised in the evaluation of client {client!r}.")
            if isinstance(exception, OSError) and exception.filename is None:
                exception.add_note(f"This fit writes files to {', '.join(folders_of(trainer))}.")
            if self._fit.synchronisation is not None:
                self._fit.synchronisation.abort()
            self._loop.end_training(pl_module)
            checkpoint, place = last_checkpoint(trainer), round_number(trainer.current_epoch)
            if self._is_fit and trainer.is_global_zero:
                origin = f"from the end of round {self.rounds}" if self.rounds else "the initial model"
                _log.info("The fit ended in round %d of %s. The model is %s.", place, trainer.max_epochs, origin)
            if checkpoint is not None and trainer.is_global_zero:
                words = "Resume: `fit(..., ckpt_path=%r)`, or the same command with --ckpt_path %s"
                _log.info(words, checkpoint, shlex.quote(checkpoint))
        finally:
            self._loop.detach()  # Lightning does not call `teardown` after an exception

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._loop.detach()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Resets the checkpoint's batch counts, because a resumed fit repeats an incomplete round from the start."""
        self._loop.correct_checkpoint(checkpoint)

    def state_dict(self) -> dict[str, Any]:
        is_in_round = self._loop.open_round is not None
        module = None if self._trainer is None or is_in_round else self._trainer.lightning_module
        return {
            **self._loop.state_dict(),
            "statistics": {} if self._trainer is None else statistics_of_monitored(self._fit),
            "seed": self.schedule.seed,
            "method": self.method.name,
            "steps": self._describe_steps(),
            "clients": self._clients,
            "chain": self.server.state_before if is_in_round else self.server.chain.state_dict(),
            "store": self.store.checkpoint(self.rounds),
            "held": self.server.held.state_dict(None if module is None else live_entries(module)),
        }

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        check_file(trainer.ckpt_path)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes after the checkpoint's last complete round. Refuses another federated method or update step."""
        if self._is_fit:
            check_option("method", state_dict.get("method", ""), self.method.name)
            check_steps(state_dict.get("steps"), self._describe_steps())
            check_option("batch_norm", state_dict.get("batch_norm", ""), repr(self.options.batch_norm))
        else:
            warn_of_batch_norm_option(state_dict.get("batch_norm", ""), repr(self.options.batch_norm))
        self._clients = state_dict.get("clients", "")
        self._loop.load_state_dict(state_dict)
        then, now = state_dict["seed"], self.schedule.seed
        if then != now:
            _log.warning("The checkpoint used seed %d to draw rounds; further rounds use seed %d.", then, now)
        self.server.chain.load_state_dict(state_dict["chain"])
        try:
            self.store.restore(self.rounds, state_dict["store"])
        except ValueError as error:
            if self._is_fit:
                raise
            self.has_lost_entries = True
            _log.warning("The clients are not evaluated individually. %s", error)
        self.server.held.load_state_dict(state_dict.get("held", {}))

    def find_population(self) -> Population:
        """Returns all clients. In a fit, loads the data if the clients are unknown."""
        return self._loop.find_population()

    def scheduler_steps(self, rounds: int, window: int = 1) -> int:
        """Returns the highest step that a per-step learning-rate scheduler reaches in ``rounds`` rounds.

        In a round, the scheduler starts at the same step for each client. The next round starts at the last step of the
        client with the median number of steps. ``window`` is the number of batches per step.
        """
        self.find_population()
        return count_scheduler_steps(self._fit, rounds, window)

    def _describe_steps(self) -> dict[str, str]:
        callbacks = [] if self._trainer is None else callbacks_of(self._trainer)
        private = {type(callback).__name__: callback for callback in callbacks if hasattr(callback, "describe_privacy")}
        return {**self._steps, **{name: callback.describe_privacy() for name, callback in sorted(private.items())}}

    def _describe_clients(self) -> None:
        then, now = self._clients, describe_clients(self.population.clients)
        if self.rounds and then and then != now:
            _log.warning(
                "The clients differ from the clients in the checkpoint: the checkpoint has %s, but the data have %s%s.",
                count_of(then),
                count_of(now),
                " with other names" if count_of(then) == count_of(now) else "",
            )
        self._clients = now


def _combine_settings(method: Method, arguments: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(Federation).parameters
    for name, value in method.settings.items():
        if name not in _SETTINGS:
            raise ValueError(f"Expected the settings of `{method.name}` to be among {_SETTINGS}, but got {name!r}.")
        given, default = arguments[name], parameters[name].default
        if given not in (default, value) and (given or default):  # an empty list in a recipe is treated as not given
            raise ValueError(f"Expected no `{name}` for `{method.name}`, which sets this argument, but got {given!r}.")
    return {**arguments, **method.settings}


def _copy_method(method: Method) -> Method:
    try:
        return copy.deepcopy(method)
    except Exception as error:
        raise TypeError(
            f"Expected a `method` that can be copied, but an object in `{method.name}` cannot ({describe(error)}): "
            "if the object is a callback, give the callback to the Trainer, or define `__deepcopy__` in the class."
        ) from error


def find_federation(trainer: L.Trainer) -> Federation:
    """Returns the Trainer's federation. Raises ``MisconfigurationException`` if the Trainer has no federation."""
    federation = federation_of(trainer)
    if federation is None:
        raise MisconfigurationException("Expected a Trainer with a `Federation` callback, but got none.")
    return federation


def federation_of(trainer: L.Trainer) -> Federation | None:
    """Returns the Trainer's federation, or ``None`` if the Trainer has no federation."""
    return next(iter(find_callbacks(trainer, Federation)), None)


def move_behind_federation(callback: L.Callback, trainer: L.Trainer) -> None:
    """Moves a callback directly behind the federation in the Trainer's list of callbacks."""
    callbacks = callbacks_of(trainer)
    callbacks.remove(callback)
    callbacks.insert(callbacks.index(find_federation(trainer)) + 1, callback)


def scheduler_steps(trainer: L.Trainer) -> int | float:
    """Number of steps of a learning-rate scheduler with ``interval="step"`` in a fit.

    Use the number in ``configure_optimizers``, as ``total_steps`` of ``OneCycleLR`` or ``num_training_steps`` of a
    warm-up. In a federation, a round advances the scheduler by the median number of steps in a client's training.
    Without a federation the function returns ``trainer.estimated_stepping_batches``.

    Raises:
        MisconfigurationException: If the clients' data are on other machines.

    Example:
        >>> trainer = L.Trainer(max_steps=7, logger=False, enable_checkpointing=False)
        >>> scheduler_steps(trainer)
        7
    """
    federation = federation_of(trainer)
    rounds = trainer.max_epochs
    if federation is None or rounds is None or rounds < 0:
        return trainer.estimated_stepping_batches
    return federation.scheduler_steps(rounds, trainer.accumulate_grad_batches)
