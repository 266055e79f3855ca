"""Groups of neurons from what a network has joined."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fed.matching.atoms import NEUTRAL, PINNED, Mark, Shadow
from lightning_fed.matching.permutation import Axis, GroupEntry, PermutationGroup, Role, find_runs
from lightning_fed.matching.tracer import Tracer


class _Neuron(NamedTuple):
    """What one neuron has.

    Attributes:
        positions: Its positions on every axis where it has some, in increasing order.
        blocks: Groups of group normalisations that it is in.

    """

    positions: dict[Axis, list[int]]
    blocks: frozenset[Mark]


def find_groups(tracer: Tracer) -> list[PermutationGroup]:
    """The groups of a network that has been followed, in its order.

    Neurons are in one group if they have positions on the same axes, in the same number, and the same marks.
    """
    axes = dict(tracer.axes)
    for name, elements in tracer.elements.items():
        _follow_axis(tracer, axes, name, elements)
    marks = tracer.atoms.marks()
    positions: dict[int, dict[Axis, list[int]]] = defaultdict(dict)
    for axis, atoms in axes.items():
        for position, root in enumerate(tracer.atoms.roots(atoms).tolist()):
            if root not in (NEUTRAL, PINNED):
                positions[root].setdefault(axis, []).append(position)

    families: dict[tuple[frozenset[tuple[Axis, int]], frozenset[Mark]], list[_Neuron]] = defaultdict(list)
    for root, own in positions.items():
        apart = frozenset(mark for mark in marks.get(root, ()) if mark[0] != "block")
        within = marks.get(root, frozenset()) - apart
        shape = frozenset((axis, len(places)) for axis, places in own.items())
        families[shape, apart].append(_Neuron(own, within))

    order = {axis: place for place, axis in enumerate(axes)}
    groups: list[tuple[tuple[int, int], Axis, PermutationGroup]] = []
    for (_, apart), family in families.items():
        made = [axis for axis in family[0].positions if "out" in tracer.roles.get(axis, ())]
        lead = min(made or family[0].positions, key=order.__getitem__)
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
                # What is sliced or reduced knows how many neurons there are.
                is_free = not apart and not neurons[0].blocks
                is_growable = is_free and all(find_runs(entry.positions) is not None for entry in entries.values())
                group = PermutationGroup("", len(neurons), entries, blocks, is_growable)
                groups.append(((order[lead], neurons[0].positions[lead][0]), lead, group))
    groups.sort(key=lambda one: one[0])
    return _named([group for _, _, group in groups], [lead for _, lead, _ in groups])


def _follow_axis(tracer: Tracer, axes: dict[Axis, Tensor], name: str, elements: Tensor) -> None:
    """The axis along which a parameter's neurons differ, if it is one: it was followed element by element."""
    shadow = Shadow.of(tracer.atoms.roots(elements))
    if len(shadow.varying) == 1:
        axis = shadow.varying.pop()
        axes[name, axis] = shadow.atoms.reshape(-1)
    else:
        tracer.atoms.pin(elements)


def _split_blocks(family: list[_Neuron]) -> list[tuple[list[_Neuron], int]]:
    """Neurons that may change places, and in how many blocks they are.

    Blocks may change places as wholes if they are equally large, and no group of a group normalisation has neurons of
    two of them.
    """
    blocks: dict[frozenset[Mark], list[_Neuron]] = defaultdict(list)
    for neuron in family:
        blocks[neuron.blocks].append(neuron)
    marks = [mark for own in blocks for mark in own]
    shapes = {(len(neurons), len(own)) for own, neurons in blocks.items()}
    if len(shapes) > 1 or len(set(marks)) < len(marks):
        return [(neurons, 1) for neurons in blocks.values()]
    neurons = [neuron for own in blocks.values() for neuron in own]
    return [(neurons, len(blocks) if len(blocks) < len(neurons) else 1)]


def _role(roles: Iterable[str]) -> Role:
    found = set(roles)
    if "in" in found:
        return "both" if "out" in found else "in"
    return "out" if "out" in found else "vec"


def _named(groups: list[PermutationGroup], leads: list[Axis]) -> list[PermutationGroup]:
    """Groups with the names of the layers that make them; where a layer makes several, with what tells them apart."""
    starts = [int(group.entries[lead].positions[0, 0]) for group, lead in zip(groups, leads, strict=True)]
    layers = [name.rpartition(".")[0] or name for name, _ in leads]
    ways = [
        layers,
        [name for name, _ in leads],
        [f"{layer}[{start}]" for layer, start in zip(layers, starts, strict=True)],
        [f"{name}:{axis}[{start}]" for (name, axis), start in zip(leads, starts, strict=True)],
    ]
    alike = defaultdict(list)
    for place, layer in enumerate(layers):
        alike[layer].append(place)
    for places in alike.values():
        names = next(names for names in ways if len({names[place] for place in places}) == len(places))
        for place in places:
            groups[place] = replace(groups[place], name=names[place])
    return groups
