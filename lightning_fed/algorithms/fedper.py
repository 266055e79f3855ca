"""Federated averaging of all layers except the head, with a personal head per client.

Arivazhagan, Aggarwal, Singh & Choudhary, "Federated Learning with Personalization Layers", 2019. arXiv:1912.00818
"""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_fed.callbacks.training_trace import find_class_task, has_same_parameters
from lightning_fed.errors import OptionError
from lightning_fed.features.layers import find_classifier
from lightning_fed.lightning.internals import is_fitting
from lightning_fed.method import Method, register
from lightning_fed.model.entries import Selector, layer_entries
from lightning_fed.rule import Aggregator


@register
class FedPer(Method):
    """Federated averaging of all layers except the head, with a personal head per client.

    All layers train together. Only the layers before the head (the base) are sent and averaged. Reference: Arivazhagan
    et al., 2019.

    - Sends: the model without its head, both ways.
    - Keeps: a head per client.
    - Costs: no additional computation.
    - For: clients whose labels have different meanings or frequencies.

    Args:
        head: Layers of the head: a name pattern (``"head.*"``), a module type, or several. The default is the
            classifier.
        aggregator: Federated method for the base, by name or as an object.

    Raises:
        ValueError: In ``fit``, if ``head`` matches nothing, or the classifier is not found.

    Example:
        >>> from lightning_fed import Federation
        >>> Federation(FedPer("head.*"), clients_per_round=10).options.personal
        ('head.*',)
    """

    def __init__(
        self, head: Selector | Sequence[Selector] = "auto", aggregator: str | Method | Aggregator = "fedavg"
    ) -> None:
        super().__init__(aggregator, personal=head_selectors(head))


def head_selectors(head: Selector | Sequence[Selector]) -> Sequence[Selector]:
    """Converts ``head`` to selectors for state dict entries; ``"auto"`` selects the classifier's entries."""
    if head == "auto":
        return [_find_head]
    return head if isinstance(head, Sequence) and not isinstance(head, str) else [head]


def _find_head(module: nn.Module) -> list[str]:
    remedy = "name the entries of the head, such as head='head.*'"
    name = find_classifier(module)
    if isinstance(module, L.LightningModule) and _is_in_fit(module):
        task = find_class_task(module.trainer, module, remedy)
        if name is None or not has_same_parameters(module, task.layer, name):
            raise OptionError(
                f"The last layer of {type(module).__name__} that could compute logits, {name!r}, is not the layer "
                f"whose output the loss uses: name the entries of the head, such as head={f'{task.layer}.*'!r}."
            )
    if name is None:
        raise ValueError(f"Expected {type(module).__name__} to have a layer that computes logits: {remedy}.")
    rank_zero_info(f"The personal head of each client is {name!r}.")
    return layer_entries(module, module.get_submodule(name))


def _is_in_fit(module: L.LightningModule) -> bool:
    try:
        return is_fitting(module.trainer)
    except RuntimeError:  # the module has no Trainer outside a fit
        return False
