"""Policies of a model's entries: which travel, which stay with the clients, and which do not train."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_fed.errors import OptionError
from lightning_fed.model.entries import BatchNorm, Policy, Selector, batch_norm_statistics, entry_policies
from lightning_fed.server.aggregator import Aggregator

_log = logging.getLogger(__name__)


def decide_policies(
    module: nn.Module,
    personal: Sequence[Selector],
    frozen: Sequence[Selector],
    batch_norm: str,
    sliced: Collection[str] = (),
) -> dict[str, Policy]:
    """The policy of every entry of the module's state; says in the log which of them stay with their clients.

    Buffers with NaN or infinite values, such as masks and thresholds that are not known yet, cannot be averaged: they
    are frozen. BatchNorm's statistics are not among them, because such ones are faulty.

    Args:
        module: The module.
        personal: Selectors of the personal entries.
        frozen: Selectors of the frozen entries.
        batch_norm: What becomes of BatchNorm: ``"personal"`` adds its layers to the personal entries, ``"local"`` its
            running statistics, and ``"frozen"`` adds these to the frozen ones.
        sliced: Names of entries of which clients hold some rows only.

    Raises:
        ValueError: If a selector matches nothing, there is no BatchNorm to be ``"personal"`` or ``"local"``, an entry
            is both personal and frozen, or a sliced entry is either or not there.

    Example:
        >>> decide_policies(nn.BatchNorm1d(2), [], [], "personal")["weight"]
        'personal'
        >>> policies = decide_policies(nn.BatchNorm1d(2), [], [], "local")
        >>> policies["weight"], policies["running_mean"]
        ('shared', 'personal')

    """
    layers = {kind for kind in BatchNorm if any(isinstance(layer, kind) for layer in module.modules())}
    if batch_norm in ("personal", "local") and not layers:
        raise OptionError(
            f"Expected a model with BatchNorm layers for batch_norm={batch_norm!r}"
            f" ({'FedBN' if batch_norm == 'personal' else 'SiloBN'}), but {type(module).__name__} has none: name what"
            " is to stay with the clients in `personal`, or choose another `batch_norm`."
        )
    statistics = batch_norm_statistics(module)
    if batch_norm == "personal":
        personal = (*personal, *layers)
    if batch_norm == "frozen" and layers:
        frozen = (*frozen, *sorted(statistics))
    policies = entry_policies(module, personal, frozen)
    if batch_norm == "local":
        policies |= {name: "personal" for name in statistics if policies.get(name) == "shared"}
    for name in sliced:
        if policies.get(name) != "shared":
            raise OptionError(
                f"Expected {name!r}, of which clients ask for some rows, to be an entry that travels, but"
                f" {'it is ' + policies[name] if name in policies else 'the model has no such entry'}."
            )
        policies[name] = "sliced"
    unset = [name for name in _unset_buffers(module) if name not in statistics and policies.get(name) == "shared"]
    policies |= {name: "frozen" for name in unset}
    if unset:
        _log.info(
            "%d buffers hold NaN or infinite values and do not travel (%s): they are the server's at the start of every"
            " visit. Buffers that visits fill can be each client's own by `personal`.",
            len(unset),
            ", ".join(unset[:3]) + (", ..." if len(unset) > 3 else ""),
        )
    at_home = [name for name, policy in policies.items() if policy == "personal"]
    if batch_norm == "local":  # what serves the global model instead is an option of its own
        at_home = [name for name in at_home if name not in statistics]
    if at_home:
        _log.warning(
            "%d entries stay with their clients (%s, ...). Validation of the global model uses the values they had"
            " at the start of the fit; validation data given as a mapping of clients are also evaluated with each"
            " client's own.",
            len(at_home),
            at_home[0],
        )
    return policies


def _unset_buffers(module: nn.Module) -> Iterator[str]:
    """Yields the names of the buffers that are not finite."""
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if buffer.is_floating_point() and not buffer.is_meta and not bool(buffer.isfinite().all()):
            yield name


def check_sliced(
    module: nn.Module,
    policies: Mapping[str, Policy],
    aggregator: Aggregator,
    measures_batch_norm: bool,
    optimizer_state: str,
) -> None:
    """Makes sure that the federation's options go with entries of which clients hold some rows only.

    Args:
        module: The module.
        policies: The policy of every entry.
        aggregator: The server's rule.
        measures_batch_norm: Whether clients measure BatchNorm's running statistics with every new global model.
        optimizer_state: The federation's option.

    Raises:
        MisconfigurationException: If they do not.

    """
    sliced = [name for name, policy in policies.items() if policy == "sliced"]
    if not sliced:
        return
    if not aggregator.takes_rows:
        raise MisconfigurationException(
            f"Clients hold some rows of {sliced} only, and {type(aggregator).__name__} needs whole entries: use"
            " 'fedavg', for instance."
        )
    if optimizer_state == "keep":
        raise MisconfigurationException(
            f"Clients hold other rows of {sliced} in every visit, to which the optimizer state that they kept does not"
            " belong: use optimizer_state='reset'."
        )
    for name, layer in module.named_modules():
        entry = f"{name}.weight".lstrip(".")
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and entry in sliced and layer.padding_idx is not None:
            raise MisconfigurationException(
                f"Clients hold some rows of {entry!r} only, and its padding_idx={layer.padding_idx} would be another"
                " word in every visit: make the embedding without `padding_idx`."
            )
    if measures_batch_norm and batch_norm_statistics(module):
        raise MisconfigurationException(
            "Measuring BatchNorm's running statistics (batch_norm='recalibrate', for one) would send all of"
            f" {sliced} to every client once more: convert the model with"
            " `lightning_fed.modules.to_group_norm` (the FedSS paper does), or choose another `batch_norm`."
        )


def freeze_parameters(module: nn.Module, policies: Mapping[str, Policy]) -> list[nn.Parameter]:
    """Stops the gradients of frozen parameters; returns those that had any, for ``requires_grad_(True)`` in the end.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> frozen = freeze_parameters(layer, {"weight": "shared", "bias": "frozen"})
        >>> frozen[0] is layer.bias, layer.bias.requires_grad, layer.weight.requires_grad
        (True, False, True)

    """
    frozen = [
        parameter
        for name, parameter in module.named_parameters()
        if policies.get(name) == "frozen" and parameter.requires_grad
    ]
    for parameter in frozen:
        parameter.requires_grad_(False)
    return frozen
