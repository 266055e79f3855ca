"""Aligns networks by permuting neurons.

Ainsworth, Hayase and Srinivasa, "Git Re-Basin: Merging Models modulo Permutation Symmetries", ICLR 2023 (weight
matching), and Singh and Jaggi, "Model Fusion via Optimal Transport", NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fed.argument_checks import check_count
from lightning_fed.matching.permutation import PermutationGroup, Role, is_compared, neuron_features, permute_neurons
from lightning_fed.numerics.precision import at_least_float32, to_float64

_LEAST_GAIN = 1e-6  # relative to the inner product of networks within a group; smaller gains are rounding errors


@torch.no_grad()
def align_neurons(reference: Tensor, neurons: Tensor, blocks: int = 1) -> Tensor:
    r"""Finds the order of neurons that fits reference neurons best.

    The order :math:`\pi` maximises the sum of inner products between reference neurons :math:`r_i` and neurons
    :math:`w_i`:

    .. math:: \max_\pi \sum_i \langle r_i, w_{\pi(i)} \rangle

    With several blocks, as in group normalization, a neuron stays in its block, and whole blocks may exchange places.

    Args:
        reference: L reference neurons with D weights each, shape ``(L, D)``.
        neurons: Neurons to order, shape ``(L, D)``.
        blocks: Number of consecutive blocks of equal size.

    Raises:
        ValueError: If shapes differ, values are not finite, or blocks cannot have equal size.

    Example:
        >>> reference = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> align_neurons(reference, reference[[2, 0, 1]] + 0.1)
        tensor([1, 2, 0])
    """
    if reference.ndim != 2 or reference.shape != neurons.shape:
        raise ValueError(
            "Expected `reference` and `neurons` to have the same shape (L, D), but got"
            f" {tuple(reference.shape)} and {tuple(neurons.shape)}."
        )
    check_count("blocks", blocks)
    if len(neurons) % blocks:
        raise ValueError(f"Expected `blocks` to divide the {len(neurons)} neurons, but got {blocks}.")
    products = (at_least_float32(reference) @ at_least_float32(neurons).T).double().cpu().numpy()
    if not np.isfinite(products).all():
        raise ValueError("Expected `reference` and `neurons` to be finite, but got NaN or infinite values.")
    size = len(neurons) // blocks
    tiles = products.reshape(blocks, size, blocks, size).swapaxes(1, 2)
    inner = np.zeros((blocks, blocks, size), np.int64)
    gains = np.zeros((blocks, blocks))
    for row in range(blocks):
        for column in range(blocks):
            inner[row, column] = _assigned(tiles[row, column])
            gains[row, column] = np.take_along_axis(tiles[row, column], inner[row, column][:, None], 1).sum()
    partners = _assigned(gains)
    order = partners[:, None] * size + inner[np.arange(blocks), partners]
    return torch.from_numpy(order.reshape(-1)).to(neurons.device)


@torch.no_grad()
def align_networks(
    states: Sequence[Mapping[str, Tensor]],
    groups: Sequence[PermutationGroup],
    orders: Sequence[Sequence[Tensor]],
    generator: np.random.Generator,
    sweeps: int = 30,
) -> list[list[Tensor]]:
    r"""Orders the neurons of each network, to move the networks closer to their mean.

    The orders :math:`\pi_j` of the networks :math:`\theta_j`, for j = 1 to J, minimise

    .. math:: \min_\pi \sum_j \big\| \pi_j(\theta_j) - \frac{1}{J} \sum_{j'} \pi_{j'}(\theta_{j'}) \big\|^2

    One permutation group (exchangeable neurons) of one network is ordered at a time, by :func:`align_neurons` with the
    mean of the other networks. The result is a local optimum. Running statistics are ignored.

    Args:
        states: State dict of each network, with equal names and shapes.
        groups: Permutation groups of the networks.
        orders: Initial orders: for each network and group, the neuron's index at each position, int64.
        generator: Draws the order in which networks and groups are updated.
        sweeps: Maximum number of passes over all networks and groups.

    Raises:
        ValueError: As for :func:`align_neurons` and :func:`~lightning_fed.matching.permute_neurons`.

    Example:
        >>> first = {"a.bias": torch.tensor([1.0, 2.0, 3.0]), "b.weight": torch.tensor([[9.0, 5.0, 7.0]])}
        >>> group = PermutationGroup.over(first, {("a.bias", 0): "vec", ("b.weight", 1): "in"}, 3)
        >>> second = permute_neurons(first, [group], [torch.tensor([2, 0, 1])])
        >>> a, b = align_networks([first, second], [group], [[torch.arange(3)]] * 2, np.random.default_rng(0))
        >>> torch.equal(first["a.bias"][a[0]], second["a.bias"][b[0]])
        True
    """
    check_count("sweeps", sweeps, 0)
    aligned = [list(network_orders) for network_orders in orders]
    names = {name for group in groups for name, _ in group.entries if name in states[0]}
    names = {name for name in names if is_compared(name, states[0][name])}
    current = [
        permute_neurons({name: state[name] for name in names}, groups, network_orders)
        for state, network_orders in zip(states, orders, strict=True)
    ]
    for _ in range(sweeps if len(states) > 1 else 0):
        is_settled = True
        for network in generator.permutation(len(states)).tolist():
            remaining = [state for index, state in enumerate(current) if index != network]
            mean = {name: torch.stack([at_least_float32(state[name]) for state in remaining]).mean(0) for name in names}
            for number in generator.permutation(len(groups)).tolist():
                order = _better_order(mean, current[network], groups[number])
                if order is not None:
                    current[network] = permute_neurons(current[network], [groups[number]], [order])
                    aligned[network][number] = aligned[network][number][order.to(aligned[network][number].device)]
                    is_settled = False
        if is_settled:
            break
    return aligned


def _better_order(mean: Mapping[str, Tensor], state: Mapping[str, Tensor], group: PermutationGroup) -> Tensor | None:
    roles: tuple[Role, ...] = ("out", "vec", "in")
    reference, features = (neuron_features(values, group, roles) for values in (mean, state))
    if not features:
        return None
    order = align_neurons(torch.cat(list(reference.values()), 1), torch.cat(list(features.values()), 1), group.blocks)
    before = {name: state[name] for name, _ in group.entries if name in state}
    after = permute_neurons(before, [group], [order])
    mean64 = {name: to_float64(mean[name]) for name in before}
    gain = sum(float((mean64[name] * (to_float64(after[name]) - to_float64(before[name]))).sum()) for name in before)
    common = sum(float((mean64[name] * to_float64(before[name])).abs().sum()) for name in before)
    return order if gain > _LEAST_GAIN * common else None


def _assigned(gains: NDArray[np.float64]) -> NDArray[np.int64]:
    from scipy.optimize import linear_sum_assignment  # slow to import, and needed only for matching

    columns: NDArray[np.int64] = linear_sum_assignment(gains, maximize=True)[1]
    return columns
