"""Probabilistic federated neural matching: all layers in one exchange.

Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks" (PFNM), ICML 2019.
"""

from __future__ import annotations

from typing import Literal

from lightning_fed.algorithms.fedma.aggregator import FedMA
from lightning_fed.matching.neuron_matching import MatchScore
from lightning_fed.matching.one_shot import WidthLimit
from lightning_fed.method import register


@register
class PFNM(FedMA):
    """Probabilistic federated neural matching: all layers are matched at once, without training in between.

    From the last layer to the first, with the published score; see :class:`FedMA` for the rest of the round. The
    published algorithm is for fully connected networks and has one round. The authors' program has besides a prior mean
    of 0.1 for biases, and for the last hidden layer's outgoing weights variances by the clients' shares of the classes:
    both are left out here, where prior means are 0 and variances the same for all clients.

    - Sends: 1 model up; the matched one down, which may be wider.
    - Keeps: every client its widths.
    - Costs: an assignment problem per layer on the server.
    - For: one exchange of models that were trained apart.

    Args:
        last_layer: Weights in the average of output layers.
        initial: Whether clients start from the same model or from random numbers of their own, as the authors' do.
        score: Score of a match.
        gamma: The larger, the more neurons are added.
        passes: Most passes over the clients in the matching of a group.
        max_width: Most neurons of a group, as a multiple of those of a client; ``None`` for no limit; ``"auto"``: 1.25
            with the marginal score, and no limit with the published one, as published.
        seed: Seed of the order in which clients are matched.

    Raises:
        ValueError: If an option is unknown or out of its range.

    Example:
        >>> PFNM(gamma=1.0).stages
        1

    References:
        Yurochkin et al., ICML 2019, https://arxiv.org/abs/1905.12022.

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
