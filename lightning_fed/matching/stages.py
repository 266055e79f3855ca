"""Splits a network into stages: layers whose neurons FedMA matches in one round and then freezes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from torch import Tensor

from lightning_fed.errors import OptionError
from lightning_fed.matching.permutation_groups import PermutationGroups
from lightning_fed.model.entries import is_running_statistic

StageChoice: TypeAlias = Literal["auto"] | int | Sequence[Sequence[str]]


@dataclass(frozen=True)
class Stage:
    """Layers that FedMA matches in one round, as names of permutation groups and state dict entries."""

    groups: tuple[str, ...]
    entries: tuple[str, ...]

    def joined(self, later: Stage) -> Stage:
        return Stage(self.groups + later.groups, self.entries + later.entries)


def find_stages(groups: PermutationGroups, names: Sequence[str], choice: StageChoice = "auto") -> list[Stage]:
    """Splits a network into stages, the sets of layers matched in one round.

    A stage contains all layers that compute the neurons of one permutation group (exchangeable neurons). In a chain of
    layers this is one layer, as in FedMA (ICLR 2020, Algorithm 1). In a ResNet, skip connections unite several blocks.
    A layer whose outputs cannot be permuted belongs to the next layer's stage. Layers after the last permuted neurons
    form the last stage.

    Args:
        groups: Permutation groups of the network.
        names: Names of the shared parameters and buffers. Tied parameters appear under the first name.
        choice: ``"auto"`` for all stages, an integer for the maximum number, or a list with name patterns for each
            stage. Above the maximum, neighboring stages with the fewest neurons are merged.

    Raises:
        ValueError: If ``choice`` is invalid: a name matches no stage, a stage is empty, several stages compute one
            group, or a stage uses neurons of a later stage as inputs.

    Example:
        >>> from torch import nn, zeros
        >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> groups = PermutationGroups.of(net, zeros(2, 2))
        >>> [stage.groups for stage in find_stages(groups, list(net.state_dict()))]
        [('0',), ('2',), ()]
    """
    choice = check_stages(choice)
    if not isinstance(choice, str | int):
        return _stages_from_patterns(groups, names, choice)
    known = set(names)
    ordered = [*(name for name in groups.order if name in known), *names]
    layers = {layer: index for index, layer in enumerate(dict.fromkeys(map(_layer, ordered)))}
    stage_of = _cut(groups, known, layers)
    stages = [
        Stage(
            tuple(group.name for group in groups if stage_of[_layer(_makers(groups, group.name, known)[-1])] == number),
            tuple(name for name in names if stage_of[_layer(name)] == number),
        )
        for number in range(max(stage_of.values(), default=0) + 1)
    ]
    while isinstance(choice, int) and len(stages) > choice:
        sizes = [sum(groups[name].size for name in stage.groups) for stage in stages]
        candidates = range(max(1, len(stages) - 2))  # the last stage is merged last
        index = min(candidates, key=lambda index: sizes[index] + sizes[index + 1])
        stages[index : index + 2] = [stages[index].joined(stages[index + 1])]
    return stages


def check_stages(choice: StageChoice) -> StageChoice:
    """Raises ``ValueError`` if ``choice`` is not a valid argument of :func:`find_stages`."""
    if isinstance(choice, Sequence) and not isinstance(choice, str):
        is_right = len(choice) > 0 and all(_are_patterns(patterns) for patterns in choice)
    else:
        is_right = choice == "auto" or (isinstance(choice, int) and not isinstance(choice, bool) and choice >= 1)
    if not is_right:
        raise OptionError(
            "Expected `stages` to be 'auto', a positive integer, or a list with the patterns of each stage, but got"
            f" {choice!r}."
        )
    return choice


def find_outputs(groups: PermutationGroups, names: Sequence[str], form: Mapping[str, Tensor]) -> list[str]:
    """Finds the names of the output layers' parameters and buffers.

    Candidates are the tensors used after all layers with permutable outputs. A candidate belongs to an output layer if
    the last candidate has the same number of rows. ``form`` contains a tensor for each name.
    """
    order = {name: index for index, name in enumerate(groups.order)}
    makers = {name for group in groups for (name, _), entry in group.entries.items() if entry.role != "in"}
    last = max((index for name, index in order.items() if name in makers or name not in form), default=-1)
    later = [
        name
        for name in sorted(names, key=lambda name: order.get(name, -1))
        if order.get(name, -1) > last and not is_running_statistic(name)
        if form[name].ndim and form[name].is_floating_point()
    ]
    return [name for name in later if len(form[name]) == len(form[later[-1]])]


def _are_patterns(patterns: object) -> bool:
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        return False
    return all(isinstance(pattern, str) for pattern in patterns)


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _makers(groups: PermutationGroups, name: str, known: set[str]) -> list[str]:
    # falls back to all entries of the group
    makers = [entry for (entry, _), part in groups[name].entries.items() if part.role != "in" and entry in known]
    return makers or [entry for entry, _ in groups[name].entries if entry in known]


def _cut(groups: PermutationGroups, known: set[str], layers: dict[str, int]) -> dict[str, int]:
    spans = []
    for group in groups:
        makers = [layers[_layer(name)] for name in _makers(groups, group.name, known)]
        first = min(layers[_layer(name)] for name, _ in group.entries if name in known)
        spans.append((first, max(makers)))
    starts = [0, *(index for index in range(1, len(layers)) if not any(a < index <= b for a, b in spans))]
    ends = [start - 1 for start in starts[1:]] + [len(layers) - 1]
    stage_of, stage = dict[str, int](), 0
    names = list(layers)
    for start, end in zip(starts, ends, strict=True):
        stage_of |= {names[index]: stage for index in range(start, end + 1)}
        if any(start <= a and b <= end for a, b in spans):  # otherwise the layers join the next stage
            stage += 1
    return stage_of


def _stages_from_patterns(
    groups: PermutationGroups, names: Sequence[str], patterns: Sequence[Sequence[str]]
) -> list[Stage]:
    stage_of = {}
    for name in names:
        matching = [
            number
            for number, stage_patterns in enumerate(patterns)
            if any(fnmatchcase(name, pattern) for pattern in stage_patterns)
        ]
        if not matching:
            raise OptionError(f"Expected `stages` to have a pattern for every entry, but no pattern matches {name!r}.")
        stage_of[name] = matching[0]
    group_of: dict[str, int] = {}
    for group in groups:
        makers = {stage_of[name] for name in _makers(groups, group.name, set(names))}
        readers = {stage_of[name] for name, _ in group.entries if name in stage_of}
        if len(makers) > 1 or min(readers) < min(makers):
            raise OptionError(
                f"Expected one stage for the layers that compute the neurons of {group.name!r}, and no earlier stage "
                f"for layers that use these neurons, but got stages {sorted(readers | makers)}: change `stages`."
            )
        group_of[group.name] = makers.pop()
    stages = [
        Stage(
            tuple(group for group, stage in group_of.items() if stage == number),
            tuple(name for name, stage in stage_of.items() if stage == number),
        )
        for number in range(len(patterns))
    ]
    for number, stage in enumerate(stages):
        if not stage.entries:
            raise OptionError(f"Expected each of `stages` to match entries, but {patterns[number]!r} matches none.")
    return stages
