"""Federations of the literature that differ from federated averaging only in what stays with the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_fed.callbacks.federation import Federation
from lightning_fed.state import Selector


def FedPer(head: Selector | Sequence[Selector], **options: Any) -> Federation:
    """Federated averaging of a base, with a personal head per client.

    All layers train together; only the base is sent and averaged, weighted by the clients' examples.

    Args:
        head: The personal entries: a name pattern (``"head.*"``), a module type, or several.
        options: Further arguments of :class:`~lightning_fed.callbacks.Federation`.

    Raises:
        ValueError: If ``personal`` is among the options; in ``fit``, if a selector matches nothing.

    Example:
        >>> FedPer("head.*", clients_per_round=10).personal
        ('head.*',)

    References:
        Arivazhagan et al., "Federated Learning with Personalization Layers", 2019. https://arxiv.org/abs/1912.00818

    """
    _check_free("FedPer", "personal", "which is its `head`", options)
    return Federation(personal=[head] if isinstance(head, str | type) else head, **options)


def FedBN(**options: Any) -> Federation:
    """Federated averaging of everything but the BatchNorm layers, which stay with their clients.

    Layers are told by their type, so that normalisation layers of any name are found.

    Args:
        options: Further arguments of :class:`~lightning_fed.callbacks.Federation`.

    Raises:
        ValueError: If ``batch_norm`` is among the options.

    Example:
        >>> FedBN().batch_norm
        'personal'

    References:
        Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.
        https://arxiv.org/abs/2102.07623

    """
    _check_free("FedBN", "batch_norm", "which is 'personal' there", options)
    return Federation(batch_norm="personal", **options)


def _check_free(preset: str, name: str, reason: str, options: Mapping[str, Any]) -> None:
    if name in options:
        raise ValueError(
            f"Expected `{preset}` without `{name}`, {reason}, but got {name}={options[name]!r}:"
            f" use `Federation({name}={options[name]!r})` instead of the preset."
        )
