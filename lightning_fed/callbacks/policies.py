"""What travels, what stays with the clients and what does not train, in a given model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import nn

from lightning_fed.state import BatchNorm, Policy, Selector, batch_norm_statistics, entry_policies

_log = logging.getLogger(__name__)


def decide_policies(
    module: nn.Module, personal: Sequence[Selector], frozen: Sequence[Selector], batch_norm: str
) -> dict[str, Policy]:
    """The policy of every entry of the module's state; says in the log which of them stay with their clients.

    Args:
        module: The module.
        personal: Selectors of the personal entries.
        frozen: Selectors of the frozen entries.
        batch_norm: What becomes of BatchNorm: ``"personal"`` adds its layers to the personal entries, ``"frozen"`` its
            running statistics to the frozen ones.

    Raises:
        ValueError: If a selector matches nothing, or an entry is both personal and frozen.

    Example:
        >>> decide_policies(nn.BatchNorm1d(2), [], [], "personal")["weight"]
        'personal'

    """
    layers = {kind for kind in BatchNorm if any(isinstance(layer, kind) for layer in module.modules())}
    if batch_norm == "personal":
        personal = (*personal, *layers)
    if batch_norm == "frozen" and layers:
        frozen = (*frozen, *sorted(batch_norm_statistics(module)))
    policies = entry_policies(module, personal, frozen)
    at_home = [name for name, policy in policies.items() if policy == "personal"]
    if at_home:
        _log.warning(
            "%d entries stay with their clients (%s, ...). Validation of the global model uses the values they had"
            " at the start of the fit; validation data given as a mapping of clients are also evaluated with each"
            " client's own.",
            len(at_home),
            at_home[0],
        )
    return policies


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
