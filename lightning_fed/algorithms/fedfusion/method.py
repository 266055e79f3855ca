"""FedFusion as a method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightning_fed.algorithms.fedfusion.callback import FeatureFusion
from lightning_fed.algorithms.fedfusion.operators import ConvInit, OperatorName
from lightning_fed.method import Method, register
from lightning_fed.rule import Aggregator


@register
class FedFusion(Method):
    """Averages models that fuse local features with features of the global model.

    Adds :class:`~lightning_fed.callbacks.FeatureFusion`, which has further options. Reference: Yao et al., ICIP 2019.

    - Sends: the model and the fusion operator, both ways.
    - Keeps: the previous global model's extractor on the server.
    - Costs: one additional forward pass through the feature extractor per batch.
    - For: heterogeneous clients, and new clients in a trained federation.

    Args:
        operator: ``"conv"`` for a 1x1 convolution, ``"multi"`` for a mixing weight per channel, ``"single"`` for one
            weight, or ``"none"`` for federated averaging.
        at: Name of the layer with the features as output, or ``"auto"``.
        levels: Positions or keys of the tensors to fuse, if the layer returns several tensors; ``"all"`` for all.
        ema: Share of the previous round in the moving average of the mixing weights in "multi" and "single".
        eval_reference: Model for the global features in evaluation: the previous or the current global model.
        cache_global_features: Whether to cache the global features of a client's examples in local training.
        conv_init: Initialisation for "conv".
        conv_bias: Whether to add a bias to "conv".
        aggregator: Federated method for averaging, by name or as an object.

    Example:
        >>> FedFusion("multi").callbacks[0].operator
        'multi'
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
