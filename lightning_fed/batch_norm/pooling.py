r"""Measured running statistics for BatchNorm layers, pooled over clients by the law of total variance.

.. math:: \mu = \frac{1}{N} \sum_k n_k \mu_k, \qquad
          \sigma^2 = \frac{1}{N - 1} \sum_k n_k \left(\sigma_k^2 + (\mu_k - \mu)^2\right).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fed.features.batches import BatchKey, find_inputs
from lightning_fed.features.isolated_pass import evaluating
from lightning_fed.messages import State
from lightning_fed.model.entries import batch_norm_layers, find_non_finite
from lightning_fed.numerics.precision import to_float64
from lightning_fed.numerics.trees import move_tensors

_MOST_POSITIONS = 2.0**53  # all smaller integers are exact in float64
_WIDE_RANGE = 1e30
_TAILS = 149.0  # kurtosis minus 1 for heavy tails, such as 2 % non-zero values; 2 for a normal distribution


class InputStatistics:
    """Measures mean and variance of the inputs of BatchNorm layers over all batches, in float64.

    The layers must be in training mode. :meth:`watching` overwrites the running statistics.
    """

    def __init__(self, layers: Mapping[str, nn.BatchNorm2d]) -> None:
        self._layers = layers
        self._sums: dict[str, tuple[int, Tensor, Tensor]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager: every forward pass adds the inputs of BatchNorm layers to this object's sums."""
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
        """Returns mean and biased variance of each layer's inputs, shape ``(channels,)``, and the number of values."""
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
            variance = _statistic(layer, "running_var") * ((added - 1) / added)  # running variances are unbiased
            previous, total, squares = self._sums.get(name, (0, torch.zeros_like(mean), torch.zeros_like(mean)))
            self._sums[name] = (previous + added, total + added * mean, squares + added * (variance + mean.square()))

        return count


def find_bad_statistics(extras: State, model: Mapping[str, Tensor]) -> str | None:
    """Describes the fault in a client's BatchNorm statistics; ``None`` if valid."""
    fault = find_non_finite(extras)
    if fault is not None:
        return fault
    for name in extras:
        prefix, _, rest = name.partition(":")
        layer, _, kind = rest.rpartition(":")
        like = model.get(f"{layer}.running_mean".lstrip("."))
        names = [f"batch_norm:{layer}:{number}" for number in ("mean", "var", "count")]
        if prefix != "batch_norm" or like is None or name not in names or not extras.keys() >= {*names}:
            return f"entry {name!r} does not fit the model"
        shape = torch.Size() if kind == "count" else like.shape
        if extras[name].shape != shape or not extras[name].is_floating_point():
            return f"entry {name!r} does not fit the model"
        if kind != "mean" and bool((extras[name] < (1 if kind == "count" else 0)).any()):
            return f"entry {name!r} is negative or empty"
        size = extras[name].double().cpu()
        # If the squares of all clients are below the limit, the pooled variance is below ten times the limit.
        range_of_values = torch.finfo(like.dtype).max
        largest = _MOST_POSITIONS if kind == "count" else range_of_values / 100
        if range_of_values < _WIDE_RANGE:  # half precision may reach only a hundredth
            continue
        if bool(((size.square() if kind == "mean" else size) > largest).any()):
            return f"entry {name!r} has values too large for pooling"
    return None


def limit_counts(
    reports: Sequence[Mapping[str, Tensor]], reported: Sequence[int], counted: Sequence[int]
) -> list[State]:
    """Limits the weights of clients in pooled statistics, because a client may report false numbers.

    A client's weight in a layer is ``count``, the number of values. The new weight of client k is ``c * counted[k]``,
    but at least 1. Here ``c = m * min(reported / counted)`` and ``m = median(count / reported)``, both over all
    clients. So m is a typical number of values per example, and ``c * counted[k]`` is at most ``m * reported[k]``.

    Args:
        reports: Client statistics from :meth:`InputStatistics.as_extras`, including ``count``, the number of values.
        reported: Number of examples reported by each client.
        counted: Number of examples by client after the limits of :class:`~lightning_fed.steps.WeightStep`.
    """
    limited: list[State] = [dict(report) for report in reports]
    for name in {name for report in reports for name in report if name.endswith(":count")}:
        positions = [index for index, report in enumerate(reports) if name in report]
        ratios = sorted(float(reports[index][name]) / reported[index] for index in positions)
        ratio = ratios[(len(ratios) - 1) // 2] * min(reported[index] / counted[index] for index in positions)
        for index in positions:
            limited[index][name] = torch.full_like(reports[index][name], max(1.0, ratio * counted[index]))
    return limited


def pool_statistics(
    reports: Sequence[Mapping[str, Tensor]], layer: str, num_malicious: int = 0
) -> tuple[Tensor, Tensor] | None:
    """Pools mean and unbiased variance of a layer's input over all clients.

    Returns ``None`` if no client used the layer. The pooled variance includes the differences between client means.
    With f malicious clients (``num_malicious``), all clients count equally, and each channel's f smallest and f largest
    values are excluded. The pooled mean is then the mean of the remaining client means.

    Example:
        >>> a = {"batch_norm:0:mean": torch.tensor([0.0]), "batch_norm:0:var": torch.tensor([1.0]),
        ...      "batch_norm:0:count": torch.tensor(2.0)}
        >>> b = {**a, "batch_norm:0:mean": torch.tensor([2.0])}
        >>> [value.item() for value in pool_statistics([a, b], "0")]
        [1.0, 2.6666666666666665]
    """
    stacked = _stack_reports(reports, layer)
    if stacked is None:
        return None
    counts, means, variances = stacked
    num_malicious = min(num_malicious, (len(means) - 1) // 2)
    if num_malicious:
        mean = _trimmed_mean(means, num_malicious)
        variance = _trimmed_mean(variances + (means - mean).square(), num_malicious)
        total = len(counts) * counts.median()
        return mean, variance * (total / (total - 1).clamp_min(1))
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    variance = (counts * (variances + (means - mean).square())).sum(0) / (total - 1).clamp_min(1)
    return mean, variance


def shift_between(reports: Sequence[Mapping[str, Tensor]], layer: str, num_malicious: int = 0) -> float | None:
    r"""Measures the difference between the clients' inputs to a layer, from 0 to 1.

    The result is the larger of two values, each averaged over the C channels with variance above 0. The first value is
    the share of the total variance caused by differences between the clients' means. The second value is the relative
    squared deviation of the clients' variances from the mean variance:

    .. math:: \frac{1}{C} \sum_c \frac{\sum_k n_k (\mu_{kc} - \mu_c)^2}
              {\sum_k n_k \left(\sigma_{kc}^2 + (\mu_{kc} - \mu_c)^2\right)}, \qquad
              \frac{1}{C} \sum_c \frac{\sum_k n_k (\sigma_{kc}^2 - \bar{\sigma_c^2})^2}{\sum_k n_k \sigma_{kc}^4}.

    Client k has :math:`n_k` values with mean :math:`\mu_{kc}` and variance :math:`\sigma_{kc}^2` in channel c. Averages
    over clients, weighted by :math:`n_k`, are :math:`\mu_c` and :math:`\bar{\sigma_c^2}`. A variance estimated from n
    values has a random error with variance :math:`(\kappa - 1) \sigma^4 / n`. This expected error is subtracted from
    the second numerator. The kurtosis :math:`\kappa` is assumed to be 150. With f malicious clients, all clients count
    equally, and each channel's f smallest and f largest means and variances are excluded.

    Returns ``None`` for a single client, or if no channel has variance.
    """
    stacked = _stack_reports(reports, layer)
    if stacked is None:
        return None
    counts, means, variances = stacked
    num_trimmed = min(num_malicious, len(means) // 4)
    if num_malicious:
        remaining = slice(num_trimmed, len(means) - num_trimmed)
        means, variances = (values.sort(0).values[remaining] for values in (means, variances))
        counts = counts.median().expand(len(means), 1)
    if len(means) < 2:
        return None
    between, spread = (
        (counts * (values - (counts * values).sum(0) / counts.sum()).square()).sum(0) for values in (means, variances)
    )
    within, squares = (counts * variances).sum(0), (counts * variances.square()).sum(0)
    # A variance estimated from n values with kurtosis k has variance (k - 1) variance^2 / n.
    noise = _TAILS * ((1 - counts / counts.sum()) * variances.square()).sum(0)
    varies = within + between > 0
    if not bool(varies.any()):
        return None
    of_means = (between / (within + between))[varies].mean()
    of_variances = ((spread - noise) / squares.where(squares > 0, 1.0))[varies].mean()
    return float(torch.maximum(of_means, of_variances))


def _trimmed_mean(values: Tensor, num_trimmed: int) -> Tensor:
    return values.sort(dim=0).values[num_trimmed : len(values) - num_trimmed].mean(0)


def _stack_reports(reports: Sequence[Mapping[str, Tensor]], layer: str) -> tuple[Tensor, Tensor, Tensor] | None:
    # Shapes: (clients, 1), then twice (clients, channels), for clients that use the layer.
    key = f"batch_norm:{layer}"
    used = [report for report in reports if f"{key}:mean" in report]
    if not used:
        return None
    counts, means, variances = (
        torch.stack([to_float64(report[f"{key}:{name}"]).cpu() for report in used]) for name in ("count", "mean", "var")
    )
    return counts[:, None], means, variances


def _statistic(layer: nn.Module, name: str) -> Tensor:
    value: Tensor = getattr(layer, name)
    return to_float64(value)


@torch.no_grad()
def recalibrate_batch_norm(
    module: nn.Module,
    batches: Iterable[Any],
    inputs: BatchKey = None,
    run: Callable[[Any], object] | None = None,
) -> None:
    """Replaces BatchNorm's running statistics by statistics measured on data.

    The data pass once through the module. BatchNorm layers normalise with batch statistics, and all other layers are in
    evaluation mode. Use the batch size from training.

    Args:
        module: Module, changed in place.
        batches: Batches, such as a ``DataLoader``. Batches are moved to the module's device.
        inputs: Index, key or function for the inputs; by default the first element or a key such as ``"image"``.
        run: Function that runs the module on a batch; by default ``forward`` with the inputs.

    Raises:
        ValueError: If there are no batches, a batch has no inputs or a single example, or the measured statistics are
            not finite. The module is then unchanged.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm1d(1))
        >>> recalibrate_batch_norm(net, [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0]])])
        >>> net[0].running_mean, net[0].running_var
        (tensor([4.]), tensor([6.6667]))
    """
    layers = batch_norm_layers(module)
    saved = [(buffer, buffer.clone()) for layer in layers.values() for buffer in layer.buffers(recurse=False)]
    device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    statistics, count = InputStatistics(layers), 0
    try:
        with evaluating(module), statistics.watching():
            for layer in layers.values():
                layer.train()
            for batch in batches:
                if run is None:
                    module(find_inputs(batch, inputs).to(device))
                else:
                    run(move_tensors(batch, device))
                count += 1
    finally:
        for buffer, value in saved:
            buffer.copy_(value)
    if not count:
        raise ValueError("Expected `batches` to have at least one batch, but got none.")
    report = statistics.as_extras()
    fault = find_non_finite(report)
    if fault is not None:
        raise ValueError(f"Expected the inputs of BatchNorm layers to be finite, but {fault}.")
    for name, layer in layers.items():
        pooled = pool_statistics([report], name)
        if pooled is not None:
            layer.get_buffer("running_mean").copy_(pooled[0])
            layer.get_buffer("running_var").copy_(pooled[1])
