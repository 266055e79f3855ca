r"""Matches one layer's client neurons to a variable number of global neurons.

- Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks" (PFNM), ICML 2019: the model below,
  without training between layers. The "published" score is from the authors' program.
- Wang et al., "Federated Learning with Matched Averaging" (FedMA), ICLR 2020: PFNM with training between layers.
- Yurochkin et al., "Statistical Model Aggregation via Parameter Matching" (SPAHM), NeurIPS 2019: the "marginal" score.

In the model, global neuron *i*, :math:`\theta_i`, is drawn around a prior mean :math:`\mu`. Neuron *l* of client *j*,
:math:`w_{jl}`, is drawn around a global neuron. A Beta-Bernoulli process determines each client's global neurons:

.. math:: \theta_i \sim \mathcal{N}(\mu, \sigma_0^2) \qquad
    w_{jl} \mid \theta_i \sim \mathcal{N}(\theta_i, \sigma_j^2)

Two neurons of one client are never matched with the same global neuron. Clients are matched one after another with
existing or new global neurons, to maximise a sum of scores. :func:`match_neurons` defines the two possible scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fed.argument_checks import check_count, check_option, check_positive
from lightning_fed.numerics.precision import at_least_float32, cast_back, to_float64

MatchScore: TypeAlias = Literal["published", "marginal"]

_POPULARITY_LIMIT, _SOFT_WIDTH = 10, 700  # constants in the published score
_MATCHINGS = 4  # matchings with estimated variances: one with initial values, then three with estimates
_LEAST_SHARE = 1e-6  # lower bound for estimated variances, relative to the mean square of a block
_STEPS, _TOLERANCE = 200, 1e-4  # iterations and relative tolerance for expectation maximization
_CHUNK = 2**22  # elements per matrix product


class NeuronMatch(NamedTuple):
    """Assignment of the neurons of J clients to L global neurons.

    Client j has L_j neurons with D weights each.

    Attributes:
        assignments: For each client, each neuron's index among the global neurons: int64, shape ``(L_j,)``.
        means: Mean of the client neurons matched to each global neuron, shape ``(L, D)``.
        estimate: Most probable global neurons, shape ``(L, D)``: the means, shrunk towards the prior mean.
        owners: Number of clients matched to each global neuron: int64, shape ``(L,)``.
        variance: Variance of each client's neurons around the global neurons, shape ``(J, D)``.
        prior_variance: Variance of global neurons around the prior mean, shape ``(D,)``.
        passes: Number of passes over all clients after the first matching.
    """

    assignments: list[Tensor]
    means: Tensor
    estimate: Tensor
    owners: Tensor
    variance: Tensor
    prior_variance: Tensor
    passes: int


@torch.no_grad()
def match_neurons(
    clients: Sequence[Tensor],
    generator: np.random.Generator,
    score: MatchScore = "marginal",
    *,
    gamma: float | None = None,
    variance: float | Tensor | None = None,
    prior_variance: float | Tensor | None = None,
    prior_mean: float | Tensor = 0.0,
    blocks: Sequence[int] | None = None,
    passes: int = 5,
    max_width: int | None = None,
) -> NeuronMatch:
    r"""Matches the clients' neurons in one layer with global neurons.

    A client's neuron is matched with an existing global neuron, or becomes a new one. The algorithm has these steps:

    - The neurons of the client with the most neurons become the first global neurons. The other clients follow by size.
    - Each client gets the assignment with the largest sum of scores (below).
    - In further passes, all clients are matched again in random order, until nothing changes.
    - Unknown variances are estimated from the result, and the clients are matched again, at most three times.

    In the model, a neuron of client *j* is a global neuron plus noise with variance :math:`\sigma_j^2`. Global neurons
    have mean :math:`\mu` and variance :math:`\sigma_0^2`. The inverse variances are :math:`p_j` and :math:`p_0`.
    Suppose that :math:`n_i` of the other :math:`J - 1` clients have a neuron matched with global neuron *i*. Client *h*
    of these has neuron :math:`w_h`. Let :math:`A_i = p_0 \mu + \sum_h p_h w_h`, and :math:`P_i = p_0 + \sum_h p_h`. For
    a neuron *w* of client *j*, let :math:`u = p_j w`. The score for a match of *w* with global neuron *i* is

    .. math::
        \sum_d \Big( \frac{(A_{id} + u_d)^2}{P_{id} + p_{jd}} - \frac{A_{id}^2}{P_{id}}
        + \Big[ \log \frac{P_{id}}{P_{id} + p_{jd}} \Big] \Big) + c \log \frac{n_i}{J - n_i}

    Here *d* is the index of a weight. If *w* becomes the client's *k*-th new global neuron, the score is

    .. math::
        \sum_d \Big( \frac{(p_{0d} \mu_d + u_d)^2}{p_{0d} + p_{jd}} - p_{0d} \mu_d^2
        + \Big[ \log \frac{p_{0d}}{p_{0d} + p_{jd}} \Big] \Big) + 2 \log \frac{\gamma}{J} - 2 \log k

    - ``"published"``: the score in the programs for PFNM and FedMA, without the terms in square brackets, and *c* is 1.
      The value :math:`n_i` is at most 10. If *L* global neurons exist, a client with :math:`L_j` neurons adds at most
      :math:`\max(700 - L, L_j - L, 1)`. This score hardly distinguishes neurons with small weights.
    - ``"marginal"``: the score derived from the model, with the terms in square brackets, and *c* is 2. This score
      finds the neurons that clients share. Other neurons become new global neurons.

    Variances are estimated by expectation maximization. Each block of weights has one :math:`\sigma_j^2` per client,
    and one :math:`\sigma_0^2`. All start with half the variance of the block's values.

    Args:
        clients: Neurons of each client, shape ``(L_j, D)``, floating point.
        generator: Draws the client order.
        score: ``"published"`` or ``"marginal"``.
        gamma: :math:`\gamma`, greater than 0. Larger values create more global neurons. The default is 7 (published) or
            1 (marginal).
        variance: :math:`\sigma_j^2`, greater than 0, broadcast to ``(J, D)``. Weights with infinite variance are
            ignored. The default is 1 (published), or estimated (marginal).
        prior_variance: :math:`\sigma_0^2`, greater than 0, broadcast to ``(D,)``. The default is 1 (published), or
            estimated (marginal).
        prior_mean: :math:`\mu`, broadcast to ``(D,)``. The authors use 0.1 for biases.
        blocks: Sizes of consecutive blocks of weights with a common variance, with sum ``D``; by default one block.
        passes: Maximum number of further passes over the clients.
        max_width: Maximum number of global neurons, at least the largest client's number.

    Raises:
        ValueError: If shapes are wrong, values are not finite, or an option is out of range.

    Example:
        >>> ann = torch.tensor([[4.0, 0.0], [0.0, 4.0], [-5.0, -5.0]])
        >>> bob = torch.tensor([[0.0, 3.8], [3.8, 0.0]])
        >>> match_neurons([ann, bob], np.random.default_rng(0)).assignments
        [tensor([0, 1, 2]), tensor([1, 0])]
    """
    check_option("score", score, MatchScore)
    neurons = _checked(clients)
    size = neurons[0].shape[1]
    gamma = (7.0 if score == "published" else 1.0) if gamma is None else gamma
    check_positive("gamma", gamma)
    check_count("passes", passes, 0)
    if max_width is not None:
        check_count("max_width", max_width, max(len(client_neurons) for client_neurons in neurons))
    sizes = [size] if blocks is None else list(blocks)
    if sum(sizes) != size or min(sizes) < 1:
        raise ValueError(f"Expected `blocks` to have sizes of at least 1 that sum to {size}, but got {sizes}.")
    if score == "published":
        variance = 1.0 if variance is None else variance
        prior_variance = 1.0 if prior_variance is None else prior_variance
    mean = _numbers("prior_mean", prior_mean, neurons[0], (size,))
    noise, prior = _start(neurons, sizes)
    noise = noise.expand(len(neurons), -1)
    if variance is not None:
        noise = _numbers("variance", variance, neurons[0], (len(neurons), size), positive=True)
    if prior_variance is not None:
        prior = _numbers("prior_variance", prior_variance, neurons[0], (size,), positive=True)

    is_estimated = variance is None or prior_variance is None
    partition = np.zeros(0, np.int64)
    for _ in range(_MATCHINGS if is_estimated else 1):
        matcher = _Matcher(neurons, mean, noise, prior, score, gamma, max_width)
        num_passes = matcher.run(generator, passes)
        old_partition, partition = partition, matcher.partition()
        if not is_estimated or np.array_equal(old_partition, partition):
            break
        noise, prior = _estimate(matcher, mean, sizes, variance is not None, prior_variance is not None)
    return matcher.result(num_passes)


class _Matcher:
    def __init__(
        self,
        neurons: list[Tensor],
        mean: Tensor,
        noise: Tensor,
        prior: Tensor,
        score: MatchScore,
        gamma: float,
        max_width: int | None,
    ) -> None:
        self.neurons, self.noise, self.prior, self.max_width = neurons, noise, prior, max_width
        self.is_published = score == "published"
        precision, prior_precision = noise.reciprocal(), prior.reciprocal()
        is_one_number = bool((precision == precision[:, :1]).all()) and bool(
            (prior_precision == prior_precision[0]).all()
        )
        self.num_columns = 1 if is_one_number else len(mean)
        self.precision, self.prior_precision = precision[:, : self.num_columns], prior_precision[: self.num_columns]
        self.anchor = prior_precision * mean
        self.scaled = [
            values * client_precision for values, client_precision in zip(neurons, precision, strict=True)
        ]  # u
        self.energies = [self._reduced(values.square()) for values in self.scaled]
        self.new_scores = [self._new_scores(client, gamma) for client in range(len(neurons))]
        self.assignments = [np.zeros(0, np.int64) for _ in neurons]
        self.sums, self.owners = self.anchor.new_zeros(0, len(mean)), np.zeros(0, np.int64)  # A, n
        self.precisions = self.sums[:, : self.num_columns]  # P

    def run(self, generator: np.random.Generator, passes: int) -> int:
        for client in sorted(range(len(self.neurons)), key=lambda client: -len(self.neurons[client])):
            self._match(client)
        partition = self.partition()
        for num_passes in range(1, passes + 1):
            for client in generator.permutation(len(self.neurons)).tolist():
                self._remove(client)
                self._match(client)
            old_partition, partition = partition, self.partition()
            if np.array_equal(old_partition, partition):
                return num_passes
        return passes

    def partition(self) -> NDArray[np.int64]:
        _, first, inverse = np.unique(np.concatenate(self.assignments), return_index=True, return_inverse=True)
        return first[inverse]

    def means(self) -> Tensor:
        total = self._total(to_float64(neurons) for neurons in self.neurons)
        return total / torch.from_numpy(self.owners).to(total.device)[:, None]

    def result(self, passes: int) -> NeuronMatch:
        like = self.neurons[0]
        weights = [to_float64(noise).reciprocal() for noise in self.noise]
        pairs = list(zip(self.neurons, weights, strict=True))
        sums = self._total(to_float64(neurons) * weight for neurons, weight in pairs) + to_float64(self.anchor)
        precisions = self._total(weight.expand(neurons.shape) for neurons, weight in pairs)
        precisions = precisions + to_float64(self.prior).reciprocal()
        return NeuronMatch(
            assignments=[torch.from_numpy(indices).to(like.device) for indices in self.assignments],
            means=cast_back(self.means(), like),
            estimate=cast_back(sums / precisions, like),
            owners=torch.from_numpy(self.owners).to(like.device),
            variance=self.noise,
            prior_variance=self.prior,
            passes=passes,
        )

    def _total(self, parts: Iterable[Tensor]) -> Tensor:
        # parts have shape (L_j, D), the result (L, D)
        total = to_float64(self.anchor).new_zeros(len(self.owners), len(self.anchor))
        for part, indices in zip(parts, self.assignments, strict=True):
            total.index_add_(0, torch.from_numpy(indices).to(total.device), part)
        return total

    def _new_scores(self, client: int, gamma: float) -> NDArray[np.float64]:
        posterior_variance = 1 / (self.prior_precision + self.precision[client])
        scores = self._reduced((self.scaled[client] + self.anchor).square()) @ posterior_variance
        scores = scores - (self._reduced(self.anchor.square()[None]) @ (1 / self.prior_precision))
        if not self.is_published:
            scores = scores + self._summed((self.prior_precision * posterior_variance).log())
        result: NDArray[np.float64] = scores.double().cpu().numpy() + 2 * np.log(gamma / len(self.neurons))
        return result

    def _match(self, client: int) -> None:
        from scipy.optimize import linear_sum_assignment  # slow to import, and needed only for matching

        scaled, precision, width = self.scaled[client], self.precision[client], len(self.owners)
        num_new = len(scaled)
        if self.is_published:
            num_new = min(num_new, max(_SOFT_WIDTH - width, len(scaled) - width, 1))
        if self.max_width is not None:
            num_new = min(num_new, self.max_width - width)
        posterior_variance = 1 / (self.precisions + precision)
        common = -(self._reduced(self.sums.square()) * posterior_variance * precision / self.precisions).sum(1)
        if not self.is_published:
            common = common + self._summed((self.precisions * posterior_variance).log())
        scores = (
            (2 * scaled) @ (self.sums * posterior_variance).T + self.energies[client] @ posterior_variance.T + common
        )

        popularity = np.minimum(self.owners, _POPULARITY_LIMIT) if self.is_published else self.owners
        factor = 1 if self.is_published else 2
        benefit = np.empty((len(scaled), width + num_new))
        benefit[:, :width] = scores.double().cpu().numpy()
        benefit[:, :width] += factor * np.log(popularity / (len(self.neurons) - popularity))
        benefit[:, width:] = self.new_scores[client][:, None] - 2 * np.log(np.arange(1, num_new + 1))
        _, indices = linear_sum_assignment(benefit, maximize=True)

        is_new = indices >= width
        count = int(is_new.sum())
        indices[is_new] = width + np.arange(count)
        self.assignments[client] = indices
        self.sums = torch.cat([self.sums, self.anchor.expand(count, -1)])
        self.precisions = torch.cat([self.precisions, self.prior_precision.expand(count, -1)])
        self.owners = np.append(self.owners, np.zeros(count, np.int64))
        self._add(client, 1)

    def _add(self, client: int, times: int) -> None:
        indices = torch.from_numpy(self.assignments[client]).to(self.sums.device)
        self.sums.index_add_(0, indices, self.scaled[client], alpha=times)
        self.precisions.index_add_(0, indices, self.precision[client].expand(len(indices), -1), alpha=times)
        self.owners[self.assignments[client]] += times

    def _remove(self, client: int) -> None:
        self._add(client, -1)
        self.assignments[client] = self.assignments[client][:0]
        is_owned = self.owners > 0
        if is_owned.all():
            return
        owned_indices = torch.from_numpy(np.flatnonzero(is_owned)).to(self.sums.device)
        self.sums, self.precisions, self.owners = (
            self.sums[owned_indices],
            self.precisions[owned_indices],
            self.owners[is_owned],
        )
        renumbered = np.cumsum(is_owned) - 1
        self.assignments = [renumbered[indices] for indices in self.assignments]

    def _reduced(self, values: Tensor) -> Tensor:
        # scalar precisions need only the sum over D
        return values.sum(1, keepdim=True) if self.num_columns == 1 else values

    def _summed(self, values: Tensor) -> Tensor:
        # scalar precisions have one column for D equal values
        return values.sum(-1) * (len(self.anchor) // self.num_columns)


def _checked(clients: Sequence[Tensor]) -> list[Tensor]:
    if not len(clients):
        raise ValueError("Expected `clients` to contain the neurons of at least one client, but got none.")
    for number, neurons in enumerate(clients):
        if (
            neurons.ndim != 2
            or 0 in neurons.shape
            or neurons.shape[1] != clients[0].shape[-1]
            or not neurons.is_floating_point()
        ):
            raise ValueError(
                f"Expected `clients` to be floating-point tensors of shape (L_j, {clients[0].shape[-1:].numel()}), "
                f"with L_j at least 1, but got {neurons.dtype} of shape {tuple(neurons.shape)} at position {number}."
            )
        if not bool(neurons.isfinite().all()):
            raise ValueError(f"Expected `clients` to be finite, but tensor {number} has NaN or infinite values.")
    first = at_least_float32(clients[0].detach())
    return [neurons.detach().to(first) for neurons in clients]


def _numbers(name: str, value: float | Tensor, like: Tensor, shape: tuple[int, ...], positive: bool = False) -> Tensor:
    numbers = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    if positive and not bool((numbers > 0).all()):
        raise ValueError(f"Expected `{name}` to be greater than 0, but got {value}.")
    try:
        return numbers.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"Expected `{name}` to broadcast to the shape {shape}, but got the shape {tuple(numbers.shape)}."
        ) from None


def _start(neurons: list[Tensor], sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Returns start values for the client variance and prior variance of a neuron's D weights, shape ``(D,)``.

    Both are half the variance of all clients' values in a block of weights. ``sizes`` are the block sizes. If a block
    has only equal values, the client variance is infinite, and the matching ignores the block.
    """
    count = sum(len(client_neurons) for client_neurons in neurons)
    mean, squares = (to_float64(torch.zeros_like(neurons[0][0])) for _ in range(2))
    for client_neurons in neurons:
        mean += to_float64(client_neurons).sum(0) / count
    mean = _per_block(mean, sizes)
    for client_neurons in neurons:
        squares += (to_float64(client_neurons) - mean).square().sum(0) / count
    half = _per_block(squares, sizes) / 2
    first = torch.cat([block[:1].expand(len(block)) for block in torch.split(neurons[0][0], sizes)])
    equal = torch.stack([(client_neurons == first).all(0) for client_neurons in neurons]).all(0)
    equal = torch.cat([block.all().expand(len(block)) for block in torch.split(equal, sizes)]).to(half.device)
    noise, prior = half.masked_fill(equal, torch.inf), half.masked_fill(equal, 1.0)
    return cast_back(noise, first), cast_back(prior, first)


def _estimate(
    matcher: _Matcher, mean: Tensor, sizes: list[int], is_noise_known: bool, is_prior_known: bool
) -> tuple[Tensor, Tensor]:
    members = torch.full((len(matcher.owners), len(matcher.neurons)), -1, device=mean.device)
    count = 0
    for client, indices in enumerate(matcher.assignments):
        members[torch.from_numpy(indices).to(mean.device), client] = count + torch.arange(len(indices)).to(mean.device)
        count += len(indices)
    owned = to_float64(members >= 0)
    noise, prior = matcher.noise, matcher.prior
    blocks = zip(*(torch.split(values, sizes, -1) for values in (noise, prior, mean)), strict=True)
    start, noises, priors = 0, list[Tensor](), list[Tensor]()
    for size, (block_noise, block_prior, block_mean) in zip(sizes, blocks, strict=True):
        if not bool(block_noise.isinf().all()):
            columns = slice(start, start + size)
            parts = [to_float64(neurons[:, columns]) - to_float64(block_mean) for neurons in matcher.neurons]
            values = torch.cat([*parts, torch.zeros_like(parts[0][:1])])  # zeros for clients without the neuron
            rows = max(1, _CHUNK // (len(parts) * size))
            products = torch.cat([values[chunk] @ values[chunk].mT for chunk in torch.split(members, rows)])
            noise_of_block = to_float64(block_noise).reciprocal().mean(1).reciprocal()
            prior_of_block = to_float64(block_prior).mean()
            variances = _maximise_likelihood(
                products, owned, size, noise_of_block, prior_of_block, is_noise_known, is_prior_known
            )
            block_noise = block_noise if is_noise_known else cast_back(variances[0], mean)[:, None].expand(-1, size)
            block_prior = block_prior if is_prior_known else cast_back(variances[1], mean).expand(size)
        noises.append(block_noise)
        priors.append(block_prior)
        start += size
    return torch.cat(noises, 1), torch.cat(priors)


def _maximise_likelihood(
    products: Tensor,
    owned: Tensor,
    size: int,
    noise: Tensor,
    prior: Tensor,
    is_noise_known: bool,
    is_prior_known: bool,
) -> tuple[Tensor, Tensor]:
    """Estimates the variances in one block of ``size`` weights by expectation maximization.

    A client's neuron has variance ``noise`` around a global neuron, and global neurons have variance ``prior``.
    ``noise``, shape ``(J,)``, and ``prior`` are start values. Known variances are returned unchanged.

    For L global neurons and J clients, ``owned``, shape ``(L, J)``, is 1 if the client has a matched neuron, else 0.
    ``products``, shape ``(L, J, J)``, contains the inner products of the neurons matched with a global neuron, for all
    pairs of clients. The prior mean was subtracted first. If a client has no matched neuron, the inner product is 0.
    """
    squares = products.diagonal(dim1=1, dim2=2)
    least = _LEAST_SHARE * squares.sum() / (owned.sum() * size)
    for _ in range(_STEPS):
        precision = owned / noise
        posterior_variance = (1 / prior + precision.sum(1)).reciprocal()
        shares = precision * posterior_variance[:, None]
        with_mean = (products @ shares[:, :, None])[:, :, 0]  # inner products with the posterior mean
        mean_squares = (with_mean * shares).sum(1)
        residuals = squares - 2 * with_mean + (mean_squares + size * posterior_variance)[:, None]
        old_variances = torch.cat([noise, prior[None]])
        if not is_noise_known:
            noise = torch.maximum((owned * residuals).sum(0) / (owned.sum(0) * size), least)
        if not is_prior_known:
            prior = torch.maximum((mean_squares / size + posterior_variance).mean(), least)
        if bool(((torch.cat([noise, prior[None]]) / old_variances - 1).abs() < _TOLERANCE).all()):
            break
    return noise, prior


def _per_block(values: Tensor, sizes: list[int]) -> Tensor:
    return torch.cat([block.mean().expand(len(block)) for block in torch.split(values, sizes)])
