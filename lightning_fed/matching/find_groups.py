"""Finds permutation groups (sets of exchangeable neurons) in a traced network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fed.matching.neuron_ids import NEUTRAL, PINNED, Constraint, TracedActivation
from lightning_fed.matching.permutation import Axis, GroupEntry, PermutationGroup, Role, find_runs
from lightning_fed.matching.tracer import Tracer


class _Neuron(NamedTuple):
    positions: dict[Axis, list[int]]
    blocks: frozenset[Constraint]


def find_groups(tracer: Tracer) -> list[PermutationGroup]:
    """Returns all permutation groups of a traced network, in network order."""
    axes = dict(tracer.axes)
    for name, elements in tracer.elements.items():
        _follow_axis(tracer, axes, name, elements)
    constraints = tracer.union_find.constraints()
    positions: dict[int, dict[Axis, list[int]]] = defaultdict(dict)
    for axis, ids in axes.items():
        for position, root in enumerate(tracer.union_find.find_all(ids).tolist()):
            if root not in (NEUTRAL, PINNED):
                positions[root].setdefault(axis, []).append(position)

    families: dict[tuple[frozenset[tuple[Axis, int]], frozenset[Constraint]], list[_Neuron]] = defaultdict(list)
    for root, neuron_positions in positions.items():
        apart = frozenset(constraint for constraint in constraints.get(root, ()) if constraint[0] != "block")
        within = constraints.get(root, frozenset()) - apart
        shape = frozenset((axis, len(indices)) for axis, indices in neuron_positions.items())
        families[shape, apart].append(_Neuron(neuron_positions, within))

    order = {axis: index for index, axis in enumerate(axes)}
    groups: list[tuple[tuple[int, int], Axis, PermutationGroup]] = []
    for (_, apart), family in families.items():
        out_axes = [axis for axis in family[0].positions if "out" in tracer.roles.get(axis, ())]
        lead = min(out_axes or family[0].positions, key=order.__getitem__)
        family.sort(key=lambda neuron: neuron.positions[lead])
        for neurons, blocks in _split_blocks(family):
            if len(neurons) > 1:
                entries = {
                    axis: GroupEntry(
                        torch.tensor([neuron.positions[axis] for neuron in neurons]),
                        _role(tracer.roles.get(axis, ())),
                        len(axes[axis]),
                    )
                    for axis in sorted(neurons[0].positions, key=order.__getitem__)
                }
                # The result of a slice or reduction depends on the number of neurons.
                is_free = not apart and not neurons[0].blocks
                is_growable = is_free and all(find_runs(entry.positions) is not None for entry in entries.values())
                group = PermutationGroup("", len(neurons), entries, blocks, is_growable)
                groups.append(((order[lead], neurons[0].positions[lead][0]), lead, group))
    groups.sort(key=lambda item: item[0])
    return _named([group for _, _, group in groups], [lead for _, lead, _ in groups])


def _follow_axis(tracer: Tracer, axes: dict[Axis, Tensor], name: str, elements: Tensor) -> None:
    # The parameter was traced per element. Neurons may differ only along one axis.
    activation = TracedActivation.of(tracer.union_find.find_all(elements))
    if len(activation.varying) == 1:
        axis = activation.varying.pop()
        axes[name, axis] = activation.ids.reshape(-1)
    else:
        tracer.union_find.pin(elements)


def _split_blocks(family: list[_Neuron]) -> list[tuple[list[_Neuron], int]]:
    """Splits neurons in the same layers into sets of exchangeable neurons.

    Returns each set with the number of blocks. The neurons in one GroupNorm group are a block. Neurons can exchange
    places within a block, and whole blocks can exchange places. Without GroupNorm, a set is one block.
    """
    # Whole blocks are exchangeable if all blocks have equal size and no normalization group spans two blocks.
    blocks: dict[frozenset[Constraint], list[_Neuron]] = defaultdict(list)
    for neuron in family:
        blocks[neuron.blocks].append(neuron)
    constraints = [constraint for block in blocks for constraint in block]
    shapes = {(len(neurons), len(block)) for block, neurons in blocks.items()}
    if len(shapes) > 1 or len(set(constraints)) < len(constraints):
        return [(neurons, 1) for neurons in blocks.values()]
    neurons = [neuron for block in blocks.values() for neuron in block]
    return [(neurons, len(blocks) if len(blocks) < len(neurons) else 1)]


def _role(roles: Iterable[str]) -> Role:
    kinds = set(roles)
    if "in" in kinds:
        return "both" if "out" in kinds else "in"
    return "out" if "out" in kinds else "vec"


def _named(groups: list[PermutationGroup], leads: list[Axis]) -> list[PermutationGroup]:
    starts = [int(group.entries[lead].positions[0, 0]) for group, lead in zip(groups, leads, strict=True)]
    layers = [name.rpartition(".")[0] or name for name, _ in leads]
    naming_schemes = [
        layers,
        [name for name, _ in leads],
        [f"{layer}[{start}]" for layer, start in zip(layers, starts, strict=True)],
        [f"{name}:{axis}[{start}]" for (name, axis), start in zip(leads, starts, strict=True)],
    ]
    by_layer = defaultdict(list)
    for index, layer in enumerate(layers):
        by_layer[layer].append(index)
    for indices in by_layer.values():
        names = next(names for names in naming_schemes if len({names[index] for index in indices}) == len(indices))
        for index in indices:
            groups[index] = replace(groups[index], name=names[index])
    return groups
