"""Probabilistic federated neural matching (PFNM): all layers in one exchange."""

from __future__ import annotations

from typing import Literal

from lightning_fed.algorithms.fedma.aggregator import FedMA
from lightning_fed.matching.neuron_matching import MatchScore
from lightning_fed.matching.one_shot import WidthLimit
from lightning_fed.method import register


@register
class PFNM(FedMA):
    """Matches and averages the clients' neurons in all layers in a single round (PFNM).

    Layers are matched from last to first, with the published score. :class:`FedMA` explains all other options. The
    published algorithm is for fully connected networks. Unlike in the authors' program, all prior means are 0, and all
    clients have equal variances. Reference: Yurochkin et al., ICML 2019, https://arxiv.org/abs/1905.12022.

    - Sends: 1 model up; 1 matched and possibly wider model down.
    - Keeps: the layer widths of each client.
    - Costs: one assignment problem per layer on the server.
    - For: one exchange of separately trained models.

    Args:
        last_layer: Weights for the average of output layers, see :class:`FedMA`.
        initial: Whether clients start from the same model or from separate random weights, as the authors do.
        score: Matching score, see :func:`~lightning_fed.matching.match_neurons`.
        gamma: Larger values add more new neurons.
        passes: Maximum number of repeated matchings per client.
        max_width: Maximum width of a layer as a multiple of a client's width, see :class:`FedMA`.
        seed: Seed for the order in which clients are matched.

    Example:
        >>> PFNM(gamma=1.0).stages
        1
    """

    def __init__(
        self,
        last_layer: Literal["class", "size"] = "class",
        initial: Literal["shared", "independent"] = "shared",
        score: MatchScore = "published",
        gamma: float | None = None,
        passes: int = 5,
        max_width: WidthLimit = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__(
            stages=1,
            last_layer=last_layer,
            initial=initial,
            order="pfnm",
            score=score,
            gamma=gamma,
            passes=passes,
            max_width=max_width,
            seed=seed,
        )
