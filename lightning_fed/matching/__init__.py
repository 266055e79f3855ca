"""What belongs to a neuron, in any module: the ground that FedMA's matching stands on; and merging trained networks."""

from lightning_fed.matching.checkpoints import load_matched as load_matched
from lightning_fed.matching.groups import PermutationGroups as PermutationGroups
from lightning_fed.matching.merging import MatchedAverage as MatchedAverage
from lightning_fed.matching.merging import MergedGroup as MergedGroup
from lightning_fed.matching.merging import MergedModel as MergedModel
from lightning_fed.matching.one_shot import StateMatch as StateMatch
from lightning_fed.matching.one_shot import match_states as match_states
from lightning_fed.matching.stages import Stage as Stage
from lightning_fed.matching.stages import find_stages as find_stages
from lightning_fed.resize import resize_module as resize_module

__all__ = [
    "MatchedAverage",
    "MergedGroup",
    "MergedModel",
    "PermutationGroups",
    "Stage",
    "StateMatch",
    "find_stages",
    "load_matched",
    "match_states",
    "resize_module",
]
