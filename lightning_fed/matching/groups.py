"""Which neurons of any module may change places: found, tried out, and permuted, sliced, grown.

FedMA's matching needs to know, for every layer, what belongs to a neuron: Wang et al., "Federated Learning with Matched
Averaging", ICLR 2020, have that for chains of convolutions and linear layers, and for an LSTM. Here it is read off the
module's operations, so that no table has to be written for an architecture.
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

from lightning_fed.matching.check import Trial, on_loan, split_inputs
from lightning_fed.matching.grouping import find_groups
from lightning_fed.matching.layers import LAYERS
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
from lightning_fed.matching.rules import RULES
from lightning_fed.matching.tracer import Tracer
from lightning_fed.model.resize import named_tensors


@dataclass(frozen=True, eq=False)
class PermutationGroups:
    """The groups of neurons of a module, in the order in which it runs them.

    States are flat, such as ``module.state_dict()``; they may lack entries. Entries that are tied to others may be
    there or not. What is said of a group is given by its name; of groups that are not named everything stays.

    Attributes:
        groups: The groups.
        order: Names of the module's entries in the order in which it runs them, as far as it does.
        tied: Names of entries that are tied to an earlier one, and that one's.
        unknown: Operations that nothing is known about, by how often there are: what they touch does not move.

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
        is followed through them: what the same number meets belongs to one neuron. Inputs and outputs do not move, nor
        what an operation without a rule touches: there may be fewer groups than there could be, but no wrong ones.

        Then they are tried out, with random numbers in the module: it must compute the same with the neurons of all
        groups permuted, in float64 to a relative error of 1e-9. A group that does not pass is left out, with a warning
        that names it. A growable one that does not compute the same with new neurons that nobody reads, or fails (a
        width that is written into the code), is not growable.

        The module is as it was afterwards. This takes about the time of a few passes over the example, and some
        seconds for a large module: two small images are enough.

        Args:
            module: A LightningModule or any other module. Its ``forward`` is what must not change; layers that it does
                not run in evaluation are followed in training mode. A child that it does not run then either, but
                ``training_step`` may, is named in a warning.
            example_input: What it is called with: a tensor, a tuple of positional inputs, or a dictionary of named
                ones; at least two examples, as large as in training where the module wants it.
            pin: Patterns of entry names (``"decoder.*"``) whose neurons are to stay where they are.
            extra_groups: Groups that are not found by themselves. They take the place of found ones that share
                positions with them, and are tried out as well.

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
        tensors = named_tensors(module)
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
        with on_loan(module):
            tracer = _trace(module, args, kwargs, names)
            found = [*extra_groups]
            for group in find_groups(tracer) if tracer is not None else []:
                pinned = any(fnmatchcase(name, pattern) for name in _all_names(group, names) for pattern in pin)
                if not pinned and not any(_overlap(group, other) for other in extra_groups):
                    found.append(group)
            groups = _tried(module, args, kwargs, found)
        tied = {name: other for name, other in names.items() if name != other}
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
        return self.groups[self._place(name)]

    @property
    def names(self) -> list[str]:
        """The groups' names: the layers that make their neurons, with a place where a layer makes several groups."""
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
        """A state whose neurons have changed places, see :func:`~lightning_fed.matching.permute_neurons`.

        Args:
            state: Entries of the module.
            orders: Which neuron comes to each place, int64, shape ``(neurons,)``.

        Raises:
            ValueError: If there is no such group, or the order does not fit it.

        """
        groups = [self[name] for name in orders]
        return self.tie(permute_neurons(state, groups, list(orders.values())))

    def slice(self, state: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state of the module that has some neurons only, see :func:`~lightning_fed.matching.slice_neurons`.

        Args:
            state: Entries of the module.
            kept: Which neurons, in the order that they are to have, int64, shape ``(kept,)``.

        Raises:
            ValueError: If there is no such group, it is not growable, or does not have these neurons.

        """
        places = [torch.arange(group.size) for group in self.groups]
        for name, own in kept.items():
            places[self._place(name)] = own
        return self.tie(slice_neurons(state, self.groups, places))

    def grow(
        self, state: Mapping[str, Tensor], sizes: Mapping[str, int], places: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The state of a wider module, with zeros for new neurons, see :func:`~lightning_fed.matching.grow_neurons`.

        Args:
            state: Entries of the module.
            sizes: Numbers of neurons.
            places: The place of each neuron in the wider module, int64, shape ``(neurons,)``; by default the first
                ones, as they are.

        Raises:
            ValueError: If there is no such group, it is not growable, or places do not fit it.

        """
        own = [torch.arange(group.size) for group in self.groups]
        for name, place in (places or {}).items():
            own[self._place(name)] = place
        return self.tie(grow_neurons(state, self.groups, own, self._sizes(sizes)))

    def features(
        self, state: Mapping[str, Tensor], name: str, roles: Sequence[Role] = ("out", "vec")
    ) -> dict[Axis, Tensor]:
        """What the neurons of a group have, to match them by, see :func:`~lightning_fed.matching.neuron_features`.

        Args:
            state: Entries of the module.
            name: Name of the group.
            roles: What of it.

        """
        return neuron_features(state, self[name], roles)

    def tie(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state with entries that are tied to an earlier one equal to it."""
        return {
            name: state[self.tied[name]] if self.tied.get(name) in state else value for name, value in state.items()
        }

    def _place(self, name: str) -> int:
        if name not in self.names:
            raise ValueError(f"Expected the name of a group, but got {name!r}; there are {self.names}.")
        return self.names.index(name)

    def _sizes(self, sizes: Mapping[str, int]) -> list[int]:
        for name in sizes:
            self._place(name)
        return [sizes.get(group.name, group.size) for group in self.groups]


def _trace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: Mapping[str, str]) -> Tracer | None:
    """Follows a module's neurons; ``None``, with a warning, if its operations cannot be read off."""
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    constants = {name: tensor for name, tensor in tensors.items() if name not in names}
    tracer = Tracer({name: tensors[name] for name in names}, {**RULES, **LAYERS})
    try:
        tracer.run(_exported(module, args, kwargs), names, constants)
    except Exception as error:  # a module that depends on its data, or on what only a Trainer gives it
        rank_zero_warn(
            "No neurons can change places but those of `extra_groups`: the module's operations cannot be read off."
            f" {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
        return None
    if _unused(module, names, tracer):
        module.train()
        with suppress(Exception):  # the warning that follows says what is left
            tracer.run(_exported(module, args, kwargs), names, constants)
        module.eval()
        used = {name.partition(".")[0] for name in _met(tracer)}
        children = dict.fromkeys(name.partition(".")[0] for name in _unused(module, names, tracer))
        left = [child for child in children if child not in used]
        if left:
            rank_zero_warn(
                f"What `forward` does not run is not known to read any neurons: {_some(left)}. If training feeds it"
                " features, name the layers that make these in `pin`."
            )
    return tracer


def _exported(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what is of no use here, such as the inner lists of recurrent layers
        return torch.export.export(module, args, kwargs, strict=False)


def _met(tracer: Tracer) -> set[str]:
    return {name for name, _ in tracer.axes} | set(tracer.elements)


def _unused(module: nn.Module, names: Mapping[str, str], tracer: Tracer) -> list[str]:
    """Parameters with several axes that have not been met."""
    met = _met(tracer)
    return [name for name, own in module.named_parameters() if own.ndim > 1 and names[name] not in met]


def _tried(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], groups: list[PermutationGroup]
) -> list[PermutationGroup]:
    """The groups that pass, growable where they can have more neurons; those that do not are named in a warning."""
    if not groups:
        return []
    try:
        trial = Trial(module, args, kwargs)
    except Exception as error:  # whatever the module raises
        rank_zero_warn(f"No neurons can change places: the module cannot be tried out. {type(error).__name__}: {error}")
        return []
    movers = trial.find_movers(groups)
    if movers:
        rank_zero_warn(
            f"Neurons of these layers stay where they are, because the module computes something else when they change"
            f" places: {_some([group.name for group in movers])}."
        )
    good = [group for group in groups if group not in movers]
    stiff = trial.find_stiff(good)
    return [replace(group, is_growable=group.is_growable and group not in stiff) for group in good]


def _all_names(group: PermutationGroup, names: Mapping[str, str]) -> list[str]:
    """Names of a group's entries, tied ones under all names."""
    own = {name for name, _ in group.entries}
    return [name for name, first in names.items() if first in own]


def _overlap(first: PermutationGroup, second: PermutationGroup) -> bool:
    return any(
        bool(torch.isin(entry.positions, second.entries[axis].positions).any())
        for axis, entry in first.entries.items()
        if axis in second.entries
    )


def _some(names: Sequence[str]) -> str:
    """The first few names."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
