"""Tensors of a module outside ``state_dict``, or added by a visit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fed.errors import OptionError
from lightning_fed.model.entries import tensor_slots
from lightning_fed.numerics.foreach import norms

_KINDS = ("_parameters", "_buffers", "_modules")


class UnsavedTensors:
    """Tensors without an entry, reset for every client so that no information passes from one visit to the next.

    Non-persistent buffers return to the values at the start of the round. Parameters without an entry must not change;
    only norms are compared, because a frozen backbone outside ``state_dict`` may be large. Tensors and layers added in
    a visit are removed after the visit, and restored after the round if all clients added equal tensors.
    """

    def __init__(self, module: nn.Module, names: Mapping[Tensor, str]) -> None:
        slots = {slot.tensor: slot for slot in reversed(tensor_slots(module)) if slot.tensor not in names}
        self._owner = type(module).__name__
        self._parameters = [slot for slot in slots.values() if isinstance(slot.tensor, nn.Parameter)]
        self._norms = self._current_norms()
        self._buffers = [(slot, slot.tensor.clone()) for slot in slots.values() if slot not in self._parameters]
        self._members = {layer: _members(layer) for layer in module.modules()}
        self._additions: dict[tuple[nn.Module, str], tuple[Any, bool]] = {}

    def changed(self) -> set[str]:
        """Returns the names of changed non-persistent buffers; refuses a changed parameter or persistent buffer."""
        changed = {
            path: attribute in vars(layer)["_non_persistent_buffers_set"]
            for (path, layer, attribute, _), before in self._buffers
            if _is_other(getattr(layer, attribute, None), before)
        }
        lengths = zip(self._parameters, self._norms, self._current_norms(), strict=True)
        changed |= {slot.path: False for slot, before, after in lengths if before != after and before == before}
        for path, is_declared in changed.items():
            if not is_declared:
                raise OptionError(
                    f"Expected `{self._owner}.state_dict()` to contain every tensor that changes in training, but "
                    f"{path!r} has changed and shares no memory with an entry: include the tensor in `state_dict`."
                )
        return set(changed)

    @torch.no_grad()
    def reset(self) -> None:
        """Removes the last visit's additions and restores the buffers; refuses different additions under one name."""
        differing = []
        for layer, before in self._members.items():
            for name, value in _members(layer).items():
                if value is None or before.get(name) is not None:
                    continue
                is_persistent = name not in vars(layer)["_non_persistent_buffers_set"]
                if name in before:
                    setattr(layer, name, None)
                else:
                    delattr(layer, name)
                first, _ = self._additions.setdefault((layer, name), (value, is_persistent))
                if not _are_alike(first, value):
                    self._additions[layer, name] = None, False
                    if is_persistent:
                        differing.append(f"{type(layer).__name__}.{name}")
        if differing:
            raise OptionError(
                f"Expected all clients to start from the same model, but training adds {differing[0]!r} with other "
                "values for another client: create the tensor or layer before `fit`, for example by a dry run (one "
                "batch through the module)."
            )
        for (_, layer, attribute, tensor), start in self._buffers:
            if getattr(layer, attribute, None) is not tensor:
                setattr(layer, attribute, tensor)
            tensor.copy_(start)

    def return_additions(self) -> None:
        """Restores the tensors and layers added in visits, after the round."""
        additions, self._additions = self._additions, {}
        for (layer, name), (value, is_persistent) in additions.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                layer.register_buffer(name, value, is_persistent)
            elif value is not None:
                setattr(layer, name, value)

    def _current_norms(self) -> list[float]:
        return [float(length) for length in norms(slot.tensor.detach() for slot in self._parameters)]


def _members(layer: nn.Module) -> dict[str, Any]:
    return {name: value for kind in _KINDS for name, value in vars(layer).get(kind, {}).items()}


def _is_other(value: object, before: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.shape != before.shape or value.dtype != before.dtype:
        return False  # a cache whose size changed
    return value.layout == torch.strided and not _is_equal(value, before)


def _is_equal(left: Tensor, right: Tensor) -> bool:
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def _are_alike(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if isinstance(first, nn.Module) and isinstance(second, nn.Module):
        first_state, second_state = first.state_dict(), second.state_dict()
        names = first_state.keys() | second_state.keys()
        return all(_are_alike(first_state.get(name), second_state.get(name)) for name in names)
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and first.dtype == second.dtype and _is_equal(first, second)
    return False
