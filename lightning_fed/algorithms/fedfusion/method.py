"""FedFusion as a method: averaging of clients that fuse their features with those of the global model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightning_fed.algorithms.fedfusion.callback import FeatureFusion
from lightning_fed.algorithms.fedfusion.operators import ConvInit, OperatorName
from lightning_fed.method import Method, register
from lightning_fed.rule import Aggregator


@register
class FedFusion(Method):
    """Averaging of clients that fuse their features with those of the global model.

    It brings a :class:`~lightning_fed.callbacks.FeatureFusion`, whose arguments these are; it has a few more.

    - Sends: the model and the fusion operator, both ways.
    - Keeps: the server the extractor of the model before.
    - Costs: one forward pass of the extractor more per batch.
    - For: clients that differ, and newcomers to a trained federation.

    Args:
        operator: ``"conv"``, ``"multi"``, ``"single"``, or ``"none"``, which is federated averaging.
        at: Where the features are: name of a layer, or ``"auto"``.
        levels: Which of several features (an encoder's maps) are fused.
        ema: Share of the former weights in the new ones of "multi" and "single".
        eval_reference: Whether the global model is evaluated with the features of the one before it, or with its own.
        cache_global_features: Whether the global features of a client's examples are kept during its visit.
        conv_init: How "conv" starts.
        conv_bias: Whether "conv" has a bias.
        aggregator: The method, by name or as an object.

    Raises:
        ValueError: If an option is unknown or out of its range.

    Example:
        >>> FedFusion("multi").callbacks[0].operator
        'multi'

    References:
        Yao et al., "Towards Faster and Better Federated Learning: A Feature Fusion Approach", ICIP 2019.

    """

    def __init__(
        self,
        operator: OperatorName = "conv",
        at: str = "auto",
        levels: Sequence[int | str] | Literal["all"] = "all",
        ema: float = 0.9,
        eval_reference: Literal["previous", "current"] = "previous",
        cache_global_features: bool = False,
        conv_init: ConvInit = "default",
        conv_bias: bool = True,
        aggregator: str | Method | Aggregator = "fedavg",
    ) -> None:
        fusion = FeatureFusion(
            at=at,
            operator=operator,
            levels=levels,
            ema=ema,
            eval_reference=eval_reference,
            cache_global_features=cache_global_features,
            conv_init=conv_init,
            conv_bias=conv_bias,
        )
        super().__init__(aggregator, [fusion])
