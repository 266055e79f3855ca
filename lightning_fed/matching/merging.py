"""Merges trained networks without further training.

Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks" (PFNM), ICML 2019; Wang et al.,
"Federated Learning with Matched Averaging" (FedMA), ICLR 2020, without training between layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from lightning_fed.argument_checks import check_count, check_option, check_positive
from lightning_fed.batch_norm.pooling import recalibrate_batch_norm
from lightning_fed.features.batches import BatchKey, find_inputs
from lightning_fed.matching.checkpoints import Checkpoint, check_entries, read_checkpoint, state_of
from lightning_fed.matching.match_widths import match_widths
from lightning_fed.matching.neuron_matching import MatchScore
from lightning_fed.matching.one_shot import MatchMode, MatchOrder, match_states
from lightning_fed.matching.permutation_groups import PermutationGroups
from lightning_fed.model.entries import batch_norm_layers, entry_tensors, find_non_finite
from lightning_fed.model.resize import resize_module
from lightning_fed.numerics.trees import move_tensors


class MergedGroup(NamedTuple):
    """Statistics for merging one permutation group (exchangeable neurons).

    Attributes:
        name: Group name.
        before: Neurons in each network.
        width: Neurons in the merged network.
        matched: Fraction of neurons matched with neurons in another network.
        agreement: The neurons' squared norm after averaging, divided by the squared norm before: 1 for equal neurons.
        seconds: Time for matching this group, excluding :func:`~lightning_fed.matching.align_networks`.
    """

    name: str
    before: int
    width: int
    matched: float
    agreement: float
    seconds: float


class MergedModel(NamedTuple):
    """Merged network, and statistics about merging.

    Attributes:
        module: The merged module.
        state: A copy of the module's state.
        groups: Permutation groups; empty with mode ``"none"``.
        assignments: For each network and group, each neuron's index in the merged network: int64.
    """

    module: nn.Module
    state: dict[str, Tensor]
    groups: list[MergedGroup]
    assignments: list[dict[str, Tensor]]


class MatchedAverage:
    """Merges trained networks with equal architecture, by averaging matched neurons.

    Unlike :class:`~lightning_fed.algorithms.FedMA` there is no training between layers, so deep networks with different
    initializations lose much accuracy.

    Args:
        mode: ``"grow"`` adds unmatched neurons. With the marginal score, layers become at most 1.25 times as wide.
            ``"permute"`` matches neurons one to one and preserves widths. ``"none"`` averages without matching.
        order: ``"fedma"`` matches from the first layer on, by incoming weights; ``"pfnm"`` from the last layer on, by
            outgoing weights.
        score: Matching score, see :func:`~lightning_fed.matching.match_neurons`.
        gamma: Larger values add more neurons; ``None`` for the default with this ``score``.
        passes: With ``"grow"``, the maximum passes over the networks for each layer.
        sweeps: Maximum passes over all networks to improve one-to-one matches with
            :func:`~lightning_fed.matching.align_networks`.
        batch_norm: ``"recalibrate"`` measures BatchNorm's running statistics on data, and ``"average"`` averages these.
        inputs: Index or key of the inputs in a batch, or a function of the batch. The default is the first element, or
            a key such as ``"image"``.
        seed: Seed for the network order.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> order = torch.tensor([3, 1, 7, 0, 6, 2, 5, 4])
        >>> permuted = copy.deepcopy(net)  # the same network with permuted neurons
        >>> permuted[0].weight.data, permuted[0].bias.data = net[0].weight[order], net[0].bias[order]
        >>> permuted[2].weight.data = net[2].weight[:, order]
        >>> merged = MatchedAverage().merge([net, permuted], example_input=torch.zeros(2, 4))
        >>> merged.groups[0][:4], torch.equal(merged.module[2].weight, net[2].weight)
        (('0', 8, 8, 1.0), True)
    """

    def __init__(
        self,
        mode: MatchMode = "grow",
        order: MatchOrder = "fedma",
        score: MatchScore = "marginal",
        gamma: float | None = None,
        passes: int = 5,
        sweeps: int = 30,
        batch_norm: Literal["recalibrate", "average"] = "recalibrate",
        inputs: BatchKey = None,
        seed: int = 0,
    ) -> None:
        check_option("mode", mode, MatchMode)
        check_option("order", order, MatchOrder)
        check_option("score", score, MatchScore)
        check_option("batch_norm", batch_norm, ("recalibrate", "average"))
        if gamma is not None:
            check_positive("gamma", gamma)
        self.mode = mode
        self.order = order
        self.score = score
        self.gamma = gamma
        self.passes = check_count("passes", passes, 0)
        self.sweeps = check_count("sweeps", sweeps, 0)
        self.batch_norm = batch_norm
        self.inputs = inputs
        self.seed = check_count("seed", seed, 0)

    @torch.no_grad()
    def merge(
        self,
        networks: Sequence[Checkpoint | nn.Module],
        module: nn.Module | None = None,
        *,
        example_input: Any = None,
        data: Iterable[Any] | None = None,
        weights: Sequence[float] | None = None,
    ) -> MergedModel:
        """Matches and averages networks. Raises ``ValueError`` if networks cannot be matched.

        Args:
            networks: Checkpoint paths, checkpoint contents, state dicts or modules, with equal architecture and widths.
            module: Module that receives the merged state; ``None`` for a copy of the first module.
            example_input: Input for ``forward``; by default from ``data`` or ``example_input_array``.
            data: Batches to measure BatchNorm's running statistics, such as a ``DataLoader``.
            weights: Network weights, greater than 0; by default equal.
        """
        module = _module(networks) if module is None else module
        if self.batch_norm == "recalibrate" and batch_norm_layers(module) and data is None:
            raise ValueError(
                "Expected `data` to measure BatchNorm's running statistics, but got None: pass batches, or average the"
                " statistics with batch_norm='average', which may lose accuracy."
            )
        states = _states(networks, module)
        _refuse_adapters(states)
        if weights is not None and len(weights) != len(states):
            raise ValueError(f"Expected one weight per network in `weights`, but got {len(weights)} for {len(states)}.")
        example, data = self._example(module, example_input, data)
        match_widths(module, states[0])
        groups = self._groups(module, example)
        match = match_states(
            states,
            groups,
            np.random.default_rng(self.seed),
            self.order,
            mode=self.mode,
            weights=weights,
            sweeps=self.sweeps,
            score=self.score,
            gamma=self.gamma,
            passes=self.passes,
        )
        resize_module(module, match.state)
        if self.batch_norm == "recalibrate" and batch_norm_layers(module):
            recalibrate_batch_norm(module, data or (), self.inputs)
        merged = {name: value.detach().clone() for name, value in entry_tensors(module).items()}
        widths, matched = match.groups.sizes, match.matched
        merged_groups = [
            MergedGroup(name, before, widths[name], matched[name], match.agreement[name], match.seconds[name])
            for name, before in groups.sizes.items()
        ]
        return MergedModel(module, merged, merged_groups, match.assignments)

    def _groups(self, module: nn.Module, example: Any) -> PermutationGroups:
        if self.mode == "none":  # groups are not needed
            return PermutationGroups(())
        groups = PermutationGroups.of(module, example)
        if not len(groups):
            raise ValueError(
                "Expected permutable neurons, but found none: use mode='none' to average without matching."
            )
        return groups

    def _example(self, module: nn.Module, example: Any, data: Iterable[Any] | None) -> tuple[Any, Iterable[Any] | None]:
        if self.mode == "none":
            return None, data
        if example is None and data is not None:
            batches = iter(data)
            batch = next(batches, None)
            if batch is None:
                raise ValueError("Expected `data` to have at least one batch, but got none.")
            if batches is data:  # an iterator can only be used once
                data = chain([batch], batches)
            batch_inputs = find_inputs(batch, self.inputs)
            example = batch_inputs[:2] if len(batch_inputs) > 1 else torch.cat([batch_inputs, batch_inputs])
        elif example is None and isinstance(module, L.LightningModule):
            example = module.example_input_array
        if example is None:
            raise ValueError("Expected `example_input`, `data`, or a module with `example_input_array`, but got none.")
        device = next((tensor.device for tensor in entry_tensors(module).values()), torch.device("cpu"))
        return move_tensors(example, device), data


def _refuse_adapters(states: Sequence[Mapping[str, Tensor]]) -> None:
    # The product of averaged low-rank factors is not the average of the products.
    adapters = sorted({name for state in states for name in state if "lora_A" in name.split(".")})
    if adapters:
        raise ValueError(
            f"Expected models without adapters, but got the factor {adapters[0]!r}: the product of averaged factors is"
            " not the average of the products. Merge every adapter into its model first (`merge_and_unload` of peft)."
        )


def _module(networks: Sequence[Checkpoint | nn.Module]) -> nn.Module:
    first = next((network for network in networks if isinstance(network, nn.Module)), None)
    if first is None:
        raise ValueError("Expected a `module` argument, or a module in `networks`, but got neither.")
    return copy.deepcopy(first)


def _states(networks: Sequence[Checkpoint | nn.Module], module: nn.Module) -> list[dict[str, Tensor]]:
    if not networks:
        raise ValueError("Expected `networks` to contain at least one network, but got none.")
    module_tensors, states = entry_tensors(module), list[dict[str, Tensor]]()
    for number, network in enumerate(networks):
        label = str(network) if isinstance(network, str | Path) else f"network {number}"
        state = network.state_dict() if isinstance(network, nn.Module) else state_of(read_checkpoint(network))
        check_entries(module.state_dict(), state, label)
        state = {name: state[name].detach().to(tensor.device) for name, tensor in module_tensors.items()}
        for name, value in state.items():
            if value.ndim != module_tensors[name].ndim or (states and value.shape != states[0][name].shape):
                first = tuple((states[0] if states else module_tensors)[name].shape)
                owner = "of the first network" if states else "of the module"
                raise ValueError(
                    f"Expected {label} to have the architecture {owner}, in which {name!r} has shape {first}, but got "
                    f"{tuple(value.shape)}."
                )
        fault = find_non_finite(state)
        if fault is not None:
            raise ValueError(f"Expected {label} to be finite, but {fault}.")
        states.append(state)
    return states
