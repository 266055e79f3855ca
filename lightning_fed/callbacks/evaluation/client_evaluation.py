"""Callback for evaluation on the clients' validation and test data."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.argument_checks import check_count
from lightning_fed.callbacks.evaluation.bounds import check_numbers, find_disagreements, find_outliers
from lightning_fed.callbacks.evaluation.data_pass import (
    Stage,
    compute_states,
    evaluate_data,
    limit_of,
    limited_values,
    pooled_values,
)
from lightning_fed.callbacks.evaluation.metric_states import REASONS, StateRules, check_state, metric_of, named_metrics
from lightning_fed.callbacks.evaluation.report import EvaluationReport
from lightning_fed.callbacks.evaluation.results import ClientResults
from lightning_fed.callbacks.evaluation.tables import client_table, row_name
from lightning_fed.callbacks.federation import Federation, find_federation
from lightning_fed.console import list_first, round_number
from lightning_fed.data.federated import EvaluationData
from lightning_fed.errors import BadUpdate, ClientFault, OptionError
from lightning_fed.federated_callback import AskableCallback, RevertingCallback, federated_callbacks
from lightning_fed.lightning.internals import OverriddenMethod, callbacks_of, datamodule_of, is_fitting, show_status
from lightning_fed.messages import MOST_SAMPLES, Client, ClientUpdate
from lightning_fed.rounds.client_models import Answers
from lightning_fed.steps.weights import MaxSamples

_log = logging.getLogger(__name__)

NO_CLIENTS = (
    "has no data to evaluate, because the validation data are not a mapping by client. Pass validation data as a "
    "mapping from client to data, split the data with `PartitionedData`, or remove the callback."
)

_MAX_CLIENTS_BY_NAME = 20
_SAMPLE = 40  # separate random stream
_MOST_NAMES = 256
_LIGHTNINGS = {"step", "epoch"}  # names that Lightning uses for the x-axis
_PRIVATE = {"sum": "the secure sum would not protect their scores", "model": "no noise would protect their scores"}
_HOOKS = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end")


class ClientEvaluation(RevertingCallback, AskableCallback):
    """Evaluates the model on the validation and test data of each client.

    Each client runs the module's ``validation_step`` (in ``trainer.test`` the ``test_step``) with all hooks, and sends
    sums and metric states. Values over all clients equal the values from one process on the pooled data, up to
    rounding. ``FederatedTrainer`` adds this callback by default; for a plain Trainer add the callback to ``callbacks``.

    Values that depend on earlier epochs, such as a best score so far, are not reported.

    ============================== ==================================================================================
    ``<name>``                     over all clients, with the global model. Logged by Lightning's own validation, or by
                                   this callback if the server has no data
    ``fed/<name>/pooled``          over all clients, each with the client's own model if any
    ``fed/<name>/mean``            mean over clients; also ``fed/<name>/std`` and ``fed/<name>/min``
    ``fed/<name>/worst10``         mean over the worst tenth of the clients
    ``fed/<name>/mean_se``         standard error of ``mean``, for values logged with batch size 1 on every client, and
                                   for a ``torchmetrics`` accuracy
    ``client/<id>/<name>``         for each client; not logged if more than 20 clients report the value
    ``evaluation/clients``         number of evaluated clients; also ``evaluation/failed``
    ``evaluation/num_samples``     number of evaluated examples
    ``evaluation/up_bytes``        bytes from the clients; also ``evaluation/down_bytes``, bytes to the clients
    ============================== ==================================================================================

    Args:
        every_n_rounds: Interval between evaluations of the clients, counted in validations; 0 for no evaluation.
        clients: ``"all"`` clients, the clients in the ``"round"``, or a number or share of randomly drawn clients.
        min_clients: Minimum number of clients for a score; with fewer clients a warning is logged.
        min_examples: Minimum number of examples; a client with fewer examples does not answer.
        lists: Name patterns. Metrics with a matching name may send list states to the server, such as predictions.
        withheld: Name patterns. Metrics with a matching name send no state to the server.
        folder: Folder for the latest table, ``clients.csv``; if ``None``, no file is written.

    Attributes:
        results: Results of the last evaluation by client; ``None`` before the first evaluation.
        pooled: Values over all clients from the last evaluation.

    Raises:
        ValueError: If an argument is outside the allowed range.
        MisconfigurationException: In ``fit``, if neither validation nor test data are mappings by client.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> evaluation = ClientEvaluation(every_n_rounds=5, min_clients=3)
        >>> trainer = FederatedTrainer(max_rounds=50, callbacks=[evaluation], logger=False)
    """

    supports_vectorize = True
    is_default = False  # true if `FederatedTrainer` added this callback

    def __init__(
        self,
        every_n_rounds: int = 1,
        clients: Literal["all", "round"] | int | float = "all",
        min_clients: int = 1,
        min_examples: int = 1,
        lists: Sequence[str] = (),
        withheld: Sequence[str] = (),
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.every_n_rounds = check_count("every_n_rounds", every_n_rounds, lowest=0)
        self.clients = _check_clients(clients)
        self.min_clients = check_count("min_clients", min_clients)
        self.min_examples = check_count("min_examples", min_examples)
        self.rules = StateRules(tuple(lists), tuple(withheld))
        self.folder = folder
        self.results: ClientResults | None = None
        self.pooled: dict[str, float] = {}
        self._overridden: list[OverriddenMethod] = []
        self._logged_lines: set[str] = set()
        self._kept_loaders: Mapping[Client, Iterable[Any]] = {}
        self._names: set[str] = set()
        self._announced: dict[tuple[Stage, Client], int] = {}  # examples in a client's first evaluation
        self._trained: dict[Client, int] = {}  # examples in a client's last training
        self._pooled_names: set[str] = set()  # names of values over all clients, from all rounds with a score

    # Lightning's hooks

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._announced, self._trained = {}, {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        callbacks = callbacks_of(trainer)
        callbacks.remove(self)
        callbacks.insert(callbacks.index(find_federation(trainer)) + 1, self)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        federation = find_federation(trainer)
        if not (self.every_n_rounds and federation.has_server and trainer.is_global_zero):
            return
        if federation.is_remote or has_clients(trainer, "validation"):
            self._is_private(federation)
        elif not (self.is_default or has_clients(trainer, "test")):
            raise MisconfigurationException(f"`ClientEvaluation` {NO_CLIENTS}")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stand_in(trainer, pl_module, "validation")

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stand_in(trainer, pl_module, "test")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._overridden and not trainer.sanity_checking and self._is_due(trainer):
            self._evaluate_own(trainer, pl_module, "validation")

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._overridden and self.every_n_rounds:
            self._evaluate_own(trainer, pl_module, "test")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._show_table(trainer)

    # A client

    def on_client_question(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, question: Mapping[str, Any]
    ) -> ClientUpdate:
        stage, limit = question.get("stage"), question.get("limit")
        if stage not in ("validation", "test") or not isinstance(limit, int | float) or limit < 0:
            raise ClientFault(
                "the server's request is not a valid evaluation request: expected the stage 'validation' or 'test', "
                "and a limit on batches of at least 0"
            )
        loaders = self._of_clients(trainer, stage)
        if client not in loaders:
            raise ClientFault(f"the client has no {stage} data")
        show_status(trainer, f"evaluating {client}")
        try:
            report = evaluate_data(trainer, module, loaders[client], stage, self.rules, limit)
        except ClientFault:
            raise
        except Exception as error:
            error.add_note(f"Raised in the {stage} of client {client!r}.{_advice(error)}")
            raise
        if report.num_samples < self.min_examples:
            raise ClientFault(
                f"the client has fewer {stage} examples than the client's min_examples={self.min_examples}"
            )
        return report.as_update(client)

    # The server

    def evaluate(
        self, trainer: L.Trainer, module: L.LightningModule, stage: Stage = "validation", own: bool = False
    ) -> dict[Client, EvaluationReport]:
        """Evaluates the global model on the clients, or with ``own`` each client's model. Returns the valid reports."""
        federation = find_federation(trainer)
        question = {"stage": stage, "limit": limit_of(trainer, stage)}
        self._kept_loaders = {} if federation.is_remote else self._of_clients(trainer, stage)
        try:
            answers = federation.ask(module, self, self._choose_clients(trainer, federation, stage), question, own)
        finally:
            self._kept_loaders = {}
        steps = (step.most for step in federation.server.chain.steps if isinstance(step, MaxSamples))
        most = min(steps, default=MOST_SAMPLES)
        self._trained |= {client: min(count, most) for client, count in federation.server.report.received.items()}
        reports = self._read_reports(module, answers, stage)
        examples = sum(report.num_samples for report in reports.values())
        counts = {
            "clients": len(reports), "failed": len(answers.failed), "num_samples": examples,
            "up_bytes": answers.up_bytes, "down_bytes": answers.down_bytes,
        }  # fmt: skip
        if answers.failed or federation.is_remote:
            _log.info(
                "%d clients evaluated the model: %s.", len(reports), ", ".join(map(repr, list(reports)[:50])) or "none"
            )
        federation.round_log.put(
            trainer, trainer.current_epoch, {f"evaluation/{name}": float(value) for name, value in counts.items()}
        )
        return reports

    def table(self) -> str:
        """Formats the last evaluation in Markdown, with a row per client and a row for all clients."""
        return client_table(self.results, self.pooled).markdown() if self.results is not None else ""

    def _of_clients(self, trainer: L.Trainer, stage: Stage) -> Mapping[Client, Iterable[Any]]:
        return self._kept_loaders or loaders_of(trainer, stage)

    def _evaluate_own(self, trainer: L.Trainer, module: L.LightningModule, stage: Stage) -> None:
        federation = find_federation(trainer)
        if federation.has_lost_entries or not (federation.is_remote or has_clients(trainer, stage)):
            return
        # With `val_check_interval` a validation runs inside the visit of the only client.
        if federation.current_visit is not None or self._is_private(federation):
            return
        with federation.averages_in_place():
            reports = self.evaluate(trainer, module, stage, own=True)
        if self._has_score(trainer, reports):
            self._log_clients(trainer, reports, self._pooled(trainer, module, stage, reports))

    def _evaluate_remotely(self, trainer: L.Trainer, module: L.LightningModule, stage: Stage) -> None:
        federation = find_federation(trainer)
        if federation.has_lost_entries or not self._is_due(trainer) or self._is_private(federation):
            return
        reports = self.evaluate(trainer, module, stage)
        if not self._has_score(trainer, reports):  # values from an earlier model must not remain
            for name in self._pooled_names:
                module.log(name, math.nan, on_step=False, on_epoch=True, batch_size=1)
            return
        values = self._pooled(trainer, module, stage, reports, is_muted=False)
        # Values from an earlier model must not remain.
        values |= dict.fromkeys(self._pooled_names - values.keys(), math.nan)
        self._pooled_names |= {name for name in values if "/dataloader_idx_" not in name}
        shown = {name for report in reports.values() for name in report.shown}
        for name, value in values.items():
            if "/dataloader_idx_" in name:  # Lightning adds this suffix
                federation.round_log.put(trainer, trainer.current_epoch, {name: value})
            else:
                module.log(name, value, prog_bar=name in shown, on_step=False, on_epoch=True, batch_size=1)
        if has_own_models(trainer, federation):
            reports = self.evaluate(trainer, module, stage, own=True)
            values = self._pooled(trainer, module, stage, reports)
        self._log_clients(trainer, reports, values)

    def _pooled(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        stage: Stage,
        reports: Mapping[Client, EvaluationReport],
        is_muted: bool = True,
    ) -> dict[str, float]:
        all_reports = list(reports.values())
        faults: dict[str, str] = {}
        values = pooled_values(trainer, module, all_reports, stage, is_muted=is_muted, faults=faults)
        for name, fault in faults.items():
            self._log_once(f"{name} raises an exception with the merged states of {len(all_reports)} clients: {fault}.")
        for name in sorted({name for report in all_reports for name in report.logged}):
            holders = {client: report.logged[name] for client, report in reports.items() if name in report.logged}
            values_in_mean = limited_values([reports[client] for client in holders], name)
            pairs = zip(holders.items(), values_in_mean, strict=True)
            limited_clients = [client for (client, logged), limited in pairs if limited.weight < logged.weight]
            if limited_clients:
                self._log_once(
                    f"The weight of {list_first(limited_clients)} in {name!r} over all clients is "
                    "reduced to 100 times the median client's weight per example."
                )
            infinite_clients = [client for client, logged in holders.items() if not logged.is_finite]
            if 0 < len(infinite_clients) < len(holders):
                self._log_once(
                    f"{name!r} over all clients excludes {list_first(infinite_clients)}, because the "
                    "clients' values are not finite."
                )
        reasons = {(name, reason) for report in all_reports for name, reason in report.stays.items()}
        for name, reason in sorted(reasons):
            clients = [client for client, report in reports.items() if report.stays.get(name) == reason]
            owners = (
                "the clients" if len(clients) == len(reports) else f"{len(clients)} clients ({list_first(clients)})"
            )
            self._log_once(f"The state of metric {name!r} does not leave {owners}: {reason}.")
        missing = sorted({name for report in all_reports for name in report.values} - values.keys())
        if missing:
            finite = {name for report in all_reports for name, value in report.values.items() if math.isfinite(value)}
            monitored = next((name for name in missing if name in finite), "<name>")
            self._log_once(
                f"No value over all clients for {', '.join(missing)}, because the clients' sums and metric states do "
                "not determine the value. Log a `torchmetrics` object, or monitor the mean over clients, "
                f"'fed/{monitored}/mean'."
            )
        return values

    def _log_clients(
        self, trainer: L.Trainer, reports: Mapping[Client, EvaluationReport], pooled: Mapping[str, float]
    ) -> None:
        results = self.results = ClientResults.of(reports)
        values: dict[str, float] = {}
        for name, by_client in results.values.items():
            if len(by_client) <= _MAX_CLIENTS_BY_NAME:
                for client, value in by_client.items():
                    loggable = row_name(client).encode(errors="backslashreplace").decode()
                    values[f"client/{loggable}/{name}"] = value
        summary = {f"fed/{name}": value for name, value in results.summary().items()}
        summary |= {f"fed/{name}/pooled": value for name, value in pooled.items()}
        find_federation(trainer).round_log.put(trainer, trainer.current_epoch, summary | values, {"clients": values})
        self.pooled = dict(pooled)
        if self.folder is not None and trainer.is_global_zero:
            client_table(results, pooled).write(Path(self.folder) / "clients")
        if not is_fitting(trainer):
            self._show_table(trainer)

    def _show_table(self, trainer: L.Trainer) -> None:
        results = self.results
        if results is not None and trainer.is_global_zero and len(results.num_samples) <= _MAX_CLIENTS_BY_NAME:
            _log.info("Evaluated by client:\n\n%s\n", client_table(results, self.pooled, with_support=False).markdown())

    def _read_reports(
        self, module: L.LightningModule, answers: Answers, stage: Stage
    ) -> dict[Client, EvaluationReport]:
        reports, metrics = dict[Client, EvaluationReport](), named_metrics(module)
        for client, update in answers.updates.items():
            try:
                report = EvaluationReport.of(update)
                for key, state in report.states.items():
                    if metric_of(key) not in metrics:
                        raise BadUpdate(
                            f"the client's metric {metric_of(key)!r:.100} does not exist in the server's module"
                        )
                    check_state(metrics[metric_of(key)], state)
                check_numbers(report, self._announced.get((stage, client)))
            except BadUpdate as error:
                self._exclude(answers, client, str(error))
            else:
                known = {
                    name: reason if reason in REASONS else "the client gave no known reason"
                    for name, reason in report.stays.items()
                }
                report.stays = {name: reason for name, reason in known.items() if name in metrics}
                reports[client] = report
        computed = compute_states(module, reports)
        outliers = find_outliers(reports, self._trained, computed)
        for client, reason in (outliers | find_disagreements(reports, computed)).items():
            self._exclude(answers, client, reason)
            del reports[client]
        for client, report in reports.items():
            self._announced.setdefault((stage, client), report.num_samples)
        self._bound_names(reports)
        return reports

    @staticmethod
    def _exclude(answers: Answers, client: Client, reason: str) -> None:
        answers.failed[client] = reason
        _log.warning("The evaluation of client %r is excluded: %s.", client, reason)

    def _bound_names(self, reports: Mapping[Client, EvaluationReport]) -> None:
        counts = Counter(name for report in reports.values() for name in report.values)
        accepted = sorted(counts, key=lambda name: (name not in self._names, -counts[name]))  # stable sort
        accepted = [name for name in accepted if name not in _LIGHTNINGS][:_MOST_NAMES]
        self._names.update(accepted)
        skipped = counts.keys() - set(accepted)
        if skipped:
            self._log_once(
                f"{len(skipped)} names, for example {min(skipped)!r}, are not evaluated: the limit is {_MOST_NAMES}."
            )
        for report in reports.values():
            report.keep_names(set(accepted))

    def _has_score(self, trainer: L.Trainer, reports: Mapping[Client, EvaluationReport]) -> bool:
        if len(reports) >= self.min_clients:
            return True
        _log.warning(
            "Round %d has no score: %d clients were evaluated, fewer than min_clients=%d.",
            round_number(trainer.current_epoch),
            len(reports),
            self.min_clients,
        )
        return False

    def _choose_clients(self, trainer: L.Trainer, federation: Federation, stage: Stage) -> list[Client]:
        clients: list[Client] = list(
            federation.population.clients if federation.is_remote else self._of_clients(trainer, stage)
        )
        if self.clients == "round" and is_fitting(trainer) and hasattr(federation, "cohort"):
            chosen = {visit.client for visit in federation.cohort.visits}
            return [client for client in clients if client in chosen]
        if isinstance(self.clients, str):
            return clients
        size = math.ceil(self.clients * len(clients)) if isinstance(self.clients, float) else int(self.clients)
        seeds = [federation.schedule.seed, trainer.current_epoch, _SAMPLE]
        generator = np.random.default_rng(seeds)
        positions = generator.choice(len(clients), min(size, len(clients)), replace=False)
        return [clients[int(position)] for position in np.sort(positions)]

    def _is_due(self, trainer: L.Trainer) -> bool:
        every = self.every_n_rounds * (trainer.check_val_every_n_epoch or 1)
        return bool(every) and (not is_fitting(trainer) or (trainer.current_epoch + 1) % every == 0)

    def _is_private(self, federation: Federation) -> bool:
        reveals = federation.server.chain.reveals
        if reveals != "update":
            self._log_once(f"The clients are not evaluated: {_PRIVATE[reveals]}.")
        return reveals != "update"

    def _log_once(self, line: str) -> None:
        if line not in self._logged_lines:
            self._logged_lines.add(line)
            _log.info("%s", line)

    # Replacement for a module on a server without data

    def _stand_in(self, trainer: L.Trainer, module: L.LightningModule, stage: Stage) -> None:
        loaders = trainer.val_dataloaders if stage == "validation" else trainer.test_dataloaders
        if not isinstance(loaders, ClientsBatch):
            return
        if self.every_n_rounds > 1:
            raise MisconfigurationException(
                f"Expected `every_n_rounds=1` on a server without data, but got {self.every_n_rounds}: every "
                "validation evaluates the clients. Set the interval by `check_val_every_n_epoch` of the server's "
                "Trainer; callbacks that monitor a score then use the same interval."
            )

        def step(*args: Any, **kwargs: Any) -> None:
            self.revert()  # the module's hooks compute the values over all clients
            try:
                self._evaluate_remotely(trainer, module, stage)
            finally:
                override()

        def override() -> None:
            replacements = {f"{stage}_step": step, f"on_{stage}_end": self.revert}
            replacements |= {f"on_{stage}_{hook}": _nothing for hook in _HOOKS}
            self._overridden = [OverriddenMethod(module, name, new) for name, new in replacements.items()]

        override()

    def revert(self) -> None:
        overridden, self._overridden = self._overridden, []
        for method in overridden:
            method.restore()


class ClientsBatch:
    """Dataloader for a server without data. At the only batch, ``None``, the server asks clients to evaluate."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[None]:
        yield None


def loaders_of(trainer: L.Trainer, stage: Stage) -> Mapping[Client, Iterable[Any]]:
    """Returns the validation or test dataloaders by client, for clients with data in this process."""
    datamodule = datamodule_of(trainer)
    if not isinstance(datamodule, EvaluationData):
        return {}
    return datamodule.val_clients() if stage == "validation" else datamodule.test_clients()


def has_clients(trainer: L.Trainer, stage: Stage) -> bool:
    """True if this process has validation or test data of clients."""
    datamodule = datamodule_of(trainer)
    return isinstance(datamodule, EvaluationData) and datamodule.has_clients(stage)


def check_clients_data(trainer: L.Trainer, name: str) -> None:
    """Raises an error if no client has validation data in the server's process. ``name`` is the callback's name."""
    federation = find_federation(trainer)
    if federation.has_server and not federation.is_remote and not has_clients(trainer, "validation"):
        raise MisconfigurationException(f"`{name}` {NO_CLIENTS}")


def has_own_models(trainer: L.Trainer, federation: Federation) -> bool:
    """True if each client is evaluated with a separate model, for example with personal entries."""
    has_personal_entries = "personal" in federation.policies.values()
    if federation.has_own_statistics or has_personal_entries or federation.server.rule.has_clusters:
        return True
    return any(getattr(callback, "has_own_models", False) for callback in federated_callbacks(trainer))


def _advice(error: Exception) -> str:
    if "more than 1 value per channel" not in str(error):
        return ""
    return (
        " A batch is too small for a BatchNorm layer that normalises with batch statistics, as with "
        "LocalStatistics(unseen='batch'): set another batch size, or `drop_last=True`, in that client's loader."
    )


def _check_clients(clients: object) -> Any:
    is_share = isinstance(clients, float) and 0 < clients <= 1
    if clients in ("all", "round") or is_share or (type(clients) is int and clients > 0):
        return clients
    raise OptionError(
        f"Expected `clients` to be 'all', 'round', a number of at least 1, or a share in (0, 1], but got {clients!r}."
    )


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
