"""Finds sets of exchangeable neurons (permutation groups), and permutes or resizes these sets in any module."""

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

from lightning_fed.console import list_first
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
    """Permutation groups of a module (sets of exchangeable neurons), in execution order.

    The methods accept state dicts, also incomplete. Orders, sizes and neuron indices are dictionaries by group name.

    Attributes:
        groups: Permutation groups.
        order: Names of used parameters and buffers in execution order.
        tied: For parameters with one shared tensor, maps each later name to the first name.
        unknown: Number of calls for each unsupported operation. Neurons in such operations are not permuted.
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
        """Finds a module's permutation groups (sets of exchangeable neurons).

        The module is traced with `torch.export` in evaluation mode. All weight rows, weight columns and biases that
        produce or use the same element in an activation belong to one neuron. Inputs, outputs, and neurons in unknown
        operations are not permuted, so some groups may be missing.

        Two checks then run the module with random values. If permuting a group changes the outputs, the group is
        removed with a warning. If adding neurons fails or changes the outputs, ``is_growable`` becomes false.

        Args:
            module: Any module; restored afterwards. The operations in ``forward`` must not vary between calls. Unused
                submodules cause a warning.
            example_input: Small input with at least two examples: a tensor, a tuple, or a dictionary of named inputs.
            pin: Patterns for parameter names (``"decoder.*"``) with neurons to exclude from permutations.
            extra_groups: Manually defined groups, also checked. Found groups that share neurons with these are dropped.

        Example:
            >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 9, 2))
            >>> groups = PermutationGroups.of(net, torch.zeros(2, 1, 5, 5))
            >>> groups.names, list(groups["0"].entries)[:3]
            (['0'], [('0.weight', 0), ('0.bias', 0), ('1.weight', 0)])
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
                raise ValueError(f"Expected `extra_groups` to contain entries of the module, but got {unknown}.")
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
        """Names of the groups: usually the layer with the neurons as outputs."""
        return [group.name for group in self.groups]

    @property
    def sizes(self) -> dict[str, int]:
        return {group.name: group.size for group in self.groups}

    def resized(self, sizes: Mapping[str, int]) -> PermutationGroups:
        """Changes the number of neurons in some groups, see :func:`~lightning_fed.matching.resize_groups`."""
        return replace(self, groups=tuple(resize_groups(self.groups, self._sizes(sizes))))

    def permute(self, state: Mapping[str, Tensor], orders: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Permutes neurons, see :func:`~lightning_fed.matching.permute_neurons`."""
        groups = [self[name] for name in orders]
        return self.tie(permute_neurons(state, groups, list(orders.values())))

    def slice(self, state: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Selects neurons, see :func:`~lightning_fed.matching.slice_neurons`."""
        indices = [torch.arange(group.size) for group in self.groups]
        for name, group_indices in kept.items():
            indices[self._index(name)] = group_indices
        return self.tie(slice_neurons(state, self.groups, indices))

    def grow(
        self, state: Mapping[str, Tensor], sizes: Mapping[str, int], assignments: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Adds neurons with value 0, see :func:`~lightning_fed.matching.grow_neurons`; by default at the end."""
        indices = [torch.arange(group.size) for group in self.groups]
        for name, assignment in (assignments or {}).items():
            indices[self._index(name)] = assignment
        return self.tie(grow_neurons(state, self.groups, indices, self._sizes(sizes)))

    def features(
        self, state: Mapping[str, Tensor], name: str, roles: Sequence[Role] = ("out", "vec")
    ) -> dict[Axis, Tensor]:
        """Returns the weights in group ``name`` as matrices, see :func:`~lightning_fed.matching.neuron_features`."""
        return neuron_features(state, self[name], roles)

    def tie(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: state[self.tied[name]] if self.tied.get(name) in state else value for name, value in state.items()
        }

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise ValueError(f"Expected a group name from {self.names}, but got {name!r}.")
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
    entries = {tensor: names[name] for name, tensor in tensors.items()}
    slots = tensor_slots(module)
    paths = {slot.path: entries[slot.tensor] for slot in slots if slot.tensor in entries}
    constants = {slot.path: slot.tensor for slot in slots if slot.tensor not in entries}
    tracer = Tracer(tensors, {**RULES, **LAYERS})
    try:
        tracer.run(_exported(module, args, kwargs), paths, constants)
    except Exception as error:  # for example data-dependent control flow, or a missing Trainer
        rank_zero_warn(
            "Tracing the module failed, so only neurons in `extra_groups` can be permuted."
            f" {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
        return None
    if _unused(tensors, names, tracer):
        module.train()
        with suppress(Exception):  # remaining layers are named in the warning below
            tracer.run(_exported(module, args, kwargs), paths, constants)
        module.eval()
        used = {name.partition(".")[0] for name in _traced_names(tracer)}
        children = dict.fromkeys(name.partition(".")[0] for name in _unused(tensors, names, tracer))
        unused = [child for child in children if child not in used]
        if unused:
            rank_zero_warn(
                f"`forward` does not use these submodules, so their inputs are unknown: {list_first(unused)}. If "
                "training passes features to these submodules, name the layers that compute these features in `pin` of "
                "`PermutationGroups.of` or `LayerwiseTraining`: otherwise matching may reorder the features."
            )
    return tracer


def _exported(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # irrelevant details, such as inner lists of recurrent layers
        return torch.export.export(module, args, kwargs, strict=False)


def _traced_names(tracer: Tracer) -> set[str]:
    return {name for name, _ in tracer.axes} | set(tracer.elements)


def _unused(tensors: Mapping[str, Tensor], names: Mapping[str, str], tracer: Tracer) -> list[str]:
    traced = _traced_names(tracer)
    parameters = {name: value for name, value in tensors.items() if isinstance(value, nn.Parameter)}
    return [name for name, value in parameters.items() if value.ndim > 1 and names[name] not in traced]


def _checked(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], groups: list[PermutationGroup]
) -> list[PermutationGroup]:
    if not groups:
        return []
    try:
        check = PermutationCheck(module, args, kwargs)
    except Exception as error:  # modules may raise any exception
        rank_zero_warn(f"No neurons can be permuted: a test run of the module failed. {type(error).__name__}: {error}")
        return []
    failing = check.find_not_invariant(groups)
    if failing:
        rank_zero_warn(
            "Neurons of these layers cannot be permuted, because permutations change the module's outputs:"
            f" {list_first([group.name for group in failing])}."
        )
    good = [group for group in groups if group not in failing]
    fixed_width = check.find_fixed_width(good)
    return [replace(group, is_growable=group.is_growable and group not in fixed_width) for group in good]


def _all_names(group: PermutationGroup, names: Mapping[str, str]) -> list[str]:
    group_names = {name for name, _ in group.entries}
    return [name for name, first in names.items() if first in group_names]


def _overlap(first: PermutationGroup, second: PermutationGroup) -> bool:
    return any(
        bool(torch.isin(entry.positions, second.entries[axis].positions).any())
        for axis, entry in first.entries.items()
        if axis in second.entries
    )
