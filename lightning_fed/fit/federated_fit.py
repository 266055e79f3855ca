"""State of a federated fit over all rounds, and the connection to other machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_fed.client.client_store import ClientStore
from lightning_fed.client.local_model import LocalModel
from lightning_fed.console import round_number
from lightning_fed.data.population import Population
from lightning_fed.data.visit_clock import VisitClock
from lightning_fed.federated_callback import federated_callbacks
from lightning_fed.fit.entry_policies import decide_policies, freeze_unset, unset_buffers
from lightning_fed.fit.options import BatchNormOption, FitOptions, FixedStatistics, LocalStatistics
from lightning_fed.fit.round_log import RoundLog, format_bytes
from lightning_fed.lightning.internals import callbacks_of, ignored_warning
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State, plain_keys, tensor_bytes
from lightning_fed.model.entries import (
    Policy,
    batch_norm_layers,
    batch_norm_statistics,
    copy_state,
    live_entries,
    parameter_entries,
)
from lightning_fed.process_group import RoundSynchronisation, process_group_of, sharing_strategy
from lightning_fed.server.schedule import Cohort, Schedule, Visit
from lightning_fed.server.server import ServerInterface

# State stored in checkpoints without conversion.
_SAVED = ("rounds", "number", "is_plain", "fastest")
_SAVED_OF_BATCH_NORM = ("initial_statistics", "decision", "num_measured", "model_round", "norm_layers")


class RemoteSide(ABC):
    """Connection between the server's process and clients on other machines.

    Attributes:
        has_server: Whether this process is the server.
        population: The clients known to this process.
    """

    has_server: bool
    population: Population

    def connect(self, server: ServerInterface) -> ServerInterface:
        """Returns the server to use in a round: ``server``, or a connection to a server on another machine."""
        return server

    def cohort(self, drawn: Callable[[], Cohort]) -> Cohort:
        """Returns the round's clients. On a client's machine, this is only the machine's client."""
        return drawn()

    @abstractmethod
    def visits_here(self, cohort: Cohort) -> Cohort:
        """Restricts a round's clients (``cohort``) to the clients with data in this process."""

    @abstractmethod
    def start(self, fit: FederatedFit) -> None:
        """Prepares the connection to other machines before a round."""

    @abstractmethod
    def exchange(self, round: Any) -> None:
        """Sends and receives the messages in a round."""

    def measure(
        self, server: ServerInterface, visits: Sequence[Visit], send: Callable[[Visit], Broadcast]
    ) -> list[tuple[Client, State]]:
        """Asks remote clients to measure statistics for BatchNorm inputs.

        Returns each answering client with its statistics. ``send`` creates the broadcast for a client. On a client's
        machine the result is empty.
        """
        return []

    def ask(
        self,
        fit: FederatedFit,
        question: Mapping[str, Any],
        visits: Sequence[Visit],
        send: Callable[[Visit], Broadcast],
    ) -> Iterator[tuple[Client, ClientUpdate | str]]:
        """Asks remote clients a question outside a round. Yields each answer, or the reason for a missing answer.

        ``send`` creates the broadcast for a client. ``question`` contains only plain values. On a client's machine
        nothing is yielded.
        """
        return iter(())


@dataclass
class BatchNormState:
    """Treatment of BatchNorm's running statistics in a fit.

    With the option ``"auto"``, the fit compares the clients' statistics after a round. If these differ much, each
    client keeps its own statistics.

    Args:
        option: The user's option ``batch_norm``.
        treatment: The option in effect. If the server cannot see single clients' statistics, ``LocalStatistics()``
            replaces ``"auto"``.
        decision: Choice of ``"auto"``: ``"own"`` statistics per client, or ``"pooled"``; empty before the choice.
        is_alone: Whether the federation has a single client.
        initial_statistics: Running statistics at the start of each client's first training. Empty, unless ``option``
            is ``LocalStatistics(unseen="pooled", measured="visit")``.
        num_measured: Number of rounds in which clients reported statistics.
        reports: Latest statistics from each client, until ``"auto"`` has chosen.
        model_round: Index of the last round with a new global model; -1 for none.
        norm_layers: Names of the BatchNorm layers in training mode; ``None`` before the first round.
        served_client: Client whose statistics are in the module, during an evaluation; otherwise ``None``.
    """

    option: BatchNormOption
    treatment: BatchNormOption
    decision: str = ""
    is_alone: bool = False
    initial_statistics: State = field(default_factory=dict)
    num_measured: int = 0
    reports: dict[Client, State] = field(default_factory=dict)
    model_round: int = -1
    norm_layers: list[str] | None = None
    served_client: Client | None = None

    @property
    def own(self) -> LocalStatistics | None:
        if isinstance(self.treatment, LocalStatistics):
            return self.treatment
        return LocalStatistics() if self.decision == "own" else None

    @property
    def has_own(self) -> bool:
        return self.own is not None

    @property
    def is_measured(self) -> bool:
        return self.own is not None and self.own.measured == "aggregation"

    @property
    def unseen(self) -> str:
        return "" if self.own is None else self.own.unseen

    @property
    def measure_round(self) -> int | None:
        return self.model_round if self.is_measured and self.model_round >= 0 else None

    @property
    def is_reported(self) -> bool:
        if isinstance(self.treatment, LocalStatistics):
            return self.treatment.unseen == "pooled"
        # A single client trains as in a plain fit. Separate statistics need no report.
        is_open = self.treatment == "auto" and self.decision != "own" and not self.is_alone
        return self.treatment == "recalibrate" or is_open

    def store_initial(self, module: nn.Module, policies: Mapping[str, Policy]) -> None:
        """Copies the module's BatchNorm statistics for the start of each client's first training."""
        own = self.treatment
        is_needed = isinstance(own, LocalStatistics) and own.unseen == "pooled" and own.measured == "visit"
        if is_needed and not self.initial_statistics:
            names = {name for name in batch_norm_statistics(module) if policies.get(name) == "personal"}
            entries = live_entries(module)
            self.initial_statistics = copy_state({name: entries[name] for name in entries if name in names})

    def state_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _SAVED_OF_BATCH_NORM},
            "batch_norm": repr(self.option),
            "reports": dict(zip(plain_keys(self.reports), self.reports.values(), strict=True)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in (*_SAVED_OF_BATCH_NORM, "reports"):
            setattr(self, name, state[name])
        if self.option != "auto":  # an evaluation may use another option than the checkpoint
            self.decision = ""


class FederatedFit:
    """State of one federated fit.

    :class:`~lightning_fed.rounds.loop.RoundLoop` holds the state of the loop over rounds.

    Attributes:
        remote: Connection to the clients or the server on other machines; ``None`` if all are in this process.
        has_server: Whether the server is in this process.
        trainer: The Trainer; set by ``setup``.
        policies: Policy of each state dict tensor, such as ``"shared"``; empty before :meth:`decide_policies`.
        unset: Names of buffers that are not sent because they start with NaN or infinite values; ``None`` before the
            fit.
        is_plain: Whether the fit has a single client and trains as without a federation. Before the first round:
            ``None``, or in a resumed fit the checkpoint's value.
        cohort: Clients in the current or last round.
        rounds: Number of finished rounds.
        number: Number of earlier fits with this Trainer.
        clock: Time limit for each local training; ``None`` without a limit.
        limit_visit: Function that returns a context manager. The time limit interrupts the code inside.
        synchronisation: Synchronises the processes in a round; ``None`` with one process.
        warned: Topics of earlier warnings, see :meth:`record_warning`.
        changes: Temporary changes to global settings and the user's objects, reverted by :meth:`close`.
        batch_norm: Treatment of BatchNorm's running statistics.
        fastest: Choice of ``visits="fastest"``: number of clients trained simultaneously (0 before the choice), and the
            speed-up expected from benchmarks.
        averages: Lightning's weight averaging; ``None`` if not used.
    """

    trainer: L.Trainer
    cohort: Cohort

    def __init__(
        self,
        options: FitOptions,
        server: ServerInterface,
        schedule: Schedule,
        store: ClientStore,
        remote: RemoteSide | None = None,
        decision: str = "",
    ) -> None:
        # Constant during the fit.
        self.options, self.server, self.schedule, self.store = options, server, schedule, store
        self.remote, self.has_server = remote, remote is None or remote.has_server
        seconds = options.faults.visit_timeout
        self.clock = None if seconds is None else VisitClock(seconds)
        self.limit_visit = nullcontext if self.clock is None else self.clock.visit
        # Set by the round loop.
        self.policies: Mapping[str, Policy] = {}
        self.unset: frozenset[str] | None = None
        self.rounds = self.number = 0
        self.is_plain: bool | None = None
        self.averages: Any = None
        self.round_log = RoundLog()
        self.synchronisation: RoundSynchronisation | None = None
        self._population: Population | None = None
        self.changes = ExitStack()
        self.warned: set[str] = set()
        self.batch_norm = BatchNormState(options.batch_norm, options.batch_norm, decision)
        self.fastest = 0, 1.0

    @property
    def module(self) -> L.LightningModule:
        return self.trainer.lightning_module

    @property
    def has_one_client(self) -> bool:
        return self.is_plain or (self.remote is None and len(self.population.clients) == 1)

    @property
    def has_ranks(self) -> bool:
        """True if several processes train each client together."""
        # An error in one process then ends the fit.
        return self.trainer.world_size > 1 and sharing_strategy(self.trainer) is None

    @property
    def is_batch_norm_fixed(self) -> bool:
        """True if BatchNorm layers keep fixed running statistics in this round's training."""
        option, epoch = self.options.batch_norm, self.trainer.current_epoch
        return option == "frozen" or (isinstance(option, FixedStatistics) and epoch >= option.after)

    @property
    def is_population_known(self) -> bool:
        return self._population is not None

    @property
    def population(self) -> Population:
        if self._population is None:
            raise RuntimeError("The clients are unknown until `fit` has loaded the training data.")
        return self._population

    def set_population(self, population: Population) -> None:
        """Sets the clients, before the first round and after each reload of the data."""
        if self._population is not None and self.is_plain and len(population.clients) > 1:
            raise MisconfigurationException(
                "Expected one client in reloaded data, because the fit began with one client and keeps the optimizers, "
                f"but the reloaded data have {len(population.clients)} clients: set optimizer_state='reset'."
            )
        if self._population is not None:
            population.sampling, population.has_raised = self._population.sampling, self._population.has_raised
            self._population.close()
        self._population, self.batch_norm.is_alone = population, len(population.clients) == 1
        population.local_epochs = self.schedule.local_epochs
        population.local_steps = self.schedule.local_steps
        population.overfit_batches = self.trainer.overfit_batches  # type: ignore[attr-defined]
        most, clients = self.schedule.cohort_size(len(population.clients)), "in a round"
        if self.schedule.availability.stragglers and self.schedule.availability.partial_work == "drop":
            most, clients = self.schedule.active_size(most), "in a round that complete their work"
        if self.server.min_clients > most:
            raise MisconfigurationException(
                f"Expected `min_clients` to be at most the number of clients {clients} ({most}), but got "
                f"{self.server.min_clients}: the global model would never change."
            )

    def decide_policies(self, trainer: L.Trainer, module: L.LightningModule) -> bool:
        """Makes each tensor without a policy shared (all or some rows), personal or frozen. True if any had none."""
        if self.policies.keys() >= live_entries(module).keys():
            return False
        sliced = {name for callback in federated_callbacks(trainer) for name in callback.sliced_entries(module)}
        options, known = self.options, self.policies
        if options.batch_norm == "auto" and not known:
            self.batch_norm.treatment = LocalStatistics() if self.needs_own_statistics(module, sliced) else "auto"
        policies = decide_policies(module, options.personal, options.frozen, self.batch_norm.treatment, sliced)
        new = {name: policy for name, policy in policies.items() if name not in known}
        if self.unset is None or known:  # a resumed fit has the names: the buffers may be set by now
            self.unset = unset_buffers(module, new) | (self.unset or frozenset())
        self.policies = {**freeze_unset(new, self.unset), **known}
        return True

    def needs_own_statistics(self, module: L.LightningModule, sliced: Collection[str]) -> bool:
        has_hidden_updates = bool(sliced) or self.server.chain.reveals != "update"
        return self.options.batch_norm == "auto" and has_hidden_updates and bool(batch_norm_statistics(module))

    def local_model(self, module: L.LightningModule) -> LocalModel:
        initial = self.batch_norm.initial_statistics
        return LocalModel(module, self.policies, self.store, self.server.rule.resizes, initial)

    def averages_in_place(self) -> AbstractContextManager[None]:
        return nullcontext() if self.averages is None else self.averages.in_place()

    def record_warning(self, subject: str) -> bool:
        """Returns ``True`` at the first call for a topic, so that a warning is given only once per fit."""
        is_first = subject not in self.warned
        self.warned.add(subject)
        return is_first

    def ignore_warning(self, message: str, module: str = "") -> None:
        self.changes.enter_context(ignored_warning(message, module))

    def close(self) -> None:
        if self.clock is not None:
            self.clock.stop()
        self.changes.close()
        if self._population is not None:
            self._population.close()  # a run of the garbage collector takes seconds

    def state_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _SAVED},
            "totals": self.round_log.state_dict(),
            **self.batch_norm.state_dict(),
            "unset": None if self.unset is None else sorted(self.unset),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _SAVED:
            setattr(self, name, state[name])
        self.batch_norm.load_state_dict(state)
        self.round_log.load_state_dict(state["totals"])
        self.unset = None if state["unset"] is None else frozenset(state["unset"])


def describe_start(fit: FederatedFit, method: str, at_once: int) -> str:
    """Formats the log line at the start of a fit. ``at_once`` is the number of simultaneous clients."""
    clients, trainer = len(fit.population.clients), fit.trainer
    counts = Counter[str](fit.policies.values())
    entries = live_entries(fit.module)
    untrained = {name for value, name in parameter_entries(fit.module).items() if not value.requires_grad}
    shared = {name: entries[name] for name, policy in fit.policies.items() if policy == "shared"}
    following = {name: shared.pop(name) for name in untrained & shared.keys()}
    first, last = trainer.current_epoch, trainer.max_epochs
    rounds = "rounds without end" if last in (None, -1) else f"rounds {round_number(first)} to {last}"
    secret = fit.schedule.secret
    size = f"{'about ' if secret is not None and secret.is_poisson else ''}{fit.schedule.cohort_size(clients)}"
    kept = " and ".join(f"{counts[policy]} {policy}" for policy in ("personal", "frozen") if counts[policy])
    text = [
        f"{method}: {rounds}, {size} of {clients} clients per round, {_execution(fit, at_once)}.",
        f"{format_bytes(tensor_bytes(shared))} each way per client ({len(shared)} "
        f"tensors{f'; not sent: {kept}' if kept else ''}).",
    ]
    if following:
        text.append(
            f"{format_bytes(tensor_bytes(following))} more ({len(following)} tensors without gradient) if the module "
            "writes to them, as with a teacher."
        )
    if counts["sliced"]:
        text.append(f"{counts['sliced']} more tensors, of which clients receive only requested rows.")
    if batch_norm_layers(fit.module):
        again = ", and clients also receive each new model to measure statistics" if fit.batch_norm.is_reported else ""
        text.append(f"BatchNorm: {fit.batch_norm.treatment!r}{again}.")
    return " ".join([*text, f"Seed {fit.schedule.seed}."])


def _execution(fit: FederatedFit, at_once: int) -> str:
    if fit.remote is not None:
        return "on other machines"
    number = process_group_of(fit.trainer).size
    if number > 1:
        return f"in {number} processes"
    return f"up to {at_once} at once" if at_once > 1 else "one after another"


def monitored_names(fit: FederatedFit) -> list[str]:
    """Returns the names of logged values that the Trainer's callbacks monitor, such as ``val_loss``."""
    monitors = (getattr(callback, "monitor", None) for callback in callbacks_of(fit.trainer))
    return list(dict.fromkeys(name for name in monitors if isinstance(name, str)))


def statistics_of_monitored(fit: FederatedFit) -> dict[str, str]:
    """Maps each monitored metric to the BatchNorm statistics used for this metric, such as ``"own"``."""
    of_global = fit.batch_norm.unseen or ("pooled" if fit.batch_norm.is_reported else "model")
    return {
        name: "own" if fit.batch_norm.has_own and name.startswith(("fed/", "client/")) else of_global
        for name in monitored_names(fit)
    }
