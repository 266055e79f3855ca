"""FedAtt, attentive aggregation: clients that changed a layer more have larger weights for this layer.

Ji, Pan, Long, Li, Jiang & Huang, "Learning Private Neural Language Modeling with Attentive Aggregation", IJCNN 2019.
https://arxiv.org/abs/1812.07108
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_fed.argument_checks import check_count, check_nonnegative, check_positive
from lightning_fed.messages import ClientUpdate, State
from lightning_fed.method import register
from lightning_fed.model.entries import is_running_statistic
from lightning_fed.numerics.precision import cast_back, to_float64
from lightning_fed.numerics.seeds import derive_seed
from lightning_fed.rule import AveragingAggregator, RoundInfo


@register
class FedAtt(AveragingAggregator):
    r"""Averages each layer, with larger weights for clients that changed the layer more.

    .. math:: s_k^l = \lVert w_t^l - w_k^l \rVert, \qquad \alpha^l = \mathrm{softmax}_k(s_k^l), \qquad
        w_{t+1}^l = w_t^l - \epsilon \sum_k \alpha_k^l (w_t^l - w_k^l) + \beta z^l, \quad z^l \sim \mathcal{N}(0, I)

    A layer :math:`l` is one weight or bias, with the value :math:`w_t^l` in the global model and :math:`w_k^l` on
    client :math:`k`. :math:`s_k^l` is the Euclidean distance (in the authors' program the spectral norm for matrices),
    and :math:`\alpha_k^l` the client's weight. Numbers of examples have no effect. BatchNorm's running statistics are
    averaged as in :class:`FedAvg`. Reference: Ji et al., IJCNN 2019.

    - Sends: 1 model down, 1 up.
    - Keeps: nothing.
    - Costs: no additional computation.
    - For: federations in which clients with larger changes should have more influence.

    Args:
        step_size: Step size :math:`\epsilon`. With 1 the new global model is the weighted mean of the client models.
        noise: Standard deviation :math:`\beta` of the noise :math:`z^l`; the authors use 0.001. The noise does not
            guarantee privacy.
        seed: Seed for the noise.

    Raises:
        ValueError: If ``step_size`` is not positive, or ``noise`` or ``seed`` is negative.

    Example:
        >>> from lightning_fed.rule import RoundInfo
        >>> fedatt = FedAtt(step_size=1.0)
        >>> fedatt.start(RoundInfo(0), {"w": torch.tensor(1.0)})
        >>> fedatt.receive(ClientUpdate("a", 1, {"w": torch.tensor(0.0)}))
        >>> fedatt.receive(ClientUpdate("b", 3, {"w": torch.tensor(3.0)}))
        >>> fedatt.aggregate()
        {'w': tensor(2.1932)}
    """

    def __init__(self, step_size: float = 1.2, noise: float = 0.0, seed: int = 0) -> None:
        self.step_size = check_positive("step_size", step_size)
        self.noise = check_nonnegative("noise", noise)
        self.seed = check_count("seed", seed, 0)
        super().__init__()
        self.layers = SoftmaxMean()

    def start(self, info: RoundInfo, state: State) -> None:
        super().start(info, state)
        self.layers = SoftmaxMean()

    def weight(self, update: ClientUpdate) -> float:
        return float(update.num_samples)

    @torch.no_grad()
    def receive(self, update: ClientUpdate) -> None:
        layers = {name: value for name, value in update.state.items() if _is_layer(name, value)}
        distances = {
            name: torch.linalg.vector_norm(to_float64(value) - to_float64(self._state[name]))
            for name, value in layers.items()
        }
        self.layers.add(layers, distances)
        averaged = {name: value for name, value in update.state.items() if name not in layers}
        self.running.add(averaged, self.weight(update), update.num_samples)

    def merge(self, other: FedAtt) -> None:
        super().merge(other)
        self.layers.merge(other.layers)

    @torch.no_grad()
    def aggregate(self) -> State:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self._info.round))
        means, averaged = self.layers.mean(), self.running.mean()
        new = {}
        for name, old in self._state.items():
            if name in averaged:
                new[name] = averaged[name]
                continue
            # In this form, a step of 1 gives exactly the clients' mean.
            value = (1 - self.step_size) * to_float64(old) + self.step_size * means[name]
            if self.noise:
                value += self.noise * torch.randn(old.shape, generator=generator, dtype=torch.float64).to(value.device)
            new[name] = cast_back(value, old)
        return new


def _is_layer(name: str, value: Tensor) -> bool:
    return (value.is_floating_point() or value.is_complex()) and not is_running_statistic(name)


class SoftmaxMean:
    """Running mean over client models, weighted by a softmax over scores.

    Each tensor in a model has a separate score.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._peaks: dict[str, Tensor] = {}  # largest scores, to avoid overflow in exp(score)

    @torch.no_grad()
    def add(self, state: Mapping[str, Tensor], scores: Mapping[str, Tensor]) -> None:
        """Adds a client's state to the sums, with the weight exp(score) for each entry."""
        for name, value in state.items():
            values = to_float64(value.detach(), copy=True)
            peak = to_float64(scores[name]).to(values.device)
            self._join(name, values, torch.ones_like(peak), peak)

    @torch.no_grad()
    def merge(self, other: SoftmaxMean) -> None:
        for name, values in other._sums.items():
            device = self._sums[name].device if name in self._sums else values.device
            weight, peak = other._weights[name].to(device), other._peaks[name].to(device)
            self._join(name, values.to(device, copy=True), weight, peak)

    @torch.no_grad()
    def mean(self) -> dict[str, Tensor]:
        return {name: value / self._weights[name] for name, value in self._sums.items()}

    def _join(self, name: str, values: Tensor, weight: Tensor, peak: Tensor) -> None:
        if name not in self._sums:
            self._sums[name], self._weights[name], self._peaks[name] = values, weight, peak
            return
        top = torch.maximum(self._peaks[name], peak)
        old_scale, new_scale = (self._peaks[name] - top).exp(), (peak - top).exp()
        self._sums[name].mul_(old_scale).add_(values.mul_(new_scale))
        self._weights[name] = self._weights[name] * old_scale + weight * new_scale
        self._peaks[name] = top
