"""Matches neurons between networks, and merges networks."""

from lightning_fed.matching.alignment import align_networks as align_networks
from lightning_fed.matching.alignment import align_neurons as align_neurons
from lightning_fed.matching.checkpoints import load_matched as load_matched
from lightning_fed.matching.matched_mean import matched_mean as matched_mean
from lightning_fed.matching.merging import MatchedAverage as MatchedAverage
from lightning_fed.matching.merging import MergedGroup as MergedGroup
from lightning_fed.matching.merging import MergedModel as MergedModel
from lightning_fed.matching.neuron_matching import NeuronMatch as NeuronMatch
from lightning_fed.matching.neuron_matching import match_neurons as match_neurons
from lightning_fed.matching.one_shot import StateMatch as StateMatch
from lightning_fed.matching.one_shot import match_states as match_states
from lightning_fed.matching.permutation import GroupEntry as GroupEntry
from lightning_fed.matching.permutation import PermutationGroup as PermutationGroup
from lightning_fed.matching.permutation import grow_neurons as grow_neurons
from lightning_fed.matching.permutation import neuron_features as neuron_features
from lightning_fed.matching.permutation import permute_neurons as permute_neurons
from lightning_fed.matching.permutation import resize_groups as resize_groups
from lightning_fed.matching.permutation import slice_neurons as slice_neurons
from lightning_fed.matching.permutation_groups import PermutationGroups as PermutationGroups
from lightning_fed.matching.stages import Stage as Stage
from lightning_fed.matching.stages import find_stages as find_stages
from lightning_fed.model.resize import resize_module as resize_module

__all__ = [
    "GroupEntry",
    "MatchedAverage",
    "MergedGroup",
    "MergedModel",
    "NeuronMatch",
    "PermutationGroup",
    "PermutationGroups",
    "Stage",
    "StateMatch",
    "align_networks",
    "align_neurons",
    "find_stages",
    "grow_neurons",
    "load_matched",
    "match_neurons",
    "match_states",
    "matched_mean",
    "neuron_features",
    "permute_neurons",
    "resize_groups",
    "resize_module",
    "slice_neurons",
]
