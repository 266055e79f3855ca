"""Measures BatchNorm statistics on the clients, and pools the statistics on the server.

The average of the clients' running statistics would not fit the new global model. Clients collect running statistics
during local training, from few batches and with changing weights.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from statistics import median, mode
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import lightning as L
import torch
from torch import Tensor, nn

from lightning_fed.batch_norm.pooling import InputStatistics as InputStatistics
from lightning_fed.batch_norm.pooling import find_bad_statistics, limit_counts, recalibrate_batch_norm, shift_between
from lightning_fed.batch_norm.pooling import pool_statistics as pool_statistics
from lightning_fed.client.local_model import OWN_MODEL, STATISTICS, LocalModel, memory_of
from lightning_fed.data.population import PlannedVisit, Population, seeded_generators
from lightning_fed.data.round_plan import balance_loads
from lightning_fed.errors import OptionError, describe
from lightning_fed.features.batches import BatchKey, find_inputs
from lightning_fed.features.isolated_pass import forward_step, isolated_pass, run_step
from lightning_fed.federated_callback import notify_model_loaded
from lightning_fed.fit.federated_fit import FederatedFit, monitored_names
from lightning_fed.fit.options import FixedStatistics, LocalStatistics
from lightning_fed.lightning.internals import is_overridden, show_status
from lightning_fed.messages import Broadcast, Client, State, digest, tensor_bytes, without_prefix
from lightning_fed.model.entries import batch_norm_layers as batch_norm_layers
from lightning_fed.model.entries import copy_state, entry_policies, find_implausible, is_running_statistic
from lightning_fed.process_group import process_group_of
from lightning_fed.rule import Aggregator
from lightning_fed.server.schedule import Visit
from lightning_fed.server.server import ServerInterface

_log = logging.getLogger(__name__)

ModuleType = TypeVar("ModuleType", bound=nn.Module)

# Digests of models in a round, computed once for all clients.
_model_keys: WeakKeyDictionary[LocalModel, list[tuple[Mapping[str, Tensor], Tensor]]] = WeakKeyDictionary()

_MOST_LEFT = 0.1  # 22 batches with BatchNorm's default momentum

_SERVES = {
    "batch": "evaluation uses the statistics of each batch",
    "data": "evaluation uses the statistics of each loader",
    "pooled": "evaluation uses pooled statistics",
}

LARGE_SHIFT = 0.05
"""Shift of the first BatchNorm layer's inputs, above chance, from which ``batch_norm="auto"`` keeps own statistics.

Different image appearance changes the first layer. Different labels change later layers, where own statistics hurt.
"""


def warn_of_batch_norm(fit: FederatedFit, local: LocalModel, visits: Sequence[PlannedVisit]) -> None:
    """Warns once per fit if the option ``batch_norm`` has no effect or does not suit the module."""
    if "batch_norm" in fit.warned:
        return
    option, rounds = fit.batch_norm.treatment, fit.trainer.max_epochs
    if isinstance(option, FixedStatistics) and option.after and rounds is not None and 0 <= rounds <= option.after:
        _log.warning(
            "batch_norm=%r never freezes the running statistics of BatchNorm layers, because the fit ends after %d "
            "rounds: every round averages the statistics.",
            option,
            rounds,
        )
        fit.record_warning("batch_norm")
    is_averaged = option == "average" or isinstance(option, FixedStatistics)
    if visits and is_averaged and not fit.is_batch_norm_fixed:
        warn_of_averaging(fit.module, local, min(planned.num_batches for planned in visits))
        fit.record_warning("batch_norm")
    measures = fit.batch_norm.is_reported or fit.batch_norm.is_measured
    if measures and layers_in_training(fit.module) and forward_step(fit.module) is None:
        _log.warning(
            "batch_norm=%r cannot measure BatchNorm's running statistics, so %s: with manual optimization, "
            "`training_step` would train the model, and %s has no `validation_step` to run instead. Implement "
            "`validation_step`, or choose another `batch_norm`.",
            option,
            "they are averaged" if fit.batch_norm.is_reported else "the model keeps its initial statistics",
            type(fit.module).__name__,
        )
        fit.record_warning("batch_norm")


def warn_of_monitors(fit: FederatedFit) -> None:
    """Warns once if a callback monitors metrics of the global model, but clients have separate BatchNorm statistics."""
    names = [name for name in monitored_names(fit) if not name.startswith(("fed/", "client/", "comm/", "train"))]
    if names and fit.record_warning("monitor"):
        _log.warning(
            "The monitored %r is a value of the global model, but each client has separate BatchNorm statistics: %s. "
            "Pass validation data by client, and monitor %r, the mean over the clients' models.",
            names[0],
            _SERVES[fit.batch_norm.unseen],
            f"fed/{names[0]}/mean",
        )


def measure_round(fit: FederatedFit, local: LocalModel) -> tuple[dict[str, float], str | None]:
    """Measures and pools BatchNorm statistics of the new global model on the clients, after a round.

    Each client passes the local data once through the model, and reports means and variances. BatchNorm layers
    normalise with batch statistics, and all other layers are in evaluation mode. If no client reports, the global model
    has the averages of the clients' running statistics.

    With ``batch_norm="auto"``, the first reports decide if statistics are pooled or separate
    (:func:`decide_statistics`). In a cluster, each client measures with the cluster's model. If a callback averages
    weights over steps, the clients also measure with the averaged model. Robust aggregation excludes outlying reports.

    Returns:
        Metrics and a fault. With at least two reports, the metrics contain ``fed/batch_norm_shift``, the largest value
        of :func:`~lightning_fed.batch_norm.pooling.shift_between` over the layers. The fault describes invalid pooled
        statistics, or is ``None``. With a fault the round fails.
    """
    server, layers = fit.server, measured_layers(fit)
    if not fit.batch_norm.is_reported or not layers or forward_step(fit.module) is None:
        return {}, None
    names = list(layers)
    if fit.averages is not None and fit.averages.has_steps:  # first, because a fault must leave no decision
        with fit.averages_in_place():
            fault = _write_reports(fit, local, _collect_reports(fit, local, layers), names)
        if fault is not None:
            return {}, fault
    fault = _write_reports(fit, local, measured := _collect_reports(fit, local, layers), names)
    if fault is not None:
        return {}, fault
    shift = _record_shift(fit, measured, names)
    if fit.batch_norm.is_measured and fit.remote is None:
        state, reports = local.global_state(), dict(measured)
        for client in server.report.received:
            statistics = own_statistics(reports.get(client, {}))  # empty if the client cannot measure
            store_statistics(local, client, server.report.round, statistics, server.rule.model_of(client) or state)
    return shift, None


def _collect_reports(
    fit: FederatedFit, local: LocalModel, layers: Mapping[str, nn.BatchNorm2d]
) -> Sequence[tuple[Client, State]]:
    module, server = fit.module, fit.server
    state = local.global_state()

    def send(visit: Visit) -> Broadcast:
        broadcast = Broadcast(visit.round, server.rule.model_of(visit.client) or state)
        server.sent(visit.client, broadcast)
        return broadcast

    visits = [visit for visit in fit.cohort.visits if visit.client in server.report.received]
    if fit.remote is not None:
        return fit.remote.measure(server, visits, send)
    measured = measure_statistics(
        fit.trainer,
        module,
        server,
        fit.population,
        visits,
        layers,
        lambda visit: local.load_client(visit.client, send(visit).state),
        fit.limit_visit,
    )
    local.load_global(state)
    notify_model_loaded(fit.trainer, module, None)
    return measured


def _write_reports(
    fit: FederatedFit, local: LocalModel, measured: Sequence[tuple[Client, State]], layers: Sequence[str]
) -> str | None:
    server = fit.server
    reported = [server.report.received[client] for client, _ in measured]
    counted = [server.chain.counted(number) for number in reported]
    if counted != reported:
        limited = limit_counts([report for _, report in measured], reported, counted)
        measured = [(client, report) for (client, _), report in zip(measured, limited, strict=True)]
    groups = _group_by_model(server.rule, measured)
    of_global = groups[0][1] if groups and groups[0][0] is None else [report for _, report in measured]
    if isinstance(fit.batch_norm.treatment, LocalStatistics) and fit.batch_norm.treatment.measured == "visit":
        _write_statistics(local.entries, local.personal, of_global, layers, server.rule)
        local.server_entries = copy_state({name: local.entries[name] for name in local.server_entries})
    else:
        _write_statistics(local.entries, local.shared, of_global, layers, server.rule)
    for model, reports in groups:
        if model is not None:
            _write_statistics(model, local.shared, reports, layers, server.rule)
    return find_implausible({name: local.entries[name] for name in local.shared if is_running_statistic(name)})


def _group_by_model(
    rule: Aggregator, measured: Sequence[tuple[Client, State]]
) -> list[tuple[State | None, list[State]]]:
    # First the global model (`None`), for clients without a cluster.
    groups: dict[int, tuple[State | None, list[State]]] = {}
    for client, report in measured:
        model = rule.model_of(client)
        groups.setdefault(id(model), (model, []))[1].append(report)
    return sorted(groups.values(), key=lambda group: group[0] is not None)


def _find_shifts(rule: Aggregator, measured: Sequence[tuple[Client, State]], layers: Iterable[str]) -> dict[str, float]:
    # Only clients with the same model are comparable.
    groups = [reports for _, reports in _group_by_model(rule, measured)]
    by_layer = {
        name: [shift_between(reports, name, rule.tolerated(len(reports))) for reports in groups] for name in layers
    }
    return {name: max(known) for name, row in by_layer.items() if (known := [x for x in row if x is not None])}


def _record_shift(
    fit: FederatedFit, measured: Sequence[tuple[Client, State]], layers: Sequence[str]
) -> dict[str, float]:
    rule = fit.server.rule
    shifts = _find_shifts(rule, measured, layers)
    if fit.batch_norm.treatment == "auto" and not fit.batch_norm.decision:
        if not shifts and not rule.resizes:  # layers with different widths are not comparable
            fit.batch_norm.reports |= dict(measured)
            measured = list(fit.batch_norm.reports.items())
            shifts = _find_shifts(rule, measured, layers)
        decide_statistics(fit, measured, shifts)
    if not shifts:
        return {}
    first, shift, excess = _find_first_shift(fit, measured, shifts)
    if fit.batch_norm.treatment == "recalibrate" and excess > LARGE_SHIFT and fit.record_warning("shift"):
        _log.warning(
            "Pooled BatchNorm statistics may not fit the clients: %.0f %% of the variance in the inputs of the first "
            "BatchNorm layer, %r, comes from differences between clients. Choose separate statistics for each client "
            "(batch_norm=LocalStatistics()), or layers without statistics (`lightning_fed.modules.to_group_norm`, or "
            "norm='group' in the ready tasks).",
            100 * shift,
            first,
        )
    return {"fed/batch_norm_shift": max(shifts.values())}


def _find_first_shift(
    fit: FederatedFit, measured: Sequence[tuple[Client, State]], shifts: Mapping[str, float]
) -> tuple[str, float, float]:
    # The first layer in the order of execution, with the shift, and the excess over chance. Chance has the largest
    # share if an example has a single value per channel: (K - 1) / N for K clients with N examples together.
    orders = ([key.removeprefix("batch_norm:").rpartition(":")[0] for key in report] for _, report in measured)
    first = mode(layer for order in orders for layer in [name for name in order if name in shifts][:1])
    size = median(fit.server.report.received.values())
    return first, shifts[first], shifts[first] - (len(measured) - 1) / (len(measured) * size)


def decide_statistics(fit: FederatedFit, measured: Sequence[tuple[Client, State]], shifts: Mapping[str, float]) -> None:
    """Decides once per fit whether clients have separate BatchNorm statistics or share pooled statistics.

    ``shifts`` contains :func:`~lightning_fed.batch_norm.pooling.shift_between` for each layer. Statistics are separate
    if the first layer's shift, minus the shift expected by chance, exceeds :data:`LARGE_SHIFT`. With too few reports, a
    later round decides.
    """
    cohort = fit.cohort
    is_first, size = not fit.batch_norm.num_measured, len(cohort.visits) + len(cohort.dropped)
    # If every round has only one report, reports from rounds with different weights are compared.
    if shifts and len(measured) >= fit.server.min_clients and not (is_first and 2 * len(measured) < size):
        first, shift, excess = _find_first_shift(fit, measured, shifts)
        decision = "own" if excess > LARGE_SHIFT else "pooled"
        text = (
            "each client has separate statistics, and data without a client are normalised with batch statistics"
            if decision == "own"
            else "the clients share pooled statistics"
        )
        _log.info(
            "BatchNorm: %.0f %% of the input variance in the first layer, %r, comes from client differences: %s.",
            100 * shift,
            first,
            text,
        )
        fit.batch_norm.decision, fit.batch_norm.reports = decision, {}
    elif fit.record_warning("undecided"):
        _log.info(
            "%d clients have reported BatchNorm statistics. To choose separate or pooled statistics, the server needs "
            "reports from at least %d clients (in the first round, also from half of the round's clients). Until then "
            "all clients use the latest pooled statistics.",
            len(measured),
            max(2, fit.server.min_clients),
        )
    fit.batch_norm.num_measured += 1


def own_statistics(report: Mapping[str, Tensor]) -> State:
    """Returns running means and unbiased variances from a client's report, named as in the state dict."""
    statistics: State = {}
    for name in {key.removeprefix("batch_norm:").rpartition(":")[0]: None for key in report}:
        pooled = pool_statistics([report], name)
        if pooled is not None:
            prefix = f"{name}." if name else ""
            statistics |= {f"{prefix}running_mean": pooled[0], f"{prefix}running_var": pooled[1]}
    return statistics


def load_own_model(
    fit: FederatedFit, local: LocalModel, client: Client, state: State, measure_round: int | None
) -> State | None:
    """Loads a client's model for evaluation, with BatchNorm statistics measured by the client.

    Uses stored statistics if measured with the weights in ``state``, or if ``measure_round`` is ``None``. Otherwise the
    client measures again on the training data, in round ``measure_round``. Without these data, a warning is logged.

    Returns newly measured statistics, or ``None`` without a new measurement.
    """
    measured: State | None = None
    stored = local.recall(client)
    statistics = without_prefix(stored, STATISTICS)
    if measure_round is not None:
        key = stored.get(STATISTICS)
        has_data = fit.is_population_known and (fit.remote is None or not fit.has_server)
        if key is None or int(key) != int(_model_key(local, state)):
            if has_data and client in fit.population.clients:
                statistics = measured = _measure_client(fit, local, client, state, measure_round)
            elif key is not None:
                statistics = {}
                if fit.record_warning("stale"):
                    _log.warning(
                        "The stored BatchNorm statistics of client %r were measured with other weights, and cannot be "
                        "measured again without training data. For this client, and other clients without data, "
                        "%s.",
                        client,
                        _SERVES[fit.batch_norm.unseen],
                    )
    shapes = {name: value.shape for name, value in {**local.entries, **state}.items()}
    own_model = {
        name: value.to(local.entries[name].dtype)
        for name, value in statistics.items()
        if value.shape == shapes.get(name)
    }
    own_model |= without_prefix(memory_of(stored), OWN_MODEL)
    local.load_client(client, state, stored, own_model)
    has_statistics = any(map(is_running_statistic, [*own_model, *stored.keys() & set(local.personal)]))
    fit.batch_norm.served_client = client if has_statistics else None
    return measured


def adapt(module: ModuleType, batches: Iterable[Any], inputs: BatchKey = None) -> ModuleType:
    """Copies a module, and adapts the copy's BatchNorm statistics to new data without labels (AdaBN).

    The data pass once through ``forward``, or through ``validation_step`` of a LightningModule without ``forward``.
    The copy works without this package.

    Args:
        module: Any module with BatchNorm layers.
        batches: The data, such as a ``DataLoader``. Labels are ignored.
        inputs: Index, key or function for the inputs in a batch; by default the first element.

    Returns:
        The copy, in evaluation mode.

    Raises:
        ValueError: If the module has no BatchNorm layers, there is no batch, or a batch contains a single example.

    References:
        Li et al., "Adaptive Batch Normalization for practical domain adaptation", Pattern Recognition 80, 2018.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm1d(1))
        >>> adapted = adapt(net, [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0]])])
        >>> adapted[0].running_mean, net[0].running_mean
        (tensor([4.]), tensor([0.]))
    """
    if not batch_norm_layers(module):
        raise OptionError(
            f"Expected a module with BatchNorm layers that have running statistics, but {type(module).__name__} has "
            "none, so nothing can be adapted: use the original module."
        )
    adapted = copy.deepcopy(module).eval()
    run: Callable[[Any], object] | None = None
    with ExitStack() as stack:
        if isinstance(adapted, L.LightningModule) and not is_overridden("forward", adapted):
            if not is_overridden("validation_step", adapted):
                raise OptionError(
                    f"Expected a module with `forward` or `validation_step`, but {type(module).__name__} has neither:"
                    " implement one."
                )
            numbers = itertools.count()
            run = partial(_run_validation, adapted, numbers)
            stack.enter_context(isolated_pass(adapted, is_reloaded=True))
        recalibrate_batch_norm(adapted, map(partial(_check_size, inputs), batches), inputs, run)
    return adapted


def _run_validation(module: L.LightningModule, numbers: Iterator[int], batch: Any) -> object:
    has_index = len(inspect.signature(module.validation_step).parameters) > 1
    return module.validation_step(batch, next(numbers)) if has_index else module.validation_step(batch)


def _check_size(inputs: BatchKey, batch: Any) -> Any:
    size = 0  # unknown
    with suppress(ValueError, TypeError):
        size = len(find_inputs(batch, inputs))
    if size == 1:
        raise OptionError(
            "Expected batches of at least two examples, but got a single example: set a larger `batch_size`, and "
            "`drop_last=True` if the last batch has one example."
        )
    return batch


def store_statistics(
    local: LocalModel, client: Client, round: int, statistics: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """Stores the BatchNorm statistics that a client measured in ``round`` with the model ``state``."""
    client_state = {name: value for name, value in local.recall(client).items() if not name.startswith(STATISTICS)}
    client_state[STATISTICS] = _model_key(local, state)
    client_state |= {f"{STATISTICS}{name}": value.to(local.entries[name].dtype) for name, value in statistics.items()}
    local.store.put(client, round, client_state)


def _model_key(local: LocalModel, state: Mapping[str, Tensor]) -> Tensor:
    # A digest of the weights, without sliced entries, which can be large. Equal states give equal numbers.
    keys = _model_keys.setdefault(local, [])
    key = next((key for known, key in keys if known is state), None)
    if key is None:
        names = (name for name in state if name not in local.sliced and not is_running_statistic(name))
        key = torch.tensor(int(digest({name: state[name] for name in names})[:15], 16))  # 60 bits
        keys.append((state, key))
    return key


def _measure_client(fit: FederatedFit, local: LocalModel, client: Client, state: State, measure_round: int) -> State:
    module, step = fit.module, forward_step(fit.module)
    names = fit.batch_norm.norm_layers or ()
    layers = {name: layer for name, layer in batch_norm_layers(module).items() if name in names}
    if step is None or not layers:
        return {}
    local.load_client(client, state)
    notify_model_loaded(fit.trainer, module, client)
    visit = fit.schedule.visit_of(measure_round, client)
    try:
        with torch.inference_mode(False), seeded_generators(), fit.limit_visit():
            report = client_statistics(fit.trainer, module, fit.population, visit, layers, step)
        fault = find_bad_statistics(report, _means_of(layers))
    except Exception as error:
        fault = describe(error)
    if fault is not None:
        warn_of_report(client, fault)
        return {}
    return own_statistics(report)


def warn_of_report(client: Client, fault: object) -> None:
    """Warns that a client's BatchNorm statistics are excluded, because of a ``fault``."""
    _log.warning("The BatchNorm statistics of client %r are excluded: %s.", client, fault)


def _means_of(layers: Mapping[str, nn.BatchNorm2d]) -> State:
    return {f"{name}.running_mean".lstrip("."): layer.get_buffer("running_mean") for name, layer in layers.items()}


def layers_in_training(module: nn.Module) -> dict[str, nn.BatchNorm2d]:
    """Returns the BatchNorm layers in training mode by name."""
    return {name: layer for name, layer in batch_norm_layers(module).items() if layer.training}


def measured_layers(fit: FederatedFit) -> dict[str, nn.BatchNorm2d]:
    """Returns the BatchNorm layers to measure, by name. Frozen and personal statistics are not measured."""
    excluded, policies = {"frozen", "personal"}, fit.policies
    if isinstance(fit.batch_norm.treatment, LocalStatistics):  # the option itself makes statistics frozen or personal
        excluded = {"frozen"} if fit.batch_norm.treatment.measured == "visit" else excluded
        policies = entry_policies(fit.module, fit.options.personal, fit.options.frozen)
    layers = layers_in_training(fit.module)
    names = [name for name in layers if policies.get(f"{name}.running_mean".lstrip(".")) not in excluded]
    return {name: layers[name] for name in names}


def client_statistics(
    trainer: L.Trainer,
    module: L.LightningModule,
    population: Population,
    visit: Visit,
    layers: Mapping[str, nn.BatchNorm2d],
    step: str,
) -> State:
    """Measures the inputs of BatchNorm ``layers`` in one pass over a client's training data.

    The pass changes the module's buffers, and the caller must restore them. Returns mean, variance and count by layer.
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
    limit_visit: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[tuple[Client, State]]:
    """Measures mean and variance of the inputs of BatchNorm ``layers`` in one pass over each client's data.

    ``load`` loads the model of each client in ``visits`` into the module. ``limit_visit`` creates a context for the
    measurement, such as a time limit. Returns the valid reports by client, and warns of invalid reports. Afterwards the
    module contains the last client's model.
    """
    step, ranks = forward_step(module), process_group_of(trainer)
    if step is None:
        return []
    sent = _means_of(layers)
    before = server.report.down_bytes, server.report.up_bytes
    reports: dict[Client, State] = {}
    visits = list(visits)
    shares = balance_loads([server.report.received[visit.client] for visit in visits], ranks.size)
    for number, visit in enumerate((visits[position] for position in shares[ranks.rank]), start=1):
        show_status(trainer, f"recalibrating BatchNorm {number}/{len(shares[ranks.rank])}")
        try:
            load(visit)
            notify_model_loaded(trainer, module, visit.client)
            with limit_visit():
                report = client_statistics(trainer, module, population, visit, layers, step)
            server.report.up_bytes += tensor_bytes(report)
            fault = find_bad_statistics(report, sent)
        except Exception as error:
            fault = describe(error)
        if fault is None:
            reports[visit.client] = report
        else:
            warn_of_report(visit.client, fault)
    parts = ranks.gather((reports, server.report.down_bytes - before[0], server.report.up_bytes - before[1]))
    server.report.down_bytes = before[0] + sum(down for _, down, _ in parts)
    server.report.up_bytes = before[1] + sum(up for _, _, up in parts)
    joint = {client: report for part, _, _ in parts for client, report in part.items()}
    return [(visit.client, joint[visit.client]) for visit in visits if visit.client in joint]


@torch.no_grad()
def _write_statistics(
    entries: State,
    shared: Sequence[str],
    reports: Sequence[State],
    layers: Iterable[str],
    rule: Aggregator,
) -> None:
    for name in layers:
        pooled = pool_statistics(reports, name, rule.tolerated(len(reports)))
        prefix = f"{name}." if name else ""
        if pooled is not None and f"{prefix}running_mean" in shared:
            entries[f"{prefix}running_mean"].copy_(pooled[0])
            entries[f"{prefix}running_var"].copy_(pooled[1])


def warn_of_averaging(module: nn.Module, local: LocalModel, batches: int) -> None:
    """Warns if averaged BatchNorm statistics change too slowly for only ``batches`` batches per client."""
    remaining = max(
        (
            (1 - layer.momentum) ** batches  # weight of the old statistics after the visit
            for name, layer in batch_norm_layers(module).items()
            if layer.training and layer.momentum is not None and f"{name}.running_mean".lstrip(".") in local.shared
        ),
        default=0.0,
    )
    if remaining > _MOST_LEFT:
        _log.warning(
            "Averaged BatchNorm statistics change too slowly: after a visit of %d batches, the values from before the "
            "visit still have a weight of %.0f %%. The global model may therefore score badly while the training loss "
            "decreases. Measure the statistics with the averaged model (batch_norm='recalibrate'), or use layers "
            "without statistics (`lightning_fed.modules.to_group_norm`).",
            batches,
            100 * remaining,
        )
