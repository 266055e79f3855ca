"""Evaluates a module on one client's data, and computes values over all clients from the clients' results."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_fed.batch_norm.unseen_data import measure_unseen
from lightning_fed.callbacks.evaluation.metric_states import (
    MetricStates,
    RunningValue,
    StateRules,
    as_nan,
    compute_measured,
    compute_number,
    computing,
    counting_metrics,
    metric_of,
    named_metrics,
    share_of_cases,
    state_key,
    support_of,
    tracing,
    updating,
)
from lightning_fed.callbacks.evaluation.report import EvaluationReport, known_names
from lightning_fed.callbacks.evaluation.results import monitored_name
from lightning_fed.callbacks.logged_values import LogCall, LoggedValue, LoggedValues, intercepted
from lightning_fed.data.federated import split_loaders
from lightning_fed.errors import ClientFault, describe
from lightning_fed.features.isolated_pass import find_metrics, isolated_pass, prepare_batch, run_prepared
from lightning_fed.lightning.internals import (
    batch_size_of,
    callbacks_of,
    exchange_stage,
    is_overridden,
    lightning_attributes,
)
from lightning_fed.messages import Client
from lightning_fed.process_group import ProcessGroup

_log = logging.getLogger(__name__)

Stage = Literal["validation", "test"]

_DEFAULT_RULES = StateRules()
_CLOSE = 1e-4  # relative tolerance for values computed twice
_HUGE = 1e30  # a number without an equal in data
_MOST_TIMES = 100  # maximum weight per example, as a multiple of the reports' median


def evaluate_data(
    trainer: L.Trainer,
    module: L.LightningModule,
    data: Any,
    stage: Stage = "validation",
    rules: StateRules = _DEFAULT_RULES,
    limit: int | float | None = None,
    pool: ProcessGroup | None = None,
    keeps: bool = False,
) -> EvaluationReport:
    """Runs the module's evaluation step and hooks over one client's data, without callbacks and loggers.

    Afterwards metrics, training modes and logs are restored. With ``keeps``, parameters and buffers are restored as
    well. ``limit`` is the number or fraction of batches per dataloader, by default the Trainer's limit. ``pool`` is the
    group of processes, if several processes share the data.
    """
    limit = limit_of(trainer, stage) if limit is None else limit
    # Processes with shared data synchronise metrics, because a process may have no batches.
    change = compute_measured if pool is None else lambda metric, compute: compute()
    report, logged, loaders = EvaluationReport(), LoggedValues(), split_loaders(data)

    running: list[Metric] = []  # values computed in the current step
    computed: dict[int, None] = {}  # identities of all computed metrics, in order
    accumulated: list[Metric] = []  # metrics updated by the hook at the end of the epoch

    def take(call: LogCall) -> None:
        logged.take(call)
        name = f"{call.name}{logged.suffix}" if call.add_dataloader_idx else call.name
        if call.prog_bar:
            report.shown.add(name)
        if isinstance(call.value, RunningValue) or (running and isinstance(call.value, int | float)):
            report.partial.add(name)

    def record_computed(metric: Metric, compute: Callable[[], Any]) -> Any:
        computed[id(metric)] = None
        return compute()

    def call_hook(hook: str, *args: Any) -> None:
        getattr(module, f"on_{stage}_{hook}")(*args)

    def record_states(place: int | None) -> None:
        """Copies metric states into ``report``. ``place`` is the finished dataloader, or ``None`` for all data."""
        names = {id(metric): name for name, metric in metrics.items()}
        by_log = {name: names[id(metric)] for name, metric in logged.metrics.items() if id(metric) in names}
        report.metrics |= {name: state_key(metric, place) for name, metric in by_log.items()}
        sent = dict[str, Metric]()
        for name in metrics if place is None else by_log.values():
            obstacle = rules.find_obstacle(name, metrics[name])
            if obstacle is None:
                sent[name] = metrics[name]
            else:
                report.stays[name] = obstacle
        report.states |= MetricStates.of(sent, place)

    with ExitStack() as stack:
        stack.enter_context(isolated_pass(module, intercepted(take), is_reloaded=not keeps, is_alone=pool is None))
        if not trainer.loggers:  # for example on a node, if the module depends on the server's loggers
            trainer.loggers = [DummyLogger()]
            stack.callback(setattr, trainer, "loggers", [])
        stack.enter_context(_in_stage(trainer, stage))
        call_hook("model_eval")
        call_hook("start")
        call_hook("epoch_start")
        for place, loader in enumerate(loaders):
            index = [place] if len(loaders) > 1 else []
            logged.suffix = f"/dataloader_idx_{place}" if index else ""
            measure_unseen(trainer, module, limited_batches(loader, limit), f"{stage}_step")
            metrics = named_metrics(module)
            with computing(metrics.values(), record_computed), tracing(metrics.values(), running):
                for number, batch in enumerate(_read_batches(limited_batches(loader, limit))):
                    with trainer.precision_plugin.forward_context():
                        prepared = logged.batch = prepare_batch(trainer, module, batch, place)
                    call_hook("batch_start", prepared, number, *index)
                    output = run_prepared(trainer, module, f"{stage}_step", prepared, number, *index)
                    call_hook("batch_end", output, prepared, number, *index)
                    running.clear()
                    report.num_samples += _count(prepared)
            if pool is not None:
                logged.pool(pool.gather({name: value.on_cpu() for name, value in logged.sums.items()}))
            metrics = named_metrics(module)
            record_states(place if index else None)
            report.logged |= {name: value.on_cpu() for name, value in logged.sums.items()}
            with computing(metrics.values(), change):
                report.values |= logged.results()
        if pool is None and not report.num_samples:
            return report  # without batches, Lightning does not call hooks either
        metrics = named_metrics(module)
        if len(loaders) != 1:
            record_states(None)
        logged.batch, logged.suffix = None, ""
        supports = {id(metric): support_of(metric) for metric in counting_metrics(metrics.values())}
        counting = [id(metrics[metric_of(key)]) for key in report.metrics.values()]
        with (
            computing(metrics.values(), record_computed),
            computing(metrics.values(), change),
            updating(metrics.values(), accumulated),
        ):
            call_hook("epoch_end")
            counting += [id(metric) for metric in logged.metrics.values()]
            report.values |= logged.results()
        # A metric without a logged value may have processed only part of the data.
        known = [supports[key] for key in [*counting, *computed] if supports.get(key) is not None]
        report.support = next(iter(known), None)
        lasting = [metric for metric in accumulated if metric.update_called and id(metric) not in counting]
        call_hook("end")
        if is_overridden(f"on_{stage}_model_train", module):
            call_hook("model_train")
        report.higher_is_better = _monitored(trainer) | _collected(module) | logged.directions
    if pool is None:
        values = report.values
        from_states = pooled_values(trainer, module, [report], stage, keeps=keeps)
        report.partial |= {name for name in values if not is_close(values[name], from_states.get(name, math.nan))}
        for name in _values_with_history(trainer, module, report, stage, keeps, lasting):
            report.values[name] = math.nan
            report.partial.add(name)
        report.variances = _variances(module, report)
    return report


def _variances(module: L.LightningModule, report: EvaluationReport) -> dict[str, float]:
    """Estimates the sampling variance of each logged mean over examples (such as an accuracy), by name."""
    count, metrics = report.num_samples, named_metrics(module)
    if count < 2:
        return {}
    found = {
        name: (logged.value, float(torch.cat(logged.cases).var()) / count)
        for name, logged in report.logged.items()
        if logged.reduce_fx == "mean" and logged.weight == sum(map(len, logged.cases)) == count
    }
    paths = {id(metric): path for path, metric in metrics.items()}
    keys = {name: paths.get(id(metric), "") for name, metric in _in_collections(module).items()} | report.metrics
    for name, key in keys.items():
        share = share_of_cases(metrics.get(metric_of(key)), report.states.get(key), count)
        if share is not None:
            found[name] = share, share * (1 - share) / (count - 1)
    return {name: variance for name, (value, variance) in found.items() if is_close(value, report.values.get(name))}


def _values_with_history(
    trainer: L.Trainer,
    module: L.LightningModule,
    report: EvaluationReport,
    stage: Stage,
    keeps: bool,
    metrics: Sequence[Metric],
) -> set[str]:
    """Returns the names of logged values that depend on earlier epochs.

    The epoch-end hook runs again with NaN as result of ``metrics``, and with extreme numbers in the attributes updated
    by the hook. If a logged value changes in one of these runs, the value depends on earlier epochs.
    """
    names = _written_numbers(module)
    if not metrics and not names:
        return set()
    run = partial(_run_end, trainer, module, [report], stage, keeps, wanted=report.values.keys())
    values = run()
    names_with_history = set[str]()
    if metrics:
        lasting = {id(metric) for metric in metrics}

        def change(metric: Metric, compute: Callable[[], Any]) -> Any:
            value = compute_measured(metric, compute)
            return as_nan(value) if id(metric) in lasting else value

        values_without_history = run(change=change)
        names_with_history |= {
            name for name, value in values.items() if not is_close(value, values_without_history.get(name))
        }
    for name in names:
        attributes = [{name: _filled(getattr(module, name), number)} for number in (_HUGE, -_HUGE)]
        before = [float(given[name]) for given in attributes]
        one, two = (run(attributes=given) for given in attributes)
        after = [float(given[name]) for given in attributes]
        if after[0] != after[1] and after != before:
            names_with_history |= {name for name in values if not is_close(one.get(name, math.nan), two.get(name))}
    return names_with_history


def _written_numbers(module: L.LightningModule) -> list[str]:
    names = dict.fromkeys(name for kind in type(module).__mro__ for name in _written_names(kind))
    attributes = {name: getattr(module, name, None) for name in names if name not in lightning_attributes()}
    return [
        name
        for name, value in attributes.items()
        if isinstance(value, float)
        or (isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point() and not value.requires_grad)
    ]


@functools.cache
def _written_names(kind: type) -> frozenset[str]:
    if kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning", "torch", "builtins"):
        return frozenset()
    codes = [
        method.__code__ for name, method in vars(kind).items() if name != "__init__" and inspect.isfunction(method)
    ]
    names = set[str]()
    for code in codes:
        codes += [part for part in code.co_consts if inspect.iscode(part)]
        names |= {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_ATTR"}
    return frozenset(names)


def _filled(value: Any, number: float) -> Any:
    return torch.full_like(value, number) if isinstance(value, Tensor) else number


def pooled_values(
    trainer: L.Trainer,
    module: L.LightningModule,
    reports: Sequence[EvaluationReport],
    stage: Stage,
    keeps: bool = True,
    is_muted: bool = True,
    faults: dict[str, str] | None = None,
) -> dict[str, float]:
    """Computes the values that the module would log for all clients' data together.

    ``keeps`` restores parameters and buffers afterwards. ``is_muted`` disables loggers. ``faults`` receives a
    description of each error in a metric or hook.
    """
    joined: dict[str, LoggedValue] = {}
    for name in {name: None for report in reports for name in report.logged}:
        logged = limited_values([report for report in reports if name in report.logged], name)
        joined[name] = LoggedValue(logged[0].reduce_fx)
        for value_of_report in [value_of_report for value_of_report in logged if value_of_report.is_finite] or logged:
            joined[name].join(value_of_report)
    names = known_names(reports)
    # A single client must not make a value missing.
    holders = Counter(name for report in reports for name in report.values)
    missing = {name for name in names if 2 * sum(name in report.partial for report in reports) > holders[name]}
    run = partial(_run_end, trainer, module, reports, stage, keeps, faults={} if faults is None else faults)
    computed = run(is_muted=is_muted, wanted=set(names) - joined.keys())
    if len(reports) > 1:
        # A value without a metric is a constant, so all clients must agree.
        depends = {
            name for name, value in run(wanted=computed.keys(), change=_compute_nothing).items() if math.isnan(value)
        }
        for name in computed.keys() - depends:
            if not all(is_close(report.values[name], computed[name]) for report in reports if name in report.values):
                missing.add(name)
    values = {name: value for name, value in computed.items() if not math.isnan(value)}
    # An infinite value would remain the best value forever.
    values |= {name: value.value if value.is_finite else math.nan for name, value in joined.items()}
    return {name: values[name] for name in names if name in values and name not in missing}


def _run_end(
    trainer: L.Trainer,
    module: L.LightningModule,
    reports: Sequence[EvaluationReport],
    stage: Stage,
    keeps: bool,
    wanted: Collection[str],
    is_muted: bool = True,
    change: Callable[[Metric, Callable[[], Any]], Any] = compute_measured,
    faults: dict[str, str] | None = None,
    attributes: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Computes logged values from the metric states of all reports.

    The module's epoch-end hook also runs if the states do not give all values in ``wanted``, or if loggers are enabled.
    ``change(metric, compute)`` replaces ``metric.compute()``. The module's attributes are first set to the values in
    ``attributes``, and read back into ``attributes`` at the end. See :func:`pooled_values` for the other arguments.
    """
    if is_muted and not wanted:
        return {}
    at_end, values, known = LoggedValues(), dict[str, float](), set[int]()
    faults = {} if faults is None else faults

    def compute(metric: Metric, call: Callable[[], Any]) -> Any:
        if id(metric) in known:
            try:
                return change(metric, call)
            except Exception as error:
                name = next(name for name, one in metrics.items() if one is metric)
                faults.setdefault(f"Metric {name!r}", describe(error))
        return torch.tensor(math.nan)

    with ExitStack() as stack:
        take = intercepted(at_end.take)
        stack.enter_context(isolated_pass(module, take, is_reloaded=not keeps, is_muted=is_muted))
        stack.enter_context(_in_stage(trainer, stage))
        for attribute, value in (attributes or {}).items():
            setattr(module, attribute, value)
        getattr(module, f"on_{stage}_start")()
        getattr(module, f"on_{stage}_epoch_start")()
        metrics = named_metrics(module)
        stack.enter_context(computing(metrics.values(), compute))
        at_end.results()
        states = MetricStates.merge(metrics, [report.states for report in reports])
        known |= {id(metric) for name, metric in metrics.items() if name in states}
        keys = {name: key for report in reports for name, key in report.metrics.items()}
        computed = states.compute(metrics, keys.values())
        values |= {name: computed[key] for name, key in keys.items() if key in computed}
        if not is_muted or set(wanted) - values.keys():  # pictures show all clients, too
            try:
                getattr(module, f"on_{stage}_epoch_end")()
            except Exception as error:
                faults.setdefault(f"`on_{stage}_epoch_end`", describe(error))
            logged, at_end.metrics = at_end.metrics, {}
            values = at_end.results() | values
            for name, metric in logged.items():
                values |= compute_number(name, metric)
        if attributes is not None:
            attributes.update({name: getattr(module, name) for name in attributes})
    return values


def compute_states(
    module: L.LightningModule, reports: Mapping[Client, EvaluationReport]
) -> dict[Client, dict[str, float]]:
    """Computes each client's metric values from the client's metric states. Inner keys are from :func:`state_key`."""
    values: dict[Client, dict[str, float]] = {}
    with ExitStack() as stack:
        stack.enter_context(isolated_pass(module))
        metrics = named_metrics(module)
        stack.enter_context(computing(metrics.values(), compute_measured))
        for client, report in reports.items():
            computed = MetricStates.merge(metrics, [report.states]).compute(metrics, report.states)
            values[client] = computed
            if report.stays:  # a metric can depend on a withheld metric
                values[client] = {key: value for key, value in computed.items() if not math.isnan(value)}
    return values


def _compute_nothing(metric: Metric, call: Callable[[], Any]) -> Any:
    return as_nan(compute_measured(metric, call))


def limited_values(reports: Sequence[EvaluationReport], name: str) -> list[LoggedValue]:
    """Returns each client's value logged as ``name``, with a limited weight in the mean over clients.

    The ratio of weight to number of examples is limited to 100 times the clients' median ratio.
    """
    logged = [(report.logged[name], max(1, report.num_samples)) for report in reports]
    heaviest = _MOST_TIMES * statistics.median_low(value.weight / count for value, count in logged)
    return [value.limited(heaviest * count) for value, count in logged]


def is_close(value: float, other: float | None) -> bool:
    """True if two numbers are equal up to rounding, or if both are NaN."""
    if other is None:
        return False
    return math.isclose(value, other, rel_tol=_CLOSE, abs_tol=1e-7) or (math.isnan(value) and math.isnan(other))


def _count(batch: Any) -> int:
    try:
        return batch_size_of(batch)
    except Exception:  # for example a batch without a tensor
        return 1


def limit_of(trainer: L.Trainer, stage: Stage) -> int | float:
    """Returns the Trainer's limit on batches in validation or test, as a number (int) or a fraction (float)."""
    return trainer.limit_val_batches if stage == "validation" else trainer.limit_test_batches


def limited_batches(loader: Iterable[Any], limit: int | float) -> Iterable[Any]:
    """Limits a dataloader to a number (int) or a fraction (float) of the batches, like Lightning."""
    if isinstance(limit, float):
        return loader if limit == 1.0 else itertools.islice(loader, int(limit * len(loader)))  # type: ignore[arg-type]
    return itertools.islice(loader, limit)


def _read_batches(batches: Iterable[Any]) -> Iterator[Any]:
    iterator = iter(batches)
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            _log.warning("Loading validation or test data raised an exception.", exc_info=error)
            raise ClientFault(f"the client's data raised {type(error).__name__}") from error
        yield batch


@contextmanager
def _in_stage(trainer: L.Trainer, stage: Stage) -> Iterator[None]:
    before = exchange_stage(trainer, stage)
    try:
        yield
    finally:
        exchange_stage(trainer, before)


def _monitored(trainer: L.Trainer) -> dict[str, bool]:
    return {
        monitored_name(callback.monitor): callback.mode == "max"
        for callback in callbacks_of(trainer)
        if isinstance(callback, ModelCheckpoint | EarlyStopping) and callback.monitor is not None
    }


def _collected(module: L.LightningModule) -> dict[str, bool]:
    directions = {name: metric.higher_is_better for name, metric in _in_collections(module).items()}
    return {name: direction for name, direction in directions.items() if direction is not None}


def _in_collections(module: L.LightningModule) -> dict[str, Metric]:
    return {
        name: metric
        for collection in find_metrics(module)
        if isinstance(collection, MetricCollection)
        for name, metric in collection.items(copy_state=False)
        if isinstance(metric, Metric)
    }
