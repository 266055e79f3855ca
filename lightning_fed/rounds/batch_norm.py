"""BatchNorm's running statistics in a federation.

Averaged running statistics belong to no model: each client's are those of its own weights, and of few batches. What
the averaged weights really produce is found by running data through them: every client reports the mean, variance and
count of every BatchNorm layer's input, and the server pools them, see :mod:`lightning_fed.model.batch_norm`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import lightning as L
import torch
from torch import Tensor, nn

from lightning_fed.client.local_model import LocalModel
from lightning_fed.data.population import PlannedVisit, Population
from lightning_fed.data.visit_clock import VisitClock
from lightning_fed.data.visit_costs import balance_loads
from lightning_fed.errors import describe
from lightning_fed.federated_callback import tell_of_model
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.fit.options import FixedStatistics, LocalStatistics
from lightning_fed.fit.synchronisation import process_group_of
from lightning_fed.lightning.isolated_pass import forward_step, isolated_pass, run_step
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.model.batch_norm import InputStatistics as InputStatistics
from lightning_fed.model.batch_norm import batch_norm_layers as batch_norm_layers
from lightning_fed.model.batch_norm import find_bad_statistics, limit_counts, shift_between
from lightning_fed.model.batch_norm import pool_statistics as pool_statistics
from lightning_fed.model.entries import BatchNorm
from lightning_fed.rule import Aggregator, TolerantAggregator, model_of
from lightning_fed.server.interface import ServerInterface
from lightning_fed.server.schedule import Visit

_log = logging.getLogger(__name__)

_MOST_LEFT = 0.1  # 22 batches with BatchNorm's default momentum

LARGE_SHIFT = 0.2
"""Share of the variance of a BatchNorm layer's inputs between clients from which on the log warns."""


def freeze_batch_norm(module: nn.Module) -> None:
    """Makes BatchNorm layers normalise with their running statistics in training too, and leave them as they are."""
    for layer in batch_norm_layers(module).values():
        layer.eval()


def thaw_batch_norm(module: nn.Module) -> None:
    """Puts BatchNorm layers in their parent's mode again."""
    for parent in module.modules():
        for child in parent.children():
            if isinstance(child, BatchNorm):
                child.train(parent.training)


def warn_of_batch_norm(fit: FederatedFit, local: LocalModel, visits: Sequence[PlannedVisit]) -> None:
    """Says once in a fit what its way with BatchNorm's running statistics cannot do.

    Args:
        fit: The fit.
        local: The module's entries.
        visits: The round's visits in this process.

    """
    if fit.has_warned("batch_norm"):
        return
    option, rounds = fit.options.batch_norm, fit.trainer.max_epochs
    if isinstance(option, FixedStatistics) and option.after and rounds is not None and 0 <= rounds <= option.after:
        _log.warning(
            "batch_norm=%r never fixes the running statistics of BatchNorm layers: the fit ends after %d rounds. Until"
            " then they are averaged.",
            option,
            rounds,
        )
        fit.note_warning("batch_norm")
    if visits and (option == "average" or isinstance(option, FixedStatistics)) and not fit.is_batch_norm_fixed:
        warn_of_averaging(fit.module, local, min(planned.num_batches for planned in visits))
        fit.note_warning("batch_norm")
    if fit.options.measures_batch_norm and forward_step(fit.module) is None and layers_in_training(fit.module):
        _log.warning(
            "batch_norm=%r cannot measure BatchNorm's running statistics, so that %s:"
            " with manual optimization `training_step` would train the model, and %s has no"
            " `validation_step` to run instead. Implement one, or choose another `batch_norm`.",
            option,
            "they are averaged" if option == "recalibrate" else "the global model keeps those it came with",
            type(fit.module).__name__,
        )
        fit.note_warning("batch_norm")


def recalibrate(fit: FederatedFit, local: LocalModel) -> dict[str, float]:
    """Replaces the running statistics of the global model by those that the round's clients measure with it.

    Every client whose update was used runs its data once through the new global model, in evaluation mode except for
    BatchNorm, which normalises with each batch's own statistics as in training. The exchange is counted: the global
    model down, the statistics up. Layers in evaluation mode (a frozen backbone's) keep the statistics they have; where
    no client can measure, the averages stay. A robust rule's clients are not trusted here either
    (:class:`~lightning_fed.rule.TolerantAggregator`). Of several models that the
    aggregator keeps each is measured by its own clients.

    Args:
        fit: The fit, in a round; its module holds the new global model.
        local: The module's entries.

    Returns:
        ``fed/batch_norm_shift``, the largest of the layers' :func:`~lightning_fed.model.batch_norm.shift_between`;
        empty where fewer than two clients have measured.

    """
    module, server = fit.module, fit.server
    layers = layers_in_training(module)
    if forward_step(module) is None or not layers:
        return {}
    state = local.global_state()

    def send(visit: Visit) -> Broadcast:
        served_state = model_of(server.rule, visit.client)
        broadcast = Broadcast(visit.round, state if served_state is None else served_state)
        server.sent(visit.client, broadcast)
        return broadcast

    visits = [visit for visit in fit.cohort.visits if visit.client in server.report.received]
    if fit.measure_remotely is None:
        measured = measure_statistics(
            fit.trainer,
            module,
            server,
            fit.population,
            visits,
            layers,
            lambda visit: local.load_client(visit.client, send(visit).state),
            fit.clock,
        )
        local.load_global(state)
        tell_of_model(fit.trainer, module, None)
    else:
        measured = fit.measure_remotely(server, visits, send)
    reported = [server.report.received[client] for client, _ in measured]
    counted = [server.chain.counted(number) for number in reported]
    if counted != reported:
        limited = limit_counts([report for _, report in measured], reported, counted)
        measured = [(client, report) for (client, _), report in zip(measured, limited, strict=True)]
    reports = [(model_of(server.rule, client), report) for client, report in measured]
    of_global = [report for model, report in reports if model is None] or [report for _, report in reports]
    if isinstance(fit.options.batch_norm, LocalStatistics):
        _write_statistics(local.entries, local.personal, of_global, layers, server.rule)
        local.keep_server_entries()
    else:
        _write_statistics(local.entries, local.shared, of_global, layers, server.rule)
    for model in {id(model): model for model, _ in reports if model is not None}.values():
        of_model = [report for measured, report in reports if measured is model]
        _write_statistics(model, local.shared, of_model, layers, server.rule)
    return _note_shift(fit, of_global, layers)


def _note_shift(fit: FederatedFit, reports: Sequence[Mapping[str, Tensor]], layers: Iterable[str]) -> dict[str, float]:
    """The numbers that the log gets, and a warning, once in a fit, where pooled statistics cannot fit the clients."""
    shares = {name: share for name in layers if (share := shift_between(reports, name)) is not None}
    if not shares:
        return {}
    largest = max(shares, key=lambda name: shares[name])
    if shares[largest] > LARGE_SHIFT and fit.note_warning("shift"):
        _log.warning(
            "The clients' data differ so much that pooled BatchNorm statistics may fit none of them: of the variance of"
            " the inputs of BatchNorm layer %r %.0f %% lies between the clients, and the global model can score far"
            " below what its weights are worth. %s;"
            " `lightning_fed.modules.to_group_norm` (norm='group' of the ready tasks) does without statistics.",
            largest,
            100 * shares[largest],
            "The clients have statistics of their own already, and LocalStatistics(unseen='batch') serves others"
            if isinstance(fit.options.batch_norm, LocalStatistics)
            else "batch_norm=LocalStatistics() gives every client statistics of its own",
        )
    return {"fed/batch_norm_shift": shares[largest]}


def layers_in_training(module: nn.Module) -> dict[str, nn.BatchNorm2d]:
    """The BatchNorm layers by name, but for those that the user has put in evaluation mode."""
    return {name: layer for name, layer in batch_norm_layers(module).items() if layer.training}


def client_statistics(
    trainer: L.Trainer,
    module: L.LightningModule,
    population: Population,
    visit: Visit,
    layers: Mapping[str, nn.BatchNorm2d],
    step: str,
) -> State:
    """Statistics of the inputs of BatchNorm layers when a client's data run once through the module.

    Args:
        trainer: The Trainer.
        module: The module, whose parameters and buffers are loaded anew afterwards.
        population: The clients' data.
        visit: The client's visit.
        layers: The layers by name. They normalise with each batch's own statistics.
        step: Which step of the module to run, of :func:`~lightning_fed.lightning.isolated_pass.forward_step`.

    Returns:
        :meth:`InputStatistics.as_extras`.

    """
    statistics = InputStatistics(layers)
    with isolated_pass(module, is_reloaded=True), statistics.watching():
        for layer in layers.values():
            layer.train()
        for number, batch in enumerate(population.one_pass(visit)):
            run_step(trainer, module, step, batch, number)
    return statistics.as_extras()


def measure_statistics(
    trainer: L.Trainer,
    module: L.LightningModule,
    server: ServerInterface,
    population: Population,
    visits: Iterable[Visit],
    layers: Mapping[str, nn.BatchNorm2d],
    load: Callable[[Visit], None],
    clock: VisitClock | None = None,
) -> list[tuple[Client, State]]:
    """Statistics of the inputs of BatchNorm layers when clients run their data once through a model, as each reports.

    Args:
        trainer: The Trainer.
        module: The module; it is left with the last client's model.
        server: Counts the reports.
        population: The clients' data.
        visits: The clients, whose updates were used in the round. Several processes share them.
        layers: The layers by name. They normalise with each batch's own statistics.
        load: Makes the module the model to measure, as a client has it.
        clock: Ends a client's pass that takes longer than a visit may.

    Returns:
        Client and :meth:`InputStatistics.as_extras`, without clients that cannot measure: the log names them.

    """
    step, ranks = forward_step(module), process_group_of(trainer)
    if step is None:
        return []
    clock = VisitClock(None) if clock is None else clock
    sent = {f"{name}.running_mean".lstrip("."): layer.get_buffer("running_mean") for name, layer in layers.items()}
    before = server.report.down_bytes, server.report.up_bytes
    reports: dict[Client, State] = {}
    visits = list(visits)
    shares = balance_loads([server.report.received[visit.client] for visit in visits], ranks.size)
    for visit in (visits[position] for position in shares[ranks.rank]):
        try:
            load(visit)
            tell_of_model(trainer, module, visit.client)
            with clock.visit():
                extras = client_statistics(trainer, module, population, visit, layers, step)
        except Exception as error:
            _log.warning("Client %r's BatchNorm statistics are left out: %s.", visit.client, describe(error))
            continue
        update = ClientUpdate(visit.client, server.report.received[visit.client], {}, extras)
        server.report.up_bytes += update.nbytes
        fault = find_bad_statistics(update.extras, sent)
        if fault is None:
            reports[visit.client] = update.extras
        else:
            _log.warning("Client %r's BatchNorm statistics are left out: %s.", visit.client, fault)
    parts = ranks.gather((reports, server.report.down_bytes - before[0], server.report.up_bytes - before[1]))
    server.report.down_bytes = before[0] + sum(down for _, down, _ in parts)
    server.report.up_bytes = before[1] + sum(up for _, _, up in parts)
    joint = {client: report for part, _, _ in parts for client, report in part.items()}
    return [(visit.client, joint[visit.client]) for visit in visits if visit.client in joint]


@torch.no_grad()
def _write_statistics(
    entries: State,
    shared: Sequence[str],
    reports: Sequence[Mapping[str, Tensor]],
    layers: Iterable[str],
    rule: Aggregator,
) -> None:
    for name in layers:
        tolerated = rule.tolerated(len(reports)) if isinstance(rule, TolerantAggregator) else 0
        pooled = pool_statistics(reports, name, tolerated)
        prefix = f"{name}." if name else ""
        if pooled is not None and f"{prefix}running_mean" in shared:
            entries[f"{prefix}running_mean"].copy_(pooled[0])
            entries[f"{prefix}running_var"].copy_(pooled[1])


def warn_of_averaging(module: nn.Module, local: LocalModel, batches: int) -> None:
    """Says that averaged statistics cannot follow the weights, where a visit is too short for them.

    Args:
        module: The module, in training mode.
        local: Its entries.
        batches: Batches of the shortest visit.

    """
    left = max(
        (
            (1 - layer.momentum) ** batches  # share of the old statistics that is left after the visit
            for name, layer in batch_norm_layers(module).items()
            if layer.training and layer.momentum is not None and f"{name}.running_mean".lstrip(".") in local.shared
        ),
        default=0.0,
    )
    if left > _MOST_LEFT:
        _log.warning(
            "The running statistics of BatchNorm layers are averaged, but after a visit of %d batches %.0f %% of them"
            " are still the old ones: evaluation can fail although the training loss falls."
            " batch_norm='recalibrate' measures them with the averaged model; `lightning_fed.modules.to_group_norm`"
            " does without them.",
            batches,
            100 * left,
        )
