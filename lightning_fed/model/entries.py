"""Names, policies and safe loading of a module's state dict entries.

Every entry of ``module.state_dict()`` has one policy:

- *shared*: sent to the client before training, returned after training, aggregated;
- *sliced*: shared, but each client requests and returns only some rows (FedSS);
- *personal*: stays on the client between rounds (FedPer, FedBN);
- *frozen*: never sent; clients have the server's values from the beginning, and start each training with these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from types import ModuleType
from typing import Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_fed.console import list_first
from lightning_fed.errors import OptionError
from lightning_fed.lazy_names import load_feature
from lightning_fed.messages import State
from lightning_fed.numerics.precision import as_real
from lightning_fed.numerics.trees import are_equal, copies, copy_into, differences, join, norms

Policy: TypeAlias = Literal["shared", "sliced", "personal", "frozen"]
Selector: TypeAlias = type[nn.Module] | str | Callable[[nn.Module], Iterable[str]]
"""Pattern for entry names (``"head.*"``, as in :mod:`fnmatch`), a module type for all entries in such modules, or a
function from the module to entry names.

Types come first: the command line tries the types in this order, and each class path is also a string.
"""

_MOST_MEAN_SQUARE = 1e10

# All batch normalization layers, including timm's subclasses.
BatchNorm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Slot(NamedTuple):
    """A parameter or buffer with the layer and attribute name. ``path`` is the name in ``named_parameters()``."""

    path: str
    layer: nn.Module
    attribute: str
    tensor: Tensor


def tensor_slots(module: nn.Module) -> list[Slot]:
    """Lists parameters and buffers with their layers, in ``named_modules()`` order. Tied tensors are repeated."""
    # `named_parameters(recurse=False)` is ten times slower.
    return [
        Slot(f"{path}.{name}" if path else name, layer, name, value)
        for path, layer in module.named_modules(remove_duplicate=False)
        for kind in ("_parameters", "_buffers")
        for name, value in getattr(layer, kind).items()
        if value is not None
    ]


def tensors_by_path(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by attribute path, each tensor once. Paths may differ from names in ``state_dict``."""
    paths = {slot.tensor: slot.path for slot in reversed(tensor_slots(module))}
    return {path: tensor for tensor, path in reversed(paths.items())}


def live_entries(module: nn.Module) -> State:
    """Maps state dict names to tensors in the module's memory. Writing to a tensor changes the module.

    A tensor with several names appears only under the first name. A complex tensor appears as pairs of real numbers,
    shape ``(..., 2)``. Extra state, and copies created by ``state_dict``, are excluded.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> _ = live_entries(layer)["bias"].fill_(3.0)
        >>> layer.bias.item()
        3.0
    """
    return {name: as_real(value) for name, value in _find_state(module)[0].items()}


def _find_state(module: nn.Module) -> tuple[State, dict[Tensor, str]]:
    state = {
        name: value
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor) and name.rpartition(".")[2] != "_extra_state" and not is_lazy(value)
    }
    memories, first = {name: _memory(value) for name, value in state.items()}, dict[object, str]()
    for name, memory in memories.items():
        if memory is not None and first.setdefault(memory, name) != name:  # a tied entry
            del state[name]
    slots = {slot.tensor: slot.path for slot in tensor_slots(module)}
    places = {tensor: _memory(tensor) for tensor in slots}
    unmatched = state.keys() - {first.get(place) for place in places.values()}
    if unmatched:
        second_state = module.state_dict()  # `state` is alive, so a copy has another address now
        for name in unmatched:
            if name not in second_state or _memory(second_state[name]) != memories[name]:
                del state[name]
    # Tensors without memory are found by name only.
    names = {tensor: slots[tensor] if place is None else first.get(place, "") for tensor, place in places.items()}
    return state, {tensor: name for tensor, name in names.items() if name in state}


def _memory(value: Tensor) -> tuple[int, torch.dtype, torch.Size, tuple[int, ...]] | None:
    # lazy, empty, meta and sparse tensors
    if is_lazy(value) or value.layout != torch.strided or not value.numel() or not value.data_ptr():
        return None
    return value.data_ptr(), value.dtype, value.shape, value.stride()


def entry_names(module: nn.Module) -> dict[Tensor, str]:
    """Maps each parameter and buffer to the tensor's name in ``state_dict()``.

    Tensors outside the state dict are excluded. If such a tensor requires gradients, ``ValueError`` is raised.
    """
    return _find_complete_state(module)[1]


def _find_complete_state(module: nn.Module) -> tuple[State, dict[Tensor, str]]:
    state, names = _find_state(module)
    missing = [slot.path for slot in tensor_slots(module) if slot.tensor.requires_grad and slot.tensor not in names]
    if missing:
        raise OptionError(
            f"Expected `{type(module).__name__}.state_dict()` to contain every parameter that trains, but "
            f"{list_first(missing)} shares no memory with an entry, so the server would never receive the parameter: "
            "return the parameter itself from `state_dict` (no copy, no view, no part), or disable its gradient "
            "(`requires_grad_(False)`)."
        )
    return state, names


def _entry_names(module: nn.Module) -> dict[Tensor, str]:
    return _find_state(module)[1]


def entry_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by entry name. Tied tensors appear under every name."""
    names = _entry_names(module)
    tensors = {name: tensor for tensor, name in reversed(names.items())}
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    return {name: tensors[first] for name, first in tied_names(state).items() if first in tensors}


def parameter_entries(module: nn.Module) -> dict[nn.Parameter, str]:
    """Maps each parameter to the name of the parameter's entry in ``state_dict()``."""
    names = entry_names(module)
    return {parameter: names[parameter] for parameter in module.parameters() if parameter in names}


def layer_entries(module: nn.Module, layer: nn.Module) -> list[str]:
    """Lists the state dict names of the parameters and buffers in ``layer``, a submodule."""
    names = _entry_names(module)
    return list(dict.fromkeys(names[slot.tensor] for slot in tensor_slots(layer) if slot.tensor in names))


def layer_prefixes(module: nn.Module) -> dict[nn.Module, str]:
    """Maps each layer to the prefix of the layer's entry names, for example ``"net.0."``."""
    names, prefixes = _entry_names(module), dict[nn.Module, str]()
    for slot in tensor_slots(module):
        if slot.tensor in names and names[slot.tensor].rpartition(".")[2] == slot.attribute:
            prefixes.setdefault(slot.layer, names[slot.tensor].removesuffix(slot.attribute))
    return prefixes


def check_entries(module: nn.Module, optimizers: Iterable[Optimizer] = ()) -> None:
    """Raises an error if the state dict lacks a tensor that the module or ``optimizers`` train.

    Also refuses lazy layers, tensors with overlapping memory, and running statistics missing from the state dict.
    """
    slots, owner = tensor_slots(module), type(module).__name__
    lazy = [slot.path for slot in slots if is_lazy(slot.tensor)]
    if lazy:
        raise OptionError(
            f"Expected parameters with a shape, but {list_first(lazy)} of {owner} is lazy: run the module once before "
            "`fit`, such as `module(batch)` with one batch, or specify the layer's sizes."
        )
    entries, names = _find_complete_state(module)
    missing = [
        slot.path
        for slot in slots
        if slot.layer.training
        and is_running_statistic(slot.attribute)
        and not is_running_statistic(names.get(slot.tensor, ""))
    ]
    if missing:
        raise OptionError(
            f"Expected `{owner}.state_dict()` to contain the running statistics of all layers in training mode, because"
            f" the server receives only entries in the state dict. Missing statistics: {list_first(missing)}. "
            "Include the buffers (no copies) in `state_dict` under names that end in `.running_mean` and "
            "`.running_var`, or put the layer in evaluation mode (`.eval()`)."
        )
    _check_optimizers(owner, optimizers, [*names, *entries.values()])
    _check_overlaps(owner, entries)


def _check_optimizers(owner: str, optimizers: Iterable[Optimizer], saved: Iterable[Tensor]) -> None:
    known = set(saved)
    memories = {_memory(tensor) for tensor in known}
    for optimizer in optimizers:
        for tensor in (tensor for group in optimizer.param_groups for tensor in group["params"]):
            if tensor.requires_grad and tensor.numel() and tensor not in known and _memory(tensor) not in memories:
                raise OptionError(
                    f"Expected {type(optimizer).__name__} to train tensors with an entry in `{owner}.state_dict()`, "
                    f"but a trained tensor of shape {tuple(tensor.shape)} has no entry, so the server would never "
                    "receive the tensor. Make the tensor an `nn.Parameter` of the module, put layers into attributes "
                    "or an `nn.ModuleList`, and write a loss with parameters as an `nn.Module`."
                )


def _check_overlaps(owner: str, entries: Mapping[str, Tensor]) -> None:
    storages: dict[int, list[tuple[int, int, str]]] = {}
    for name, value in entries.items():
        if _memory(value) is not None:
            span = value.data_ptr(), value.data_ptr() + _extent(value), name
            storages.setdefault(value.untyped_storage().data_ptr(), []).append(span)
    for spans in storages.values():
        spans.sort()
        if all(end <= start for (_, end, _), (start, _, _) in pairwise(spans)):
            continue
        names = [name for _, _, name in spans]
        marks = torch.full((max(end for _, end, _ in spans) - spans[0][0],), -1)  # one element per byte
        for number, (start, _, name) in enumerate(spans):
            value = entries[name]
            size = value.element_size()
            place = marks.as_strided(
                (*value.shape, size), (*(size * stride for stride in value.stride()), 1), start - spans[0][0]
            )
            if place.max() >= 0:
                raise OptionError(
                    f"Expected every entry of `{owner}.state_dict()` to have separate memory, but"
                    f" {names[int(place.max())]!r} and {name!r} overlap: save only one of them"
                    " (`register_buffer(..., persistent=False)`), or tie whole tensors."
                )
            place.fill_(number)


def _extent(value: Tensor) -> int:
    steps = ((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    # bytes from the first to the last element in memory
    return (sum(steps) + 1) * value.element_size()


def trainable_entries(module: nn.Module) -> frozenset[str]:
    """Entry names of parameters that require gradients."""
    return frozenset(name for parameter, name in parameter_entries(module).items() if parameter.requires_grad)


def untrained_entries(module: nn.Module) -> frozenset[str]:
    """Names of parameters and buffers that optimizers and BatchNorm updates leave unchanged.

    These are parameters without gradients, and buffers in layers in evaluation mode. The module's own code may still
    change these tensors.
    """
    names = entry_names(module)
    untrained: set[Tensor] = {parameter for parameter in module.parameters() if not parameter.requires_grad}
    for layer in module.modules():
        if not layer.training:
            untrained.update(layer.buffers(recurse=False))
    return frozenset(name for tensor, name in names.items() if tensor in untrained) - trainable_entries(module)


def identical_entries(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of entries with equal values, dtype, shape and device in both states."""
    common = [name for name in left if name in right]
    same = {name for name in common if left[name] is right[name]}
    alike = [name for name in common if name not in same and _form(left[name]) == _form(right[name])]
    flags = are_equal([left[name] for name in alike], [right[name] for name in alike])
    return frozenset(same.union(name for name, flag in zip(alike, flags, strict=True) if flag))


def _form(value: Tensor) -> tuple[torch.dtype, torch.Size, torch.device]:
    return value.dtype, value.shape, value.device


def tied_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Maps each entry name to the name of the first entry with the same memory (tied tensors)."""
    first: dict[object, str] = {}
    memories = {name: _memory(value) for name, value in state.items()}
    return {name: name if key is None else first.setdefault(key, name) for name, key in memories.items()}


def copy_state(state: Mapping[str, Tensor]) -> State:
    """Copies the tensors in a state, each with separate memory."""
    return {name: value.detach().clone() for name, value in state.items()}


def copy_adjacent(state: Mapping[str, Tensor]) -> State:
    """Copies all tensors into one storage. Do not pickle the copies: each pickled tensor contains the whole storage."""
    return dict(zip(state, copies(list(state.values())), strict=True))


@torch.no_grad()
def load_entries(entries: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copies ``state`` into a module's tensors. A wrong name, shape or dtype raises ``ValueError`` before any write."""
    fault = find_fault(state, {name: entries[name] for name in state if name in entries})
    if fault is not None:
        raise ValueError(f"The state cannot be loaded: {fault}.")
    copy_into([entries[name] for name in state], list(state.values()))


def find_fault(state: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> str | None:
    """Describes the first difference from ``reference`` in names, shapes or dtypes; ``None`` without a difference."""
    missing = [name for name in reference if name not in state]
    if missing:
        return f"missing entries: {list_first(missing)}"
    unexpected = [name for name in state if name not in reference]
    if unexpected:
        return f"unexpected entries: {list_first(unexpected)}"
    for name, value in state.items():
        expected = reference[name]
        if value.shape != expected.shape:
            return f"entry {name!r} has shape {tuple(value.shape)} instead of {tuple(expected.shape)}"
        if value.dtype != expected.dtype:
            return f"entry {name!r} has dtype {value.dtype} instead of {expected.dtype}"
    return None


@torch.no_grad()
def find_non_finite(state: Mapping[str, Tensor]) -> str | None:
    """Describes the first entry with NaN or infinite values; ``None`` if all values are finite."""
    names = [name for name, value in state.items() if value.is_floating_point() or value.is_complex()]
    # A norm only reads memory; `isfinite` writes as well. A norm is also infinite for too large finite values.
    if not names or math.isfinite(norm(flat for (flat,) in join([state[name] for name in names]))):
        return None
    fault = next((name for name in names if not state[name].isfinite().all()), None)
    return None if fault is None else f"entry {fault!r} has NaN or infinite values"


@torch.no_grad()
def find_implausible(state: Mapping[str, Tensor]) -> str | None:
    """Describes the first fault in a state dict, or returns ``None``.

    Faults are NaN, infinities, a root mean square above 1e10, and negative running variances or batch counts.
    """
    values = [value for value in state.values() if value.is_floating_point() or value.is_complex()]
    root = float(norm(flat for (flat,) in join(values))) / max(1, sum(value.numel() for value in values)) ** 0.5
    # Close to the largest finite number, a forward pass only overflows for some inputs. A fault would reveal the input.
    if not root <= _MOST_MEAN_SQUARE:
        excess = f"the root mean square of all values is {root:.3g}, but the limit is {_MOST_MEAN_SQUARE:.3g}"
        return find_non_finite(state) or excess
    kinds = ("running_var", "num_batches_tracked")
    statistics = {name: value for name, value in state.items() if name.rpartition(".")[2] in kinds and value.numel()}
    if not statistics:
        return None
    lowest = [flat.min().float() for (flat,) in join(list(statistics.values()))]
    if float(torch.stack([value.to(lowest[0].device) for value in lowest]).min()) >= 0:
        return None
    return f"entry {next(name for name, value in statistics.items() if value.min() < 0)!r} is negative"


def norm(tensors: Iterable[Tensor]) -> Tensor:
    """Euclidean norm of all tensors together, shape ``()``."""
    parts = norms(tensors)
    if not parts:
        return torch.tensor(0.0)
    if len(parts) == 1:
        return parts[0]
    length: Tensor = torch.linalg.vector_norm(torch.stack([part.to(parts[0].device) for part in parts]))
    return length


def distance(new: Mapping[str, Tensor], old: Mapping[str, Tensor], names: Iterable[str]) -> float | None:
    """Euclidean distance between two models over the named entries. Entries of different shape are ignored."""
    common = [name for name in names if name in new and name in old and new[name].shape == old[name].shape]
    steps = differences([new[name] for name in common], [old[name] for name in common])
    return float(norm(steps)) if common else None


def entry_policies(
    module: nn.Module,
    personal: Sequence[Selector] = (),
    frozen: Sequence[Selector] = (),
) -> dict[str, Policy]:
    """Maps each parameter and buffer to ``"shared"``, ``"personal"`` or ``"frozen"``.

    ``personal`` and ``frozen`` select tensors by name pattern or module type.

    Raises:
        ValueError: If a selector matches nothing, or a tensor is both personal and frozen.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        >>> policies = entry_policies(net, personal=[nn.BatchNorm1d])
        >>> policies["0.weight"], policies["1.running_mean"]
        ('shared', 'personal')
    """
    names = list(live_entries(module))
    is_personal = select_entries(module, names, personal, "personal")
    is_frozen = select_entries(module, names, frozen, "frozen")
    both = sorted(is_personal & is_frozen)
    if both:
        raise OptionError(f"Expected an entry to be personal or frozen, but these are both: {list_first(both)}.")
    return {name: "personal" if name in is_personal else "frozen" if name in is_frozen else "shared" for name in names}


def select_entries(module: nn.Module, names: Iterable[str], selectors: Sequence[Selector], option: str) -> set[str]:
    """Returns the names of parameters and buffers that match any :data:`Selector`.

    ``option`` is the name of the user's option for error messages.

    Raises:
        ValueError: If a selector matches nothing, or a tied tensor by a later name or layer, but not by the first.
    """
    names = list(names)
    tied = tied_names({name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)})
    later = {name: first for name, first in tied.items() if first in names and name != first}
    matched: set[str] = set()
    for selector in selectors:
        if isinstance(selector, str):
            selected = {name for name in (*names, *later) if fnmatchcase(name, selector)}
        elif not isinstance(selector, type):
            selected = set(selector(module)).intersection((*names, *later))
        else:
            entries, slots = _entry_names(module), tensor_slots(module)
            inner = {layer for child in module.modules() if isinstance(child, selector) for layer in child.modules()}
            selected = {entries.get(slot.tensor, "") for slot in slots if slot.layer in inner}.intersection(names)
            first_layers = {entries.get(slot.tensor, ""): slot.layer for slot in reversed(slots)}
            for name, layer in first_layers.items():
                if name in selected and layer not in inner:
                    raise OptionError(
                        f"Expected a layer type in `{option}` to match the first layer with a tied tensor, but "
                        f"{selector.__name__} matches only a later layer with the tied tensor {name!r}: use the "
                        f"first layer's type, {type(layer).__name__}, or the name of the tensor."
                    )
        if not selected:
            raise OptionError(
                f"Expected every selector in `{option}` to match entries of the model, but {selector!r} matches none of"
                f" {list_first(names)}."
            )
        matched |= selected
    for name in sorted(matched.intersection(later)):
        if later[name] not in matched:
            raise OptionError(
                f"Expected `{option}` to match a tied tensor by its first name in the state dict, but the option "
                f"matches only the later name {name!r}: use {later[name]!r}."
            )
    return matched.difference(later)


def check_selectors(name: str, selectors: object) -> tuple[Selector, ...]:
    """Checks a user's list of selectors (:data:`Selector`), and returns the list as a tuple."""
    if isinstance(selectors, str) or not isinstance(selectors, Iterable):
        raise ValueError(f"Expected `{name}` to be a list, such as ['head.*', nn.BatchNorm2d], but got {selectors!r}.")
    checked = tuple(selectors)
    for selector in checked:
        if isinstance(selector, nn.Module) or not (isinstance(selector, str) or callable(selector)):
            raise ValueError(
                f"Expected `{name}` to be a list of name patterns ('head.*'), module types (nn.BatchNorm2d) and "
                f"functions, but it contains {selector!r}."
            )
    return checked


def batch_norm_statistics(module: nn.Module) -> set[str]:
    """Names of entries with running statistics (mean, variance, counter) in BatchNorm layers."""
    names = _entry_names(module)
    return {
        names[getattr(layer, attribute)]
        for layer in module.modules()
        if isinstance(layer, BatchNorm)
        for attribute in ("running_mean", "running_var", "num_batches_tracked")
        if getattr(layer, attribute) in names
    }


def batch_norm_layers(module: nn.Module) -> dict[str, nn.BatchNorm2d]:
    """Returns BatchNorm layers with running statistics by layer name, such as ``"1"``."""
    layers = {
        # All kinds have the same attributes, but no public base class.
        path: cast("nn.BatchNorm2d", layer)
        for path, layer in module.named_modules()
        if isinstance(layer, BatchNorm) and layer.running_mean is not None
    }
    prefixes = layer_prefixes(module) if layers else {}
    return {prefixes.get(layer, f"{path}.").removesuffix("."): layer for path, layer in layers.items()}


def freeze_batch_norm(module: nn.Module) -> None:
    """Sets all BatchNorm layers to evaluation mode, so running statistics stay constant in training."""
    for layer in batch_norm_layers(module).values():
        layer.eval()


def thaw_batch_norm(module: nn.Module) -> None:
    """Sets each BatchNorm layer to the parent module's mode (training or evaluation)."""
    for parent in module.modules():
        for child in parent.children():
            if isinstance(child, BatchNorm):
                child.train(parent.training)


def find_measurement(module: nn.Module) -> ModuleType | None:
    """Imports the code that measures BatchNorm statistics, if ``module`` has such statistics."""
    return load_feature("lightning_fed.batch_norm.measurement") if batch_norm_layers(module) else None


def is_running_statistic(name: str) -> bool:
    """True if an entry name ends in ``running_mean`` or ``running_var``."""
    return name.rpartition(".")[2] in ("running_mean", "running_var")
