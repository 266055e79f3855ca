"""Permutation groups of any module: neurons that may be permuted are found, checked, permuted, sliced and grown.

FedMA's matching needs to know, for every layer, the numbers that belong to a neuron: Wang et al., "Federated Learning
with Matched Averaging", ICLR 2020, have that for chains of convolutions and linear layers, and for an LSTM. Here it is
derived from the module's operations, so that no table has to be written for an architecture.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_fed.matching.find_groups import find_groups
from lightning_fed.matching.layer_rules import LAYERS
from lightning_fed.matching.operation_rules import RULES
from lightning_fed.matching.permutation import (
    Axis,
    PermutationGroup,
    Role,
    grow_neurons,
    neuron_features,
    permute_neurons,
    resize_groups,
    slice_neurons,
)
from lightning_fed.matching.permutation_check import PermutationCheck, restored_afterwards, split_inputs
from lightning_fed.matching.tracer import Tracer
from lightning_fed.model.entries import entry_tensors, tensor_slots


@dataclass(frozen=True, eq=False)
class PermutationGroups:
    """The groups of neurons of a module, in the order in which it runs them.

    States are flat, such as ``module.state_dict()``; they may lack entries, also tied ones. Orders, sizes and indices
    are given by the groups' names; groups that are not named stay as they are.

    Attributes:
        groups: The groups.
        order: Names of the module's entries in the order in which it runs them, as far as it does.
        tied: Names of entries that are tied to an earlier one, and that one's.
        unknown: Operations without a rule, by how often they occur: neurons that they touch are not permuted.

    """

    groups: tuple[PermutationGroup, ...]
    order: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        example_input: Any,
        *,
        pin: Sequence[str] = (),
        extra_groups: Sequence[PermutationGroup] = (),
    ) -> PermutationGroups:
        """Finds the groups of a module.

        The module's operations are read off with `torch.export` in evaluation mode. Every position of an entry's axis
        is followed through them: positions that contribute to the same element belong to one neuron. Inputs and outputs
        do not move, nor neurons that an operation without a rule touches: there may be fewer groups than possible, but
        no wrong ones.

        Then they are checked, with random numbers in the module: it must compute the same with the neurons of all
        groups permuted, in float64 to a relative error of 1e-9. A group that does not pass is left out, with a warning
        that names it. A growable one that does not compute the same with new neurons whose outgoing weights are zeros,
        or fails (a width that is written into the code), is not growable.

        The module is as it was afterwards. This takes about the time of a few passes over the example, and some
        seconds for a large module: two small images are enough.

        Args:
            module: A LightningModule or any other module. Its ``forward`` must not change; layers that it does
                not run in evaluation are followed in training mode. A child that it does not run then either, but
                ``training_step`` may, is named in a warning.
            example_input: Input that it is called with: a tensor, a tuple of positional inputs, or a dictionary of
                named ones; at least two examples, as large as in training where the module wants it.
            pin: Patterns of entry names (``"decoder.*"``) whose neurons stay where they are.
            extra_groups: Groups that are not found automatically. They replace found ones that share positions with
                them, and are checked as well.

        Returns:
            The groups.

        Raises:
            ValueError: If a pattern of ``pin`` matches no entry, or an extra group has one that the module does not
                have.

        Example:
            >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 9, 2))
            >>> groups = PermutationGroups.of(net, torch.zeros(2, 1, 5, 5))
            >>> groups.names, list(groups["0"].entries)[:3]
            (['0'], [('0.weight', 0), ('0.bias', 0), ('1.weight', 0)])
            >>> order = torch.tensor([2, 0, 3, 1])
            >>> permuted = groups.permute(net.state_dict(), {"0": order})
            >>> torch.equal(permuted["0.bias"], net[0].bias[order])
            True

        """
        tensors = entry_tensors(module)
        first: dict[int, str] = {}
        names = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
        for pattern in pin:
            if not any(fnmatchcase(name, pattern) for name in tensors):
                raise ValueError(f"Expected `pin` to match entries of the module, but {pattern!r} matches none.")
        for group in extra_groups:
            unknown = [name for name, _ in group.entries if name not in tensors]
            if unknown:
                raise ValueError(f"Expected `extra_groups` to have entries of the module, but got {unknown}.")
        args, kwargs = split_inputs(example_input)
        with restored_afterwards(module):
            tracer = _trace(module, args, kwargs, names, tensors)
            candidates = [*extra_groups]
            for group in find_groups(tracer) if tracer is not None else []:
                pinned = any(fnmatchcase(name, pattern) for name in _all_names(group, names) for pattern in pin)
                if not pinned and not any(_overlap(group, extra) for extra in extra_groups):
                    candidates.append(group)
            groups = _checked(module, args, kwargs, candidates)
        tied = {name: first_name for name, first_name in names.items() if name != first_name}
        if tracer is None:
            return cls(tuple(groups), tied=tied)
        return cls(
            tuple(groups),
            tuple(dict.fromkeys([*(name for name, _ in tracer.axes), *tracer.elements])),
            tied,
            dict(tracer.unknown),
        )

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[PermutationGroup]:
        return iter(self.groups)

    def __getitem__(self, name: str) -> PermutationGroup:
        return self.groups[self._index(name)]

    @property
    def names(self) -> list[str]:
        """The groups' names: the layers that make their neurons, with a position where a layer makes several groups."""
        return [group.name for group in self.groups]

    @property
    def sizes(self) -> dict[str, int]:
        """Number of neurons of each group."""
        return {group.name: group.size for group in self.groups}

    def resized(self, sizes: Mapping[str, int]) -> PermutationGroups:
        """The groups of the module in which some have other numbers of neurons.

        Raises:
            ValueError: If there is no such group, or it is not growable.

        """
        return replace(self, groups=tuple(resize_groups(self.groups, self._sizes(sizes))))

    def permute(self, state: Mapping[str, Tensor], orders: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state with permuted neurons, see :func:`~lightning_fed.matching.permute_neurons`.

        Args:
            state: Entries of the module.
            orders: Index of the neuron that comes to each position, int64, shape ``(neurons,)``.

        Raises:
            ValueError: If there is no such group, or the order does not fit it.

        """
        groups = [self[name] for name in orders]
        return self.tie(permute_neurons(state, groups, list(orders.values())))

    def slice(self, state: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state of the module that has some neurons only, see :func:`~lightning_fed.matching.slice_neurons`.

        Args:
            state: Entries of the module.
            kept: Indices of the neurons, in their new order, int64, shape ``(kept,)``.

        Raises:
            ValueError: If there is no such group, it is not growable, or does not have these neurons.

        """
        indices = [torch.arange(group.size) for group in self.groups]
        for name, group_indices in kept.items():
            indices[self._index(name)] = group_indices
        return self.tie(slice_neurons(state, self.groups, indices))

    def grow(
        self, state: Mapping[str, Tensor], sizes: Mapping[str, int], assignments: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The state of a wider module, with zeros for new neurons, see :func:`~lightning_fed.matching.grow_neurons`.

        Args:
            state: Entries of the module.
            sizes: Numbers of neurons.
            assignments: Index of each neuron in the wider module, int64, shape ``(neurons,)``; by default the
                neurons come first, in their order.

        Raises:
            ValueError: If there is no such group, it is not growable, or assignments do not fit it.

        """
        indices = [torch.arange(group.size) for group in self.groups]
        for name, assignment in (assignments or {}).items():
            indices[self._index(name)] = assignment
        return self.tie(grow_neurons(state, self.groups, indices, self._sizes(sizes)))

    def features(
        self, state: Mapping[str, Tensor], name: str, roles: Sequence[Role] = ("out", "vec")
    ) -> dict[Axis, Tensor]:
        """Vectors by which the neurons of a group are matched, see :func:`~lightning_fed.matching.neuron_features`.

        Args:
            state: Entries of the module.
            name: Name of the group.
            roles: Roles of the entries that count.

        """
        return neuron_features(state, self[name], roles)

    def tie(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state with entries that are tied to an earlier one equal to it."""
        return {
            name: state[self.tied[name]] if self.tied.get(name) in state else value for name, value in state.items()
        }

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise ValueError(f"Expected the name of a group, but got {name!r}; there are {self.names}.")
        return self.names.index(name)

    def _sizes(self, sizes: Mapping[str, int]) -> list[int]:
        for name in sizes:
            self._index(name)
        return [sizes.get(group.name, group.size) for group in self.groups]


def _trace(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: Mapping[str, str],
    tensors: Mapping[str, Tensor],
) -> Tracer | None:
    """Follows a module's neurons; ``None``, with a warning, if its operations cannot be read off."""
    entries = {tensor: names[name] for name, tensor in tensors.items()}
    slots = tensor_slots(module)
    paths = {slot.path: entries[slot.tensor] for slot in slots if slot.tensor in entries}
    constants = {slot.path: slot.tensor for slot in slots if slot.tensor not in entries}
    tracer = Tracer(tensors, {**RULES, **LAYERS})
    try:
        tracer.run(_exported(module, args, kwargs), paths, constants)
    except Exception as error:  # a module that depends on its data, or on what only a Trainer gives it
        rank_zero_warn(
            "No neurons can change places but those of `extra_groups`: the module's operations cannot be read off."
            f" {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
        return None
    if _unused(tensors, names, tracer):
        module.train()
        with suppress(Exception):  # the warning that follows says what is left
            tracer.run(_exported(module, args, kwargs), paths, constants)
        module.eval()
        used = {name.partition(".")[0] for name in _traced_names(tracer)}
        children = dict.fromkeys(name.partition(".")[0] for name in _unused(tensors, names, tracer))
        unused = [child for child in children if child not in used]
        if unused:
            rank_zero_warn(
                f"What `forward` does not run is not known to read any neurons: {_some(unused)}. If training feeds it"
                " features, name the layers that make these in `pin` of `PermutationGroups.of` or `LayerwiseTraining`."
            )
    return tracer


def _exported(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about details without use here, such as the inner lists of recurrent layers
        return torch.export.export(module, args, kwargs, strict=False)


def _traced_names(tracer: Tracer) -> set[str]:
    return {name for name, _ in tracer.axes} | set(tracer.elements)


def _unused(tensors: Mapping[str, Tensor], names: Mapping[str, str], tracer: Tracer) -> list[str]:
    """Parameters with several axes that the trace has not reached."""
    traced = _traced_names(tracer)
    parameters = {name: value for name, value in tensors.items() if isinstance(value, nn.Parameter)}
    return [name for name, value in parameters.items() if value.ndim > 1 and names[name] not in traced]


def _checked(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], groups: list[PermutationGroup]
) -> list[PermutationGroup]:
    """The groups that pass, growable where they can have more neurons; the others are named in a warning."""
    if not groups:
        return []
    try:
        check = PermutationCheck(module, args, kwargs)
    except Exception as error:  # whatever the module raises
        rank_zero_warn(f"No neurons can change places: the module cannot be tried out. {type(error).__name__}: {error}")
        return []
    failing = check.find_not_invariant(groups)
    if failing:
        rank_zero_warn(
            f"Neurons of these layers stay where they are, because the module computes something else when they change"
            f" places: {_some([group.name for group in failing])}."
        )
    good = [group for group in groups if group not in failing]
    fixed_width = check.find_fixed_width(good)
    return [replace(group, is_growable=group.is_growable and group not in fixed_width) for group in good]


def _all_names(group: PermutationGroup, names: Mapping[str, str]) -> list[str]:
    """Names of a group's entries, tied ones under all names."""
    group_names = {name for name, _ in group.entries}
    return [name for name, first in names.items() if first in group_names]


def _overlap(first: PermutationGroup, second: PermutationGroup) -> bool:
    return any(
        bool(torch.isin(entry.positions, second.entries[axis].positions).any())
        for axis, entry in first.entries.items()
        if axis in second.entries
    )


def _some(names: Sequence[str]) -> str:
    """The first few names."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
