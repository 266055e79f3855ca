"""Policy of each entry (parameter or buffer) in a model: shared, personal or frozen."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_fed.console import list_first
from lightning_fed.errors import OptionError
from lightning_fed.fit.options import BatchNormOption, FitOptions, LocalStatistics
from lightning_fed.model.entries import (
    BatchNorm,
    Policy,
    Selector,
    batch_norm_statistics,
    entry_names,
    entry_policies,
    find_non_finite,
    is_running_statistic,
    live_entries,
    parameter_entries,
)
from lightning_fed.rule import Aggregator

_log = logging.getLogger(__name__)


def decide_policies(
    module: nn.Module,
    personal: Sequence[Selector],
    frozen: Sequence[Selector],
    batch_norm: BatchNormOption,
    sliced: Collection[str] = (),
) -> dict[str, Policy]:
    """Decides whether each state dict tensor is shared, personal, frozen or sliced.

    Personal tensors stay on the client. Frozen tensors are neither trained nor sent. For sliced tensors, a client
    receives only some rows. ``batch_norm`` determines the policies in BatchNorm layers:

    - ``"personal"``: weights and running statistics are personal.
    - ``"frozen"``: running statistics are frozen.
    - :class:`~lightning_fed.LocalStatistics`: with ``measured="visit"``, running statistics are personal. With
      ``measured="aggregation"``, running statistics are shared if ``unseen`` is ``"pooled"``, and frozen otherwise.

    Raises:
        ValueError: If a selector matches no tensor, policies of a tensor conflict, a sliced tensor is missing, or
            ``batch_norm`` requires BatchNorm layers and the model has none.

    Example:
        >>> policies = decide_policies(nn.BatchNorm1d(2), [], [], LocalStatistics())
        >>> policies["weight"], policies["running_mean"]
        ('shared', 'frozen')
    """
    layers = {kind for kind in BatchNorm if any(isinstance(layer, kind) for layer in module.modules())}
    own = batch_norm if isinstance(batch_norm, LocalStatistics) else None
    if (batch_norm == "personal" or own) and not layers:
        raise OptionError(
            f"Expected a model with BatchNorm layers for batch_norm={batch_norm!r} "
            f"({'FedBN' if batch_norm == 'personal' else 'SiloBN'}), but {type(module).__name__} has none: list the "
            "entries that stay on the clients in `personal`, or choose another `batch_norm`."
        )
    statistics = batch_norm_statistics(module)
    if batch_norm == "personal":
        personal = (*personal, *layers)
    if batch_norm == "frozen" and layers:
        frozen = (*frozen, *sorted(statistics))
    policies = entry_policies(module, personal, frozen)
    if own and own != LocalStatistics("pooled"):
        unsent: Policy = "personal" if own.measured == "visit" else "frozen"
        policies |= {name: unsent for name in statistics if policies.get(name) == "shared"}
    for name in sliced:
        if policies.get(name) != "shared":
            raise OptionError(
                f"Expected {name!r} to be shared (not `personal` or `frozen`), because clients request its rows, but "
                f"{'it is ' + policies[name] if name in policies else 'the model has no such entry'}."
            )
        policies[name] = "sliced"
    # With separate statistics, an option determines the global model's statistics.
    expected = statistics if own else ()
    at_home = [name for name, policy in policies.items() if policy == "personal" and name not in expected]
    if at_home:
        _log.warning(
            "%d entries stay on the clients (%s, ...). Validation of the global model uses their initial values. "
            "With validation data as a mapping by client, each client is also evaluated with its own values.",
            len(at_home),
            at_home[0],
        )
    return policies


def unset_buffers(module: nn.Module, policies: Mapping[str, Policy]) -> frozenset[str]:
    """Returns the names of shared buffers with NaN or infinite values, such as an unset threshold.

    Running statistics are not returned, because such values are errors there.

    Example:
        >>> module = nn.BatchNorm1d(1)
        >>> _ = module.running_mean.fill_(float("nan"))
        >>> module.register_buffer("threshold", module.bias.detach() - float("inf"))
        >>> unset_buffers(module, entry_policies(module))
        frozenset({'threshold'})
    """
    buffers = {name for tensor, name in entry_names(module).items() if not isinstance(tensor, nn.Parameter)}
    return frozenset(
        name
        for name, value in live_entries(module).items()
        if name in buffers and policies.get(name) == "shared" and not is_running_statistic(name) and not value.is_meta
        if find_non_finite({name: value}) is not None
    )


def freeze_unset(policies: Mapping[str, Policy], unset: Collection[str]) -> dict[str, Policy]:
    """Sets the policy of shared buffers in ``unset`` (NaN or infinite) to ``"frozen"`` (not sent). Logs the names."""
    names = sorted(name for name in unset if policies.get(name) == "shared")
    if names:
        _log.info(
            "%d buffers with NaN or infinite initial values are not sent (%s): changes to these buffers in a visit are "
            "discarded after the visit.",
            len(names),
            list_first(names),
        )
    return {**policies, **dict.fromkeys(names, "frozen")}


def warn_of_filled(names: Collection[str]) -> None:
    """Warns about values written into unsent buffers in training: these values are lost."""
    _log.warning(
        "Visits write into %d buffers that are not sent, because the buffers started with NaN or infinite values "
        "(%s). The written values are lost. To average the buffers, set finite values before the fit. To keep separate "
        "values on each client, name the buffers in `personal`. To discard the values without this warning, name the "
        "buffers in `frozen`.",
        len(names),
        list_first(sorted(names)),
    )


def warn_of_dropped(names: Collection[str]) -> None:
    """Warns that changes to buffers with ``persistent=False`` in training are lost."""
    _log.warning(
        "The clients' visits change %d buffers with `persistent=False` (%s). Every visit starts from the values at "
        "the start of the fit, and the changes are lost: to average the buffers, register them with "
        "`persistent=True`.",
        len(names),
        list_first(sorted(names)),
    )


def check_sliced(
    module: nn.Module,
    policies: Mapping[str, Policy],
    rule: Aggregator,
    options: FitOptions,
    reports_statistics: bool,
) -> None:
    """Raises an error if clients receive only some rows of a tensor, and the fit does not support this."""
    sliced = [name for name, policy in policies.items() if policy == "sliced"]
    if not sliced:
        return
    if not rule.accepts_rows:
        raise MisconfigurationException(
            f"Expected a rule for single rows, because clients hold only some rows of {sliced}, but "
            f"{type(rule).__name__} needs whole entries: use 'fedavg', for instance."
        )
    if options.optimizer_state == "keep":
        raise MisconfigurationException(
            f"Clients hold different rows of {sliced} in every visit, so a stored optimizer state would belong to "
            "other rows: use optimizer_state='reset'."
        )
    names = entry_names(module)
    for layer in module.modules():
        entry = names.get(layer.weight) if isinstance(layer, nn.Embedding | nn.EmbeddingBag) else None
        if entry in sliced and layer.padding_idx is not None:
            raise MisconfigurationException(
                f"Clients hold only some rows of {entry!r}. The rows are renumbered on each client, so "
                f"padding_idx={layer.padding_idx} would be a different row for each client: create the embedding "
                "without `padding_idx`."
            )
    if reports_statistics and batch_norm_statistics(module):
        raise MisconfigurationException(
            "Measuring BatchNorm's running statistics (for example with batch_norm='recalibrate') would send all "
            f"rows of {sliced} to every client: convert the model with `lightning_fed.modules.to_group_norm` (as in "
            "the FedSS paper), or choose another `batch_norm`."
        )


def freeze_parameters(module: nn.Module, policies: Mapping[str, Policy]) -> list[nn.Parameter]:
    """Disables gradients of frozen parameters. Returns the changed parameters."""
    frozen = [
        parameter
        for parameter, name in parameter_entries(module).items()
        if policies.get(name) == "frozen" and parameter.requires_grad
    ]
    for parameter in frozen:
        parameter.requires_grad_(False)
    return frozen
