r"""BatchNorm's running statistics in a federation.

Averaged running statistics belong to no model: each client's are those of its own weights, and of few batches. What
the averaged weights really produce is found by running data through them: every client reports the mean, variance and
count of every BatchNorm layer's input, and the server pools them by the law of total variance,

.. math:: \mu = \frac{1}{N} \sum_k n_k \mu_k, \qquad
          \sigma^2 = \frac{1}{N - 1} \sum_k n_k \left(\sigma_k^2 + (\mu_k - \mu)^2\right).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn

from lightning_fed.callbacks.door import ranks_of
from lightning_fed.callbacks.side_pass import forward_step, one_pass, run_step, side_pass
from lightning_fed.data.population import Population
from lightning_fed.data.rounds import describe
from lightning_fed.data.sharing import share_out
from lightning_fed.functional.wide import widen
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.schedule import Cohort, Visit
from lightning_fed.server import Server
from lightning_fed.state import BatchNorm, find_non_finite
from lightning_fed.visit import LocalModel

_log = logging.getLogger(__name__)

_MOST_LEFT = 0.1  # 22 batches with BatchNorm's default momentum


def batch_norm_layers(module: nn.Module) -> dict[str, nn.BatchNorm2d]:
    """The BatchNorm layers (of any kind) that keep running statistics, by name."""
    return {
        name: cast("nn.BatchNorm2d", layer)  # the kinds share their attributes, and no public base class
        for name, layer in module.named_modules()
        if isinstance(layer, BatchNorm) and layer.running_mean is not None
    }


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


class InputStatistics:
    """Counts, means and variances per channel of what goes into BatchNorm layers, over all batches.

    A layer in training mode has each batch's mean and variance computed anyway: with a momentum of 1 they are its
    running statistics after the batch. They are summed up in float64.

    Args:
        layers: The layers by name, in training mode. Their running statistics are overwritten.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm1d(1))
        >>> statistics = InputStatistics(batch_norm_layers(net))
        >>> with statistics.watching():
        ...     _ = net(torch.tensor([[1.0], [3.0]])), net(torch.tensor([[5.0], [7.0]]))
        >>> statistics.as_extras()["batch_norm:0:mean"]
        tensor([4.])

    """

    def __init__(self, layers: Mapping[str, nn.BatchNorm2d]) -> None:
        self._layers = layers
        self._sums: dict[str, tuple[int, Tensor, Tensor]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While inside, every forward pass is counted."""
        momenta = {name: layer.momentum for name, layer in self._layers.items()}
        handles = [layer.register_forward_hook(self._counter(name)) for name, layer in self._layers.items()]
        for layer in self._layers.values():
            layer.momentum = 1.0
        try:
            yield
        finally:
            for name, layer in self._layers.items():
                layer.momentum = momenta[name]
            for handle in handles:
                handle.remove()

    def as_extras(self) -> State:
        """Mean and biased variance of every layer that was used, shape (channels,), and the count, shape ()."""
        extras: State = {}
        for name, (count, total, squares) in self._sums.items():
            mean = total / count
            extras[f"batch_norm:{name}:mean"] = mean.float()
            extras[f"batch_norm:{name}:var"] = (squares / count - mean.square()).clamp_min(0).float()
            extras[f"batch_norm:{name}:count"] = torch.tensor(count, dtype=torch.float64)
        return extras

    def _counter(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def count(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            added = inputs[0].numel() // inputs[0].shape[1]
            mean = _statistic(layer, "running_mean")
            variance = _statistic(layer, "running_var") * ((added - 1) / added)  # the running one is unbiased
            before, total, squares = self._sums.get(name, (0, torch.zeros_like(mean), torch.zeros_like(mean)))
            self._sums[name] = (before + added, total + added * mean, squares + added * (variance + mean.square()))

        return count


def pool_statistics(reports: Sequence[Mapping[str, Tensor]], layer: str) -> tuple[Tensor, Tensor] | None:
    """Mean and unbiased variance of a layer's input over all clients, in float64; ``None`` if no client used it.

    Example:
        >>> a = {"batch_norm:0:mean": torch.tensor([0.0]), "batch_norm:0:var": torch.tensor([1.0]),
        ...      "batch_norm:0:count": torch.tensor(2.0)}
        >>> b = {**a, "batch_norm:0:mean": torch.tensor([2.0])}
        >>> [value.item() for value in pool_statistics([a, b], "0")]
        [1.0, 2.6666666666666665]

    """
    key = f"batch_norm:{layer}"
    used = [report for report in reports if f"{key}:mean" in report]
    if not used:
        return None
    counts, means, variances = (
        torch.stack([widen(report[f"{key}:{name}"]).cpu() for report in used]) for name in ("count", "mean", "var")
    )
    counts = counts[:, None]
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    variance = (counts * (variances + (means - mean).square())).sum(0) / (total - 1).clamp_min(1)
    return mean, variance


def recalibrate(
    trainer: L.Trainer,
    module: L.LightningModule,
    server: Server,
    local: LocalModel,
    population: Population,
    cohort: Cohort,
) -> None:
    """Replaces the running statistics of the global model by those that the round's clients measure with it.

    Every client whose update was used runs its data once through the new global model, in evaluation mode except for
    BatchNorm, which normalises with each batch's own statistics as in training. The exchange is counted: the global
    model down, the statistics up. Layers in evaluation mode (a frozen backbone's) keep the statistics they have; where
    no client can measure, the averages stay. Of several models that the aggregator keeps each is measured by its own
    clients.

    Args:
        trainer: The Trainer.
        module: The module, which holds the new global model.
        server: Counts the messages.
        local: The module's entries.
        population: The clients' data.
        cohort: The round's clients.

    """
    layers = {
        name: layer for name, layer in batch_norm_layers(module).items() if layer.training
    }  # not the user's frozen
    if forward_step(module) is None or not layers:
        return
    state = local.global_state()

    def load(visit: Visit) -> None:
        own = server.aggregator.model_of(visit.client)
        start = state if own is None else own
        server.count_down(Broadcast(visit.round, start))
        local.load_client(visit.client, start)

    visits = [visit for visit in cohort.visits if visit.client in server.report.received]
    measured = measure_statistics(trainer, module, server, population, visits, layers, load)
    local.load_global(state)
    reports = [(server.aggregator.model_of(client), report) for client, report in measured]
    of_global = [report for own, report in reports if own is None] or [report for _, report in reports]
    _write_statistics(local.entries, local.shared, of_global, layers)
    for model in {id(own): own for own, _ in reports if own is not None}.values():
        _write_statistics(model, local.shared, [report for own, report in reports if own is model], layers)


def measure_statistics(
    trainer: L.Trainer,
    module: L.LightningModule,
    server: Server,
    population: Population,
    visits: Iterable[Visit],
    layers: Mapping[str, nn.BatchNorm2d],
    load: Callable[[Visit], None],
) -> list[tuple[Client, State]]:
    """What goes into BatchNorm layers when clients run their data once through a model, as each reports it.

    Args:
        trainer: The Trainer.
        module: The module; it is left with the last client's model.
        server: Counts the reports.
        population: The clients' data.
        visits: The clients, whose updates were used in the round. Several processes share them.
        layers: The layers by name. They normalise with each batch's own statistics.
        load: Makes the module the model to measure, as a client has it.

    Returns:
        Client and :meth:`InputStatistics.as_extras`, without clients that cannot measure: the log names them.

    """
    step, ranks = forward_step(module), ranks_of(trainer)
    if step is None:
        return []
    before = server.report.down_bytes, server.report.up_bytes
    reports: dict[Client, State] = {}
    visits = list(visits)
    shares = share_out([server.report.received[visit.client] for visit in visits], ranks.size)
    for visit in (visits[place] for place in shares[ranks.rank]):
        load(visit)
        statistics = InputStatistics(layers)
        try:
            with side_pass(module, is_reloaded=True), statistics.watching():
                for layer in layers.values():
                    layer.train()
                for number, batch in enumerate(one_pass(population, visit)):
                    run_step(trainer, module, step, batch, number)
        except Exception as error:
            _log.warning("Client %r's BatchNorm statistics are left out: %s.", visit.client, describe(error))
            continue
        update = ClientUpdate(visit.client, server.report.received[visit.client], {}, statistics.as_extras())
        server.count_up(update)
        fault = find_non_finite(update.extras)
        if fault is None:
            reports[visit.client] = update.extras
        else:
            _log.warning("Client %r's BatchNorm statistics are left out: %s.", visit.client, fault)
    own = reports, server.report.down_bytes - before[0], server.report.up_bytes - before[1]
    parts = ranks.gather(own)
    server.report.down_bytes = before[0] + sum(down for _, down, _ in parts)
    server.report.up_bytes = before[1] + sum(up for _, _, up in parts)
    joint = {client: report for theirs, _, _ in parts for client, report in theirs.items()}
    return [(visit.client, joint[visit.client]) for visit in visits if visit.client in joint]


@torch.no_grad()
def _write_statistics(
    entries: State, shared: Sequence[str], reports: Sequence[Mapping[str, Tensor]], layers: Iterable[str]
) -> None:
    for name in layers:
        pooled = pool_statistics(reports, name)
        prefix = f"{name}." if name else ""
        if pooled is not None and f"{prefix}running_mean" in shared:
            entries[f"{prefix}running_mean"].copy_(pooled[0])
            entries[f"{prefix}running_var"].copy_(pooled[1])


def _statistic(layer: nn.Module, name: str) -> Tensor:
    value: Tensor = getattr(layer, name)
    return widen(value)


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
